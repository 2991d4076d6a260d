//! A daemon, a well-behaved job of one user that it counts, and a second user who attacks.

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{FileExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use zernel_ebpf::probes::SYMBOLS;
use zernel_softgpu::config;
use zernel_softgpu::install::Prologue;
use zernel_softgpu::truth::TruthLog;
use zernel_testkit::daemon::{Daemon, zernel_command};
use zernel_testkit::target::{Driver, Stage, Target, end_part_and_wait};
use zernel_testkit::{StallingFs, copy_program, eventually_ok};

use crate::attackers::attacker_directory;
use crate::cpu_weights::{self, ProcessCgroup};

/// The path of `zernel`.
pub(crate) fn zernel_path() -> String {
    env::var("ZERNEL_PROGRAM").unwrap_or_else(|_| env!("CARGO_BIN_EXE_zernel").to_owned())
}

/// The user of the well-behaved job.
pub(crate) const VICTIM_UID: u32 = 54_321;
/// The user who attacks.
pub(crate) const ATTACKER_UID: u32 = 65_534;

/// Longest time in which every request must be answered. Measured times are in docs/measurements.md.
const MAX_ANSWER_TIME: Duration = Duration::from_secs(5);
/// Longest time in which 99 of 100 requests to an endpoint must be answered.
const MAX_P99_ANSWER_TIME: Duration = match cfg!(debug_assertions) {
    true => MAX_ANSWER_TIME,
    false => Duration::from_millis(200),
};
/// Longest time from SIGTERM to the exit of the daemon.
pub(crate) const MAX_EXIT_TIME: Duration = match cfg!(debug_assertions) {
    true => Duration::from_secs(10),
    false => Duration::from_secs(2),
};
/// Longest time from the exit of the daemon until nothing is attached.
pub(crate) const MAX_DETACH_TIME: Duration = Duration::from_secs(5);
/// Resident memory that the daemon never exceeds, as docs/security.md states.
pub(crate) const MAX_DAEMON_RESIDENT_BYTES: u64 = 192 << 20;

/// The role of the victim: a step each time that it is asked. A step has few enough calls that nothing is sampled, and leaves
/// memory allocated.
pub(crate) fn train_one_step_per_request(driver: &Driver, steps: u64) {
    driver.open_first_device();
    let function = driver.load_empty_kernel();
    let mut batch = driver.allocate_memory(4096);
    for _ in 0..steps {
        for _ in 0..20 {
            driver.launch_kernel(function);
        }
        driver.synchronize();
        driver.free_memory(batch);
        batch = driver.allocate_memory(4096);
        end_part_and_wait();
    }
}

/// A directory of a user.
pub(crate) fn create_directory_owned_by(user: u32, path: &Path) {
    fs::create_dir(path).expect("ours");
    chown(path, Some(user), Some(user)).expect("we are root");
    fs::set_permissions(path, Permissions::from_mode(0o755)).expect("ours");
}

/// A stage that other users can get to, with directories of the victim and of the attacker.
pub(crate) fn stage_for_all_users() -> Stage {
    let stage = Stage::with_machine_alone(Prologue::Push);
    fs::set_permissions(stage.path(), Permissions::from_mode(0o755)).expect("ours");
    create_directory_owned_by(VICTIM_UID, &stage.path().join("victim"));
    create_directory_owned_by(ATTACKER_UID, &attacker_directory(stage.path()));
    let program = env::current_exe().expect("we run");
    let copy = stage.path().join("program");
    copy_program(program, &copy);
    fs::set_permissions(&copy, Permissions::from_mode(0o755)).expect("ours");
    stage
}

/// The command that runs a role as a user, with a software GPU in a directory of the user.
pub(crate) fn command_for_role(
    stage: &Stage,
    user: u32,
    own: &Path,
    role: &str,
    rounds: u64,
) -> Command {
    let mut command = stage.target_command_of(&stage.path().join("program"), role, rounds);
    command
        .env(config::DIRECTORY_VARIABLE, own.join("node"))
        .env(config::LOG_VARIABLE, own.join("log"))
        .uid(user)
        .gid(user);
    command
}

/// A daemon that observes the libraries of the stage, and its victim.
pub(crate) struct AttackScene {
    pub(crate) daemon: Daemon,
    pub(crate) victim: Target,
    /// File systems that can stop answering. These file systems answer again before the stage is removed.
    pub(crate) files: Vec<StallingFs>,
    pub(crate) stage: Stage,
}

impl AttackScene {
    /// Starts a daemon with the budget of the service, and a victim that it counts.
    pub(crate) fn start() -> Self {
        let stage = stage_for_all_users();
        let daemon = start_daemon(&stage);
        let victim = start_victim(&stage, 10_000);
        Self {
            daemon,
            victim,
            files: Vec::new(),
            stage,
        }
    }

    /// Has the victim work for this long, while all endpoints are asked. Asserts that all answer, that the victim is counted
    /// exactly, and that the daemon stays small.
    pub(crate) fn assert_daemon_endures_attack(&mut self, attack: &str, time: Duration) {
        self.run_victim_and_query_endpoints(attack, time, assert_calls_are_exact);
    }

    /// Like [`Self::assert_daemon_endures_attack`], but the calls of the victim may be sampled.
    pub(crate) fn assert_daemon_endures_attack_sampled(&mut self, attack: &str, time: Duration) {
        self.run_victim_and_query_endpoints(attack, time, |_, _, _| {});
    }

    fn run_victim_and_query_endpoints(
        &mut self,
        attack: &str,
        time: Duration,
        check: impl FnOnce(&Daemon, &Stage, &Target),
    ) {
        let clients = EndpointPoller::start(&self.daemon);
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.victim.run_part();
            thread::sleep(Duration::from_millis(50));
        }
        check(&self.daemon, &self.stage, &self.victim);
        let answers = clients.stop();
        let peak = peak_resident_bytes(self.daemon.pid());
        crate::print_measurement(&format!(
            "{attack}: peak {} MiB resident; {}",
            peak >> 20,
            describe_answer_times(&answers)
        ));
        assert_answered_in_time(&answers);
        assert!(peak < MAX_DAEMON_RESIDENT_BYTES, "{} MiB", peak >> 20);
    }

    /// Ends the daemon by SIGTERM during the attack. Nothing stays attached. Returns the attackers and their file
    /// systems.
    pub(crate) fn stop_by_sigterm(
        self,
        attack: &str,
        attackers: &[&Target],
    ) -> (Vec<StallingFs>, Stage) {
        self.stop_by_signal(attack, Signal::TERM, attackers)
    }

    /// Ends the daemon by a signal, like [`Self::stop_by_sigterm`].
    pub(crate) fn stop_by_signal(
        self,
        attack: &str,
        signal: Signal,
        attackers: &[&Target],
    ) -> (Vec<StallingFs>, Stage) {
        let objects = self.daemon.kernel_objects();
        let begin = Instant::now();
        let (status, said) = self.daemon.end_by_signal(signal);
        let exit = begin.elapsed();
        assert!(signal == Signal::KILL || status.success(), "{said}");
        assert!(exit < MAX_EXIT_TIME, "{signal:?}: {exit:?}: {said}");
        objects.wait_until_detached();
        let targets = attackers.iter().copied().chain([&self.victim]);
        wait_until_libraries_are_unprobed(targets.map(Target::pid));
        let detached = begin.elapsed();
        assert!(
            detached - exit < MAX_DETACH_TIME,
            "{signal:?}: exit after {exit:?}, detached after {detached:?}"
        );
        crate::print_measurement(&format!(
            "{attack}: {signal:?}: exit after {exit:.2?}, {} links detached after {detached:.2?}",
            objects.link_count()
        ));
        (self.files, self.stage)
    }
}

