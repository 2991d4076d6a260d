//! Mirrors of the types and constants of the gpu_mem probe.

use zernel_phase::mirrors;

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    structs {
        pub(crate) struct AllocationKey = "allocation_key" {
            object: u64,
            process: u32,
            kind: u32,
        }

        pub(crate) struct Allocation = "allocation" {
            bytes: u64,
            caller: u64,
            context_epoch: u64,
            device: u32,
            references: u32,
        }

        pub(crate) struct AccountKey = "account_key" {
            caller: u64,
            context_epoch: u64,
            process: u32,
            device: u32,
        }

        pub(crate) struct Account = "account" {
            current_bytes: u64,
            peak_bytes: u64,
            allocations: u64,
            frees: u64,
            held_bytes_and_epoch: u64,
            held_allocations: u64,
            unknown_context: u64,
            device: u32,
            reserved: u32,
        }
    }
    constants {
        pub(super) u8 = "gpu_mem_role", "MEMORY_" {
            ALLOCATE = 0,
            ALLOCATE_PITCHED = 1,
            FREE = 2,
            CREATE = 3,
            RETAIN = 4,
            RELEASE = 5,
            MAP = 6,
            UNMAP = 7,
            ALLOCATE_POOLED = 8,
        }
        pub(super) u32 = "gpu_mem_caller_bit", "MEMORY_" {
            POOLED_BIT = 63,
        }
        pub(super) u32 = "memory_kind", "MEMORY_" {
            ADDRESS = 0,
            HANDLE = 1,
            MAPPING = 2,
        }
        pub(super) u32 = "gpu_mem_context_epoch", "MEMORY_" {
            EPOCH_SHIFT = 48,
        }
        pub(super) u32 = "gpu_mem_device", "MEMORY_" {
            ANY_DEVICE = 0xffff_fffe,
        }
    }
}

impl AccountKey {
    /// A bit of `caller`, alone or beside an address: memory from pools.
    pub(crate) const POOLED: u64 = 1 << POOLED_BIT;
}

impl Allocation {
    /// The key of the account of the code that made the allocation.
    pub(super) fn account_key(&self, process: u32) -> AccountKey {
        AccountKey {
            caller: self.caller,
            context_epoch: self.context_epoch,
            process,
            device: self.device,
        }
    }
}
