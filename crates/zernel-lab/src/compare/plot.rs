//! One scenario as an SVG: one line per scheduler, one dot per seed, a bar at the median.

use super::{ScenarioReport, SchedulerRow};

const WIDTH: f64 = 760.0;
const LEFT: f64 = 190.0;
const RIGHT: f64 = 110.0;
const TOP: f64 = 64.0;
const LINE: f64 = 28.0;

pub(super) fn svg(report: &ScenarioReport) -> String {
    let values = report
        .rows
        .iter()
        .flat_map(|row| row.by_seed.iter().flatten());
    let axis = Axis {
        largest: values.fold(0.0_f64, |largest, value| largest.max(*value)),
    };
    let bottom = TOP + LINE * report.rows.len() as f64 + 4.0;
    let mut lines = heading(report, bottom + 30.0);
    for (index, row) in report.rows.iter().enumerate() {
        let y = TOP + LINE * (index as f64 + 0.5);
        lines.push(format!(
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            LEFT - 10.0,
            y + 4.0,
            escaped(&row.scheduler)
        ));
        lines.extend(bar(row, &axis, y));
    }
    lines.push(format!(
        "<line x1=\"{LEFT}\" y1=\"{bottom}\" x2=\"{}\" y2=\"{bottom}\" stroke=\"#999\"/>",
        WIDTH - RIGHT
    ));
    lines.extend(axis.ticks(bottom + 18.0));
    lines.push("</svg>\n".to_owned());
    lines.join("\n")
}

/// The horizontal axis, from 0.
struct Axis {
    largest: f64,
}

impl Axis {
    fn x(&self, value: f64) -> f64 {
        let largest = if self.largest > 0.0 {
            self.largest
        } else {
            1.0
        };
        LEFT + (WIDTH - LEFT - RIGHT) * value / largest
    }

    fn ticks(&self, y: f64) -> impl Iterator<Item = String> {
        (0..=4).map(move |part| {
            let value = self.largest * f64::from(part) / 4.0;
            let x = self.x(value);
            format!(
                "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\" fill=\"#555\">{value:.0}</text>"
            )
        })
    }
}

/// The start of the file and its title.
fn heading(report: &ScenarioReport, height: f64) -> Vec<String> {
    let direction = match report.metric.higher_is_better() {
        true => "more is better",
        false => "less is better",
    };
    let label = report.metric.label();
    let label = format!("{label} ({direction}); dots are seeds, bars medians");
    vec![
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"13\">"
        ),
        format!("<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>"),
        format!(
            "<text x=\"12\" y=\"22\" font-weight=\"bold\">{}</text>",
            escaped(&report.name)
        ),
        format!(
            "<text x=\"12\" y=\"42\" fill=\"#555\">{}</text>",
            escaped(&label)
        ),
    ]
}

/// The median of a scheduler as a bar, and its seeds as dots.
fn bar(row: &SchedulerRow, axis: &Axis, y: f64) -> Vec<String> {
    let Some(median) = row.median else {
        return vec![format!(
            "<text x=\"{}\" y=\"{}\" fill=\"#a00\">no figures: {}</text>",
            LEFT + 4.0,
            y + 4.0,
            row.verdict
        )];
    };
    let mut lines = vec![format!(
        "<rect x=\"{LEFT}\" y=\"{}\" width=\"{:.1}\" height=\"14\" fill=\"#9bbbe0\"/>",
        y - 7.0,
        axis.x(median) - LEFT
    )];
    lines.extend(row.by_seed.iter().flatten().map(|value| {
        format!(
            "<circle cx=\"{:.1}\" cy=\"{y}\" r=\"3\" fill=\"#1f4e8c\" fill-opacity=\"0.6\"/>",
            axis.x(*value)
        )
    }));
    lines.push(format!(
        "<text x=\"{}\" y=\"{}\">{median:.1}</text>",
        WIDTH - RIGHT + 12.0,
        y + 4.0
    ));
    lines
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
