//! The router: scores, group-limited top-k, and the weights of the chosen experts (DeepSeek-V3,
//! arXiv 2412.19437, section 2.1.2). All in f32, whatever the model's precision.

mod kernels;

use cubecl::{
    CubeCount, CubeDim,
    client::Client,
    ir::{ElemType, FloatKind, UIntKind},
};

use crate::{DeviceTensor, KernelError, check, launch};

/// What makes scores of logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreFunction {
    /// Each expert on its own: `1 / (1 + exp(-logit))`.
    Sigmoid,
    /// Over all experts of a token.
    Softmax,
}

/// How many experts a token chooses, and from which groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TopK {
    /// Experts per token.
    pub k: usize,
    /// Groups that the experts are divided into, in order of their ids; 1 means no groups.
    pub groups: usize,
    /// Groups a token may choose from: those with the largest sum of their two best biased scores.
    pub kept_groups: usize,
}

/// What a router does beside its matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterOptions {
    /// What makes scores of logits.
    pub score_function: ScoreFunction,
    /// Experts per token and groups.
    pub top_k: TopK,
    /// Whether the weights of a token are divided by their sum, plus 1e-20.
    pub normalize: bool,
    /// Factor on the weights, after that.
    pub scaling_factor: f32,
}

/// The choice of experts.
#[derive(Debug, Clone)]
pub struct Routed {
    /// `[T, E]`, f32.
    pub scores: DeviceTensor,
    /// `[T, K]`, `u32`, best first.
    pub ids: DeviceTensor,
    /// `[T, K]`, f32.
    pub weights: DeviceTensor,
}

/// From logits to weights: [`scores`], [`select_experts`] and [`expert_weights`].
///
/// - `logits`: `[T, E]`, f32
/// - `bias`: `[E]`, f32; zero where there is none
///
/// # Errors
/// [`KernelError`] when shapes, element types or options are others than these allow.
pub fn route(
    client: &Client,
    logits: &DeviceTensor,
    bias: Option<&DeviceTensor>,
    options: &RouterOptions,
) -> Result<Routed, KernelError> {
    let [_, experts] = matrix("logits", logits, F32)?;
    let none;
    let bias = match bias {
        Some(bias) => bias,
        None => {
            none = DeviceTensor::from_data(client, &vec![0.0f32; experts], [experts])?;
            &none
        }
    };
    let scores = scores(client, logits, options.score_function)?;
    let ids = select_experts(client, &scores, bias, options.top_k)?;
    let weights = expert_weights(
        client,
        &scores,
        &ids,
        options.normalize,
        options.scaling_factor,
    )?;
    Ok(Routed {
        scores,
        ids,
        weights,
    })
}

/// Scores of logits, both `[T, E]`, f32.
///
/// # Errors
/// [`KernelError`] when `logits` has another rank or element type.
pub fn scores(
    client: &Client,
    logits: &DeviceTensor,
    function: ScoreFunction,
) -> Result<DeviceTensor, KernelError> {
    let [tokens, experts] = matrix("logits", logits, F32)?;
    let out = DeviceTensor::empty(client, [tokens, experts], F32);
    if out.is_empty() {
        return Ok(out);
    }
    match function {
        ScoreFunction::Sigmoid => {
            let (cubes, dim) = launch::elementwise(client, out.len());
            // SAFETY: the kernel reads and writes inside of the buffers.
            unsafe {
                kernels::sigmoid::launch_unchecked(
                    client,
                    cubes,
                    dim,
                    logits.arg(),
                    out.arg(),
                    out.len(),
                );
            }
        }
        ScoreFunction::Softmax => {
            let grid = Grid::new(client, tokens, usize::MAX);
            // SAFETY: as above.
            unsafe {
                kernels::softmax::launch_unchecked(
                    client,
                    grid.cubes,
                    grid.dim,
                    logits.arg(),
                    out.arg(),
                    tokens as u32,
                    experts as u32,
                    grid.along,
                    grid.beside,
                );
            }
        }
    }
    Ok(out)
}

/// Experts of each token, best first: top-k of `scores + bias` within the kept groups. Ties go to
/// the lowest id; NaN counts as minus infinity. Experts of the other groups cannot be chosen,
/// however low the scores are, and no expert is chosen twice.
///
/// - `scores`: `[T, E]`, f32
/// - `bias`: `[E]`, f32
/// - result: `[T, K]`, `u32`
///
/// # Errors
/// [`KernelError`] when shapes or element types are others than these, when the groups do not
/// divide the experts, when the kept groups hold fewer than `k` experts, or when the device has
/// too little shared memory for so many experts.
pub fn select_experts(
    client: &Client,
    scores: &DeviceTensor,
    bias: &DeviceTensor,
    top_k: TopK,
) -> Result<DeviceTensor, KernelError> {
    let [tokens, experts] = matrix("scores", scores, F32)?;
    if bias.dtype() != F32 {
        return Err(wrong_dtype("bias", bias, "f32"));
    }
    check::shape("bias", bias, &[experts], "[E]")?;
    check_top_k(experts, top_k)?;
    let TopK {
        k,
        groups,
        kept_groups,
    } = top_k;
    check::fits_u32("k", tokens * k)?;
    let ids = DeviceTensor::empty(client, [tokens, k], U32);
    if ids.is_empty() {
        return Ok(ids);
    }
    // Few different capacities, for each is another kernel.
    let capacity = experts.next_power_of_two();
    let group_capacity = groups.next_power_of_two();
    // Besides the experts' keys: those of groups, and whether each is kept.
    let words = capacity + 2 * group_capacity;
    let grid = Grid::new(client, tokens, words);
    let bytes = 4 * grid.beside as usize * (words + 2 * grid.along as usize);
    if bytes > client.properties().hardware.max_shared_memory_size {
        return Err(KernelError::Unsupported {
            feature: format!("{bytes} bytes of shared memory, as {experts} experts need"),
            device: client.name(),
        });
    }
    // SAFETY: the kernel reads and writes inside of the buffers.
    unsafe {
        kernels::select::launch_unchecked(
            client,
            grid.cubes,
            grid.dim,
            scores.arg(),
            bias.arg(),
            ids.arg(),
            tokens as u32,
            experts as u32,
            groups as u32,
            kept_groups as u32,
            k as u32,
            capacity,
            group_capacity,
            grid.along,
            grid.beside,
            kept_groups < groups,
        );
    }
    Ok(ids)
}

