//! One observed process, as read from the kernel.

mod call_counts;
mod overhead;
mod sampled_calls;

use std::collections::BTreeMap;
use std::sync::Arc;

use zernel_phase::shared::{NO_GPU, RawTaskState, RawTracker, training_loop_evidence};
use zernel_phase::steps::{Launches, StepDetector, StepMark, StepMarkClass};
use zernel_phase::task_state::{PhaseTimeAccumulator, WorkloadPhase};

use super::estimate::ConfidenceInterval;
use super::governor::{Governor, WindowSpans};
use super::histogram_reader::HistogramReader;
use super::kernel::KernelPrograms;
use super::tenants::TenantId;
use crate::discovery::ProcessKey;
use crate::probes::{
    CallKind, DurationKind, ProbeStates, ProbedFunction, SYMBOLS, SamplingGroup, layout,
};
pub use call_counts::CallCount;
use call_counts::CallCounts;
pub(super) use call_counts::window_length_for_steps;
pub use overhead::ProcessCost;
use overhead::ProcessOverhead;
use zernel_identity::gpu::{GpuFacts, VisibleDevices};
use zernel_identity::{Identity, identify_exited};
use zernel_model::aggregation::LatencyHistogram;
use zernel_model::snapshot::{CountedCalls, SharedHistogram};

/// How much of the life of a process was observed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessCoverage {
    /// All calls of the process were observed, from the first one on.
    Complete,
    /// All calls of the process since this time were observed, in nanoseconds of CLOCK_MONOTONIC.
    Since(u64),
}

/// The phases of the training thread of a process.
#[derive(Debug, Clone, Default)]
pub struct ProcessPhases {
    /// The training thread.
    pub tid: u32,
    /// The phase that the training thread is in now.
    pub current_phase: WorkloadPhase,
    /// Time that the process has spent in each phase so far, including earlier training threads.
    pub phase_times: PhaseTimeAccumulator,
    /// The part of `phase_times` that belongs to threads that have exited, in nanoseconds.
    pub exited_ns: u64,
}

/// An observed process.
#[derive(Debug)]
pub struct ObservedProcess {
    /// Its pid.
    pub pid: u32,
    /// When the process started, in nanoseconds since boot.
    pub start_ns: u64,
    /// Time of the first event of the process, in nanoseconds of CLOCK_MONOTONIC.
    pub first_event_ns: u64,
    /// When the process exited, in nanoseconds of CLOCK_MONOTONIC.
    pub ended_ns: Option<u64>,
    /// How much of the life of the process was observed.
    pub coverage: ProcessCoverage,
    /// Whether the process is a data loader of another process.
    pub is_loader: bool,
    /// CUDA's number of the first device that it opened, or [`NO_GPU`].
    pub(super) first_device: u32,
    /// Whether the process has opened more than one device.
    pub(super) uses_several_devices: bool,
    /// Whether the process announces its optimizer steps.
    announces_steps: bool,
    /// Its identity. If it exited before that could be read, only its name, user and parent are known.
    pub identity: Option<Identity>,
    /// The tenant that the process counts for.
    pub(super) tenant: TenantId,
    /// Pid of the trainer that this process loads data for; `None` if it is no loader.
    pub loads_for: Option<u32>,
    /// The state that each probe keeps.
    pub probes: ProbeStates,
    /// Phases of the process's training thread, if it has one.
    pub phases: Option<ProcessPhases>,
    /// The steps of its training loop.
    pub steps: StepDetector,
    /// Its calls.
    pub(super) call_counts: CallCounts,
    /// The overhead of the probes on this process.
    pub(super) overhead: ProcessOverhead,
    /// CUDA devices that the process can use. They are stored, because the lookup is slow and impossible after the
    /// process has exited.
    pub(crate) visible_devices: VisibleDevices,
    /// Handle of the trainer that this process loads data for; 0 if it is no loader.
    pub(super) trainer_handle: u32,
    /// Time in each phase of exited threads.
    exited_phases_ns: [u64; 5],
    /// Whether some calls of the process were not observed.
    had_unobserved_time: bool,
    /// How long no call of the process was observed, in the times before `not_observed_since_ns`.
    not_observed_ns: u64,
    /// Since when no call of the process is observed; `None` while its calls are observed.
    not_observed_since_ns: Option<u64>,
    /// Whether the process maps a library file whose probes are all detached until the next scan.
    pub(super) awaits_probes: bool,
    /// Whether the process maps a library file whose sampled functions have no probes in the last sampling window. Then it
    /// has no such window.
    pub(super) misses_window: bool,
    /// Whether functions that show a training loop of `PyTorch` had probes at some time.
    pub(crate) has_torch_probes: bool,
    /// The sampling windows of the process.
    pub(super) window_spans: WindowSpans,
    /// Probed calls so far.
    probe_hits: u64,
    /// Time of the latest step mark of the process, in nanoseconds of CLOCK_MONOTONIC.
    last_mark_ns: u64,
    durations_by_kind: BTreeMap<DurationKind, (HistogramReader, SharedHistogram)>,
}

