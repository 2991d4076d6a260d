//! Prometheus' text format, as far as we write it.

use std::fmt::{Display, Write};
use std::sync::LazyLock;

use super::LatencyHistogram;

/// The upper edges of the exposed buckets, as powers of two in nanoseconds: 1 µs to 69 s, by fours.
const EDGES: [u32; 14] = [10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36];

/// The same as labels, in seconds. Durations are whole nanoseconds, so "shorter than the edge" is "at
/// most one less".
static EDGE_LABELS: LazyLock<[String; EDGES.len()]> =
    LazyLock::new(|| EDGES.map(|power| seconds((1 << power) - 1).to_string()));

/// The kinds of family we write.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    Counter,
    Gauge,
    Histogram,
    Summary,
}

impl Kind {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
            Self::Summary => "summary",
        }
    }
}

/// A text in the making.
#[derive(Debug, Default)]
pub(crate) struct Exposition {
    text: String,
    open_metrics: bool,
}

impl Exposition {
    /// In OpenMetrics, whose counters are called by what they count.
    pub(crate) fn open_metrics() -> Self {
        Self {
            text: String::new(),
            open_metrics: true,
        }
    }

    /// Begins a family; its samples must follow.
    pub(crate) fn family(&mut self, name: &str, kind: Kind, help: &str) {
        let name = match kind {
            Kind::Counter if self.open_metrics => name.trim_end_matches("_total"),
            _ => name,
        };
        let kind = kind.name();
        self.line(format_args!("# HELP {name} {help}"));
        self.line(format_args!("# TYPE {name} {kind}"));
    }

    pub(crate) fn sample(
        &mut self,
        name: &str,
        suffix: &str,
        labels: &[(&str, &dyn Display)],
        value: impl Display,
    ) {
        self.sample_with(name, suffix, "", labels, value);
    }

    /// The same with further labels before the others, as [`label_text`] writes them.
    pub(crate) fn sample_with(
        &mut self,
        name: &str,
        suffix: &str,
        written: &str,
        labels: &[(&str, &dyn Display)],
        value: impl Display,
    ) {
        self.text.push_str(name);
        self.text.push_str(suffix);
        if !written.is_empty() || !labels.is_empty() {
            self.text.push('{');
            self.text.push_str(written);
            write_labels(&mut self.text, !written.is_empty(), labels);
            self.text.push('}');
        }
        writeln!(self.text, " {value}").expect(ENDLESS);
    }

    /// The samples of one histogram.
    pub(crate) fn histogram(
        &mut self,
        name: &str,
        labels: &[(&str, &dyn Display)],
        histogram: &LatencyHistogram,
    ) {
        let labels = &label_text(labels);
        let separator = if labels.is_empty() { "" } else { "," };
        let counts = histogram.counts_below(EDGES).into_iter();
        let edges = EDGE_LABELS.iter().map(String::as_str);
        for (edge, count) in edges.zip(counts).chain([("+Inf", histogram.count)]) {
            for part in [name, "_bucket{", labels, separator, "le=\"", edge, "\"}"] {
                self.text.push_str(part);
            }
            writeln!(self.text, " {count}").expect(ENDLESS);
        }
        self.sum_and_count(name, labels, histogram);
    }

    /// The samples of one histogram as a summary.
    pub(crate) fn summary(
        &mut self,
        name: &str,
        labels: &[(&str, &dyn Display)],
        histogram: &LatencyHistogram,
    ) {
        let labels = &label_text(labels);
        for share in [0.5, 0.99] {
            let value = seconds(histogram.quantile_ns(share));
            self.sample_with(name, "", labels, &[("quantile", &share)], value);
        }
        self.sum_and_count(name, labels, histogram);
    }

    fn sum_and_count(&mut self, name: &str, labels: &str, histogram: &LatencyHistogram) {
        self.sample_with(name, "_sum", labels, &[], seconds(histogram.sum_ns));
        self.sample_with(name, "_count", labels, &[], histogram.count);
    }

    pub(crate) fn finish(self) -> String {
        self.text
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{line}").expect(ENDLESS);
    }
}

/// Labels as they stand in a sample, for those that several samples share.
pub(crate) fn label_text(labels: &[(&str, &dyn Display)]) -> String {
    let mut text = String::new();
    write_labels(&mut text, false, labels);
    text
}

/// Adds labels, to others if there are any.
fn write_labels(text: &mut String, mut others: bool, labels: &[(&str, &dyn Display)]) {
    for (label, value) in labels {
        if std::mem::replace(&mut others, true) {
            text.push(',');
        }
        text.push_str(label);
        text.push_str("=\"");
        write!(Escaped(text), "{value}").expect(ENDLESS);
        text.push('"');
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

const ENDLESS: &str = "a String takes everything";

/// Writes the value of a label.
struct Escaped<'a>(&'a mut String);

impl Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let mut rest = text;
        while let Some(at) = rest.find(['\\', '"', '\n']) {
            self.0.push_str(&rest[..at]);
            self.0.push_str(match rest.as_bytes()[at] {
                b'\\' => r"\\",
                b'"' => "\\\"",
                _ => r"\n",
            });
            rest = &rest[at + 1..];
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
        exposition.sample("name", "_sum", &[("op", &"a\"b\\c\nd"), ("pid", &7)], 1.5);
        assert_eq!(
            exposition.finish(),
            "name_sum{op=\"a\\\"b\\\\c\\nd\",pid=\"7\"} 1.5\n"
        );
    }
}
