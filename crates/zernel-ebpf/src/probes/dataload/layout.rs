//! Mirrors of the types and constants of the dataload probe.

use zernel_phase::mirrors;

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    structs {
        pub(crate) struct ProcessState = "dataload_process" {
            waited_ns: [u64; WORKS + 1],
            own_work: [u64; WORKS],
            loader_work: [u64; WORKS],
        }
    }
    constants {
        pub(crate) usize = "zernel_work", "ZERNEL_" {
            PREPARES = 0,
            FETCHES = 1,
            QUEUES = 2,
            WORKS = 3,
        }
    }
}