impl ObservedProcess {
    pub(super) fn new(raw: &layout::Process, tenant: TenantId) -> Self {
        Self {
            pid: raw.pid,
            start_ns: raw.start_ns,
            first_event_ns: raw.first_event_ns,
            ended_ns: None,
            coverage: ProcessCoverage::Since(raw.first_event_ns),
            is_loader: false,
            first_device: NO_GPU,
            uses_several_devices: false,
            announces_steps: false,
            identity: Some(identity_at_admission(raw)),
            tenant,
            loads_for: None,
            probes: ProbeStates::default(),
            phases: None,
            exited_phases_ns: [0; 5],
            steps: StepDetector::default(),
            call_counts: CallCounts::new(raw.first_event_ns),
            overhead: ProcessOverhead::default(),
            visible_devices: VisibleDevices::default(),
            trainer_handle: 0,
            had_unobserved_time: false,
            not_observed_ns: 0,
            not_observed_since_ns: None,
            awaits_probes: false,
            misses_window: false,
            has_torch_probes: false,
            window_spans: WindowSpans::default(),
            probe_hits: 0,
            last_mark_ns: raw.first_event_ns,
            durations_by_kind: BTreeMap::new(),
        }
    }

    /// Reads the record, the counters and the histograms of the process from the kernel.
    pub(super) fn read(&mut self, kernel: &KernelPrograms, raw: &layout::Process) {
        self.ended_ns = (raw.ended_ns != 0).then_some(raw.ended_ns);
        self.probe_hits = raw.probe_hits;
        self.trainer_handle = raw.trainer_handle;
        self.exited_phases_ns = raw.phase_ns;
        self.is_loader = raw.flags & layout::Process::IS_LOADER != 0;
        self.first_device = raw.device;
        self.uses_several_devices = raw.flags & layout::Process::OPENED_SEVERAL_DEVICES != 0;
        self.announces_steps = raw.flags & layout::Process::ANNOUNCES_STEPS != 0;
        if raw.flags & layout::Process::SAW_DRIVER_INIT != 0 && !self.had_unobserved_time {
            self.coverage = ProcessCoverage::Complete;
        }
        let loads = raw.flags & layout::Process::IS_LOADER != 0;
        let trainer = kernel
            .process_record(raw.trainer_handle)
            .map(|trainer| trainer.pid);
        self.loads_for = trainer.or(self.loads_for).filter(|_| loads);
        self.probes.read(raw);
        if raw.ended_ns != 0 {
            self.set_phases([].into_iter(), raw.ended_ns);
        }
        self.call_counts
            .read_counters(&kernel.call_counters(raw.process_handle));
        for (number, slot) in raw.histograms.into_iter().enumerate() {
            let Some(family) = DurationKind::from_index(number).filter(|_| slot != 0) else {
                continue;
            };
            let (reader, total) = self.durations_by_kind.entry(family).or_default();
            let times = kernel.histograms.read(slot as usize);
            reader.add_new_durations(&times, Arc::make_mut(total));
        }
    }

    /// Probe hits so far.
    pub(super) fn probe_hits(&self) -> u64 {
        self.probe_hits
    }

    /// Whether a function of a sampling group is or was sampled.
    pub(crate) fn is_group_sampled(&self, group: SamplingGroup) -> bool {
        self.call_counts
            .is_any_sampled(|function| function.sampling_group == Some(group))
    }

