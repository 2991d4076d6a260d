//! What the detector reported, as timelines of each thread: as the trace recorded it, or by replaying the recorded
//! events through the tracker of this version.

use std::collections::BTreeMap;

use zernel_phase::phase_detector::{PhaseDetector, PhaseDetectorConfig};
use zernel_phase::shared::{
    PhaseWord, RawTracker, fraction_from_q16, raw_event, training_loop_evidence,
};
use zernel_phase::{
    BlockReason, PhaseInterval, PhaseTracker, ThreadEvent, TrackerConfig, WorkloadPhase,
    ZernelTaskState,
};

use crate::label::{StepActivity, ThreadClass};
use crate::timeline::Timeline;
use crate::trace::{
    EXIT_EVENT_NUMBER, EventEntry, LOADING_BEGIN_EVENT_NUMBER, LOADING_END_EVENT_NUMBER,
    ProcessEntry, RecordedTrace, SampleEntry, TraceEntry,
};

/// All events that a tracker can receive.
const TRACKER_EVENTS: [ThreadEvent; 33] = [
    ThreadEvent::GpuSyncEnter,
    ThreadEvent::GpuSyncLeave,
    ThreadEvent::CollectiveEnter,
    ThreadEvent::CollectiveLeave,
    ThreadEvent::Launch,
    ThreadEvent::CopyToDevice,
    ThreadEvent::Block(BlockReason::Io),
    ThreadEvent::Block(BlockReason::Futex),
    ThreadEvent::Block(BlockReason::Poll),
    ThreadEvent::Block(BlockReason::Other),
    ThreadEvent::Block(BlockReason::Request),
    ThreadEvent::Block(BlockReason::Sleep),
    ThreadEvent::Unblock,
    ThreadEvent::UnblockAfterLaunches,
    ThreadEvent::OptimizerMarker,
    ThreadEvent::DataBegin,
    ThreadEvent::ForwardBegin,
    ThreadEvent::BackwardBegin,
    ThreadEvent::OptimizerBegin,
    ThreadEvent::ZeroGradients,
    ThreadEvent::NotObserved,
    ThreadEvent::Preempt,
    ThreadEvent::Resume,
    ThreadEvent::OtherWorkBegin,
    ThreadEvent::UpdateEnd,
    ThreadEvent::CompileBegin,
    ThreadEvent::CompileEnd,
    ThreadEvent::Fork,
    ThreadEvent::AwaitedCompile,
    ThreadEvent::AwaitedCollective,
    ThreadEvent::AwaitedData,
    ThreadEvent::CopyToHostEnter,
    ThreadEvent::CopyToHostLeave,
];

/// Where phases come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PhaseSource {
    /// The phases that the kernel recorded.
    Recorded,
    /// The phases that the event tracker of this version derives from the recorded events.
    Replayed,
}

/// What was detected about one thread.
#[derive(Debug, Clone, PartialEq)]
pub struct DetectedThread {
    /// The thread.
    pub tid: u32,
    /// Phases of the thread, corrected by later events.
    pub phases: Timeline<WorkloadPhase>,
    /// Phases of the thread as a scheduler saw them, without later corrections.
    pub live_phases: Timeline<WorkloadPhase>,
    /// Whether the thread is in a call that waits for the GPU.
    is_in_gpu_sync: Timeline<bool>,
    /// What the thread waits for, if it is blocked.
    block_reasons: Timeline<Option<BlockReason>>,
    /// Whether the thread loads data for its own process.
    is_loading_data: Timeline<bool>,
    /// All flags that the thread's tracker had at any time, combined.
    tracker_flags: u16,
}

/// What was detected about one process.
#[derive(Debug, Clone, PartialEq)]
pub struct DetectedProcess {
    /// Whether the process was forked to load data.
    pub is_loader: bool,
    /// Its threads.
    pub threads: BTreeMap<u32, DetectedThread>,
}

