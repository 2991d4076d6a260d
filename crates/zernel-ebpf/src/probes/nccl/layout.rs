//! Mirrors of the types and constants of the nccl probe.

use zernel_phase::mirrors;

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    structs {
        pub(crate) struct CommunicatorKey = "communicator_key" {
            communicator: u64,
            process: u32,
            is_being_made: u32,
        }

        pub(crate) struct Communicator = "communicator" {
            unique_id_hash: u64,
            sequence: u64,
            bytes: u64,
            entered_ns: u64,
            left_ns: u64,
            operation: u32,
            rank: u32,
            ranks: u32,
            split_count: u32,
            operations: u64,
            longest_gap_ns: u64,
        }
    }
    constants {
        pub(super) u8 = "nccl_role", "NCCL_" {
            COLLECTIVE = 0,
            POINT_TO_POINT = 1,
            GROUP = 2,
            INIT_RANK = 3,
            INIT_SCALABLE = 4,
            INIT_ALL = 5,
            SPLIT = 6,
            RANK = 7,
            RANKS = 8,
            DESTROY = 9,
        }
        pub(crate) u32 = "nccl_no_rank", "NCCL_" {
            NO_RANK = u32::MAX,
        }
    }
}
