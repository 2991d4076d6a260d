//! `zernel sched explain`: the class of each thread of a process, from the map that a scheduler reads.

use std::error::Error;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use procfs::process::Process;
use serde::Serialize;
use zernel_ebpf::task_reader::TaskReader;
use zernel_phase::class::{ClassReason, ClassWord, TaskClass, TaskRole};
use zernel_phase::shared::{PIN_DIRECTORY, RawTaskState};
use zernel_report::text::{replace_control_characters, shorten_text};

use super::published_statistics;

/// Needs root and a running `zernel observe`.
#[derive(Debug, Args)]
pub(crate) struct ExplainOptions {
    /// Process to explain
    #[arg(value_name = "PID")]
    pid: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Directory of the pinned maps
    #[arg(long, value_name = "DIR", default_value = PIN_DIRECTORY)]
    pins: PathBuf,
}

/// A thread, as `--json` prints it.
#[derive(Debug, Serialize)]
struct ExplainedThread {
    tid: u32,
    comm: String,
    role: TaskRole,
    class: TaskClass,
    reason: ClassReason,
    /// For how many seconds the thread has had this class and reason.
    since_seconds: f64,
    /// Pid of the process that the thread works for.
    trainer: u32,
    in_sync: bool,
    drives_steps: bool,
    /// Whether the class follows from the sampled rule, because the calls of the thread are not probed.
    sampled: bool,
}

pub(super) fn run(options: &ExplainOptions) -> Result<ExitCode, Box<dyn Error>> {
    let reader = TaskReader::open(&options.pins)?;
    if !reader.is_observed()? {
        return Err("no observer writes task states; start `zernel observe`".into());
    }
    let process = i32::try_from(options.pid).ok().map(Process::new);
    let Some(Ok(process)) = process else {
        return Err(format!("there is no process {}", options.pid).into());
    };
    let mut threads = Vec::new();
    for task in process.tasks()?.flatten() {
        let Some(state) = reader.state_of(task.tid.cast_unsigned())? else {
            continue;
        };
        let comm = task.stat().map(|stat| stat.comm).unwrap_or_default();
        threads.push(explain_thread(&state, comm, TaskReader::now_ns()));
    }
    if threads.is_empty() {
        return Err(format!(
            "process {} is not observed: it has called no probed library (`zernel observe --sampled-phases` also covers \
             processes that use a GPU and cannot be probed)",
            options.pid
        )
        .into());
    }
    let text = match options.json {
        true => format!("{:#}\n", serde_json::to_value(&threads)?),
        false => thread_table(&threads) + &class_effect_text(),
    };
    crate::print_to_stdout(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn explain_thread(state: &RawTaskState, comm: String, now_ns: u64) -> ExplainedThread {
    let word = state.class_word_at(now_ns);
    // A class whose deadline has passed ended at the deadline.
    let since_ns = match word == state.class_word {
        true => word.since_ns(),
        false => state.class_until_ns,
    };
    ExplainedThread {
        tid: state.pid,
        comm,
        role: word.role(),
        class: word.class(),
        reason: word.reason(),
        since_seconds: now_ns.saturating_sub(since_ns) as f64 / 1e9,
        trainer: state.trainer,
        in_sync: word.has_flags(ClassWord::IN_SYNC),
        drives_steps: word.has_flags(ClassWord::DRIVES_STEPS),
        sampled: word.has_flags(ClassWord::SAMPLED),
    }
}

/// The line that states what the classes change now, which depends on the loaded scheduler.
fn class_effect_text() -> String {
    match published_statistics::read_statistics(Path::new(
        published_statistics::STATISTICS_DIRECTORY,
    )) {
        Ok(loaded) => format!(
            "`zernel sched` (pid {}) is loaded with privilege {}, guarantee {}\n",
            loaded.pid, loaded.privilege, loaded.guarantee
        ),
        Err(_) => "no `zernel sched` is loaded, so the classes change nothing\n".to_owned(),
    }
}

fn thread_table(threads: &[ExplainedThread]) -> String {
    let mut text =
        "    TID  COMM             ROLE     CLASS     SINCE        WORKS FOR  WHY\n".to_owned();
    for thread in threads {
        let comm = shorten_text(&replace_control_characters(&thread.comm), 15);
        let since = format!("{:.3} s", thread.since_seconds);
        let origin = match thread.sampled {
            true => " (sampled)",
            false => "",
        };
        let _ = writeln!(
            text,
            "{:7}  {comm:15}  {:7}  {:8}  {since:11}  {:9}  {}{origin}",
            thread.tid, thread.role, thread.class, thread.trainer, thread.reason
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    #[test]
    fn a_loader_is_explained() {
        let mut state = RawTaskState::new_zeroed();
        (state.pid, state.trainer) = (12, 10);
        state.flags = zernel_phase::shared::TASK_IS_ML | zernel_phase::shared::TASK_IS_LOADER;
        state.publish_class(1 << 30);
        let thread = explain_thread(
            &state,
            "pt_data_worker".to_owned(),
            (1 << 30) + 2_000_000_000,
        );
        let text = thread_table(&[thread]);
        let expected =
            "     12  pt_data_worker   loader   feed      2.000 s             10  loads data";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn a_sampled_class_is_named() {
        use zernel_phase::WorkloadPhase;
        use zernel_phase::shared::{PhaseWord, TASK_IS_ML, TASK_IS_SAMPLED};

        let mut state = RawTaskState::new_zeroed();
        (state.pid, state.trainer) = (12, 12);
        state.flags = TASK_IS_ML | TASK_IS_SAMPLED;
        state.phase_word = PhaseWord::new(WorkloadPhase::GpuCompute, 1, 1 << 30);
        state.tracker.deadline_ns = u64::MAX;
        state.publish_class(1 << 30);
        let thread = explain_thread(&state, "python3".to_owned(), 2 << 30);
        assert!(thread.sampled);
        let text = thread_table(&[thread]);
        assert!(text.contains("waits for the GPU (sampled)"), "{text}");
    }
}
