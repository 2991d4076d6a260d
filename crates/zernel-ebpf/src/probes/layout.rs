//! What the probes share with userspace, as `bpf/observe.h` and the probes' own files lay it out.

use zernel_phase::shared::RawTrackerConfig;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Family;

pub(crate) const PROCESSES: usize = 2048;
pub(crate) const SYMBOLS: usize = 96;
pub(crate) const HISTOGRAMS: usize = 4096;
pub(crate) const BUCKETS: usize = 496;

/// Declares mirrors of C structs, named after them: plain integers, no padding.
macro_rules! mirrors {
    ($($(#[$doc:meta])* struct $name:ident = $kernel:literal { $($field:ident: $type:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
            #[repr(C)]
            pub(crate) struct $name { $(pub(crate) $field: $type,)* }
        )*

        /// All of them, for a comparison with what the probes were compiled to.
        #[cfg(test)]
        const MIRRORS: &[tests::Mirror] = &[$(
            tests::Mirror {
                kernel: $kernel,
                size: size_of::<$name>(),
                fields: &[$((stringify!($field), std::mem::offset_of!($name, $field)),)*],
            },
        )*];
    };
}

mirrors! {
    struct Symbol = "zernel_symbol" {
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

    struct Settings = "zernel_settings" {
        tracker: RawTrackerConfig,
        window_open: u32,
        reserved: u32,
        taken_off_ns: u64,
        events_from_ns: u64,
        events_sampled: u64,
    }

    struct Counter = "zernel_counter" {
        calls: u64,
        failed: u64,
        bytes: u64,
    }

    struct Counters = "zernel_counters" {
        of: [Counter; SYMBOLS],
    }

    struct Process = "zernel_process" {
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
        calling_on_cpu_ns: u64,
        calling_run_delay_ns: u64,
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

    struct Heartbeat = "zernel_heartbeat" {
        beat_ns: u64,
        owner: u32,
        reserved: u32,
    }

    struct Losses = "zernel_losses" {
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
    }

    struct StepMark = "zernel_step_mark" {
        at_ns: u64,
        process: u32,
        launches: u16,
        mark: u8,
        missing: u8,
    }

    struct Histogram = "zernel_histogram" {
        sum_ns: u64,
        max_ns: u64,
        min_inverted: u64,
        buckets: [u32; BUCKETS],
    }

    struct AllocationKey = "allocation_key" {
        object: u64,
        process: u32,
        kind: u32,
    }

    struct AccountKey = "account_key" {
        caller: u64,
        process: u32,
        device: u32,
    }

    struct Account = "account" {
        current_bytes: u64,
        peak_bytes: u64,
        allocations: u64,
        frees: u64,
    }

    struct CommunicatorKey = "communicator_key" {
        communicator: u64,
        process: u32,
        is_being_made: u32,
    }

    struct Communicator = "communicator" {
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

impl AccountKey {
    /// In place of a caller, or beside one: memory from pools only.
    pub(crate) const POOLED: u64 = 1 << 63;
}

impl Process {
    pub(crate) const SAW_INIT: u32 = 1 << 0;
    pub(crate) const IS_LOADER: u32 = 1 << 1;
    pub(crate) const SEVERAL_DEVICES: u32 = 1 << 3;
}

#[cfg(test)]
mod tests {
    use libbpf_rs::btf::types::{MemberAttr, Struct};
    use libbpf_rs::{Btf, HasSize, ObjectBuilder};

    use super::*;
    use crate::observer::OBJECT;

    /// What is to be compared of a mirror.
    #[derive(Debug)]
    pub(super) struct Mirror {
        pub(super) kernel: &'static str,
        pub(super) size: usize,
        pub(super) fields: &'static [(&'static str, usize)],
    }

    impl Mirror {
        /// How it differs from the struct that the probes were compiled with.
        fn difference(&self, btf: &Btf<'_>) -> Option<String> {
            let Some(kernel) = btf.type_by_name::<Struct<'_>>(self.kernel) else {
                return Some(format!("the probes have no struct {}", self.kernel));
            };
            let ours: Vec<_> = self
                .fields
                .iter()
                .map(|(name, at)| (name.to_string(), *at))
                .collect();
            let theirs = (kernel.size(), members(&kernel));
            let name = self.kernel;
            ((self.size, ours.clone()) != theirs)
                .then(|| format!("{name}: ours {:?}, theirs {theirs:?}", (self.size, ours)))
        }
    }

    fn members(kernel: &Struct<'_>) -> Vec<(String, usize)> {
        let members = kernel.iter().map(|member| {
            let MemberAttr::Normal { offset: bits } = member.attr else {
                panic!("{member:?} is a bit field");
            };
            let name = member.name.expect("every field has a name");
            (name.to_string_lossy().into_owned(), bits as usize / 8)
        });
        members.collect()
    }

    fn with_btf<T>(look: impl FnOnce(&Btf<'_>) -> T) -> T {
        let btf = Btf::from_raw("observe", OBJECT).expect("the object is readable");
        look(&btf.expect("the object carries BTF"))
    }

    #[test]
    fn mirrors_are_what_the_probes_were_compiled_with() {
        with_btf(|btf| {
            let differences: Vec<_> = MIRRORS.iter().filter_map(|it| it.difference(btf)).collect();
            assert!(differences.is_empty(), "{differences:#?}");
        });
    }

    /// A field that is missing, renamed, moved or of another size makes a mirror another.
    #[test]
    fn a_changed_mirror_is_noticed() {
        with_btf(|btf| {
            for mirror in MIRRORS {
                let differs = |size, fields: Vec<_>| {
                    let kernel = mirror.kernel;
                    let fields = fields.leak();
                    Mirror {
                        kernel,
                        size,
                        fields,
                    }
                    .difference(btf)
                    .is_some()
                };
                let (size, fields) = (mirror.size, mirror.fields.to_vec());
                let (last, others) = fields.split_last().expect("fields");
                assert!(differs(size + 8, fields.clone()), "{mirror:?}");
                assert!(differs(size, others.to_vec()), "{mirror:?}");
                for changed in [("renamed", last.1), (last.0, last.1 + 4)] {
                    assert!(differs(size, [others, &[changed]].concat()), "{mirror:?}");
                }
            }
        });
    }

    #[test]
    fn arrays_are_as_long_as_the_maps() {
        let object = ObjectBuilder::default()
            .open_memory(OBJECT)
            .expect("it opens");
        let lengths = [
            ("processes", PROCESSES),
            ("counters", PROCESSES),
            ("symbols", SYMBOLS),
            ("histograms", HISTOGRAMS),
        ];
        for (name, length) in lengths {
            let mut maps = object.maps();
            let map = maps.find(|map| map.name() == name).expect(name);
            assert_eq!(map.max_entries() as usize, length, "{name}");
        }
    }
}
