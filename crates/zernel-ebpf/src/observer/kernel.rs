//! The loaded BPF programs and the maps that they share with the observer.

mod attach;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::mem::offset_of;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use libbpf_rs::{
    Iter, Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, OpenObject, ProgramMut,
};
use zernel_phase::PhaseDetectorConfig;
use zernel_phase::shared::{RawPhaseConfig, RawTaskState};
use zernel_phase::tracker::TrackerConfig;
use zerocopy::{FromBytes, IntoBytes};

use super::alarm::AlarmRing;
use super::decisions;
use super::event_trace::{CoverageChange, EventTrace};
use super::hints::{self, HintMap};
use super::map_batches;
use super::mapped_array::MappedArray;
use super::optional_parts;
use super::sampled_phases;
use super::shared_state::{ObserverPins, PinDirectory};
use super::step_marks::StepMarks;
use super::tenants::{TenantMaps, TenantRegistry, TenantTable};
use super::{ObserveError, ObserverOptions, monotonic_ns};
use crate::capability::{Capability, without_libbpf_messages};
use crate::discovery::sys;
use crate::probes::{self, CallKind, CopyDirection, SYMBOLS, layout};
use crate::{child_task, task_reader};

pub(crate) static OBSERVE_OBJECT: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/observe.bpf.o"));

/// Tracepoint programs, attached at the start.
const TRACEPOINT_PROGRAMS: [&str; 5] = [
    "process_exit",
    "process_exec",
    "process_fork",
    "sched_switch",
    "sched_waking",
];

/// Kinds of uprobes, best first. The observer uses the first kind that the kernel supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UprobeKind {
    /// uprobe session: one link attaches to the entries and the returns of many functions.
    Session,
    /// uprobe multi: one link attaches to the entries of many functions, another to their returns.
    Multi,
    /// Two perf events per function.
    PerfEvent,
}

impl UprobeKind {
    /// All kinds, best first.
    pub const BEST_FIRST: [Self; 3] = [Self::Session, Self::Multi, Self::PerfEvent];

    /// Name in the ledger and in the output of `zernel doctor`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.capability().name()
    }

    fn capability(self) -> Capability {
        match self {
            Self::Session => Capability::UprobeSession,
            Self::Multi => Capability::UprobeMulti,
            Self::PerfEvent => Capability::UprobePerf,
        }
    }

    fn program_names(self) -> &'static [&'static str] {
        match self {
            Self::Session => &["call_session", "call_mark_multi"],
            Self::Multi => &["call_enter_multi", "call_leave_multi", "call_mark_multi"],
            Self::PerfEvent => &["call_enter_perf", "call_leave_perf", "call_mark_perf"],
        }
    }
}

/// Where a function is probed: its offset in the file, and its index in [`SYMBOLS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProbeTarget {
    pub(crate) offset: u64,
    pub(crate) symbol: usize,
}

/// The loaded BPF object, with its maps mapped into memory.
pub(crate) struct KernelPrograms {
    object: Object,
    /// The pinned map of task states, or the reason why the map is not pinned.
    shared: Result<ObserverPins, String>,
    tracepoints: Vec<Link>,
    writes_hints: bool,
    pub(crate) rung: UprobeKind,
    pub(crate) step_marks: StepMarks,
    pub(crate) alarm: AlarmRing,
    /// The trace, if events are traced.
    pub(super) trace: Option<EventTrace>,
    /// The table of what a scheduler would have decided; `None` if decisions are not counted.
    pub(super) decisions: Option<MappedArray<layout::RawDecisions>>,
    pub(crate) settings: MappedArray<layout::Settings>,
    pub(crate) losses: MappedArray<layout::Losses>,
    pub(crate) processes: MappedArray<layout::Process>,
    counters: MappedArray<layout::Counters>,
    /// Number of map entries that were visited so far in order to delete some of them.
    pub(crate) visited_entries: AtomicU64,
    pub(crate) histograms: MappedArray<layout::Histogram>,
    pub(super) tenants: TenantRegistry,
}

