//! Families of the observer itself.

use std::fmt::Display;

use zernel_model::aggregation::exposition::Exposition;
use zernel_model::snapshot::Snapshot;

use super::{families, write_family_head, write_family_with_one_sample};

families! {
    CALL_COST = Gauge "zernel_observe_call_cost_seconds" ["threads"]
        "Time that a probed call costs its thread, measured at the start with this many threads calling.";
    SAMPLING_WINDOWS = Counter "zernel_observe_windows_total" []
        "Sampling windows.";
    RUNG = Gauge "zernel_observe_rung" ["rung"]
        "How probes are attached; always 1.";
    SAMPLED_FUNCTIONS = Gauge "zernel_observe_sampled" ["symbol"]
        "A function that is sampled now; always 1.";
    LOST_EVENTS = Counter "zernel_observe_lost_total" ["cause"]
        "Events that the kernel had no room for. If the cause begins with refused_, the room left is reserved for other tenants.";
    PROBED_FILES = Gauge "zernel_observe_files" []
        "Library files with at least one probe attached.";
    REFUSED_FILES = Counter "zernel_observe_refused_files_total" ["cause"]
        "Attempts to attach probes to a library file that were refused.";
    OBSERVED_PROCESSES = Gauge "zernel_observe_processes" []
        "Observed processes, including those that exited in the last minute.";
    PROBLEMS = Gauge "zernel_observe_problems" []
        "Problems that make figures incomplete; /healthz lists them.";
    MISSED_MAPPINGS = Counter "zernel_observe_missed_by_events_total" []
        "Library mappings that no event announced and a scan found.";
}

pub(super) fn expose(out: &mut Exposition, snapshot: &Snapshot) {
    let observer = &snapshot.observer;
    write_family_head(out, &CALL_COST);
    out.write_sample(
        CALL_COST.name,
        "",
        &[("threads", &1)],
        snapshot.call_cost_seconds,
    );
    if observer.calibration_threads > 1 {
        let threads: [(&str, &dyn Display); 1] = [("threads", &observer.calibration_threads)];
        out.write_sample(
            CALL_COST.name,
            "",
            &threads,
            observer.contended_call_cost_seconds,
        );
    }
    write_family_with_one_sample(out, &SAMPLING_WINDOWS, &[], observer.windows as f64);
    write_family_with_one_sample(out, &RUNG, &[("rung", &snapshot.rung)], 1.0);
    write_family_head(out, &SAMPLED_FUNCTIONS);
    for symbol in &snapshot.sampled {
        out.write_sample(SAMPLED_FUNCTIONS.name, "", &[("symbol", symbol)], 1);
    }
    write_family_head(out, &LOST_EVENTS);
    for (cause, lost) in &observer.lost {
        out.write_sample(LOST_EVENTS.name, "", &[("cause", cause)], lost);
    }
    write_family_with_one_sample(out, &PROBED_FILES, &[], observer.files as f64);
    write_family_head(out, &REFUSED_FILES);
    for (cause, refusals) in snapshot.ledger.refused.refusal_counts() {
        out.write_sample(
            REFUSED_FILES.name,
            "",
            &[("cause", &cause.name())],
            refusals,
        );
    }
    write_family_with_one_sample(
        out,
        &OBSERVED_PROCESSES,
        &[],
        snapshot.observed.len() as f64,
    );
    write_family_with_one_sample(out, &PROBLEMS, &[], snapshot.problems.len() as f64);
    write_family_with_one_sample(
        out,
        &MISSED_MAPPINGS,
        &[],
        observer.mappings_found_by_scan as f64,
    );
}
