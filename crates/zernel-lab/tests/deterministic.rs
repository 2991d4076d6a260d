//! Deterministic runs repeat to the last byte, whatever the host does. On a machine that cannot boot a VM the tests are
//! shown as ignored, with the reason; with `ZERNEL_REQUIRE=vm` they fail instead.

use std::error::Error;
use std::fs::{self, File};
use std::hint::{black_box, spin_loop};
use std::io::Read;
use std::iter;
use std::ops::ControlFlow;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::Duration;

use libtest_mimic::Trial;
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_setaffinity};
use zernel_lab::{
    CommandOutcome, DeterministicSettings, KernelCache, KernelRequest, TickAlignment, VmError,
    VmSpec,
};
use zernel_testkit::Need;
use zernel_workload::spec::WorkloadSpec;

type TestResult = Result<(), Box<dyn Error>>;

const VM_NEED: Need = Need {
    name: "vm",
    check: || {
        zernel_lab::check_vm_available(&KernelRequest::NewestWithSchedExt)
            .map_err(|error| error.to_string())?;
        vm_with_seed(1).map(drop).map_err(|error| error.to_string())
    },
};

/// A variable that is set for the copy of this test that is the guest's command.
const GUEST_COMMAND_VARIABLE: &str = "ZERNEL_LAB_TEST_GUEST";

/// The value of that variable in the guest of `every_vcpu_gets_turns`.
const RING_COMMAND: &str = "ring";

/// A workload of a periodic sleeper and two spinners per CPU.
const WAKE_LATENCY_SPEC: &str = r#"
duration_ms = 200
[[group]]
name = "sleeper"
work.timer_deadline = { period_us = 2000, compute_us = 100 }
[[group]]
name = "spinners"
workers = 8
work = "spin_wait"
"#;

fn main() -> ExitCode {
    if let Some(command) = std::env::var_os(GUEST_COMMAND_VARIABLE) {
        let printed = match command == RING_COMMAND {
            true => print_ring_rounds(),
            false => print_wake_latency(),
        };
        return match printed {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    zernel_testkit::main([
        trial(
            "one_seed_prints_same_bytes_in_three_boots",
            one_seed_prints_same_bytes_in_three_boots,
        ),
        trial(
            "output_differs_by_seed_and_tick_alignment",
            output_differs_by_seed_and_tick_alignment,
        ),
        trial(
            "virtual_time_limit_ends_command",
            virtual_time_limit_ends_command,
        ),
        trial(
            "kernel_panic_ends_deterministic_run",
            kernel_panic_ends_deterministic_run,
        ),
        trial(
            "guest_shutdown_ends_deterministic_run",
            guest_shutdown_ends_deterministic_run,
        ),
        trial("every_vcpu_gets_turns", every_vcpu_gets_turns),
    ])
}

fn trial(name: &str, test: fn() -> TestResult) -> Trial {
    zernel_testkit::trial(name, &[VM_NEED], move || {
        if let Err(error) = test() {
            panic!("{error}");
        }
    })
}

/// The command in the guest: prints random bytes, the time at which they could be read, and all figures of every
/// worker.
fn print_wake_latency() -> TestResult {
    let mut random = [0; 16];
    File::open("/dev/random")?.read_exact(&mut random)?;
    let messages = Command::new("/bin/sh").args(["-c", "dmesg"]).output()?;
    let messages = String::from_utf8_lossy(&messages.stdout);
    let ready = messages
        .lines()
        .find(|line| line.contains("crng init done"));
    let ready = ready.ok_or("the kernel waits for random numbers")?;
    println!("random {random:02x?}, {ready}");
    let spec = WorkloadSpec::parse(WAKE_LATENCY_SPEC, "wake_latency.toml")?;
    let outcome = spec.run(|_| ControlFlow::Continue(()))?;
    println!("{:#?}", outcome.reports);
    Ok(())
}

/// The command in the guest: CPU 0 spins, the other CPUs pass a token around and wait for it with `pause`.
fn print_ring_rounds() -> TestResult {
    const RING_MEMBERS: usize = 3;
    let token = AtomicUsize::new(0);
    let done = AtomicBool::new(false);
    let pin = |cpu| {
        let mut cpus = CpuSet::new();
        cpus.set(cpu);
        sched_setaffinity(None, &cpus)
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            pin(0)?;
            while !done.load(Ordering::Relaxed) {
                black_box(0);
            }
            rustix::io::Result::Ok(())
        });
        for member in 0..RING_MEMBERS {
            let (token, done) = (&token, &done);
            scope.spawn(move || {
                pin(member + 1)?;
                while !done.load(Ordering::Relaxed) {
                    if token.load(Ordering::Acquire) % RING_MEMBERS == member {
                        token.fetch_add(1, Ordering::Release);
                    }
                    spin_loop();
                }
                rustix::io::Result::Ok(())
            });
        }
        thread::sleep(Duration::from_millis(200));
        done.store(true, Ordering::Relaxed);
    });
    println!("{}", token.into_inner() / RING_MEMBERS);
    Ok(())
}

