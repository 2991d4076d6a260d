//! What the probes share with userspace, as `bpf/observe.h` and the probes' own files lay it out.

use zernel_phase::shared::RawTrackerConfig;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Family;

pub(crate) const PROCESSES: usize = 2048;
pub(crate) const SYMBOLS: usize = 96;
pub(crate) const HISTOGRAMS: usize = 4096;
pub(crate) const BUCKETS: usize = 496;

/// Declares mirrors of C structs: plain integers, no padding.
macro_rules! mirrors {
    ($($(#[$doc:meta])* struct $name:ident { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub(crate) struct $name { $(pub(crate) $field: $type,)* }
    )*};
}

mirrors! {
    struct Symbol {
        probe: u8,
        role: u8,
        family: u8,
        enter_event: u8,
        leave_event: u8,
        flags: u8,
        bytes: u8,
        mark: u8,
        arguments: [u8; 4],
    }

    struct Settings {
        tracker: RawTrackerConfig,
        window_open: u32,
        reserved: u32,
    }

    struct Counter {
        calls: u64,
        failed: u64,
        bytes: u64,
    }

    struct Counters {
        of: [Counter; SYMBOLS],
    }

    struct Process {
        start_ns: u64,
        first_ns: u64,
        ended_ns: u64,
        busiest_hits: u64,
        hits: u64,
        pid: u32,
        flags: u32,
        device: u32,
        trainer: u32,
        histograms: [u32; Family::COUNT],
        on_cpu_ns: u64,
        run_delay_ns: u64,
        switches: u64,
        blocked_ns: [u64; 7],
        dataload_ns: [u64; 4],
        own_work: [u64; 3],
        loader_work: [u64; 3],
        loaders: u64,
        phase_ns: [u64; 5],
        launches: u32,
        last_mark: u32,
        marks_since_ns: u64,
        marks: [u32; 2],
        marks_missing: u32,
        reserved: u32,
        exit_code: u64,
    }

    struct Heartbeat {
        beat_ns: u64,
        owner: u32,
        reserved: u32,
    }

    struct Losses {
        processes: u64,
        histograms: u64,
        calls: u64,
        allocations: u64,
        memory_accounts: u64,
        communicators: u64,
        threads: u64,
        switches: u64,
        step_marks: u64,
    }

    struct StepMark {
        at_ns: u64,
        process: u32,
        launches: u16,
        mark: u8,
        missing: u8,
    }

    struct Histogram {
        sum_ns: u64,
        max_ns: u64,
        min_inverted: u64,
        buckets: [u32; BUCKETS],
    }

    struct AllocationKey {
        object: u64,
        process: u32,
        kind: u32,
    }

    struct AccountKey {
        caller: u64,
        process: u32,
        device: u32,
    }

    struct Account {
        current_bytes: u64,
        peak_bytes: u64,
        allocations: u64,
        frees: u64,
    }

    struct CommunicatorKey {
        communicator: u64,
        process: u32,
        is_being_made: u32,
    }

    struct Communicator {
        hash: u64,
        sequence: u64,
        bytes: u64,
        entered_ns: u64,
        left_ns: u64,
        operation: u32,
        rank: u32,
        ranks: u32,
        splits: u32,
        operations: u64,
        longest_gap_ns: u64,
    }
}

impl Symbol {
    pub(crate) const BEGINS_LAUNCHES: u8 = 1 << 7;
}

impl Process {
    pub(crate) const SAW_INIT: u32 = 1 << 0;
    pub(crate) const IS_LOADER: u32 = 1 << 1;
}
