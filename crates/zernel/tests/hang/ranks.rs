//! Four ranks of one communicator, one of which stops taking part.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Mutex;
use std::time::Duration;
use std::{env, thread};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use serde_json::Value;
use zernel_softgpu::install::Prologue;
use zernel_testkit::communicator::{RANK_VARIABLE, create_stream, join_communicator, own_rank};
use zernel_testkit::daemon::Daemon;
use zernel_testkit::eventually_ok;
use zernel_testkit::target::{Driver, Stage, Target, TargetRole, call, out_pointer};

const ZERNEL_PATH: &str = env!("CARGO_BIN_EXE_zernel");

pub(crate) const RANK_ROLES: &[(&str, TargetRole)] = &[("rank", target_run_rank)];

pub(crate) const RANK_COUNT: u64 = 4;
/// The rank that something happens to.
pub(crate) const FAULTY_RANK: u64 = 2;
/// Collectives before the faulty rank stops taking part.
pub(crate) const COLLECTIVES_BEFORE_FAULT: u64 = 20;
/// Variable with what happens to the faulty rank.
const FAULT_VARIABLE: &str = "ZERNEL_TARGET_FATE";
/// Variable with the file that the faulty rank reads.
pub(crate) const READ_FILE_VARIABLE: &str = "ZERNEL_TARGET_FILE";
/// Variable with the time that ranks compute between two collectives, in milliseconds.
pub(crate) const STEP_MS_VARIABLE: &str = "ZERNEL_TARGET_STEP_MS";

const ALL_REDUCE_ELEMENTS: u64 = 1000;
const NCCL_FLOAT: u64 = 7;

fn target_run_rank(driver: &Driver, _rounds: u64) {
    // Ranks that wait for each other do not notice the end of the test.
    set_parent_process_death_signal(Some(Signal::KILL)).expect("a signal");
    let rank = own_rank();
    driver.open_first_device();
    let fault = env::var(FAULT_VARIABLE)
        .ok()
        .filter(|_| rank == FAULTY_RANK);
    if fault.as_deref() == Some("absent") {
        thread::sleep(Duration::MAX);
    }
    let communicator = join_communicator(driver, rank, RANK_COUNT);
    if env::var(FAULT_VARIABLE).as_deref() == Ok("no part") {
        if rank == FAULTY_RANK {
            thread::sleep(Duration::MAX);
        }
        let mut part = 0_u64;
        let color = rank % 2;
        call!(
            driver.nccl(),
            "ncclCommSplit",
            communicator,
            color,
            0,
            out_pointer(&mut part),
            0
        );
    }
    let stream = create_stream(driver);
    let (from, to) = (
        driver.allocate_memory(4 * ALL_REDUCE_ELEMENTS),
        driver.allocate_memory(4 * ALL_REDUCE_ELEMENTS),
    );
    let step = env::var(STEP_MS_VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok());
    let step = Duration::from_millis(step.unwrap_or(10));
    for round in 0.. {
        let is_time = round % (2 * COLLECTIVES_BEFORE_FAULT) == COLLECTIVES_BEFORE_FAULT;
        if is_time {
            inject_fault(fault.as_deref());
        }
        let (nccl, all) = (driver.nccl(), ALL_REDUCE_ELEMENTS);
        let parts = is_time && env::var(FAULT_VARIABLE).as_deref() == Ok("broadcast");
        if parts && rank == FAULTY_RANK {
            call!(
                nccl,
                "ncclBroadcast",
                from,
                to,
                all,
                NCCL_FLOAT,
                0,
                communicator,
                stream
            );
        } else {
            call!(
                nccl,
                "ncclAllReduce",
                from,
                to,
                all,
                NCCL_FLOAT,
                0,
                communicator,
                stream
            );
        }
        if parts {
            // Real ranks would wait in this call for ever. The software GPU may return an error, which does not
            // matter.
            thread::sleep(Duration::MAX);
        }
        call!(driver.cuda(), "cuStreamSynchronize", stream);
        thread::sleep(step);
    }
}

/// What happens instead of the next collective.
fn inject_fault(fault: Option<&str>) {
    match fault {
        Some("spin") => loop {
            std::hint::spin_loop();
        },
        Some("lock") => {
            let lock = Mutex::new(());
            let _held = lock.lock();
            drop(lock.lock());
        }
        Some("read") => {
            let path = env::var_os(READ_FILE_VARIABLE).expect("set");
            let mut file = File::open(path).expect("files open");
            let _ = file.read(&mut [0; 512]);
        }
        Some("wait for a reader") => {
            let path = env::var_os(READ_FILE_VARIABLE).expect("set");
            let _ = Command::new("cat").arg(path).status();
        }
        Some("exit") => std::process::exit(3),
        Some("sleep") => thread::sleep(Duration::from_secs(12)),
        _ => {}
    }
}

/// Four ranks and the daemon that observes them.
pub(crate) struct ObservedJob {
    targets: Vec<Target>,
    daemon: Daemon,
    stage: Stage,
}

impl ObservedJob {
    pub(crate) fn start(fault: &str) -> Self {
        Self::start_with(Stage::new(Prologue::Push), fault, |_| {})
    }

