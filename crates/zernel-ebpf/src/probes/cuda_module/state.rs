//! Loads of GPU code by a process.

use zernel_model::snapshot::ModuleSnapshot;
use zernel_phase::mirrors;

use crate::observer::ObservedProcess;
use crate::probes::ProbeState;
use crate::probes::counter::ProcessCounter;
use crate::probes::gpu_mem::ProcessGpus;

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    structs {
        /// Loads of GPU code by a process.
        #[derive(Default)]
        pub struct ModuleLoads = "cuda_module_process" {
            /// Calls that succeeded.
            loads: u64,
        }
    }
}

impl ProbeState for ModuleLoads {
    const COUNTERS: &'static [ProcessCounter<Self>] = &[ProcessCounter::new(
        "zernel_cuda_module_loads_total",
        "How often a process loaded GPU code.",
        |state| state.loads as f64,
    )];

    type Snapshot = ModuleSnapshot;

    fn snapshot(&self, _process: &ObservedProcess, _gpus: &ProcessGpus<'_>) -> ModuleSnapshot {
        ModuleSnapshot {
            module_loads: self.loads,
        }
    }
}
