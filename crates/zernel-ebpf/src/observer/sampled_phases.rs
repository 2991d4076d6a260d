//! Phases by the sampled rule, for processes that use a GPU and whose calls are not probed.
//!
//! NVML lists the processes that use a GPU. A listed process is *sampled* while none of its libraries has probes, or as
//! long as none of its calls was seen. Ten times per second the kernel applies the sampled rule to the threads of a
//! sampled process, and publishes phase and class with a flag (`probes/sched/sampled_phases.bpf.h`). A probed call of
//! the process ends the sampling. If the observer's thread stops sampling, the phases expire after a second.
//!
//! The rule needs the utilization of one GPU, so a process that uses several is not sampled.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use zernel_model::gpu::ProcessGpuMemory;

use super::Observer;
use super::process::ObservedProcess;
use crate::capability::innermost_reason;

/// How often threads are sampled. The rule reports a phase after three equal results.
pub(super) const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);
const SAMPLE_PROGRAM: &str = "sample_tasks";
const ADMIT_PROGRAM: &str = "admit_tasks";
/// The BPF programs that are not loaded if no phases are sampled.
pub(super) const SAMPLING_PROGRAMS: [&str; 2] = [SAMPLE_PROGRAM, ADMIT_PROGRAM];

/// The sampled processes.
#[derive(Debug, Default)]
pub(super) struct SampledProcesses {
    by_handle: BTreeMap<u32, SampledProcess>,
    /// Why the kernel does not sample.
    refusal: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SampledProcess {
    pid: u32,
    /// Probed calls when the process was chosen.
    probe_hits: u64,
}

impl SampledProcesses {
    /// A sentence for users, if the kernel does not sample.
    pub(super) fn describe_refusal(&self) -> Option<String> {
        let refusal = self.refusal.as_ref()?;
        Some(format!("phases cannot be sampled: {refusal}"))
    }
}

/// Pids that NVML lists for exactly one GPU.
fn pids_on_one_gpu(gpu_processes: &[ProcessGpuMemory]) -> BTreeSet<u32> {
    let mut gpus: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for listed in gpu_processes {
        gpus.entry(listed.pid).or_default().insert(listed.index);
    }
    gpus.retain(|_, indices| indices.len() == 1);
    gpus.into_keys().collect()
}

impl Observer {
    /// Chooses the processes that are sampled until the next call, and makes those of them observed that are not.
    pub(super) fn choose_sampled_processes(&mut self, gpu_processes: &[ProcessGpuMemory]) {
        let Some(mut sampled) = self.sampled.take() else {
            return;
        };
        let mut pids = pids_on_one_gpu(gpu_processes);
        let running = self.processes.running_processes.iter();
        let chosen = running.filter(|(_, process)| pids.contains(&process.pid));
        let chosen = chosen.filter(|(_, process)| !self.are_calls_seen(process));
        let chosen = chosen.map(|(handle, process)| {
            let (pid, probe_hits) = (process.pid, process.probe_hits());
            (*handle, SampledProcess { pid, probe_hits })
        });
        let before = std::mem::replace(&mut sampled.by_handle, chosen.collect());
        for (handle, process) in before {
            if !sampled.by_handle.contains_key(&handle) {
                self.end_sampling_of(handle, process.pid);
            }
        }
        for handle in sampled.by_handle.keys() {
            self.kernel.set_sampled_phases(*handle, true);
        }
        for process in self.processes.running_processes.values() {
            pids.remove(&process.pid);
        }
        for pid in pids {
            let admitted = self.kernel.run_for_process(ADMIT_PROGRAM, pid);
            sampled.refusal = admitted.err().map(|error| innermost_reason(&error));
        }
        self.sampled = Some(sampled);
    }

    /// Whether the calls of a process are seen, so that its phases need no samples.
    fn are_calls_seen(&self, process: &ObservedProcess) -> bool {
        !self.is_suspended
            && !process.is_uncounted()
            && process.probe_hits() > 0
            && self.has_probed_library(process)
    }

    /// Whether probes are attached to a library that a process maps.
    fn has_probed_library(&self, process: &ObservedProcess) -> bool {
        let mapped = self.attachment.files_of(process.discovery_key());
        let mut files = self.attachment.files.iter();
        files.any(|file| {
            mapped.contains(&file.file_number)
                && file.has_probes()
                && file.exclusion_reason.is_none()
        })
    }

    /// Whether [`Self::sample_phases`] has something to do.
    #[must_use]
    pub fn has_sampled_processes(&self) -> bool {
        let sampled = self.sampled.as_ref();
        sampled.is_some_and(|sampled| !sampled.by_handle.is_empty())
    }

    /// Whether the phases of a process are sampled.
    pub(super) fn samples_process(&self, process: &ObservedProcess) -> bool {
        let mut sampled = self.sampled.iter().flat_map(|it| it.by_handle.values());
        process.ended_ns.is_none() && sampled.any(|it| it.pid == process.pid)
    }

    /// Samples the threads of all processes that were chosen. The observer's thread calls this function ten times per
    /// second.
    pub fn sample_phases(&mut self) {
        let Some(mut sampled) = self.sampled.take() else {
            return;
        };
        sampled.by_handle.retain(|handle, process| {
            let is_sampled = self.needs_samples(*handle, *process);
            match is_sampled {
                true => {
                    let result = self.kernel.run_for_process(SAMPLE_PROGRAM, process.pid);
                    sampled.refusal = result.err().map(|error| innermost_reason(&error));
                }
                false => self.end_sampling_of(*handle, process.pid),
            }
            is_sampled
        });
        self.sampled = Some(sampled);
    }

    /// Whether a process runs and has made no probed call since it was chosen. Calls of an excluded process do not count.
    fn needs_samples(&self, handle: u32, process: SampledProcess) -> bool {
        let record = self.kernel.process_record(handle);
        record.is_some_and(|record| {
            record.ended_ns == 0
                && (record.probe_hits == process.probe_hits || record.is_uncounted != 0)
        })
    }

    /// Ends the sampling of a process: its trackers decide about its phases again.
    fn end_sampling_of(&self, handle: u32, pid: u32) {
        self.kernel.set_sampled_phases(handle, false);
        // A process that has exited has no threads. If the sampling of a process cannot be ended, its sampled phases
        // expire.
        let _ = self.kernel.run_for_process(SAMPLE_PROGRAM, pid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_on_several_gpus_is_not_sampled() {
        let on = |pid, index| ProcessGpuMemory {
            pid,
            index,
            bytes: None,
            instance: None,
        };
        let listed = [on(1, 0), on(2, 0), on(2, 1), on(3, 1), on(3, 1)];
        assert_eq!(pids_on_one_gpu(&listed), BTreeSet::from([1, 3]));
    }
}
