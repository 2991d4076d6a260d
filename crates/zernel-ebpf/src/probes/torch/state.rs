//! Compilations of a process.

use zernel_model::snapshot::TorchSnapshot;
use zernel_phase::mirrors;

use crate::observer::ObservedProcess;
use crate::probes::ProbeState;
use crate::probes::counter::{ProcessCounter, seconds};
use crate::probes::gpu_mem::ProcessGpus;

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    structs {
        /// Compilations of a process.
        #[derive(Default)]
        pub struct Compilations = "torch_process" {
            /// Time in those that have ended, summed over threads.
            compile_ns: u64,
        }
    }
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

impl ProbeState for Compilations {
    const COUNTERS: &'static [ProcessCounter<Self>] = &[ProcessCounter::new(
        "zernel_compile_seconds_total",
        "Time in which PyTorch compiled a model, summed over the threads of a process.",
        |state| seconds(state.compile_ns),
    )];

    type Snapshot = TorchSnapshot;

    fn snapshot(&self, _process: &ObservedProcess, _gpus: &ProcessGpus<'_>) -> TorchSnapshot {
        TorchSnapshot {
            compile_seconds: seconds(self.compile_ns),
        }
    }
}
