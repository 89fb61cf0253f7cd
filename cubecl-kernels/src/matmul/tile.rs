use cubecl::ir::{DeviceProperties, ElemType, FloatKind, HardwareProperties, features::MmaConfig};

/// How a cube computes one tile of an output: fixed when the kernel is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TileSpec {
    /// Elements of a vector, in device memory and in the stages.
    pub vector: usize,
    /// Depth of a stage, in elements: a multiple of `vector`, and of 16 for fragments.
    pub depth: usize,
    /// Stages that are filled in turn: with 2, the next is fetched while one is computed.
    pub buffers: usize,
    pub engine: Engine,
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

    /// A spec for products whose contiguous dimensions all divide by `vector` and whose experts
    /// have `mean_rows` rows on average.
    pub fn choose(
        properties: &DeviceProperties,
        dtype: ElemType,
        mean_rows: usize,
        vector: usize,
    ) -> Self {
        let hardware = &properties.hardware;
        Self::candidates(properties, dtype, mean_rows, vector)
            .into_iter()
            .find(|spec| {
                spec.units() <= hardware.max_units_per_cube as usize
                    && spec.shared_bytes(dtype) <= hardware.max_shared_memory_size
            })
            .unwrap_or(Self::smallest(vector))
    }

    /// From the most to the least demanding.
    fn candidates(
        properties: &DeviceProperties,
        dtype: ElemType,
        mean_rows: usize,
        vector: usize,
    ) -> Vec<TileSpec> {
        let hardware = &properties.hardware;
        if let Some(cores) = hardware.num_cpu_cores {
            return vec![Self::cpu(cores as usize, vector)];
        }
        let mut specs = Vec::new();
        if has_fragments(properties, dtype) {
            specs.extend([2, 1].map(|buffers| TileSpec {
                vector,
                depth: 32,
                buffers,
                engine: fragments(hardware, mean_rows),
            }));
        }
        // Eight rows and at least eight columns a unit; few rows leave the units to the columns.
        let (vectors_m, vectors_n) = match vector {
            1 => (4, 4),
            2 => (4, 4),
            4 => (2, 2),
            _ => (1, 2),
        };
        let most = match mean_rows {
            0..=16 => 2,
            17..=64 => 8,
            _ => 16,
        };
        for units in [256, 64] {
            for buffers in [2, 1] {
                let units_m = most.min(if units == 256 { 16 } else { 8 });
                specs.push(TileSpec {
                    vector,
                    depth: 16,
                    buffers,
                    engine: Engine::Registers {
                        units_m,
                        units_n: units / units_m,
                        vectors_m,
                        vectors_n,
                    },
                });
            }
        }
        specs
    }

    /// A wide register block for each core; what is staged stays in the core's own cache.
    fn cpu(cores: usize, vector: usize) -> TileSpec {
        let (vectors_m, vectors_n) = match vector {
            1 => (4, 4),
            2 => (2, 4),
            4 => (1, 4),
            _ => (1, 2),
        };
        TileSpec {
            vector,
            depth: 128,
            buffers: 1,
            engine: Engine::Registers {
                units_m: 1,
                units_n: cores.max(1),
                vectors_m,
                vectors_n,
            },
        }
    }

    /// What any device runs: 16 units.
    fn smallest(vector: usize) -> TileSpec {
        TileSpec {
            vector,
            depth: 8,
            buffers: 1,
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

/// Tiles of 128 columns, and of as many rows as an expert has on average, from 32 to 128.
fn fragments(hardware: &HardwareProperties, mean_rows: usize) -> Engine {
    let (planes_m, planes_n, fragments_m, fragments_n) = match mean_rows {
        0..=32 => (1, 4, 2, 2),
        33..=64 => (2, 2, 2, 4),
        _ => (4, 2, 2, 4),
    };
    Engine::Fragments {
        plane: hardware.plane_size_max as usize,
        planes_m,
        planes_n,
        fragments_m,
        fragments_n,
    }
}
