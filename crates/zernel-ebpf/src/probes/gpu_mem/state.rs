//! GPU memory of a process, by device and calling library.

use std::collections::{BTreeMap, BTreeSet};

use zernel_identity::gpu::VisibleDevices;
use zernel_model::aggregation::GpuMemMetrics;
use zernel_model::gpu::{GpuFacts, ProcessGpuMemory};
use zernel_model::snapshot::{CallerMemory, DeviceMemory, MemorySnapshot};
use zernel_phase::shared::NO_GPU;

use super::callers::{CallerLibraries, UNKNOWN_LIBRARY};
use super::epochs::ContextEpochs;
use super::layout::{ADDRESS, ANY_DEVICE, Account, AccountKey, Allocation, AllocationKey};
use crate::observer::{KernelPrograms, ObservedProcess, TenantTable};
use crate::probes::{ProbeState, SamplingGroup};

/// GPU memory of a process.
#[derive(Debug, Default)]
pub struct GpuMemory {
    /// Memory by CUDA's device number.
    pub by_device: BTreeMap<u32, MemoryUse>,
    /// The part of `by_device` that came from memory pools.
    pooled: BTreeMap<u32, MemoryUse>,
    callers: CallerLibraries,
}

/// GPU memory of a process on one device.
#[derive(Debug, Clone, Default)]
pub struct MemoryUse {
    /// Memory of all callers.
    pub total: GpuMemMetrics,
    /// Bytes in use by the return address of the allocating call.
    pub by_caller: BTreeMap<u64, u64>,
}

/// Reads the accounts of all processes.
pub(crate) fn read_maps(
    kernel: &KernelPrograms,
    processes: &mut BTreeMap<u32, ObservedProcess>,
) -> libbpf_rs::Result<()> {
    let accounts: Vec<(AccountKey, Account)> = kernel.read_map_entries("memory_accounts")?;
    let epochs = ContextEpochs::new(&accounts);
    for process in processes.values_mut() {
        process.probes.gpu_mem.clear_callers();
    }
    for (key, account) in &accounts {
        if let Some(process) = processes.get_mut(&key.process)
            && !epochs.is_epoch_over(key)
        {
            process.probes.gpu_mem.add_account(key, account);
        }
    }
    if accounts.iter().any(|(key, _)| epochs.is_epoch_over(key)) {
        delete_memory_of_ended_epochs(kernel, &epochs)?;
    }
    for process in processes.values_mut() {
        if process.is_group_sampled(SamplingGroup::Pools) {
            process.probes.gpu_mem.subtract_pool_memory();
        }
        process.probes.gpu_mem.resolve_callers(process.pid);
    }
    Ok(())
}

/// Deletes the allocations of contexts that were destroyed or reset, and the accounts of their callers.
fn delete_memory_of_ended_epochs(
    kernel: &KernelPrograms,
    epochs: &ContextEpochs,
) -> libbpf_rs::Result<()> {
    let is_epoch_over = |key: &AllocationKey, allocation: &Allocation| {
        key.kind == ADDRESS && epochs.is_epoch_over(&allocation.account_key(key.process))
    };
    delete_allocations(kernel, is_epoch_over)?;
    delete_accounts(kernel, |key| epochs.is_epoch_over(key))
}

/// Deletes the allocations and accounts of exited processes.
pub(crate) fn delete_entries(
    kernel: &KernelPrograms,
    processes: &BTreeSet<u32>,
) -> libbpf_rs::Result<()> {
    let is_theirs = |key: &AllocationKey, _: &Allocation| processes.contains(&key.process);
    delete_allocations(kernel, is_theirs)?;
    delete_accounts(kernel, |key| processes.contains(&key.process))
}

/// Deletes allocations that meet a condition.
fn delete_allocations(
    kernel: &KernelPrograms,
    condition: impl Fn(&AllocationKey, &Allocation) -> bool,
) -> libbpf_rs::Result<()> {
    let deleted = kernel.delete_where("allocations", condition)?;
    let processes = deleted.iter().map(|key| key.process);
    kernel.count_deleted(TenantTable::Allocations, processes);
    Ok(())
}

