//! Families of observed processes.

use zernel_model::aggregation::exposition::Exposition;
use zernel_model::snapshot::Role;
use zernel_phase::task_state::WorkloadPhase;

use super::{ScopedSnapshot, families, write_family_of_processes};

families! {
    PROCESS_INFO = Gauge "zernel_process_info"
        ["pid", "comm", "job", "rank", "local_rank", "cgroup", "namespace", "pod", "container", "UUID", "role"]
        "Identity of an observed process; always 1. Join on pid.";
    PHASE = Gauge "zernel_phase" ["pid", "phase"]
        "Current phase of the training thread of a process; always 1.";
    PHASE_SECONDS = Counter "zernel_phase_seconds_total" ["pid", "phase"]
        "Time that the training thread of a process has spent in each phase.";
    STEPS = Counter "zernel_steps_total" ["pid"]
        "Steps of the training loop of a process.";
    STEP_SECONDS = Gauge "zernel_step_seconds" ["pid"]
        "Median step time of the latest 64 steps.";
    PROCESS_COMPLETE = Gauge "zernel_process_complete" ["pid"]
        "1 if the process was observed from its first CUDA call on, else 0.";
    OVERHEAD_RATIO = Gauge "zernel_observe_cost_ratio" ["pid"]
        "Share of its time that the busiest thread of a process spends in probes.";
    OVERHEAD_SECONDS = Counter "zernel_observe_cost_seconds_total" ["pid"]
        "Time that all threads of a process have spent in probes.";
}

pub(super) fn expose(out: &mut Exposition, scoped: &ScopedSnapshot<'_>) {
    expose_info(out, scoped);
    expose_phases(out, scoped);
    expose_steps(out, scoped);
    expose_overhead(out, scoped);
}

fn expose_info(out: &mut Exposition, scoped: &ScopedSnapshot<'_>) {
    write_family_of_processes(out, &PROCESS_INFO, scoped, |process, add| {
        let identity = process.identity.as_ref();
        let text = |value: Option<&String>| value.cloned().unwrap_or_default();
        let number = |value: Option<u32>| value.map_or(String::new(), |value| value.to_string());
        let role = match process.role {
            Role::Loader => "loader",
            Role::Trainer | Role::Unknown => "trainer",
        };
        add(
            &[
                ("comm", &process.comm()),
                ("job", &process.job().unwrap_or_default()),
                ("rank", &number(process.rank())),
                ("local_rank", &number(identity.and_then(|it| it.local_rank))),
                ("cgroup", &text(identity.map(|it| &it.cgroup))),
                (
                    "namespace",
                    &text(identity.and_then(|it| it.namespace.as_ref())),
                ),
                ("pod", &text(identity.and_then(|it| it.pod.as_ref()))),
                (
                    "container",
                    &text(identity.and_then(|it| it.container.as_ref())),
                ),
                ("UUID", &process.probes.gpu_mem.uuid),
                ("role", &role),
            ],
            1.0,
        );
    });
}

fn expose_phases(out: &mut Exposition, scoped: &ScopedSnapshot<'_>) {
    write_family_of_processes(out, &PHASE, scoped, |process, add| {
        if let Some(phase) = process.phases.phase {
            add(&[("phase", &phase)], 1.0);
        }
    });
    write_family_of_processes(out, &PHASE_SECONDS, scoped, |process, add| {
        let Some(times) = &process.phases.phase_times else {
            return;
        };
        for phase in WorkloadPhase::ALL {
            add(&[("phase", &phase)], times.phase_ns(phase) as f64 / 1e9);
        }
    });
}

fn expose_steps(out: &mut Exposition, scoped: &ScopedSnapshot<'_>) {
    write_family_of_processes(out, &STEPS, scoped, |process, add| {
        if process.steps.count > 0 {
            add(&[], process.steps.count as f64);
        }
    });
    write_family_of_processes(out, &STEP_SECONDS, scoped, |process, add| {
        if let Some(seconds) = process.steps.median_seconds() {
            add(&[], seconds);
        }
    });
}

/// The overhead of loaders is not exported: loaders make no probed calls, and a node has many loaders.
fn expose_overhead(out: &mut Exposition, scoped: &ScopedSnapshot<'_>) {
    write_family_of_processes(out, &PROCESS_COMPLETE, scoped, |process, add| {
        if process.role != Role::Loader {
            add(&[], f64::from(u8::from(process.complete)));
        }
    });
    write_family_of_processes(out, &OVERHEAD_RATIO, scoped, |process, add| {
        if process.role != Role::Loader {
            add(&[], process.cost.busiest_thread_ratio);
        }
    });
    write_family_of_processes(out, &OVERHEAD_SECONDS, scoped, |process, add| {
        if process.role != Role::Loader {
            add(&[], process.cost.seconds);
        }
    });
}