impl DetectedThread {
    /// The class of the thread for a scheduler, over time. A loader that sleeps or waits for a disk still loads; one that
    /// waits for another thread or process has nothing to load.
    #[must_use]
    pub fn scheduler_classes(&self, is_loader: bool) -> Timeline<ThreadClass> {
        let of_loader = self.block_reasons.map(|reason| match reason {
            None | Some(BlockReason::Io | BlockReason::Other | BlockReason::Sleep) => {
                ThreadClass::Feed
            }
            Some(_) => ThreadClass::Other,
        });
        if is_loader {
            return of_loader;
        }
        let states = self.live_phases.zip(&self.is_in_gpu_sync);
        let by_phase = states.map(|(phase, is_in_gpu_sync)| {
            match StepActivity::of_phase(phase, is_in_gpu_sync) {
                StepActivity::HostWork | StepActivity::Optimizer | StepActivity::PeerWait => {
                    ThreadClass::Critical
                }
                StepActivity::GpuWait => ThreadClass::GpuWait,
                StepActivity::DataWait | StepActivity::Unknown => ThreadClass::Other,
            }
        });
        let classes = by_phase.zip(&of_loader).zip(&self.is_loading_data);
        classes.map(|((by_phase, of_loader), loads)| if loads { of_loader } else { by_phase })
    }

    /// Whether the thread copies, syncs or passes markers.
    #[must_use]
    pub fn is_training_thread(&self) -> bool {
        self.tracker_flags & RawTracker::TRAINING_THREAD != 0
    }

    fn known_phase_ns(&self) -> u64 {
        let spans = self.phases.spans();
        let known = spans.filter(|(_, _, phase)| *phase != WorkloadPhase::Unknown);
        known.map(|(start_ns, end_ns, _)| end_ns - start_ns).sum()
    }
}

impl DetectedProcess {
    /// The training thread whose phases are reported: the one that announces its steps, else the one whose phases are known
    /// for longest.
    #[must_use]
    pub fn training_thread(&self) -> Option<&DetectedThread> {
        let threads = self.threads.values();
        let training_threads = threads.filter(|thread| thread.is_training_thread());
        training_threads.max_by_key(|thread| {
            let evidence = training_loop_evidence(thread.tracker_flags);
            (evidence, thread.known_phase_ns())
        })
    }

    /// The phases of the process's training thread, corrected by later events.
    #[must_use]
    pub fn phases(&self) -> Option<Timeline<WorkloadPhase>> {
        self.step_phases(|thread| &thread.phases)
    }

    /// The phases of the process's training thread, without later corrections.
    #[must_use]
    pub fn live_phases(&self) -> Option<Timeline<WorkloadPhase>> {
        self.step_phases(|thread| &thread.live_phases)
    }

    /// What the step of the process is spent on, over time.
    #[must_use]
    pub fn activities(&self) -> Option<Timeline<StepActivity>> {
        let states = self.phases()?.zip(&self.training_thread()?.is_in_gpu_sync);
        Some(states.map(|(phase, is_in_gpu_sync)| StepActivity::of_phase(phase, is_in_gpu_sync)))
    }

    /// The phases of the training thread. While the training thread waits for another thread, as in a backward pass,
    /// a collective of the other thread counts.
    fn step_phases(
        &self,
        phases: impl Fn(&DetectedThread) -> &Timeline<WorkloadPhase>,
    ) -> Option<Timeline<WorkloadPhase>> {
        let training_thread = self.training_thread()?;
        let waits_for_thread = training_thread
            .block_reasons
            .zip(&training_thread.is_in_gpu_sync)
            .map(|(reason, is_in_gpu_sync)| reason == Some(BlockReason::Futex) && !is_in_gpu_sync);
        let mut step_phases = phases(training_thread).clone();
        for thread in self
            .threads
            .values()
            .filter(|thread| thread.tid != training_thread.tid)
        {
            let collectives = phases(thread).map(|phase| phase == WorkloadPhase::NcclCollective);
            let Some((start_ns, _, _)) = step_phases.spans().next() else {
                return Some(step_phases);
            };
            let end_ns = step_phases.spans().last().map_or(start_ns, |span| span.1);
            let collectives = collectives.fill_gaps(false, start_ns, end_ns);
            let states = step_phases.zip(&waits_for_thread).zip(&collectives);
            step_phases = states.map(|((phase, waits), is_collective)| match phase {
                WorkloadPhase::GpuCompute if waits && is_collective => {
                    WorkloadPhase::NcclCollective
                }
                _ => phase,
            });
        }
        Some(step_phases)
    }
}