/// Deletes accounts that meet a condition.
fn delete_accounts(
    kernel: &KernelPrograms,
    condition: impl Fn(&AccountKey) -> bool,
) -> libbpf_rs::Result<()> {
    let meets = |key: &AccountKey, _: &Account| condition(key);
    let deleted = kernel.delete_where("memory_accounts", meets)?;
    let processes = deleted.iter().map(|key| key.process);
    kernel.count_deleted(TenantTable::MemoryAccounts, processes);
    Ok(())
}

impl GpuMemory {
    /// Prepares to add the accounts of callers: each caller has one for every context that it allocates in.
    fn clear_callers(&mut self) {
        self.pooled.clear();
        for memory in self.by_device.values_mut() {
            memory.by_caller.values_mut().for_each(|bytes| *bytes = 0);
        }
    }

    fn add_account(&mut self, key: &AccountKey, account: &Account) {
        if key.device == ANY_DEVICE {
            return;
        }
        let is_pooled = key.caller & AccountKey::POOLED != 0;
        let by_device = match is_pooled {
            true => &mut self.pooled,
            false => &mut self.by_device,
        };
        let memory = by_device.entry(key.device).or_default();
        match key.caller & !AccountKey::POOLED {
            0 if is_pooled => memory.total.current_bytes += account.current_bytes,
            0 => {
                memory.total = GpuMemMetrics {
                    current_bytes: account.current_bytes,
                    peak_bytes: account.peak_bytes,
                    alloc_count: account.allocations,
                    free_count: account.frees,
                }
            }
            caller => {
                // The bytes are negative if there was no room for the account yet when the memory was allocated.
                let held = account.current_bytes.cast_signed().max(0);
                *memory.by_caller.entry(caller).or_default() += held.cast_unsigned();
            }
        }
    }

    /// Subtracts the memory of pools from the memory in use. The pool functions are sampled from now on, so frees would be
    /// missed.
    fn subtract_pool_memory(&mut self) {
        for (device, pooled) in &self.pooled {
            let Some(memory) = self.by_device.get_mut(device) else {
                continue;
            };
            let leave_out = |all: &mut u64, pooled: u64| *all = all.saturating_sub(pooled);
            leave_out(&mut memory.total.current_bytes, pooled.total.current_bytes);
            for (caller, pooled) in &pooled.by_caller {
                leave_out(memory.by_caller.entry(*caller).or_default(), *pooled);
            }
        }
    }

    /// Finds the libraries of callers while the process runs.
    fn resolve_callers(&mut self, pid: u32) {
        let memory = self.by_device.values();
        let addresses = memory.flat_map(|memory| memory.by_caller.keys().copied());
        self.callers.resolve_addresses(pid, addresses);
    }
}

impl ProbeState for GpuMemory {
    type Snapshot = MemorySnapshot;

    fn release_on_exit(&mut self) {
        for memory in self.by_device.values_mut() {
            memory.total.current_bytes = 0;
            memory.by_caller.values_mut().for_each(|bytes| *bytes = 0);
        }
    }

    fn snapshot(&self, _process: &ObservedProcess, gpus: &ProcessGpus<'_>) -> MemorySnapshot {
        let memory: Vec<DeviceMemory> = self
            .by_device
            .iter()
            .map(|(ordinal, memory)| {
                let gpu_id = gpus.gpu_index(*ordinal, self);
                let gpu = gpus.gpus.iter().find(|gpu| Some(gpu.index) == gpu_id);
                DeviceMemory {
                    gpu_id,
                    gpu: gpu.map(|gpu| gpu.name.clone()),
                    bytes: memory.total.current_bytes,
                    peak_bytes: memory.total.peak_bytes,
                    allocations: memory.total.alloc_count,
                    frees: memory.total.free_count,
                }
            })
            .collect();
        MemorySnapshot {
            gpu_utilization: gpus.mean_utilization(&memory),
            gpu_busy_seconds: gpus.mean_busy_seconds(&memory),
            gpu_users: gpus.users(&memory),
            memory,
            memory_by_caller: self.memory_by_caller(gpus),
            uuid: gpus.gpu_uuid(self).to_owned(),
        }
    }
}

