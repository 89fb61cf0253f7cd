//! The inner loops of matrix products: a tile of the output stays in vector registers while both
//! operands stream past.
//!
//! Every element of a product is one chain of multiplications and additions in the order of the
//! depth, starting from zero. So its bits depend on its row and column of the operands alone: not on
//! the number of rows or columns, on how they are cut into tiles, or on the width of the vectors.

/// Bytes of a line of the cache.
pub(super) const LINE: usize = 64;

/// Most rows of a tile.
const MOST_ROWS: usize = 8;

/// Most vectors side by side in a tile.
const MOST_VECTORS: usize = 4;

/// Most rows that [`Kernels::stream`] takes.
pub(super) const MOST_STREAM_ROWS: usize = 4;

/// Elements of the largest tile: vectors have up to 16.
pub(super) const MOST_TILE: usize = MOST_ROWS * MOST_VECTORS * 16;

/// A tile of `out [rows, columns] = x [rows, depth] * w [depth, columns]`.
pub(super) struct Tile<T> {
    pub depth: usize,
    /// First element of `x`, how far its rows lie apart, and how far its steps of the depth.
    pub x: *const T,
    pub x_row: usize,
    pub x_step: usize,
    /// First element of `w`, whose rows are contiguous, and how far they lie apart.
    pub w: *const T,
    pub w_row: usize,
    /// First element of `out`, whose rows are contiguous, and how far they lie apart.
    pub out: *mut T,
    pub out_row: usize,
    pub store: Store,
    /// What kernels that fetch ahead bring to the cache meanwhile: at each step of the depth one or
    /// more lines from here on, or within eight steps four, then `ahead_row` elements further. Any
    /// address will do, valid or not.
    pub ahead: *const T,
    pub ahead_row: usize,
    /// Where kernels that pack copy the columns of `w` to, without gaps.
    pub packed: *mut T,
}

/// What a kernel does beside its tile, while it waits for multiplications.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Aside {
    Nothing,
    /// Fetches four lines of each row of this eighth of the rows ahead: slowly enough to leave the
    /// tile its own way to memory.
    FetchEighth(usize),
    /// Fetches four lines of each row ahead.
    Fetch,
    /// Fetches the first or the second two of the four lines of each row ahead.
    FetchHalf(usize),
    /// Fetches this one of the four lines of each row ahead.
    FetchLine(usize),
    /// Packs `w`.
    Pack,
}

// `Aside` as the kernels know it.
const NOTHING: u8 = 0;
const FETCH_EIGHTH: u8 = 1;
const FETCH: u8 = 2;
const FETCH_HALF: u8 = 3;
const FETCH_LINE: u8 = 4;
const PACK: u8 = 5;

/// What to do with the tile's values.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Store {
    Write,
    /// Add them to what is there: the chain goes on from it.
    Add,
    /// Write them past the cache; `out` and `out_row` must be multiples of the vector size.
    Stream,
}

/// Computes one tile.
///
/// # Safety
///
/// All elements of `x`, `w` and `out` that the tile's sizes and distances reach must be valid, the
/// machine must have the kernel's instructions, and for [`Store::Stream`] the rows of `out` must be
/// aligned to vectors.
type TileFn<T> = unsafe fn(&Tile<T>);

/// The kernels for one kind of machine.
pub(super) struct Kernels<T: 'static> {
    /// Elements of a vector.
    pub lanes: usize,
    /// Most vectors side by side.
    pub vectors: usize,
    /// Best number of rows for 1, 2, ... vectors side by side.
    pub rows: [usize; MOST_VECTORS],
    /// By number of vectors and of rows, both less 1.
    tiles: [[TileFn<T>; MOST_ROWS]; MOST_VECTORS],
    /// By what they do aside, less 1, and by rows, less 1, for most vectors.
    asides: [[TileFn<T>; MOST_ROWS]; 5],
    /// By number of vectors, less 1.
    pub packs: [PackFn<T>; MOST_VECTORS],
    /// By number of rows, less 1.
    streams: [StreamFn<T>; MOST_STREAM_ROWS],
}