    pub(crate) fn start_with(stage: Stage, fault: &str, change: impl Fn(&mut Command)) -> Self {
        let daemon = Daemon::start(ZERNEL_PATH, &stage);
        let targets = (0..RANK_COUNT).map(|rank| {
            let mut command = stage.target_command("rank", 0);
            command
                .env(RANK_VARIABLE, rank.to_string())
                .env(FAULT_VARIABLE, fault);
            command.env("TORCHELASTIC_RUN_ID", job_name_of_stage(&stage));
            command
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", RANK_COUNT.to_string());
            change(&mut command);
            let mut target = Target::start(&mut command);
            target.start_part();
            target
        });
        Self {
            targets: targets.collect(),
            daemon,
            stage,
        }
    }

    /// Starts the ranks in their own pid namespace, as in a container. The pid of each rank is then unknown
    /// to the test.
    pub(crate) fn start_in_a_pid_namespace(fault: &str) -> Self {
        let stage = Stage::new(Prologue::Push);
        let daemon = Daemon::start(ZERNEL_PATH, &stage);
        let program = env::current_exe().expect("we run");
        let mut command = stage.target_command_of("unshare".as_ref(), "rank", 0);
        let start_all = format!(
            "for rank in 0 1 2 3; do {RANK_VARIABLE}=$rank \"$0\" < /dev/null & done; wait"
        );
        command
            .args([
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "sh",
                "-c",
                &start_all,
            ])
            .arg(program)
            .env(FAULT_VARIABLE, fault)
            .env("TORCHELASTIC_RUN_ID", job_name_of_stage(&stage));
        Self {
            targets: vec![Target::start(&mut command)],
            daemon,
            stage,
        }
    }

    pub(crate) fn job_name(&self) -> String {
        job_name_of_stage(&self.stage)
    }

    pub(crate) fn stage(&self) -> &Stage {
        &self.stage
    }

    /// The pid of the rank that something happens to.
    pub(crate) fn faulty_rank_pid(&self) -> u32 {
        self.targets[FAULTY_RANK as usize].pid()
    }

    pub(crate) fn signal_faulty_rank(&self, signal: Signal) {
        let pid = Pid::from_raw(self.faulty_rank_pid() as i32).expect("a pid");
        kill_process(pid, signal).expect("our child");
    }

    /// Runs `zernel hang` with this job's name.
    pub(crate) fn run_zernel_hang(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(ZERNEL_PATH);
        command.args(["hang", &self.job_name(), "--socket"]);
        command.arg(&self.daemon.socket).args(arguments);
        command.output().expect("zernel runs")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.daemon.socket.clone()
    }

    pub(crate) fn hang_report(&self) -> (Option<i32>, Value) {
        let output = self.run_zernel_hang(&["--json"]);
        let report = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        (output.status.code(), report)
    }

    /// Waits until the report is as expected.
    pub(crate) fn wait_until_reported(&self, is_expected: impl Fn(&Value) -> bool) {
        eventually_ok("zernel hang reports what is expected", || {
            let report = self.hang_report().1;
            match is_expected(&report) {
                true => Ok(()),
                false => Err(format!("{report:#}")),
            }
        });
    }

    /// Waits until all ranks have reached a collective.
    pub(crate) fn wait_for_collective(&self, sequence: u64) {
        self.wait_until_reported(|report| {
            let members = report["communicators"][0]["members"].as_array();
            members.is_some_and(|members| {
                let far = |member: &Value| member["sequence"].as_u64() >= Some(sequence);
                members.len() == RANK_COUNT as usize && members.iter().all(far)
            })
        });
    }

    /// Waits until a hang is reported, and returns the report. The report must come once other ranks have waited for ten
    /// seconds.
    pub(crate) fn wait_for_a_hang(&self) -> Value {
        self.wait_until_reported(|report| {
            let is_reported = report["verdict"] == "hang";
            let found = &report["communicators"][0]["findings"][0];
            let in_time = found["waited_seconds"].as_f64() < Some(10.0);
            assert!(is_reported || in_time, "{report:#}");
            is_reported
        });
        println!(
            "{}",
            String::from_utf8_lossy(&self.run_zernel_hang(&[]).stdout)
        );
        let (code, report) = self.hang_report();
        assert_eq!(code, Some(1));
        report
    }
}

fn job_name_of_stage(stage: &Stage) -> String {
    let name = stage.path().file_name().expect("a name");
    let name = name.to_str().expect("ASCII");
    name.trim_start_matches('.').to_owned()
}

/// The only finding of the only communicator; the finding must be about the faulty rank.
pub(crate) fn only_finding<'a>(job: &ObservedJob, report: &'a Value) -> &'a Value {
    assert_eq!(report["verdict"], "hang", "{report:#}");
    let communicators = report["communicators"].as_array().expect("a list");
    assert_eq!(communicators.len(), 1, "{report:#}");
    let findings = communicators[0]["findings"].as_array().expect("a list");
    assert_eq!(findings.len(), 1, "{report:#}");
    assert_eq!(findings[0]["rank"], FAULTY_RANK, "{report:#}");
    assert_eq!(findings[0]["pid"], job.faulty_rank_pid(), "{report:#}");
    &findings[0]
}
