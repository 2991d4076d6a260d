//! What the observer knows, as a snapshot.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use zernel_model::gpu::{GpuFacts, ProcessMemory};
use zernel_model::snapshot::{
    AttachState, CallerMemory, Calls, CollectiveTotals, CommunicatorSnapshot, CudaSnapshot,
    DataWaits, DataloadSnapshot, DeviceMemory, ExitedRankTimes, FunctionEntry, Ledger, LibraryFile,
    MappedBy, MemorySnapshot, NcclSnapshot, ObserverSnapshot, ObservingCost, PeerSnapshot,
    PhaseSnapshot, ProcessSnapshot, Role, SchedSnapshot, SharedHistogram, SharedState, Snapshot,
    StepSnapshot, WaitTimes,
};
use zernel_phase::shared::NO_GPU;

use super::callers::UNKNOWN;
use super::files::{AttachedFile, Watch};
use super::off::Off;
use super::process::{self, ObservedProcess, Seen};
use super::{End, GoneRank, Observer, monotonic_ns};
use crate::probes::{BlockedBy, Counts, Direction, Family, Operation, SYMBOLS};

const DIRECTIONS: [Direction; 4] = [
    Direction::HostToDevice,
    Direction::DeviceToHost,
    Direction::DeviceToDevice,
    Direction::Unified,
];

const WAIT_KINDS: [(Family, &str); 4] = [
    (Family::StreamWait, "stream"),
    (Family::EventWait, "event"),
    (Family::ContextWait, "context"),
    (Family::CopyWait, "copy"),
];

impl Observer {
    /// Everything that was observed up to now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let gpu_processes = self.gpus.process_memory();
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        let observed = self.newest_of_each_pid();
        Snapshot {
            observed: observed
                .map(|process| Described::new(process, &self.gpu_facts, &gpu_processes).snapshot())
                .collect(),
            gone_ranks: self.gone_ranks().map(describe_gone).collect(),
            sampled: self.sampled().map(str::to_owned).collect(),
            rung: self.rung().name().to_owned(),
            problems: self.problems(),
            call_cost_seconds: self.cost().ns_per_call / 1e9,
            shared_state: match self.shared_state() {
                Ok(path) => SharedState::Path(path),
                Err(reason) => SharedState::Missing(reason.to_owned()),
            },
            age_seconds: 0.0,
            taken_unix_ms: since_epoch.map_or(0, |since| since.as_millis() as u64),
            taken_ns: monotonic_ns(),
            gpus: self.gpu_facts.clone(),
            gpu_processes,
            observer: self.own_figures(),
            exited_ranks: self.exited_rank_times(),
            ledger: self.ledger(),
        }
    }

    /// After pid reuse or exec, several processes have one pid. Series are keyed by pid, so only the newest is exported.
    fn newest_of_each_pid(&self) -> impl Iterator<Item = &ObservedProcess> {
        let mut newest: BTreeMap<u32, &ObservedProcess> = BTreeMap::new();
        for process in self.processes() {
            let known = newest.entry(process.pid).or_insert(process);
            if known.first_ns < process.first_ns {
                *known = process;
            }
        }
        newest.into_values()
    }

    fn own_figures(&self) -> ObserverSnapshot {
        let cost = self.cost();
        let mut lost = self.losses().by_cause().to_vec();
        lost.push(("switches", self.missed_switches()));
        ObserverSnapshot {
            is_off: self.is_off(),
            calibration_threads: cost.threads,
            contended_call_cost_seconds: cost.ns_per_call_contended / 1e9,
            windows: cost.windows,
            lost,
            files: self.files.iter().filter(|file| file.is_watched()).count(),
            mappings_found_by_scan: self.discovery.missed_by_events(),
        }
    }

    fn exited_rank_times(&self) -> Vec<ExitedRankTimes> {
        let past = self.past.iter().filter_map(|((uid, family), times)| {
            let times = Some(SharedHistogram::clone(times));
            let (operation, enqueue_times, until_sync_times) = match family {
                Family::Enqueue(operation) => (operation, times, None),
                Family::UntilSync(operation) => (operation, None, times),
                _ => return None,
            };
            Some(ExitedRankTimes {
                uid: *uid,
                op: operation.name(),
                enqueue_times,
                until_sync_times,
            })
        });
        past.collect()
    }

    fn ledger(&self) -> Ledger {
        let off: Option<Arc<str>> = self.off.map(|off| Off::why(off).into());
        let files = self.files.iter();
        let mapped_by = self.maps.iter().map(|(key, mapped)| MappedBy {
            pid: key.pid,
            start_ns: key.start_ns,
            uid: mapped.uid,
            files: mapped.files.clone(),
        });
        Ledger {
            files: files
                .map(|file| describe_file(file, off.as_ref()))
                .collect(),
            mapped_by: mapped_by.collect(),
            refused: Arc::clone(&self.refused),
        }
    }
}

