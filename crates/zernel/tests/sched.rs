//! `zernel sched` in virtual machines: it loads, hands back however it ends, refuses where it must, and passes
//! scenarios of the lab.
//!
//! In a virtual machine this program runs the trial `the_scheduler_starts_and_ends`.

#[path = "sched/guest.rs"]
mod guest;
#[path = "sched/job.rs"]
mod job;
#[path = "sched/scenario_texts.rs"]
mod scenario_texts;
#[path = "sched/scenarios.rs"]
mod scenarios;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use zernel_lab::kernel::malformed_scheduler_functions;
use zernel_lab::scenario::SOFTWARE_GPU_DRIVER_PATH;
use zernel_lab::{Initramfs, VmSpec};
use zernel_testkit::{root, trial, vm};

const ZERNEL_PATH: &str = env!("CARGO_BIN_EXE_zernel");
const GUEST_TRIAL: &str = "the_scheduler_starts_and_ends";
const SCHED_EXT_STATE_PATH: &str = "/sys/kernel/sched_ext/state";
/// Time that the scheduler has to be verified and loaded in an emulated machine.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);
const BUSYBOX_PATH: &str = "/bin/busybox";
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Kernels with sched_ext, without it, and with malformed BTF (up to 7.2.12). The longest trial comes first.
const TESTED_KERNELS: [&str; 4] = ["6.18", "6.16", "6.12", "7.2"];
/// The kernel on which training runs, too.
const KERNEL_WITH_JOBS: &str = "6.18";

fn main() -> ExitCode {
    let there = TESTED_KERNELS.into_iter().map(|version| {
        let name = format!("the_scheduler_runs_on_{}", version.replace('.', "_"));
        trial(&name, &[vm::newest_kernel_need()], move || {
            run_guest_trial_on(version);
        })
    });
    let others = [
        trial(GUEST_TRIAL, &[root()], the_scheduler_starts_and_ends),
        trial(
            "scenarios_pass",
            &[vm::newest_kernel_need()],
            scenarios::scenarios_pass,
        ),
        trial(
            "threads_run_on_the_node_of_their_gpu",
            &[vm::newest_kernel_need()],
            scenarios::threads_run_on_the_node_of_their_gpu,
        ),
        trial(
            "a_tenant_pays_for_its_faker",
            &[vm::newest_kernel_need()],
            scenarios::a_tenant_pays_for_its_faker,
        ),
        trial(
            "a_tenant_pays_for_a_pinned_faker",
            &[vm::newest_kernel_need()],
            scenarios::a_tenant_pays_for_a_pinned_faker,
        ),
        trial(
            "tiny_weights_do_not_wait_for_ever",
            &[vm::newest_kernel_need()],
            scenarios::tiny_weights_do_not_wait_for_ever,
        ),
        trial(
            "critical_threads_take_turns",
            &[vm::newest_kernel_need()],
            scenarios::critical_threads_take_turns,
        ),
        trial(
            "the_observer_does_not_starve",
            &[vm::newest_kernel_need()],
            scenarios::the_observer_does_not_starve,
        ),
        trial(
            "spinning_ranks_lend_their_cpus",
            &[vm::newest_kernel_need()],
            scenarios::spinning_ranks_lend_their_cpus,
        ),
        trial(
            "lent_turns_may_be_disturbed",
            &[vm::newest_kernel_need()],
            scenarios::lent_turns_may_be_disturbed,
        ),
    ];
    zernel_testkit::main(others.into_iter().chain(there))
}