fn vm_with_seed(seed: u64) -> Result<VmSpec, Box<dyn Error>> {
    let kernel =
        KernelCache::from_environment()?.obtain_kernel(&KernelRequest::NewestWithSchedExt)?;
    Ok(VmSpec::new(kernel)
        .cpus(4)
        .command_timeout(Duration::from_secs(300))
        .boot_timeout(Duration::from_secs(300))
        .deterministic(DeterministicSettings::new(seed)))
}

fn run_script(vm: &VmSpec, script: &str) -> Result<CommandOutcome, VmError> {
    vm.run("/bin/busybox", ["sh", "-c", script])
}

fn run_wake_latency(vm: VmSpec) -> Result<CommandOutcome, Box<dyn Error>> {
    run_in_guest(vm, "wake_latency")
}

/// Runs this program in a guest.
fn run_in_guest(vm: VmSpec, command: &str) -> Result<CommandOutcome, Box<dyn Error>> {
    let program = std::env::current_exe()?;
    let outcome = vm
        .environment(GUEST_COMMAND_VARIABLE, command)
        .run(program, [""; 0])?;
    match outcome.status.success() {
        true => Ok(outcome),
        false => Err(String::from_utf8_lossy(&outcome.stderr).into()),
    }
}

/// A boot with seed 1, which two tests compare with others.
fn first_boot() -> &'static CommandOutcome {
    static FIRST_BOOT_OUTCOME: LazyLock<CommandOutcome> = LazyLock::new(|| {
        vm_with_seed(1)
            .and_then(run_wake_latency)
            .expect("a first boot")
    });
    &FIRST_BOOT_OUTCOME
}

fn stdout_text(outcome: &CommandOutcome) -> String {
    String::from_utf8_lossy(&outcome.stdout).into_owned()
}

fn random_bytes(outcome: &CommandOutcome) -> Option<String> {
    let text = stdout_text(outcome);
    let line = text.lines().find(|line| line.starts_with("random "))?;
    line.split(',').next().map(str::to_owned)
}

fn one_seed_prints_same_bytes_in_three_boots() -> TestResult {
    let first = first_boot();
    assert!(
        stdout_text(first).contains("wake_latency"),
        "{}",
        stdout_text(first)
    );
    let last = first.console_log.lines().last().unwrap_or_default();
    assert!(last.ends_with("reboot: Power down"), "{last}");
    let second = run_wake_latency(vm_with_seed(1)?)?;
    let disturbance = HostDisturbance::start();
    let third = run_wake_latency(vm_with_seed(1)?)?;
    drop(disturbance);
    let signals = SENT_SIGNALS.load(Ordering::Relaxed);
    assert!(signals > 1000, "{signals} signals reached QEMU");
    for (boot, other) in [("second", &second), ("third", &third)] {
        let differences = first.differences(other);
        let texts: Vec<String> = differences.iter().map(ToString::to_string).collect();
        assert!(
            texts.is_empty(),
            "the first and the {boot} boot:\n{}",
            texts.join("\n")
        );
        assert_eq!(first.deterministic_run, other.deterministic_run);
    }
    Ok(())
}

fn output_differs_by_seed_and_tick_alignment() -> TestResult {
    let seed_1 = first_boot();
    let seed_2 = run_wake_latency(vm_with_seed(2)?)?;
    let skewed =
        vm_with_seed(1)?.deterministic(DeterministicSettings::new(1).ticks(TickAlignment::Skewed));
    let skewed = run_wake_latency(skewed)?;
    assert_ne!(seed_1.stdout, seed_2.stdout);
    assert_ne!(seed_1.stdout, skewed.stdout);
    assert!(random_bytes(seed_1).is_some(), "{}", stdout_text(seed_1));
    assert_ne!(random_bytes(seed_1), random_bytes(&seed_2));
    Ok(())
}

