//! Charts of the ranks: phases, step times and GPU memory.

use std::fmt::Write;

use zernel_phase::steps::Step;

use super::markup::{
    Coordinate, format_percent, format_seconds, format_tick_time, format_time, share_of_whole,
};
use super::svg_plot::{AXIS_LEFT, AXIS_RIGHT, Drawing, TimeAxis, ValueAxis};
use crate::phases::PhaseSeconds;
use crate::process::ProcessReport;
use crate::record::RecordSample;
use crate::render::rank_name;
use crate::steps::{Interruption, StepReport};
use crate::text::format_bytes;

/// Names and letters of the phases, in the order of `PhaseSeconds::seconds_by_phase_name`. The style sheet has their colours.
pub(crate) const PHASE_NAMES_AND_LETTERS: [(&str, char); 5] = [
    ("data loading", 'D'),
    ("GPU compute", 'G'),
    ("NCCL collective", 'N'),
    ("optimizer step", 'O'),
    ("unknown", '?'),
];

/// Longest step, in medians, that is drawn on a linear scale.
const MAX_LINEAR_STEP_MEDIANS: f64 = 20.0;

/// How detailed the charts of a rank are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChartDetail {
    /// Most columns of a timeline.
    pub(crate) max_columns: usize,
    /// Most tooltips of a timeline.
    pub(crate) max_tooltips: usize,
    /// Time intervals of the step chart. Each shows only its longest and its shortest step.
    pub(crate) step_chart_intervals: usize,
}

impl ChartDetail {
    /// The detail for a number of ranks on one page.
    pub(crate) fn for_rank_count(ranks: usize) -> Self {
        match ranks > 16 {
            true => Self {
                max_columns: 100,
                max_tooltips: 25,
                step_chart_intervals: 100,
            },
            false => Self {
                max_columns: 300,
                max_tooltips: 100,
                step_chart_intervals: 400,
            },
        }
    }
}

/// A bar of phases for each rank.
pub(crate) fn draw_phase_bars(id: &str, ranks: &[ProcessReport]) -> String {
    const ROW_HEIGHT: f64 = 38.0;
    const BAR_HEIGHT: f64 = 28.0;
    let summaries: Vec<String> = ranks.iter().map(phase_summary).collect();
    let height = ROW_HEIGHT * ranks.len() as f64;
    let mut drawing = Drawing::new(id, height, "Phases of each rank", &summaries.join(". "));
    for (row, rank) in ranks.iter().enumerate() {
        let y = ROW_HEIGHT * row as f64 + (ROW_HEIGHT - BAR_HEIGHT) / 2.0;
        let middle = y + BAR_HEIGHT / 2.0 + 4.5;
        drawing.add_text((AXIS_LEFT - 10.0, middle), "end", "name", &rank_name(rank));
        let times = rank.training_times();
        let total = times.phases.total_seconds();
        let mut x = AXIS_LEFT;
        for (index, (_, spent)) in times.phases.seconds_by_phase_name().into_iter().enumerate() {
            let width = share_of_whole(spent, total) * (AXIS_RIGHT - AXIS_LEFT);
            let (phase, letter) = PHASE_NAMES_AND_LETTERS[index];
            let part = format_percent(share_of_whole(spent, total));
            let tooltip = format!(
                "{}: {phase} {}, {part}",
                rank_name(rank),
                format_seconds(spent)
            );
            if width > 0.05 {
                drawing.add_rectangle((x, y), (width, BAR_HEIGHT), &format!("p{index}"), &tooltip);
            }
            let labels = [
                format!("{phase} {} · {part}", format_seconds(spent)),
                format!("{letter} {part}"),
                letter.to_string(),
            ];
            let fits = |label: &&String| 6.6 * label.chars().count() as f64 + 8.0 < width;
            if let Some(label) = labels.iter().find(fits) {
                drawing.add_text((x + width / 2.0, middle), "middle", "inside", label);
            }
            x += width;
        }
        drawing.add_text(
            (AXIS_RIGHT + 10.0, middle),
            "start",
            "tick",
            &format_seconds(times.wall_seconds),
        );
    }
    drawing.into_svg()
}

fn phase_summary(rank: &ProcessReport) -> String {
    let phases = &rank.training_times().phases;
    format!(
        "{}: {}",
        rank_name(rank),
        describe_shares(&phase_shares(phases))
    )
}

fn phase_shares(phases: &PhaseSeconds) -> [f64; 5] {
    let total = phases.total_seconds();
    phases
        .seconds_by_phase_name()
        .map(|(_, seconds)| share_of_whole(seconds, total))
}

