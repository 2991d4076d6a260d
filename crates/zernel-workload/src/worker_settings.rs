//! The settings of a worker, applied by the worker itself before it is ready.
//!
//! A setting that the kernel refuses does not end the worker: its report names the setting and the
//! error.

use std::ffi::CString;
use std::sync::atomic::Ordering::Relaxed;

use rustix::io::Errno;
use rustix::process::{Gid, Uid, setpriority_process};
use rustix::thread::{
    sched_setaffinity, set_name, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use serde::{Deserialize, Serialize};

use crate::affinity::Affinity;
use crate::policy::{MemoryPolicy, SchedPolicy};
use crate::shared_state::WorkerRecord;
use crate::sys::sched;
use crate::workload_plan::cpu_mask;

/// A setting that may be refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(usize)]
pub enum Setting {
    /// The memory policy.
    MemoryPolicy,
    /// The CPUs.
    Affinity,
    /// The scheduling policy.
    Policy,
    /// The nice value.
    Nice,
    /// The thread's name.
    Comm,
    /// The group id.
    Gid,
    /// The user id.
    Uid,
}

impl Setting {
    /// Every setting, in the order they are applied: what needs privilege comes before the change
    /// of identity.
    pub const ALL: [Self; 7] = [
        Self::MemoryPolicy,
        Self::Affinity,
        Self::Policy,
        Self::Nice,
        Self::Comm,
        Self::Gid,
        Self::Uid,
    ];

    /// The name of the field that asks for it.
    #[must_use]
    pub fn field(self) -> &'static str {
        match self {
            Self::MemoryPolicy => "memory_policy",
            Self::Affinity => "affinity",
            Self::Policy => "policy",
            Self::Nice => "nice",
            Self::Comm => "comm",
            Self::Gid => "gid",
            Self::Uid => "uid",
        }
    }
}

/// The settings that the workers of a group apply to themselves. Complete before any worker exists.
#[derive(Debug, Clone, Default)]
pub(crate) struct Settings {
    pub(crate) memory_policy: Option<MemoryPolicy>,
    pub(crate) affinity: Affinity,
    pub(crate) policy: Option<SchedPolicy>,
    pub(crate) nice: Option<i32>,
    pub(crate) comm: Option<CString>,
    pub(crate) gid: Option<u32>,
    pub(crate) uid: Option<u32>,
}

impl Settings {
    /// Applies all settings to the calling thread, which is the group's worker `index`, and records
    /// refusals. Fork safe.
    pub(crate) fn apply_to_thread(&self, index: usize, record: &WorkerRecord) {
        for setting in Setting::ALL {
            if let Err(errno) = self.apply_one(setting, index) {
                record.setting_errno[setting as usize].store(errno.raw_os_error(), Relaxed);
            }
        }
    }

    fn apply_one(&self, setting: Setting, index: usize) -> Result<(), Errno> {
        match setting {
            Setting::MemoryPolicy => self.memory_policy.as_ref().map_or(Ok(()), |policy| {
                let (mode, nodes) = policy.mode_and_nodes();
                sched::set_memory_policy(mode, nodes)
            }),
            Setting::Affinity => self
                .affinity
                .of_worker(index)
                .map_or(Ok(()), |cpus| sched_setaffinity(None, &cpu_mask(cpus))),
            // The nice value is left as it is here, so that a refusal names the setting that was
            // refused.
            Setting::Policy => self.policy.as_ref().map_or(Ok(()), |policy| {
                let nice = sched::read_sched_attributes(0).map_or(0, |attributes| attributes.nice);
                sched::set_sched_attributes(0, policy.to_sched_attributes(nice))
            }),
            Setting::Nice => self
                .nice
                .map_or(Ok(()), |nice| setpriority_process(None, nice)),
            Setting::Comm => self.comm.as_ref().map_or(Ok(()), |comm| set_name(comm)),
            Setting::Gid => self.gid.map_or(Ok(()), set_gid),
            Setting::Uid => self.uid.map_or(Ok(()), set_uid),
        }
    }
}

/// Changes the group id of the calling thread only, and keeps its supplementary groups. Fork safe.
pub(crate) fn set_gid(gid: u32) -> Result<(), Errno> {
    let gid = Gid::from_raw(gid);
    set_thread_groups(&[gid])?;
    set_thread_res_gid(gid, gid, gid)
}

/// Changes the user id of the calling thread only. It uses the bare system call, because libc's function
/// changes every thread. Fork safe.
pub(crate) fn set_uid(uid: u32) -> Result<(), Errno> {
    let uid = Uid::from_raw(uid);
    set_thread_res_uid(uid, uid, uid)
}
