//! Records a trace while the command runs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use zernel_ebpf::observer::{
    CoverageChange, ObserveError, Observer, ObserverOptions, ObserverThread, TraceItem, TracedEvent,
};
use zernel_ebpf::probes::SYMBOLS;
use zernel_model::snapshot::{ProcessSnapshot, Snapshot};
use zernel_phase::shared::{self, RawTaskState, RawTracker, TASK_NCCL_ACTIVE};
use zernel_report::Report;
use zernel_truth::trace::{
    CoverageEntry, DelaySummary, EventEntry, ProcessEntry, SampleEntry, TraceEncoder, TraceEntry,
    TraceHeader,
};

use crate::run::recorder::{RecordedRoot, RunRecording};

/// Time between samples of the sampled rule, and between reads of the trace.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);
/// Time between snapshots, which have the utilization of GPUs and what a report needs.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(200);
/// Samples per snapshot.
const SAMPLES_PER_SNAPSHOT: u32 = 2;
/// The most bytes of a trace's entries. A longer trace is cut at about this length, and its header has the number of
/// lost events.
const MAX_ENTRY_BYTES: usize = 512 << 20;

/// A thread that records a trace until it is stopped.
pub(super) struct TraceRecorderThread {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<TraceRecorder, ObserveError>>,
}

/// A recorded trace.
pub(super) struct FinishedRecording {
    pub(super) bytes: Vec<u8>,
    /// Describes the finished recording in one line for the user.
    pub(super) summary: String,
}

/// The entries of the trace that were recorded so far.
struct TraceRecorder {
    encoder: TraceEncoder,
    header: TraceHeader,
    delays: DelayHistogram,
    events: u64,
    run: RunRecording,
}

