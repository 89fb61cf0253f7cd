use cubecl::ir::{DeviceProperties, ElemType, FloatKind, features::MmaConfig};

/// How a cube computes one tile of an output: fixed when the kernel is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TileSpec {
    /// Elements of a vector, in device memory and in the stages.
    pub vector: usize,
    /// Depth of a stage, in elements: a multiple of `vector`, and of 16 for fragments.
    pub depth: usize,
    /// Stages that are filled in turn.
    pub buffers: usize,
    pub transfer: Transfer,
    pub engine: Engine,
}

/// How operands come from device memory to their stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Transfer {
    /// Through registers: with two buffers, the next stage is read while one is computed.
    Registers,
    /// Straight to their stages, one less than there are buffers ahead of the one that is computed: by
    /// the device's asynchronous copies, or by plain ones, for tests where there are none. Only
    /// operands that are staged as they lie, or element by element, and for asynchronous copies in their own type.
    Ahead { asynchronous: bool },
}

/// What multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Engine {
    /// Each unit keeps `m * n` vectors of the tile in registers, over a grid of units.
    Registers {
        units_m: usize,
        units_n: usize,
        vectors_m: usize,
        vectors_n: usize,
    },
    /// Each plane keeps `m * n` fragments of 16 by 16 on tensor cores, over a grid of planes.
    Fragments {
        plane: usize,
        planes_m: usize,
        planes_n: usize,
        fragments_m: usize,
        fragments_n: usize,
    },
}

/// Edge of a tensor-core fragment, in all three directions.
pub(crate) const FRAGMENT: usize = 16;

impl TileSpec {
    /// Rows of a tile.
    pub fn rows(&self) -> usize {
        match self.engine {
            Engine::Registers {
                units_m, vectors_m, ..
            } => units_m * vectors_m * self.vector,
            Engine::Fragments {
                planes_m,
                fragments_m,
                ..
            } => planes_m * fragments_m * FRAGMENT,
        }
    }

    /// Columns of a tile.
    pub fn columns(&self) -> usize {
        match self.engine {
            Engine::Registers {
                units_n, vectors_n, ..
            } => units_n * vectors_n * self.vector,
            Engine::Fragments {
                planes_n,
                fragments_n,
                ..
            } => planes_n * fragments_n * FRAGMENT,
        }
    }

    /// Units of a cube.
    pub fn units(&self) -> usize {
        match self.engine {
            Engine::Registers {
                units_m, units_n, ..
            } => units_m * units_n,
            Engine::Fragments {
                plane,
                planes_m,
                planes_n,
                ..
            } => plane * planes_m * planes_n,
        }
    }

    /// `units_m, units_n, vectors_m, vectors_n` of a register engine.
    pub fn registers(&self) -> (usize, usize, usize, usize) {
        match self.engine {
            Engine::Registers {
                units_m,
                units_n,
                vectors_m,
                vectors_n,
            } => (units_m, units_n, vectors_m, vectors_n),
            Engine::Fragments { .. } => unreachable!("asked of fragments"),
        }
    }

    /// `plane, planes_m, planes_n, fragments_m, fragments_n` of a fragment engine.
    pub fn fragments(&self) -> (usize, usize, usize, usize, usize) {
        match self.engine {
            Engine::Fragments {
                plane,
                planes_m,
                planes_n,
                fragments_m,
                fragments_n,
            } => (plane, planes_m, planes_n, fragments_m, fragments_n),
            Engine::Registers { .. } => unreachable!("asked of registers"),
        }
    }

    pub fn uses_fragments(&self) -> bool {
        matches!(self.engine, Engine::Fragments { .. })
    }

    /// Element type of the stages: fragments are loaded in the type of the tensors.
    pub fn staged(&self, dtype: ElemType) -> ElemType {
        if self.uses_fragments() {
            dtype
        } else {
            ElemType::Float(FloatKind::F32)
        }
    }

    /// Vectors of a stage that holds `lines` lines of `length` elements, with room after each line
    /// so that lines start in different banks.
    pub fn stage_vectors(&self, lines: usize, length: usize) -> usize {
        lines * self.line_vectors(length)
    }

    /// Vectors of a stage of the left operand, whichever way it lies.
    pub fn left_stage_vectors(&self) -> usize {
        self.either_way(self.rows(), self.depth)
    }