fn describe_shares(shares: &[f64; 5]) -> String {
    let parts = PHASE_NAMES_AND_LETTERS
        .iter()
        .zip(shares)
        .filter(|(_, share)| **share > 0.0);
    let parts: Vec<String> = parts
        .map(|((phase, _), share)| format!("{phase} {}", format_percent(*share)))
        .collect();
    match parts.is_empty() {
        true => "no data".to_owned(),
        false => parts.join(", "),
    }
}

/// The time axis of all ranks. `None` if there are no samples.
pub(crate) fn common_time_axis(ranks: &[ProcessReport]) -> Option<TimeAxis> {
    let firsts = ranks.iter().filter_map(|rank| rank.timeline.first());
    let lasts = ranks.iter().filter_map(|rank| rank.timeline.last());
    Some(TimeAxis {
        begin_ns: firsts
            .map(|first| zero_sample_at_begin(first).at_ns)
            .min()?,
        end_ns: lasts.map(|last| last.at_ns).max()?,
    })
}

/// The state when observing of a process began: all times were 0.
fn zero_sample_at_begin(first: &RecordSample) -> RecordSample {
    let wall_ns = (1e9 * first.times.wall_seconds.max(0.0)) as u64;
    RecordSample {
        at_ns: first.at_ns.saturating_sub(wall_ns),
        times: crate::times::ProcessTimes::default(),
        memory_bytes: 0,
    }
}

/// Phases of a rank from one sample to a later one.
struct TimelineColumn {
    begin_ns: u64,
    end_ns: u64,
    phase_shares: [f64; 5],
}

/// At most `most` columns, each from one sample to a later one.
fn timeline_columns(
    timeline: &[RecordSample],
    axis: &TimeAxis,
    most: usize,
) -> Vec<TimelineColumn> {
    let Some(first) = timeline.first() else {
        return Vec::new();
    };
    let least_ns = (axis.end_ns - axis.begin_ns).div_ceil(most.max(1) as u64);
    let mut before = zero_sample_at_begin(first);
    let mut columns = Vec::new();
    for (index, sample) in timeline.iter().enumerate() {
        let is_last = index + 1 == timeline.len();
        let is_wide = sample.at_ns - before.at_ns >= least_ns;
        if sample.at_ns > before.at_ns && (is_wide || is_last) {
            let times = sample
                .times
                .combine_with(&before.times, |after, before| (after - before).max(0.0));
            columns.push(TimelineColumn {
                begin_ns: before.at_ns,
                end_ns: sample.at_ns,
                phase_shares: phase_shares(&times.phases),
            });
            before = *sample;
        }
    }
    columns
}

/// Phases of a rank over time, as shares.
pub(crate) fn draw_phase_timeline(
    id: &str,
    rank: &ProcessReport,
    axis: &TimeAxis,
    detail: ChartDetail,
) -> String {
    const TIMELINE_TOP: f64 = 6.0;
    const TIMELINE_BOTTOM: f64 = 116.0;
    let heading = format!("{}: phases over time", rank_name(rank));
    let mut drawing = Drawing::new(id, TIMELINE_BOTTOM + 24.0, &heading, &phase_summary(rank));
    let y = |share: f64| TIMELINE_BOTTOM - share * (TIMELINE_BOTTOM - TIMELINE_TOP);
    for tick in [0.0, 0.5, 1.0] {
        draw_grid_line(&mut drawing, y(tick), &format!("{:.0} %", 100.0 * tick));
    }
    let drawn = timeline_columns(&rank.timeline, axis, detail.max_columns);
    // Back to front: each area covers the lower part of the one before.
    for phase in (0..PHASE_NAMES_AND_LETTERS.len()).rev() {
        let Some(first) = drawn.first() else { break };
        let mut path = format!(
            "M{} {TIMELINE_BOTTOM}",
            Coordinate(axis.x_of_time_ns(first.begin_ns))
        );
        for column in &drawn {
            let top: f64 = column.phase_shares[..=phase].iter().sum();
            let (top, right) = (
                Coordinate(y(top)),
                Coordinate(axis.x_of_time_ns(column.end_ns)),
            );
            let _ = write!(path, "V{top}H{right}");
        }
        path.push_str("V116Z");
        drawing.add_path(&path, &format!("p{phase}"));
    }
    draw_phase_letters(&mut drawing, rank, y);
    for column in timeline_columns(&rank.timeline, axis, detail.max_tooltips) {
        let (left, right) = (
            axis.x_of_time_ns(column.begin_ns),
            axis.x_of_time_ns(column.end_ns),
        );
        let tooltip = format!(
            "{:.1} to {:.1} s: {}",
            axis.seconds_since_begin(column.begin_ns),
            axis.seconds_since_begin(column.end_ns),
            describe_shares(&column.phase_shares)
        );
        drawing.add_rectangle(
            (left, TIMELINE_TOP),
            (right - left, TIMELINE_BOTTOM - TIMELINE_TOP),
            "hit",
            &tooltip,
        );
    }
    drawing.add_time_axis(axis, TIMELINE_BOTTOM);
    drawing.into_svg()
}