/// Turns a trace into timelines, by pid. If a pid was reused, the last process with that pid counts.
#[must_use]
pub fn detect_phases(trace: &RecordedTrace, source: PhaseSource) -> BTreeMap<u32, DetectedProcess> {
    let mut process_entries: BTreeMap<u32, ProcessEntry> = BTreeMap::new();
    let mut events: BTreeMap<(u32, u32), Vec<EventEntry>> = BTreeMap::new();
    for entry in &trace.entries {
        match entry {
            TraceEntry::Process(process) => drop(process_entries.insert(process.handle, *process)),
            TraceEntry::Event(event) => {
                let thread = events.entry((event.process_handle, event.tid)).or_default();
                thread.push(*event);
            }
            _ => {}
        }
    }
    let events_by_number = EventsByNumber::new(trace);
    let mut processes: BTreeMap<u32, DetectedProcess> = BTreeMap::new();
    for ((handle, tid), events) in &events {
        let Some(process_entry) = process_entries.get(handle) else {
            continue;
        };
        let phases = match source {
            PhaseSource::Recorded => {
                recorded_phases(events, &events_by_number, trace.header.ended_ns)
            }
            PhaseSource::Replayed => {
                replayed_phases(events, &events_by_number, trace.header.ended_ns)
            }
        };
        let thread = detected_thread(
            *tid,
            events,
            phases,
            &events_by_number,
            trace.header.ended_ns,
        );
        let process = processes
            .entry(process_entry.pid)
            .or_insert(DetectedProcess {
                is_loader: process_entry.is_loader,
                threads: BTreeMap::new(),
            });
        process.is_loader = process_entry.is_loader;
        process.threads.insert(*tid, thread);
    }
    processes
}

/// Phases with and without later corrections.
struct PhaseTimelines {
    corrected: Timeline<WorkloadPhase>,
    live: Timeline<WorkloadPhase>,
}

/// Start times of phases that a later event may correct. The kernel then changes the phase twice, and only the second change
/// is recorded.
#[derive(Default)]
struct PhaseCorrections {
    previous_event_ns: u64,
    blocked_since_ns: u64,
    copy_to_host_entered_ns: u64,
    /// When a time began that later events may turn into loading, or into an optimizer step.
    undecided_since_ns: u64,
    update_since_ns: u64,
    flags: u16,
}

impl PhaseCorrections {
    /// The start of the time that this event corrects, and the phase that the thread was in since then.
    fn corrected_phase(&self, event: Option<ThreadEvent>) -> Option<(u64, WorkloadPhase)> {
        let has = |flag: u16| self.flags & flag != 0;
        match event? {
            ThreadEvent::CopyToDevice | ThreadEvent::DataBegin if has(RawTracker::UNDECIDED) => {
                Some((self.undecided_since_ns, WorkloadPhase::DataLoading))
            }
            ThreadEvent::UpdateEnd if has(RawTracker::MAY_UPDATE) => {
                Some((self.update_since_ns, WorkloadPhase::OptimizerStep))
            }
            ThreadEvent::CopyToHostLeave => {
                let phase = match has(RawTracker::COLLECTIVE_QUEUED) {
                    true => WorkloadPhase::NcclCollective,
                    false => WorkloadPhase::GpuCompute,
                };
                Some((self.copy_to_host_entered_ns, phase))
            }
            ThreadEvent::AwaitedCompile => Some((self.previous_event_ns, WorkloadPhase::Unknown)),
            ThreadEvent::AwaitedCollective => {
                Some((self.previous_event_ns, WorkloadPhase::NcclCollective))
            }
            _ => None,
        }
    }

    fn remember_event(&mut self, event: &EventEntry, kind: Option<ThreadEvent>) {
        let is_new = |flag: u16| event.tracker_flags & flag != 0 && self.flags & flag == 0;
        if is_new(RawTracker::UNDECIDED) {
            self.undecided_since_ns = match kind {
                Some(ThreadEvent::Unblock | ThreadEvent::UnblockAfterLaunches) => {
                    self.blocked_since_ns
                }
                Some(ThreadEvent::Fork) => self.previous_event_ns,
                _ => event.at_ns,
            };
        }
        if is_new(RawTracker::MAY_UPDATE) || kind == Some(ThreadEvent::GpuSyncLeave) {
            self.update_since_ns = event.at_ns;
        }
        if matches!(kind, Some(ThreadEvent::Block(_))) {
            self.blocked_since_ns = event.at_ns;
        }
        if kind == Some(ThreadEvent::CopyToHostEnter) {
            self.copy_to_host_entered_ns = event.at_ns;
        }
        self.flags = event.tracker_flags;
        if !matches!(kind, Some(ThreadEvent::Preempt | ThreadEvent::Resume)) {
            self.previous_event_ns = event.at_ns;
        }
    }
}

