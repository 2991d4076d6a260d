//! `zernel sched` without `--dry-run`: loads the scheduler and keeps it loaded until it is asked to stop.

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, value_parser};
use zernel_scheduler::scheduler::{self, SchedCounters, SchedSettings};

use crate::doctor::malformed_functions;
use crate::interrupt;

#[derive(Debug, Args)]
pub(crate) struct LoadOptions {
    /// Time that a task runs before others get their turn, in microseconds
    #[arg(long, value_name = "N", default_value_t = SchedSettings::SLICE.as_micros() as u64)]
    #[arg(value_parser = value_parser!(u64).range(100..=100_000))]
    slice_us: u64,
}

pub(super) fn run(options: &LoadOptions) -> Result<ExitCode, Box<dyn Error>> {
    let stop = interrupt::flag()?;
    let settings = SchedSettings {
        slice: Duration::from_micros(options.slice_us),
    };
    scheduler::check()?;
    let malformed = malformed_functions();
    if malformed > 0 {
        return Err(format!(
            "the kernel's BTF has {malformed} malformed scheduler functions, so the verifier refuses every scheduler; \
             use another kernel"
        )
        .into());
    }
    let loaded = || eprintln!("zernel: the scheduler is loaded; Ctrl-C unloads it");
    let counters = scheduler::run(&settings, &stop, loaded)?;
    eprint!("{}", describe(&counters));
    Ok(ExitCode::SUCCESS)
}

fn describe(counters: &SchedCounters) -> String {
    let SchedCounters {
        idle_wakeups,
        preempting_wakeups,
        queued,
        kept,
        stolen,
        throttled,
        uncounted_cgroups,
    } = counters;
    let mut text = format!(
        "zernel: the scheduler is unloaded\n\
         wake-ups on an idle CPU {idle_wakeups}, preempting {preempting_wakeups}; queued {queued}, kept {kept}, \
         stolen {stolen}, throttled {throttled}\n"
    );
    if *uncounted_cgroups > 0 {
        text += &format!("{uncounted_cgroups} cgroups had no room and counted as the root\n");
    }
    text
}
