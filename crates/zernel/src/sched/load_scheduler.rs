//! `zernel sched` without `--dry-run`: loads the scheduler and keeps it loaded until it is asked to stop.

use std::cell::Cell;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, value_parser};
use zernel_model::scheduler::SchedCounters;
use zernel_scheduler::scheduler::{self, PolicyPart, SchedError, SchedSettings};

use super::config_file::{self, ConfigFile};
use super::policy_options::PolicyOptions;
use super::predecessor::{self, Predecessor};
use super::published_statistics;
use super::scheduler_session::SchedulerSession;
use crate::doctor::count_malformed_functions;
use crate::interrupt_flags;

/// The longest time before the kernel ejects a scheduler that lets a task wait.
const DEFAULT_WATCHDOG_MS: u64 = SchedSettings::MAX_WATCHDOG.as_millis() as u64;
/// Time before the scheduler is loaded again. The delay doubles with every ejection.
const FIRST_RESTART_DELAY: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(crate) struct LoadOptions {
    #[command(flatten)]
    pub(super) policy: PolicyOptions,
    /// Read slice, privilege, guarantee and lend from this TOML file, and again on SIGHUP or when it changes
    #[arg(long, value_name = "PATH", conflicts_with_all = ["slice_us", "privilege", "guarantee", "lend"])]
    config: Option<PathBuf>,
    /// Replace a `zernel sched` that is loaded
    ///
    /// The loaded scheduler is ended when this one is ready. The kernel's own scheduler runs in the short time
    /// between the two.
    #[arg(long)]
    replace: bool,
    /// Parts of the policy to switch off: handoff, feed, siblings, gpu-node
    #[arg(long, value_name = "PART,…", value_delimiter = ',', value_parser = parse_policy_part)]
    without: Vec<PolicyPart>,
    /// NUMA nodes of the GPUs, in the order of nvidia-smi; read from the kernel if not given
    #[arg(long, value_name = "NODE,…", value_delimiter = ',')]
    gpu_nodes: Option<Vec<u32>>,
    /// After an ejection by the kernel, load the scheduler again, at most N times
    #[arg(long, value_name = "N", default_value_t = 0)]
    #[arg(value_parser = value_parser!(u32).range(0..=10))]
    restart: u32,
    /// Time that a task may wait before the kernel ejects the scheduler, in milliseconds
    #[arg(long, value_name = "N", default_value_t = DEFAULT_WATCHDOG_MS)]
    #[arg(value_parser = value_parser!(u64).range(500..=DEFAULT_WATCHDOG_MS))]
    watchdog_ms: u64,
    /// Print what the scheduler does, a line every SECONDS
    #[arg(long, value_name = "SECONDS", value_parser = value_parser!(u64).range(1..=3600))]
    stats: Option<u64>,
}

fn parse_policy_part(text: &str) -> Result<PolicyPart, String> {
    match text {
        "handoff" => Ok(PolicyPart::Handoff),
        "feed" => Ok(PolicyPart::Feed),
        "siblings" => Ok(PolicyPart::Siblings),
        "gpu-node" => Ok(PolicyPart::GpuNode),
        _ => Err("use handoff, feed, siblings or gpu-node".to_owned()),
    }
}

pub(super) fn run(options: &LoadOptions) -> Result<ExitCode, Box<dyn Error>> {
    let (stop, mut session) = match &options.config {
        None => {
            let stop = interrupt_flags::interrupt_flag()?;
            if options.policy.lends_without_privilege() {
                eprintln!("zernel: --lend does nothing without --privilege");
            }
            (stop, SchedulerSession::new(options.policy.clone()))
        }
        Some(path) => {
            let policy = config_file::read_policy_file(path)?;
            let (stop, reload) = interrupt_flags::interrupt_and_reload_flags()?;
            let file = ConfigFile::new(path, reload);
            (stop, SchedulerSession::new(policy).with_config_file(file))
        }
    };
    if let Some(seconds) = options.stats {
        session = session.with_statistics_every(seconds);
    }
    let predecessor = match options.replace {
        true => {
            check_verifier_accepts_schedulers()?;
            Predecessor::find_loaded()?
        }
        false => None,
    };
    if predecessor.is_none() {
        check_scheduler_can_load()?;
    }
    let counters = match run_and_restart_scheduler(options, predecessor, &stop, &mut session) {
        Err(error) if is_flag_error(&*error) => {
            eprintln!("zernel: {error}");
            return Ok(ExitCode::from(2));
        }
        ended => ended?,
    };
    eprint!("{}", describe_counters(&counters));
    Ok(ExitCode::SUCCESS)
}

