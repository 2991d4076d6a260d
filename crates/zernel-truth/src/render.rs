//! A score as text.

use std::fmt::Write;

use crate::report::TruthReport;
use crate::score::{DetectionScore, DistanceSummary};
use crate::verdict::ReportedVerdict;

/// Renders a score.
#[must_use]
pub fn render_report(report: &TruthReport) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write_report(&mut text, report);
    text
}

fn write_report(text: &mut String, report: &TruthReport) -> std::fmt::Result {
    let verdict = report.verdict.as_deref().unwrap_or("unknown");
    writeln!(
        text,
        "{}: {} training processes, {:.1} s of training, known bottleneck: {verdict}",
        match report.variant.is_empty() {
            true => "no stamps of a training loop",
            false => &report.variant,
        },
        report.processes,
        report.phases.seconds,
    )?;
    writeln!(
        text,
        "observed {:.1} % of it, {} events lost",
        report.observed_share * 100.0,
        report.lost_events
    )?;
    if let Some(step_us) = report.median_step_us {
        writeln!(text, "median step {:.2} ms", step_us / 1e3)?;
    }
    write_score(text, "Phases of processes", &report.phases)?;
    writeln!(
        text,
        "{:14}{}",
        "boundaries",
        format_distances(&report.boundaries)
    )?;
    writeln!(text, "{:14}{}", "delay", format_distances(&report.delays))?;
    let kernel = report.kernel_delay;
    writeln!(
        text,
        "{:14}median {:.1} µs, p99 {:.1} µs over {} calls",
        "in the kernel",
        f64::from(kernel.median_ns) / 1e3,
        f64::from(kernel.p99_ns) / 1e3,
        kernel.count
    )?;
    if let Some(busy) = report.gpu_busy {
        writeln!(
            text,
            "{:14}median error {:.1} points over {} s, mean {:+.1} points",
            "GPU busy", busy.median_points, busy.seconds, busy.mean_points
        )?;
    }
    if let Some(reported) = &report.reported {
        write_verdict(text, reported)?;
    }
    let sampled = report.sampled_phases.macro_f1;
    writeln!(
        text,
        "{:14}macro-F1 {}",
        "sampled rule",
        format_ratio(sampled)
    )?;
    write_score(text, "Activities of processes", &report.activities)?;
    write_score(text, "Classes of threads", &report.classes)
}

fn write_verdict(text: &mut String, reported: &ReportedVerdict) -> std::fmt::Result {
    let right = match reported.is_right {
        Some(true) => "right",
        Some(false) => "wrong",
        None => "not scored",
    };
    let (bound, evidence) = (&reported.bound, &reported.evidence);
    writeln!(text, "{:14}{bound} ({right}): {evidence}", "verdict")
}

fn write_score(text: &mut String, title: &str, score: &DetectionScore) -> std::fmt::Result {
    writeln!(
        text,
        "\n{title}: macro-F1 {}, shares within {:.1} points, unknown {:.1} %, absent {:.1} %",
        format_ratio(score.macro_f1),
        score.share_error_points,
        score.unknown_share * 100.0,
        score.absent_share * 100.0
    )?;
    let total = score.seconds.max(f64::MIN_POSITIVE);
    write!(text, "{:16}", "truth")?;
    for category in &score.categories {
        write!(text, "{:>15}", category.name)?;
    }
    writeln!(
        text,
        "{:>9}{:>11}{:>8}{:>7}",
        "share", "precision", "recall", "F1"
    )?;
    for (category, row) in score.categories.iter().zip(&score.matrix_seconds) {
        write!(text, "{:16}", category.name)?;
        for seconds in row {
            write!(text, "{:>13.1} %", seconds / total * 100.0)?;
        }
        writeln!(
            text,
            "{:>7.1} %{:>11}{:>8}{:>7}",
            category.truth_share * 100.0,
            format_ratio(category.precision),
            format_ratio(category.recall),
            format_ratio(category.f1)
        )?;
    }
    Ok(())
}

fn format_ratio(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"))
}

fn format_distances(summary: &DistanceSummary) -> String {
    let time = |time: Option<f64>| {
        time.map_or_else(|| "not detected".to_owned(), |us| format!("{us:.0} µs"))
    };
    format!(
        "median {}, p99 {}, {:.1} % of {} not detected",
        time(summary.median_us),
        time(summary.p99_us),
        summary.missed_share * 100.0,
        summary.count
    )
}