/// Labels the phases on the right, at their mean height.
fn draw_phase_letters(drawing: &mut Drawing, rank: &ProcessReport, y: impl Fn(f64) -> f64) {
    let mut below = 0.0;
    for (share, (_, letter)) in phase_shares(&rank.times.phases)
        .into_iter()
        .zip(PHASE_NAMES_AND_LETTERS)
    {
        if share >= 0.1 {
            let middle = y(below + share / 2.0) + 4.0;
            drawing.add_text(
                (AXIS_RIGHT + 8.0, middle),
                "start",
                "tick",
                &format!("{letter} {}", format_percent(share)),
            );
        }
        below += share;
    }
}

/// The smallest and the largest value in each of `intervals` time intervals.
fn min_and_max_per_interval(points: &[(f64, f64)], intervals: usize) -> Vec<(f64, f64)> {
    if points.len() <= 2 * intervals {
        return points.to_vec();
    }
    let width = (AXIS_RIGHT - AXIS_LEFT) / intervals as f64;
    let interval = |x: f64| ((x - AXIS_LEFT) / width) as usize;
    let chunks = points.chunk_by(|a, b| interval(a.0) == interval(b.0));
    let extremes = chunks.flat_map(|chunk| {
        let by_value = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let least = chunk.iter().min_by(by_value);
        let largest = chunk
            .iter()
            .max_by(by_value)
            .filter(|largest| Some(*largest) != least);
        let mut both: Vec<(f64, f64)> = least.into_iter().chain(largest).copied().collect();
        both.sort_by(|a, b| a.0.total_cmp(&b.0));
        both
    });
    extremes.collect()
}

/// Whether step times vary too much for a linear scale.
pub(crate) fn needs_logarithmic_scale(steps: &StepReport) -> bool {
    let durations = steps.series.iter().map(Step::duration_ns);
    let longest = durations.max().unwrap_or(0) as f64 / 1e9;
    longest > MAX_LINEAR_STEP_MEDIANS * steps.median_seconds
}

/// Step times over time. `None` if there are none.
pub(crate) fn draw_step_times(
    id: &str,
    rank: &ProcessReport,
    steps: &StepReport,
    axis: &TimeAxis,
    detail: ChartDetail,
) -> Option<String> {
    let durations = steps.series.iter().map(Step::duration_ns);
    let durations: Vec<f64> = durations.map(|ns| ns as f64 / 1e9).collect();
    let values = step_time_axis(&durations, needs_logarithmic_scale(steps))?;
    let heading = format!("{}: step times", rank_name(rank));
    let description = format!(
        "{} steps, median {}, 99th percentile {}, longest {}, {} stalls, {} pauses",
        steps.count,
        format_time(steps.median_seconds),
        format_time(steps.p99_seconds),
        format_time(steps.longest_seconds),
        steps.stalled,
        steps.pauses.len()
    );
    let mut drawing = Drawing::new(id, values.bottom + 24.0, &heading, &description);
    for tick in values.tick_values() {
        draw_grid_line(
            &mut drawing,
            values.y_of_value(tick),
            &format_tick_time(tick),
        );
    }
    draw_interruptions(&mut drawing, steps, axis, &values);
    let ends = steps
        .series
        .iter()
        .map(|step| axis.x_of_time_ns(step.end_ns));
    let points: Vec<(f64, f64)> = ends.zip(durations).collect();
    let mut dots = String::new();
    for (x, duration) in min_and_max_per_interval(&points, detail.step_chart_intervals) {
        let (x, y) = (Coordinate(x), Coordinate(values.y_of_value(duration)));
        let _ = write!(dots, "M{x} {y}h0");
    }
    drawing.add_path(&dots, "dots");
    draw_quantile_lines(&mut drawing, steps, &values);
    drawing.add_time_axis(axis, values.bottom);
    Some(drawing.into_svg())
}

