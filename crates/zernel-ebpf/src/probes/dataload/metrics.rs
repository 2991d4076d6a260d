//! Families of waits for data.

use zernel_model::aggregation::exposition::Exposition;

use crate::metrics::{ScopedSnapshot, families, write_family_of_processes};

families! {
    CAUSE = Counter "zernel_dataloader_wait_cause_seconds_total" ["pid", "cause"]
        "Waits for data, by what the loaders did meanwhile: prepare (on a CPU), fetch (disk, network), sched (runnable without a CPU), other.";
}

pub(crate) fn expose(out: &mut Exposition, scoped: &ScopedSnapshot<'_>) {
    write_family_of_processes(out, &CAUSE, scoped, |process, add| {
        let waits = &process.probes.dataload.data_waits;
        if waits.total_seconds() > 0.0 {
            for (cause, seconds) in waits.by_name() {
                add(&[("cause", &cause)], seconds);
            }
        }
    });
}