impl KernelPrograms {
    /// Loads the programs for the first of the rungs that the kernel supports, and pins the map of task states if
    /// possible.
    pub(crate) fn load(
        options: &ObserverOptions,
        tracker: &TrackerConfig,
    ) -> Result<Self, ObserveError> {
        let works = |rung: &&UprobeKind| rung.capability().try_out().is_ok();
        let rung = options.rungs.iter().find(works).ok_or_else(|| {
            let error = std::io::Error::other("the kernel supports no kind of uprobe");
            ObserveError::Load(error.into())
        })?;
        let mut object = ObjectBuilder::default()
            .open_memory(OBSERVE_OBJECT)
            .map_err(ObserveError::Load)?;
        let hints = match &options.hints {
            Some(path) => {
                Some(HintMap::enable_in_object(path, &mut object).map_err(hints_error_at(path))?)
            }
            None => None,
        };
        let kernel = Self::load_with_uprobe_kind(*rung, object, options, hints.is_some());
        let kernel = kernel.map_err(ObserveError::Load)?;
        if let (Some(hints), Some(path)) = (hints, &options.hints) {
            let map = kernel
                .find_map_by_name(hints::HINT_MAP)
                .map_err(ObserveError::Load)?;
            hints.pin_map(map).map_err(hints_error_at(path))?;
        }
        kernel.write_tables(tracker).map_err(ObserveError::Load)?;
        Ok(kernel)
    }

    fn load_with_uprobe_kind(
        rung: UprobeKind,
        mut object: OpenObject,
        options: &ObserverOptions,
        writes_hints: bool,
    ) -> libbpf_rs::Result<Self> {
        let (object, pins) = without_libbpf_messages(|| {
            choose_parts(&mut object, rung, options)?;
            let pins = PinDirectory::claim_directory(&options.pins, &mut object);
            Ok::<_, libbpf_rs::Error>((object.load()?, pins))
        })?;
        let tasks = find_map(&object, "zernel_tasks")?;
        let heartbeats = find_map(&object, "zernel_heartbeats")?;
        if pins.as_ref().is_ok_and(|pins| pins.reuses_tasks) {
            // Old states are deleted before the first heartbeat, so that no reader takes an old state for a new one.
            run_task_iterator(&object, "forget_tasks")?;
        }
        if writes_hints {
            // An observer that was killed has left its hints behind.
            run_task_iterator(&object, hints::CLEAR_PROGRAM)?;
        }
        let shared = pins.and_then(|pins| pins.pin_maps(tasks, heartbeats));
        let tracepoints = TRACEPOINT_PROGRAMS
            .into_iter()
            .map(|name| without_libbpf_messages(|| find_program(&object, name)?.attach()))
            .collect::<libbpf_rs::Result<_>>()?;
        Ok(Self {
            rung,
            shared,
            tracepoints,
            writes_hints,
            step_marks: StepMarks::new(&find_map(&object, "step_marks")?)?,
            alarm: AlarmRing::new(&find_map(&object, "alarms")?)?,
            trace: match options.traces_events {
                true => Some(EventTrace::new(&find_map(&object, "trace_records")?)?),
                false => None,
            },
            decisions: match options.counts_decisions {
                true => Some(decisions::map_decision_rows(&find_map(
                    &object,
                    decisions::DECISIONS_MAP,
                )?)?),
                false => None,
            },
            settings: MappedArray::new(find_map(&object, "settings")?, 1)?,
            losses: MappedArray::new(find_map(&object, "losses")?, 1)?,
            processes: MappedArray::new(find_map(&object, "processes")?, layout::PROCESSES)?,
            visited_entries: AtomicU64::new(0),
            counters: MappedArray::new(find_map(&object, "counters")?, layout::PROCESSES)?,
            histograms: MappedArray::new(find_map(&object, "histograms")?, layout::HISTOGRAMS)?,
            tenants: TenantRegistry::new(TenantMaps {
                tenant_rows: find_map(&object, "tenants")?,
                indices: find_map(&object, "tenant_indices")?,
                free_tenant_indices: find_map(&object, "free_tenants")?,
                parents: find_map(&object, "tenant_parents")?,
                subordinate_ranges: find_map(&object, "subordinate_ranges")?,
            })?,
            object,
        })
    }

