//! One scenario as an SVG: one line per scheduler, one dot per seed, a bar at the median.

use std::fmt::Write;

use super::ScenarioReport;

const WIDTH: f64 = 760.0;
const LEFT: f64 = 190.0;
const RIGHT: f64 = 110.0;
const TOP: f64 = 64.0;
const LINE: f64 = 28.0;

pub(super) fn svg(report: &ScenarioReport) -> String {
    let height = TOP + LINE * report.rows.len() as f64 + 34.0;
    let values = report
        .rows
        .iter()
        .flat_map(|row| row.by_seed.iter().flatten());
    let largest = values.fold(0.0_f64, |largest, value| largest.max(*value));
    let scale = |value: f64| {
        LEFT + (WIDTH - LEFT - RIGHT) * value / if largest > 0.0 { largest } else { 1.0 }
    };
    let mut out = String::new();
    let mut put = |text: String| {
        out.push_str(&text);
        out.push('\n');
    };
    put(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"13\">"
    ));
    put(format!(
        "<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>"
    ));
    put(format!(
        "<text x=\"12\" y=\"22\" font-weight=\"bold\">{}</text>",
        escaped(&report.name)
    ));
    let direction = if report.metric.higher_is_better() {
        "more is better"
    } else {
        "less is better"
    };
    let label = format!(
        "{} ({direction}); dots are seeds, bars medians",
        report.metric.label()
    );
    put(format!(
        "<text x=\"12\" y=\"42\" fill=\"#555\">{}</text>",
        escaped(&label)
    ));
    for (index, row) in report.rows.iter().enumerate() {
        let y = TOP + LINE * (index as f64 + 0.5);
        put(format!(
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            LEFT - 10.0,
            y + 4.0,
            escaped(&row.scheduler)
        ));
        let Some(median) = row.median else {
            put(format!(
                "<text x=\"{}\" y=\"{}\" fill=\"#a00\">no figures: {}</text>",
                LEFT + 4.0,
                y + 4.0,
                row.verdict
            ));
            continue;
        };
        let width = scale(median) - LEFT;
        put(format!(
            "<rect x=\"{LEFT}\" y=\"{}\" width=\"{width:.1}\" height=\"14\" fill=\"#9bbbe0\"/>",
            y - 7.0
        ));
        for value in row.by_seed.iter().flatten() {
            put(format!(
                "<circle cx=\"{:.1}\" cy=\"{y}\" r=\"3\" fill=\"#1f4e8c\" fill-opacity=\"0.6\"/>",
                scale(*value)
            ));
        }
        put(format!(
            "<text x=\"{}\" y=\"{}\">{median:.1}</text>",
            WIDTH - RIGHT + 12.0,
            y + 4.0
        ));
    }
    let axis = TOP + LINE * report.rows.len() as f64 + 4.0;
    put(format!(
        "<line x1=\"{LEFT}\" y1=\"{axis}\" x2=\"{}\" y2=\"{axis}\" stroke=\"#999\"/>",
        WIDTH - RIGHT
    ));
    let mut ticks = String::new();
    for part in 0..=4 {
        let value = largest * f64::from(part) / 4.0;
        let _ = write!(
            ticks,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#555\">{value:.0}</text>",
            scale(value),
            axis + 18.0
        );
    }
    put(ticks);
    put("</svg>".to_owned());
    out
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
