//! Mirrors of the types and constants in `bpf/` that the kernel shares with userspace. Mirrors of types that only one
//! probe uses are in the folder of that probe.

use zernel_phase::mirrors;
use zernel_phase::shared::{PhaseWord, RawPhaseConfig};
use zernel_phase::steps::{StepMark, StepMarkClass};
use zernel_phase::tracker::TrackerConfig;

use super::{DurationKind, NcclOperation};
use crate::observer::{CgroupHierarchy, TenantTable};

/// Number of buckets of a histogram in the kernel.
pub(crate) const BUCKETS: usize = H2_BUCKETS as usize;

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    structs {
        pub(crate) struct Symbol = "zernel_symbol" {
            probe: u8,
            role: u8,
            duration_kind: u8,
            enter_event: u8,
            leave_event: u8,
            flags: u8,
            bytes_argument: u8,
            mark: u8,
            kept_arguments: [u8; KEPT_ARGUMENTS],
        }

        pub(crate) struct Settings = "zernel_settings" {
            tracker: TrackerConfig,
            is_window_open: u32,
            reserved: u32,
            last_detach_ns: u64,
            events_probed_since_ns: u64,
            are_events_sampled: u64,
            are_launches_sampled: u64,
            is_suspended: u64,
            sampled_rule: RawPhaseConfig,
        }

        pub(crate) struct Counter = "zernel_counter" {
            calls: u64,
            failed_calls: u64,
            bytes: u64,
        }

        pub(crate) struct Counters = "zernel_counters" {
            functions: [Counter; SYMBOLS],
        }

        pub(crate) struct ProcessMarks = "zernel_process_marks" {
            launches: u32,
            last_mark: u32,
            since_ns: u64,
            interval_marks: [u32; StepMarkClass::ALL.len()],
            missing_classes: u32,
            reserved: u32,
            launched_ns: u64,
        }

        pub(crate) struct Losses = "zernel_losses" {
            processes: u64,
            histograms: u64,
            calls: u64,
            allocations: u64,
            memory_accounts: u64,
            communicators: u64,
            threads: u64,
            switches: u64,
            contexts: u64,
            collectives: u64,
            trace: u64,
        }

        pub(crate) struct RawDecisions = "zernel_decisions" {
            process: u64,
            run_ns: u64,
            delay_ns: u64,
            wakeups: u64,
            would_preempt: u64,
            would_keep: u64,
            saved_ns: u64,
            would_lend: u64,
        }

        pub(crate) struct TraceRecord = "zernel_trace_record" {
            at_ns: u64,
            phase_word: PhaseWord,
            deadline_ns: u64,
            tid: u32,
            process: u32,
            delay_ns: u16,
            flags: u16,
            event: u8,
            symbol: u8,
            reserved: [u8; 2],
        }

        pub(crate) struct CgroupKey = "zernel_cgroup_key" {
            cgroup_inode: u64,
            hierarchy: u32,
            reserved: u32,
        }

        pub(crate) struct TenantKey = "zernel_tenant_key" {
            cgroup: CgroupKey,
            uid: u32,
            reserved: u32,
        }

        pub(crate) struct Tenant = "zernel_tenant" {
            used_entries: [i64; TenantTable::ALL.len()],
            refused_events: [u64; TenantTable::ALL.len()],
            most_entries_of_tenant: [i64; TenantTable::ALL.len()],
            unread_step_marks: u64,
            key: TenantKey,
        }

        pub(crate) struct SubordinateRange = "zernel_subordinate_range" {
            first_uid: u32,
            last_uid: u32,
            owner_uid: u32,
            reserved: u32,
        }

        pub(crate) struct RawStepMark = "zernel_step_mark" {
            at_ns: u64,
            process: u32,
            launches: u16,
            mark: u8,
            missing_classes: u8,
        }

        pub(crate) struct Histogram = "zernel_histogram" {
            sum_ns: u64,
            max_ns: u64,
            min_inverted: u64,
            buckets: [u32; BUCKETS],
        }
    }
    constants {
        pub(crate) usize = "zernel_limits", "ZERNEL_" {
            PROCESSES = 2048,
            SYMBOLS = 96,
            HISTOGRAMS = 4096,
            ALLOCATIONS = 1 << 17,
            MEMORY_ACCOUNTS = 1 << 14,
            COMMUNICATORS = 1 << 14,
            KEPT_ARGUMENTS = 4,
            NONE = 0xff,
        }
        pub(crate) u8 = "zernel_trace_event", "ZERNEL_" {
            TRACE_CALL = 0xf0,
            TRACE_EXIT = 0xf1,
            TRACE_LOADING_BEGIN = 0xf2,
            TRACE_LOADING_END = 0xf3,
        }
        pub(crate) usize = "zernel_tenant_index", "ZERNEL_" {
            ALL_TENANTS = 0,
            OTHER_TENANTS = 1,
            FIRST_TENANT = 2,
            TENANTS = 256,
        }
        pub(crate) usize = "zernel_tenant_limits", "ZERNEL_" {
            TENANT_PARENTS = 256,
            MAX_TENANT_DEPTH = 8,
            MAX_NAMESPACE_DEPTH = 33,
            UID_RANGES = 5,
            SUBORDINATE_RANGES = 1 << 12,
        }
        pub(crate) u32 = "zernel_h2", "ZERNEL_" {
            H2_GROUPING = 4,
            H2_UNIT_SHIFT = 4,
            H2_BUCKETS = 496,
        }
    }
    flags {
        impl Symbol: u8 = "zernel_symbol_flags", "ZERNEL_" {
            RETURNS_STATUS = 1 << 0,
            IS_SAMPLED = 1 << 1,
            LAUNCHES_WORK = 1 << 2,
            IS_NO_ML_EVIDENCE = 1 << 3,
            PRECEDES_LAUNCHES = 1 << 7,
        }
    }
    variants {
        enum StepMark = "zernel_mark" {
            Optimizer = "ZERNEL_MARK_OPTIMIZER",
            Backward = "ZERNEL_MARK_BACKWARD",
            Reduce = "ZERNEL_MARK_REDUCE",
            Graph = "ZERNEL_MARK_GRAPH",
            CopyIn = "ZERNEL_MARK_COPY_IN",
            CopyOut = "ZERNEL_MARK_COPY_OUT",
            Wait = "ZERNEL_MARK_WAIT",
        } and {
            "ZERNEL_MARK_NONE" = 0,
        }
        enum StepMarkClass = "zernel_mark_class" {
            Training = "ZERNEL_MARKS_TRAINING",
            GpuUse = "ZERNEL_MARKS_GPU_USE",
        } and {
            "ZERNEL_MARK_CLASSES" = StepMarkClass::ALL.len(),
        }
        enum TenantTable = "zernel_table" {
            Processes = "ZERNEL_PROCESS_TABLE",
            Allocations = "ZERNEL_ALLOCATION_TABLE",
            Histograms = "ZERNEL_HISTOGRAM_TABLE",
            Communicators = "ZERNEL_COMMUNICATOR_TABLE",
            MemoryAccounts = "ZERNEL_ACCOUNT_TABLE",
        } and {
            "ZERNEL_TABLES" = TenantTable::ALL.len(),
        }
        enum CgroupHierarchy = "zernel_hierarchy" {
            Unified = "ZERNEL_UNIFIED_HIERARCHY",
            Memory = "ZERNEL_MEMORY_HIERARCHY",
        }
        enum NcclOperation = "nccl_operation" {
            AllReduce = "NCCL_OP_ALL_REDUCE",
            Broadcast = "NCCL_OP_BROADCAST",
            Reduce = "NCCL_OP_REDUCE",
            AllGather = "NCCL_OP_ALL_GATHER",
            ReduceScatter = "NCCL_OP_REDUCE_SCATTER",
            AllToAll = "NCCL_OP_ALL_TO_ALL",
            Gather = "NCCL_OP_GATHER",
            Scatter = "NCCL_OP_SCATTER",
            Send = "NCCL_OP_SEND",
            Recv = "NCCL_OP_RECV",
            Group = "NCCL_OP_GROUP",
            Other = "NCCL_OP_OTHER",
        } and {
            "NCCL_OPS" = NcclOperation::ALL.len(),
        }
    }
    numbers {
        "zernel_duration_kind" {
            "ZERNEL_LAUNCH_CALL" = DurationKind::Launch.index(),
            "ZERNEL_STREAM_WAIT" = DurationKind::StreamWait.index(),
            "ZERNEL_EVENT_WAIT" = DurationKind::EventWait.index(),
            "ZERNEL_CONTEXT_WAIT" = DurationKind::ContextWait.index(),
            "ZERNEL_COPY_WAIT" = DurationKind::CopyWait.index(),
            "ZERNEL_DATALOAD" = DurationKind::Dataload.index(),
            "ZERNEL_DIST_SYNC" = DurationKind::DistSync.index(),
            "ZERNEL_RUN_DELAY" = DurationKind::RunDelay.index(),
            "ZERNEL_COLLECTIVE_ENQUEUE" = DurationKind::Enqueue(NcclOperation::AllReduce).index(),
            "ZERNEL_COLLECTIVE_UNTIL_SYNC" = DurationKind::UntilSync(NcclOperation::AllReduce).index(),
            "ZERNEL_DURATION_KINDS" = DurationKind::COUNT,
        }
    }
}

