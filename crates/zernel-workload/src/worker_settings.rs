//! The settings of a worker, applied by the worker itself before it is ready.
//!
//! A setting that the kernel refuses does not end the worker: the worker's report names the setting and the error.

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

/// A setting that the kernel may refuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(usize)]
pub enum Setting {
    /// The NUMA memory policy of the worker.
    MemoryPolicy,
    /// The CPUs that the worker may use.
    Affinity,
    /// The scheduling policy of the worker.
    Policy,
    /// The nice value of the worker.
    Nice,
    /// The name of the worker's thread.
    Comm,
    /// The group id of the worker.
    Gid,
    /// The user id of the worker.
    Uid,
}

impl Setting {
    /// All settings, in the order in which they are applied: settings that need privilege come before the user id
    /// changes.
    pub const ALL: [Self; 7] = [
        Self::MemoryPolicy,
        Self::Affinity,
        Self::Policy,
        Self::Nice,
        Self::Comm,
        Self::Gid,
        Self::Uid,
    ];

    /// The name of the field in a workload file that asks for this setting.
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

/// The settings that each worker of a group applies to itself. They are known before the first worker exists.
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
    /// Applies all settings to the calling thread, which is worker `index` of the group, and records the errors of
    /// refused ones. Fork safe.
    pub(crate) fn apply_to_thread(&self, index: usize, record: &WorkerRecord) {
        for setting in Setting::ALL {
            if let Err(errno) = self.apply_setting(setting, index) {
                record.setting_errnos[setting as usize].store(errno.raw_os_error(), Relaxed);
            }
        }
    }

    fn apply_setting(&self, setting: Setting, index: usize) -> Result<(), Errno> {
        match setting {
            Setting::MemoryPolicy => self.memory_policy.as_ref().map_or(Ok(()), |policy| {
                let (mode, nodes) = policy.mode_and_nodes();
                sched::set_memory_policy(mode, nodes)
            }),
            Setting::Affinity => self
                .affinity
                .of_worker(index)
                .map_or(Ok(()), |cpus| sched_setaffinity(None, &cpu_mask(cpus))),
            // The new policy keeps the nice value. So if the kernel refuses, the report names the setting that was
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

/// Changes the user id of the calling thread only, by the bare system call: libc's function changes every thread. Fork
/// safe.
pub(crate) fn set_uid(uid: u32) -> Result<(), Errno> {
    let uid = Uid::from_raw(uid);
    set_thread_res_uid(uid, uid, uid)
}
