//! Reads the task states that an observer has pinned, as a scheduler does.

use std::os::fd::AsRawFd;
use std::path::Path;

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use rustix::fs::OFlags;
use rustix::process::{Pid, PidfdFlags};
use zernel_phase::shared::{
    HEART_OBSERVER, HEARTBEAT_PIN, Heartbeat, RawTaskState, TASKS_PIN, layout_hash,
};
use zerocopy::FromBytes;

use crate::capability::innermost_reason;
use crate::observer::monotonic_ns;

/// Why task states cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TaskReadError {
    /// A map is not pinned, or has another layout.
    #[error(
        "no task states of this version are pinned at {path} ({cause}); start `zernel observe` as root"
    )]
    NotPinned {
        /// Path of the pin.
        path: String,
        /// What the kernel answered.
        cause: String,
    },
    /// A map cannot be read.
    #[error("the task states cannot be read ({})", innermost_reason(.0))]
    Read(#[from] libbpf_rs::Error),
}

/// The pinned maps of an observer.
#[derive(Debug)]
pub struct TaskReader {
    tasks: MapHandle,
    hearts: MapHandle,
}

impl TaskReader {
    /// Opens the maps in a directory.
    pub fn open(directory: &Path) -> Result<Self, TaskReadError> {
        let open = |name: &str| {
            let path = directory.join(name);
            MapHandle::from_pinned_path(&path).map_err(|error| TaskReadError::NotPinned {
                path: path.display().to_string(),
                cause: innermost_reason(&error),
            })
        };
        Ok(Self {
            tasks: open(&format!("{TASKS_PIN}{:08x}", layout_hash()))?,
            hearts: open(HEARTBEAT_PIN)?,
        })
    }

    /// Whether an observer writes the states now. Otherwise they are stale.
    pub fn is_observed(&self) -> Result<bool, TaskReadError> {
        let key = HEART_OBSERVER.to_ne_bytes();
        let value = self.hearts.lookup(&key, MapFlags::ANY)?;
        let heart = value.and_then(|value| Heartbeat::read_from_bytes(&value).ok());
        Ok(heart.is_some_and(|heart| heart.is_alive(Self::now_ns())))
    }

    /// The state of a thread; `None` if it belongs to no ML process, or has exited.
    pub fn state_of(&self, tid: u32) -> Result<Option<RawTaskState>, TaskReadError> {
        Ok(state_in_map(&self.tasks, tid)?)
    }

    /// The current time, by the clock of the task states.
    #[must_use]
    pub fn now_ns() -> u64 {
        monotonic_ns()
    }
}

/// The state of a thread in a map of task states.
pub(crate) fn state_in_map(tasks: &MapHandle, tid: u32) -> libbpf_rs::Result<Option<RawTaskState>> {
    // PIDFD_THREAD: since Linux 6.9, threads other than the leader have pidfds.
    const PIDFD_OF_THREAD: PidfdFlags = PidfdFlags::from_bits_retain(OFlags::EXCL.bits());
    let Some(pid) = i32::try_from(tid).ok().and_then(Pid::from_raw) else {
        return Ok(None);
    };
    let open = |flags| rustix::process::pidfd_open(pid, flags);
    let thread = open(PIDFD_OF_THREAD).or_else(|_| open(PidfdFlags::empty()));
    let Ok(thread) = thread else { return Ok(None) };
    let key = thread.as_raw_fd().to_ne_bytes();
    let state = tasks.lookup(&key, MapFlags::ANY)?;
    Ok(state.and_then(|state| RawTaskState::read_from_bytes(&state).ok()))
}
