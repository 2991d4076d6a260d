//! Draws one scenario as an SVG: one line per scheduler, one dot per seed, a bar at the median.

use super::{ScenarioReport, SchedulerRow};

const PLOT_WIDTH: f64 = 760.0;
const LEFT_MARGIN: f64 = 190.0;
const RIGHT_MARGIN: f64 = 110.0;
const TOP_MARGIN: f64 = 64.0;
const ROW_HEIGHT: f64 = 28.0;

pub(super) fn render_svg(report: &ScenarioReport) -> String {
    let values = report
        .rows
        .iter()
        .flat_map(|row| row.by_seed.iter().flatten());
    let axis = Axis {
        largest_value: values.fold(0.0_f64, |largest, value| largest.max(*value)),
    };
    let bottom = TOP_MARGIN + ROW_HEIGHT * report.rows.len() as f64 + 4.0;
    let mut lines = svg_opening_lines(report, bottom + 30.0);
    for (index, row) in report.rows.iter().enumerate() {
        let y = TOP_MARGIN + ROW_HEIGHT * (index as f64 + 0.5);
        lines.push(format!(
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            LEFT_MARGIN - 10.0,
            y + 4.0,
            escape_xml(&row.scheduler)
        ));
        lines.extend(svg_bar_and_dots(row, &axis, y));
    }
    lines.push(format!(
        "<line x1=\"{LEFT_MARGIN}\" y1=\"{bottom}\" x2=\"{}\" y2=\"{bottom}\" stroke=\"#999\"/>",
        PLOT_WIDTH - RIGHT_MARGIN
    ));
    lines.extend(axis.tick_labels(bottom + 18.0));
    lines.push("</svg>\n".to_owned());
    lines.join("\n")
}

/// The horizontal axis, which begins at 0.
struct Axis {
    largest_value: f64,
}

impl Axis {
    fn x_of_value(&self, value: f64) -> f64 {
        let largest = if self.largest_value > 0.0 {
            self.largest_value
        } else {
            1.0
        };
        LEFT_MARGIN + (PLOT_WIDTH - LEFT_MARGIN - RIGHT_MARGIN) * value / largest
    }

    fn tick_labels(&self, y: f64) -> impl Iterator<Item = String> {
        (0..=4).map(move |part| {
            let value = self.largest_value * f64::from(part) / 4.0;
            let x = self.x_of_value(value);
            format!(
                "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\" fill=\"#555\">{value:.0}</text>"
            )
        })
    }
}

/// The beginning of the SVG file, and the title of the plot.
fn svg_opening_lines(report: &ScenarioReport, height: f64) -> Vec<String> {
    let direction = match report.metric.higher_is_better() {
        true => "more is better",
        false => "less is better",
    };
    let label = report.metric.label();
    let label = format!("{label} ({direction}); dots are seeds, bars medians");
    vec![
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{PLOT_WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"13\">"
        ),
        format!("<rect width=\"{PLOT_WIDTH}\" height=\"{height}\" fill=\"white\"/>"),
        format!(
            "<text x=\"12\" y=\"22\" font-weight=\"bold\">{}</text>",
            escape_xml(&report.name)
        ),
        format!(
            "<text x=\"12\" y=\"42\" fill=\"#555\">{}</text>",
            escape_xml(&label)
        ),
    ]
}

/// The median of a scheduler as a bar, and its seeds as dots.
fn svg_bar_and_dots(row: &SchedulerRow, axis: &Axis, y: f64) -> Vec<String> {
    let Some(median) = row.median else {
        return vec![format!(
            "<text x=\"{}\" y=\"{}\" fill=\"#a00\">no figures: {}</text>",
            LEFT_MARGIN + 4.0,
            y + 4.0,
            row.verdict
        )];
    };
    let mut lines = vec![format!(
        "<rect x=\"{LEFT_MARGIN}\" y=\"{}\" width=\"{:.1}\" height=\"14\" fill=\"#9bbbe0\"/>",
        y - 7.0,
        axis.x_of_value(median) - LEFT_MARGIN
    )];
    lines.extend(row.by_seed.iter().flatten().map(|value| {
        format!(
            "<circle cx=\"{:.1}\" cy=\"{y}\" r=\"3\" fill=\"#1f4e8c\" fill-opacity=\"0.6\"/>",
            axis.x_of_value(*value)
        )
    }));
    lines.push(format!(
        "<text x=\"{}\" y=\"{}\">{median:.1}</text>",
        PLOT_WIDTH - RIGHT_MARGIN + 12.0,
        y + 4.0
    ));
    lines
}

fn escape_xml(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