/// The value axis for step times in seconds. `None` if no step takes any time.
fn step_time_axis(durations: &[f64], is_logarithmic: bool) -> Option<ValueAxis> {
    let longest = durations.iter().copied().fold(0.0, f64::max);
    let shortest = durations.iter().copied().fold(longest, f64::min);
    let axis = ValueAxis {
        bottom: 168.0,
        top: 38.0,
        min_value: if is_logarithmic {
            0.8 * shortest.max(longest / 1e6)
        } else {
            0.0
        },
        max_value: 1.08 * longest,
        is_logarithmic,
    };
    (longest > 0.0).then_some(axis)
}

/// A horizontal line with its label on the left.
fn draw_grid_line(drawing: &mut Drawing, y: f64, label: &str) {
    drawing.add_line((AXIS_LEFT, y), (AXIS_RIGHT, y), "grid");
    drawing.add_text((AXIS_LEFT - 8.0, y + 4.0), "end", "tick", label);
}

/// Lines for the median and the 99th percentile, with labels that do not overlap.
fn draw_quantile_lines(drawing: &mut Drawing, steps: &StepReport, values: &ValueAxis) {
    let p99 = values.y_of_value(steps.p99_seconds);
    let median = values.y_of_value(steps.median_seconds);
    let lines = [
        ("median", steps.median_seconds, median, median + 4.0),
        ("p99", steps.p99_seconds, p99, p99.min(median - 14.0) + 4.0),
    ];
    for (label, seconds, y, label_y) in lines {
        drawing.add_line((AXIS_LEFT, y), (AXIS_RIGHT, y), label);
        let text = format!("{label} {}", format_time(seconds));
        drawing.add_text((AXIS_RIGHT + 8.0, label_y), "start", "tick", &text);
    }
}

/// Bands for warm-up and pauses, boxes around stalls, with labels where there is room.
fn draw_interruptions(
    drawing: &mut Drawing,
    steps: &StepReport,
    axis: &TimeAxis,
    values: &ValueAxis,
) {
    let Some(first) = steps.series.first() else {
        return;
    };
    let begin = axis.seconds_since_begin(first.begin_ns);
    let warm_up = Interruption {
        at_seconds: 0.0,
        seconds: steps.warm_up_seconds,
    };
    let warm_up = (steps.warm_up > 0).then_some(("warm-up", &warm_up));
    let pauses = steps.pauses.iter().map(|pause| ("pause", pause));
    let stalls = steps.stalls.iter().map(|stall| ("stall", stall));
    let mut all: Vec<(&str, &Interruption)> =
        warm_up.into_iter().chain(pauses).chain(stalls).collect();
    // The longest come first, so that they get the labels.
    all.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
    let mut lines: [Vec<(f64, f64)>; 2] = Default::default();
    for (kind, one) in all {
        let (from, to) = (begin + one.at_seconds, begin + one.at_seconds + one.seconds);
        let (left, right) = (axis.x_of_seconds(from), axis.x_of_seconds(to));
        let words = format!("{kind} {}", format_time(one.seconds));
        let tooltip = format!("{words}, from {from:.1} s on");
        if kind == "stall" {
            let place = (right - 4.5, values.y_of_value(one.seconds) - 4.5);
            drawing.add_rectangle(place, (9.0, 9.0), "stall", &tooltip);
        } else {
            let size = ((right - left).max(2.0), values.bottom - values.top);
            drawing.add_rectangle((left, values.top), size, "band", &tooltip);
        }
        let width = 6.4 * words.chars().count() as f64 + 10.0;
        let x = (if kind == "stall" {
            right - width / 2.0
        } else {
            left
        })
        .min(AXIS_RIGHT - width);
        let has_room =
            |line: &Vec<(f64, f64)>| line.iter().all(|(from, to)| x + width <= *from || x >= *to);
        if let Some(line) = lines.iter().position(has_room) {
            let y = values.top - 10.0 - 15.0 * line as f64;
            drawing.add_text((x, y), "start", "tick", &words);
            lines[line].push((x, x + width));
        }
    }
}

