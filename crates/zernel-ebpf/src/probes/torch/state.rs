//! Compilations of a process.

use zernel_model::snapshot::TorchSnapshot;
use zernel_phase::mirrors;

use super::SYMBOLS;
use crate::observer::{ObservedProcess, monotonic_ns};
use crate::probes::counter::{ProcessCounter, seconds};
use crate::probes::gpu_mem::ProcessGpus;
use crate::probes::{ProbeState, ProbedFunction};

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    structs {
        /// Compilations of a process.
        #[derive(Default)]
        pub struct CompileTimes = "torch_process" {
            /// Time in compilations that have ended, in nanoseconds, summed over threads.
            compile_ns: u64,
            /// When the current compilation began, in nanoseconds of CLOCK_MONOTONIC; 0: no compilation is under way.
            compiling_since_ns: u64,
            /// When the last compilation ended, in nanoseconds of CLOCK_MONOTONIC.
            compiled_until_ns: u64,
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
            LAYER = 9,
        }
    }
}

impl ProbeState for CompileTimes {
    const COUNTERS: &'static [ProcessCounter<Self>] = &[ProcessCounter::new(
        "zernel_compile_seconds_total",
        "Time in which PyTorch compiled a model, summed over threads. A compilation counts when it ends.",
        |state| seconds(state.compile_ns),
    )];

    type Snapshot = TorchSnapshot;

    fn snapshot(&self, process: &ObservedProcess, _gpus: &ProcessGpus<'_>) -> TorchSnapshot {
        let now_ns = process.ended_ns.unwrap_or_else(monotonic_ns);
        let calls_of = |role: u8| {
            let rows = SYMBOLS.iter().filter(|row| row.role == role);
            let names: Vec<&str> = rows.map(ProbedFunction::name).collect();
            let calls = process.calls_by_function();
            calls
                .filter(|(name, _)| names.contains(name))
                .map(|(_, count)| count.calls)
                .sum()
        };
        TorchSnapshot {
            compile_seconds: seconds(self.compile_ns_at(now_ns)),
            layer_calls: calls_of(LAYER),
            announcements: calls_of(RECORD_FUNCTION),
            lacks_probes: !process.has_torch_probes,
        }
    }
}

impl CompileTimes {
    /// Time in compilations up to now, in nanoseconds, including the compilation that is under way.
    fn compile_ns_at(&self, now_ns: u64) -> u64 {
        let under_way_ns = match self.compiling_since_ns {
            0 => 0,
            since_ns => now_ns.saturating_sub(since_ns),
        };
        self.compile_ns + under_way_ns
    }
}
