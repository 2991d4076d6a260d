//! `zernel sched` in virtual machines: it loads, hands back however it ends, refuses where it must, and passes
//! scenarios of the lab.
//!
//! In a virtual machine this program runs the trial `the_scheduler_starts_and_ends`.

#[path = "sched/guest.rs"]
mod guest;

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use zernel_lab::kernel::malformed_scheduler_functions;
use zernel_lab::{Initramfs, RunResult, Scenario, ScenarioRun, Scheduler, Verdict, VmSpec};
use zernel_phase::shared::{HEARTBEAT_PIN, PIN_DIRECTORY};
use zernel_testkit::{eventually_within, root, trial, vm};

const ZERNEL: &str = env!("CARGO_BIN_EXE_zernel");
const HERE: &str = "the_scheduler_starts_and_ends";
const STATE: &str = "/sys/kernel/sched_ext/state";
/// Time that the scheduler has to be verified and loaded in an emulated machine.
const LOADS_WITHIN: Duration = Duration::from_secs(60);
const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// Kernels without sched_ext, with it, and with malformed BTF (up to 7.2.12).
const KERNELS: [&str; 4] = ["6.12", "6.16", "6.18", "7.2"];

/// Scenarios of a fair scheduler, whose own assertions must hold.
const SCENARIOS: [&str; 6] = [
    "saturate",
    "wake",
    "cpusets",
    "cpu-max",
    "cgroups-equal",
    "weights-unequal-threads",
];

/// A trainer with a backward thread and one at the mercy of its loaders, beside spinners.
const TRAINERS: &str = r#"
about = "Hand-off and feed."
warmup_ms = 2000
duration_ms = 600
observe = true
training = ["backward", "loading"]
noise = ["noise"]

[[group]]
name = "backward"
workers = 3
pcomm = "trainer"
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, decode_us = 500, backward_us = 2000, gpu_us = 1500 }

[[group]]
name = "loading"
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, decode_us = 4000, forked_loaders = true, gpu_us = 500 }

[[group]]
name = "noise"
workers = 8
work = "spin_wait"
"#;

fn main() -> ExitCode {
    let there = KERNELS.into_iter().map(|version| {
        let name = format!("the_scheduler_runs_on_{}", version.replace('.', "_"));
        trial(&name, &[vm::newest()], move || runs_on(version))
    });
    let others = [
        trial(HERE, &[root()], starts_and_ends),
        trial("scenarios_pass", &[vm::newest()], scenarios_pass),
        trial(
            "helpers_and_loaders_go_first",
            &[vm::newest()],
            helpers_and_loaders_go_first,
        ),
    ];
    zernel_testkit::main(others.into_iter().chain(there))
}

/// Runs the trial of the guest in a virtual machine.
fn runs_on(version: &str) {
    let mut files = Initramfs::new();
    files.add_same(ZERNEL).unwrap();
    let outcome = VmSpec::new(vm::kernel(version).unwrap())
        // Emulated, several processors see each other's code change half-way, and a kernel changes its own when a
        // scheduler is loaded.
        .cpus(1)
        .memory_mib(1024)
        .files(files)
        .environment(zernel_testkit::REQUIRE, "root")
        .timeout(Duration::from_secs(200))
        .run(
            std::env::current_exe().unwrap(),
            [HERE, "--exact", "--nocapture"],
        )
        .unwrap_or_else(|error| panic!("{version}: {error}"));
    let output = [&*outcome.stdout, &*outcome.stderr].concat();
    let output = String::from_utf8_lossy(&output);
    assert!(outcome.status.success(), "{version}: {output}");
    assert!(output.contains("1 passed"), "{version}: {output}");
}

/// The trial of the guest. What it expects follows from what the kernel has.
fn starts_and_ends() {
    if !Path::new(STATE).exists() {
        return is_refused("no sched_ext");
    }
    let btf = fs::read("/sys/kernel/btf/vmlinux").unwrap();
    if !malformed_scheduler_functions(&btf).unwrap().is_empty() {
        return is_refused("malformed scheduler functions");
    }
    for signal in [Signal::TERM, Signal::INT, Signal::KILL] {
        let mut child = start(&[]);
        is_refused("the scheduler zernel is loaded");
        let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.success(), signal != Signal::KILL, "{signal:?}");
        wait_for("disabled", ENDS_WITHIN);
    }
    pins_outlive_the_observer();
    guest::statistics_are_printed();
    guest::a_changed_configuration_is_applied();
    guest::ejections_end_in_a_lock_out();
    guest::sysrq_unloads_for_good();
    guest::a_command_has_its_scheduler();
}