fn virtual_time_limit_ends_command() -> TestResult {
    let deterministic = DeterministicSettings::new(1).virtual_time_limit(Duration::from_secs(3));
    let vm = vm_with_seed(1)?.deterministic(deterministic);
    let outcome = run_script(&vm, "sleep 2; echo in time")?;
    assert_eq!(outcome.stdout, b"in time\n");
    let virtual_run_time = outcome
        .deterministic_run
        .map(|record| record.virtual_run_time);
    assert!(
        virtual_run_time > Some(Duration::from_secs(2)),
        "{virtual_run_time:?}"
    );
    match run_script(&vm, "echo so far; sleep 4; echo too late") {
        Err(VmError::VirtualTimeLimitReached { partial_output }) => {
            assert_eq!(partial_output.stdout, b"so far\n");
            Ok(())
        }
        other => Err(format!("no limit was reached: {other:?}").into()),
    }
}

/// At such an end QEMU's main thread waits for files while it holds QEMU's lock.
fn kernel_panic_ends_deterministic_run() -> TestResult {
    match run_script(
        &vm_with_seed(1)?,
        "echo so far; echo c >/proc/sysrq-trigger",
    ) {
        Err(VmError::KernelPanic { partial_output, .. }) => {
            assert_eq!(partial_output.stdout, b"so far\n");
            Ok(())
        }
        other => Err(format!("no panic: {other:?}").into()),
    }
}

/// At such an end a vCPU waits in a loop, and QEMU's main thread must end the machine.
fn guest_shutdown_ends_deterministic_run() -> TestResult {
    match run_script(&vm_with_seed(1)?, "echo so far; poweroff -f") {
        Err(VmError::GuestStopped { partial_output }) => {
            assert_eq!(partial_output.stdout, b"so far\n");
            Ok(())
        }
        other => Err(format!("the guest is not off: {other:?}").into()),
    }
}

/// A vCPU that waits with `pause` ends its turn at once. So the same vCPU would follow the spinner's turn each time,
/// and meet the timer that ended the spinner's turn. The token then moves only at an interrupt.
fn every_vcpu_gets_turns() -> TestResult {
    let outcome = run_in_guest(vm_with_seed(1)?, RING_COMMAND)?;
    let rounds: u32 = stdout_text(&outcome).trim().parse()?;
    assert!(rounds > 1000, "{rounds} rounds in 200 ms");
    Ok(())
}

/// Keeps all CPUs of the host busy, and wakes QEMU's main thread in a loop, until this value is dropped.
struct HostDisturbance {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl HostDisturbance {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let count = thread::available_parallelism().map_or(2, usize::from);
        let work = iter::repeat_n(spin_once as fn(), count).chain([wake_emulators as fn()]);
        let threads = work.map(|work| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    work();
                }
            })
        });
        Self {
            threads: threads.collect(),
            stop,
        }
    }
}

impl Drop for HostDisturbance {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // The machine may end at any time, so a failed read or signal is no panic.
            let _ = thread.join();
        }
    }
}

fn spin_once() {
    black_box(0);
}

/// Number of signals that were sent to emulators.
static SENT_SIGNALS: AtomicU64 = AtomicU64::new(0);

/// Disturbs the emulators that this process started with SIGIO. QEMU blocks the signal and reads it from a descriptor
/// in its main thread, which then checks its timers and does nothing else.
fn wake_emulators() {
    let emulators: Vec<Pid> = child_pids()
        .into_iter()
        .filter(|pid| has_vcpus(*pid))
        .collect();
    for _ in 0..1000 {
        for pid in &emulators {
            // The emulator may have ended since it was found.
            if kill_process(*pid, Signal::IO).is_ok() {
                SENT_SIGNALS.fetch_add(1, Ordering::Relaxed);
            }
        }
        thread::sleep(Duration::from_micros(20));
    }
}

/// The children of all threads of this process.
fn child_pids() -> Vec<Pid> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten();
    let lists =
        tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("children")).ok());
    lists
        .flat_map(|list| {
            let pids = list.split_whitespace().map(|word| word.parse().ok());
            pids.filter_map(|pid| Pid::from_raw(pid?))
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Whether a process is QEMU and has a thread for its vCPUs, besides the main thread and one for memory. From then on
/// QEMU blocks SIGIO, which would end it before.
fn has_vcpus(pid: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()));
    let status = status.unwrap_or_default();
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name));
    let is_qemu = field("Name:").is_some_and(|name| name.trim().starts_with("qemu"));
    let threads = field("Threads:").and_then(|count| count.trim().parse().ok());
    is_qemu && threads.is_some_and(|count: u32| count > 2)
}