    /// Writes the settings, the symbols and the free indices that the programs read.
    fn write_tables(&self, tracker: &TrackerConfig) -> libbpf_rs::Result<()> {
        let settings = layout::Settings {
            tracker: *tracker,
            is_window_open: 0,
            reserved: 0,
            last_detach_ns: 0,
            events_probed_since_ns: 0,
            are_events_sampled: 0,
            are_launches_sampled: 0,
            is_suspended: 0,
            sampled_rule: RawPhaseConfig::from(&PhaseDetectorConfig::default()),
        };
        self.settings.write(0, &settings);
        for symbol in 0..SYMBOLS.len() {
            self.set_symbol_sampled(symbol, false)?;
        }
        for handle in 1..layout::PROCESSES as u32 {
            self.free_process(handle)?;
        }
        for index in 1..layout::HISTOGRAMS as u32 {
            self.free_histogram(index)?;
        }
        Ok(())
    }

    /// Sets whether a function counts only while a window is open.
    pub(crate) fn set_symbol_sampled(&self, symbol: usize, sampled: bool) -> libbpf_rs::Result<()> {
        let mut row = SYMBOLS[symbol].raw_symbol(sampled);
        if self.assumes_launches() && precedes_launches(symbol) {
            row.flags |= layout::Symbol::PRECEDES_LAUNCHES;
        }
        let key = (symbol as u32).to_ne_bytes();
        find_map(&self.object, "symbols")?.update(&key, row.as_bytes(), MapFlags::ANY)
    }

    /// Whether the programs assume that a thread launches after a copy to the GPU or in a backward pass.
    pub(crate) fn assumes_launches(&self) -> bool {
        self.settings.read(0).are_launches_sampled != 0
    }

    /// Sets whether the programs assume that a thread launches after a copy to the GPU or a backward pass.
    pub(crate) fn assume_launches(
        &self,
        assume: bool,
        is_sampled: impl Fn(usize) -> bool,
    ) -> libbpf_rs::Result<()> {
        let offset = offset_of!(layout::Settings, are_launches_sampled);
        let word = self.settings.word(0, offset);
        word.store(assume.into(), Ordering::Relaxed);
        self.trace_coverage(CoverageChange::AssumedLaunches(assume));
        for symbol in (0..SYMBOLS.len()).filter(|symbol| precedes_launches(*symbol)) {
            self.set_symbol_sampled(symbol, is_sampled(symbol))?;
        }
        Ok(())
    }

    /// Opens or closes the window in which sampled functions count.
    pub(crate) fn set_window_open(&self, open: bool) {
        let offset = offset_of!(layout::Settings, is_window_open);
        let word = self.settings.word(0, offset);
        word.store(open.into(), Ordering::Release);
        self.trace_coverage(CoverageChange::Window(open));
        if !open {
            self.record_detach_time();
        }
    }

    /// No longer times collectives that were called before now. `sampled`: follows CUDA events in sampling windows only.
    pub(crate) fn restart_event_tracking(&self, sampled: bool) {
        let offset = offset_of!(layout::Settings, are_events_sampled);
        let word = self.settings.word(0, offset);
        word.store(sampled.into(), Ordering::Release);
        let offset = offset_of!(layout::Settings, events_probed_since_ns);
        let word = self.settings.word(0, offset);
        word.store(monotonic_ns(), Ordering::Release);
    }

    /// Records that probes were detached: calls in progress may return unseen, and do not count as lost.
    pub(crate) fn record_detach_time(&self) {
        let offset = offset_of!(layout::Settings, last_detach_ns);
        let word = self.settings.word(0, offset);
        word.store(monotonic_ns(), Ordering::Release);
    }

    /// Traces a change of what is observed.
    pub(super) fn trace_coverage(&self, change: CoverageChange) {
        if let Some(trace) = &self.trace {
            trace.note_coverage_change(change);
        }
    }

