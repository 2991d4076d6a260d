//! Counters of a process that are exported as its state holds them: one series per process.
//!
//! A probe declares such counters as rows beside its state. A snapshot carries the values of all counters in one list,
//! so a new row changes neither the snapshot nor the code that writes the metrics text.

use zernel_model::aggregation::exposition::{Exposition, FamilyKind};

use super::{ProbeState, ProbeStates};
use crate::metrics::{MetricFamily, ScopedSnapshot, write_family_of_processes};

/// A counter whose value is a function of a probe's state.
pub(crate) struct ProcessCounter<State> {
    family: MetricFamily,
    value_of_state: fn(&State) -> f64,
}

impl<State> ProcessCounter<State> {
    /// A counter with the label `pid`. By convention its name ends in `_total`, and in `_seconds_total` if it is a time.
    pub(crate) const fn new(
        name: &'static str,
        help: &'static str,
        value: fn(&State) -> f64,
    ) -> Self {
        let family = MetricFamily {
            name,
            kind: FamilyKind::Counter,
            labels: &["pid"],
            help,
        };
        Self {
            family,
            value_of_state: value,
        }
    }
}

/// Nanoseconds as seconds.
pub(crate) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// The names and values of the counters of a state.
pub(super) fn counter_values<State: ProbeState>(
    state: &State,
) -> impl Iterator<Item = (&'static str, f64)> {
    let rows = State::COUNTERS.iter();
    rows.map(|row| (row.family.name, (row.value_of_state)(state)))
}

/// Returns the state of one probe among the states of all probes. Only the type of the function is used: rows belong
/// to a type of state.
type SelectState<State> = fn(&ProbeStates) -> &State;

/// The families of the counters of a state.
pub(super) fn counter_families<State: ProbeState>(
    _state: SelectState<State>,
) -> impl Iterator<Item = MetricFamily> {
    State::COUNTERS.iter().map(|row| row.family)
}

/// Writes the families of the counters of a state.
pub(super) fn expose_counters<State: ProbeState>(
    out: &mut Exposition,
    scoped: &ScopedSnapshot<'_>,
    state: SelectState<State>,
) {
    for family in counter_families(state) {
        write_family_of_processes(out, &family, scoped, |process, add| {
            if let Some(value) = process.find_counter(family.name) {
                add(&[], value);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use zernel_model::snapshot::{ProcessSnapshot, Scope, Snapshot};

    use super::*;
    use crate::metrics::{TextFormat, metrics_text};
    use crate::probes::SchedulingTimes;

    #[test]
    fn a_row_becomes_a_series_per_process() {
        let process = |pid, on_cpu_ns| {
            let sched = SchedulingTimes {
                on_cpu_ns,
                ..SchedulingTimes::default()
            };
            let states = ProbeStates {
                sched,
                ..ProbeStates::default()
            };
            ProcessSnapshot {
                pid,
                counters: states.counters(),
                ..ProcessSnapshot::default()
            }
        };
        let snapshot = Snapshot {
            observed: vec![process(7, 1_500_000_000), process(8, 0)],
            ..Snapshot::default()
        };
        let text = metrics_text(&snapshot, Scope::All, TextFormat::Prometheus);
        let head = "# TYPE zernel_cpu_seconds_total counter\n";
        let (_, samples) = text.split_once(head).expect("the head of the family");
        let expected =
            "zernel_cpu_seconds_total{pid=\"7\"} 1.5\nzernel_cpu_seconds_total{pid=\"8\"} 0\n#";
        assert!(samples.starts_with(expected), "{samples}");
    }
}
