use cubecl::{
    client::Client,
    ir::{AddressType, DeviceProperties},
};
use serde::{Deserialize, Serialize};

use super::tile::{TileSpec, vector_size};
use crate::{DeviceTensor, ExpertWeights, KernelError, check};

/// A grouped product that is ready to run: checked arguments and allocated outputs.
///
/// The operations of [`matmul`](crate::matmul) make and [`run`](Self::run) one at once; a
/// [`TileQueue`](crate::queue::TileQueue) runs two together, with the fixed tile of the urgent one.
#[derive(Debug, Clone)]
pub struct Problem {
    pub(crate) product: Product,
    pub(crate) lhs: DeviceTensor,
    pub(crate) rhs: DeviceTensor,
    pub(crate) rhs_replicas: Option<DeviceTensor>,
    pub(crate) out: DeviceTensor,
    /// The activation of [`Product::SwiGlu`], the replicas' gradients of
    /// [`Product::WeightGrad`].
    pub(crate) out_second: Option<DeviceTensor>,
    pub(crate) offsets: DeviceTensor,
    pub(crate) sizes: Sizes,
}

/// Which product, and so which dimension is walked: see [`Sizes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Product {
    /// `x [N, K] * w[e] [K, M]`.
    Forward,
    /// As `Forward`, with gate and up columns of a tile side by side, and the activation.
    SwiGlu,
    /// `grad [N, M] * w[e]^T`.
    DataGrad,
    /// `x^T * grad` over the rows of each expert.
    WeightGrad,
}

/// `x` has `rows` rows; experts' weights are `[inner, outer]` (`K` and `M`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub rows: usize,
    pub inner: usize,
    pub outer: usize,
    /// Experts in the first weight buffer.
    pub home: usize,
    /// Experts in both.
    pub experts: usize,
}

impl Problem {
    /// What [`grouped_matmul`](crate::matmul::grouped_matmul) computes.
    ///
    /// # Errors
    /// The same.
    pub fn matmul(
        client: &Client,
        x: &DeviceTensor,
        weights: &ExpertWeights,
        offsets: &DeviceTensor,
    ) -> Result<Self, KernelError> {
        let sizes = Sizes::of_weights("x", x, 0, weights, offsets)?;
        let out = DeviceTensor::empty(client, [sizes.rows, sizes.outer], x.dtype());
        Self::new(
            client,
            Product::Forward,
            x,
            weights,
            out,
            None,
            offsets,
            sizes,
        )
    }

    /// What [`grouped_swiglu`](crate::matmul::grouped_swiglu) computes.
    ///
    /// # Errors
    /// The same.
    pub fn swiglu(
        client: &Client,
        x: &DeviceTensor,
        gate_up: &ExpertWeights,
        offsets: &DeviceTensor,
    ) -> Result<Self, KernelError> {
        let sizes = Sizes::of_weights("x", x, 0, gate_up, offsets)?;
        if !sizes.outer.is_multiple_of(2) {
            return Err(KernelError::Shape {
                argument: "gate_up",
                shape: gate_up.home().shape().to_vec(),
                allowed: "[L, D, 2F]: an even last dimension".into(),
            });
        }
        let hidden = DeviceTensor::empty(client, [sizes.rows, sizes.outer], x.dtype());
        let activation = DeviceTensor::empty(client, [sizes.rows, sizes.outer / 2], x.dtype());
        Self::new(
            client,
            Product::SwiGlu,
            x,
            gate_up,
            hidden,
            Some(activation),
            offsets,
            sizes,
        )
    }

    /// What [`grouped_matmul_data_grad`](crate::matmul::grouped_matmul_data_grad) computes.
    ///
    /// # Errors
    /// The same.
    pub fn data_grad(
        client: &Client,
        grad: &DeviceTensor,
        weights: &ExpertWeights,
        offsets: &DeviceTensor,
    ) -> Result<Self, KernelError> {
        let sizes = Sizes::of_weights("grad", grad, 1, weights, offsets)?;
        let out = DeviceTensor::empty(client, [sizes.rows, sizes.inner], grad.dtype());
        Self::new(
            client,
            Product::DataGrad,
            grad,
            weights,
            out,
            None,
            offsets,
            sizes,
        )
    }

    /// What [`grouped_matmul_weight_grad`](crate::matmul::grouped_matmul_weight_grad) computes.
    ///
    /// # Errors
    /// The same.
    pub fn weight_grad(
        client: &Client,
        x: &DeviceTensor,
        grad: &DeviceTensor,
        offsets: &DeviceTensor,
        out: &ExpertWeights,
    ) -> Result<Self, KernelError> {
        let sizes = Sizes::of_weights("x", x, 0, out, offsets)?;
        check::shape("grad", grad, &[sizes.rows, sizes.outer], "[N, M]")?;
        check::same_dtype("grad", grad, x)?;
        let problem = Self {
            product: Product::WeightGrad,
            lhs: x.clone(),
            rhs: grad.clone(),
            rhs_replicas: None,
            out: out.home().clone(),
            out_second: out.replicas().cloned(),
            offsets: offsets.clone(),
            sizes,
        };
        problem.check_addresses(client)?;
        Ok(problem)
    }