fn describe_file(file: &AttachedFile, off: Option<&Arc<str>>) -> LibraryFile {
    let functions = file.functions.iter().map(|function| FunctionEntry {
        symbol: function.name,
        counted_as: SYMBOLS[function.symbol].name(),
        state: match (&function.watch, off) {
            (Watch::Not(reason), _) => AttachState::NotAttached(reason.as_str().into()),
            (_, Some(reason)) => AttachState::NotAttached(Arc::clone(reason)),
            (Watch::Always, None) => AttachState::Attached,
            (Watch::Sampled, None) => AttachState::Sampled,
        },
        displacement: function.site.map_or(0, |site| site.displacement.into()),
    });
    LibraryFile {
        number: file.number,
        path: file.path.clone(),
        kind: file.kind.stem(),
        functions: functions.collect(),
    }
}

/// A process with the GPUs that its device numbers stand for.
struct Described<'a> {
    process: &'a ObservedProcess,
    gpus: &'a [GpuFacts],
    /// The GPU that it uses, if NVML lists it for exactly one.
    only_gpu: Option<&'a GpuFacts>,
}

impl<'a> Described<'a> {
    fn new(
        process: &'a ObservedProcess,
        gpus: &'a [GpuFacts],
        gpu_processes: &[ProcessMemory],
    ) -> Self {
        let listed = gpu_processes.iter().filter(|it| it.pid == process.pid);
        let used: BTreeSet<u32> = listed.map(|it| it.index).collect();
        let only = used.first().filter(|_| used.len() == 1);
        Self {
            process,
            gpus,
            only_gpu: only.and_then(|index| gpus.iter().find(|gpu| gpu.index == *index)),
        }
    }

    /// NVML index of the device that the process numbers `ordinal`; without NVML, that number. If the process uses one
    /// device, NVML's list wins: `CUDA_VISIBLE_DEVICES` is read as it was at the start, and a program may change it.
    fn gpu_id(&self, ordinal: u32) -> Option<u32> {
        let devices = &self.process.devices;
        let only = self.only_gpu.filter(|_| self.process.memory.len() == 1);
        let known = match &devices.devices[..] {
            [device] if ordinal == NO_GPU => Some(device.index),
            _ => devices.index(ordinal),
        };
        let fallback = (ordinal != NO_GPU).then_some(ordinal);
        only.map(|gpu| gpu.index).or(known).or(fallback)
    }

    fn uuid(&self) -> &str {
        let first = self.process.memory.keys().next();
        let device = first.and_then(|ordinal| self.process.devices.devices.get(*ordinal as usize));
        match (device, self.only_gpu) {
            (Some(device), Some(only)) if device.index != only.index => &only.uuid,
            (Some(device), _) => &device.uuid,
            (None, only) => only.map_or("", |only| &only.uuid),
        }
    }

    fn snapshot(&self) -> ProcessSnapshot {
        let process = self.process;
        let phases = process.phases.as_ref();
        let end_ns = process.ended_ns.unwrap_or_else(monotonic_ns);
        ProcessSnapshot {
            pid: process.pid,
            start_ns: process.start_ns,
            identity: process.identity.clone(),
            role: match process.is_loader {
                true => Role::Loader,
                false => Role::Trainer,
            },
            loads_for: process.loads_for,
            complete: process.seen == Seen::Complete,
            since_seconds_ago: match process.seen {
                Seen::Complete => None,
                Seen::Since(ns) => seconds_ago(ns),
            },
            first_seen_ns: process.first_ns,
            observed_seconds: seconds(end_ns.saturating_sub(process.first_ns)),
            ended_seconds_ago: process.ended_ns.and_then(seconds_ago),
            exit_code: None,
            signal: None,
            phases: PhaseSnapshot {
                phase: phases.map(|phases| phases.current),
                step_thread: phases.map(|phases| phases.tid),
                phase_times: phases.map(|phases| phases.times.clone()),
            },
            steps: StepSnapshot {
                boundary: process.steps.boundary(),
                count: process.steps.count(),
                gaps: process.steps.gaps(),
                restarts: process.steps.restarts(),
                recent: process.steps.recent().iter().copied().collect(),
            },
            cuda: describe_cuda(process),
            memory: self.memory(),
            nccl: NcclSnapshot {
                collectives: describe_collectives(process),
                communicators: process.communicators.iter().map(communicator).collect(),
            },
            dataload: describe_dataload(process),
            peers: PeerSnapshot {
                peer_wait_seconds: total_seconds(process, Family::DistSync),
                wait_times: process.shared_duration(Family::DistSync),
            },
            sched: describe_sched(process),
            calls: describe_calls(process),
            cost: ObservingCost {
                busiest_thread_ratio: process.cost.busiest_thread,
                seconds: process.cost.seconds,
            },
            sampled: process.is_sampled(),
        }
    }

