//! Bounded, printable copies of text that observed processes control.

/// Longest name that is kept, in bytes.
pub(super) const MAX_NAME_BYTES: usize = 128;

/// Returns at most `limit` bytes of valid text without control characters, safe for terminals and
/// labels.
pub(super) fn to_printable(bytes: &[u8], limit: usize) -> String {
    // A few bytes more than the limit, so that a character at the limit is decoded whole.
    let head = &bytes[..bytes.len().min(limit + 4)];
    let mut text = String::new();
    for character in String::from_utf8_lossy(head).chars() {
        let printable = match character.is_control() {
            true => char::REPLACEMENT_CHARACTER,
            false => character,
        };
        if text.len() + printable.len_utf8() > limit {
            break;
        }
        text.push(printable);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_bounded_and_printable() {
        let cases: [(&[u8], usize, &str); 7] = [
            (b"resnet", 128, "resnet"),
            (b"resnet", 3, "res"),
            (b"a\nb\x1b[2J\0", 128, "a\u{fffd}b\u{fffd}[2J\u{fffd}"),
            (b"\xff\xfe", 128, "\u{fffd}\u{fffd}"),
            ("äöü".as_bytes(), 3, "ä"),
            ("äöü".as_bytes(), 4, "äö"),
            (b"", 128, ""),
        ];
        for (bytes, limit, expected) in cases {
            assert_eq!(to_printable(bytes, limit), expected, "{bytes:?}");
        }
    }

    #[test]
    fn replacement_characters_stay_within_the_limit() {
        assert!(to_printable(&[b'\n'; 1000], MAX_NAME_BYTES).len() <= MAX_NAME_BYTES);
    }
}