    /// The product; the hidden values of [`swiglu`](Self::swiglu); the home gradients of
    /// [`weight_grad`](Self::weight_grad).
    pub fn output(&self) -> &DeviceTensor {
        &self.out
    }

    /// The activation of [`swiglu`](Self::swiglu), the replicas' gradients of
    /// [`weight_grad`](Self::weight_grad).
    pub fn second_output(&self) -> Option<&DeviceTensor> {
        self.out_second.as_ref()
    }

    #[allow(clippy::too_many_arguments, reason = "fills the struct")]
    fn new(
        client: &Client,
        product: Product,
        lhs: &DeviceTensor,
        weights: &ExpertWeights,
        out: DeviceTensor,
        out_second: Option<DeviceTensor>,
        offsets: &DeviceTensor,
        sizes: Sizes,
    ) -> Result<Self, KernelError> {
        let problem = Self {
            product,
            lhs: lhs.clone(),
            rhs: weights.home().clone(),
            rhs_replicas: weights.replicas().cloned(),
            out,
            out_second,
            offsets: offsets.clone(),
            sizes,
        };
        problem.check_addresses(client)?;
        Ok(problem)
    }

    /// Whether nothing would be written.
    pub(crate) fn is_empty(&self) -> bool {
        self.sizes.rows == 0 || self.sizes.experts == 0 || self.tile_area() == 0
    }

    fn tile_area(&self) -> usize {
        match self.product {
            Product::Forward | Product::SwiGlu => self.sizes.outer,
            Product::DataGrad => self.sizes.inner,
            Product::WeightGrad => self.sizes.inner * self.sizes.outer,
        }
    }

    /// Widest vectors that this problem's rows divide into.
    pub(crate) fn vector_size(&self, properties: &DeviceProperties) -> usize {
        let outer = match self.product {
            Product::SwiGlu => self.sizes.outer / 2,
            _ => self.sizes.outer,
        };
        vector_size(properties, self.lhs.dtype(), &[self.sizes.inner, outer])
    }

    pub(crate) fn mean_rows(&self) -> usize {
        match self.product {
            Product::WeightGrad => self.sizes.inner,
            _ => self.sizes.rows / self.sizes.experts.max(1),
        }
    }

    /// Tiles in the direction of columns.
    pub(crate) fn column_tiles(&self, spec: &TileSpec) -> usize {
        match self.product {
            Product::SwiGlu => (self.sizes.outer / 2).div_ceil(spec.columns() / 2),
            Product::Forward | Product::WeightGrad => self.sizes.outer.div_ceil(spec.columns()),
            Product::DataGrad => self.sizes.inner.div_ceil(spec.columns()),
        }
    }

    /// Tiles in the direction of rows of an expert that has rows, where that is the same for all.
    pub(crate) fn fixed_row_tiles(&self, spec: &TileSpec) -> Option<usize> {
        (self.product == Product::WeightGrad).then(|| self.sizes.inner.div_ceil(spec.rows()))
    }

    /// At least as many tiles as the offsets can ask for.
    pub(crate) fn most_tiles(&self, spec: &TileSpec) -> usize {
        let busy = self.sizes.experts.min(self.sizes.rows);
        let row_tiles = match self.fixed_row_tiles(spec) {
            Some(tiles) => tiles * busy,
            // Each expert wastes less than a tile.
            None => self.sizes.rows.div_ceil(spec.rows()) + busy,
        };
        row_tiles * self.column_tiles(spec)
    }

    /// Type of indices into the largest buffer.
    pub(crate) fn address_type(&self) -> AddressType {
        let buffers = [&self.lhs, &self.rhs, &self.out].into_iter();
        let longest = buffers
            .chain(&self.rhs_replicas)
            .chain(&self.out_second)
            .map(DeviceTensor::len)
            .max();
        AddressType::from_len(longest.unwrap_or(0))
    }

    fn check_addresses(&self, client: &Client) -> Result<(), KernelError> {
        check::float(client, "x", &self.lhs)?;
        if client.features().supports_address(self.address_type()) {
            return Ok(());
        }
        Err(KernelError::Unsupported {
            feature: "64-bit addresses, and a tensor has too many elements for 32 bits".into(),
            device: client.name(),
        })
    }
}

impl Sizes {
    /// Checks rows, weights and offsets against each other. Dimension `inner_outer` of the
    /// weights (0: `K`, 1: `M`) is the width of `rows`.
    fn of_weights(
        argument: &'static str,
        rows: &DeviceTensor,
        inner_outer: usize,
        weights: &ExpertWeights,
        offsets: &DeviceTensor,
    ) -> Result<Self, KernelError> {
        let [home, inner, outer] = weights.sizes();
        let width = [inner, outer][inner_outer];
        if rows.shape().len() != 2 || rows.shape()[1] != width {
            return Err(KernelError::Shape {
                argument,
                shape: rows.shape().to_vec(),
                allowed: format!("[N, {width}], as the weights are [experts, {inner}, {outer}]"),
            });
        }
        check::same_dtype(argument, rows, weights.home())?;
        let experts = weights.experts();
        check::shape("offsets", offsets, &[experts + 1], "[experts + 1]")?;
        check::index("offsets", offsets)?;
        let count = rows.shape()[0];
        check::fits_u32("N", count)?;
        Ok(Self {
            rows: count,
            inner,
            outer,
            home,
            experts,
        })
    }
}