    fn memory(&self) -> MemorySnapshot {
        let of_process = self.process.memory.iter();
        let memory: Vec<DeviceMemory> = of_process
            .map(|(ordinal, memory)| {
                let gpu_id = self.gpu_id(*ordinal);
                let gpu = self.gpus.iter().find(|gpu| Some(gpu.index) == gpu_id);
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
            gpu_utilization: self.utilization(&memory),
            memory,
            memory_by_caller: self.memory_by_caller(),
            uuid: self.uuid().to_owned(),
        }
    }

    /// Mean utilization of the GPUs that the process has memory on.
    fn utilization(&self, memory: &[DeviceMemory]) -> Option<f64> {
        let is_used = |gpu: &&GpuFacts| memory.iter().any(|it| it.gpu_id == Some(gpu.index));
        let used = self.gpus.iter().filter(is_used);
        let shares: Vec<f64> = used
            .filter_map(|gpu| Some(f64::from(gpu.utilization?) / 100.0))
            .collect();
        (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64)
    }

    fn memory_by_caller(&self) -> Vec<CallerMemory> {
        let mut bytes: BTreeMap<(Option<u32>, String), u64> = BTreeMap::new();
        for (ordinal, memory) in &self.process.memory {
            for (address, caller) in &memory.by_caller {
                let name = self.process.callers.name(*address).to_owned();
                *bytes.entry((self.gpu_id(*ordinal), name)).or_default() += caller.current_bytes;
            }
        }
        bytes.retain(|(_, caller), bytes| *bytes > 0 || caller != UNKNOWN);
        let entries = bytes
            .into_iter()
            .map(|((gpu_id, caller), bytes)| CallerMemory {
                gpu_id,
                caller,
                bytes,
            });
        entries.collect()
    }
}

fn describe_cuda(process: &ObservedProcess) -> CudaSnapshot {
    let launches = process.count(|what| what == Counts::Launch);
    let copies = process.count(|what| matches!(what, Counts::Copy(_)));
    let per_step = process.launches_per_step();
    let counted_copies = DIRECTIONS.iter().map(|direction| {
        let counted = process.counted_of(Counts::Copy(*direction));
        (direction.name(), counted)
    });
    let wait_times = WAIT_KINDS.iter().filter_map(|(family, kind)| {
        let times = process.shared_duration(*family)?;
        Some(WaitTimes { kind, times })
    });
    CudaSnapshot {
        gpu_wait_seconds: (WAIT_KINDS.iter())
            .map(|(family, _)| total_seconds(process, *family))
            .sum(),
        gpu_waits: process.count(|what| what == Counts::Wait).calls,
        launch_seconds: total_seconds(process, Family::Launch),
        launches: launches.calls,
        launches_error: launches.error,
        launches_per_step: per_step.map(|interval| interval.mean),
        launches_per_step_error: per_step.and_then(|interval| interval.half_width),
        copies: copies.calls,
        copies_error: copies.error,
        copied_bytes: copies.bytes,
        counted_launches: process.counted_of(Counts::Launch),
        counted_copies: counted_copies
            .filter(|(_, counted)| counted.calls > 0)
            .collect(),
        launch_times: process.shared_duration(Family::Launch),
        wait_times: wait_times.collect(),
    }
}

fn describe_collectives(process: &ObservedProcess) -> Vec<CollectiveTotals> {
    let totals = Operation::ALL.iter().filter_map(|operation| {
        let count = process.count(|what| what == Counts::Communication(*operation));
        let enqueue_times = process.shared_duration(Family::Enqueue(*operation));
        let until_sync_times = process.shared_duration(Family::UntilSync(*operation));
        if count.calls == 0 && enqueue_times.is_none() && until_sync_times.is_none() {
            return None;
        }
        let until_sync = until_sync_times.as_ref();
        Some(CollectiveTotals {
            op: operation.name().into(),
            calls: count.calls,
            bytes: count.bytes,
            until_sync_median_seconds: until_sync.map(|times| seconds(times.p50_ns())),
            until_sync_mean_seconds: until_sync
                .map(|times| seconds(times.sum_ns) / times.count.max(1) as f64),
            enqueue_times,
            until_sync_times,
        })
    });
    totals.collect()
}

fn describe_dataload(process: &ObservedProcess) -> DataloadSnapshot {
    let causes = &process.dataload;
    DataloadSnapshot {
        data_waits: DataWaits {
            prepare: seconds(causes.prepare_ns),
            fetch: seconds(causes.fetch_ns),
            sched: seconds(causes.sched_ns),
            other: seconds(causes.other_ns),
        },
        wait_times: process.shared_duration(Family::Dataload),
    }
}

fn describe_sched(process: &ObservedProcess) -> SchedSnapshot {
    let blocked = |reason: &BlockedBy| seconds(process.scheduling.blocked_ns(*reason));
    let by_reason = BlockedBy::ALL.iter();
    SchedSnapshot {
        cpu_seconds: seconds(process.scheduling.on_cpu_ns),
        run_delay_seconds: seconds(process.scheduling.run_delay_ns),
        calling_cpu_seconds: seconds(process.scheduling.calling_on_cpu_ns),
        calling_run_delay_seconds: seconds(process.scheduling.calling_run_delay_ns),
        fetch_seconds: BlockedBy::FETCHING.iter().map(blocked).sum(),
        blocked_seconds: by_reason
            .map(|reason| (reason.name(), blocked(reason)))
            .collect(),
    }
}

fn describe_calls(process: &ObservedProcess) -> BTreeMap<std::borrow::Cow<'static, str>, Calls> {
    let calls = process.calls().map(|(name, count)| {
        let calls = Calls {
            calls: count.calls,
            failed: count.failed,
            bytes: count.bytes,
            error: count.error,
        };
        (name.into(), calls)
    });
    calls.collect()
}