/// Weights of the chosen experts: their scores, without bias, if `normalize` divided by their sum
/// plus 1e-20, times `scaling_factor`.
///
/// - `scores`: `[T, E]`, f32
/// - `ids`: `[T, K]`, `u32` or `i32`; ids that are not in `0..E` get weight 0
/// - result: `[T, K]`, f32
///
/// # Errors
/// [`KernelError`] when shapes or element types are others than these.
pub fn expert_weights(
    client: &Client,
    scores: &DeviceTensor,
    ids: &DeviceTensor,
    normalize: bool,
    scaling_factor: f32,
) -> Result<DeviceTensor, KernelError> {
    let [tokens, experts] = matrix("scores", scores, F32)?;
    check::index("ids", ids)?;
    let &[id_tokens, k] = ids.shape() else {
        return Err(wrong_shape("ids", ids, "[T, K]"));
    };
    check::shape("ids", ids, &[tokens, k], "[T, K]")?;
    check::fits_u32("ids", id_tokens * k)?;
    let weights = DeviceTensor::empty(client, [tokens, k], F32);
    if weights.is_empty() {
        return Ok(weights);
    }
    let (cubes, dim) = launch::elementwise(client, tokens);
    // SAFETY: the kernel reads and writes inside of the buffers.
    unsafe {
        kernels::weights::launch_unchecked(
            client,
            cubes,
            dim,
            scores.arg(),
            ids.arg(),
            weights.arg(),
            tokens as u32,
            experts as u32,
            k as u32,
            scaling_factor,
            normalize,
        );
    }
    Ok(weights)
}

const F32: ElemType = ElemType::Float(FloatKind::F32);
const U32: ElemType = ElemType::UInt(UIntKind::U32);

/// Units that share a token.
const ALONG: u32 = 32;

/// Words of shared memory that the tokens of a cube may take together.
const WORDS: usize = 2048;

/// Cubes whose units along x share a token, with several tokens beside each other along y.
struct Grid {
    cubes: CubeCount,
    dim: CubeDim,
    along: u32,
    beside: u32,
}

impl Grid {
    /// For kernels that keep `words` in shared memory for a token.
    fn new(client: &Client, tokens: usize, words: usize) -> Self {
        let along = launch::sharing_units(client, ALONG);
        let most = client.properties().hardware.max_units_per_cube / along;
        let fitting = (WORDS / words.min(WORDS)) as u32;
        let beside = most.min(8).min(fitting).min(tokens as u32).max(1);
        Self {
            cubes: launch::cubes(client, tokens.div_ceil(beside as usize)),
            dim: CubeDim::new_2d(along, beside),
            along,
            beside,
        }
    }
}

fn check_top_k(experts: usize, top_k: TopK) -> Result<(), KernelError> {
    let TopK {
        k,
        groups,
        kept_groups,
    } = top_k;
    let refuse = |argument, value: usize, allowed| {
        Err(KernelError::Value {
            argument,
            value: value.to_string(),
            allowed,
        })
    };
    if groups == 0 || !experts.is_multiple_of(groups) {
        return refuse("groups", groups, format!("divisors of {experts} experts"));
    }
    if !(1..=groups).contains(&kept_groups) {
        return refuse("kept_groups", kept_groups, format!("1 to {groups} groups"));
    }
    let most = experts / groups * kept_groups;
    if k > most {
        return refuse(
            "k",
            k,
            format!("at most {most}, the experts of kept groups"),
        );
    }
    Ok(())
}

fn matrix(
    argument: &'static str,
    tensor: &DeviceTensor,
    dtype: ElemType,
) -> Result<[usize; 2], KernelError> {
    if tensor.dtype() != dtype {
        return Err(wrong_dtype(argument, tensor, "f32"));
    }
    let &[rows, columns] = tensor.shape() else {
        return Err(wrong_shape(argument, tensor, "[T, E]"));
    };
    check::fits_u32(argument, tensor.len())?;
    Ok([rows, columns])
}

fn wrong_shape(argument: &'static str, tensor: &DeviceTensor, allowed: &str) -> KernelError {
    KernelError::Shape {
        argument,
        shape: tensor.shape().to_vec(),
        allowed: allowed.into(),
    }
}

fn wrong_dtype(argument: &'static str, tensor: &DeviceTensor, allowed: &str) -> KernelError {
    KernelError::Dtype {
        argument,
        dtype: tensor.dtype(),
        allowed: allowed.into(),
    }
}