impl GpuMemory {
    fn memory_by_caller(&self, gpus: &ProcessGpus<'_>) -> Vec<CallerMemory> {
        let mut bytes: BTreeMap<(Option<u32>, String), u64> = BTreeMap::new();
        for (ordinal, memory) in &self.by_device {
            for (address, held) in &memory.by_caller {
                let key = (
                    gpus.gpu_index(*ordinal, self),
                    self.callers.library_name(*address).to_owned(),
                );
                *bytes.entry(key).or_default() += held;
            }
        }
        bytes.retain(|(_, caller), bytes| *bytes > 0 || caller != UNKNOWN_LIBRARY);
        let entries = bytes.into_iter();
        entries
            .map(|((gpu_id, caller), bytes)| CallerMemory {
                gpu_id,
                caller,
                bytes,
            })
            .collect()
    }
}

/// The GPUs that the device numbers of a process stand for.
pub(crate) struct ProcessGpus<'a> {
    devices: &'a VisibleDevices,
    gpus: &'a [GpuFacts],
    /// The GPU that the process uses, if NVML lists it for exactly one.
    only_gpu: Option<&'a GpuFacts>,
    /// The processes that NVML lists, if this process is among them.
    listed: &'a [ProcessGpuMemory],
}

impl<'a> ProcessGpus<'a> {
    pub(crate) fn new(
        process: &'a ObservedProcess,
        gpus: &'a [GpuFacts],
        gpu_processes: &'a [ProcessGpuMemory],
    ) -> Self {
        let listed = gpu_processes.iter().filter(|it| it.pid == process.pid);
        let used: BTreeSet<u32> = listed.map(|it| it.index).collect();
        let only = used.first().filter(|_| used.len() == 1);
        Self {
            devices: &process.visible_devices,
            gpus,
            only_gpu: only.and_then(|index| gpus.iter().find(|gpu| gpu.index == *index)),
            listed: if used.is_empty() { &[] } else { gpu_processes },
        }
    }

    /// NVML index of the device that the process numbers `ordinal`; without NVML, that number. If the process uses one
    /// device, the GPU is the one that NVML lists the process for: `CUDA_VISIBLE_DEVICES` is read as it was at the
    /// start, and a program may change it.
    fn gpu_index(&self, ordinal: u32, memory: &GpuMemory) -> Option<u32> {
        let is_known = ordinal != NO_GPU;
        let only = self.only_gpu.filter(|_| memory.by_device.len() == 1);
        let visible = match &self.devices.devices[..] {
            [device] if !is_known => Some(device.index),
            _ => self.devices.index_of_ordinal(ordinal),
        };
        let fallback = is_known.then_some(ordinal);
        only.map(|gpu| gpu.index).or(visible).or(fallback)
    }

    /// NVML index and utilization in percent of the device that the process opened first, or that NVML lists it for. An
    /// unknown utilization is returned as 0.
    pub(crate) fn first_gpu_and_utilization(
        &self,
        first_ordinal: u32,
        memory: &GpuMemory,
    ) -> Option<(u32, u32)> {
        let index = match first_ordinal {
            NO_GPU => self.only_gpu?.index,
            ordinal => self.gpu_index(ordinal, memory)?,
        };
        let gpu = self.gpus.iter().find(|gpu| gpu.index == index);
        let utilization = gpu.and_then(|gpu| gpu.utilization);
        Some((index, utilization.map_or(0, |percent| percent.min(100))))
    }

    /// UUID of the first GPU that the process has memory on; empty if unknown.
    fn gpu_uuid(&self, memory: &GpuMemory) -> &str {
        let first = memory.by_device.keys().next();
        let device = first.and_then(|ordinal| self.devices.devices.get(*ordinal as usize));
        match (device, self.only_gpu) {
            (Some(device), Some(only)) if device.index != only.index => &only.uuid,
            (Some(device), _) => &device.uuid,
            (None, only) => only.map_or("", |only| &only.uuid),
        }
    }

    /// Pids of the processes that NVML lists for the GPUs that the process has memory on.
    fn users(&self, memory: &[DeviceMemory]) -> Vec<u32> {
        let uses = |index| memory.iter().any(|it| it.gpu_id == Some(index));
        let listed = self.listed.iter().filter(|listed| uses(listed.index));
        let pids: BTreeSet<u32> = listed.map(|listed| listed.pid).collect();
        pids.into_iter().collect()
    }

