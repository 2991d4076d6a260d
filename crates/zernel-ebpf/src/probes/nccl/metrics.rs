//! Families of collectives and communicators.

use std::collections::BTreeMap;

use zernel_model::aggregation::LatencyHistogram;
use zernel_model::aggregation::exposition::Exposition;
use zernel_model::snapshot::CollectiveTotals;

use crate::metrics::{
    MetricFamily, ScopedSnapshot, families, write_family_head, write_family_of_processes,
};

families! {
    CALLS = Counter "zernel_nccl_calls_total" ["pid", "op"]
        "Collectives and messages passed to NCCL.";
    BYTES = Counter "zernel_nccl_bytes_total" ["pid", "op"]
        "Bytes passed to NCCL, as its arguments count them.";
    ENQUEUE = Histogram "zernel_nccl_enqueue_seconds" ["op"]
        "Duration of NCCL calls, which hand the work to the GPU.";
    UNTIL_SYNC = Histogram "zernel_nccl_until_sync_seconds" ["op"]
        "Time from a NCCL call to the end of the wait that covers it. An upper bound of the collective's duration.";
    SEQUENCE = Gauge "zernel_nccl_sequence" ["pid", "communicator", "rank"]
        "Collectives entered on a communicator.";
}

/// A total of an operation.
type CollectiveTotal = fn(&CollectiveTotals) -> u64;

pub(crate) fn expose(out: &mut Exposition, scoped: &ScopedSnapshot<'_>) {
    let counters: [(MetricFamily, CollectiveTotal); 2] = [
        (CALLS, |totals| totals.calls),
        (BYTES, |totals| totals.bytes),
    ];
    for (family, value) in counters {
        write_family_of_processes(out, &family, scoped, |process, add| {
            let called = process.probes.nccl.collectives.iter();
            for totals in called.filter(|totals| totals.calls > 0) {
                add(&[("op", &totals.op)], value(totals) as f64);
            }
        });
    }
    let snapshot = scoped.snapshot;
    expose_times(out, &ENQUEUE, &snapshot.enqueue_times(scoped.scope));
    expose_times(out, &UNTIL_SYNC, &snapshot.until_sync_times(scoped.scope));
    write_family_of_processes(out, &SEQUENCE, scoped, |process, add| {
        let communicators = process.probes.nccl.communicators.iter();
        for communicator in communicators.filter(|it| !it.is_being_made) {
            let rank = communicator.rank.map_or(String::new(), |it| it.to_string());
            add(
                &[
                    ("communicator", &communicator.communicator),
                    ("rank", &rank),
                ],
                communicator.sequence as f64,
            );
        }
    });
}

fn expose_times(
    out: &mut Exposition,
    family: &MetricFamily,
    times: &BTreeMap<String, LatencyHistogram>,
) {
    write_family_head(out, family);
    for (op, times) in times {
        out.write_histogram(family.name, &[("op", op)], times);
    }
}
