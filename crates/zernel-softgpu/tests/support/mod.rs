//! Shared code of the end-to-end tests: fresh processes, and the libraries as C programs see them.
//!
//! The libraries keep state per process and read the environment once, so each test runs in processes of its own: the
//! test program starts itself again, and an environment variable gives the new process its role.

#![allow(dead_code)] // each test program uses its own part

pub(crate) mod libraries;
pub(crate) mod ranks;

use std::fmt::Display;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::{env, fs};

use zernel_softgpu::config;
use zernel_softgpu::install::{Prologue, install_libraries};
use zernel_testkit::eventually;

const ROLE_VARIABLE: &str = "SOFTGPU_TEST_ROLE";
const DIRECTORY_VARIABLE: &str = "SOFTGPU_TEST_DIRECTORY";

/// The directory of one test: the installed libraries, the node's state, and files that the test's processes exchange.
/// Removed on drop.
pub(crate) struct Stage {
    test: &'static str,
    path: PathBuf,
    environment: Vec<(String, String)>,
}

impl Stage {
    /// Creates a stage for the test function called `test`.
    pub(crate) fn new(test: &'static str) -> Self {
        Self::with_prologue(test, Prologue::Push)
    }

    /// Creates a stage whose libraries have another prologue.
    pub(crate) fn with_prologue(test: &'static str, prologue: Prologue) -> Self {
        let name = format!("{test}-{}-{}", prologue.name(), std::process::id());
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        install_libraries(&path.join("lib"), prologue)
            .expect("the libraries are built with the tests");
        Self {
            test,
            path,
            environment: Vec::new(),
        }
    }

    /// Sets an environment variable for the processes of this stage.
    pub(crate) fn set_variable(mut self, variable: &str, value: impl Display + Copy) -> Self {
        self.environment.push((variable.into(), value.to_string()));
        self
    }

    /// Lets the processes of this stage write a truth log in [`Self::log_path`].
    pub(crate) fn with_truth_log(self) -> Self {
        let log = self.log_path().display().to_string();
        self.set_variable(config::LOG_VARIABLE, log.as_str())
    }

    /// The directory of the truth log.
    pub(crate) fn log_path(&self) -> PathBuf {
        self.path.join("log")
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Starts this test again as a process in `role`.
    pub(crate) fn start(&self, role: &str) -> RoleProcess {
        let output = self.path.join(format!("output-{role}"));
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", self.test, "--nocapture", "--test-threads=1"])
            .env(ROLE_VARIABLE, role)
            .env(DIRECTORY_VARIABLE, &self.path)
            .env(config::DIRECTORY_VARIABLE, self.path.join("node"))
            .envs(self.environment.iter().cloned())
            .stdout(fs::File::create(&output).unwrap())
            .spawn()
            .unwrap();
        RoleProcess {
            child,
            role: role.into(),
            output,
        }
    }

    /// Starts processes in roles `0` to `count - 1`, and waits until all have succeeded.
    pub(crate) fn run_roles(&self, count: usize) {
        let actors: Vec<RoleProcess> = (0..count)
            .map(|rank| self.start(&rank.to_string()))
            .collect();
        actors.into_iter().for_each(RoleProcess::expect_success);
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// A process that a test started in a role. It is killed on drop.
pub(crate) struct RoleProcess {
    child: Child,
    role: String,
    output: PathBuf,
}

impl RoleProcess {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn expect_success(mut self) {
        let status = self.child.wait().unwrap();
        assert!(
            status.success(),
            "process in role {} failed: {status}",
            self.role
        );
        // With a misspelled test name the child would run no test and succeed.
        let output = fs::read_to_string(&self.output).unwrap();
        assert!(
            output.contains("1 passed"),
            "process in role {} ran no test",
            self.role
        );
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for RoleProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The role of this process; `None` in the process of the test itself.
pub(crate) fn role_of_process() -> Option<String> {
    env::var(ROLE_VARIABLE).ok()
}

/// Execs the test program in another role, in the same process. Returns only if that fails.
pub(crate) fn exec_in_role(role: &str) -> std::io::Error {
    let arguments = env::args_os().skip(1);
    Command::new(env::current_exe().unwrap())
        .args(arguments)
        .env(ROLE_VARIABLE, role)
        .exec()
}

/// The directory of the stage, for a process in a role.
pub(crate) fn stage_path() -> PathBuf {
    env::var_os(DIRECTORY_VARIABLE)
        .expect("only in a child")
        .into()
}

/// Runs `body` in a fresh process with a stage of its own.
pub(crate) fn run_in_fresh_process(test: &'static str, body: fn()) {
    match role_of_process() {
        Some(_) => body(),
        None => Stage::new(test).run_roles(1),
    }
}

/// Writes `content` to a file of the stage, atomically.
pub(crate) fn publish_file(name: &str, content: &[u8]) {
    let path = stage_path().join(name);
    let temporary = path.with_extension("new");
    fs::write(&temporary, content).unwrap();
    fs::rename(temporary, path).unwrap();
}

/// Waits until another process has published a file in the stage, and reads it.
pub(crate) fn wait_for_file(name: &str) -> Vec<u8> {
    let path = stage_path().join(name);
    eventually(name, || path.exists());
    fs::read(path).unwrap()
}

/// Runs `body` in a forked child and returns its result. `body` may call only the software GPU's libraries: after the
/// fork of a process with threads, other locks may be held.
pub(crate) fn in_forked_child(body: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child calls `body`, which calls only those libraries, and `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let status = i32::from(!body());
        // SAFETY: leaves the child without running the parent's destructors.
        unsafe { libc::_exit(status) };
    }
    let mut status = -1;
    // SAFETY: waits for the child that was forked above.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    status == 0
}
