//! How a worker ended that did not return from its work function in time.

use std::fmt;
use std::io;
use std::sync::atomic::Ordering::Relaxed;

use serde::{Deserialize, Serialize};

use crate::shared_state::WorkerRecord;
use crate::worker::FailingStep;

/// How a worker ended, unless it returned from its work function when it should.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "how")]
#[non_exhaustive]
pub enum WorkerExitInfo {
    /// The worker's process exited by itself.
    Exited {
        /// The exit code of the worker's process.
        code: i32,
    },
    /// A signal ended the worker's process. A panic in a forked worker ends its process by `SIGABRT`.
    Signaled {
        /// The number of the signal.
        signal: i32,
        /// Whether a core dump was written.
        core_dumped: bool,
    },
    /// The worker did not stop in time, and the handle killed it.
    TimedOutKilled,
    /// The worker was killed, possibly by the kernel's OOM killer: the machine's count of OOM kills has risen since the
    /// handle was created or since the last killed worker. A worker killed by hand looks the same if the OOM killer
    /// killed any process meanwhile, unless the worker's own cgroup (version 2) counts no OOM kill.
    OomKilled,
    /// The worker's thread panicked.
    Panicked,
    /// The work function gave up because a system call failed.
    Failed {
        /// The step of the work that failed.
        step: String,
        /// The kernel's error.
        error: String,
    },
    /// The worker's thread did not stop in time and was left behind. It keeps the memory that it uses, and ends when
    /// its work function returns.
    LeftBehind,
    /// The worker was killed, but is stuck in the kernel. It is reaped in the background.
    NotReaped,
    /// The worker exited, but other code in the calling process reaped it and took its exit status.
    StatusLost,
    /// The worker's record in shared memory is invalid.
    Corrupt,
}

impl WorkerExitInfo {
    pub(crate) fn from_failed_record(record: &WorkerRecord) -> Self {
        let step = record.failed_step.load(Relaxed);
        let code = record.failed_errno.load(Relaxed);
        let name = FailingStep::STEP_DESCRIPTIONS
            .get(step as usize)
            .unwrap_or(&"go on");
        let error = match step {
            step if step == FailingStep::UseGpu as u32 => format!("CUDA error {code}"),
            step if step == FailingStep::UseNccl as u32 => format!("NCCL error {code}"),
            _ => io::Error::from_raw_os_error(code).to_string(),
        };
        Self::Failed {
            step: (*name).to_owned(),
            error,
        }
    }
}

impl fmt::Display for WorkerExitInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited { code } => write!(f, "exited with code {code}"),
            Self::Signaled {
                signal,
                core_dumped,
            } => {
                let core = if *core_dumped { ", core dumped" } else { "" };
                write!(f, "ended by signal {signal}{core}")
            }
            Self::TimedOutKilled => f.write_str("did not stop and was killed by us"),
            Self::OomKilled => f.write_str("killed, possibly for want of memory"),
            Self::Panicked => f.write_str("panicked"),
            Self::Failed { step, error } => write!(f, "could not {step}: {error}"),
            Self::LeftBehind => f.write_str("did not stop and was left behind"),
            Self::NotReaped => f.write_str("killed, but stuck in the kernel"),
            Self::StatusLost => f.write_str("exited; its status was taken by another wait"),
            Self::Corrupt => f.write_str("left an invalid record in shared memory"),
        }
    }
}
