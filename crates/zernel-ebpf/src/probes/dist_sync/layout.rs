//! Mirrors of the types and constants of the dist_sync probe.

use zernel_phase::mirrors;

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    constants {
        pub(super) u8 = "dist_sync_role", "SYNC_" {
            AWAIT_PEERS = 0,
            AWAIT_GRADIENTS = 1,
        }
    }
}
