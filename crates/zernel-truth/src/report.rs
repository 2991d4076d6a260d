//! The score of a trace against the stamp logs of its processes.

use std::collections::BTreeMap;

use serde::Serialize;
use zernel_phase::WorkloadPhase;
use zernel_report::judge_again;

use crate::detected::{DetectedProcess, PhaseSource, detect, sampled_phases};
use crate::gpu_busy::GpuBusyScore;
use crate::label::{Label, PhaseCategory, ProcessActivity, ThreadClass};
use crate::score::{Confusion, DistanceSummary, Distances, Score};
use crate::stamps::StampLog;
use crate::timeline::Timeline;
use crate::trace::{CoverageEntry, DelaySummary, TraceEntry, TraceFile};
use crate::verdict::ReportedVerdict;
use crate::warm_up::correct_warm_up;

/// Shorter true spans have no boundaries of their own: consecutive stamps of a Python script are up to this far apart.
const RESOLUTION_NS: u64 = 50_000;

/// The score of one trace.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TruthReport {
    /// The variant, as the stamps name it.
    pub variant: String,
    /// The right verdict, as the stamps name it.
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
    pub phases: Score,
    /// The five phases of each process by the sampled rule.
    pub sampled_phases: Score,
    /// Phases with GPU waits apart.
    pub activities: Score,
    /// The classes of all labelled threads.
    pub classes: Score,
    /// True changes of phase and the nearest detected ones.
    pub boundaries: DistanceSummary,
    /// From the start of a true phase until it was reported.
    pub delays: DistanceSummary,
    /// From a probed call to the record of its phase, in the kernel.
    pub kernel_delay: DelaySummary,
    /// The reported utilization of the GPU, second by second.
    pub gpu_busy: Option<GpuBusyScore>,
    /// The verdict of the run's report, or that of this version.
    pub reported: Option<ReportedVerdict>,
}

/// Sums over the processes of a trace.
#[derive(Default)]
struct Sums {
    phases: Confusion<PhaseCategory>,
    sampled: Confusion<PhaseCategory>,
    activities: Confusion<ProcessActivity>,
    classes: Confusion<ThreadClass>,
    boundaries: Distances,
    delays: Distances,
    training_ns: u128,
    observed_ns: u128,
    steps_ns: Vec<u64>,
    processes: usize,
}

/// Scores a trace.
#[must_use]
pub fn score(trace: &TraceFile, stamps: &[StampLog], source: PhaseSource) -> TruthReport {
    let detected = detect(trace, source);
    let nothing = DetectedProcess {
        is_loader: false,
        threads: BTreeMap::new(),
    };
    let mut sums = Sums::default();
    for log in stamps {
        let process = detected.get(&log.pid).unwrap_or(&nothing);
        sums.add_process(trace, log, process);
        sums.add_classes(log, process, scored_time(log, stamps));
    }
    sums.steps_ns.sort_unstable();
    let median_ns = sums.steps_ns.get(sums.steps_ns.len() / 2);
    let absent = stamps.iter().flat_map(|log| log.known.absent.clone());
    let absent: Vec<String> = absent.collect();
    let first = stamps.iter().find(|log| !log.steps.is_empty());
    TruthReport {
        variant: first.map_or_else(String::new, |log| log.variant.clone()),
        verdict: first.and_then(|log| log.known.verdict.clone()),
        processes: sums.processes,
        lost_events: trace.header.lost_events,
        observed_share: sums.observed_ns as f64 / sums.training_ns.max(1) as f64,
        median_step_us: median_ns.map(|ns| *ns as f64 / 1e3),
        phases: sums.phases.score(&absent),
        sampled_phases: sums.sampled.score(&absent),
        activities: sums.activities.score(&[]),
        classes: sums.classes.score(&[]),
        boundaries: sums.boundaries.summary(),
        delays: sums.delays.summary(),
        kernel_delay: trace.header.delay,
        gpu_busy: first.and_then(|log| GpuBusyScore::new(trace, log)),
        reported: reported_verdict(trace, stamps, source),
    }
}

/// The verdict of the run's report, or that of this version on what was measured.
fn reported_verdict(
    trace: &TraceFile,
    stamps: &[StampLog],
    source: PhaseSource,
) -> Option<ReportedVerdict> {
    let mut report = trace.header.report.clone()?;
    if source == PhaseSource::Replayed {
        correct_warm_up(&mut report, trace);
        let verdict = judge_again(&report).ok()?;
        report
            .as_object_mut()?
            .insert("verdict".to_owned(), verdict);
    }
    let training = stamps.iter().filter(|log| !log.steps.is_empty());
    let known = training.map(|log| (log.pid, log.known.verdict.clone()));
    ReportedVerdict::new(&report, &known.collect())
}

