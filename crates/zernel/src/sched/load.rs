//! `zernel sched` without `--dry-run`: loads the scheduler and keeps it loaded until it is asked to stop.

use std::error::Error;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, value_parser};
use zernel_scheduler::scheduler::{self, Privilege, SchedCounters, SchedPolicy, SchedSettings};

use crate::doctor::malformed_functions;
use crate::interrupt;

#[derive(Debug, Args)]
pub(crate) struct LoadOptions {
    /// Time that a task runs before others get their turn, in microseconds
    #[arg(long, value_name = "N", default_value_t = SchedSettings::SLICE.as_micros() as u64)]
    #[arg(value_parser = value_parser!(u64).range(100..=100_000))]
    slice_us: u64,
    /// Whose critical threads go first: nobody, all, or cgroup=PATH. Needs a running `zernel observe`
    #[arg(long, value_name = "WHO", default_value = "nobody", value_parser = parse_privilege)]
    privilege: Privilege,
    /// Part of their fair share that others keep beside critical threads, from 0 to 1
    #[arg(long, value_name = "SHARE", default_value = "0.5", value_parser = parse_guarantee)]
    guarantee: u32,
    /// Parts of the policy to switch off: handoff, feed
    #[arg(long, value_name = "PART,…", value_delimiter = ',', value_parser = parse_policy)]
    without: Vec<SchedPolicy>,
}

fn parse_policy(text: &str) -> Result<SchedPolicy, String> {
    match text {
        "handoff" => Ok(SchedPolicy::Handoff),
        "feed" => Ok(SchedPolicy::Feed),
        _ => Err("use handoff or feed".to_owned()),
    }
}

fn parse_privilege(text: &str) -> Result<Privilege, String> {
    let path = match text {
        "nobody" => return Ok(Privilege::Nobody),
        "all" => return Ok(Privilege::All),
        _ => text
            .strip_prefix("cgroup=")
            .ok_or("use nobody, all or cgroup=PATH")?,
    };
    let folder = fs::metadata(path).map_err(|error| format!("{path}: {error}"))?;
    match folder.is_dir() {
        true => Ok(Privilege::Cgroup(folder.ino())),
        false => Err(format!("{path} is not the folder of a cgroup")),
    }
}

/// Reads a share as a percentage.
fn parse_guarantee(text: &str) -> Result<u32, String> {
    let share: f64 = text.parse().map_err(|_| "not a number")?;
    match (0.0..=1.0).contains(&share) {
        true => Ok((share * 100.0).round() as u32),
        false => Err("a share is between 0 and 1".to_owned()),
    }
}

pub(super) fn run(options: &LoadOptions) -> Result<ExitCode, Box<dyn Error>> {
    let stop = interrupt::flag()?;
    let settings = SchedSettings {
        slice: Duration::from_micros(options.slice_us),
        privilege: options.privilege,
        guarantee_percent: options.guarantee,
        without: options.without.clone(),
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
        critical_wakeups,
        critical_kept,
        guarantee_hits,
        handoffs,
        feed_wakeups,
        feed_kept,
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
             {guarantee_hits}; handed on {handoffs}; loaders: preempting {feed_wakeups}, kept {feed_kept}\n"
        );
    }
    if *uncounted_cgroups > 0 {
        text += &format!("{uncounted_cgroups} cgroups had no room and counted as the root\n");
    }
    text
}