impl<T> Kernels<T> {
    /// Computes a tile of `rows` rows and `vectors` vectors side by side. Only for most vectors does
    /// it do something aside.
    ///
    /// # Safety
    ///
    /// As for [`TileFn`]; for [`Aside::Pack`], `tile.packed` must be valid for all of `w`'s tile.
    ///
    /// # Panics
    ///
    /// Panics when there is no such kernel.
    pub(super) unsafe fn run(&self, tile: &Tile<T>, rows: usize, vectors: usize, aside: Aside) {
        let kernels = match aside {
            _ if vectors < self.vectors => &self.tiles[vectors - 1],
            Aside::Nothing => &self.tiles[vectors - 1],
            Aside::FetchEighth(_) => &self.asides[usize::from(FETCH_EIGHTH) - 1],
            Aside::Fetch => &self.asides[usize::from(FETCH) - 1],
            Aside::FetchHalf(_) => &self.asides[usize::from(FETCH_HALF) - 1],
            Aside::FetchLine(_) => &self.asides[usize::from(FETCH_LINE) - 1],
            Aside::Pack => &self.asides[usize::from(PACK) - 1],
        };
        // SAFETY: the same is asked of the caller.
        unsafe { kernels[rows - 1](tile) }
    }

    /// Computes a tile of few rows and any number of vectors side by side, reading `w` once, in the
    /// order in which it lies: for so few rows that memory is what takes the time. `store`, `ahead`
    /// and `packed` of the tile are not used; it writes.
    ///
    /// # Safety
    ///
    /// As for [`TileFn`].
    ///
    /// # Panics
    ///
    /// Panics for more than [`MOST_STREAM_ROWS`] rows.
    pub(super) unsafe fn stream(&self, tile: &Tile<T>, rows: usize, vectors: usize) {
        // SAFETY: the same is asked of the caller.
        unsafe { self.streams[rows - 1](tile, vectors) }
    }
}

/// As [`TileFn`], for so many vectors side by side.
type StreamFn<T> = unsafe fn(&Tile<T>, usize);

/// Copies `rows` rows of vectors side by side, `from` with a distance of rows, to where they lie
/// without gaps.
///
/// # Safety
///
/// All elements that this reaches must be valid, and the machine must have the instructions.
type PackFn<T> = unsafe fn(rows: usize, from: *const T, from_row: usize, to: *mut T);

/// One vector register. Its functions need the instructions that the type is named after.
trait Vector: Copy {
    type Element: Copy;
    const LANES: usize;
    /// # Safety
    /// The machine must have the vector's instructions.
    unsafe fn splat(value: Self::Element) -> Self;
    /// # Safety
    /// As [`splat`](Vector::splat); `from` must be valid for `LANES` elements.
    unsafe fn load(from: *const Self::Element) -> Self;
    /// # Safety
    /// As [`splat`](Vector::splat); `to` must be valid for `LANES` elements.
    unsafe fn store(self, to: *mut Self::Element);
    /// # Safety
    /// As [`store`](Vector::store), and `to` must be aligned to the size of the vector.
    unsafe fn stream(self, to: *mut Self::Element);
    /// `self + a * b`
    /// # Safety
    /// As [`splat`](Vector::splat).
    unsafe fn plus_product(self, a: Self, b: Self) -> Self;
}