/// Waits until the libraries that processes map have no probes: the kernel lists a link no more before it has removed its probes.
pub(crate) fn wait_until_libraries_are_unprobed(pids: impl Iterator<Item = u32>) {
    let pids: Vec<u32> = pids.collect();
    eventually_ok("no library has probes", || {
        match pids.iter().map(|pid| count_probed_libraries(*pid)).sum() {
            0 => Ok(()),
            libraries => Err(format!("{libraries} have")),
        }
    });
}

/// The number of mapped libraries whose code in memory is not that of the file. A process that is exiting maps no
/// library.
fn count_probed_libraries(pid: u32) -> usize {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let Ok(memory) = File::open(format!("/proc/{pid}/mem")) else {
        return 0;
    };
    let is_changed = |line: &&str| is_library_code_changed(&memory, line).unwrap_or(false);
    maps.lines().filter(is_changed).count()
}

/// Whether the code of a library in memory is not that of its file, by a line of `/proc/PID/maps`.
fn is_library_code_changed(memory: &File, line: &str) -> Option<bool> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let [range, "r-xp", offset, _, _, path] = fields[..] else {
        return None;
    };
    let name = Path::new(path).file_name()?.to_str()?;
    // A file system that does not answer would hold up the test.
    if !name.starts_with("libcuda.so") || path.contains("/dead/") {
        return None;
    }
    let (start, end) = range.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    let length = (number(end)? - number(start)?) as usize;
    let (mut mapped, mut original) = (vec![0; length], vec![0; length]);
    // The last page of a file is filled with zeros.
    let read = memory.read_at(&mut mapped, number(start)?).ok()?;
    let file = File::open(path).ok()?;
    let known = file.read_at(&mut original, number(offset)?).ok()?;
    let length = read.min(known);
    Some(mapped[..length] != original[..length])
}

