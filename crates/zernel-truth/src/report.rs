//! The score of a trace against the stamp logs of its processes.

use std::collections::BTreeMap;

use serde::Serialize;
use zernel_phase::WorkloadPhase;
use zernel_report::judge_written_report;

use crate::detected_phases::{DetectedProcess, PhaseSource, detect_phases, sampled_phases};
use crate::gpu_busy::GpuBusyScore;
use crate::label::{PhaseCategory, StampLabel, StepActivity, ThreadClass};
use crate::score::{ChangeDistances, ConfusionMatrix, DetectionScore, DistanceSummary};
use crate::stamps::StampLog;
use crate::timeline::Timeline;
use crate::trace::{CoverageEntry, DelaySummary, RecordedTrace, TraceEntry};
use crate::verdict::ReportedVerdict;
use crate::warm_up::correct_warm_up;

/// Shorter true spans have no boundaries of their own: consecutive stamps of a Python script are up to this far apart.
const MIN_SPAN_WITH_BOUNDARIES_NS: u64 = 50_000;

/// The score of one trace.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TruthReport {
    /// Name of the script's variant, from the stamp logs.
    pub variant: String,
    /// The right verdict, from the stamp logs.
    pub verdict: Option<String>,
    /// Processes with a training loop.
    pub processes: usize,
    /// Events that the recorder lost.
    pub lost_events: u64,
    /// Share of the training time in which probes were attached and the process did not rest.
    pub observed_share: f64,
    /// Median step in microseconds.
    pub median_step_us: Option<f64>,
    /// The contract's five phases of each process.
    pub phases: DetectionScore,
    /// The five phases of each process by the sampled rule.
    pub sampled_phases: DetectionScore,
    /// Phases with GPU waits apart.
    pub activities: DetectionScore,
    /// The classes of all labelled threads.
    pub classes: DetectionScore,
    /// True changes of phase and the nearest detected ones.
    pub boundaries: DistanceSummary,
    /// Times from the start of a true phase until the detector reported that phase.
    pub delays: DistanceSummary,
    /// Times from a probed call until the kernel recorded the phase that follows.
    pub kernel_delay: DelaySummary,
    /// The reported utilization of the GPU, second by second.
    pub gpu_busy: Option<GpuBusyScore>,
    /// The verdict of the run's report, or the one that this version reaches on the same figures.
    pub reported: Option<ReportedVerdict>,
}

/// Sums over the processes of a trace.
#[derive(Default)]
struct ScoreSums {
    phase_confusion: ConfusionMatrix<PhaseCategory>,
    sampled_phase_confusion: ConfusionMatrix<PhaseCategory>,
    activity_confusion: ConfusionMatrix<StepActivity>,
    thread_class_confusion: ConfusionMatrix<ThreadClass>,
    boundary_distances: ChangeDistances,
    report_delays: ChangeDistances,
    training_ns: u128,
    observed_ns: u128,
    median_steps_ns: Vec<u64>,
    processes: usize,
}

/// Scores a trace.
#[must_use]
pub fn score_trace(trace: &RecordedTrace, stamps: &[StampLog], source: PhaseSource) -> TruthReport {
    let detected = detect_phases(trace, source);
    let undetected_process = DetectedProcess {
        is_loader: false,
        threads: BTreeMap::new(),
    };
    let mut sums = ScoreSums::default();
    for log in stamps {
        let process = detected.get(&log.pid).unwrap_or(&undetected_process);
        sums.add_process(trace, log, process);
        sums.add_thread_classes(log, process, scored_span_ns(log, stamps));
    }
    sums.median_steps_ns.sort_unstable();
    let median_ns = sums.median_steps_ns.get(sums.median_steps_ns.len() / 2);
    let absent = stamps
        .iter()
        .flat_map(|log| log.ground_truth.absent.clone());
    let absent: Vec<String> = absent.collect();
    let first_training_log = stamps.iter().find(|log| !log.step_spans_ns.is_empty());
    TruthReport {
        variant: first_training_log.map_or_else(String::new, |log| log.variant.clone()),
        verdict: first_training_log.and_then(|log| log.ground_truth.verdict.clone()),
        processes: sums.processes,
        lost_events: trace.header.lost_events,
        observed_share: sums.observed_ns as f64 / sums.training_ns.max(1) as f64,
        median_step_us: median_ns.map(|ns| *ns as f64 / 1e3),
        phases: sums.phase_confusion.compute_score(&absent),
        sampled_phases: sums.sampled_phase_confusion.compute_score(&absent),
        activities: sums.activity_confusion.compute_score(&[]),
        classes: sums.thread_class_confusion.compute_score(&[]),
        boundaries: sums.boundary_distances.summarize(),
        delays: sums.report_delays.summarize(),
        kernel_delay: trace.header.delay,
        gpu_busy: first_training_log.and_then(|log| GpuBusyScore::from_trace(trace, log)),
        reported: reported_verdict(trace, stamps, source),
    }
}

/// The verdict of the run's report, or the one that this version reaches on the same figures.
fn reported_verdict(
    trace: &RecordedTrace,
    stamps: &[StampLog],
    source: PhaseSource,
) -> Option<ReportedVerdict> {
    let mut report = trace.header.report.clone()?;
    if source == PhaseSource::Replayed {
        correct_warm_up(&mut report, trace);
        let verdict = judge_written_report(&report).ok()?;
        report
            .as_object_mut()?
            .insert("verdict".to_owned(), verdict);
    }
    let training_logs = stamps.iter().filter(|log| !log.step_spans_ns.is_empty());
    let known_verdicts = training_logs.map(|log| (log.pid, log.ground_truth.verdict.clone()));
    ReportedVerdict::from_report(&report, &known_verdicts.collect())
}

