//! Deterministic runs repeat to the last byte, whatever the host does. Where no VM can be booted the tests are shown as
//! ignored, with the reason; with `ZERNEL_REQUIRE=vm` they fail instead.

use std::error::Error;
use std::hint::black_box;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use libtest_mimic::Trial;
use zernel_lab::{
    CommandOutcome, Deterministic, KernelCache, KernelRequest, Ticks, VmError, VmSpec,
};
use zernel_testkit::Need;
use zernel_workload::spec::Spec;

type TestResult = Result<(), Box<dyn Error>>;

const VM: Need = Need {
    name: "vm",
    check: || {
        zernel_lab::available(&KernelRequest::SchedExt).map_err(|error| error.to_string())?;
        vm(1).map(drop).map_err(|error| error.to_string())
    },
};

/// Set for the copy of this test that is the guest's command.
const GUEST: &str = "ZERNEL_LAB_TEST_GUEST";

/// A periodic sleeper beside two spinners per CPU.
const WAKE_LATENCY: &str = r#"
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
    if std::env::var_os(GUEST).is_some() {
        return match print_wake_latency() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    zernel_testkit::main([
        trial(
            "three_boots_print_the_same_bytes",
            three_boots_print_the_same_bytes,
        ),
        trial(
            "seeds_and_ticks_make_a_difference",
            seeds_and_ticks_make_a_difference,
        ),
        trial(
            "random_numbers_come_at_once_and_repeat",
            random_numbers_come_at_once_and_repeat,
        ),
        trial(
            "a_command_ends_at_the_limit_of_virtual_time",
            a_command_ends_at_the_limit_of_virtual_time,
        ),
    ])
}

fn trial(name: &str, test: fn() -> TestResult) -> Trial {
    zernel_testkit::trial(name, &[VM], move || {
        if let Err(error) = test() {
            panic!("{error}");
        }
    })
}

/// The guest's side: runs the workload and prints every number of every worker.
fn print_wake_latency() -> TestResult {
    let spec = Spec::parse(WAKE_LATENCY, "wake_latency.toml")?;
    let outcome = spec.run(|_| ControlFlow::Continue(()))?;
    println!("{:#?}", outcome.reports);
    Ok(())
}

fn vm(seed: u64) -> Result<VmSpec, Box<dyn Error>> {
    let kernel = KernelCache::from_environment()?.obtain(&KernelRequest::SchedExt)?;
    Ok(VmSpec::new(kernel)
        .cpus(4)
        .timeout(Duration::from_secs(300))
        .deterministic(Deterministic::new(seed)))
}

fn shell(vm: &VmSpec, script: &str) -> Result<CommandOutcome, VmError> {
    vm.run("/bin/busybox", ["sh", "-c", script])
}

fn wake_latency(vm: VmSpec) -> Result<CommandOutcome, Box<dyn Error>> {
    let program = std::env::current_exe()?;
    let outcome = vm.environment(GUEST, "1").run(program, [""; 0])?;
    match outcome.status.success() {
        true => Ok(outcome),
        false => Err(String::from_utf8_lossy(&outcome.stderr).into()),
    }
}

fn three_boots_print_the_same_bytes() -> TestResult {
    let first = wake_latency(vm(1)?)?;
    let second = wake_latency(vm(1)?)?;
    let busy = BusyHost::start();
    let third = wake_latency(vm(1)?)?;
    drop(busy);
    let text = |outcome: &CommandOutcome| String::from_utf8_lossy(&outcome.stdout).into_owned();
    assert!(text(&first).contains("wake_latency"), "{}", text(&first));
    for other in [&second, &third] {
        assert_eq!(text(&first), text(other));
        assert_eq!(first.determinism, other.determinism);
    }
    Ok(())
}

fn seeds_and_ticks_make_a_difference() -> TestResult {
    let one = wake_latency(vm(1)?)?;
    let two = wake_latency(vm(2)?)?;
    let skewed = vm(1)?.deterministic(Deterministic::new(1).ticks(Ticks::Skewed));
    let skewed = wake_latency(skewed)?;
    assert_ne!(one.stdout, two.stdout);
    assert_ne!(one.stdout, skewed.stdout);
    Ok(())
}

fn random_numbers_come_at_once_and_repeat() -> TestResult {
    let script = "head -c 16 /dev/random | od -An -tx1; dmesg | grep 'crng init done'";
    let first = shell(&vm(1)?, script)?;
    assert!(first.status.success(), "{}", first.console_log);
    assert_eq!(first.stdout, shell(&vm(1)?, script)?.stdout);
    assert_ne!(first.stdout, shell(&vm(2)?, script)?.stdout);
    Ok(())
}

fn a_command_ends_at_the_limit_of_virtual_time() -> TestResult {
    let deterministic = Deterministic::new(1).virtual_limit(Duration::from_secs(3));
    let vm = vm(1)?.deterministic(deterministic);
    let outcome = shell(&vm, "sleep 2; echo in time")?;
    assert_eq!(outcome.stdout, b"in time\n");
    let virtual_time = outcome.determinism.map(|it| it.virtual_time);
    assert!(
        virtual_time > Some(Duration::from_secs(2)),
        "{virtual_time:?}"
    );
    match shell(&vm, "echo so far; sleep 4; echo too late") {
        Err(VmError::VirtualLimitReached { remains }) => {
            assert_eq!(remains.stdout, b"so far\n");
            Ok(())
        }
        other => Err(format!("no limit was reached: {other:?}").into()),
    }
}

/// Keeps all CPUs of the host busy until it is dropped.
struct BusyHost {
    stop: Arc<AtomicBool>,
    spinners: Vec<thread::JoinHandle<()>>,
}

impl BusyHost {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let count = thread::available_parallelism().map_or(2, usize::from);
        let spinners = (0..count).map(|_| {
            let stop = Arc::clone(&stop);
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    black_box(0);
                }
            })
        });
        Self {
            spinners: spinners.collect(),
            stop,
        }
    }
}

impl Drop for BusyHost {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for spinner in self.spinners.drain(..) {
            // A spinner does not panic.
            let _ = spinner.join();
        }
    }
}