impl TraceRecorderThread {
    /// Starts to observe and to record. Returns once all probes are attached.
    pub(super) fn start(
        options: &ObserverOptions,
        command: Vec<String>,
        root: RecordedRoot,
    ) -> Result<Self, ObserveError> {
        let observer = Observer::start(options)?;
        let observer = ObserverThread::start(observer, SNAPSHOT_INTERVAL)?;
        let recorder = TraceRecorder::new(command, root);
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let stop = Arc::clone(&stop);
            move || recorder.record_until(observer, &stop)
        });
        Ok(Self { stop, thread })
    }

    /// Stops observing and returns the trace.
    pub(super) fn stop_and_collect(self) -> Result<FinishedRecording, ObserveError> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
        match self.thread.join() {
            Ok(recorder) => Ok(recorder?.into_trace()),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl TraceRecorder {
    fn new(command: Vec<String>, root: RecordedRoot) -> Self {
        let events = shared::EVENT_MIRROR.values.iter();
        let events = events.map(|(name, number)| ((*name).to_owned(), *number as u8));
        let header = TraceHeader {
            zernel: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: rustix::system::uname()
                .release()
                .to_string_lossy()
                .into_owned(),
            command,
            began_ns: monotonic_ns(),
            events: events.collect(),
            functions: SYMBOLS
                .iter()
                .map(|symbol| symbol.name().to_owned())
                .collect(),
            ..TraceHeader::default()
        };
        Self {
            encoder: TraceEncoder::default(),
            header,
            delays: DelayHistogram::default(),
            events: 0,
            run: RunRecording::new(root),
        }
    }

    fn record_until(
        mut self,
        observer: ObserverThread,
        stop: &AtomicBool,
    ) -> Result<Self, ObserveError> {
        let mut snapshot = observer.published_snapshot().snapshot();
        for round in 0_u32.. {
            // The flag is read before the trace, so that the last read of the trace follows the exit of the command.
            let is_last = stop.load(Ordering::Relaxed);
            if (is_last || round % SAMPLES_PER_SNAPSHOT == 0)
                && let Some(refreshed) = observer.refresh_snapshot()
            {
                snapshot = refreshed;
                self.run.add_snapshot(&snapshot, is_last);
            }
            let taken = observer.requests().call_with_observer(|observer| {
                let states = observer.task_states()?;
                Ok::<_, ObserveError>((states, observer.take_trace()?))
            });
            let Some(taken) = taken else {
                // The thread has ended by itself; `stop` returns why.
                observer.stop()?;
                return Ok(self);
            };
            let (states, items) = taken?;
            items.iter().for_each(|item| self.add_item(item));
            self.add_samples(&states, &snapshot);
            if is_last {
                break;
            }
            thread::park_timeout(SAMPLE_INTERVAL);
        }
        self.header.ended_ns = monotonic_ns();
        self.header.problems = observer.stop()?.problems();
        Ok(self)
    }

    fn add_item(&mut self, item: &TraceItem) {
        match item {
            TraceItem::Process(process) => self.push_entry(&TraceEntry::Process(ProcessEntry {
                handle: process.process_handle,
                pid: process.pid,
                is_loader: process.is_loader,
                trainer_handle: process.trainer_handle,
            })),
            TraceItem::Event(event) => self.add_event(event),
            TraceItem::Coverage { at_ns, change } => {
                let coverage = match *change {
                    CoverageChange::Probes(attached) => CoverageEntry::ProbesAttached(attached),
                    CoverageChange::Window(open) => CoverageEntry::WindowOpen(open),
                    CoverageChange::AssumedLaunches(assumed) => {
                        CoverageEntry::LaunchesAssumed(assumed)
                    }
                    CoverageChange::Process { handle, observed } => {
                        CoverageEntry::ProcessObserved {
                            handle,
                            is_observed: observed,
                        }
                    }
                };
                let at_ns = *at_ns;
                self.push_entry(&TraceEntry::Coverage { at_ns, coverage });
            }
            TraceItem::Lost { at_ns, events } => {
                self.header.lost_events += events;
                self.push_entry(&TraceEntry::Loss {
                    at_ns: *at_ns,
                    lost_events: *events,
                });
            }
        }
    }

    fn add_event(&mut self, event: &TracedEvent) {
        // Before the recording began, calls measured the cost of a probe.
        if event.at_ns < self.header.began_ns {
            return;
        }
        if event.symbol.is_some() {
            self.delays.add_delay(event.delay_ns);
        }
        self.events += 1;
        self.push_entry(&TraceEntry::Event(EventEntry {
            at_ns: event.at_ns,
            tid: event.tid,
            process_handle: event.process,
            event_number: event.event,
            symbol_number: event.symbol,
            phase: event.phase,
            sequence: event.sequence,
            phase_start_ns: event.phase_start_ns,
            deadline_ns: event.deadline_ns,
            tracker_flags: event.flags,
        }));
    }

    fn push_entry(&mut self, entry: &TraceEntry) {
        if self.encoder.len() < MAX_ENTRY_BYTES {
            self.encoder.push_entry(entry);
        } else if matches!(entry, TraceEntry::Event(_)) {
            self.header.lost_events += 1;
        }
    }

    /// Records the inputs of the sampled rule for training threads and main threads.
    fn add_samples(&mut self, states: &[RawTaskState], snapshot: &Snapshot) {
        let at_ns = monotonic_ns();
        let processes = snapshot.observed.iter();
        let processes: BTreeMap<u32, &ProcessSnapshot> =
            processes.map(|process| (process.pid, process)).collect();
        for state in states {
            let trains = state.tracker.flags & RawTracker::TRAINING_THREAD != 0;
            if !trains && state.pid != state.tgid {
                continue;
            }
            let process = processes.get(&state.tgid);
            let utilization = process.and_then(|process| process.probes.gpu_mem.gpu_utilization);
            self.push_entry(&TraceEntry::Sample(SampleEntry {
                at_ns,
                tid: state.pid,
                pid: state.tgid,
                last_gpu_sync_ns: state.last_gpu_sync_ns,
                cpu_burst_ns: state.cpu_burst_ns,
                io_wait_q16: state.io_wait_q16,
                futex_waits: state.futex_waits,
                gpu_utilization_percent: (utilization.unwrap_or(0.0) * 100.0).clamp(0.0, 100.0)
                    as u8,
                nccl_active: state.flags & TASK_NCCL_ACTIVE != 0,
            }));
        }
    }

    fn into_trace(mut self) -> FinishedRecording {
        self.header.delay = self.delays.summarize();
        let wall = Duration::from_nanos(self.header.ended_ns - self.header.began_ns);
        let command = self.header.command.clone();
        let report = Report::new(command, wall, None, Ok(self.run.into_observation()));
        self.header.report = serde_json::to_value(&report).ok();
        let seconds = wall.as_secs_f64();
        let summary = format!(
            "recorded {} events in {seconds:.1} s, {} lost",
            self.events, self.header.lost_events
        );
        FinishedRecording {
            bytes: self.encoder.into_file(&self.header),
            summary,
        }
    }
}

/// Delays by length in units of 16 ns, the last unit included.
struct DelayHistogram(Vec<u64>);

impl Default for DelayHistogram {
    fn default() -> Self {
        Self(vec![0; 1 << 12])
    }
}

impl DelayHistogram {
    fn add_delay(&mut self, delay_ns: u16) {
        self.0[usize::from(delay_ns >> 4)] += 1;
    }

    fn summarize(&self) -> DelaySummary {
        let count: u64 = self.0.iter().sum();
        let quantile = |share: f64| {
            let rank = (count as f64 * share) as u64;
            let mut seen = 0;
            let place = self.0.iter().position(|number| {
                seen += number;
                seen > rank
            });
            (place.unwrap_or(0) << 4) as u16
        };
        let max = self.0.iter().rposition(|number| *number > 0);
        DelaySummary {
            count,
            median_ns: quantile(0.5),
            p99_ns: quantile(0.99),
            max_ns: (max.unwrap_or(0) << 4) as u16 | 0xf,
        }
    }
}

/// Time on the monotonic clock, which the probes and the labels use too.
fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_have_quantiles() {
        let mut delays = DelayHistogram::default();
        (0..100).for_each(|_| delays.add_delay(160));
        delays.add_delay(u16::MAX);
        let summary = delays.summarize();
        assert_eq!((summary.count, summary.median_ns), (101, 160));
        assert_eq!((summary.p99_ns, summary.max_ns), (160, u16::MAX));
        assert_eq!(DelayHistogram::default().summarize().count, 0);
    }
}
