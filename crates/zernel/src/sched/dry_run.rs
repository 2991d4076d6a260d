//! `zernel sched --dry-run`: what a scheduler that follows the classes would have decided.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use zernel_ebpf::observer::{
    ClassDecisions, Observer, ObserverOptions, ObserverThread, ProcessDecisions,
};
use zernel_phase::class::TaskClass;
use zernel_report::text::{replace_control_characters, shorten_text};

use crate::run::attach::parse_duration;
use crate::{interrupt_flags, print_to_stdout};

/// How often decisions are read, and the end is checked. A process that lives for a shorter time may be missed.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How often the observer reads its maps.
const ROUND_INTERVAL: Duration = Duration::from_millis(500);

#[derive(Debug, Args)]
pub(crate) struct DryRunOptions {
    /// Count for TIME, such as 60s, 5m or 1h [default: until Ctrl-C]
    #[arg(long = "for", value_name = "TIME", value_parser = parse_duration, requires = "dry_run")]
    time: Option<Duration>,
    /// Print JSON
    #[arg(long, requires = "dry_run")]
    json: bool,
    /// Sample the phases of processes that use a GPU and whose calls cannot be probed
    #[arg(long, requires = "dry_run")]
    sampled_phases: bool,
}

pub(super) fn run(options: &DryRunOptions) -> Result<ExitCode, Box<dyn Error>> {
    let stop = interrupt_flags::interrupt_flag()?;
    let observer = Observer::start(&ObserverOptions {
        counts_decisions: true,
        samples_phases: options.sampled_phases,
        ..ObserverOptions::default()
    })?;
    let observer = ObserverThread::start(observer, ROUND_INTERVAL)?;
    eprintln!("zernel: counting decisions; nothing is scheduled");
    let started = Instant::now();
    let is_over = || options.time.is_some_and(|time| started.elapsed() >= time);
    let mut processes: BTreeMap<u32, ProcessDecisions> = BTreeMap::new();
    while !is_over() && !stop.load(Ordering::Relaxed) && !observer.has_ended() {
        thread::sleep(POLL_INTERVAL);
        let read = observer
            .requests()
            .call_with_observer(|observer| observer.decisions());
        let read = read.unwrap_or_default();
        processes.extend(
            read.into_iter()
                .map(|process| (process.process_handle, process)),
        );
    }
    let wall = started.elapsed();
    drop(observer.stop()?);
    let jobs = sum_decisions_by_job(processes.into_values());
    let text = match options.json {
        true => format!("{:#}\n", jobs_as_json(&jobs, wall)),
        false => job_table(&jobs, wall),
    };
    print_to_stdout(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Decisions about the threads of a trainer and its loaders.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
struct JobDecisions {
    pid: u32,
    comm: String,
    /// Number of processes that load data for the trainer.
    loaders: usize,
    /// Whether the sampled rule decides the classes of the trainer.
    sampled: bool,
    classes: BTreeMap<TaskClass, ClassDecisions>,
}

/// Sums the decisions of trainers and their loaders.
fn sum_decisions_by_job(processes: impl Iterator<Item = ProcessDecisions>) -> Vec<JobDecisions> {
    let mut jobs: BTreeMap<u32, JobDecisions> = BTreeMap::new();
    for process in processes {
        let job = jobs.entry(process.trainer).or_default();
        job.pid = process.trainer;
        match process.pid == process.trainer {
            true => (job.comm, job.sampled) = (process.comm, process.is_sampled),
            false => job.loaders += 1,
        }
        for (class, decisions) in process.classes {
            job.classes
                .entry(class)
                .or_default()
                .add_decisions(&decisions);
        }
    }
    jobs.into_values().collect()
}

fn jobs_as_json(jobs: &[JobDecisions], wall: Duration) -> serde_json::Value {
    serde_json::json!({ "seconds": wall.as_secs_f64(), "jobs": jobs })
}

fn job_table(jobs: &[JobDecisions], wall: Duration) -> String {
    let mut text = format!("{:.1} s observed\n", wall.as_secs_f64());
    if jobs.is_empty() {
        return text + "no ML process ran\n";
    }
    text += "JOB                     CLASS        RUN s  WAITED s  WAKE-UPS  PREEMPT     KEEP     LEND   SAVED s\n";
    for job in jobs {
        let loaders = match job.loaders {
            0 => String::new(),
            loaders => format!("+{loaders}"),
        };
        let name = shorten_text(&replace_control_characters(&job.comm), 12);
        let name = format!("{} {name}{loaders}", job.pid);
        for (class, decisions) in &job.classes {
            let seconds = |ns: u64| ns as f64 / 1e9;
            let _ = writeln!(
                text,
                "{name:22}  {class:8}  {:8.3}  {:8.3}  {:8}  {:7}  {:7}  {:7}  {:8.3}",
                seconds(decisions.run_ns),
                seconds(decisions.delay_ns),
                decisions.wakeups,
                decisions.would_preempt,
                decisions.would_keep,
                decisions.would_lend,
                seconds(decisions.saved_ns),
            );
        }
    }
    for job in jobs.iter().filter(|job| job.sampled) {
        let _ = writeln!(
            text,
            "The classes of {} are sampled, because its calls are not probed. They are often wrong.",
            job.pid
        );
    }
    text + "SAVED is an upper bound: a scheduler that keeps others their share saves less.\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process_decisions(
        pid: u32,
        trainer: u32,
        class: TaskClass,
        wakeups: u64,
    ) -> ProcessDecisions {
        let decisions = ClassDecisions {
            wakeups,
            run_ns: 1_500_000_000,
            ..ClassDecisions::default()
        };
        ProcessDecisions {
            process_handle: pid,
            pid,
            trainer,
            is_sampled: trainer == 20,
            comm: "python3".to_owned(),
            classes: BTreeMap::from([(class, decisions)]),
        }
    }

    #[test]
    fn loaders_count_for_their_trainer() {
        let processes = [
            process_decisions(10, 10, TaskClass::Critical, 3),
            process_decisions(11, 10, TaskClass::Feed, 4),
            process_decisions(12, 10, TaskClass::Feed, 5),
        ];
        let jobs = sum_decisions_by_job(processes.into_iter());
        assert_eq!((jobs.len(), jobs[0].pid, jobs[0].loaders), (1, 10, 2));
        assert_eq!(jobs[0].classes[&TaskClass::Feed].wakeups, 9);
        let text = job_table(&jobs, Duration::from_secs(2));
        assert!(
            text.contains("10 python3+2            feed         3.000"),
            "{text}"
        );
        assert!(
            text.lines().all(|line| line.chars().count() <= 100),
            "{text}"
        );
        let json = jobs_as_json(&jobs, Duration::from_secs(2));
        assert_eq!(json["jobs"][0]["classes"]["critical"]["wakeups"], 3);
    }

    #[test]
    fn sampled_classes_are_named() {
        let processes = [
            process_decisions(10, 10, TaskClass::Critical, 3),
            process_decisions(20, 20, TaskClass::Critical, 3),
        ];
        let jobs = sum_decisions_by_job(processes.into_iter());
        let text = job_table(&jobs, Duration::from_secs(2));
        assert!(text.contains("The classes of 20 are sampled"), "{text}");
        assert!(!text.contains("The classes of 10 are sampled"), "{text}");
        assert_eq!(
            jobs_as_json(&jobs, Duration::ZERO)["jobs"][1]["sampled"],
            true
        );
    }

    #[test]
    fn without_a_job_the_table_says_so() {
        assert!(job_table(&[], Duration::ZERO).contains("no ML process ran"));
    }
}
