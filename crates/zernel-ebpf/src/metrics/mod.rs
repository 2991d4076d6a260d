//! A snapshot as metrics text.
//!
//! The families of [`AggregatedMetrics`](zernel_model::aggregation::AggregatedMetrics) come first. The families of a
//! probe are declared and written in the probe's folder; those of processes, GPUs, the observer itself and the scheduler
//! here.

mod gpus;
mod observer;
mod process;
mod scheduler;

use std::fmt::Display;
use std::sync::LazyLock;

pub use zernel_model::aggregation::exposition::TextFormat;
use zernel_model::aggregation::exposition::{Exposition, FamilyKind, label_text};
use zernel_model::scheduler::SchedulerStatistics;
use zernel_model::snapshot::{ProcessSnapshot, Scope, Snapshot};

use crate::probes;

/// A metric family.
#[derive(Debug, Clone, Copy)]
pub struct MetricFamily {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: FamilyKind,
    /// The names of the labels that the series of the family have.
    pub labels: &'static [&'static str],
    /// Its help text.
    pub help: &'static str,
}

/// All metric families but those of [`AggregatedMetrics`](zernel_model::aggregation::AggregatedMetrics), in the order
/// of the metrics text.
pub static FAMILIES: LazyLock<Vec<MetricFamily>> = LazyLock::new(|| {
    [
        &probes::families(),
        process::FAMILIES,
        gpus::FAMILIES,
        observer::FAMILIES,
        scheduler::FAMILIES,
    ]
    .concat()
});

/// Declares metric families as constants, and the list `FAMILIES` of these constants.
macro_rules! families {
    ($($constant:ident = $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(const $constant: $crate::metrics::MetricFamily = $crate::metrics::MetricFamily {
            name: $name,
            kind: zernel_model::aggregation::exposition::FamilyKind::$kind,
            labels: &[$($label),*],
            help: $help,
        };)*

        /// The metric families that a module declares, in the order of the metrics text.
        pub(crate) const FAMILIES: &[$crate::metrics::MetricFamily] = &[$($constant),*];
    };
}
pub(crate) use families;

/// The part of a snapshot that a reader may see.
pub(crate) struct ScopedSnapshot<'a> {
    pub(crate) snapshot: &'a Snapshot,
    pub(crate) scope: Scope,
    pub(crate) processes: Vec<&'a ProcessSnapshot>,
}

/// The labels of a sample.
pub(crate) type SampleLabels<'a> = [(&'a str, &'a dyn Display)];

/// The metrics text of the processes within a scope.
#[must_use]
pub fn metrics_text(snapshot: &Snapshot, scope: Scope, format: TextFormat) -> String {
    metrics_text_with_scheduler(snapshot, None, scope, format)
}

/// The metrics text of the processes within a scope and of the loaded scheduler.
#[must_use]
pub fn metrics_text_with_scheduler(
    snapshot: &Snapshot,
    scheduler: Option<&SchedulerStatistics>,
    scope: Scope,
    format: TextFormat,
) -> String {
    let aggregated = snapshot.to_aggregated_metrics(scope);
    let mut out = match format {
        TextFormat::Prometheus => Exposition::default(),
        TextFormat::OpenMetrics => Exposition::new_open_metrics(),
        TextFormat::Quantiles => return aggregated.to_prometheus_quantiles(),
    };
    aggregated.write_metrics(&mut out);
    drop(aggregated);
    let scoped = ScopedSnapshot {
        snapshot,
        scope,
        processes: snapshot.processes_in_scope(scope).collect(),
    };
    probes::expose(&mut out, &scoped);
    process::expose(&mut out, &scoped);
    if scope.has_machine() {
        gpus::expose(&mut out, snapshot);
        observer::expose(&mut out, snapshot);
        scheduler::expose(&mut out, scheduler);
    }
    // Names of cgroups contain the names of pods and jobs, so not every reader may see them.
    if scope == Scope::All {
        scheduler::expose_tenants(&mut out, scheduler);
    }
    let mut text = out.into_text();
    if format == TextFormat::OpenMetrics {
        text.push_str("# EOF\n");
    }
    text
}

/// Writes the head of a metric family.
pub(crate) fn write_family_head(out: &mut Exposition, family: &MetricFamily) {
    out.write_family_head(family.name, family.kind, family.help);
}

/// Writes a metric family with one sample.
pub(crate) fn write_family_with_one_sample(
    out: &mut Exposition,
    family: &MetricFamily,
    labels: &SampleLabels<'_>,
    value: f64,
) {
    write_family_head(out, family);
    out.write_sample(family.name, "", labels, value);
}

/// Writes a family with the samples that `each` adds for every process. Each sample gets the label `pid`.
pub(crate) fn write_family_of_processes(
    out: &mut Exposition,
    family: &MetricFamily,
    scoped: &ScopedSnapshot<'_>,
    each: impl Fn(&ProcessSnapshot, &mut dyn FnMut(&SampleLabels<'_>, f64)),
) {
    write_family_head(out, family);
    for process in &scoped.processes {
        let pid = label_text(&[("pid", &process.pid)]);
        each(process, &mut |labels, value| {
            out.write_sample_with_label_text(family.name, "", &pid, labels, value);
        });
    }
}
