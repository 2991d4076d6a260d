//! Data types of elements, and the reductions of elements.

use crate::status::NcclError;

/// `ncclDataType_t` without the 8-bit floats, which are not simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DataType {
    Int8,
    Uint8,
    Int32,
    Uint32,
    Int64,
    Uint64,
    Float16,
    Float32,
    Float64,
    Bfloat16,
}

impl DataType {
    pub(crate) fn from_code(code: i32) -> Result<Self, NcclError> {
        let all = [
            Self::Int8,
            Self::Uint8,
            Self::Int32,
            Self::Uint32,
            Self::Int64,
            Self::Uint64,
            Self::Float16,
            Self::Float32,
            Self::Float64,
            Self::Bfloat16,
        ];
        let index = usize::try_from(code).map_err(|_| NcclError::InvalidArgument)?;
        all.get(index).copied().ok_or(NcclError::InvalidArgument)
    }

    pub(crate) fn element_bytes(self) -> usize {
        match self {
            Self::Int8 | Self::Uint8 => 1,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float32 => 4,
            Self::Int64 | Self::Uint64 | Self::Float64 => 8,
        }
    }
}

/// `ncclRedOp_t`: how the elements of all ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduction {
    Sum,
    Product,
    Maximum,
    Minimum,
    Average,
}

impl Reduction {
    pub(crate) fn from_code(code: i32) -> Result<Self, NcclError> {
        let all = [
            Self::Sum,
            Self::Product,
            Self::Maximum,
            Self::Minimum,
            Self::Average,
        ];
        let index = usize::try_from(code).map_err(|_| NcclError::InvalidArgument)?;
        all.get(index).copied().ok_or(NcclError::InvalidArgument)
    }
}

/// A type of elements that can be reduced.
trait ReducibleNumber: Copy {
    const BYTES: usize;
    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut [u8]);
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn exceeds(self, other: Self) -> bool;
    fn divide(self, count: u32) -> Self;
}

/// Implements what is the same for elements of every primitive type: size, reading, writing, comparison.
macro_rules! primitive_bytes {
    ($type:ty) => {
        const BYTES: usize = size_of::<$type>();
        fn read(bytes: &[u8]) -> Self {
            let mut own = [0; size_of::<$type>()];
            own.copy_from_slice(bytes);
            <$type>::from_ne_bytes(own)
        }
        fn write(self, bytes: &mut [u8]) {
            bytes.copy_from_slice(&self.to_ne_bytes());
        }
        fn exceeds(self, other: Self) -> bool {
            self > other
        }
    };
}

macro_rules! reducible_integers {
    ($($type:ty)*) => {$(
        impl ReducibleNumber for $type {
            primitive_bytes!($type);
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            fn divide(self, count: u32) -> Self {
                (i128::from(self) / i128::from(count)) as Self
            }
        }
    )*};
}
reducible_integers!(i8 u8 i32 u32 i64 u64);

macro_rules! reducible_floats {
    ($($type:ty, $count_as:expr;)*) => {$(
        impl ReducibleNumber for $type {
            primitive_bytes!($type);
            fn add(self, other: Self) -> Self {
                self + other
            }
            fn multiply(self, other: Self) -> Self {
                self * other
            }
            fn divide(self, count: u32) -> Self {
                self / $count_as(count)
            }
        }
    )*};
}
reducible_floats! { f32, |count| count as f32; f64, f64::from; }

/// IEEE half precision. Arithmetic is done in single precision and rounded after each step.
#[derive(Clone, Copy)]
struct HalfFloat(f32);
/// A bfloat16 number: the upper half of a single-precision number.
#[derive(Clone, Copy)]
struct BrainFloat(f32);

macro_rules! reducible_sixteen_bit_float {
    ($type:ident, $from_bits:path, $to_bits:path) => {
        impl ReducibleNumber for $type {
            const BYTES: usize = 2;
            fn read(bytes: &[u8]) -> Self {
                Self($from_bits(u16::from_ne_bytes([bytes[0], bytes[1]])))
            }
            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&$to_bits(self.0).to_ne_bytes());
            }
            fn add(self, other: Self) -> Self {
                Self($from_bits($to_bits(self.0 + other.0)))
            }
            fn multiply(self, other: Self) -> Self {
                Self($from_bits($to_bits(self.0 * other.0)))
            }
            fn exceeds(self, other: Self) -> bool {
                self.0 > other.0
            }
            fn divide(self, count: u32) -> Self {
                Self($from_bits($to_bits(self.0 / count as f32)))
            }
        }
    };
}
reducible_sixteen_bit_float!(HalfFloat, half_to_single, single_to_half);
reducible_sixteen_bit_float!(BrainFloat, brain_to_single, single_to_brain);