/// Waits until the daemon shows exactly the calls that the victim made.
pub(crate) fn assert_calls_are_exact(daemon: &Daemon, stage: &Stage, victim: &Target) {
    let truth = logged_calls(stage, victim.pid());
    assert!(truth["cuLaunchKernel"] > 0);
    eventually_ok("the victim is counted exactly", || {
        let counted = counted_calls(daemon, victim.pid())?;
        match counted == truth {
            true => Ok(()),
            false => Err(format!("{counted:?} instead of {truth:?}")),
        }
    });
}

/// Starts an attack, which runs until the target is dropped.
pub(crate) fn start_attack(stage: &Stage, role: &str, rounds: u64) -> Target {
    let own = attacker_directory(stage.path());
    let mut command = command_for_role(stage, ATTACKER_UID, &own, role, rounds);
    command.env_remove(config::LOG_VARIABLE);
    let mut attacker = Target::start(&mut command);
    cpu_weights::move_process_to_cgroup(ProcessCgroup::Attacker, attacker.pid());
    attacker.run_part();
    attacker.start_part();
    attacker
}

/// Starts a daemon with the budget of the service.
pub(crate) fn start_daemon(stage: &Stage) -> Daemon {
    let mut command = zernel_command(&zernel_path());
    command.args(["--budget", "0.5%", "--state-dir"]);
    command.arg(stage.path().join("state"));
    let daemon = Daemon::start_as(command, stage, &stage.path().join("observe.sock"));
    cpu_weights::move_process_to_cgroup(ProcessCgroup::Service, daemon.pid());
    daemon
}

/// Starts the well-behaved job.
pub(crate) fn start_victim(stage: &Stage, steps: u64) -> Target {
    let own = stage.path().join("victim");
    let mut victim = Target::start(&mut command_for_role(
        stage, VICTIM_UID, &own, "trains", steps,
    ));
    cpu_weights::move_process_to_cgroup(ProcessCgroup::Victim, victim.pid());
    victim.run_part();
    victim
}

/// Calls of the victim by name, from the log of its software GPU.
pub(crate) fn logged_calls(stage: &Stage, pid: u32) -> BTreeMap<String, u64> {
    let log = TruthLog::read(&stage.path().join("victim/log")).expect("a readable log");
    let mut calls = BTreeMap::new();
    for process in log.processes.iter().filter(|process| process.pid == pid) {
        for ((_, function, _), count) in &process.returned {
            let mut symbols = SYMBOLS.iter();
            if let Some(symbol) = symbols.find(|symbol| symbol.names.contains(&&**function)) {
                *calls.entry(symbol.name().to_owned()).or_default() += count.calls;
            }
        }
    }
    calls
}

/// Calls of a process by name, as the daemon shows them.
pub(crate) fn counted_calls(daemon: &Daemon, pid: u32) -> Result<BTreeMap<String, u64>, String> {
    let body =
        request_over_http(daemon.http, "/api/v1/snapshot").map_err(|error| error.to_string())?;
    let snapshot: Value = serde_json::from_str(&body).map_err(|error| error.to_string())?;
    let mut observed = snapshot["observed"].as_array().into_iter().flatten();
    let process = observed.find(|process| process["pid"] == pid);
    let calls = process.and_then(|process| process["calls"].as_object());
    let calls = calls.ok_or("it is not observed")?;
    let count = |calls: &Value| calls["calls"].as_u64().unwrap_or(0);
    let calls = calls
        .iter()
        .map(|(name, calls)| (name.clone(), count(calls)));
    Ok(calls.filter(|(_, calls)| *calls > 0).collect())
}

