//! A task that moves itself between cgroups.

use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::thread::gettid;

use super::{Work, WorkTypeInfo};
use crate::clock::us_to_ns;
use crate::spec_keys::spec_table;
use crate::worker::{FailingStep, WorkFailure, Worker};

spec_table! {
    /// See [`WorkType::CgroupChurn`](super::WorkType::CgroupChurn).
    #[derive(Eq)]
    pub struct CgroupChurn {
        /// Folders of existing cgroups, at least one. A worker process moves itself by `cgroup.procs`, a worker thread
        /// by `cgroup.threads`.
        pub cgroups: Vec<PathBuf> = Vec::new(),
        shown as "required",
        /// CPU time that the worker uses in each cgroup.
        pub spin_us: u64 = 1_000,
    }
}

impl Work for CgroupChurn {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "cgroup_churn",
            does: "moves itself to each of the given cgroups in turn, computes there, and counts a unit for each cgroup",
            exercises: "cgroup attach, moving a task between group run queues and their weights",
        }
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        if self.cgroups.is_empty() {
            return Err((
                "work.cgroups",
                "no cgroup is named; name at least one folder below the cgroup mount".to_owned(),
            ));
        }
        let missing = self
            .cgroups
            .iter()
            .find(|cgroup| !cgroup.join("cgroup.procs").exists());
        missing.map_or(Ok(()), |cgroup| {
            Err((
                "work.cgroups",
                format!("`{}` is not a cgroup; create it first", cgroup.display()),
            ))
        })
    }

    fn reason_refused_in_container(&self) -> Option<&'static str> {
        Some("writing to cgroup.procs would move every sibling thread along")
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let mut turn = worker.index();
        while worker.should_do_another_round() {
            move_calling_thread(&self.cgroups[turn % self.cgroups.len()])?;
            turn += 1;
            worker.burn_cpu_ns(us_to_ns(self.spin_us));
            worker.count_round(1);
        }
        Ok(())
    }
}

/// Moves the calling thread only. A process with one thread moves itself by `cgroup.procs`, a thread among others by
/// `cgroup.threads`.
fn move_calling_thread(cgroup: &Path) -> Result<(), WorkFailure> {
    let is_alone = gettid() == rustix::process::getpid();
    let file = if is_alone {
        c"cgroup.procs"
    } else {
        c"cgroup.threads"
    };
    let folder = openat(CWD, cgroup, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let folder = folder.map_err(FailingStep::OpenCgroup.as_failure())?;
    let file = openat(
        &folder,
        file,
        OFlags::WRONLY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let file = file.map_err(FailingStep::OpenCgroup.as_failure())?;
    rustix::io::write(&file, b"0").map_err(FailingStep::MoveToCgroup.as_failure())?;
    Ok(())
}
