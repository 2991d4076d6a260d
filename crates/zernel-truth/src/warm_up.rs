//! The warm-up of the ranks, from the marks in a trace, so that a report from before a changed rule can be judged again.

use std::collections::BTreeMap;

use serde_json::Value;
use zernel_phase::ThreadEvent;
use zernel_phase::steps::{Launches, Step, StepDetector, StepMark, StepSummary};

use crate::detected_phases::EventsByNumber;
use crate::trace::{RecordedTrace, TraceEntry};

/// Corrects the warm-up of the ranks of a report, if updates of the model separate their steps. A trace has all of these
/// marks, but not all of the marks that may separate steps.
pub(crate) fn correct_warm_up(report: &mut Value, trace: &RecordedTrace) {
    let seconds_by_pid = warm_up_seconds_by_pid(trace);
    let ranks = report.get_mut("ranks").and_then(Value::as_array_mut);
    for rank in ranks.into_iter().flatten() {
        let pid = rank.get("pid").and_then(Value::as_u64);
        let warm_up = pid.and_then(|pid| seconds_by_pid.get(&pid));
        if let (Some(seconds), Some(Value::Object(steps))) = (warm_up, rank.get_mut("steps")) {
            steps.insert("warm_up_seconds".to_owned(), Value::from(*seconds));
        }
    }
}

/// Seconds of warm-up by pid.
fn warm_up_seconds_by_pid(trace: &RecordedTrace) -> BTreeMap<u64, f64> {
    let events_by_number = EventsByNumber::new(trace);
    let mut pids = BTreeMap::new();
    let mut loops_by_process: BTreeMap<u32, ReplayedSteps> = BTreeMap::new();
    for entry in &trace.entries {
        match entry {
            TraceEntry::Process(process) => drop(pids.insert(process.handle, process.pid)),
            TraceEntry::Event(event) => {
                if let Some(thread_event) = events_by_number.event_of_number(event.event_number) {
                    let training_loop = loops_by_process.entry(event.process_handle).or_default();
                    training_loop.observe_event(thread_event, event.at_ns);
                }
            }
            _ => {}
        }
    }
    let pids_and_seconds = loops_by_process
        .iter()
        .filter_map(|(handle, training_loop)| {
            let summary = StepSummary::from_whole_run(&training_loop.steps, StepMark::Optimizer)?;
            let has_optimizer_steps =
                training_loop.detector.boundary_mark() == Some(StepMark::Optimizer);
            let pid = u64::from(*pids.get(handle)?);
            has_optimizer_steps.then_some((pid, summary.warm_up_ns as f64 / 1e9))
        });
    pids_and_seconds.collect()
}

/// The steps of one process.
#[derive(Default)]
struct ReplayedSteps {
    detector: StepDetector,
    restarts: u32,
    steps: Vec<Step>,
}

impl ReplayedSteps {
    fn observe_event(&mut self, event: ThreadEvent, at_ns: u64) {
        let mark = match event {
            ThreadEvent::BackwardBegin => StepMark::Backward,
            ThreadEvent::OptimizerBegin | ThreadEvent::OptimizerMarker => StepMark::Optimizer,
            _ => return,
        };
        let count = self.detector.step_count();
        self.detector.record_mark(mark, at_ns, Launches::Unknown);
        if self.restarts != self.detector.restart_count() || self.steps.is_empty() {
            self.restarts = self.detector.restart_count();
            self.steps = self.detector.recent_steps().iter().copied().collect();
        } else if self.detector.step_count() > count {
            self.steps.extend(self.detector.recent_steps().back());
        }
    }
}
