//! Metric families of the scheduler: `zernel sched` publishes its statistics in a file, and the daemon exports them.

use zernel_model::aggregation::exposition::Exposition;
use zernel_model::scheduler::{ClassStatistics, SchedulerStatistics, TenantStatistics};
use zernel_phase::class::TaskClass;

use super::{MetricFamily, families, write_family_head, write_family_with_one_sample};

families! {
    SCHEDULER_LOADED = Gauge "zernel_sched_loaded" []
        "1 while `zernel sched` has its scheduler loaded, else 0. The other families of the scheduler have no series then.";
    SCHEDULER_RESTARTS = Counter "zernel_sched_restarts_total" []
        "Times that the scheduler was loaded again after the kernel had ejected it.";
    SLICE_SECONDS = Gauge "zernel_sched_slice_seconds" []
        "Time that a task runs before others get their turn.";
    GUARANTEE_RATIO = Gauge "zernel_sched_guarantee_ratio" []
        "Part of their fair share that others keep beside critical threads.";
    LOSS_SECONDS = Gauge "zernel_sched_loss_seconds" []
        "CPU time of the guarantee that others have not got yet.";
    LENT_SECONDS = Counter "zernel_sched_lent_seconds_total" []
        "Time that tasks ran on CPUs that threads lent them while these spun until the GPU was done.";
    SCHEDULER_EVENTS = Counter "zernel_sched_events_total" ["event"]
        "What the scheduler decided, such as preempting_wakeups, critical_wakeups, guarantee_hits and throttled.";
    RUNS = Counter "zernel_sched_runs_total" ["class"]
        "Times that a thread of the class was chosen to run.";
    RUN_SECONDS = Counter "zernel_sched_run_seconds_total" ["class"]
        "Time that threads of the class have spent on CPUs. Its rate divided by the sum over all classes is their share.";
    WAKE_TO_RUN_SECONDS = Histogram "zernel_sched_wake_to_run_seconds" ["class"]
        "Time from a wake-up of a thread of the class until it ran.";
    TENANT_RUN_SECONDS = Counter "zernel_sched_tenant_run_seconds_total" ["cgroup"]
        "Time that tasks of the tenant have spent on CPUs, with privilege. The 16 tenants with the most time have series.";
    TENANT_DEBT = Gauge "zernel_sched_tenant_debt_seconds" ["cgroup"]
        "Time that critical threads and loaders of the tenant took beyond their share, not yet paid by its other tasks.";
}

/// Reads one figure of the scheduler from its statistics.
type ReadSchedulerFigure = fn(&SchedulerStatistics) -> f64;
/// Reads one figure of a tenant from the scheduler's statistics.
type ReadTenantFigure = fn(&TenantStatistics) -> f64;
/// Reads one figure of a class of threads from the scheduler's statistics.
type ReadClassFigure = fn(&ClassStatistics) -> f64;

/// Without a scheduler, all families but the first have no series.
pub(super) fn expose(out: &mut Exposition, scheduler: Option<&SchedulerStatistics>) {
    write_family_with_one_sample(
        out,
        &SCHEDULER_LOADED,
        &[],
        f64::from(u8::from(scheduler.is_some())),
    );
    let figures: [(MetricFamily, ReadSchedulerFigure); 5] = [
        (SCHEDULER_RESTARTS, |scheduler| {
            f64::from(scheduler.restarts)
        }),
        (SLICE_SECONDS, |scheduler| scheduler.slice_us as f64 / 1e6),
        (GUARANTEE_RATIO, |scheduler| scheduler.guarantee),
        (LOSS_SECONDS, |scheduler| scheduler.loss_us as f64 / 1e6),
        (LENT_SECONDS, |scheduler| scheduler.lent_ns as f64 / 1e9),
    ];
    for (family, figure) in figures {
        write_family_head(out, &family);
        if let Some(scheduler) = scheduler {
            out.write_sample(family.name, "", &[], figure(scheduler));
        }
    }
    write_family_head(out, &SCHEDULER_EVENTS);
    for (event, count) in scheduler
        .iter()
        .flat_map(|it| it.counters.names_and_values())
    {
        out.write_sample(SCHEDULER_EVENTS.name, "", &[("event", &event)], count);
    }
    let classes = || scheduler.iter().flat_map(|it| &it.classes);
    let counters: [(MetricFamily, ReadClassFigure); 2] = [
        (RUNS, |class| class.runs as f64),
        (RUN_SECONDS, |class| class.run_ns as f64 / 1e9),
    ];
    for (family, figure) in counters {
        write_family_head(out, &family);
        for (class, counted) in classes() {
            let labels = [("class", &class_label(*class) as _)];
            out.write_sample(family.name, "", &labels, figure(counted));
        }
    }
    write_family_head(out, &WAKE_TO_RUN_SECONDS);
    for (class, counted) in classes() {
        out.write_histogram(
            WAKE_TO_RUN_SECONDS.name,
            &[("class", &class_label(*class))],
            &counted.wait_histogram(),
        );
    }
}