/// The time in which the threads of a process are scored: that of its training, or for a loader that of all
/// training in the trace.
fn scored_span_ns(log: &StampLog, all_logs: &[StampLog]) -> Option<(u64, u64)> {
    log.training_span_ns().or_else(|| {
        let times = all_logs.iter().filter_map(StampLog::training_span_ns);
        times.reduce(|sum, span| (sum.0.min(span.0), sum.1.max(span.1)))
    })
}

impl ScoreSums {
    /// Adds the process view, if the process has a training loop.
    fn add_process(&mut self, trace: &RecordedTrace, log: &StampLog, process: &DetectedProcess) {
        let (Some(labels), Some((start_ns, end_ns))) =
            (log.process_labels(), log.training_span_ns())
        else {
            return;
        };
        self.processes += 1;
        let labels = labels.clip_to(start_ns, end_ns);
        let truth = labels.map(|label| PhaseCategory::from(label.workload_phase()));
        let thread = process.training_thread();
        let unknown = || Timeline::constant(PhaseCategory::Unknown, start_ns, end_ns);
        // Time before the first event of the thread is unknown.
        let fill_and_clip = |timeline: Timeline<PhaseCategory>| {
            let filled = timeline.fill_gaps(PhaseCategory::Unknown, start_ns, end_ns);
            filled.clip_to(start_ns, end_ns)
        };
        let filled_or_unknown = |phases: Option<Timeline<WorkloadPhase>>| {
            phases.map_or_else(unknown, |phases| {
                fill_and_clip(phases.map(PhaseCategory::from))
            })
        };
        let phases = filled_or_unknown(process.phases());
        let live = filled_or_unknown(process.live_phases());
        let sampled = match thread.map(|thread| thread.tid).or(log.training_thread) {
            Some(tid) => fill_and_clip(sampled_phases(trace, tid).map(PhaseCategory::from)),
            None => unknown(),
        };
        let activities = process.activities().map_or_else(
            || Timeline::constant(StepActivity::Unknown, start_ns, end_ns),
            |activities| activities.fill_gaps(StepActivity::Unknown, start_ns, end_ns),
        );
        self.phase_confusion.add_timelines(&truth, &phases);
        self.sampled_phase_confusion.add_timelines(&truth, &sampled);
        let true_activities = labels.map(StampLabel::step_activity);
        self.activity_confusion
            .add_timelines(&true_activities, &activities);
        let truth_without_short_spans = truth.without_short_spans(MIN_SPAN_WITH_BOUNDARIES_NS);
        self.boundary_distances
            .add_boundary_distances(&truth_without_short_spans, &phases);
        self.report_delays
            .add_report_delays(&truth_without_short_spans, &live);
        self.training_ns += u128::from(end_ns - start_ns);
        self.observed_ns += u128::from(observed_ns(trace, log.pid, start_ns, end_ns));
        self.median_steps_ns.extend(log.median_step_ns());
    }

    /// Adds the classes of all labelled threads.
    fn add_thread_classes(
        &mut self,
        log: &StampLog,
        process: &DetectedProcess,
        scored_span_ns: Option<(u64, u64)>,
    ) {
        let Some((start_ns, end_ns)) = scored_span_ns else {
            return;
        };
        for (tid, labels) in &log.thread_labels {
            let truth = labels
                .clip_to(start_ns, end_ns)
                .map(StampLabel::thread_class);
            let classes = process.threads.get(tid).map_or_else(
                || Timeline::constant(ThreadClass::Other, start_ns, end_ns),
                |thread| {
                    let classes = thread.scheduler_classes(process.is_loader);
                    classes.fill_gaps(ThreadClass::Other, start_ns, end_ns)
                },
            );
            self.thread_class_confusion.add_timelines(&truth, &classes);
        }
    }
}

/// For how long, between two times, a process was observed and probes were attached.
fn observed_ns(trace: &RecordedTrace, pid: u32, start_ns: u64, end_ns: u64) -> u64 {
    let mut handles = Vec::new();
    let mut probes_attached =
        Timeline::constant(true, trace.header.began_ns, trace.header.ended_ns);
    let mut process_observed = probes_attached.clone();
    for entry in &trace.entries {
        match entry {
            TraceEntry::Process(process) if process.pid == pid => handles.push(process.handle),
            TraceEntry::Coverage { at_ns, coverage } => match coverage {
                CoverageEntry::ProbesAttached(is_attached) => {
                    probes_attached.set_from(*at_ns, *is_attached);
                }
                CoverageEntry::ProcessObserved {
                    handle,
                    is_observed,
                } if handles.contains(handle) => {
                    process_observed.set_from(*at_ns, *is_observed);
                }
                _ => {}
            },
            _ => {}
        }
    }
    let probes_and_process = probes_attached
        .zip(&process_observed)
        .clip_to(start_ns, end_ns);
    probes_and_process
        .spans()
        .filter(|span| span.2 == (true, true))
        .map(|(start_ns, end_ns, _)| end_ns - start_ns)
        .sum()
}

#[cfg(test)]
mod tests;