    /// Vectors of a stage of the right operand, whichever way it lies.
    pub fn right_stage_vectors(&self) -> usize {
        self.either_way(self.columns(), self.depth)
    }

    fn either_way(&self, lines: usize, length: usize) -> usize {
        self.stage_vectors(lines, length)
            .max(self.stage_vectors(length, lines))
    }

    /// Vectors from one line of a stage to the next.
    pub fn line_vectors(&self, length: usize) -> usize {
        let padding = match self.engine {
            Engine::Registers { .. } => self.vector,
            // Fragments are loaded from addresses of 32 bytes, lines of 16 bytes.
            Engine::Fragments { .. } => 8,
        };
        (length + padding) / self.vector
    }

    /// Bytes of shared memory of a cube, for any product.
    fn shared_bytes(&self, dtype: ElemType) -> usize {
        let vectors = self.left_stage_vectors() + self.right_stage_vectors();
        let scratch = match self.engine {
            Engine::Registers { .. } => 0,
            Engine::Fragments {
                planes_m, planes_n, ..
            } => planes_m * planes_n * 2 * FRAGMENT * FRAGMENT * size_of::<f32>(),
        };
        let stage = vectors * self.vector * self.staged(dtype).size();
        // The drawn tile and alignment take the rest.
        stage * self.buffers + scratch + 512
    }

    /// The first of [`candidates`](Self::candidates): what is used without measuring.
    pub fn choose(
        properties: &DeviceProperties,
        dtype: ElemType,
        mean_rows: usize,
        vector: usize,
    ) -> Self {
        Self::candidates(properties, dtype, mean_rows, vector)[0]
    }

    /// Tiles that the device runs, at least one, for products whose contiguous dimensions all
    /// divide by `vector` and whose experts have `mean_rows` rows on average.
    ///
    /// All of them give the same bits: they have one vector size and one engine, and every engine
    /// adds up an element in the order of the depth, in steps that do not depend on the tile.
    pub fn candidates(
        properties: &DeviceProperties,
        dtype: ElemType,
        mean_rows: usize,
        vector: usize,
    ) -> Vec<Self> {
        let hardware = &properties.hardware;
        let wanted = if let Some(cores) = hardware.num_cpu_cores {
            Self::for_cpu(cores as usize, vector)
        } else if has_fragments(properties, dtype) {
            Self::with_fragments(properties, dtype, mean_rows, vector)
        } else {
            Self::with_registers(mean_rows, vector)
        };
        let mut specs = Vec::new();
        for spec in wanted {
            let fits = spec.units() <= hardware.max_units_per_cube as usize
                && spec.shared_bytes(dtype) <= hardware.max_shared_memory_size;
            if fits && !specs.contains(&spec) {
                specs.push(spec);
            }
        }
        if specs.is_empty() {
            specs.push(Self::smallest(vector));
        }
        specs
    }

    /// First tiles of 128 columns, and of as many rows as an expert has on average, from 32 to
    /// 128; then others, which may be faster on one device or another.
    fn with_fragments(
        properties: &DeviceProperties,
        dtype: ElemType,
        mean_rows: usize,
        vector: usize,
    ) -> Vec<TileSpec> {
        let hardware = &properties.hardware;
        let spec = |(planes_m, planes_n, fragments_m, fragments_n), depth, buffers| TileSpec {
            vector,
            depth,
            buffers,
            transfer: Transfer::Registers,
            engine: Engine::Fragments {
                plane: hardware.plane_size_max as usize,
                planes_m,
                planes_n,
                fragments_m,
                fragments_n,
            },
        };
        let (low, middle, high) = ((1, 4, 2, 2), (2, 2, 2, 4), (4, 2, 2, 4));
        let (first, others) = match mean_rows {
            // Columns by 256 with few rows; loads are uneven, so some experts have many more.
            0..=32 => (low, [(1, 4, 2, 4), middle]),
            33..=64 => (middle, [low, (2, 4, 2, 4)]),
            // 64 by 64 a plane: fewest reads of shared memory, most registers.
            _ => (high, [(2, 2, 4, 4), (2, 4, 4, 4)]),
        };
        let mut specs = vec![spec(first, 32, 2), spec(first, 32, 1), spec(first, 64, 2)];
        for other in others {
            specs.extend([spec(other, 32, 2), spec(other, 64, 2)]);
        }
        // Not first before somebody has measured it.
        if properties.features.copy_async && matches!(vector * dtype.size(), 4 | 8 | 16) {
            let transfer = Transfer::Ahead { asynchronous: true };
            specs.extend([(first, 32, 4), (first, 64, 3), (others[1], 32, 4)].map(
                |(planes, depth, buffers)| TileSpec {
                    transfer,
                    ..spec(planes, depth, buffers)
                },
            ));
        }
        specs
    }