/// The time in which the threads of a process are scored: that of its training, or for a loader that of all
/// training in the trace.
fn scored_time(log: &StampLog, all: &[StampLog]) -> Option<(u64, u64)> {
    log.training_time().or_else(|| {
        let times = all.iter().filter_map(StampLog::training_time);
        times.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)))
    })
}

impl Sums {
    /// Adds the process view, if the process has a training loop.
    fn add_process(&mut self, trace: &TraceFile, log: &StampLog, process: &DetectedProcess) {
        let (Some(labels), Some((start_ns, end_ns))) = (log.process_labels(), log.training_time())
        else {
            return;
        };
        self.processes += 1;
        let labels = labels.clip(start_ns, end_ns);
        let truth = labels.map(|label| PhaseCategory::from(label.phase()));
        let thread = process.training_thread();
        let unknown = || Timeline::constant(PhaseCategory::Unknown, start_ns, end_ns);
        // Time before the first event of the thread is unknown.
        let fill = |timeline: Timeline<PhaseCategory>| {
            let filled = timeline.fill(PhaseCategory::Unknown, start_ns, end_ns);
            filled.clip(start_ns, end_ns)
        };
        let filled = |phases: Option<Timeline<WorkloadPhase>>| {
            phases.map_or_else(unknown, |phases| fill(phases.map(PhaseCategory::from)))
        };
        let phases = filled(process.phases());
        let live = filled(process.live_phases());
        let sampled = match thread.map(|it| it.tid).or(log.training_thread) {
            Some(tid) => fill(sampled_phases(trace, tid).map(PhaseCategory::from)),
            None => unknown(),
        };
        let activities = process.activities().map_or_else(
            || Timeline::constant(ProcessActivity::Unknown, start_ns, end_ns),
            |activities| activities.fill(ProcessActivity::Unknown, start_ns, end_ns),
        );
        self.phases.add(&truth, &phases);
        self.sampled.add(&truth, &sampled);
        let true_activities = labels.map(Label::activity);
        self.activities.add(&true_activities, &activities);
        let distinct = truth.without_shorter(RESOLUTION_NS);
        self.boundaries.add_boundaries(&distinct, &phases);
        self.delays.add_delays(&distinct, &live);
        self.training_ns += u128::from(end_ns - start_ns);
        self.observed_ns += u128::from(observed_ns(trace, log.pid, start_ns, end_ns));
        self.steps_ns.extend(log.median_step_ns());
    }

    /// Adds the classes of all labelled threads.
    fn add_classes(
        &mut self,
        log: &StampLog,
        process: &DetectedProcess,
        scored_time: Option<(u64, u64)>,
    ) {
        let Some((start_ns, end_ns)) = scored_time else {
            return;
        };
        for (tid, labels) in &log.threads {
            let truth = labels.clip(start_ns, end_ns).map(Label::class);
            let classes = process.threads.get(tid).map_or_else(
                || Timeline::constant(ThreadClass::Other, start_ns, end_ns),
                |thread| {
                    let classes = thread.classes(process.is_loader);
                    classes.fill(ThreadClass::Other, start_ns, end_ns)
                },
            );
            self.classes.add(&truth, &classes);
        }
    }
}

/// How much of a time was observed.
fn observed_ns(trace: &TraceFile, pid: u32, start_ns: u64, end_ns: u64) -> u64 {
    let mut handles = Vec::new();
    let mut attached = Timeline::constant(true, trace.header.began_ns, trace.header.ended_ns);
    let mut awake = attached.clone();
    for entry in &trace.entries {
        match entry {
            TraceEntry::Process(process) if process.pid == pid => handles.push(process.handle),
            TraceEntry::Coverage { at_ns, coverage } => match coverage {
                CoverageEntry::Probes(on) => attached.set(*at_ns, *on),
                CoverageEntry::Process { handle, observed } if handles.contains(handle) => {
                    awake.set(*at_ns, *observed);
                }
                _ => {}
            },
            _ => {}
        }
    }
    let both = attached.zip(&awake).clip(start_ns, end_ns);
    both.spans()
        .filter(|span| span.2 == (true, true))
        .map(|(start_ns, end_ns, _)| end_ns - start_ns)
        .sum()
}

#[cfg(test)]
mod tests;