    /// Mean utilization of the GPUs that the process has memory on.
    fn mean_utilization(&self, memory: &[DeviceMemory]) -> Option<f64> {
        self.mean_over_used(memory, |gpu| Some(f64::from(gpu.utilization?) / 100.0))
    }

    /// Mean busy time of the GPUs that the process has memory on.
    fn mean_busy_seconds(&self, memory: &[DeviceMemory]) -> Option<f64> {
        self.mean_over_used(memory, |gpu| {
            gpu.utilization.map(|_| gpu.busy_ns as f64 / 1e9)
        })
    }

    fn mean_over_used(
        &self,
        memory: &[DeviceMemory],
        figure: impl Fn(&GpuFacts) -> Option<f64>,
    ) -> Option<f64> {
        let is_used = |gpu: &&GpuFacts| memory.iter().any(|it| it.gpu_id == Some(gpu.index));
        let figures: Vec<f64> = self
            .gpus
            .iter()
            .filter(is_used)
            .filter_map(figure)
            .collect();
        (!figures.is_empty()).then(|| figures.iter().sum::<f64>() / figures.len() as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu_with_index(index: u32) -> GpuFacts {
        GpuFacts {
            index,
            uuid: format!("GPU-{index}"),
            ..GpuFacts::default()
        }
    }

    fn memory_on(ordinals: &[u32]) -> GpuMemory {
        let by_device = ordinals.iter().map(|it| (*it, MemoryUse::default()));
        GpuMemory {
            by_device: by_device.collect(),
            ..GpuMemory::default()
        }
    }

    /// A process may change `CUDA_VISIBLE_DEVICES` after its start, so NVML's answer has priority.
    #[test]
    fn nvml_decides_which_gpu_a_process_with_one_gpu_uses() {
        let gpus: Vec<GpuFacts> = (0..4).map(gpu_with_index).collect();
        let devices = VisibleDevices::parse(None, &gpus);
        let seen = |only_gpu, memory: &GpuMemory| {
            let process = ProcessGpus {
                devices: &devices,
                gpus: &gpus,
                only_gpu,
                listed: &[],
            };
            (
                process.gpu_index(0, memory),
                process.gpu_uuid(memory).to_owned(),
            )
        };
        let one = memory_on(&[0]);
        assert_eq!(seen(None, &one), (Some(0), "GPU-0".to_owned()));
        assert_eq!(seen(gpus.get(3), &one), (Some(3), "GPU-3".to_owned()));
        assert_eq!(seen(gpus.get(3), &memory_on(&[0, 1])).0, Some(0));
    }

    /// NVML may list processes by the pids of another namespace. Then it does not list the process itself.
    #[test]
    fn users_of_a_gpu_are_known_if_nvml_lists_the_process() {
        let gpus: Vec<GpuFacts> = (0..2).map(gpu_with_index).collect();
        let listed = [(7, 0), (8, 0), (9, 1)].map(|(pid, index)| ProcessGpuMemory {
            pid,
            index,
            bytes: None,
            instance: None,
        });
        let devices = VisibleDevices::default();
        let users = |listed| {
            let process = ProcessGpus {
                devices: &devices,
                gpus: &gpus,
                only_gpu: None,
                listed,
            };
            process.users(&[DeviceMemory {
                gpu_id: Some(0),
                ..DeviceMemory::default()
            }])
        };
        assert_eq!(users(&listed), [7, 8]);
        assert!(users(&[]).is_empty());
    }

    #[test]
    fn a_device_without_evidence_is_unknown() {
        let gpus: Vec<GpuFacts> = (0..4).map(gpu_with_index).collect();
        let index = |devices: &VisibleDevices, ordinal| {
            let process = ProcessGpus {
                devices,
                gpus: &gpus,
                only_gpu: None,
                listed: &[],
            };
            process.gpu_index(ordinal, &memory_on(&[ordinal]))
        };
        let one = VisibleDevices::parse(Some("2"), &gpus);
        assert_eq!(index(&one, NO_GPU), Some(2));
        let none = VisibleDevices::default();
        assert_eq!(index(&none, NO_GPU), None);
        assert_eq!(index(&none, 7), Some(7));
    }
}
