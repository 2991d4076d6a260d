//! The trace: every event of every tracker, and when probes were on or off.
//!
//! Tracing is chosen when the BPF programs are loaded. Without tracing the programs contain no code for it.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver};

use libbpf_rs::{MapHandle, OpenObject, RingBuffer, RingBufferBuilder};
use zernel_phase::WorkloadPhase;
use zerocopy::FromBytes;

use super::kernel::KernelPrograms;
use super::{ObserveError, Observer, monotonic_ns, optional_parts};
use crate::probes::layout;

/// The section with the switch of the trace.
const SWITCH_SECTION: &str = ".rodata.trace";
/// Size of the ring buffer: 400,000 events, between two rounds of the observer.
const TRACE_RING_BYTES: u32 = 16 << 20;

/// An item of the trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TraceItem {
    /// A process: written before the first event of the process and whenever its role changes.
    Process(TracedProcess),
    /// An event of a thread.
    Event(TracedEvent),
    /// Probes, a sampling window or an exclusion of a process changed what is observed.
    Coverage {
        /// Time of the change, in nanoseconds of CLOCK_MONOTONIC.
        at_ns: u64,
        /// What changed.
        change: CoverageChange,
    },
    /// Events were lost since the last round.
    Lost {
        /// When the loss was noticed: the end of the observer's round, in nanoseconds of CLOCK_MONOTONIC.
        at_ns: u64,
        /// How many.
        events: u64,
    },
}

/// A process in the trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracedProcess {
    /// The number that identifies the process in the trace, because a pid may be reused.
    pub process_handle: u32,
    /// Its pid.
    pub pid: u32,
    /// Whether the process was forked to load data.
    pub is_loader: bool,
    /// Handle of the trainer that the process loads data for; 0 if it is no loader.
    pub trainer_handle: u32,
}

/// An event of a thread, and the thread's phase after the event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TracedEvent {
    /// Time of the event, in nanoseconds of CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// The thread.
    pub tid: u32,
    /// Its process.
    pub process: u32,
    /// Number of the event in `enum zernel_event` or `enum zernel_trace_event`.
    pub event: u8,
    /// Index of the probed function in `SYMBOLS`; `None`: a context switch.
    pub symbol: Option<u8>,
    /// The phase.
    pub phase: WorkloadPhase,
    /// Number of phase changes of the thread so far, modulo 4096.
    pub sequence: u16,
    /// Start of the phase, rounded down to 1024 ns.
    pub phase_start_ns: u64,
    /// When the phase ends without another event; `u64::MAX` for never.
    pub deadline_ns: u64,
    /// Flags of the tracker.
    pub flags: u16,
    /// Time from the event to its record, at most `u16::MAX`.
    pub delay_ns: u16,
}

/// Probes were detached or attached, a sampling window opened or closed, or a process was excluded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoverageChange {
    /// All probes were detached (`false`) or attached again (`true`).
    Probes(bool),
    /// A sampling window was opened or closed: only then sampled functions give events.
    Window(bool),
    /// Launches are sampled, so threads are assumed to launch after a copy or a backward pass.
    AssumedLaunches(bool),
    /// A process is observed again, or is no longer observed because of its overhead.
    Process {
        /// Its handle.
        handle: u32,
        /// Whether it is observed.
        observed: bool,
    },
}

/// Reads the trace.
pub(super) struct EventTrace {
    ring: RingBuffer<'static>,
    received: Receiver<layout::TraceRecord>,
    processes: BTreeMap<u32, TracedProcess>,
    lost: u64,
    /// Items that nobody has taken yet.
    items: RefCell<Vec<TraceItem>>,
}

impl EventTrace {
    /// Turns tracing on in an object that is not loaded yet.
    pub(super) fn enable_in_object(object: &mut OpenObject) -> libbpf_rs::Result<()> {
        for mut map in object.maps_mut() {
            if map.name() == "trace_records" {
                map.set_max_entries(TRACE_RING_BYTES)?;
            }
        }
        optional_parts::enable_part(object, SWITCH_SECTION);
        Ok(())
    }

