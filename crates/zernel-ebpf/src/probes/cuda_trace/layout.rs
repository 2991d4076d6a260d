//! Mirrors of the types and constants of the cuda_trace probe.

use zernel_phase::mirrors;

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    constants {
        pub(super) u8 = "cuda_trace_role", "TRACE_" {
            CALL = 0,
            COPY_2D = 1,
            STREAM_WAIT = 2,
            EVENT_WAIT = 3,
            CONTEXT_WAIT = 4,
            EVENT_RECORD = 5,
            STREAM_WAITS_FOR_EVENT = 6,
            COPY_3D = 7,
        }
    }
}
