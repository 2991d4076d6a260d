//! One observed process: what the kernel keeps of it, taken over.

use std::collections::BTreeMap;

use super::durations::Taken;
use super::kernel::Kernel;
use crate::aggregation::{GpuMemMetrics, LatencyHistogram};
use crate::probes::{DataloadCauses, Family, SYMBOLS, Scheduling, layout};

/// From when on a process is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// From its first call on.
    Complete,
    /// From this moment on, in nanoseconds of CLOCK_MONOTONIC.
    Since(u64),
}

/// Calls of one function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallCount {
    /// That returned.
    pub calls: u64,
    /// That returned an error.
    pub failed: u64,
    /// Bytes that the others were about.
    pub bytes: u64,
}

/// GPU memory of a process on one device.
#[derive(Debug, Clone, Default)]
pub struct MemoryUse {
    /// All of it.
    pub total: GpuMemMetrics,
    /// By the address that the allocating call returned to.
    pub by_caller: BTreeMap<u64, GpuMemMetrics>,
}

/// A process as far as it was observed.
#[derive(Debug)]
pub struct ObservedProcess {
    /// Its pid.
    pub pid: u32,
    /// When it started, in nanoseconds since boot.
    pub start_ns: u64,
    /// When it ended, in nanoseconds of CLOCK_MONOTONIC.
    pub ended_ns: Option<u64>,
    /// From when on it is known.
    pub seen: Seen,
    /// Probes hit by its threads.
    pub hits: u64,
    /// By CUDA's number of the device.
    pub memory: BTreeMap<u32, MemoryUse>,
    /// The pid of the process that it loads data for.
    pub loads_for: Option<u32>,
    /// Where its threads have been.
    pub scheduling: Scheduling,
    /// Why its steps waited for data.
    pub dataload: DataloadCauses,
    counters: layout::Counters,
    durations: BTreeMap<Family, (Taken, LatencyHistogram)>,
}

impl ObservedProcess {
    pub(super) fn new(raw: &layout::Process) -> Self {
        Self {
            pid: raw.pid,
            start_ns: raw.start_ns,
            ended_ns: None,
            seen: Seen::Since(raw.first_ns),
            hits: 0,
            memory: BTreeMap::new(),
            loads_for: None,
            scheduling: Scheduling::default(),
            dataload: DataloadCauses::default(),
            counters: zerocopy::FromZeros::new_zeroed(),
            durations: BTreeMap::new(),
        }
    }

    pub(super) fn read(&mut self, kernel: &Kernel, index: usize, raw: &layout::Process) {
        self.ended_ns = (raw.ended_ns != 0).then_some(raw.ended_ns);
        self.hits = raw.hits;
        if raw.flags & layout::Process::SAW_INIT != 0 {
            self.seen = Seen::Complete;
        }
        let loads = raw.flags & layout::Process::IS_LOADER != 0;
        self.loads_for = loads.then(|| kernel.processes.read(raw.trainer as usize).pid);
        self.scheduling = Scheduling::new(raw);
        self.dataload = DataloadCauses::new(raw);
        self.counters = kernel.counters.read(index);
        for (number, slot) in raw.histograms.into_iter().enumerate() {
            let Some(family) = Family::from_index(number).filter(|_| slot != 0) else {
                continue;
            };
            let (taken, total) = self.durations.entry(family).or_default();
            taken.take(&kernel.histograms.read(slot as usize), total);
        }
    }

    pub(super) fn set_memory(&mut self, key: &layout::AccountKey, account: &layout::Account) {
        let memory = self.memory.entry(key.device).or_default();
        let place = match key.caller {
            0 => &mut memory.total,
            caller => memory.by_caller.entry(caller).or_default(),
        };
        *place = GpuMemMetrics {
            current_bytes: account.current_bytes,
            peak_bytes: account.peak_bytes,
            alloc_count: account.allocations,
            free_count: account.frees,
        };
    }

    /// Calls of every function that was called, by name.
    pub fn calls(&self) -> impl Iterator<Item = (&'static str, CallCount)> {
        let counted = SYMBOLS.iter().zip(&self.counters.of);
        counted
            .filter(|(_, counter)| counter.calls > 0)
            .map(|(symbol, counter)| {
                let count = CallCount {
                    calls: counter.calls,
                    failed: counter.failed,
                    bytes: counter.bytes,
                };
                (symbol.name(), count)
            })
    }

    /// How long something took.
    #[must_use]
    pub fn duration(&self, family: Family) -> Option<&LatencyHistogram> {
        self.durations.get(&family).map(|(_, total)| total)
    }
}
