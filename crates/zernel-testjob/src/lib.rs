//! Training jobs with a known bottleneck, to test verdicts and step detection.
//!
//! A job is what `torchrun` would start: a launcher, a process for each rank, and loaders that the rank forks. A rank
//! gets batches through pipes and shared memory, copies them to the software GPU, launches forward, backward and
//! optimizer kernels, reads its loss back, and reduces its gradients with NCCL. The durations are drawn from a seed;
//! the [`Bottleneck`] determines which one dominates. Each rank records the start and the end of its steps. If
//! `ZERNEL_TRUTH` names a folder, each rank also writes a stamp log there, which labels all of the rank's time.
//!
//! A program that uses this crate is also the program of the job. That program calls [`run_job_process`] first, which
//! returns `None` if the process is no part of a job.
//!
//! ```no_run
//! use zernel_testjob::{Bottleneck, Job, JobPlan, run_job_process};
//!
//! if let Some(code) = run_job_process() {
//!     std::process::exit(code.into());
//! }
//! let job = Job::new(JobPlan::new(Bottleneck::Gpu, 1))?;
//! assert!(job.job_command()?.status()?.success());
//! println!("{:?}", job.read_stamps(0)?);
//! # Ok::<(), std::io::Error>(())
//! ```

mod driver;
mod labels;
mod launcher;
mod loader;
mod plan;
mod rank;
mod storage;
mod sys;
mod torch;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use serde::{Deserialize, Serialize};
use zernel_softgpu::config;
use zernel_softgpu::install::{Prologue, install_libraries};

pub use plan::{Bottleneck, JobPlan, LoadMethod, SlowRank, SlownessCause};

/// The variable with the folder of the job that this process is part of.
const DIRECTORY_VARIABLE: &str = "ZERNEL_TESTJOB_DIRECTORY";
/// The variable with the number of the rank that this process is; not set in the launcher.
const RANK_VARIABLE: &str = "ZERNEL_TESTJOB_RANK";

/// A job that can be started: its plan, in a temporary folder with the software GPU's libraries.
#[derive(Debug)]
pub struct Job {
    directory: tempfile::TempDir,
    plan: JobPlan,
}

impl Job {
    /// Creates the folder of a job: installs the software GPU in it and writes the plan.
    pub fn new(plan: JobPlan) -> io::Result<Self> {
        let directory = tempfile::tempdir()?;
        install_libraries(&directory.path().join("lib"), Prologue::Push)?;
        torch::install_torch_library(&directory.path().join("lib"))?;
        fs::write(directory.path().join("plan"), serde_json::to_vec(&plan)?)?;
        Ok(Self { directory, plan })
    }

    /// The plan of the job.
    #[must_use]
    pub fn plan(&self) -> &JobPlan {
        &self.plan
    }

    /// The path of a library of the job's software GPU, such as `libcuda.so.1`.
    #[must_use]
    pub fn library_path(&self, name: &str) -> PathBuf {
        self.directory.path().join("lib").join(name)
    }

    /// The command that starts the job by running this program again.
    pub fn job_command(&self) -> io::Result<Command> {
        let mut command = Command::new(env::current_exe()?);
        self.set_job_environment(&mut command);
        Ok(command)
    }

    /// Sets the environment variables that make `command`, which starts this program, the launcher of the job.
    pub fn set_job_environment(&self, command: &mut Command) {
        let path = self.directory.path();
        command
            .env(DIRECTORY_VARIABLE, path)
            .env_remove(RANK_VARIABLE)
            .env(config::DIRECTORY_VARIABLE, path.join("node"))
            .env(config::DEVICES_VARIABLE, self.plan.ranks.to_string())
            .env(
                config::NCCL_BANDWIDTH_VARIABLE,
                self.plan.link_bytes_per_second.to_string(),
            );
    }

    /// Sets the variables of [`Self::set_job_environment`], and gives all processes of the job priority over other
    /// processes on this machine.
    pub fn set_job_environment_with_priority(&self, command: &mut Command) {
        self.set_job_environment(command);
        sys::prioritize_job_command(command);
    }

    /// Reads the stamps of a rank that has exited.
    pub fn read_stamps(&self, rank: u32) -> io::Result<Vec<PartStamp>> {
        let noted = fs::read(stamps_path(self.directory.path(), rank))?;
        Ok(serde_json::from_slice(&noted)?)
    }
}

fn stamps_path(directory: &Path, rank: u32) -> PathBuf {
    directory.join(format!("stamps-{rank}"))
}

/// The start and the end of one part of a rank's work, on `CLOCK_MONOTONIC`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartStamp {
    /// Which part of the training loop it was.
    pub part: JobPart,
    /// Start of the part in nanoseconds, before the rank asked for its batch.
    pub start_ns: u64,
    /// End of the part in nanoseconds, after the last call of the rank.
    pub end_ns: u64,
}

/// Parts of a training loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobPart {
    /// A step at the start, which takes longer than later ones.
    WarmUp,
    /// An optimizer step, with all of its micro-batches.
    Step,
    /// An evaluation: forward passes only.
    Evaluation,
    /// A checkpoint: the model is copied to the host and written to a file.
    Checkpoint,
    /// The part of a step in which the rank waits for a batch.
    Data,
    /// The part of a step in which the rank updates the model.
    Update,
}

/// Runs the part of a job that the environment gives this process, and returns the exit code; `None` if this process is
/// no part of a job.
#[must_use]
pub fn run_job_process() -> Option<u8> {
    let directory = PathBuf::from(env::var_os(DIRECTORY_VARIABLE)?);
    let done = match env::var(RANK_VARIABLE) {
        Ok(rank) => run_rank_process(&directory, &rank),
        Err(_) => launcher::launch_job(&directory),
    };
    if let Err(error) = &done {
        eprintln!("the job in {}: {error}", directory.display());
    }
    Some(u8::from(done.is_err()))
}

fn read_plan(directory: &Path) -> io::Result<JobPlan> {
    Ok(serde_json::from_slice(&fs::read(directory.join("plan"))?)?)
}

fn run_rank_process(directory: &Path, rank: &str) -> io::Result<()> {
    let rank = rank.parse().map_err(io::Error::other)?;
    let plan = read_plan(directory)?.for_rank(rank);
    let stamps = rank::train_rank(directory, &plan, rank)?;
    fs::write(stamps_path(directory, rank), serde_json::to_vec(&stamps)?)
}