/// Adds the figures of each tenant of the scheduler.
pub(super) fn expose_tenants(out: &mut Exposition, scheduler: Option<&SchedulerStatistics>) {
    let figures: [(MetricFamily, ReadTenantFigure); 2] = [
        (TENANT_RUN_SECONDS, |tenant| tenant.run_ns as f64 / 1e9),
        (TENANT_DEBT, |tenant| tenant.debt_ns as f64 / 1e9),
    ];
    for (family, figure) in figures {
        write_family_head(out, &family);
        for tenant in scheduler.iter().flat_map(|it| &it.tenants) {
            let labels = [("cgroup", &tenant.cgroup as _)];
            out.write_sample(family.name, "", &labels, figure(tenant));
        }
    }
}

/// A class as a label, as in JSON.
fn class_label(class: TaskClass) -> &'static str {
    match class {
        TaskClass::Other => "other",
        TaskClass::Critical => "critical",
        TaskClass::Feed => "feed",
        TaskClass::GpuWait => "gpu_wait",
    }
}

#[cfg(test)]
mod tests {
    use zernel_model::aggregation::exposition::TextFormat;
    use zernel_model::snapshot::{Scope, Snapshot};

    use super::*;
    use crate::metrics::metrics_text_with_scheduler;

    fn exposed_text(scheduler: Option<&SchedulerStatistics>) -> String {
        let mut out = Exposition::default();
        expose(&mut out, scheduler);
        expose_tenants(&mut out, scheduler);
        out.into_text()
    }

    /// Only readers of everything see tenants, because the cgroups of tenants name pods and jobs.
    #[test]
    fn only_readers_of_everything_see_tenants() {
        let scheduler = SchedulerStatistics {
            tenants: vec![TenantStatistics {
                cgroup: "/training".to_owned(),
                run_ns: 1,
                debt_ns: 0,
            }],
            ..SchedulerStatistics::default()
        };
        let snapshot = Snapshot::default();
        for (scope, is_seen) in [
            (Scope::All, true),
            (Scope::Machine, false),
            (Scope::User(1), false),
        ] {
            let format = TextFormat::Prometheus;
            let text = metrics_text_with_scheduler(&snapshot, Some(&scheduler), scope, format);
            assert_eq!(text.contains("/training"), is_seen, "{scope:?}");
        }
    }

    #[test]
    fn a_loaded_scheduler_has_series_per_class() {
        let mut scheduler = SchedulerStatistics {
            guarantee: 0.5,
            loss_us: 2500,
            lent_ns: 750_000_000,
            ..SchedulerStatistics::default()
        };
        scheduler.counters.guarantee_hits = 3;
        let critical = ClassStatistics {
            runs: 7,
            run_ns: 2_500_000_000,
            wakeups: 5,
            wait_ns: 10_000,
            // The first buckets of a wait histogram: up to 1, 2, 4 and 8 µs.
            wait_buckets: vec![2, 1, 1, 1],
        };
        scheduler.classes.insert(TaskClass::Critical, critical);
        scheduler.tenants.push(TenantStatistics {
            cgroup: "/training".to_owned(),
            run_ns: 1_500_000_000,
            debt_ns: 20_000_000,
        });
        let text = exposed_text(Some(&scheduler));
        for expected in [
            "zernel_sched_loaded 1\n",
            "zernel_sched_guarantee_ratio 0.5\n",
            "zernel_sched_loss_seconds 0.0025\n",
            "zernel_sched_lent_seconds_total 0.75\n",
            "zernel_sched_events_total{event=\"guarantee_hits\"} 3\n",
            "zernel_sched_runs_total{class=\"critical\"} 7\n",
            "zernel_sched_run_seconds_total{class=\"critical\"} 2.5\n",
            "zernel_sched_wake_to_run_seconds_bucket{class=\"critical\",le=\"0.000001023\"} 2\n",
            "zernel_sched_wake_to_run_seconds_bucket{class=\"critical\",le=\"0.000004095\"} 4\n",
            "zernel_sched_wake_to_run_seconds_bucket{class=\"critical\",le=\"+Inf\"} 5\n",
            "zernel_sched_wake_to_run_seconds_sum{class=\"critical\"} 0.00001\n",
            "zernel_sched_tenant_run_seconds_total{cgroup=\"/training\"} 1.5\n",
            "zernel_sched_tenant_debt_seconds{cgroup=\"/training\"} 0.02\n",
        ] {
            assert!(text.contains(expected), "no {expected} in {text}");
        }
    }

    #[test]
    fn without_a_scheduler_one_series_is_left() {
        let text = exposed_text(None);
        let series: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(series, ["zernel_sched_loaded 0"]);
    }

    #[test]
    fn labels_are_the_names_in_json() {
        for class in TaskClass::ALL {
            assert_eq!(serde_json::to_value(class).unwrap(), class_label(*class));
        }
    }
}