    /// First eight rows and at least eight columns a unit, over as many units as fit; then others,
    /// which may be faster on one device or another. Few rows leave the units to the columns.
    fn with_registers(mean_rows: usize, vector: usize) -> Vec<TileSpec> {
        let spec = |units: usize, units_m, (vectors_m, vectors_n), depth, buffers| TileSpec {
            vector,
            depth,
            buffers,
            transfer: Transfer::Registers,
            engine: Engine::Registers {
                units_m,
                units_n: units / units_m,
                vectors_m,
                vectors_n,
            },
        };
        let (block, wide) = match vector {
            1 => ((4, 4), (4, 8)),
            2 => ((4, 4), (2, 8)),
            4 => ((2, 2), (2, 4)),
            // A wider block would not fit into registers.
            _ => ((1, 2), (1, 2)),
        };
        let rows = match mean_rows {
            0..=16 => 2,
            17..=64 => 8,
            _ => 16,
        };
        let most = |rows_of_units: usize| rows_of_units.min(rows);
        let mut specs = vec![
            spec(256, most(16), block, 16, 2),
            spec(256, most(16), block, 16, 1),
            spec(64, most(8), block, 16, 2),
            spec(64, most(8), block, 16, 1),
            spec(128, most(8), block, 16, 2),
            spec(256, most(16), block, 8, 2),
        ];
        // With few rows, what a unit stages of so many columns would not fit into registers.
        if rows > 2 {
            specs.push(spec(128, most(8), wide, 16, 2));
            specs.push(spec(256, most(16), wide, 8, 2));
        }
        specs
    }

    /// First a wide register block for each core, side by side; what is staged stays in the core's
    /// own cache.
    fn for_cpu(cores: usize, vector: usize) -> Vec<TileSpec> {
        let (vectors_m, vectors_n) = match vector {
            1 => (4, 4),
            2 => (2, 4),
            4 => (1, 4),
            _ => (1, 2),
        };
        let cores = cores.max(1);
        [(1, cores, 128), (cores, 1, 128), (1, cores, 256)]
            .map(|(units_m, units_n, depth)| TileSpec {
                vector,
                depth,
                buffers: 1,
                transfer: Transfer::Registers,
                engine: Engine::Registers {
                    units_m,
                    units_n,
                    vectors_m,
                    vectors_n,
                },
            })
            .into()
    }

    /// What any device runs: 16 units.
    fn smallest(vector: usize) -> TileSpec {
        TileSpec {
            vector,
            depth: 8,
            buffers: 1,
            transfer: Transfer::Registers,
            engine: Engine::Registers {
                units_m: 4,
                units_n: 4,
                vectors_m: 1,
                vectors_n: 2,
            },
        }
    }
}

/// Elements of the widest vector that the device loads at once, that divides every one of
/// `lengths`, and that the kernels have tiles for.
pub(crate) fn vector_size(
    properties: &DeviceProperties,
    dtype: ElemType,
    lengths: &[usize],
) -> usize {
    properties
        .io_optimized_vector_sizes(dtype.size())
        .filter(|&vector| {
            matches!(vector, 1 | 2 | 4 | 8)
                && lengths.iter().all(|length| length.is_multiple_of(vector))
        })
        .max()
        .unwrap_or(1)
}

/// Whether the device multiplies 16 by 16 by 16 fragments of `dtype` into f32.
fn has_fragments(properties: &DeviceProperties, dtype: ElemType) -> bool {
    let f32 = ElemType::Float(FloatKind::F32);
    let hardware = &properties.hardware;
    hardware.plane_size_min == hardware.plane_size_max
        && properties.features.matmul.cmma.contains(&MmaConfig {
            a_type: dtype,
            b_type: dtype,
            cd_type: f32,
            m: FRAGMENT as u32,
            n: FRAGMENT as u32,
            k: FRAGMENT as u32,
        })
}
