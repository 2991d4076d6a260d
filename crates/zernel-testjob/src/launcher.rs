//! The launcher: starts the ranks and the processes that disturb them, and waits for the ranks.

use std::path::Path;
use std::process::{Child, Command};
use std::{env, io, thread};

use rustix::process::{Pid, Signal, kill_process};

use crate::plan::JobPlan;
use crate::sys::ThreadPriority;
use crate::{RANK_VARIABLE, read_plan, storage, sys};

/// Runs the whole job.
pub(crate) fn launch_job(directory: &Path) -> io::Result<()> {
    let plan = read_plan(directory)?;
    let mut cpus = sys::usable_cpus(plan.ranks as usize)?;
    cpus = cpus
        .iter()
        .copied()
        .cycle()
        .take(plan.ranks as usize)
        .collect();
    let mut spinners = SpinningProcesses(Vec::new());
    // Processes that spinners disturb get the same priority as the spinners.
    if plan.stays_on_cpus {
        sys::change_priority(ThreadPriority::SchedOther);
    }
    spinners.fork(&plan, &cpus)?;
    storage::serve_storage(directory)?;
    let mut ranks = Vec::new();
    for rank in 0..plan.ranks {
        let cpu = plan.stays_on_cpus.then(|| cpus[rank as usize]);
        ranks.push(start_rank(directory, &plan, rank, cpu)?);
    }
    wait_for_ranks(ranks)
}

fn start_rank(
    directory: &Path,
    plan: &JobPlan,
    rank: u32,
    cpu: Option<usize>,
) -> io::Result<Child> {
    let mut command = Command::new(env::current_exe()?);
    command
        .env(RANK_VARIABLE, rank.to_string())
        .env("RANK", rank.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("WORLD_SIZE", plan.ranks.to_string())
        .env(
            "TORCHELASTIC_RUN_ID",
            directory.file_name().unwrap_or_default(),
        );
    let Some(cpu) = cpu else {
        return command.spawn();
    };
    // A child inherits the affinity of the thread that starts it. The child dies with that thread, so this thread,
    // which waits for all children, starts it.
    let allowed = rustix::thread::sched_getaffinity(None)?;
    sys::pin_to_cpu(cpu)?;
    let child = command.spawn();
    rustix::thread::sched_setaffinity(None, &allowed)?;
    child
}

/// Waits for all ranks. If one fails, kills the others, which would wait for the failed rank forever, and returns an
/// error.
fn wait_for_ranks(mut ranks: Vec<Child>) -> io::Result<()> {
    while !ranks.is_empty() {
        let mut failed = None;
        ranks.retain_mut(|rank| match rank.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                if !status.success() {
                    failed = Some(format!("a rank ended with {status}"));
                }
                false
            }
            Err(error) => {
                failed = Some(error.to_string());
                false
            }
        });
        if let Some(failed) = failed {
            for mut rank in ranks {
                let _ = rank.kill();
                let _ = rank.wait();
            }
            return Err(io::Error::other(failed));
        }
        thread::sleep(std::time::Duration::from_millis(10));
    }
    Ok(())
}

/// Processes that spin on CPUs until this value is dropped at the end of the job.
struct SpinningProcesses(Vec<Pid>);

impl SpinningProcesses {
    fn fork(&mut self, plan: &JobPlan, cpus: &[usize]) -> io::Result<()> {
        for (rank, cpu) in (0..plan.ranks).zip(cpus) {
            for _ in 0..plan.for_rank(rank).spinners {
                let pid = sys::fork_child(|| {
                    sys::pin_to_cpu(*cpu)?;
                    loop {
                        std::hint::spin_loop();
                    }
                })?;
                self.0.extend(Pid::from_raw(pid as i32));
            }
        }
        Ok(())
    }
}

impl Drop for SpinningProcesses {
    fn drop(&mut self) {
        for pid in &self.0 {
            let _ = kill_process(*pid, Signal::KILL);
            let _ = rustix::process::waitpid(Some(*pid), rustix::process::WaitOptions::empty());
        }
    }
}