/// # Safety
///
/// As for [`TileFn`].
#[inline(always)]
unsafe fn tile<V: Vector, const ROWS: usize, const VECTORS: usize, const ASIDE: u8>(
    tile: &Tile<V::Element>,
    zero: V::Element,
) {
    // SAFETY: the caller promises that the elements reached here are valid: rows below `ROWS` and
    // columns below `VECTORS * LANES` at every step of the depth.
    unsafe {
        let mut sums = [[V::splat(zero); VECTORS]; ROWS];
        if tile.store == Store::Add {
            for (row, sums) in sums.iter_mut().enumerate() {
                for (vector, sum) in sums.iter_mut().enumerate() {
                    *sum = V::load(tile.out.add(row * tile.out_row + vector * V::LANES));
                }
            }
        }
        let (mut x, mut w) = (tile.x, tile.w);
        let (mut ahead, mut packed) = (tile.ahead, tile.packed);
        let fetch_lines = |ahead: *const V::Element, lines: usize| {
            (0..lines).for_each(|line| prefetch(ahead.wrapping_byte_add(line * LINE)));
        };
        // Steps for each row that is fetched ahead.
        let steps = if ASIDE == FETCH_EIGHTH { 8 } else { 1 };
        let mut depth = 0;
        while depth < tile.depth {
            for step in 0..steps.min(tile.depth - depth) {
                match ASIDE {
                    FETCH_EIGHTH if step % 2 == 0 => {
                        prefetch(ahead.wrapping_byte_add(step / 2 * LINE))
                    }
                    FETCH => fetch_lines(ahead, 4),
                    FETCH_HALF => fetch_lines(ahead, 2),
                    FETCH_LINE => fetch_lines(ahead, 1),
                    _ => {}
                }
                let mut columns = [V::splat(zero); VECTORS];
                for (vector, column) in columns.iter_mut().enumerate() {
                    *column = V::load(w.add(vector * V::LANES));
                    if ASIDE == PACK {
                        column.store(packed.add(vector * V::LANES));
                    }
                }
                for (row, sums) in sums.iter_mut().enumerate() {
                    let x = V::splat(*x.add(row * tile.x_row));
                    for (sum, column) in sums.iter_mut().zip(columns) {
                        *sum = sum.plus_product(x, column);
                    }
                }
                x = x.wrapping_add(tile.x_step);
                w = w.wrapping_add(tile.w_row);
                packed = packed.wrapping_add(VECTORS * V::LANES);
            }
            depth += steps;
            ahead = ahead.wrapping_add(tile.ahead_row);
        }
        for (row, sums) in sums.iter().enumerate() {
            for (vector, sum) in sums.iter().enumerate() {
                let to = tile.out.add(row * tile.out_row + vector * V::LANES);
                match tile.store {
                    Store::Stream => sum.stream(to),
                    Store::Write | Store::Add => sum.store(to),
                }
            }
        }
    }
}

/// # Safety
///
/// As for [`StreamFn`].
#[inline(always)]
unsafe fn stream<V: Vector, const ROWS: usize>(
    tile: &Tile<V::Element>,
    vectors: usize,
    zero: V::Element,
) {
    // The sums of a row stay in the nearest cache. Steps taken together: as many as pay for their way
    // there and back, and as registers hold.
    let together = if ROWS <= 2 { 8 } else { 4 };
    let mut depth = 0;
    while depth < tile.depth {
        // SAFETY: the same is asked of the caller; the steps end at `tile.depth`.
        unsafe {
            if depth + together > tile.depth {
                steps::<V, ROWS, 1>(tile, vectors, depth, zero);
                depth += 1;
            } else if ROWS <= 2 {
                steps::<V, ROWS, 8>(tile, vectors, depth, zero);
                depth += together;
            } else {
                steps::<V, ROWS, 4>(tile, vectors, depth, zero);
                depth += together;
            }
        }
    }
}

/// `STEPS` steps of [`stream`] from `depth` on.
///
/// # Safety
///
/// As for [`StreamFn`], and `depth + STEPS` must be within the depth.
#[inline(always)]
unsafe fn steps<V: Vector, const ROWS: usize, const STEPS: usize>(
    tile: &Tile<V::Element>,
    vectors: usize,
    depth: usize,
    zero: V::Element,
) {
    // SAFETY: the caller promises that the elements reached here are valid.
    unsafe {
        let mut x = [[V::splat(zero); STEPS]; ROWS];
        for (row, x) in x.iter_mut().enumerate() {
            for (step, x) in x.iter_mut().enumerate() {
                *x = V::splat(*tile.x.add(row * tile.x_row + (depth + step) * tile.x_step));
            }
        }
        let w = tile.w.add(depth * tile.w_row);
        for vector in 0..vectors {
            let column = vector * V::LANES;
            let mut sums = [V::splat(zero); ROWS];
            if depth > 0 {
                for (row, sum) in sums.iter_mut().enumerate() {
                    *sum = V::load(tile.out.add(row * tile.out_row + column));
                }
            }
            for step in 0..STEPS {
                let w = V::load(w.add(step * tile.w_row + column));
                for (sum, x) in sums.iter_mut().zip(&x) {
                    *sum = sum.plus_product(x[step], w);
                }
            }
            for (row, sum) in sums.iter().enumerate() {
                sum.store(tile.out.add(row * tile.out_row + column));
            }
        }
    }
}

