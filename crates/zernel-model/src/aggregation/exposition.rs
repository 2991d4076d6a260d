//! Writer of Prometheus' text format.

use std::fmt::{Display, Write};
use std::sync::LazyLock;

use super::LatencyHistogram;

/// Upper edges of the exported buckets, as powers of two in nanoseconds: from 1 µs to 69 s, each
/// four times the one before.
const LOG2_BUCKET_EDGES_NS: [u32; 14] = [10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36];

/// The edges as `le` labels in seconds. Durations are whole nanoseconds, so "below the edge" is "at
/// most the edge minus one".
static BUCKET_EDGE_LABELS: LazyLock<[String; LOG2_BUCKET_EDGES_NS.len()]> =
    LazyLock::new(|| LOG2_BUCKET_EDGES_NS.map(|power| ns_to_seconds((1 << power) - 1).to_string()));

/// A text format of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TextFormat {
    /// Prometheus text 0.0.4, durations as histograms.
    Prometheus,
    /// OpenMetrics 1.0, which ends with `# EOF`.
    OpenMetrics,
    /// Prometheus text 0.0.4, durations as `quantile` series.
    Quantiles,
}

/// The type of a metric family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FamilyKind {
    /// A value that never decreases.
    Counter,
    /// A value that may decrease.
    Gauge,
    /// Durations in buckets.
    Histogram,
    /// Durations as quantiles.
    Summary,
}

impl FamilyKind {
    /// Returns the name of the type in the text format.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
            Self::Summary => "summary",
        }
    }
}

/// A text to which families and samples are appended.
#[derive(Debug, Default)]
pub struct Exposition {
    text: String,
    is_open_metrics: bool,
}

impl Exposition {
    /// Creates an OpenMetrics text, in which the name of a counter's family has no `_total`.
    #[must_use]
    pub fn new_open_metrics() -> Self {
        Self {
            text: String::new(),
            is_open_metrics: true,
        }
    }

    /// Writes the help and the type of a family. Its samples must follow.
    pub fn write_family_head(&mut self, name: &str, kind: FamilyKind, help: &str) {
        let name = match kind {
            FamilyKind::Counter if self.is_open_metrics => name.trim_end_matches("_total"),
            _ => name,
        };
        let kind = kind.name();
        self.write_line(format_args!("# HELP {name} {help}"));
        self.write_line(format_args!("# TYPE {name} {kind}"));
    }

    /// Writes a sample: `name` and `suffix`, labels and value.
    pub fn write_sample(
        &mut self,
        name: &str,
        suffix: &str,
        labels: &[(&str, &dyn Display)],
        value: impl Display,
    ) {
        self.write_sample_with_label_text(name, suffix, "", labels, value);
    }

    /// Writes a sample whose first labels are `formatted` by [`label_text`].
    pub fn write_sample_with_label_text(
        &mut self,
        name: &str,
        suffix: &str,
        formatted: &str,
        labels: &[(&str, &dyn Display)],
        value: impl Display,
    ) {
        self.text.push_str(name);
        self.text.push_str(suffix);
        if !formatted.is_empty() || !labels.is_empty() {
            self.text.push('{');
            self.text.push_str(formatted);
            write_labels(&mut self.text, !formatted.is_empty(), labels);
            self.text.push('}');
        }
        writeln!(self.text, " {value}").expect(STRING_WRITE_CANNOT_FAIL);
    }

    /// Writes a histogram: buckets, sum and count.
    pub fn write_histogram(
        &mut self,
        name: &str,
        labels: &[(&str, &dyn Display)],
        histogram: &LatencyHistogram,
    ) {
        let labels = &label_text(labels);
        let separator = if labels.is_empty() { "" } else { "," };
        let counts = histogram
            .counts_below_powers_of_two(LOG2_BUCKET_EDGES_NS)
            .into_iter();
        let edges = BUCKET_EDGE_LABELS.iter().map(String::as_str);
        for (edge, count) in edges.zip(counts).chain([("+Inf", histogram.count)]) {
            for part in [name, "_bucket{", labels, separator, "le=\"", edge, "\"}"] {
                self.text.push_str(part);
            }
            writeln!(self.text, " {count}").expect(STRING_WRITE_CANNOT_FAIL);
        }
        self.write_sum_and_count(name, labels, histogram);
    }

