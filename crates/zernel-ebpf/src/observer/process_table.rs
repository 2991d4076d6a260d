//! The observed processes: reads what the kernel keeps of them, and forgets those that have exited.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use zernel_model::gpu::{GpuFacts, ProcessGpuMemory};
use zernel_model::snapshot::ExitedRankTimes;

use super::attachment::LibraryAttachments;
use super::found_functions::AttachMode;
use super::governor::{Governor, set_misses_window};
use super::identity_reader::{self, IdentityReader};
use super::kernel::KernelPrograms;
use super::monotonic_ns;
use super::past_durations::PastDurations;
use super::process::ObservedProcess;
use super::tenants::TenantId;
use crate::discovery::ProcessKey;
use crate::probes::gpu_mem::ProcessGpus;
use crate::probes::nccl::ExitedRanks;
use crate::probes::{self, SYMBOLS, layout, torch};

/// Number of rounds within which the identities of all processes are read anew: 20 s at two rounds per second.
const ROUNDS_PER_IDENTITY_REFRESH: usize = 40;

/// The observed processes.
pub(super) struct ProcessTable {
    /// Running observed processes, by their handle in the kernel.
    pub(super) running_processes: BTreeMap<u32, ObservedProcess>,
    /// Exited processes, until their grace period is over.
    exited_processes: Vec<ObservedProcess>,
    /// Durations of collectives of processes whose grace period is over, by user.
    past_durations: PastDurations,
    /// Exited ranks that others may wait for.
    pub(super) exited_ranks: ExitedRanks,
    /// Handles of exited processes that loaders still write to.
    retired_handles: BTreeSet<u32>,
    /// Handles of processes that are new since the last round.
    new_handles: BTreeSet<u32>,
    /// Children that handed data to a process, by its handle and their pid, as of the last round.
    known_helpers: BTreeSet<(u32, u64)>,
    identity_reader: IdentityReader,
    /// Number of rounds since the identities of all processes were last read anew.
    rounds_since_identity_refresh: usize,
    grace_period: Duration,
    /// The most exited processes of one tenant that are exported.
    max_exited: usize,
}

/// The parts of the observer that the process table reads from: kernel, governor, attached libraries and GPUs.
#[derive(Clone, Copy)]
pub(super) struct ReadContext<'a> {
    pub(super) kernel: &'a KernelPrograms,
    pub(super) governor: &'a Governor,
    pub(super) attachment: &'a LibraryAttachments,
    pub(super) gpus: &'a [GpuFacts],
}

impl ProcessTable {
    /// An empty table. Exited processes are exported for a grace period, `max_exited` of each tenant.
    pub(super) fn new(grace: Duration, max_exited: usize) -> Self {
        Self {
            running_processes: BTreeMap::new(),
            exited_processes: Vec::new(),
            past_durations: PastDurations::default(),
            exited_ranks: ExitedRanks::default(),
            retired_handles: BTreeSet::new(),
            new_handles: BTreeSet::new(),
            known_helpers: BTreeSet::new(),
            identity_reader: IdentityReader::default(),
            rounds_since_identity_refresh: 0,
            grace_period: grace,
            max_exited,
        }
    }

    /// All observed processes, including those that exited within the grace period.
    pub(super) fn iter(&self) -> impl Iterator<Item = &ObservedProcess> {
        self.running_processes
            .values()
            .chain(&self.exited_processes)
    }

    /// Reads everything that the kernel keeps of processes.
    pub(super) fn read_processes(&mut self, context: ReadContext<'_>) -> libbpf_rs::Result<()> {
        let kernel = context.kernel;
        let mut helpers = BTreeSet::new();
        for index in 1..layout::PROCESSES {
            let Some(record) = kernel.process_record_at(index) else {
                continue;
            };
            if record.dataload.helper != 0 {
                helpers.insert((record.process_handle, record.dataload.helper));
            }
            self.add_process_if_new(&record, context);
            if let Some(process) = self.running_processes.get_mut(&record.process_handle) {
                process.read(kernel, &record);
            }
        }
        let has_new_helpers = !helpers.is_subset(&self.known_helpers);
        self.known_helpers = helpers;
        if !self.new_handles.is_empty() || has_new_helpers {
            // Children that a process forked before it was observed count as its loaders from now on. So does a child that
            // handed data to it.
            kernel.adopt_existing_tasks()?;
        }
        self.identify_processes(context);
        for process in self.running_processes.values_mut() {
            let key = process.discovery_key();
            process.has_torch_probes |= has_torch_probes(context.attachment, key);
        }
        self.read_step_marks(context)?;
        let now_ns = monotonic_ns();
        for process in self.running_processes.values_mut() {
            process.call_counts.advance_to(now_ns, &process.steps);
        }
        probes::read_maps(kernel, &mut self.running_processes)?;
        self.read_phases(kernel)?;
        self.retire_exited(kernel, context.governor)
    }

