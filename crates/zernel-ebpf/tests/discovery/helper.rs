//! The process that is discovered: this test program again, which runs commands from its stdin.

use std::env;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::thread;

use libloading::Library;

/// The argument that makes this program a helper.
pub(crate) const HELPER_ARGUMENT: &str = "be-the-helper";

/// More than the events that fit into the ring buffer.
const LOADS_IN_A_LOOP: usize = 5000;

/// A helper under control.
pub(crate) struct Helper {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Helper {
    pub(crate) fn spawn() -> Self {
        Self::spawn_with(&mut Self::command())
    }

    /// The command that runs a helper.
    pub(crate) fn command() -> Command {
        let mut command = Command::new(env::current_exe().unwrap());
        command.arg(HELPER_ARGUMENT);
        command
    }

    /// Runs a command that execs a helper; returns when the helper runs.
    pub(crate) fn spawn_with(command: &mut Command) -> Self {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut helper = Self {
            child,
            stdin,
            stdout,
        };
        helper.expect_done();
        helper
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Makes the helper map a library.
    pub(crate) fn load(&mut self, library: &Path) {
        self.run(&format!("load {}", library.display()));
    }

    /// Sends a command and waits until the helper has run it.
    pub(crate) fn run(&mut self, order: &str) {
        self.send_order(order);
        self.expect_done();
    }

    /// Sends a command without waiting for its end.
    pub(crate) fn send_order(&mut self, order: &str) {
        writeln!(self.stdin, "{order}").unwrap();
    }

    fn expect_done(&mut self) {
        let mut answer = String::new();
        self.stdout.read_line(&mut answer).unwrap();
        assert_eq!(answer, "done\n", "the helper failed");
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The helper's side.
pub(crate) fn main() -> ExitCode {
    report_done();
    for order in io::stdin().lock().lines() {
        let order = order.unwrap();
        match order.split_once(' ') {
            Some(("load", path)) => std::mem::forget(load(path)),
            Some(("load-and-unload", path)) => (0..LOADS_IN_A_LOOP).for_each(|_| drop(load(path))),
            _ => run_order(&order),
        }
        report_done();
    }
    ExitCode::SUCCESS
}

fn report_done() {
    println!("done");
}

fn load(path: &str) -> Library {
    // SAFETY: the libraries that tests name do nothing when they are loaded.
    unsafe { Library::new(path) }.unwrap()
}

fn run_order(order: &str) {
    match order {
        "fork" => fork_waiting_child(),
        "execute" => exec_sleep(),
        "execute-in-a-thread" => thread::spawn(exec_sleep).join().unwrap(),
        "end-a-thread" => thread::spawn(|| ()).join().unwrap(),
        "lose-the-leader" => exit_first_thread(),
        _ => panic!("what is {order}?"),
    }
}

fn exec_sleep() {
    let error = Command::new("sleep").arg("1000").exec();
    panic!("sleep does not run: {error}");
}

/// The child lives as long as the helper does.
fn fork_waiting_child() {
    let parent = std::process::id();
    // SAFETY: this program has one thread.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "{}", io::Error::last_os_error());
    if pid > 0 {
        return;
    }
    // SAFETY: a system call whose arguments are plain numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // If the helper has already died, the kernel sends no signal.
    while std::os::unix::process::parent_id() == parent {
        thread::park();
    }
    std::process::exit(0);
}

/// Ends this thread but not the process.
fn exit_first_thread() {
    thread::spawn(|| {
        loop {
            thread::park();
        }
    });
    report_done();
    // SAFETY: ends this thread alone; nothing that it owns is used by the other one.
    unsafe {
        libc::syscall(libc::SYS_exit, 0);
    }
}
