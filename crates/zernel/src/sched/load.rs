//! `zernel sched` without `--dry-run`: loads the scheduler and keeps it loaded until it is asked to stop.

use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, value_parser};
use zernel_model::scheduler::{SchedCounters, SchedulerStatistics};
use zernel_scheduler::scheduler::{self, LoadedScheduler};

use super::interval_table::IntervalTable;
use super::policy::PolicyOptions;
use super::published::{self, Publisher};
use crate::doctor::malformed_functions;
use crate::interrupt;

#[derive(Debug, Args)]
pub(crate) struct LoadOptions {
    #[command(flatten)]
    policy: PolicyOptions,
    /// Print what the scheduler does, a line every SECONDS
    #[arg(long, value_name = "SECONDS", value_parser = value_parser!(u64).range(1..=3600))]
    stats: Option<u64>,
}

pub(super) fn run(options: &LoadOptions) -> Result<ExitCode, Box<dyn Error>> {
    let stop = interrupt::flag()?;
    check_kernel()?;
    let mut session = Session::new(options, &stop);
    let settings = options.policy.settings();
    let counters = scheduler::run(&settings, |loaded| session.poll(loaded))?;
    eprint!("{}", describe(&counters));
    Ok(ExitCode::SUCCESS)
}

/// Checks that the kernel can load a scheduler now.
fn check_kernel() -> Result<(), Box<dyn Error>> {
    scheduler::check()?;
    match malformed_functions() {
        0 => Ok(()),
        malformed => Err(format!(
            "the kernel's BTF has {malformed} malformed scheduler functions, so the verifier refuses every scheduler; \
             use another kernel"
        )
        .into()),
    }
}

/// What happens while the scheduler is loaded.
struct Session<'a> {
    stop: &'a AtomicBool,
    policy: PolicyOptions,
    publisher: Publisher,
    stats: Option<IntervalPrinter>,
    is_announced: bool,
}

impl<'a> Session<'a> {
    fn new(options: &LoadOptions, stop: &'a AtomicBool) -> Self {
        Self {
            stop,
            policy: options.policy.clone(),
            publisher: Publisher::new(Path::new(published::DIRECTORY)),
            stats: options.stats.map(IntervalPrinter::new),
            is_announced: false,
        }
    }

    /// Called every 50 ms.
    fn poll(&mut self, loaded: &LoadedScheduler<'_>) -> ControlFlow<()> {
        if !std::mem::replace(&mut self.is_announced, true) {
            eprintln!("zernel: the scheduler is loaded; Ctrl-C unloads it");
        }
        let policy = &self.policy;
        self.publisher
            .publish_if_due(|| statistics(loaded, policy));
        if let Some(stats) = &mut self.stats {
            stats.print_if_due(|| statistics(loaded, policy));
        }
        match self.stop.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}

fn statistics(loaded: &LoadedScheduler<'_>, policy: &PolicyOptions) -> SchedulerStatistics {
    SchedulerStatistics {
        pid: std::process::id(),
        taken_ns: published::monotonic_ns(),
        since_ns: loaded.since_ns(),
        restarts: 0,
        slice_us: policy.slice_us,
        privilege: policy.privilege.text.clone(),
        guarantee: policy.guarantee.share(),
        counters: loaded.counters(),
        classes: loaded.classes(),
    }
}

/// Prints the lines of `--stats`.
struct IntervalPrinter {
    interval: Duration,
    next: Instant,
    table: IntervalTable,
}

impl IntervalPrinter {
    fn new(seconds: u64) -> Self {
        Self {
            interval: Duration::from_secs(seconds),
            next: Instant::now(),
            table: IntervalTable::default(),
        }
    }

    fn print_if_due(&mut self, statistics: impl FnOnce() -> SchedulerStatistics) {
        if Instant::now() < self.next {
            return;
        }
        self.next = Instant::now() + self.interval;
        if let Some(text) = self.table.add(statistics()) {
            // Scheduling goes on without a reader.
            let _ = crate::print(text.as_bytes());
        }
    }
}

fn describe(counters: &SchedCounters) -> String {
    let SchedCounters {
        idle_wakeups,
        preempting_wakeups,
        queued,
        kept,
        stolen,
        throttled,
        critical_wakeups,
        critical_kept,
        guarantee_hits,
        uncounted_cgroups,
    } = counters;
    let mut text = format!(
        "zernel: the scheduler is unloaded\n\
         wake-ups on an idle CPU {idle_wakeups}, preempting {preempting_wakeups}; queued {queued}, kept {kept}, \
         stolen {stolen}, throttled {throttled}\n"
    );
    if critical_wakeups + critical_kept + guarantee_hits > 0 {
        text += &format!(
            "critical threads: preempting {critical_wakeups}, kept {critical_kept}, held back by the guarantee \
             {guarantee_hits}\n"
        );
    }
    if *uncounted_cgroups > 0 {
        text += &format!("{uncounted_cgroups} cgroups had no room and counted as the root\n");
    }
    text
}
