//! Mirrors of the types and constants of the cuda_context probe.

use zernel_phase::mirrors;

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    constants {
        pub(super) u8 = "cuda_context_role", "CONTEXT_" {
            INIT = 0,
            OPEN = 1,
            CREATE = 2,
            SET = 3,
            PUSH = 4,
            POP = 5,
            DESTROY = 6,
            RESET = 7,
        }
    }
}