    /// Passes the GPU that each process uses to the kernel, which publishes the GPU with the task states.
    pub(super) fn publish_gpus(
        &self,
        kernel: &KernelPrograms,
        gpus: &[GpuFacts],
        gpu_processes: &[ProcessGpuMemory],
    ) {
        for (handle, process) in &self.running_processes {
            let gpus = ProcessGpus::new(process, gpus, gpu_processes);
            let gpu = gpus.first_gpu_and_utilization(process.first_device, &process.probes.gpu_mem);
            kernel.set_gpu(*handle, gpu);
        }
    }

    /// Adds a process if it is new.
    fn add_process_if_new(&mut self, record: &layout::Process, context: ReadContext<'_>) {
        let handle = record.process_handle;
        if self.retired_handles.contains(&handle) || self.running_processes.contains_key(&handle) {
            return;
        }
        let mut process =
            ObservedProcess::new(record, context.kernel.tenants.tenant_id_of(record.tenant));
        if context
            .attachment
            .ran_before_observing(process.discovery_key())
        {
            process.mark_incomplete(monotonic_ns());
        }
        let governor = context.governor;
        let window = governor.open_window_of(process.discovery_key(), context.attachment);
        process.mark_sampled_from_start(&governor.sampled_symbols(), window);
        let misses_window = governor.is_window_open() && window.is_none();
        set_misses_window(context.kernel, handle, &mut process, misses_window);
        self.running_processes.insert(handle, process);
        self.new_handles.insert(handle);
    }

    /// Identifies new processes and finds their devices. If a process has exited already, it gets the identity that was
    /// read when it mapped its first library.
    fn identify_processes(&mut self, context: ReadContext<'_>) {
        let new = std::mem::take(&mut self.new_handles);
        for handle in &new {
            let Some(process) = self.running_processes.get_mut(handle) else {
                continue;
            };
            let key = process.discovery_key();
            if let Some(earlier) = context.attachment.identity_at_first_mapping(key) {
                process.set_identity(earlier.clone());
                process.find_devices(context.gpus);
            }
            self.identity_reader.request_processes([&key]);
        }
        let patience = match new.is_empty() {
            true => Duration::ZERO,
            false => identity_reader::MAX_WAIT_FOR_IDENTITIES,
        };
        self.take_identities(patience, context.gpus);
    }

    /// Sets the identities that have been read by now. Waits for further identities for at most `patience`.
    fn take_identities(&mut self, patience: Duration, gpus: &[GpuFacts]) {
        let mut read = self.identity_reader.take_identities(patience);
        if read.is_empty() {
            return;
        }
        for process in self.running_processes.values_mut() {
            if let Some(identity) = read.remove(&process.discovery_key()) {
                process.set_identity(identity);
                process.find_devices(gpus);
            }
        }
    }

    /// Reads the marks that separate steps.
    pub(super) fn read_step_marks(&mut self, context: ReadContext<'_>) -> libbpf_rs::Result<()> {
        for process in self.running_processes.values_mut() {
            process.update_sampled_marks();
        }
        let kernel = context.kernel;
        let marks: Vec<layout::RawStepMark> = kernel.step_marks.take_marks()?.collect();
        kernel.tenants.reset_step_mark_counts();
        for mark in marks {
            if !self.running_processes.contains_key(&mark.process)
                && let Some(record) = kernel.process_record(mark.process)
            {
                self.add_process_if_new(&record, context);
            }
            if let Some(process) = self.running_processes.get_mut(&mark.process) {
                process.add_step_mark(&mark, context.governor);
            }
        }
        Ok(())
    }

    /// Reads the phases of training threads.
    fn read_phases(&mut self, kernel: &KernelPrograms) -> libbpf_rs::Result<()> {
        let now_ns = monotonic_ns();
        let mut states = kernel.task_states()?;
        states.sort_by_key(|state| state.tgid);
        for process in self.running_processes.values_mut() {
            let pid = process.pid;
            let first = states.partition_point(|state| state.tgid < pid);
            let own = states[first..].iter().take_while(|state| state.tgid == pid);
            process.set_phases(own, now_ns);
        }
        Ok(())
    }