/// Runs the trial of the guest in a virtual machine.
fn run_guest_trial_on(version: &str) {
    let program = std::env::current_exe().unwrap();
    let mut files = Initramfs::new();
    for path in [ZERNEL_PATH.as_ref(), program.as_path()] {
        files.add_program_at(stripped_copy(path), path).unwrap();
    }
    if version == KERNEL_WITH_JOBS {
        scenarios::add_software_gpu(&mut files);
        files.add_at_same_path(BUSYBOX_PATH).unwrap();
    }
    let outcome = VmSpec::new(vm::obtain_kernel_of_version(version).unwrap())
        // Emulated, several processors see each other's code change half-way, and a kernel changes its own when a
        // scheduler is loaded.
        .cpus(1)
        .memory_mib(1024)
        .files(files)
        .environment(zernel_testkit::REQUIRE_VARIABLE, "root")
        .command_timeout(Duration::from_secs(400))
        .run(&program, [GUEST_TRIAL, "--exact", "--nocapture"])
        .unwrap_or_else(|error| panic!("{version}: {error}"));
    let output = [&*outcome.stdout, &*outcome.stderr].concat();
    let output = String::from_utf8_lossy(&output);
    assert!(outcome.status.success(), "{version}: {output}");
    assert!(output.contains("1 passed"), "{version}: {output}");
}

/// A copy without debug information, which a guest would have to unpack; the file itself where there is no `strip`.
fn stripped_copy(file: &Path) -> PathBuf {
    static STRIPPED_FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().unwrap());
    let name = file.file_name().unwrap_or_default();
    let copy = STRIPPED_FOLDER.path().join(name);
    let partial = tempfile::NamedTempFile::new_in(STRIPPED_FOLDER.path()).unwrap();
    let mut strip = Command::new("strip");
    let status = strip.arg("-o").arg(partial.path()).arg(file).status();
    match status.is_ok_and(|status| status.success()) && partial.persist(&copy).is_ok() {
        true => copy,
        false => file.to_owned(),
    }
}

/// The trial of the guest. What the trial expects follows from what the kernel has.
fn the_scheduler_starts_and_ends() {
    if !Path::new(SCHED_EXT_STATE_PATH).exists() {
        return assert_start_is_refused("no sched_ext");
    }
    let btf = fs::read("/sys/kernel/btf/vmlinux").unwrap();
    if !malformed_scheduler_functions(&btf).unwrap().is_empty() {
        return assert_start_is_refused("malformed scheduler functions");
    }
    guest::statistics_are_printed();
    guest::a_changed_configuration_is_applied();
    guest::replace_loads_the_newer_scheduler();
    guest::the_scheduler_is_not_loaded_after_two_ejections();
    match Path::new(SOFTWARE_GPU_DRIVER_PATH).exists() {
        true => job::jobs_are_compared_and_privileged(),
        false => {
            guest::a_recreated_cgroup_is_privileged_again();
            guest::run_sched_schedules_while_its_command_runs();
            job::a_missing_observer_is_reported();
        }
    }
}

/// Sends a signal and returns the exit status.
fn end_by_signal(child: &mut Child, signal: Signal) -> ExitStatus {
    let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
    kill_process(pid, signal).unwrap();
    child.wait().unwrap()
}

fn stop_scheduler(child: &mut Child) {
    assert!(end_by_signal(child, Signal::TERM).success());
}

fn sched_ext_state() -> String {
    fs::read_to_string(SCHED_EXT_STATE_PATH)
        .unwrap()
        .trim()
        .to_owned()
}

fn wait_for_sched_ext_state(wanted: &str, time: Duration) {
    let begin = Instant::now();
    while sched_ext_state() != wanted {
        assert!(
            begin.elapsed() < time,
            "still {}, not {wanted}",
            sched_ext_state()
        );
        thread::sleep(Duration::from_millis(50));
    }
}

/// Starts the scheduler and waits until the kernel has enabled it.
fn start_scheduler(arguments: &[&str]) -> Child {
    let mut child = Command::new(ZERNEL_PATH)
        .arg("sched")
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begin = Instant::now();
    while sched_ext_state() != "enabled" {
        let is_over = begin.elapsed() > LOAD_TIMEOUT || child.try_wait().unwrap().is_some();
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
fn assert_start_is_refused(message: &str) {
    let output = Command::new(ZERNEL_PATH).arg("sched").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains(message), "not `{message}`: {text}");
}