    /// Sets the rank of the process to the one that it passed to NCCL.
    pub(crate) fn adopt_rank(&mut self, rank: u32, ranks: u32) {
        let identity = self.identity.take();
        self.identity = identity.map(|identity| identity.with_rank(rank, ranks));
    }

    /// Adds an event that may separate two steps.
    pub(super) fn add_step_mark(&mut self, raw: &layout::RawStepMark, governor: &Governor) {
        let (from_ns, count) = (self.last_mark_ns, raw.launches.into());
        let launches = if raw.launches == u16::MAX {
            Launches::Unknown
        } else if governor.counts_launches_since(from_ns)
            || self.call_counts.launches_only_unsampled()
        {
            Launches::Counted(count)
        } else if self.window_spans.is_in_one_window(from_ns, raw.at_ns) {
            Launches::InWindow(count)
        } else {
            Launches::Unknown
        };
        self.last_mark_ns = raw.at_ns;
        let classes = StepMarkClass::ALL.into_iter().enumerate();
        let missing = classes.filter(|(bit, _)| raw.missing_classes >> bit & 1 != 0);
        let missing: Vec<StepMarkClass> = missing.map(|(_, class)| class).collect();
        if !missing.is_empty() {
            self.steps.record_gap(&missing);
        }
        if let Some(mark) = StepMark::from_number(raw.mark) {
            self.steps.record_mark(mark, raw.at_ns, launches);
        }
    }

    /// Passes the step detector the marks that are sampled: they do not occur in every step. An announced optimizer step is a
    /// mark that is never sampled.
    pub(super) fn update_sampled_marks(&mut self) {
        let is_sampled = |mark: &StepMark| {
            let is_announced = *mark == StepMark::Optimizer && self.announces_steps;
            let is_wanted = |function: &ProbedFunction| function.mark == Some(*mark);
            !is_announced && self.call_counts.has_called_sampled(is_wanted)
        };
        let sampled: Vec<StepMark> = StepMark::ALL.into_iter().filter(is_sampled).collect();
        self.steps.ignore_marks(&sampled);
    }

    /// Looks up the CUDA devices that the process can use.
    pub(super) fn find_devices(&mut self, gpus: &[GpuFacts]) {
        self.visible_devices = match &self.identity {
            Some(identity) => VisibleDevices::for_process(identity, gpus),
            None => VisibleDevices::parse(None, gpus),
        };
    }

    /// Replaces its identity. A rank that is already known stays.
    pub(super) fn set_identity(&mut self, mut identity: Identity) {
        let known = self.identity.as_ref();
        if known.is_some_and(|known| known.environment_read) && !identity.environment_read {
            return;
        }
        let known = known.and_then(|known| known.rank.zip(known.world_size));
        if let Some((rank, ranks)) = known {
            identity = identity.with_rank(rank, ranks);
        }
        self.identity = Some(identity);
    }