/// The phases that the kernel recorded.
fn recorded_phases(
    events: &[EventEntry],
    events_by_number: &EventsByNumber,
    end_ns: u64,
) -> PhaseTimelines {
    let mut corrected = Timeline::new(Vec::new(), end_ns);
    let mut live = Timeline::new(Vec::new(), end_ns);
    let mut deadline_ns = u64::MAX;
    let mut sequence = None;
    let mut corrections = PhaseCorrections::default();
    for event in events {
        if deadline_ns <= event.at_ns {
            corrected.set_from(deadline_ns, WorkloadPhase::Unknown);
            live.set_from(deadline_ns, WorkloadPhase::Unknown);
        }
        if event.event_number == EXIT_EVENT_NUMBER {
            corrected.set_from(event.at_ns, WorkloadPhase::Unknown);
            live.set_from(event.at_ns, WorkloadPhase::Unknown);
            deadline_ns = u64::MAX;
            continue;
        }
        let kind = events_by_number.event_of_number(event.event_number);
        if sequence != Some(event.sequence) {
            // Nothing is known about a thread before its first event.
            let start_ns = match sequence {
                Some(_) => event.phase_start_ns,
                None => event.at_ns,
            };
            let changes = sequence.map_or(1, |before| {
                event.sequence.wrapping_sub(before) % (1 << PhaseWord::SEQUENCE_BITS)
            });
            if let Some((since_ns, phase)) =
                corrections.corrected_phase(kind).filter(|_| changes > 1)
            {
                corrected.set_from(since_ns, phase);
            }
            corrected.set_from(start_ns, event.phase);
            live.set_from(event.at_ns, event.phase);
        }
        corrections.remember_event(event, kind);
        sequence = Some(event.sequence);
        deadline_ns = event.deadline_ns;
    }
    if deadline_ns < end_ns {
        corrected.set_from(deadline_ns, WorkloadPhase::Unknown);
        live.set_from(deadline_ns, WorkloadPhase::Unknown);
    }
    PhaseTimelines { corrected, live }
}

/// The phases that the event tracker of this version derives from the recorded events.
fn replayed_phases(
    events: &[EventEntry],
    events_by_number: &EventsByNumber,
    end_ns: u64,
) -> PhaseTimelines {
    let start_ns = events.first().map_or(end_ns, |event| event.at_ns);
    let mut tracker = PhaseTracker::new(TrackerConfig::default(), start_ns);
    let mut closed_intervals: Vec<PhaseInterval> = Vec::new();
    let mut live = Timeline::new(vec![(start_ns, WorkloadPhase::Unknown)], end_ns);
    let mut exit_ns = end_ns;
    for event in events {
        if event.event_number == EXIT_EVENT_NUMBER {
            exit_ns = event.at_ns;
            break;
        }
        if tracker.deadline_ns() <= event.at_ns {
            live.set_from(tracker.deadline_ns(), WorkloadPhase::Unknown);
        }
        if let Some(known) = events_by_number.event_of_number(event.event_number) {
            tracker.observe(event.at_ns, known, &mut closed_intervals);
            live.set_from(event.at_ns, tracker.phase_at(event.at_ns));
        }
    }
    if tracker.deadline_ns() < exit_ns {
        live.set_from(tracker.deadline_ns(), WorkloadPhase::Unknown);
    }
    live.set_from(exit_ns, WorkloadPhase::Unknown);
    tracker.finish(exit_ns, &mut closed_intervals);
    let mut changes: Vec<_> = closed_intervals
        .iter()
        .map(|interval| (interval.start_ns, interval.phase))
        .collect();
    changes.push((exit_ns, WorkloadPhase::Unknown));
    let corrected = Timeline::new(changes, end_ns);
    PhaseTimelines { corrected, live }
}

