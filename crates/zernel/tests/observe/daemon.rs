//! `zernel observe` as a child, and what it answers.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use libbpf_rs::query::{LinkInfoIter, ProgInfoIter};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::target::Stage;

/// What runs `zernel observe`.
pub(crate) fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_zernel"));
    command.arg("observe");
    command
}

/// Runs it until it ends by itself.
pub(crate) fn output(arguments: &[&dyn AsRef<OsStr>]) -> Output {
    let mut command = command();
    for argument in arguments {
        command.arg(argument);
    }
    command.output().expect("zernel runs")
}

/// A daemon that observes the libraries of a stage.
pub(crate) struct Daemon {
    child: Child,
    pub(crate) http: SocketAddr,
    pub(crate) socket: PathBuf,
    rest: JoinHandle<String>,
}

impl Daemon {
    pub(crate) fn start(stage: &Stage) -> Self {
        Self::start_at(stage, &stage.path().join("observe.sock"))
    }

    pub(crate) fn start_at(stage: &Stage, socket: &Path) -> Self {
        Self::start_as(command(), stage, socket)
    }

    /// Runs it by a command of one's own. Counts everything, so that numbers can be compared.
    pub(crate) fn start_as(mut command: Command, stage: &Stage, socket: &Path) -> Self {
        let mut child = command
            .args(["--http", "127.0.0.1:0", "--websocket", "127.0.0.1:0"])
            .args(["--budget", "none", "--socket"])
            .arg(socket)
            .arg("--library")
            .arg(stage.library("libcuda.so.1"))
            .arg("--library")
            .arg(stage.library("libnccl.so.2"))
            .stderr(Stdio::piped())
            .spawn()
            .expect("zernel runs");
        let mut errors = BufReader::new(child.stderr.take().expect("piped"));
        let http = announced(&mut errors);
        let rest = thread::spawn(move || {
            let mut text = String::new();
            let _ = errors.read_to_string(&mut text);
            text
        });
        Self {
            child,
            http,
            socket: socket.to_owned(),
            rest,
        }
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.get_as(path, "*/*")
    }

    pub(crate) fn get_as(&self, path: &str, accept: &str) -> Answer {
        let stream = TcpStream::connect(self.http).expect("it listens");
        ask(stream, path, accept)
    }

    pub(crate) fn metrics(&self) -> String {
        self.get("/metrics").body
    }

    /// Waits until metrics have a line.
    pub(crate) fn wait_for(&self, line: &str) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !self.metrics().lines().any(|told| told == line) {
            assert!(
                Instant::now() < deadline,
                "never told: {line}\n{}",
                self.metrics()
            );
            thread::sleep(Duration::from_millis(50));
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
    }

    /// Waits until its health has a status.
    pub(crate) fn wait_for_health(&self, status: &str) -> Answer {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let answer = self.get("/healthz");
            if answer.head.starts_with(status) {
                return answer;
            }
            assert!(Instant::now() < deadline, "{}", answer.head);
            thread::sleep(Duration::from_millis(50));
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kernel_objects(&self) -> KernelObjects {
        KernelObjects::of(self.pid())
    }

    /// Sends a signal and waits for the end; also tells what it said last.
    pub(crate) fn end(mut self, signal: Signal) -> (ExitStatus, String) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
        let status = self.child.wait().expect("our child");
        let rest = std::mem::replace(&mut self.rest, thread::spawn(String::new));
        (status, rest.join().expect("a reader"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The address that a daemon says it serves metrics on.
fn announced(errors: &mut impl BufRead) -> SocketAddr {
    let mut all = String::new();
    loop {
        let mut line = String::new();
        let read = errors.read_line(&mut line).expect("text");
        assert!(read > 0, "it ended: {all}");
        if let Some(address) = line.strip_prefix("metrics on http://") {
            let (address, _) = address.split_once('/').expect("a URL");
            return address.parse().expect("an address");
        }
        all += &line;
    }
}

/// An answer to a request.
pub(crate) struct Answer {
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).expect("JSON")
    }
}

/// Asks over a connection, which is used up.
pub(crate) fn ask(mut stream: impl Read + Write, path: &str, accept: &str) -> Answer {
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).expect("it listens");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    assert!(!head.to_lowercase().contains("chunked"), "{head}");
    Answer {
        head: head.to_owned(),
        body: body.to_owned(),
    }
}

/// The programs and links that a process holds.
#[derive(Debug, Default)]
pub(crate) struct KernelObjects {
    programs: BTreeSet<u32>,
    links: BTreeSet<u32>,
}

impl KernelObjects {
    fn of(pid: u32) -> Self {
        let mut objects = Self::default();
        for entry in fs::read_dir(format!("/proc/{pid}/fdinfo")).expect("it runs") {
            let text = fs::read_to_string(entry.expect("an entry").path()).unwrap_or_default();
            for line in text.lines() {
                let (set, number) = match line.split_once(":\t") {
                    Some(("prog_id", number)) => (&mut objects.programs, number),
                    Some(("link_id", number)) => (&mut objects.links, number),
                    _ => continue,
                };
                set.insert(number.parse().expect("a number"));
            }
        }
        assert!(!objects.programs.is_empty() && !objects.links.is_empty());
        objects
    }

    /// Waits until the kernel has let go of all of them.
    pub(crate) fn wait_until_gone(&self) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let programs = ProgInfoIter::default().map(|program| program.id);
            let links = LinkInfoIter::default().map(|link| link.id);
            let stayed = programs.filter(|id| self.programs.contains(id)).count()
                + links.filter(|id| self.links.contains(id)).count();
            if stayed == 0 {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{stayed} programs and links stay"
            );
            thread::sleep(Duration::from_millis(50));
        }
    }
}