    /// Sets the phases of the process from those of its running and exited threads.
    pub(super) fn set_phases<'a>(
        &mut self,
        threads: impl Iterator<Item = &'a RawTaskState>,
        now_ns: u64,
    ) {
        let driver = training_thread(threads);
        let mut times = PhaseTimeAccumulator::default();
        for (phase, ns) in WorkloadPhase::ALL.into_iter().zip(self.exited_phases_ns) {
            times.record(phase, ns);
        }
        let exited_ns = times.total_ns();
        let Some(driver) = driver else {
            self.count_helper_waits(&mut times);
            // The times of a thread that is exiting may be missing both from the running and from the exited threads.
            // The times that were read while the thread ran may be too long, because the thread may have exited
            // before the read.
            let before = self.phases.as_ref();
            if exited_ns > before.map_or(0, |before| before.exited_ns) {
                let tid = before.map_or(self.pid, |phases| phases.tid);
                self.phases = Some(ProcessPhases {
                    tid,
                    current_phase: WorkloadPhase::Unknown,
                    phase_times: times,
                    exited_ns,
                });
            }
            return;
        };
        let (current, own) = driver.phases_at(now_ns);
        for phase in WorkloadPhase::ALL {
            times.record(phase, own.phase_ns(phase));
        }
        self.count_helper_waits(&mut times);
        self.phases = Some(ProcessPhases {
            tid: driver.pid,
            current_phase: current,
            phase_times: times,
            exited_ns,
        });
    }

    /// While the thread of a backward pass waits for peers, the process does, although its training thread only waits for
    /// that thread.
    fn count_helper_waits(&self, times: &mut PhaseTimeAccumulator) {
        let waited_ns = self.probes.dist_sync.helper_wait_ns;
        let moved_ns = waited_ns.min(times.gpu_compute_ns);
        times.gpu_compute_ns -= moved_ns;
        times.record(WorkloadPhase::NcclCollective, moved_ns);
    }

    /// Its user.
    pub(super) fn uid(&self) -> Option<u32> {
        self.identity.as_ref().map(|identity| identity.uid)
    }

    /// Ends all sampling of a process that exited, and frees the memory that sampling used.
    pub(super) fn end_sampling(&mut self) {
        let ended_ns = self.ended_ns.unwrap_or_else(super::monotonic_ns);
        self.call_counts.end_all_sampling(ended_ns, &self.steps);
        self.probes.release_on_exit();
    }

    /// The histogram of one kind of durations.
    #[must_use]
    pub fn duration_histogram(&self, family: DurationKind) -> Option<&LatencyHistogram> {
        self.durations_by_kind
            .get(&family)
            .map(|(_, total)| &**total)
    }

    /// The histogram of one kind of durations, shared with a snapshot.
    pub(crate) fn shared_duration_histogram(
        &self,
        family: DurationKind,
    ) -> Option<SharedHistogram> {
        let (_, total) = self.durations_by_kind.get(&family)?;
        Some(SharedHistogram::clone(total))
    }

    /// The sum of all durations of one kind. Calls that were not timed, because of sampling, count with the mean.
    #[must_use]
    pub fn total_ns(&self, family: DurationKind) -> f64 {
        let Some(timed) = self
            .duration_histogram(family)
            .filter(|times| times.count > 0)
        else {
            return 0.0;
        };
        let of_family = self
            .call_counts
            .calls_by_function(&self.steps)
            .filter(|(symbol, _)| SYMBOLS[*symbol].duration == Some(family));
        let calls: u64 = of_family.map(|(_, count)| count.calls).sum();
        timed.sum_ns as f64 * calls.max(timed.count) as f64 / timed.count as f64
    }

    /// All kinds of durations of which the process has at least one, with their histograms.
    pub fn duration_histograms(&self) -> impl Iterator<Item = (DurationKind, &LatencyHistogram)> {
        let durations = self.durations_by_kind.iter();
        durations.map(|(family, (_, total))| (*family, &**total))
    }

    /// Calls of every function that was called, by name.
    pub fn calls_by_function(&self) -> impl Iterator<Item = (&'static str, CallCount)> {
        let counts = self.call_counts.calls_by_function(&self.steps);
        counts.map(|(symbol, count)| (SYMBOLS[symbol].name(), count))
    }

    /// Calls and bytes of all functions whose kind meets the condition.
    #[must_use]
    pub fn count_calls(&self, what: impl Fn(CallKind) -> bool) -> CallCount {
        self.call_counts.count_calls(what, &self.steps)
    }

    /// Counted calls of a kind. Unlike an estimate, the returned counts never decrease.
    pub(crate) fn counted_calls_of(&self, kind: CallKind) -> CountedCalls {
        self.call_counts.counted_calls_of(kind)
    }

    /// Launches per step: an estimate if launches were sampled, else the mean of the last steps.
    #[must_use]
    pub fn launches_per_step(&self) -> Option<ConfidenceInterval> {
        self.call_counts.launches_per_step(&self.steps)
    }

    /// Marks these functions as sampled from the start of the process on. `window_from_ns` is since when calls are counted
    /// in the open window of the process; `None` if none is open.
    pub(super) fn mark_sampled_from_start(
        &mut self,
        symbols: &[usize],
        window_from_ns: Option<u64>,
    ) {
        self.call_counts
            .mark_sampled_from_start(symbols, window_from_ns.is_some());
        if let Some(from_ns) = window_from_ns {
            self.window_spans.open(from_ns);
        }
    }

    /// Closes the window of the process, if it has one. Measures the overhead of the round, if a probed call costs `cost_ns`.
    pub(super) fn close_window(
        &mut self,
        counters: &layout::Counters,
        (from_ns, to_ns): (u64, u64),
        cost_ns: f64,
    ) {
        if self.misses_window {
            self.call_counts.discard_window();
        }
        // If a process began in a window, only the part of the window after that counts for the process.
        let span = (from_ns.max(self.first_event_ns), to_ns);
        let cost_ns = self.overhead.busiest_share() * cost_ns;
        self.call_counts
            .close_window(counters, span, cost_ns, &mut self.steps);
    }

    /// Measures overhead and call rates of a round of `elapsed` seconds.
    pub(super) fn measure_overhead(&mut self, busiest: f64, ns_per_call: f64, elapsed: f64) {
        let counters = &self.call_counts.counters;
        self.overhead
            .measure_round(counters, self.probe_hits, busiest, ns_per_call, elapsed);
    }

    /// Adds the overhead since the last round, after the process exited.
    pub(super) fn measure_last_overhead(&mut self, ns_per_call: f64) {
        self.overhead.add_hits(self.probe_hits, ns_per_call);
    }

    /// Its overhead.
    #[must_use]
    pub fn overhead_cost(&self) -> ProcessCost {
        self.overhead.cost
    }

    /// Its key in discovery.
    pub(super) fn discovery_key(&self) -> ProcessKey {
        ProcessKey::new(self.pid, self.start_ns)
    }

    /// Records that the calls of the process are not counted from now on. `sampled` are the functions that were
    /// sampled.
    pub(super) fn suspend_counting(&mut self, sampled: &[usize], now_ns: u64) {
        for symbol in sampled {
            self.call_counts.end_sampling(*symbol, now_ns, &self.steps);
        }
        self.call_counts.set_paused(true, now_ns, &self.steps);
        self.not_observed_since_ns.get_or_insert(now_ns);
        self.mark_incomplete(now_ns);
    }

    /// Whether the calls of the process are not counted for a while.
    pub(super) fn is_uncounted(&self) -> bool {
        self.overhead.is_excluded || self.awaits_probes
    }

    /// How long no call of the process was observed, in all times up to `now_ns`.
    pub(super) fn not_observed_ns(&self, now_ns: u64) -> u64 {
        let since_ns = self.not_observed_since_ns.unwrap_or(now_ns);
        self.not_observed_ns + now_ns.saturating_sub(since_ns)
    }

    /// Marks the process as observed incompletely, because some of the functions that it calls are not probed.
    pub(super) fn mark_incomplete(&mut self, now_ns: u64) {
        if self.coverage == ProcessCoverage::Complete {
            self.coverage = ProcessCoverage::Since(now_ns);
        }
        self.had_unobserved_time = true;
    }

    /// Records that the calls of the process are counted again, after all probes were detached.
    pub(super) fn resume_counting(&mut self, now_ns: u64) {
        self.coverage = ProcessCoverage::Since(now_ns);
        self.had_unobserved_time = true;
        self.not_observed_ns = self.not_observed_ns(now_ns);
        self.not_observed_since_ns = None;
        self.call_counts.set_paused(false, now_ns, &self.steps);
        self.steps.record_gap(&StepMarkClass::ALL);
    }

    /// Whether any function that the process calls is or was sampled.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.call_counts.is_any_sampled(|_| true)
    }
}

/// The thread that runs the training loop: the one that announces its steps, else the one whose phases are known for longest.
fn training_thread<'a>(
    threads: impl Iterator<Item = &'a RawTaskState>,
) -> Option<&'a RawTaskState> {
    let trains = |state: &&RawTaskState| state.tracker.flags & RawTracker::TRAINING_THREAD != 0;
    threads.filter(trains).max_by_key(|state| {
        let known_ns: u64 = state.phase_ns[1..].iter().sum();
        (training_loop_evidence(state.tracker.flags), known_ns)
    })
}

/// The identity that the kernel recorded when it began to observe the process: name, user and parent.
fn identity_at_admission(raw: &layout::Process) -> Identity {
    let start_time = ns_to_clock_ticks(raw.start_ns);
    identify_exited(raw.pid, start_time, &raw.comm, raw.uid, raw.parent_pid)
}

fn ns_to_clock_ticks(ns: u64) -> u64 {
    ns / (1_000_000_000 / procfs::ticks_per_second())
}