fn brain_to_single(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Rounds a single-precision number to the nearest bfloat16, ties to even.
fn single_to_brain(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    let tie_to_even = bits >> 16 & 1;
    (bits.wrapping_add(0x7fff + tie_to_even) >> 16) as u16
}

fn half_to_single(bits: u16) -> f32 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(bits >> 10 & 0x1f);
    let fraction = f32::from(bits & 0x3ff);
    match exponent {
        0 => sign * fraction * 2f32.powi(-24),
        0x1f if fraction == 0.0 => sign * f32::INFINITY,
        0x1f => f32::NAN,
        _ => sign * (1.0 + fraction / 1024.0) * 2f32.powi(exponent - 15),
    }
}

/// Rounds a single-precision number to the nearest half-precision number, ties to even.
fn single_to_half(value: f32) -> u16 {
    let sign = (value.to_bits() >> 16 & 0x8000) as u16;
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | 0x7e00;
    }
    // At this number rounding to infinity begins: halfway between 65504, the largest half-precision number, and the
    // next step.
    if magnitude >= 65520.0 {
        return sign | 0x7c00;
    }
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-14);
    // The value in units of the last place of a half-precision number with this exponent. The division is exact,
    // because the divisor is a power of two.
    let units = magnitude * 2f32.powi(10 - exponent);
    let rounded = units.round_ties_even() as u32;
    // `rounded` contains the leading bit of a normal number. So adding it also raises the exponent, as a carry does.
    let biased = (exponent + 14) as u32;
    sign | (biased << 10).wrapping_add(rounded) as u16
}

/// Reduces one operand per rank, in rank order, into `result`. All operands and `result` have the same length.
pub(crate) fn reduce_operands(
    data_type: DataType,
    reduction: Reduction,
    operands: &[&[u8]],
    result: &mut [u8],
) {
    match data_type {
        DataType::Int8 => reduce_as::<i8>(reduction, operands, result),
        DataType::Uint8 => reduce_as::<u8>(reduction, operands, result),
        DataType::Int32 => reduce_as::<i32>(reduction, operands, result),
        DataType::Uint32 => reduce_as::<u32>(reduction, operands, result),
        DataType::Int64 => reduce_as::<i64>(reduction, operands, result),
        DataType::Uint64 => reduce_as::<u64>(reduction, operands, result),
        DataType::Float16 => reduce_as::<HalfFloat>(reduction, operands, result),
        DataType::Float32 => reduce_as::<f32>(reduction, operands, result),
        DataType::Float64 => reduce_as::<f64>(reduction, operands, result),
        DataType::Bfloat16 => reduce_as::<BrainFloat>(reduction, operands, result),
    }
}

fn reduce_as<E: ReducibleNumber>(reduction: Reduction, operands: &[&[u8]], result: &mut [u8]) {
    let larger = |left: E, right: E| if right.exceeds(left) { right } else { left };
    let smaller = |left: E, right: E| if left.exceeds(right) { right } else { left };
    match reduction {
        Reduction::Sum | Reduction::Average => combine_all(operands, result, E::add),
        Reduction::Product => combine_all(operands, result, E::multiply),
        Reduction::Maximum => combine_all(operands, result, larger),
        Reduction::Minimum => combine_all(operands, result, smaller),
    }
    if reduction == Reduction::Average {
        let ranks = operands.len() as u32;
        let elements = result.chunks_exact_mut(E::BYTES);
        elements.for_each(|element| E::read(element).divide(ranks).write(element));
    }
}

fn combine_all<E: ReducibleNumber>(
    operands: &[&[u8]],
    result: &mut [u8],
    combine: impl Fn(E, E) -> E,
) {
    let Some((first, rest)) = operands.split_first() else {
        return;
    };
    result.copy_from_slice(first);
    for operand in rest {
        let pairs = result
            .chunks_exact_mut(E::BYTES)
            .zip(operand.chunks_exact(E::BYTES));
        pairs.for_each(|(place, other)| combine(E::read(place), E::read(other)).write(place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_to_single_and_back_is_identity() {
        for bits in 0..=u16::MAX {
            let value = half_to_single(bits);
            if value.is_nan() {
                assert!(half_to_single(single_to_half(value)).is_nan());
            } else {
                assert_eq!(single_to_half(value), bits, "{bits:#06x} is {value}");
            }
        }
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        // 2048 and 2050 are neighbours in half precision.
        assert_eq!(half_to_single(single_to_half(2049.0)), 2048.0);
        assert_eq!(half_to_single(single_to_half(2051.0)), 2052.0);
        assert_eq!(single_to_half(65519.0), single_to_half(65504.0));
        assert_eq!(single_to_half(65520.0), 0x7c00);
        // 256 and 258 are neighbours in bfloat16.
        assert_eq!(brain_to_single(single_to_brain(257.0)), 256.0);
        assert_eq!(brain_to_single(single_to_brain(259.0)), 260.0);
        assert!(brain_to_single(single_to_brain(f32::NAN)).is_nan());
    }

    #[test]
    fn integer_averages_are_truncated() {
        let operands: [&[u8]; 2] = [&(-3i32).to_ne_bytes(), &(-4i32).to_ne_bytes()];
        let mut result = [0; 4];
        reduce_operands(DataType::Int32, Reduction::Average, &operands, &mut result);
        assert_eq!(i32::from_ne_bytes(result), -3);
    }
}