/// Whether an error is about the value of a flag.
fn is_flag_error(error: &(dyn Error + 'static)) -> bool {
    matches!(error.downcast_ref(), Some(SchedError::NoSuchNode(_)))
}

/// Schedules until the flag is set, and loads the scheduler again after ejections. When the scheduler is loaded for
/// the first time, it replaces its predecessor, if there is one.
fn run_and_restart_scheduler(
    options: &LoadOptions,
    mut predecessor: Option<Predecessor>,
    stop: &AtomicBool,
    session: &mut SchedulerSession,
) -> Result<SchedCounters, Box<dyn Error>> {
    loop {
        let settings = SchedSettings {
            watchdog: Duration::from_millis(options.watchdog_ms),
            disabled_parts: options.without.clone(),
            gpu_nodes: options.gpu_nodes.clone(),
            ..session.load_settings()
        };
        let ended = match predecessor.take() {
            None => {
                scheduler::run_scheduler(&settings, |loaded| session.poll_session(loaded, stop))
            }
            Some(predecessor) => {
                run_in_place_of_predecessor(&settings, &predecessor, stop, session)
            }
        };
        let reason = match ended {
            Ok(counters) => return Ok(counters),
            Err(SchedError::Ejected(reason)) => reason,
            Err(error) => return Err(error.into()),
        };
        match session.restarts == options.restart {
            true if session.restarts == 0 => return Err(SchedError::Ejected(reason).into()),
            true => {
                let times = session.restarts + 1;
                return Err(format!(
                    "the kernel ejected the scheduler {times} times, the last time with: {reason}; it stays unloaded"
                )
                .into());
            }
            false => eprintln!("zernel: the kernel ejected the scheduler: {reason}"),
        }
        sleep_unless_stopped(FIRST_RESTART_DELAY * 2_u32.pow(session.restarts), stop);
        if stop.load(Ordering::Relaxed) {
            return Err("stopped while the scheduler was unloaded".into());
        }
        session.begin_restart();
    }
}

/// Schedules in place of the predecessor, until `stop` is set or the kernel ejects the scheduler.
fn run_in_place_of_predecessor(
    settings: &SchedSettings,
    predecessor: &Predecessor,
    stop: &AtomicBool,
    session: &mut SchedulerSession,
) -> Result<SchedCounters, SchedError> {
    let mut is_reported = false;
    let ended = Cell::new(Duration::ZERO);
    let unload = || {
        ended.set(predecessor.terminate_and_wait()?);
        Ok(())
    };
    scheduler::replace_scheduler(settings, unload, |loaded| {
        if !std::mem::replace(&mut is_reported, true) {
            let (pid, took) = (predecessor.pid, ended.get().as_millis());
            eprintln!("zernel: replaced `zernel sched` (pid {pid}), which ended within {took} ms");
        }
        session.poll_session(loaded, stop)
    })
}

/// Waits for a time, or until the flag is set.
fn sleep_unless_stopped(time: Duration, stop: &AtomicBool) {
    let end = Instant::now() + time;
    while Instant::now() < end && !stop.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(50));
    }
}

/// Checks that the kernel can load a scheduler now.
pub(crate) fn check_scheduler_can_load() -> Result<(), Box<dyn Error>> {
    match scheduler::check_can_load() {
        Err(SchedError::OtherScheduler(name)) => return Err(other_scheduler_text(&name).into()),
        checked => checked?,
    }
    check_verifier_accepts_schedulers()
}

/// Names the scheduler that is loaded, and what to do.
fn other_scheduler_text(name: &str) -> String {
    let own = published_statistics::read_statistics(Path::new(
        published_statistics::STATISTICS_DIRECTORY,
    ))
    .ok();
    match own.filter(|_| name == predecessor::SCHEDULER_NAME) {
        Some(loaded) => format!(
            "the scheduler {name} is loaded by pid {}; stop it first, or take its place with `zernel sched --replace`",
            loaded.pid
        ),
        None => format!("the scheduler {name} is loaded; stop it first"),
    }
}

/// Checks that the verifier accepts schedulers.
fn check_verifier_accepts_schedulers() -> Result<(), Box<dyn Error>> {
    match count_malformed_functions() {
        0 => Ok(()),
        malformed => Err(format!(
            "the kernel's BTF has {malformed} malformed scheduler functions, so the verifier refuses every scheduler; \
             use another kernel"
        )
        .into()),
    }
}

/// Describes what the scheduler did, for the user.
pub(crate) fn describe_counters(counters: &SchedCounters) -> String {
    let SchedCounters {
        idle_wakeups,
        preempting_wakeups,
        queued,
        kept,
        stolen,
        throttled,
        aged,
        critical_wakeups,
        critical_kept,
        guarantee_hits,
        handoffs,
        raised,
        feed_wakeups,
        feed_kept,
        lent,
        moved_to_gpu,
        uncounted_cgroups,
    } = counters;
    let mut text = format!(
        "zernel: the scheduler is unloaded\n\
         wake-ups on an idle CPU {idle_wakeups}, preempting {preempting_wakeups}; queued {queued}, kept {kept}, \
         stolen {stolen}, throttled {throttled}, aged {aged}\n"
    );
    if critical_wakeups + critical_kept + guarantee_hits > 0 {
        text += &format!(
            "critical threads: preempting {critical_wakeups}, kept {critical_kept}, held back by the guarantee \
             {guarantee_hits}; handed on {handoffs}; raised {raised}; loaders: preempting {feed_wakeups}, kept {feed_kept}\n"
        );
    }
    if *lent > 0 {
        text += &format!("lent {lent} turns in GPU waits\n");
    }
    if *moved_to_gpu > 0 {
        text += &format!("moved to the NUMA node of their GPU {moved_to_gpu}\n");
    }
    if *uncounted_cgroups > 0 {
        text += &format!("{uncounted_cgroups} cgroups had no room and counted as the root\n");
    }
    text
}
