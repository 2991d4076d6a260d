//! A `zernel observe` process that observes the targets of a stage, and its HTTP responses. The daemon serves on free
//! ports and its own socket, counts every call, and is killed when its test ends.

use std::collections::BTreeSet;
use std::fmt::{self, Display, Formatter};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use libbpf_rs::query::{LinkInfoIter, ProgInfoIter};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::target::Stage;
use crate::{eventually, eventually_ok};

/// The command `zernel observe`. The caller passes the path of the `zernel` binary, which only the tests of crate
/// `zernel` know: `zernel_command(env!("CARGO_BIN_EXE_zernel"))`.
pub fn zernel_command(zernel: &str) -> Command {
    let mut command = Command::new(zernel);
    command.arg("observe");
    command
}

/// A daemon that observes the libraries of a stage.
pub struct Daemon {
    child: Child,
    /// The address on which the daemon serves metrics.
    pub http: SocketAddr,
    /// The path of the daemon's unix socket.
    pub socket: PathBuf,
    stderr_after_start: JoinHandle<String>,
}

impl Daemon {
    /// Starts the `zernel` binary at this path as a daemon, with a socket in the directory of the stage.
    pub fn start(zernel: &str, stage: &Stage) -> Self {
        let socket = stage.path().join("observe.sock");
        Self::start_as(zernel_command(zernel), stage, &socket)
    }

    /// Starts `command`, which is or becomes [`zernel_command`]. Without a budget the daemon counts every call, so that
    /// tests can compare counts; the command may have an option `--budget`. HTTP needs no token, unless the command has
    /// an option `--expose` or `--token-file`.
    pub fn start_as(mut command: Command, stage: &Stage, socket: &Path) -> Self {
        let has = |command: &Command, option| command.get_args().any(|it| it == option);
        if !has(&command, "--expose") && !has(&command, "--token-file") {
            command.args(["--expose", "all"]);
        }
        if !has(&command, "--budget") {
            command.args(["--budget", "none"]);
        }
        let mut child = command
            .args(["--http", "127.0.0.1:0", "--websocket", "127.0.0.1:0"])
            .arg("--socket")
            .arg(socket)
            .arg("--library")
            .arg(stage.library_path("libcuda.so.1"))
            .arg("--library")
            .arg(stage.library_path("libnccl.so.2"))
            .stderr(Stdio::piped())
            .spawn()
            .expect("zernel runs");
        let mut errors = BufReader::new(child.stderr.take().expect("piped"));
        let http = metrics_address_in_output(&mut errors);
        let rest = thread::spawn(move || {
            let mut text = String::new();
            let _ = errors.read_to_string(&mut text);
            text
        });
        Self {
            child,
            http,
            socket: socket.to_owned(),
            stderr_after_start: rest,
        }
    }

    /// Requests a path from the daemon over HTTP.
    pub fn get(&self, path: &str) -> HttpAnswer {
        self.get_accepting(path, "*/*")
    }

    /// Requests a path from the daemon over HTTP, with an `Accept` header.
    pub fn get_accepting(&self, path: &str, accept: &str) -> HttpAnswer {
        let stream = TcpStream::connect(self.http).expect("it listens");
        request_on_stream(stream, path, accept)
    }

    /// Requests a path from the daemon over HTTP, with a token.
    pub fn get_with_token(&self, path: &str, token: &str) -> HttpAnswer {
        let stream = TcpStream::connect(self.http).expect("it listens");
        let header = format!("Authorization: Bearer {token}\r\n");
        request_with_headers(stream, path, &header)
    }

    /// The daemon's metrics as text.
    pub fn metrics_text(&self) -> String {
        self.get("/metrics").body
    }

    /// Waits until the daemon's metrics contain a line.
    pub fn wait_for_metrics_line(&self, line: &str) {
        eventually_ok(line, || {
            let metrics = self.metrics_text();
            match metrics.lines().any(|exported| exported == line) {
                true => Ok(()),
                false => Err(metrics),
            }
        });
    }

    /// Sends the daemon a signal.
    pub fn send_signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
    }

    /// Waits until the daemon's response to `/healthz` begins with `status`.
    pub fn wait_for_health(&self, status: &str) -> HttpAnswer {
        eventually_ok(status, || {
            let answer = self.get("/healthz");
            match answer.head.starts_with(status) {
                true => Ok(answer),
                false => Err(answer.head),
            }
        })
    }

    /// Pid of the daemon.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The BPF programs of the daemon and their links.
    pub fn kernel_objects(&self) -> KernelObjects {
        KernelObjects::of_process(self.pid())
    }

    /// Sends a signal and waits until the daemon exits. Returns the exit status and the rest of the daemon's standard
    /// error. If the exit took longer than [`MAX_EXIT_TIME_WITHOUT_STACKS`], the text also shows where its threads waited.
    pub fn end_by_signal(mut self, signal: Signal) -> (ExitStatus, String) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
        let begin = Instant::now();
        let mut waits = String::new();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("our child") {
                break status;
            }
            if waits.is_empty() && begin.elapsed() > MAX_EXIT_TIME_WITHOUT_STACKS {
                waits = kernel_stacks(self.pid());
            }
            thread::sleep(Duration::from_millis(5));
        };
        let rest = std::mem::replace(&mut self.stderr_after_start, thread::spawn(String::new));
        (status, rest.join().expect("a reader") + &waits)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// If an exit takes longer than this, the daemon's kernel stacks are recorded.