/// A rank that exited, as far as others may wait for it.
fn describe_gone(gone: &GoneRank) -> ProcessSnapshot {
    let (exit_code, signal) = match gone.end {
        End::Exited(code) => (Some(code), None),
        End::Killed(signal) => (None, Some(signal)),
    };
    ProcessSnapshot {
        pid: gone.pid,
        identity: gone.identity.clone(),
        ended_seconds_ago: seconds_ago(gone.ended_ns),
        exit_code,
        signal,
        nccl: NcclSnapshot {
            communicators: gone.communicators.iter().map(communicator).collect(),
            ..NcclSnapshot::default()
        },
        ..ProcessSnapshot::default()
    }
}

fn communicator(communicator: &process::Communicator) -> CommunicatorSnapshot {
    CommunicatorSnapshot {
        communicator: format!("{:016x}", communicator.hash),
        rank: communicator.rank,
        ranks: communicator.ranks,
        sequence: communicator.sequence,
        op: communicator.operation.name().into(),
        bytes: communicator.bytes,
        in_call: communicator.entered_ns != 0 && communicator.left_ns == 0,
        entered_seconds_ago: seconds_ago(communicator.entered_ns),
        longest_gap_seconds: seconds(communicator.longest_gap_ns),
        last_ops: (communicator.last_operations())
            .map(|operation| operation.name().into())
            .collect(),
        is_being_made: communicator.is_being_made,
    }
}

fn total_seconds(process: &ObservedProcess, family: Family) -> f64 {
    process.total_ns(family) / 1e9
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn seconds_ago(ns: u64) -> Option<f64> {
    (ns != 0).then(|| seconds(monotonic_ns().saturating_sub(ns)))
}

#[cfg(test)]
mod tests {
    use zernel_identity::gpu::VisibleDevices;
    use zerocopy::FromZeros;

    use super::*;
    use crate::probes::layout;

    fn gpu(index: u32) -> GpuFacts {
        GpuFacts {
            index,
            uuid: format!("GPU-{index}"),
            ..GpuFacts::default()
        }
    }

    fn described<'a>(
        process: &'a ObservedProcess,
        only_gpu: Option<&'a GpuFacts>,
    ) -> Described<'a> {
        Described {
            process,
            gpus: &[],
            only_gpu,
        }
    }

    /// A program may choose its GPU after its start.
    #[test]
    fn nvml_knows_the_gpu_of_a_process_that_uses_one() {
        let gpus: Vec<GpuFacts> = (0..4).map(gpu).collect();
        let mut process = ObservedProcess::new(&layout::Process::new_zeroed());
        process.devices = VisibleDevices::parse(None, &gpus);
        process.memory.insert(0, Default::default());
        let seen = |process: &ObservedProcess, only_gpu| {
            let described = described(process, only_gpu);
            (described.gpu_id(0), described.uuid().to_owned())
        };
        assert_eq!(seen(&process, None), (Some(0), "GPU-0".to_owned()));
        assert_eq!(seen(&process, gpus.get(3)), (Some(3), "GPU-3".to_owned()));
        process.memory.insert(1, Default::default());
        assert_eq!(seen(&process, gpus.get(3)).0, Some(0));
        process.devices = VisibleDevices::parse(Some("2"), &gpus);
        assert_eq!(described(&process, None).gpu_id(NO_GPU), Some(2));
        process.devices = VisibleDevices::default();
        assert_eq!(described(&process, None).gpu_id(NO_GPU), None);
        assert_eq!(described(&process, None).gpu_id(7), Some(7));
    }
}
