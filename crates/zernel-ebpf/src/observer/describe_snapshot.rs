//! What the observer knows, as a snapshot.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use zernel_model::snapshot::{
    FunctionCalls, ObserverSnapshot, ObservingCost, PhaseSnapshot, ProcessSnapshot, Role, Snapshot,
    StepSnapshot, TaskStateMapPath,
};

use super::process::{ObservedProcess, ProcessCoverage};
use super::{Observer, monotonic_ns, seconds_ago, suspension};
use crate::probes::ExitedRank;
use crate::probes::gpu_mem::ProcessGpus;

impl Observer {
    /// Everything that was observed up to now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let gpu_processes = self.gpus.process_memory();
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        let observed = self.newest_of_each_pid();
        Snapshot {
            observed: observed
                .map(|process| {
                    let gpus = ProcessGpus::new(process, &self.gpu_facts, &gpu_processes);
                    ProcessSnapshot {
                        sampled_phases: self.samples_process(process),
                        ..describe_process(process, &gpus)
                    }
                })
                .collect(),
            gone_ranks: self.exited_ranks().map(ExitedRank::snapshot).collect(),
            sampled: self.sampled_function_names().map(str::to_owned).collect(),
            rung: self.rung().name().to_owned(),
            problems: self.problems(),
            call_cost_seconds: self.probe_cost().ns_per_call / 1e9,
            shared_state: match self.shared_state() {
                Ok(path) => TaskStateMapPath::Path(path),
                Err(reason) => TaskStateMapPath::Missing(reason.to_owned()),
            },
            age_seconds: 0.0,
            taken_unix_ms: since_epoch.map_or(0, |since| since.as_millis() as u64),
            taken_ns: monotonic_ns(),
            gpus: self.gpu_facts.clone(),
            gpu_processes,
            observer: self.observer_figures(),
            exited_ranks: self.processes.exited_rank_times(),
            ledger: self.attachment.describe_as_ledger(
                self.is_suspended
                    .then(|| suspension::PAUSED_REASON.into())
                    .as_ref(),
            ),
        }
    }

    /// After pid reuse or exec, several processes have one pid. Metric series are keyed by pid, so only the newest
    /// process of a pid is exported.
    fn newest_of_each_pid(&self) -> impl Iterator<Item = &ObservedProcess> {
        let mut newest: BTreeMap<u32, &ObservedProcess> = BTreeMap::new();
        for process in self.processes() {
            let known = newest.entry(process.pid).or_insert(process);
            if known.first_event_ns < process.first_event_ns {
                *known = process;
            }
        }
        newest.into_values()
    }

    fn observer_figures(&self) -> ObserverSnapshot {
        let cost = self.probe_cost();
        let mut lost = self.losses().by_cause().to_vec();
        lost.push(("switches", self.missed_switches()));
        ObserverSnapshot {
            is_off: self.is_paused(),
            calibration_threads: cost.calibration_threads,
            contended_call_cost_seconds: cost.ns_per_call_contended / 1e9,
            windows: cost.sampling_windows,
            lost,
            files: self.attachment.probed_file_count(),
            mappings_found_by_scan: self.discovery.missed_by_events(),
        }
    }
}

fn describe_process(process: &ObservedProcess, gpus: &ProcessGpus<'_>) -> ProcessSnapshot {
    let phases = process.phases.as_ref();
    let end_ns = process.ended_ns.unwrap_or_else(monotonic_ns);
    ProcessSnapshot {
        pid: process.pid,
        start_ns: process.start_ns,
        identity: process.identity.clone(),
        role: match process.is_loader {
            true => Role::Loader,
            false => Role::Trainer,
        },
        loads_for: process.loads_for,
        complete: process.coverage == ProcessCoverage::Complete,
        since_seconds_ago: match process.coverage {
            ProcessCoverage::Complete => None,
            ProcessCoverage::Since(ns) => seconds_ago(ns),
        },
        first_seen_ns: process.first_event_ns,
        observed_seconds: end_ns.saturating_sub(process.first_event_ns) as f64 / 1e9,
        not_observed_seconds: process.not_observed_ns(end_ns) as f64 / 1e9,
        ended_seconds_ago: process.ended_ns.and_then(seconds_ago),
        exit_code: None,
        signal: None,
        phases: PhaseSnapshot {
            phase: phases.map(|phases| phases.current_phase),
            step_thread: phases.map(|phases| phases.tid),
            phase_times: phases.map(|phases| phases.phase_times.clone()),
        },
        steps: StepSnapshot {
            boundary: process.steps.boundary_mark(),
            count: process.steps.step_count(),
            gaps: process.steps.gap_count(),
            restarts: process.steps.restart_count(),
            recent: process.steps.recent_steps().iter().copied().collect(),
        },
        probes: process.probes.snapshots(process, gpus),
        counters: process.probes.counters(),
        calls: describe_calls(process),
        cost: ObservingCost {
            busiest_thread_ratio: process.overhead_cost().busiest_thread_overhead,
            seconds: process.overhead_cost().overhead_cpu_seconds,
        },
        sampled: process.is_sampled(),
        sampled_phases: false,
    }
}

fn describe_calls(process: &ObservedProcess) -> BTreeMap<Cow<'static, str>, FunctionCalls> {
    let calls = process.calls_by_function().map(|(name, count)| {
        let calls = FunctionCalls {
            calls: count.calls,
            failed: count.failed_calls,
            bytes: count.bytes,
            error: count.error,
        };
        (name.into(), calls)
    });
    calls.collect()
}