/// While a scheduler reads the task states, an observer that ends leaves the maps to the next one.
fn pins_outlive_the_observer() {
    let pin = Path::new(PIN_DIRECTORY).join(HEARTBEAT_PIN);
    let mut scheduler = start(&["--privilege", "all"]);
    let mut observer = Command::new(ZERNEL)
        .arg("observe")
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    eventually_within(LOADS_WITHIN, "the observer answers", || {
        let output = Command::new(ZERNEL).arg("ps").output().unwrap();
        output.status.success()
    });
    guest::metrics_show_the_scheduler();
    stop(&mut observer);
    assert!(pin.exists(), "the observer removed {}", pin.display());
    stop(&mut scheduler);
    wait_for("disabled", ENDS_WITHIN);
}

fn stop(child: &mut Child) {
    let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    assert!(child.wait().unwrap().success());
}

fn state() -> String {
    fs::read_to_string(STATE).unwrap().trim().to_owned()
}

fn wait_for(wanted: &str, time: Duration) {
    let begin = Instant::now();
    while state() != wanted {
        assert!(begin.elapsed() < time, "still {}, not {wanted}", state());
        thread::sleep(Duration::from_millis(50));
    }
}

/// Starts the scheduler and waits until the kernel has enabled it.
fn start(arguments: &[&str]) -> Child {
    let mut child = Command::new(ZERNEL)
        .arg("sched")
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begin = Instant::now();
    while state() != "enabled" {
        let is_over = begin.elapsed() > LOADS_WITHIN || child.try_wait().unwrap().is_some();
        if is_over {
            let _ = child.kill();
            let mut text = String::new();
            let _ = child.stderr.take().unwrap().read_to_string(&mut text);
            panic!("the scheduler did not load; it printed:\n{text}");
        }
        thread::sleep(Duration::from_millis(50));
    }
    child
}

/// Starting the scheduler fails with this message.
fn is_refused(message: &str) {
    let output = Command::new(ZERNEL).arg("sched").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains(message), "not `{message}`: {text}");
}

/// A shipped scenario, shortened.
fn scenario(name: &str) -> Scenario {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
    let mut scenario = Scenario::load(&folder.join(name).with_extension("toml")).unwrap();
    scenario.warmup_ms = 300;
    scenario.duration_ms = 1300;
    scenario
}

fn run(name: &str) -> RunResult {
    ScenarioRun::new(scenario(name), Scheduler::Zernel(Vec::new()))
        .guest(ZERNEL)
        .run_twice_if_inconclusive()
}

/// Two boots run at once.
fn scenarios_pass() {
    let next = Mutex::new(SCENARIOS.into_iter());
    let results = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(name) = { next.lock().unwrap().next() } {
                    let result = run(name);
                    results.lock().unwrap().push(result);
                }
            });
        }
    });
    for result in results.into_inner().unwrap() {
        assert_eq!(result.verdict(), Verdict::Pass, "{result}");
    }
}

/// The sum of the numbers that the scheduler printed after a label when it ended.
fn printed(result: &RunResult, label: &str) -> u64 {
    let figures = result.figures.as_ref().expect("the machine ran");
    let output = &figures.scheduler.output;
    let (_, rest) = output
        .split_once(label)
        .unwrap_or_else(|| panic!("no `{label}` in:\n{output}"));
    let item = rest.split([';', '\n']).next().unwrap_or_default();
    let numbers = item.split(|letter: char| !letter.is_ascii_digit());
    numbers
        .filter_map(|digits| digits.parse::<u64>().ok())
        .sum()
}

/// With privilege, threads that a trainer wakes and waits for become critical, and loaders preempt others or
/// are kept on their CPU. Nobody starves.
fn helpers_and_loaders_go_first() {
    let scenario = Scenario::parse(TRAINERS, "trainers.toml").unwrap();
    let scheduler = Scheduler::Zernel(["--privilege", "all"].map(str::to_owned).to_vec());
    let result = ScenarioRun::new(scenario, scheduler)
        .guest(ZERNEL)
        .run_twice_if_inconclusive();
    assert_eq!(result.verdict(), Verdict::Pass, "{result}");
    for label in ["handed on", "loaders:"] {
        assert!(printed(&result, label) > 10, "{label}: {result}");
    }
}
