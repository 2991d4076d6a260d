//! Mirrors of the types and constants of the torch probe.

use zernel_phase::mirrors;

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    constants {
        pub(super) u8 = "torch_role", "TORCH_" {
            BACKWARD = 0,
            OPTIMIZER = 1,
            BACKWARD_THREAD = 2,
            RECORD_FUNCTION = 3,
            CHECKPOINT = 4,
            RECORD_END = 5,
            COUNTER = 6,
            COUNTER_START = 7,
            COUNTER_STOP = 8,
        }
    }
}
