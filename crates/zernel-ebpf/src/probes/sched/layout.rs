//! Mirrors of the types and constants of the sched probe.

use zernel_phase::mirrors;

use super::BlockedBy;

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    structs {
        pub(crate) struct ProcessState = "sched_process" {
            on_cpu_ns: u64,
            run_delay_ns: u64,
            calling_on_cpu_ns: u64,
            calling_run_delay_ns: u64,
            switches: u64,
            blocked_ns: [u64; BlockedBy::ALL.len()],
        }
    }
    variants {
        enum BlockedBy = "sched_block_reason" {
            Io = "SCHED_BLOCKED_IO",
            Network = "SCHED_BLOCKED_NETWORK",
            Ipc = "SCHED_BLOCKED_IPC",
            Futex = "SCHED_BLOCKED_FUTEX",
            Poll = "SCHED_BLOCKED_POLL",
            PageFault = "SCHED_BLOCKED_FAULT",
            Other = "SCHED_BLOCKED_OTHER",
        } and {
            "SCHED_BLOCK_REASONS" = BlockedBy::ALL.len(),
        }
    }
}