/// Requests a path over HTTP, and returns the body.
pub(crate) fn request_over_http(address: SocketAddr, path: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(MAX_ANSWER_TIME))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    match answer.split_once("\r\n\r\n") {
        Some((_, body)) => Ok(body.to_owned()),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Peak of the resident memory of a process.
pub(crate) fn peak_resident_bytes(pid: u32) -> u64 {
    1024 * number_in_proc_status(pid, "VmHWM:")
}

/// Resident memory of a process.
pub(crate) fn resident_bytes(pid: u32) -> u64 {
    1024 * number_in_proc_status(pid, "VmRSS:")
}

fn number_in_proc_status(pid: u32, key: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix(key));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.expect("the kernel reports it")
}

/// How long each answer of an endpoint took.
pub(crate) type AnswerTimes = BTreeMap<&'static str, Vec<Duration>>;

/// Clients that ask every endpoint all the time.
pub(crate) struct EndpointPoller {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<AnswerTimes>,
}

impl EndpointPoller {
    /// Starts to ask.
    pub(crate) fn start(daemon: &Daemon) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (http, socket, is_over) = (daemon.http, daemon.socket.clone(), Arc::clone(&stop));
        let thread = thread::spawn(move || {
            let mut times = AnswerTimes::new();
            while !is_over.load(Ordering::Relaxed) {
                for endpoint in ["/metrics", "/healthz", "/api/v1/snapshot"] {
                    let begin = Instant::now();
                    request_over_http(http, endpoint).expect(endpoint);
                    times.entry(endpoint).or_default().push(begin.elapsed());
                }
                let begin = Instant::now();
                let is_in_time = run_ps(&socket);
                let time = begin.elapsed();
                times.entry("zernel ps").or_default().push(time);
                if !is_in_time {
                    times.entry(LATE_PS_ANSWERS).or_default().push(time);
                }
                thread::sleep(Duration::from_millis(20));
            }
            times
        });
        Self { stop, thread }
    }

    /// Stops asking, and returns how long the answers took.
    pub(crate) fn stop(self) -> AnswerTimes {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("every endpoint answers")
    }
}

/// Those answers of `zernel ps` that state that the observer is late, which happens on a machine without a free CPU.
const LATE_PS_ANSWERS: &str = "zernel ps: late";

/// Runs `zernel ps`. Returns false if the answer is that the observer is late.
fn run_ps(socket: &PathBuf) -> bool {
    let mut command = Command::new(zernel_path());
    let output = command.arg("ps").arg("--socket").arg(socket).output();
    let output = output.expect("zernel runs");
    let said = String::from_utf8_lossy(&output.stderr);
    let is_late = said.contains("the observer is late");
    assert!(output.status.success() || is_late, "zernel ps: {said}");
    !is_late
}

/// Asserts that all endpoints answered in time. Late answers of `zernel ps` also count among all its answers.
pub(crate) fn assert_answered_in_time(answers: &AnswerTimes) {
    for (endpoint, times) in answers
        .iter()
        .filter(|(endpoint, _)| **endpoint != LATE_PS_ANSWERS)
    {
        let (slow, slowest) = (
            answer_time_quantile(times, 0.99),
            answer_time_quantile(times, 1.0),
        );
        assert!(slow <= MAX_P99_ANSWER_TIME, "p99 of {endpoint}: {slow:?}");
        assert!(slowest < MAX_ANSWER_TIME, "{endpoint}: {slowest:?}");
    }
}

/// The time within which this share of the answers came.
fn answer_time_quantile(times: &[Duration], share: f64) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[((times.len() - 1) as f64 * share).round() as usize]
}

/// Median, 99th percentile and maximum of the answer times of each endpoint.
pub(crate) fn describe_answer_times(answers: &AnswerTimes) -> String {
    let answers = answers.iter();
    let endpoints =
        answers.map(|(endpoint, times)| format!("{endpoint} {}", describe_quantiles(times)));
    endpoints.collect::<Vec<String>>().join("; ")
}

/// Median, 99th percentile and maximum of answer times.
pub(crate) fn describe_quantiles(times: &[Duration]) -> String {
    format!(
        "median {:.1?}, p99 {:.1?}, max {:.1?} of {}",
        answer_time_quantile(times, 0.5),
        answer_time_quantile(times, 0.99),
        answer_time_quantile(times, 1.0),
        times.len()
    )
}