fn detected_thread(
    tid: u32,
    events: &[EventEntry],
    phases: PhaseTimelines,
    events_by_number: &EventsByNumber,
    end_ns: u64,
) -> DetectedThread {
    let start_ns = events.first().map_or(end_ns, |event| event.at_ns);
    let mut is_in_gpu_sync = Timeline::constant(false, start_ns, end_ns);
    let mut block_reasons = Timeline::constant(None, start_ns, end_ns);
    let mut loads = Timeline::constant(false, start_ns, end_ns);
    let mut tracker_flags = 0;
    for event in events {
        tracker_flags |= event.tracker_flags;
        if [LOADING_BEGIN_EVENT_NUMBER, LOADING_END_EVENT_NUMBER].contains(&event.event_number) {
            loads.set_from(
                event.at_ns,
                event.event_number == LOADING_BEGIN_EVENT_NUMBER,
            );
        }
        if event.event_number == EXIT_EVENT_NUMBER {
            is_in_gpu_sync.set_from(event.at_ns, false);
            // A thread that has exited loads nothing more.
            block_reasons.set_from(event.at_ns, Some(BlockReason::Poll));
        }
        match events_by_number.event_of_number(event.event_number) {
            Some(ThreadEvent::GpuSyncEnter | ThreadEvent::CopyToHostEnter) => {
                is_in_gpu_sync.set_from(event.at_ns, true);
            }
            Some(ThreadEvent::Block(reason)) => block_reasons.set_from(event.at_ns, Some(reason)),
            Some(ThreadEvent::Unblock | ThreadEvent::UnblockAfterLaunches) => {
                block_reasons.set_from(event.at_ns, None);
            }
            None
            | Some(
                ThreadEvent::Preempt
                | ThreadEvent::Resume
                | ThreadEvent::AwaitedCompile
                | ThreadEvent::AwaitedCollective
                | ThreadEvent::AwaitedData,
            ) => {}
            Some(_) => is_in_gpu_sync.set_from(event.at_ns, false),
        }
    }
    DetectedThread {
        tid,
        phases: phases.corrected,
        live_phases: phases.live,
        is_in_gpu_sync,
        block_reasons,
        is_loading_data: loads,
        tracker_flags,
    }
}

/// Which event a number stands for in a trace.
pub(crate) struct EventsByNumber(Vec<Option<ThreadEvent>>);

impl EventsByNumber {
    /// Events are matched by their names in the header, because their numbers may change between versions.
    pub(crate) fn new(trace: &RecordedTrace) -> Self {
        let mut events_by_number = vec![None; 1 << 8];
        for (name, number) in zernel_phase::shared::EVENT_MIRROR.values {
            let mut events = TRACKER_EVENTS.iter();
            let event = events.find(|event| i64::from(raw_event(**event)) == *number);
            if let Some(recorded) = trace.header.events.get(*name) {
                events_by_number[usize::from(*recorded)] = event.copied();
            }
        }
        Self(events_by_number)
    }

    pub(crate) fn event_of_number(&self, number: u8) -> Option<ThreadEvent> {
        self.0.get(usize::from(number)).copied().flatten()
    }
}

/// The phases that the sampled rule reports for a thread, at the times of its samples.
#[must_use]
pub fn sampled_phases(trace: &RecordedTrace, tid: u32) -> Timeline<WorkloadPhase> {
    let mut detector = PhaseDetector::new(PhaseDetectorConfig::default());
    let mut current = WorkloadPhase::Unknown;
    let mut timeline = Timeline::new(Vec::new(), trace.header.ended_ns);
    for entry in &trace.entries {
        if let TraceEntry::Sample(sample) = entry
            && sample.tid == tid
        {
            current = detector.detect(&task_state_from_sample(sample, current));
            timeline.set_from(sample.at_ns, current);
        }
    }
    timeline
}

fn task_state_from_sample(sample: &SampleEntry, current: WorkloadPhase) -> ZernelTaskState {
    ZernelTaskState {
        is_ml_process: true,
        current_phase: current,
        gpu_utilization: sample.gpu_utilization_percent,
        last_gpu_sync_ns: sample.last_gpu_sync_ns,
        cpu_burst_duration_ns: sample.cpu_burst_ns,
        io_wait_fraction: fraction_from_q16(sample.io_wait_q16),
        nccl_active: sample.nccl_active,
        futex_wait_count: sample.futex_waits,
        ..ZernelTaskState::new(sample.tid)
    }
}

#[cfg(test)]
mod tests;
