//! Formatting of sizes, times and lines in tables and reports.

/// A size with its unit.
pub fn format_bytes(bytes: u64) -> String {
    const BYTE_UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut size = bytes as f64 / 1024.0;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < BYTE_UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    format!("{size:.1} {}", BYTE_UNITS[unit])
}

/// A time in milliseconds or seconds.
pub fn format_time(seconds: f64) -> String {
    match seconds < 1.0 {
        true => format!("{:.1} ms", 1e3 * seconds),
        false => format!("{seconds:.2} s"),
    }
}

/// The text, cut to `width` characters. Control characters become `?`.
pub fn shorten_text(text: &str, width: usize) -> String {
    let text: String = text
        .trim_end()
        .chars()
        .map(replace_control_character)
        .collect();
    if text.chars().count() <= width {
        return text;
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    kept + "…"
}

/// The text for a terminal: control characters except line breaks become `?`. They could move the cursor or change what
/// the terminal shows.
pub fn replace_control_characters(text: &str) -> String {
    let keep = |c: char| {
        if c == '\n' {
            c
        } else {
            replace_control_character(c)
        }
    };
    text.chars().map(keep).collect()
}

fn replace_control_character(c: char) -> char {
    if c.is_control() { '?' } else { c }
}

/// Joins the words of a phrase so that [`wrap_lines`] keeps it on one line.
pub fn join_with_no_break_spaces(phrase: &str) -> String {
    phrase.replace(' ', NO_BREAK_SPACE)
}

const NO_BREAK_SPACE: &str = "\u{a0}";

/// Breaks a text into lines of at most `width` characters. A longer word gets a line of its own. Control characters
/// become `?`.
pub fn wrap_lines(text: &str, width: usize) -> Vec<String> {
    let text = replace_control_characters(text);
    let mut lines = vec![String::new()];
    for word in text.split([' ', '\n']).filter(|word| !word.is_empty()) {
        let length = word.chars().count();
        let line = lines
            .last_mut()
            .filter(|line| line.is_empty() || line.chars().count() + 1 + length <= width);
        match line {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) => {
                line.push(' ');
                line.push_str(word);
            }
            None => lines.push(word.to_owned()),
        }
    }
    for line in &mut lines {
        *line = line.replace(NO_BREAK_SPACE, " ");
    }
    lines
}

/// A number with its 95 % interval. `error`: 0 if it was counted, `None` if there is no interval.
pub(crate) fn format_estimate(
    number: u64,
    error: Option<u64>,
    text: impl Fn(u64) -> String,
) -> String {
    match error {
        Some(0) => text(number),
        Some(error) => format!("{} ± {}", text(number), text(error)),
        None if number == 0 => "unknown".into(),
        None => format!("about {}", text(number)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(format_bytes(0), "0 B");
        assert_eq!(format_bytes(1536), "1.5 KiB");
        assert_eq!(format_bytes(80 << 30), "80.0 GiB");
        assert_eq!(format_bytes(u64::MAX), "16384.0 PiB");
    }

    #[test]
    fn times_have_units() {
        assert_eq!(format_time(0.0123), "12.3 ms");
        assert_eq!(format_time(61.0), "61.00 s");
    }

    #[test]
    fn a_long_text_is_cut_and_control_characters_are_replaced() {
        assert_eq!(shorten_text("python", 6), "python");
        assert_eq!(shorten_text("python3", 6), "pytho…");
        assert_eq!(shorten_text("\x1b[31m", 9), "?[31m");
    }

    #[test]
    fn an_estimate_shows_its_interval() {
        let text = |error| format_estimate(90, error, |number| number.to_string());
        assert_eq!(text(Some(0)), "90");
        assert_eq!(text(Some(5)), "90 ± 5");
        assert_eq!(text(None), "about 90");
        assert_eq!(
            format_estimate(0, None, |number| number.to_string()),
            "unknown"
        );
    }

    #[test]
    fn no_text_controls_the_terminal() {
        let hostile = "a\x1b]0;title\x07\r\u{9b}2J\u{7f}\nb";
        assert_eq!(replace_control_characters(hostile), "a?]0;title???2J?\nb");
        assert_eq!(wrap_lines(hostile, 40), ["a?]0;title???2J? b"]);
    }

    #[test]
    fn lines_are_no_longer_than_the_width() {
        assert_eq!(wrap_lines("a bc def", 4), ["a bc", "def"]);
        assert_eq!(wrap_lines("abcdef g", 4), ["abcdef", "g"]);
        assert_eq!(
            wrap_lines(&format!("a {}", join_with_no_break_spaces("b c")), 4),
            ["a", "b c"]
        );
    }
}