    /// Sets whether all probes are detached. Phases are unknown meanwhile.
    pub(crate) fn set_suspended(&self, suspended: bool) {
        let offset = offset_of!(layout::Settings, is_suspended);
        let word = self.settings.word(0, offset);
        word.store(suspended.into(), Ordering::Release);
    }

    /// Makes a handle available to the next process.
    fn free_process(&self, handle: u32) -> libbpf_rs::Result<()> {
        let queue = find_map(&self.object, "free_processes")?;
        queue.update(&[], &handle.to_ne_bytes(), MapFlags::ANY)
    }

    fn free_histogram(&self, index: u32) -> libbpf_rs::Result<()> {
        let queue = find_map(&self.object, "free_histograms")?;
        queue.update(&[], &index.to_ne_bytes(), MapFlags::ANY)
    }

    /// The kernel's record of the process with an index; `None` if no process has that index.
    pub(crate) fn process_record_at(&self, index: usize) -> Option<layout::Process> {
        // The kernel writes the pid of a record last, so the pid is read first.
        let word = self.processes.word(index, offset_of!(layout::Process, pid));
        if word.load(Ordering::Acquire) == 0 {
            return None;
        }
        Some(self.processes.read(index)).filter(|record| record.pid != 0)
    }

    /// The kernel's record of a process; `None` if the kernel has forgotten the process.
    pub(crate) fn process_record(&self, handle: u32) -> Option<layout::Process> {
        let record = self.process_record_at(layout::index_of_handle(handle));
        record.filter(|record| record.process_handle == handle)
    }

    /// Whether the calls of a process are counted.
    pub(crate) fn set_uncounted(&self, handle: u32, is_uncounted: bool) {
        if self.process_record(handle).is_some() {
            let place = offset_of!(layout::Process, is_uncounted);
            let word = self.processes.word(layout::index_of_handle(handle), place);
            word.store(is_uncounted.into(), Ordering::Release);
            let observed = !is_uncounted;
            self.trace_coverage(CoverageChange::Process { handle, observed });
        }
    }

    /// Sets whether the sampled rule decides the phases of a process.
    pub(super) fn set_sampled_phases(&self, handle: u32, is_sampled: bool) {
        if self.process_record(handle).is_some() {
            let place = offset_of!(layout::Process, is_sampled);
            let word = self.processes.word(layout::index_of_handle(handle), place);
            word.store(is_sampled.into(), Ordering::Release);
        }
    }

    /// Sets the GPU that a process uses, and its utilization in percent, for the kernel to publish.
    pub(crate) fn set_gpu(&self, handle: u32, gpu: Option<(u32, u32)>) {
        if self.process_record(handle).is_some() {
            let place = offset_of!(layout::Process, gpu);
            let word = self.processes.word(layout::index_of_handle(handle), place);
            let value = gpu.map_or(0, |(index, utilization)| {
                u64::from(utilization) << 32 | u64::from(index.wrapping_add(1))
            });
            word.store(value, Ordering::Release);
        }
    }

    /// The counters of a process.
    pub(crate) fn call_counters(&self, handle: u32) -> layout::Counters {
        self.counters.read(layout::index_of_handle(handle))
    }

    /// Frees the indices of processes that exited and were read for the last time.
    pub(crate) fn forget_processes(&self, handles: &BTreeSet<u32>) -> libbpf_rs::Result<()> {
        if handles.is_empty() {
            return Ok(());
        }
        let records: Vec<_> = handles
            .iter()
            .filter_map(|it| self.process_record(*it))
            .collect();
        for record in &records {
            self.invalidate_handle(record);
        }
        // This call takes longer than any BPF program runs, so no program still uses what is freed after it.
        probes::delete_entries(self, handles)?;
        for record in &records {
            let histograms = record.histograms.into_iter().filter(|index| *index != 0);
            let mut freed = 0;
            for histogram in histograms {
                self.free_histogram(histogram)?;
                freed += 1;
            }
            self.free_process(layout::next_handle(record.process_handle))?;
            let deleted = [
                (TenantTable::Histograms, freed),
                (TenantTable::Processes, 1),
            ];
            for (table, entries) in deleted {
                self.tenants.count_deleted(record.tenant, table, entries);
            }
        }
        Ok(())
    }