    pub(super) fn new(map: &MapHandle) -> libbpf_rs::Result<Self> {
        let (sender, received) = mpsc::channel();
        let mut builder = RingBufferBuilder::new();
        builder.add(map, move |bytes| {
            if let Ok((record, _)) = layout::TraceRecord::read_from_prefix(bytes) {
                // The receiver lives as long as the ring.
                let _ = sender.send(record);
            }
            0
        })?;
        Ok(Self {
            ring: builder.build()?,
            received,
            processes: BTreeMap::new(),
            lost: 0,
            items: RefCell::default(),
        })
    }

    /// Notes a change of what is observed.
    pub(super) fn note_coverage_change(&self, change: CoverageChange) {
        let at_ns = monotonic_ns();
        let item = TraceItem::Coverage { at_ns, change };
        self.items.borrow_mut().push(item);
    }

    /// Reads the ring buffer. Must run before the handles of exited processes are freed.
    fn read_ring(&mut self, kernel: &KernelPrograms) -> libbpf_rs::Result<()> {
        self.ring.consume()?;
        let records: Vec<layout::TraceRecord> = self.received.try_iter().collect();
        for handle in records.iter().map(|record| record.process) {
            self.processes.entry(handle).or_insert(TracedProcess {
                process_handle: handle,
                pid: 0,
                is_loader: false,
                trainer_handle: 0,
            });
        }
        let items = self.items.get_mut();
        for (handle, known) in &mut self.processes {
            let Some(record) = kernel.process_record(*handle) else {
                continue;
            };
            let now = TracedProcess {
                process_handle: *handle,
                pid: record.pid,
                is_loader: record.flags & layout::Process::IS_LOADER != 0,
                trainer_handle: record.trainer_handle,
            };
            if *known != now {
                *known = now.clone();
                items.push(TraceItem::Process(now));
            }
        }
        items.extend(
            records
                .iter()
                .map(|record| TraceItem::Event(traced_event(record))),
        );
        let lost = kernel.losses.read(0).trace;
        if lost > self.lost {
            let at_ns = monotonic_ns();
            let events = lost - std::mem::replace(&mut self.lost, lost);
            items.push(TraceItem::Lost { at_ns, events });
        }
        Ok(())
    }
}

fn traced_event(record: &layout::TraceRecord) -> TracedEvent {
    let is_call = usize::from(record.symbol) != layout::NONE;
    TracedEvent {
        at_ns: record.at_ns,
        tid: record.tid,
        process: record.process,
        event: record.event,
        symbol: is_call.then_some(record.symbol),
        phase: record.phase_word.phase(),
        sequence: record.phase_word.sequence(),
        phase_start_ns: record.phase_word.start_ns(),
        deadline_ns: record.deadline_ns,
        flags: record.flags,
        delay_ns: record.delay_ns,
    }
}

impl Observer {
    /// Reads the ring buffer of the trace, if events are traced.
    pub(super) fn read_trace(&mut self) -> libbpf_rs::Result<()> {
        // The ring buffer is taken out of the kernel side during the call, because reading it also needs the other
        // maps.
        let Some(mut trace) = self.kernel.trace.take() else {
            return Ok(());
        };
        let read = trace.read_ring(&self.kernel);
        self.kernel.trace = Some(trace);
        read
    }

    /// The items of the trace since the last call, in the order of the kernel; none unless
    /// [`ObserverOptions::traces_events`](super::ObserverOptions::traces_events) is set.
    pub fn take_trace(&mut self) -> Result<Vec<TraceItem>, ObserveError> {
        self.read_trace().map_err(ObserveError::ReadMap)?;
        let trace = self.kernel.trace.as_mut();
        Ok(trace.map_or_else(Vec::new, |trace| std::mem::take(trace.items.get_mut())))
    }
}
