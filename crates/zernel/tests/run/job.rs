//! A training job on the software GPU, in a directory of its own.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use zernel_softgpu::install::{Prologue, install_libraries};
use zernel_testkit::eventually;

use crate::zernel_command;

pub(crate) struct TestJob {
    directory: tempfile::TempDir,
    ranks: u32,
}

impl TestJob {
    pub(crate) fn new(ranks: u32, duration_ms: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        install_libraries(&directory.path().join("lib"), Prologue::Push).unwrap();
        let job = Self { directory, ranks };
        let driver = job.library_path("libcuda.so.1");
        let spec = format!(
            "duration_ms = {duration_ms}
            [[group]]
            name = 'training'
            workers = {}
            [group.work.ml_training]
            ranks = {ranks}
            loaders = 1
            batch_kib = 64
            decode_us = 2000
            copy_kib = 64
            launches = 20
            gpu_us = 4000
            gradient_kib = 256
            optimizer_us = 500
            gpu = {{ driver = {driver:?} }}
            ",
            2 * ranks
        );
        fs::write(job.spec_path(), spec).unwrap();
        job
    }

    pub(crate) fn directory(&self) -> &std::path::Path {
        self.directory.path()
    }

    pub(crate) fn spec_path(&self) -> PathBuf {
        self.directory.path().join("spec.toml")
    }

    /// The name of the job. It is unique.
    pub(crate) fn name(&self) -> String {
        let name = self.directory.path().file_name().unwrap();
        name.to_str().unwrap().trim_start_matches('.').to_owned()
    }

    pub(crate) fn library_path(&self, name: &str) -> PathBuf {
        self.directory.path().join("lib").join(name)
    }

    pub(crate) fn start(&self) -> RunningChild {
        let command = zernel_command()
            .args(["workload", "run"])
            .arg(self.spec_path())
            .env("TORCHELASTIC_RUN_ID", self.name())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        RunningChild(command.unwrap())
    }

    /// The processes of the job that map NCCL.
    pub(crate) fn trainer_pids(&self) -> Vec<i32> {
        let library = self.library_path("libnccl.so.2").canonicalize().unwrap();
        let maps_it = |process: &procfs::process::Process| {
            let maps = process.maps().ok();
            maps.is_some_and(|maps| {
                let mut paths = maps.iter().map(|map| &map.pathname);
                paths.any(|path| matches!(path, procfs::process::MMapPath::Path(path) if *path == library))
            })
        };
        let processes = procfs::process::all_processes().unwrap();
        let trainers = processes.filter_map(Result::ok).filter(maps_it);
        trainers.map(|process| process.pid).collect()
    }

    pub(crate) fn wait_until_it_trains(&self) {
        eventually("all ranks train", || {
            self.trainer_pids().len() == self.ranks as usize
        });
    }
}

/// A running job or daemon, which ends with the test.
pub(crate) struct RunningChild(pub(crate) Child);

impl RunningChild {
    pub(crate) fn stop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.0), Signal::INT);
        let _ = self.0.wait();
    }
}

impl Drop for RunningChild {
    /// Ends the job as a user would, so that no file is left behind. Kills the job if it does not end.
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.0), Signal::INT);
        let limit = Instant::now() + Duration::from_secs(10);
        while Instant::now() < limit && matches!(self.0.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(20));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
