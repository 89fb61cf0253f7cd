//! Kinds of elements: those in memory and those on disk.

use half::{bf16, f16};
use safetensors::Dtype;

/// A kind of element that tensors can be read as and written from: `f32`, `bf16` or `f16`.
pub trait Element: Copy + Send + Sync + bytemuck::Pod + sealed::Sealed {
    /// Its name on disk.
    const DTYPE: Dtype;
    /// The nearest value of this kind; ties to even.
    fn from_f32(value: f32) -> Self;
    /// The same value.
    fn to_f32(self) -> f32;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
    fn from_f32(value: f32) -> Self {
        value
    }
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::BF16;
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn to_f32(self) -> f32 {
        self.to_f32()
    }
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn to_f32(self) -> f32 {
        self.to_f32()
    }
}

/// A kind of element on disk, little-endian.
pub(super) trait Stored {
    const DTYPE: Dtype;
    const SIZE: usize;
    fn decode(bytes: &[u8]) -> f32;
}

pub(super) struct StoredF32;
pub(super) struct StoredBf16;
pub(super) struct StoredF16;
pub(super) struct StoredE4m3;

impl Stored for StoredF32 {
    const DTYPE: Dtype = Dtype::F32;
    const SIZE: usize = 4;
    #[inline(always)]
    fn decode(bytes: &[u8]) -> f32 {
        f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}

impl Stored for StoredBf16 {
    const DTYPE: Dtype = Dtype::BF16;
    const SIZE: usize = 2;
    #[inline(always)]
    fn decode(bytes: &[u8]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16)
    }
}

impl Stored for StoredF16 {
    const DTYPE: Dtype = Dtype::F16;
    const SIZE: usize = 2;
    #[inline(always)]
    fn decode(bytes: &[u8]) -> f32 {
        let bits = u32::from(u16::from_le_bytes([bytes[0], bytes[1]]));
        // Exponent and mantissa moved into place, the exponent's bias corrected by a multiplication:
        // right for subnormal numbers too, and without branches.
        let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((112 + 127) << 23);
        let special = if bits & 0x7c00 == 0x7c00 {
            0x7f80_0000
        } else {
            0
        };
        f32::from_bits(magnitude.to_bits() | special | (bits & 0x8000) << 16)
    }
}

impl Stored for StoredE4m3 {
    const DTYPE: Dtype = Dtype::F8_E4M3;
    const SIZE: usize = 1;
    #[inline(always)]
    fn decode(bytes: &[u8]) -> f32 {
        e4m3_to_f32(bytes[0])
    }
}

/// FP8 with 4 bits of exponent and 3 of mantissa, without infinities (arXiv 2209.05433).
#[inline(always)]
pub(super) fn e4m3_to_f32(byte: u8) -> f32 {
    let bits = u32::from(byte);
    let magnitude = f32::from_bits((bits & 0x7f) << 20) * f32::from_bits((120 + 127) << 23);
    let nan = if bits & 0x7f == 0x7f { 0x7fc0_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | nan | (bits & 0x80) << 24)
}

/// The nearest e4m3, ties to even; what is beyond 448 becomes 448, NaN stays NaN.
pub(super) fn f32_to_e4m3(value: f32) -> u8 {
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | 0x7f;
    }
    if magnitude >= E4M3_MAX {
        return sign | 0x7e;
    }
    // Steps of 2^-9 below 2^-6, above that 8 steps to the power of two.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-6);
    let steps = (f64::from(magnitude) * f64::powi(2.0, 3 - exponent)).round_ties_even() as i32;
    // 16 steps carry into the exponent by themselves.
    sign | (((exponent + 6) << 3) + steps) as u8
}

/// The largest e4m3.
pub(super) const E4M3_MAX: f32 = 448.0;

/// A scale stored as a power of two: `2^(byte - 127)`, 255 is NaN.
pub(super) fn ue8m0_to_f32(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(byte) << 23),
    }
}

/// Bytes of one element, for the kinds that can be read as numbers.
pub(super) fn size_of(dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::F32 => Some(4),
        Dtype::BF16 | Dtype::F16 => Some(2),
        Dtype::F8_E4M3 | Dtype::F8_E8M0 => Some(1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_agrees_with_half_on_every_value() {
        for bits in 0..=u16::MAX {
            let (ours, half) = (
                StoredF16::decode(&bits.to_le_bytes()),
                f16::from_bits(bits).to_f32(),
            );
            assert!(
                ours.to_bits() == half.to_bits() || (ours.is_nan() && half.is_nan()),
                "{bits:#x}"
            );
        }
    }

    /// The format's definition, in f64.
    fn e4m3(byte: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
        let magnitude = match exponent {
            0 => mantissa * f64::powi(2.0, -9),
            _ => (1.0 + mantissa / 8.0) * f64::powi(2.0, exponent - 7),
        };
        if byte & 0x80 == 0 {
            magnitude
        } else {
            -magnitude
        }
    }

    #[test]
    fn e4m3_is_what_the_format_says_and_comes_back() {
        for byte in 0..=u8::MAX {
            let value = e4m3_to_f32(byte);
            assert_eq!(f32_to_e4m3(value), byte);
            if byte & 0x7f == 0x7f {
                assert!(value.is_nan());
            } else {
                assert_eq!(f64::from(value), e4m3(byte), "{byte:#x}");
            }
        }
    }

    #[test]
    fn e4m3_rounds_to_the_nearest() {
        let finite: Vec<u8> = (0..=u8::MAX).filter(|byte| byte & 0x7f != 0x7f).collect();
        for i in 0..20_000 {
            let value = (f64::from(i) * 0.37).sin() as f32 * 2f32.powi(i % 20 - 11);
            let got = f64::from(e4m3_to_f32(f32_to_e4m3(value)));
            let best = finite
                .iter()
                .map(|&byte| (e4m3(byte) - f64::from(value)).abs())
                .fold(f64::INFINITY, f64::min);
            assert_eq!((got - f64::from(value)).abs(), best, "{value}");
        }
        assert_eq!(f32_to_e4m3(460.0), 0x7e);
        assert_eq!(f32_to_e4m3(0.0), 0);
    }

    #[test]
    fn ue8m0_is_a_power_of_two() {
        for byte in 0..255u8 {
            let value = f64::from(ue8m0_to_f32(byte));
            assert_eq!(value, f64::powi(2.0, i32::from(byte) - 127));
        }
        assert!(ue8m0_to_f32(255).is_nan());
    }
}
