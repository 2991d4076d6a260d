//! Numbers of variable length.

/// Appends a number: seven bits per byte, lowest first.
pub(super) fn write_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

/// Appends a signed number. Small numbers of either sign are short.
pub(super) fn write_signed_varint(bytes: &mut Vec<u8>, value: i64) {
    write_varint(bytes, ((value << 1) ^ (value >> 63)) as u64);
}

/// Takes a number from the front of `bytes`; `None` if `bytes` do not begin with a number.
pub(super) fn read_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let byte = read_byte(bytes)?;
        let bits = u64::from(byte & 0x7f);
        // The tenth byte of a number has room for only one bit.
        if shift == 63 && bits > 1 {
            return None;
        }
        value |= bits << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Takes a signed number from the front of `bytes`.
pub(super) fn read_signed_varint(bytes: &mut &[u8]) -> Option<i64> {
    let value = read_varint(bytes)?;
    Some((value >> 1) as i64 ^ -((value & 1) as i64))
}

/// Takes one byte from the front of `bytes`.
pub(super) fn read_byte(bytes: &mut &[u8]) -> Option<u8> {
    let (first, rest) = bytes.split_first()?;
    *bytes = rest;
    Some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip() {
        for value in [0, 1, 127, 128, 300, u64::from(u32::MAX), u64::MAX] {
            let mut bytes = Vec::new();
            write_varint(&mut bytes, value);
            write_signed_varint(&mut bytes, value as i64);
            write_signed_varint(&mut bytes, (value as i64).wrapping_neg());
            let mut rest = &bytes[..];
            assert_eq!(read_varint(&mut rest), Some(value));
            assert_eq!(read_signed_varint(&mut rest), Some(value as i64));
            assert_eq!(
                read_signed_varint(&mut rest),
                Some((value as i64).wrapping_neg())
            );
            assert!(rest.is_empty());
        }
    }

    #[test]
    fn a_number_that_is_too_long_or_cut_is_none() {
        assert_eq!(read_varint(&mut &[0x80_u8][..]), None);
        assert_eq!(read_varint(&mut &[0xff_u8; 10][..]), None);
        assert_eq!(read_varint(&mut &[0x80_u8; 20][..]), None);
    }
}