    /// Reads exited processes for the last time, frees their indices, and forgets those whose grace period is over.
    fn retire_exited(
        &mut self,
        kernel: &KernelPrograms,
        governor: &Governor,
    ) -> libbpf_rs::Result<()> {
        let running = self.running_processes.iter();
        let exited = running.filter(|(_, process)| process.ended_ns.is_some());
        let exited: Vec<u32> = exited.map(|(handle, _)| *handle).collect();
        for handle in exited {
            let Some(mut process) = self.running_processes.remove(&handle) else {
                continue;
            };
            let Some(record) = kernel.process_record(handle) else {
                continue;
            };
            // The process is read once more, because it may have made its last calls between the last read and its
            // exit.
            process.read(kernel, &record);
            if let Some(ended_ns) = process.ended_ns.filter(|_| governor.is_window_open()) {
                let counters = kernel.call_counters(handle);
                governor.close_window_of(&mut process, &counters, ended_ns);
            }
            process.measure_last_overhead(governor.probed_call_ns(&process));
            self.exited_ranks
                .add_exited_process(&process, record.exit_code);
            process.end_sampling();
            self.exited_processes.push(process);
            self.retired_handles.insert(handle);
        }
        self.exited_ranks
            .forget_unshared(self.running_processes.values());
        self.free_indices(kernel)?;
        self.forget_past_grace();
        Ok(())
    }

    /// Frees the indices of exited processes, except those of trainers that still have loaders.
    fn free_indices(&mut self, kernel: &KernelPrograms) -> libbpf_rs::Result<()> {
        let trainers: BTreeSet<u32> = self
            .running_processes
            .values()
            .map(|it| it.trainer_handle)
            .collect();
        let free: BTreeSet<u32> = self
            .retired_handles
            .difference(&trainers)
            .copied()
            .collect();
        self.retired_handles.retain(|handle| !free.contains(handle));
        kernel.forget_processes(&free)?;
        kernel.tenants.update_most_entries_of_tenant();
        kernel.tenants.free_unused_indices()
    }

    /// Forgets exited processes whose grace period is over.
    fn forget_past_grace(&mut self) {
        let now_ns = monotonic_ns();
        let grace_ns = self.grace_period.as_nanos() as u64;
        let surplus = self.surplus_exited();
        let is_over = |process: &mut ObservedProcess| {
            let ended_ns = process.ended_ns.unwrap_or(now_ns);
            now_ns.saturating_sub(ended_ns) >= grace_ns
                || surplus.contains(&process.discovery_key())
        };
        for process in self.exited_processes.extract_if(.., is_over) {
            let user = process.uid();
            for (family, histogram) in process.duration_histograms() {
                self.past_durations
                    .add_durations_of_user(user, family, histogram);
            }
        }
    }

    /// Exited processes that are no longer exported, because their tenants have enough newer ones. Loaders go before
    /// trainers.
    fn surplus_exited(&self) -> BTreeSet<ProcessKey> {
        if self.exited_processes.len() <= self.max_exited {
            return BTreeSet::new();
        }
        let mut exited: Vec<&ObservedProcess> = self.exited_processes.iter().collect();
        exited.sort_by_key(|process| (process.is_loader, Reverse(process.ended_ns)));
        let mut kept: BTreeMap<TenantId, usize> = BTreeMap::new();
        exited.retain(|process| {
            let kept = kept.entry(process.tenant).or_default();
            *kept += 1;
            *kept > self.max_exited
        });
        exited
            .into_iter()
            .map(ObservedProcess::discovery_key)
            .collect()
    }

    /// Reads the identities and the devices of processes anew from time to time: programs rename themselves and change
    /// their user after they start.
    pub(super) fn refresh_identities(&mut self, gpus: &[GpuFacts]) {
        self.rounds_since_identity_refresh += 1;
        if self.rounds_since_identity_refresh < ROUNDS_PER_IDENTITY_REFRESH {
            return;
        }
        self.rounds_since_identity_refresh = 0;
        let keys: Vec<ProcessKey> = self
            .running_processes
            .values()
            .map(ObservedProcess::discovery_key)
            .collect();
        self.identity_reader.request_processes(&keys);
        self.take_identities(identity_reader::MAX_WAIT_FOR_IDENTITIES, gpus);
    }

    /// Marks processes as observed incompletely, because a library that they map was changed.
    pub(super) fn mark_incomplete(&mut self, processes: &BTreeSet<ProcessKey>) {
        let running = self.running_processes.values_mut();
        for process in running.filter(|process| processes.contains(&process.discovery_key())) {
            process.mark_incomplete(monotonic_ns());
        }
    }

    /// Durations of collectives of processes whose grace period is over.
    pub(super) fn exited_rank_times(&self) -> Vec<ExitedRankTimes> {
        self.past_durations.snapshot()
    }
}

/// Whether functions that show a training loop of `PyTorch` have probes in files that a process maps.
fn has_torch_probes(attachment: &LibraryAttachments, process: ProcessKey) -> bool {
    let mapped = attachment.files_of(process);
    let files = attachment.files.iter();
    let files = files.filter(|file| mapped.contains(&file.file_number));
    let functions = files.flat_map(|file| &file.functions);
    let probed = functions.filter(|function| !matches!(function.mode, AttachMode::NotAttached(_)));
    torch::show_training_loop(probed.map(|function| &SYMBOLS[function.symbol]))
}