const MAX_EXIT_TIME_WITHOUT_STACKS: Duration = Duration::from_millis(1500);

/// The kernel stacks of all threads of a process, which show where they wait.
fn kernel_stacks(pid: u32) -> String {
    let threads = fs::read_dir(format!("/proc/{pid}/task"));
    let threads = threads.into_iter().flatten().flatten();
    let stacks = threads.map(|thread| {
        let read = |file| fs::read_to_string(thread.path().join(file)).unwrap_or_default();
        format!("\n{pid} {}{}", read("comm"), read("stack"))
    });
    stacks.collect()
}

/// BPF links that should be freed and are not. Printed with the processes that have descriptors of their programs, and
/// the kernel stacks of those.
struct UnfreedLinks<'a> {
    links: usize,
    programs: &'a BTreeSet<u32>,
}

impl Display for UnfreedLinks<'_> {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} are not", self.links)?;
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        for pid in pids.filter(|pid| !bpf_program_ids_of_process(*pid).is_disjoint(self.programs)) {
            formatter.write_str(&kernel_stacks(pid))?;
        }
        Ok(())
    }
}

/// Ids of the BPF programs of which a process has descriptors.
fn bpf_program_ids_of_process(pid: u32) -> BTreeSet<u32> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fdinfo"));
    let descriptors = descriptors.into_iter().flatten().flatten();
    let texts = descriptors.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    let ids = texts.filter_map(|text| {
        let mut lines = text.lines();
        lines.find_map(|line| line.strip_prefix("prog_id:\t")?.parse().ok())
    });
    ids.collect()
}

/// Reads the address on which a daemon serves metrics from its standard error.
fn metrics_address_in_output(errors: &mut impl BufRead) -> SocketAddr {
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

/// An HTTP response.
pub struct HttpAnswer {
    /// The status line and the headers of the response.
    pub head: String,
    /// The body of the response.
    pub body: String,
}

impl HttpAnswer {
    /// The body of the response, parsed as JSON.
    pub fn body_as_json(&self) -> Value {
        serde_json::from_str(&self.body).expect("JSON")
    }
}

/// Requests a path over a connection, reads the response, and lets the server close the connection.
pub fn request_on_stream(stream: impl Read + Write, path: &str, accept: &str) -> HttpAnswer {
    request_with_headers(stream, path, &format!("Accept: {accept}\r\n"))
}

/// Requests a path over a connection, with headers. Each header ends with a line break.
fn request_with_headers(mut stream: impl Read + Write, path: &str, headers: &str) -> HttpAnswer {
    let request =
        format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("it listens");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    assert!(!head.to_lowercase().contains("chunked"), "{head}");
    HttpAnswer {
        head: head.to_owned(),
        body: body.to_owned(),
    }
}

/// The BPF programs of a process, and their links.
#[derive(Debug, Default)]
pub struct KernelObjects {
    programs: BTreeSet<u32>,
    links: usize,
}

impl KernelObjects {
    fn of_process(pid: u32) -> Self {
        let mut objects = Self {
            programs: bpf_program_ids_of_process(pid),
            links: 0,
        };
        objects.links = objects.attached_links();
        assert!(!objects.programs.is_empty() && objects.links > 0);
        objects
    }

    /// Number of links that the programs had when this value was made.
    #[must_use]
    pub fn link_count(&self) -> usize {
        self.links
    }

    /// Number of links that the programs have now. Pinned links count too, although no process needs a descriptor of
    /// them.
    #[must_use]
    pub fn attached_links(&self) -> usize {
        let links = LinkInfoIter::default();
        let links = links.filter(|link| self.programs.contains(&link.prog_id));
        links.count()
    }

    /// Waits until the kernel has freed all links of the programs, so that nothing is attached.
    pub fn wait_until_detached(&self) {
        eventually_ok("the daemon's links are freed", || {
            match self.attached_links() {
                0 => Ok(()),
                links => Err(UnfreedLinks {
                    links,
                    programs: &self.programs,
                }),
            }
        });
    }

    /// Waits until the kernel has freed all programs and all their links.
    pub fn wait_until_freed(&self) {
        eventually("the daemon's programs and links are freed", || {
            let mut programs = ProgInfoIter::default().map(|program| program.id);
            self.attached_links() == 0 && !programs.any(|id| self.programs.contains(&id))
        });
    }
}