    /// Makes the handle of a process invalid: from now on BPF programs find no process under this handle.
    fn invalidate_handle(&self, record: &layout::Process) {
        let index = layout::index_of_handle(record.process_handle);
        for offset in [
            offset_of!(layout::Process, process_handle),
            offset_of!(layout::Process, pid),
        ] {
            self.processes
                .word(index, offset)
                .store(0, Ordering::Release);
        }
    }

    /// Forgets the observer's own process. Calibration made it an observed process, and children of an observed process
    /// count as its data loaders.
    pub(crate) fn forget_own_process(&self) -> libbpf_rs::Result<()> {
        let own = std::process::id();
        let handles = find_map(&self.object, "process_handles")?;
        let mut forgotten = BTreeSet::new();
        for key in handles.keys().collect::<Vec<_>>() {
            let Some(handle) = handles.lookup(&key, MapFlags::ANY)? else {
                continue;
            };
            let handle = u32::from_ne_bytes(handle.try_into().unwrap_or_default());
            if self
                .process_record(handle)
                .is_some_and(|record| record.pid == own)
            {
                let _ = handles.delete(&key);
                forgotten.insert(handle);
            }
        }
        self.forget_processes(&forgotten)
    }

    /// Deletes the entries of a hash map that meet a condition, in one pass. Returns the keys of the deleted entries.
    pub(crate) fn delete_where<K: FromBytes, V: FromBytes>(
        &self,
        map: &str,
        condition: impl Fn(&K, &V) -> bool,
    ) -> libbpf_rs::Result<Vec<K>> {
        let deleted = map_batches::delete_where(&find_map(&self.object, map)?, condition)?;
        self.visited_entries
            .fetch_add(deleted.visited_count, Ordering::Relaxed);
        Ok(deleted.deleted_keys)
    }

    /// Subtracts entries that were deleted from a table from the counts of their tenants, by the handles of their
    /// processes. The indices of the processes must not be free yet.
    pub(crate) fn count_deleted(&self, table: TenantTable, handles: impl Iterator<Item = u32>) {
        let mut by_process: BTreeMap<u32, u64> = BTreeMap::new();
        for handle in handles {
            *by_process.entry(handle).or_default() += 1;
        }
        for (handle, entries) in by_process {
            let record = self.processes.read(layout::index_of_handle(handle));
            self.tenants.count_deleted(record.tenant, table, entries);
        }
    }

    /// A map by name.
    pub(crate) fn find_map_by_name(&self, name: &str) -> libbpf_rs::Result<MapHandle> {
        find_map(&self.object, name)
    }

    /// Reads all entries of a BPF hash map.
    pub(crate) fn read_map_entries<K: FromBytes, V: FromBytes>(
        &self,
        map: &str,
    ) -> libbpf_rs::Result<Vec<(K, V)>> {
        map_batches::read_all_entries(&find_map(&self.object, map)?)
    }

