//! Times of the threads of a process, on and off CPUs.

use zernel_model::snapshot::SchedSnapshot;
use zernel_phase::mirrors;

use super::SchedBlockReason;
use crate::observer::ObservedProcess;
use crate::probes::ProbeState;
use crate::probes::counter::{ProcessCounter, seconds};
use crate::probes::gpu_mem::ProcessGpus;

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    structs {
        /// Times of the threads of a process, summed over threads. Time in a thread's current state is not included.
        #[derive(Default)]
        pub struct SchedulingTimes = "sched_process" {
            /// On a CPU.
            on_cpu_ns: u64,
            /// Runnable without a CPU.
            run_delay_ns: u64,
            /// Time on a CPU, in nanoseconds, of the threads that make probed calls. Other threads do not delay
            /// steps.
            calling_on_cpu_ns: u64,
            /// Time runnable without a CPU, in nanoseconds, of the threads that make probed calls.
            calling_run_delay_ns: u64,
            /// How often threads of the process left their CPUs.
            switches: u64,
            /// Thread id of the last thread that was switched in and makes probed calls, or 0.
            caller_on_cpu: u64,
            /// When a thread of the process that makes probed calls last left its CPU, in nanoseconds of
            /// CLOCK_MONOTONIC.
            caller_left_ns: u64,
            /// Time that threads of the process were blocked, in nanoseconds, by the number of the reason.
            blocked_ns: [u64; SchedBlockReason::ALL.len()],
        }
    }
    variants {
        enum SchedBlockReason = "sched_block_reason" {
            Io = "SCHED_BLOCKED_IO",
            Network = "SCHED_BLOCKED_NETWORK",
            Ipc = "SCHED_BLOCKED_IPC",
            Futex = "SCHED_BLOCKED_FUTEX",
            Poll = "SCHED_BLOCKED_POLL",
            PageFault = "SCHED_BLOCKED_FAULT",
            Other = "SCHED_BLOCKED_OTHER",
        } and {
            "SCHED_BLOCK_REASONS" = SchedBlockReason::ALL.len(),
        }
    }
}

impl SchedulingTimes {
    /// Time that threads of the process were blocked for one reason, in nanoseconds.
    #[must_use]
    pub fn blocked_ns(&self, by: SchedBlockReason) -> u64 {
        self.blocked_ns[by as usize]
    }

    fn blocked_seconds(&self, by: SchedBlockReason) -> f64 {
        seconds(self.blocked_ns(by))
    }
}

impl ProbeState for SchedulingTimes {
    const COUNTERS: &'static [ProcessCounter<Self>] = &[
        ProcessCounter::new(
            "zernel_cpu_seconds_total",
            "Time that the threads of a process have spent on CPUs.",
            |state| seconds(state.on_cpu_ns),
        ),
        ProcessCounter::new(
            "zernel_run_delay_seconds_total",
            "Time that the threads of a process were runnable without a CPU.",
            |state| seconds(state.run_delay_ns),
        ),
    ];

    type Snapshot = SchedSnapshot;

    fn snapshot(&self, _process: &ObservedProcess, _gpus: &ProcessGpus<'_>) -> SchedSnapshot {
        let fetching = SchedBlockReason::FETCHING.iter();
        let reasons = SchedBlockReason::ALL.iter();
        SchedSnapshot {
            cpu_seconds: seconds(self.on_cpu_ns),
            run_delay_seconds: seconds(self.run_delay_ns),
            calling_cpu_seconds: seconds(self.calling_on_cpu_ns),
            calling_run_delay_seconds: seconds(self.calling_run_delay_ns),
            fetch_seconds: fetching.map(|reason| self.blocked_seconds(*reason)).sum(),
            blocked_seconds: reasons
                .map(|reason| (reason.name(), self.blocked_seconds(*reason)))
                .collect(),
        }
    }
}
