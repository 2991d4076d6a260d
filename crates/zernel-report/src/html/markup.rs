//! Text, numbers and tables as markup that is both HTML and XML.

use std::fmt::{self, Display, Write};

/// A text from anywhere: markup is escaped, invisible characters are replaced.
pub(crate) struct EscapedHtml<'a>(pub(crate) &'a str);

impl Display for EscapedHtml<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '&' => out.write_str("&amp;")?,
                '<' => out.write_str("&lt;")?,
                '>' => out.write_str("&gt;")?,
                '"' => out.write_str("&quot;")?,
                '\'' => out.write_str("&#39;")?,
                '\n' | '\t' => out.write_char(' ')?,
                c if is_invisible(c) => out.write_char(char::REPLACEMENT_CHARACTER)?,
                c => out.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// Whether a character is a control character, changes the writing direction, or is not allowed in XML.
fn is_invisible(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        || matches!(c, '\u{fffe}' | '\u{ffff}')
}

/// A coordinate with one decimal. NaN and infinity become 0.
pub(crate) struct Coordinate(pub(crate) f64);

impl Display for Coordinate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = match self.0.is_finite() {
            true => (10.0 * self.0.clamp(-1e6, 1e6)).round(),
            false => 0.0,
        };
        // Adding 0 turns -0 into 0.
        write!(out, "{}", tenths / 10.0 + 0.0)
    }
}

/// The share of a part in the whole, from 0 to 1.
pub(crate) fn share_of_whole(part: f64, whole: f64) -> f64 {
    match whole > 0.0 && part > 0.0 {
        true => (part / whole).min(1.0),
        false => 0.0,
    }
}

/// A share in percent.
pub(crate) fn format_percent(share: f64) -> String {
    match 100.0 * share {
        some if some > 0.0 && some < 1.0 => "< 1 %".to_owned(),
        some => format!("{some:.0} %"),
    }
}

/// A time in seconds, so that a column of them is comparable.
pub(crate) fn format_seconds(seconds: f64) -> String {
    format!("{seconds:.2} s")
}

/// A time with a suitable unit.
pub(crate) fn format_time(seconds: f64) -> String {
    match seconds {
        0.0 => "0 s".to_owned(),
        tiny if tiny < 1e-4 => format!("{:.1} µs", 1e6 * tiny),
        seconds => crate::text::format_time(seconds),
    }
}

/// The shortest form of a round time.
pub(crate) fn format_tick_time(seconds: f64) -> String {
    let (number, unit) = match seconds {
        0.0 => return "0 s".to_owned(),
        tiny if tiny < 1e-3 => (1e6 * tiny, "µs"),
        small if small < 1.0 => (1e3 * small, "ms"),
        seconds => (seconds, "s"),
    };
    format!("{} {unit}", (1e3 * number).round() / 1e3)
}

/// A count with separated thousands.
pub(crate) fn format_count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// A time in UTC, as `2026-01-31 12:34:56`.
pub(crate) fn format_date(unix_seconds: u64) -> String {
    let (days, second) = (unix_seconds / 86_400, unix_seconds % 86_400);
    // Count years from March, so that the leap day is the last one. 400 years have 146097 days.
    let day = days + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    let year = 400 * era + year + next;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

/// A table. The first cell of a row is its heading.
pub(crate) fn html_table(caption: &str, head: &[&str], rows: &[Vec<String>]) -> String {
    let mut out = format!(
        "<div class=\"scroll\"><table><caption>{}</caption><thead><tr>",
        EscapedHtml(caption)
    );
    for title in head {
        append_markup(
            &mut out,
            format_args!("<th scope=\"col\">{}</th>", EscapedHtml(title)),
        );
    }
    out.push_str("</tr></thead><tbody>\n");
    for row in rows {
        out.push_str("<tr>");
        for (index, cell) in row.iter().enumerate() {
            let cell = EscapedHtml(cell);
            match index {
                0 => append_markup(&mut out, format_args!("<th scope=\"row\">{cell}</th>")),
                _ => append_markup(&mut out, format_args!("<td>{cell}</td>")),
            }
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
    out
}

/// Appends to a string, which cannot fail.
pub(crate) fn append_markup(out: &mut String, what: fmt::Arguments<'_>) {
    let _ = out.write_fmt(what);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        let hostile = "<script>\"'&\0\x1b[31m\u{202e}\u{ffff}</script>\n";
        assert_eq!(
            EscapedHtml(hostile).to_string(),
            "&lt;script&gt;&quot;&#39;&amp;\u{fffd}\u{fffd}[31m\u{fffd}\u{fffd}&lt;/script&gt; "
        );
    }

    #[test]
    fn coordinates_are_finite() {
        for (number, text) in [
            (1.26, "1.3"),
            (-0.01, "0"),
            (300.0, "300"),
            (f64::NAN, "0"),
            (f64::INFINITY, "0"),
            (1e300, "1000000"),
        ] {
            assert_eq!(Coordinate(number).to_string(), text);
        }
    }

    #[test]
    fn shares_are_from_zero_to_one() {
        for (part, whole, expected) in [
            (1.0, 4.0, 0.25),
            (1.0, 0.0, 0.0),
            (-1.0, 2.0, 0.0),
            (3.0, 2.0, 1.0),
        ] {
            assert_eq!(share_of_whole(part, whole), expected);
        }
        assert_eq!(
            (format_percent(0.0), format_percent(0.004)),
            ("0 %".to_owned(), "< 1 %".to_owned())
        );
    }

    #[test]
    fn dates_follow_the_calendar() {
        for (unix_seconds, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_709_251_199, "2024-02-29 23:59:59"),
            (1_735_689_599, "2024-12-31 23:59:59"),
            (4_107_542_400, "2100-03-01 00:00:00"),
        ] {
            assert_eq!(format_date(unix_seconds), text);
        }
    }

    #[test]
    fn times_have_units() {
        assert_eq!(
            [0.0, 2.5e-5, 0.0123, 61.0].map(format_time),
            ["0 s", "25.0 µs", "12.3 ms", "61.00 s"]
        );
        assert_eq!(
            [0.0, 5e-4, 0.1, 2.0].map(format_tick_time),
            ["0 s", "500 µs", "100 ms", "2 s"]
        );
    }

    #[test]
    fn thousands_are_separated() {
        let texts = [0, 999, 1000, 1_234_567].map(format_count);
        assert_eq!(
            texts,
            ["0", "999", "1\u{202f}000", "1\u{202f}234\u{202f}567"]
        );
    }
}