    /// The descriptors that [`Self::attach_probes`] needs.
    pub(crate) fn program_descriptors(&self) -> Vec<BorrowedFd<'_>> {
        child_task::program_descriptors(&self.object)
    }

    /// Path of the pinned map of task states, or the reason why the map is not pinned.
    pub(crate) fn shared_state(&self) -> Result<PathBuf, &str> {
        match &self.shared {
            Ok(shared) => Ok(shared.task_map_path()),
            Err(reason) => Err(reason),
        }
    }

    /// The states of all threads of ML processes.
    pub(crate) fn task_states(&self) -> libbpf_rs::Result<Vec<RawTaskState>> {
        let link = without_libbpf_messages(|| self.find_program_by_name("dump_tasks")?.attach())?;
        let mut bytes = Vec::new();
        Iter::new(&link)?.read_to_end(&mut bytes)?;
        let states = bytes.chunks_exact(size_of::<RawTaskState>());
        Ok(states
            .filter_map(|state| RawTaskState::read_from_bytes(state).ok())
            .collect())
    }

    /// Creates task states for the threads and children that observed processes had before they were observed.
    pub(crate) fn adopt_existing_tasks(&self) -> libbpf_rs::Result<()> {
        run_task_iterator(&self.object, "adopt_tasks")
    }

    /// The state of a thread; `None` if the thread belongs to no ML process.
    pub(crate) fn task_state(&self, tid: u32) -> libbpf_rs::Result<Option<RawTaskState>> {
        task_reader::state_in_map(&find_map(&self.object, "zernel_tasks")?, tid)
    }

    /// Runs an iterator once for every thread of one process.
    pub(super) fn run_for_process(&self, program: &str, pid: u32) -> libbpf_rs::Result<()> {
        let program = find_program(&self.object, program)?;
        let link = without_libbpf_messages(|| sys::attach_to_process(&program, pid))?;
        std::io::copy(&mut Iter::new(&link)?, &mut std::io::sink())?;
        Ok(())
    }

    fn find_program_by_name(&self, name: &str) -> libbpf_rs::Result<ProgramMut<'_>> {
        find_program(&self.object, name)
    }
}

impl Drop for KernelPrograms {
    fn drop(&mut self) {
        // Without tracepoints no program writes a hint after hints were cleared. Probes are detached already.
        self.tracepoints.clear();
        if self.writes_hints {
            let _ = run_task_iterator(&self.object, hints::CLEAR_PROGRAM);
        }
    }
}

/// Chooses the programs of a rung, and the parts that the options ask for.
fn choose_parts(
    object: &mut OpenObject,
    rung: UprobeKind,
    options: &ObserverOptions,
) -> libbpf_rs::Result<()> {
    for mut program in object.progs_mut() {
        let name = program.name().to_string_lossy().into_owned();
        let other_rung = name.starts_with("call_") && !rung.program_names().contains(&&*name);
        program.set_autoload(!other_rung);
    }
    if options.traces_events {
        EventTrace::enable_in_object(object)?;
    }
    if !options.samples_phases {
        optional_parts::leave_out_part(object, &sampled_phases::SAMPLING_PROGRAMS)?;
    }
    if options.hints.is_none() {
        optional_parts::leave_out_part(object, &hints::OPTIONAL_PARTS)?;
    }
    match options.counts_decisions {
        true => optional_parts::enable_part(object, decisions::SWITCH_SECTION),
        false => optional_parts::leave_out_part(object, &decisions::OPTIONAL_MAPS)?,
    }
    Ok(())
}

/// An error about the hints at a path.
fn hints_error_at(path: &Path) -> impl Fn(String) -> ObserveError {
    |reason| ObserveError::HintsUnusable {
        path: path.to_owned(),
        reason,
    }
}

/// Runs a program once for every task.
fn run_task_iterator(object: &Object, program: &str) -> libbpf_rs::Result<()> {
    let link = without_libbpf_messages(|| find_program(object, program)?.attach())?;
    // The iterator's program writes nothing: reading from the iterator is what runs the program.
    std::io::copy(&mut Iter::new(&link)?, &mut std::io::sink())?;
    Ok(())
}

fn find_program<'a>(object: &'a Object, name: &str) -> libbpf_rs::Result<ProgramMut<'a>> {
    let mut programs = object.progs_mut();
    let found = programs.find(|program| program.name() == name);
    found.ok_or_else(|| missing_error("program", name))
}

/// Whether launches usually follow a call of this function.
fn precedes_launches(symbol: usize) -> bool {
    let symbol = &SYMBOLS[symbol];
    symbol.kind == CallKind::Copy(CopyDirection::HostToDevice) || symbol.begins_backward()
}

fn find_map(object: &Object, name: &str) -> libbpf_rs::Result<MapHandle> {
    let map = object.maps().find(|map| *map.name() == *name);
    MapHandle::try_from(&map.ok_or_else(|| missing_error("map", name))?)
}

fn missing_error(what: &str, name: &str) -> libbpf_rs::Error {
    std::io::Error::other(format!("the BPF object has no {what} {name}")).into()
}
