//! Prometheus' text format, as far as we write it.

use std::fmt::{Display, Write};

/// The kinds of family we write.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Gauge,
    Histogram,
    Summary,
}

/// A text in the making.
#[derive(Debug, Default)]
pub(super) struct Exposition {
    text: String,
}

impl Exposition {
    /// Begins a family; its samples must follow.
    pub(super) fn family(&mut self, name: &str, kind: Kind, help: &str) {
        let kind = match kind {
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
            Kind::Summary => "summary",
        };
        self.line(format_args!("# HELP {name} {help}"));
        self.line(format_args!("# TYPE {name} {kind}"));
    }

    pub(super) fn sample(
        &mut self,
        name: &str,
        suffix: &str,
        labels: &[(&str, &dyn Display)],
        value: impl Display,
    ) {
        let labels: Vec<_> = labels
            .iter()
            .map(|(name, value)| format!("{name}=\"{}\"", escape(&value.to_string())))
            .collect();
        self.line(format_args!(
            "{name}{suffix}{{{}}} {value}",
            labels.join(",")
        ));
    }

    pub(super) fn finish(self) -> String {
        self.text
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{line}").expect("a String takes everything");
    }
}

fn escape(value: &str) -> String {
    value
        .replace('\\', r"\\")
        .replace('"', "\\\"")
        .replace('\n', r"\n")
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