/// GPU memory in use over time. `None` if there was never any.
pub(crate) fn draw_gpu_memory(
    id: &str,
    rank: &ProcessReport,
    axis: &TimeAxis,
    detail: ChartDetail,
) -> Option<String> {
    const PLOT_TOP: f64 = 8.0;
    const PLOT_BOTTOM: f64 = 78.0;
    let samples = rank.timeline.iter();
    let points: Vec<(f64, f64)> = samples
        .map(|sample| (axis.x_of_time_ns(sample.at_ns), sample.memory_bytes as f64))
        .collect();
    let most = points.iter().map(|(_, bytes)| *bytes).fold(0.0, f64::max);
    if most <= 0.0 {
        return None;
    }
    let peak = rank.gpu_memory_peak_bytes as f64;
    let values = ValueAxis {
        bottom: PLOT_BOTTOM,
        top: PLOT_TOP,
        min_value: 0.0,
        max_value: 1.05 * most.max(peak),
        is_logarithmic: false,
    };
    let heading = format!("{}: GPU memory", rank_name(rank));
    let description = format!(
        "At most {}",
        format_bytes(rank.gpu_memory_peak_bytes.max(most as u64))
    );
    let mut drawing = Drawing::new(id, PLOT_BOTTOM + 24.0, &heading, &description);
    draw_memory_grid(&mut drawing, &values);
    let points = min_and_max_per_interval(&points, detail.max_columns / 2);
    let begin = Coordinate(points.first().map_or(AXIS_LEFT, |first| first.0));
    let mut path = format!("M{begin} {PLOT_BOTTOM}");
    for (x, bytes) in &points {
        let _ = write!(
            path,
            "H{}V{}",
            Coordinate(*x),
            Coordinate(values.y_of_value(*bytes))
        );
    }
    drawing.add_path(&format!("{path}V78Z"), "memory");
    if peak > 0.0 {
        let y = values.y_of_value(peak);
        drawing.add_line((AXIS_LEFT, y), (AXIS_RIGHT, y), "p99");
        let words = format!("peak {}", format_bytes(rank.gpu_memory_peak_bytes));
        drawing.add_text((AXIS_RIGHT + 8.0, y + 4.0), "start", "tick", &words);
    }
    drawing.add_time_axis(axis, PLOT_BOTTOM);
    Some(drawing.into_svg())
}

/// Draws two or three grid lines, at a power of two of bytes and at its double.
fn draw_memory_grid(drawing: &mut Drawing, values: &ValueAxis) {
    let step = (values.max_value / 2.0).log2().floor().exp2();
    for tick in [0.0, step, 2.0 * step] {
        if tick <= values.max_value {
            let label = format_bytes(tick as u64);
            draw_grid_line(drawing, values.y_of_value(tick), &label);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::times::ProcessTimes;

    #[test]
    fn thinning_keeps_the_extremes() {
        let points: Vec<(f64, f64)> = (0..10_000)
            .map(|number| {
                let x = AXIS_LEFT + (AXIS_RIGHT - AXIS_LEFT) * f64::from(number) / 10_000.0;
                let value = match number {
                    1234 => 99.0,
                    4321 => 0.0,
                    _ => 1.0,
                };
                (x, value)
            })
            .collect();
        let thinned = min_and_max_per_interval(&points, 100);
        assert!(thinned.len() <= 200, "{}", thinned.len());
        assert!(thinned.contains(&points[1234]) && thinned.contains(&points[4321]));
        assert!(thinned.is_sorted_by(|a, b| a.0 <= b.0));
    }

    #[test]
    fn columns_have_the_phases_between_two_samples() {
        // Five seconds of data loading, then five seconds of GPU compute.
        let sample = |second: u64| {
            let data_loading = second.min(5) as f64;
            let phases = PhaseSeconds {
                data_loading,
                gpu_compute: second as f64 - data_loading,
                ..PhaseSeconds::default()
            };
            RecordSample {
                at_ns: (100 + second) * 1_000_000_000,
                times: ProcessTimes {
                    wall_seconds: second as f64,
                    phases,
                    ..ProcessTimes::default()
                },
                memory_bytes: 0,
            }
        };
        let rank = ProcessReport {
            timeline: (1..=10).map(sample).collect(),
            ..ProcessReport::default()
        };
        let axis = common_time_axis(std::slice::from_ref(&rank)).expect("samples");
        assert_eq!(
            (axis.begin_ns, axis.length_seconds()),
            (100_000_000_000, 10.0)
        );
        for (most, expected) in [(2, 2), (10, 10), (300, 10)] {
            let columns = timeline_columns(&rank.timeline, &axis, most);
            assert_eq!(columns.len(), expected);
            for column in columns {
                let is_late = column.begin_ns >= 105_000_000_000;
                let expected = if is_late { [0.0, 1.0] } else { [1.0, 0.0] };
                assert_eq!(column.phase_shares[..2], expected);
            }
        }
    }
}