impl Tenant {
    pub(crate) const EMPTY: Self = Self {
        used_entries: [0; TenantTable::ALL.len()],
        refused_events: [0; TenantTable::ALL.len()],
        most_entries_of_tenant: [0; TenantTable::ALL.len()],
        unread_step_marks: 0,
        key: TenantKey {
            cgroup: CgroupKey {
                cgroup_inode: 0,
                hierarchy: 0,
                reserved: 0,
            },
            uid: 0,
            reserved: 0,
        },
    };
}

/// The index of a process in arrays, from its handle. 0 stands for no process.
pub(crate) fn index_of_handle(handle: u32) -> usize {
    handle as usize % PROCESSES
}

/// The handle of the next process that uses the index.
pub(crate) fn next_handle(handle: u32) -> u32 {
    handle.wrapping_add(PROCESSES as u32)
}

/// Declares the mirror of a process, which has a part of each probe that keeps state per process.
macro_rules! mirror_process {
    (all { $($all:tt)* } process { $($probe:ident: $state:ident),* } $($rest:tt)*) => {
        mirrors! {
            #[cfg(test)]
            pub(crate) const PROCESS_MIRRORS;
            structs {
                pub(crate) struct Process = "zernel_process" {
                    start_ns: u64,
                    first_event_ns: u64,
                    ended_ns: u64,
                    busiest_hits_per_second: u64,
                    probe_hits: u64,
                    pid: u32,
                    flags: u32,
                    device: u32,
                    trainer_handle: u32,
                    process_handle: u32,
                    parent_pid: u32,
                    uid: u32,
                    tenant: u32,
                    step_announcer_tid: u32,
                    reserved: u32,
                    is_uncounted: u64,
                    is_sampled: u64,
                    misses_window: u64,
                    gpu: u64,
                    comm: [u8; 16],
                    histograms: [u32; DurationKind::COUNT],
                    loader_count: u64,
                    phase_ns: [u64; zernel_phase::WorkloadPhase::ALL.len()],
                    exit_code: u64,
                    marks: ProcessMarks,
                    $($probe: super::$probe::$state,)*
                }
            }
            flags {
                impl Process: u32 = "zernel_process_flags", "ZERNEL_" {
                    SAW_DRIVER_INIT = 1 << 0,
                    IS_LOADER = 1 << 1,
                    OPENED_SEVERAL_DEVICES = 1 << 3,
                    ANNOUNCES_STEPS = 1 << 4,
                    RUNS_MODELS = 1 << 5,
                }
            }
        }
    };
}
for_each_probe!(mirror_process);