    /// Writes a histogram as a summary: quantiles, sum and count.
    pub fn write_summary(
        &mut self,
        name: &str,
        labels: &[(&str, &dyn Display)],
        histogram: &LatencyHistogram,
    ) {
        let labels = &label_text(labels);
        for share in [0.5, 0.99] {
            let value = ns_to_seconds(histogram.quantile_ns(share));
            self.write_sample_with_label_text(name, "", labels, &[("quantile", &share)], value);
        }
        self.write_sum_and_count(name, labels, histogram);
    }

    fn write_sum_and_count(&mut self, name: &str, labels: &str, histogram: &LatencyHistogram) {
        self.write_sample_with_label_text(
            name,
            "_sum",
            labels,
            &[],
            ns_to_seconds(histogram.sum_ns),
        );
        self.write_sample_with_label_text(name, "_count", labels, &[], histogram.count);
    }

    /// Returns the text.
    #[must_use]
    pub fn into_text(self) -> String {
        self.text
    }

    fn write_line(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{line}").expect(STRING_WRITE_CANNOT_FAIL);
    }
}

/// Formats labels once for several samples.
#[must_use]
pub fn label_text(labels: &[(&str, &dyn Display)]) -> String {
    let mut text = String::new();
    write_labels(&mut text, false, labels);
    text
}

/// Appends labels, after a comma if `has_previous`.
fn write_labels(text: &mut String, mut has_previous: bool, labels: &[(&str, &dyn Display)]) {
    for (label, value) in labels {
        if std::mem::replace(&mut has_previous, true) {
            text.push(',');
        }
        text.push_str(label);
        text.push_str("=\"");
        write!(EscapedLabelValue(text), "{value}").expect(STRING_WRITE_CANNOT_FAIL);
        text.push('"');
    }
}

fn ns_to_seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

const STRING_WRITE_CANNOT_FAIL: &str = "writing to a String cannot fail";

/// Appends a label value with escapes. The format has escapes for three characters only; other control characters
/// become the text `\x1b`, because label values are shown in terminals.
struct EscapedLabelValue<'a>(&'a mut String);

impl Write for EscapedLabelValue<'_> {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let needs_escape = |c: char| c == '\\' || c == '"' || c.is_control();
        let mut rest = text;
        while let Some(at) = rest.find(needs_escape) {
            let (before, from) = rest.split_at(at);
            self.0.push_str(before);
            let mut characters = from.chars();
            match characters.next() {
                Some('\\') => self.0.push_str(r"\\"),
                Some('"') => self.0.push_str("\\\""),
                Some('\n') => self.0.push_str(r"\n"),
                Some(control) => write!(self.0, r"\\x{:02x}", u32::from(control))?,
                None => {}
            }
            rest = characters.as_str();
        }
        self.0.push_str(rest);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_are_escaped() {
        let mut exposition = Exposition::default();
        exposition.write_sample("name", "_sum", &[("op", &"a\"b\\c\nd"), ("pid", &7)], 1.5);
        assert_eq!(
            exposition.into_text(),
            "name_sum{op=\"a\\\"b\\\\c\\nd\",pid=\"7\"} 1.5\n"
        );
    }

    #[test]
    fn label_values_have_no_control_characters() {
        let hostile = "lib\x1b]0;x\x07\r\u{9b}2Jé";
        let text = label_text(&[("caller", &hostile)]);
        assert_eq!(text, r#"caller="lib\\x1b]0;x\\x07\\x0d\\x9b2Jé""#);
    }
}