/// # Safety
///
/// As for [`PackFn`].
#[inline(always)]
unsafe fn pack<V: Vector, const VECTORS: usize>(
    rows: usize,
    from: *const V::Element,
    from_row: usize,
    to: *mut V::Element,
) {
    for row in 0..rows {
        for vector in 0..VECTORS {
            // SAFETY: the caller promises that the elements reached here are valid.
            unsafe {
                V::load(from.add(row * from_row + vector * V::LANES))
                    .store(to.add((row * VECTORS + vector) * V::LANES));
            }
        }
    }
}

#[inline(always)]
fn prefetch<T>(from: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: x86-64 has SSE, and a prefetch of any address is harmless.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(from.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = from;
}

/// Makes what was streamed visible to other threads.
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: x86-64 has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Tile kernels `$name::<ROWS, VECTORS, ASIDE>` for all numbers of rows, and all of vectors too.
/// Sizes beyond what the registers hold are in the table; drivers do not ask for them.
macro_rules! tiles {
    ($name:ident) => {
        [
            tiles!($name, 1, NOTHING),
            tiles!($name, 2, NOTHING),
            tiles!($name, 3, NOTHING),
            tiles!($name, 4, NOTHING),
        ]
    };
    ($name:ident, $vectors:literal, $aside:ident) => {
        [
            $name::<1, $vectors, $aside>,
            $name::<2, $vectors, $aside>,
            $name::<3, $vectors, $aside>,
            $name::<4, $vectors, $aside>,
            $name::<5, $vectors, $aside>,
            $name::<6, $vectors, $aside>,
            $name::<7, $vectors, $aside>,
            $name::<8, $vectors, $aside>,
        ]
    };
}

macro_rules! asides {
    ($name:ident, $vectors:literal) => {
        [
            tiles!($name, $vectors, FETCH_EIGHTH),
            tiles!($name, $vectors, FETCH),
            tiles!($name, $vectors, FETCH_HALF),
            tiles!($name, $vectors, FETCH_LINE),
            tiles!($name, $vectors, PACK),
        ]
    };
}

/// The copying kernels `$name::<VECTORS>`.
macro_rules! packs {
    ($name:ident) => {
        [$name::<1>, $name::<2>, $name::<3>, $name::<4>]
    };
}

/// The streaming kernels `$name::<ROWS>`.
macro_rules! streams {
    ($name:ident) => {
        [$name::<1>, $name::<2>, $name::<3>, $name::<4>]
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{
        FETCH, FETCH_EIGHTH, FETCH_HALF, FETCH_LINE, Kernels, NOTHING, PACK, Tile, Vector, pack,
        stream, tile,
    };
    use std::arch::x86_64::*;

    macro_rules! vector {
        ($vector:ty, $element:ty, $lanes:literal, $splat:ident, $load:ident, $store:ident,
         $stream:ident, $multiply_add:ident) => {
            impl Vector for $vector {
                type Element = $element;
                const LANES: usize = $lanes;

                #[inline(always)]
                unsafe fn splat(value: $element) -> Self {
                    // SAFETY: the caller has made sure of the instructions.
                    unsafe { $splat(value) }
                }

                #[inline(always)]
                unsafe fn load(from: *const $element) -> Self {
                    // SAFETY: as above, and the elements are valid.
                    unsafe { $load(from) }
                }

                #[inline(always)]
                unsafe fn store(self, to: *mut $element) {
                    // SAFETY: as above, and the elements are valid.
                    unsafe { $store(to, self) }
                }

                #[inline(always)]
                unsafe fn stream(self, to: *mut $element) {
                    // SAFETY: as above, and `to` is aligned.
                    unsafe { $stream(to, self) }
                }

                #[inline(always)]
                unsafe fn plus_product(self, a: Self, b: Self) -> Self {
                    // SAFETY: the caller has made sure of the instructions.
                    unsafe { $multiply_add(a, b, self) }
                }
            }
        };
    }

    vector!(
        __m512,
        f32,
        16,
        _mm512_set1_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_stream_ps,
        _mm512_fmadd_ps
    );
    vector!(
        __m256,
        f32,
        8,
        _mm256_set1_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_stream_ps,
        _mm256_fmadd_ps
    );
    vector!(
        __m256d,
        f64,
        4,
        _mm256_set1_pd,
        _mm256_loadu_pd,
        _mm256_storeu_pd,
        _mm256_stream_pd,
        _mm256_fmadd_pd
    );

    #[target_feature(enable = "avx512f")]
    unsafe fn avx512<const ROWS: usize, const VECTORS: usize, const ASIDE: u8>(of: &Tile<f32>) {
        // SAFETY: the same is asked of the caller.
        unsafe { tile::<__m512, ROWS, VECTORS, ASIDE>(of, 0.0) }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn stream_avx512<const ROWS: usize>(of: &Tile<f32>, vectors: usize) {
        // SAFETY: the same is asked of the caller.
        unsafe { stream::<__m512, ROWS>(of, vectors, 0.0) }
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn pack_avx512<const VECTORS: usize>(
        rows: usize,
        from: *const f32,
        from_row: usize,
        to: *mut f32,
    ) {
        // SAFETY: the same is asked of the caller.
        unsafe { pack::<__m512, VECTORS>(rows, from, from_row, to) }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2<const ROWS: usize, const VECTORS: usize, const ASIDE: u8>(of: &Tile<f32>) {
        // SAFETY: the same is asked of the caller.
        unsafe { tile::<__m256, ROWS, VECTORS, ASIDE>(of, 0.0) }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn stream_avx2<const ROWS: usize>(of: &Tile<f32>, vectors: usize) {
        // SAFETY: the same is asked of the caller.
        unsafe { stream::<__m256, ROWS>(of, vectors, 0.0) }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn pack_avx2<const VECTORS: usize>(
        rows: usize,
        from: *const f32,
        from_row: usize,
        to: *mut f32,
    ) {
        // SAFETY: the same is asked of the caller.
        unsafe { pack::<__m256, VECTORS>(rows, from, from_row, to) }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2_f64<const ROWS: usize, const VECTORS: usize, const ASIDE: u8>(of: &Tile<f64>) {
        // SAFETY: the same is asked of the caller.
        unsafe { tile::<__m256d, ROWS, VECTORS, ASIDE>(of, 0.0) }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn stream_avx2_f64<const ROWS: usize>(of: &Tile<f64>, vectors: usize) {
        // SAFETY: the same is asked of the caller.
        unsafe { stream::<__m256d, ROWS>(of, vectors, 0.0) }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn pack_avx2_f64<const VECTORS: usize>(
        rows: usize,
        from: *const f64,
        from_row: usize,
        to: *mut f64,
    ) {
        // SAFETY: the same is asked of the caller.
        unsafe { pack::<__m256d, VECTORS>(rows, from, from_row, to) }
    }

    static AVX512: Kernels<f32> = Kernels {
        lanes: 16,
        vectors: 4,
        rows: [8, 8, 8, 6],
        tiles: tiles!(avx512),
        asides: asides!(avx512, 4),
        packs: packs!(pack_avx512),
        streams: streams!(stream_avx512),
    };

    static AVX2: Kernels<f32> = Kernels {
        lanes: 8,
        vectors: 2,
        rows: [8, 6, 4, 2],
        tiles: tiles!(avx2),
        asides: asides!(avx2, 2),
        packs: packs!(pack_avx2),
        streams: streams!(stream_avx2),
    };

    static AVX2_F64: Kernels<f64> = Kernels {
        lanes: 4,
        vectors: 2,
        rows: [8, 6, 4, 2],
        tiles: tiles!(avx2_f64),
        asides: asides!(avx2_f64, 2),
        packs: packs!(pack_avx2_f64),
        streams: streams!(stream_avx2_f64),
    };

    pub(super) fn f32_kernels() -> Option<&'static Kernels<f32>> {
        if is_x86_feature_detected!("avx512f") {
            Some(&AVX512)
        } else if has_avx2() {
            Some(&AVX2)
        } else {
            None
        }
    }

    pub(super) fn f64_kernels() -> Option<&'static Kernels<f64>> {
        has_avx2().then_some(&AVX2_F64)
    }

    fn has_avx2() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
    }

    #[cfg(test)]
    pub(super) fn all_f32_kernels() -> Vec<&'static Kernels<f32>> {
        let mut all = Vec::new();
        if is_x86_feature_detected!("avx512f") {
            all.push(&AVX512);
        }
        if has_avx2() {
            all.push(&AVX2);
        }
        all
    }
}

/// Vectors as arrays, for machines without kernels of their own: the compiler finds instructions.
mod portable {
    use super::{
        FETCH, FETCH_EIGHTH, FETCH_HALF, FETCH_LINE, Kernels, NOTHING, PACK, Tile, Vector, pack,
        stream, tile,
    };

    const LANES: usize = 8;

    macro_rules! vector {
        ($element:ty, $tile:ident, $pack:ident, $stream:ident, $kernels:ident) => {
            impl Vector for [$element; LANES] {
                type Element = $element;
                const LANES: usize = LANES;

                #[inline(always)]
                unsafe fn splat(value: $element) -> Self {
                    [value; LANES]
                }

                #[inline(always)]
                unsafe fn load(from: *const $element) -> Self {
                    // SAFETY: the caller promises that the elements are valid; arrays are aligned
                    // like their elements.
                    unsafe { *from.cast() }
                }

                #[inline(always)]
                unsafe fn store(self, to: *mut $element) {
                    // SAFETY: as above.
                    unsafe { *to.cast() = self }
                }

                #[inline(always)]
                unsafe fn stream(self, to: *mut $element) {
                    // SAFETY: as above.
                    unsafe { *to.cast() = self }
                }

                #[inline(always)]
                unsafe fn plus_product(mut self, a: Self, b: Self) -> Self {
                    for lane in 0..LANES {
                        self[lane] = if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
                            a[lane].mul_add(b[lane], self[lane])
                        } else {
                            self[lane] + a[lane] * b[lane]
                        };
                    }
                    self
                }
            }

            unsafe fn $tile<const ROWS: usize, const VECTORS: usize, const ASIDE: u8>(
                of: &Tile<$element>,
            ) {
                // SAFETY: the same is asked of the caller.
                unsafe { tile::<[$element; LANES], ROWS, VECTORS, ASIDE>(of, 0.0) }
            }

            unsafe fn $pack<const VECTORS: usize>(
                rows: usize,
                from: *const $element,
                from_row: usize,
                to: *mut $element,
            ) {
                // SAFETY: the same is asked of the caller.
                unsafe { pack::<[$element; LANES], VECTORS>(rows, from, from_row, to) }
            }

            unsafe fn $stream<const ROWS: usize>(of: &Tile<$element>, vectors: usize) {
                // SAFETY: the same is asked of the caller.
                unsafe { stream::<[$element; LANES], ROWS>(of, vectors, 0.0) }
            }

            pub(super) static $kernels: Kernels<$element> = Kernels {
                lanes: LANES,
                vectors: 1,
                rows: [4, 2, 1, 1],
                tiles: tiles!($tile),
                asides: asides!($tile, 1),
                packs: packs!($pack),
                streams: streams!($stream),
            };
        };
    }

    vector!(f32, tile_f32, pack_f32, stream_f32, F32);
    vector!(f64, tile_f64, pack_f64, stream_f64, F64);
}

/// The best kernels that this machine runs.
pub(super) fn f32_kernels() -> &'static Kernels<f32> {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernels) = x86::f32_kernels() {
        return kernels;
    }
    &portable::F32
}

/// The best kernels that this machine runs.
pub(super) fn f64_kernels() -> &'static Kernels<f64> {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernels) = x86::f64_kernels() {
        return kernels;
    }
    &portable::F64
}

/// All kernels that this machine runs.
#[cfg(test)]
pub(super) fn all_f32_kernels() -> Vec<&'static Kernels<f32>> {
    let mut all = vec![&portable::F32];
    #[cfg(target_arch = "x86_64")]
    all.extend(x86::all_f32_kernels());
    all
}