#[cfg(test)]
mod tests {
    use libbpf_rs::ObjectBuilder;

    use super::*;
    use crate::observer::OBSERVE_OBJECT;

    /// Handle 0 stands for no process, so no index may ever get it.
    #[test]
    fn a_handle_keeps_its_index_and_is_never_zero() {
        for index in 1..PROCESSES as u32 {
            let last = index.wrapping_sub(PROCESSES as u32);
            assert_eq!(next_handle(last), index, "it starts again with the first");
            for handle in [index, next_handle(index), last] {
                assert_eq!(index_of_handle(handle), index as usize);
                assert_ne!(handle, 0);
            }
        }
    }

    #[test]
    fn arrays_are_as_long_as_the_maps() {
        let object = ObjectBuilder::default()
            .open_memory(OBSERVE_OBJECT)
            .expect("it opens");
        let lengths = [
            ("processes", PROCESSES),
            ("counters", PROCESSES),
            ("symbols", SYMBOLS),
            ("histograms", HISTOGRAMS),
            ("allocations", ALLOCATIONS),
            ("memory_accounts", MEMORY_ACCOUNTS),
            ("communicators", COMMUNICATORS),
            ("tenants", TENANTS),
            ("tenant_parents", TENANT_PARENTS),
            ("subordinate_ranges", SUBORDINATE_RANGES),
        ];
        for (name, length) in lengths {
            let mut maps = object.maps();
            let map = maps.find(|map| map.name() == name).expect(name);
            assert_eq!(map.max_entries() as usize, length, "{name}");
        }
    }
}
