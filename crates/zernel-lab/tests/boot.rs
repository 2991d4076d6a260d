//! Boots real kernels. On a machine that cannot boot a VM the tests are shown as ignored, with the reason; with
//! `ZERNEL_REQUIRE=vm` they fail instead.

use std::error::Error;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Duration;

use libtest_mimic::Trial;
use zernel_lab::{
    Accelerator, CommandOutcome, CommandStatus, Initramfs, KernelCache, KernelRequest, VmError,
    VmSpec,
};
use zernel_testkit::{Need, eventually};

type TestResult = Result<(), Box<dyn Error>>;

const VM_NEED: Need = Need {
    name: "vm",
    check: || {
        zernel_lab::check_vm_available(&KernelRequest::NewestWithSchedExt)
            .map_err(|error| error.to_string())?;
        default_vm().map(drop).map_err(|error| error.to_string())
    },
};

/// A variable that is set for a copy of this test that only runs an endless VM. Its value is on the VM's command line.
const ENDLESS_VM_VARIABLE: &str = "ZERNEL_LAB_TEST_ENDLESS";
/// A variable that is set for a copy of this test that only boots VMs, which end in all ways. Its value is on the VMs'
/// command lines.
const BOOTING_COPY_VARIABLE: &str = "ZERNEL_LAB_TEST_BOOTS";

fn main() -> ExitCode {
    if let Ok(mark) = std::env::var(ENDLESS_VM_VARIABLE) {
        let result =
            default_vm().map(|vm| run_script(&vm.kernel_argument(mark), "sleep 100000").map(drop));
        return if matches!(result, Ok(Ok(()))) {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        };
    }
    if let Ok(mark) = std::env::var(BOOTING_COPY_VARIABLE) {
        return match boot_with_success_crash_and_timeout(&mark) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    zernel_testkit::main([
        trial(
            "boots_leave_no_process_file_or_mount",
            boots_leave_no_process_file_or_mount,
        ),
        trial(
            "error_of_killed_qemu_shows_console",
            error_of_killed_qemu_shows_console,
        ),
        trial(
            "output_and_exit_code_of_command_are_returned",
            output_and_exit_code_of_command_are_returned,
        ),
        trial(
            "a_signal_is_distinguished_from_an_exit_code",
            a_signal_is_distinguished_from_an_exit_code,
        ),
        trial(
            "guest_has_usual_mounts_and_files",
            guest_has_usual_mounts_and_files,
        ),
        trial(
            "guest_gets_files_arguments_and_variables",
            guest_gets_files_arguments_and_variables,
        ),
        trial(
            "processes_left_by_command_are_ended",
            processes_left_by_command_are_ended,
        ),
        trial("command_timeout_stops_vm", command_timeout_stops_vm),
        trial("boot_timeout_stops_vm", boot_timeout_stops_vm),
        trial("qemu_dies_with_its_parent", qemu_dies_with_its_parent),
        trial(
            "kernel_panic_error_shows_console",
            kernel_panic_error_shows_console,
        ),
        trial(
            "guest_poweroff_during_command_is_error",
            guest_poweroff_during_command_is_error,
        ),
        trial(
            "serial_ports_carry_all_bytes_unchanged",
            serial_ports_carry_all_bytes_unchanged,
        ),
        trial(
            "a_missing_program_is_refused_before_the_boot",
            a_missing_program_is_refused_before_the_boot,
        ),
        trial(
            "qemu_start_failure_shows_its_message",
            qemu_start_failure_shows_its_message,
        ),
    ])
}

/// A test that boots a VM.
fn trial(name: &str, test: fn() -> TestResult) -> Trial {
    zernel_testkit::trial(name, &[VM_NEED], move || {
        if let Err(error) = test() {
            panic!("{error}");
        }
    })
}

fn default_vm() -> Result<VmSpec, Box<dyn Error>> {
    let kernel =
        KernelCache::from_environment()?.obtain_kernel(&KernelRequest::NewestWithSchedExt)?;
    Ok(VmSpec::new(kernel))
}

fn run_script(vm: &VmSpec, script: &str) -> Result<CommandOutcome, VmError> {
    vm.run("/bin/busybox", ["sh", "-c", script])
}

/// The error of a run that must fail.
fn expect_failure(result: Result<CommandOutcome, VmError>) -> Result<VmError, Box<dyn Error>> {
    match result {
        Ok(outcome) => Err(format!("the run succeeded: {}", outcome.status).into()),
        Err(error) => Ok(error),
    }
}

/// Every byte value, in an order that a terminal's line discipline would change.
fn bytes_that_terminals_change(length: usize) -> Vec<u8> {
    (0..length)
        .map(|index| (index.wrapping_mul(167) ^ (index >> 8)) as u8)
        .collect()
}

fn output_and_exit_code_of_command_are_returned() -> TestResult {
    let bytes = bytes_that_terminals_change(1 << 20);
    let mut files = Initramfs::new();
    files.add_file_with_content("/data", bytes.clone(), 0o644)?;
    let outcome = run_script(
        &default_vm()?.files(files),
        "cat /data; printf 'to\\r\\nstderr' >&2; exit 7",
    )?;
    assert_eq!(outcome.status, CommandStatus::Exited(7));
    assert!(
        outcome.stdout == bytes,
        "{} bytes of {} came back, or others",
        outcome.stdout.len(),
        bytes.len()
    );
    assert_eq!(outcome.stderr, b"to\r\nstderr");
    assert!(
        outcome.console_log.contains("Linux version"),
        "{}",
        outcome.console_log
    );
    assert_ne!(outcome.accelerator, Accelerator::Auto);
    assert!(outcome.boot_time <= outcome.total_time);
    Ok(())
}

fn a_signal_is_distinguished_from_an_exit_code() -> TestResult {
    let outcome = run_script(&default_vm()?, "echo before; kill -9 $$")?;
    assert_eq!(outcome.status, CommandStatus::Killed { signal: 9 });
    assert_eq!(outcome.stdout, b"before\n");
    assert_eq!(
        run_script(&default_vm()?, "exit 137")?.status,
        CommandStatus::Exited(137)
    );
    Ok(())
}

fn guest_has_usual_mounts_and_files() -> TestResult {
    let script = "set -e
        cat /sys/kernel/sched_ext/state
        grep -x CONFIG_SCHED_CLASS_EXT=y /boot/config-$(uname -r)
        id -u
        nproc
        for type in proc sysfs devtmpfs devpts cgroup2 bpf tracefs debugfs; do
            grep -q \" $type \" /proc/mounts || echo no $type
        done
        ping -c 1 127.0.0.1 >/dev/null && echo loopback
        touch /tmp/file /run/file /dev/shm/file
        echo through >/dev/stdout
        test -s /sys/kernel/btf/vmlinux && echo BTF";
    let outcome = run_script(&default_vm()?.cpus(3), script)?;
    let expected = "disabled\nCONFIG_SCHED_CLASS_EXT=y\n0\n3\nloopback\nthrough\nBTF\n";
    assert_eq!(
        String::from_utf8_lossy(&outcome.stdout),
        expected,
        "{}",
        String::from_utf8_lossy(&outcome.stderr)
    );
    assert_eq!(outcome.status, CommandStatus::Exited(0));
    Ok(())
}

fn guest_gets_files_arguments_and_variables() -> TestResult {
    let mut files = Initramfs::new();
    // Dynamic programs of this machine, one of them called by the other.
    files.add_program("/usr/bin/printenv")?;
    let vm = default_vm()?
        .files(files)
        .environment("GREETING", "it's a \"test\" $HOME\n");
    let script = "printf '%s|' \"$@\"; /usr/bin/printenv GREETING";
    let outcome = vm.run(
        "/bin/sh",
        ["-c", script, "sh", "two words", "", "it's", "a\\b"],
    )?;
    let expected = "two words||it's|a\\b|it's a \"test\" $HOME\n\n";
    assert_eq!(
        String::from_utf8_lossy(&outcome.stdout),
        expected,
        "{}",
        String::from_utf8_lossy(&outcome.stderr)
    );
    Ok(())
}

fn processes_left_by_command_are_ended() -> TestResult {
    let outcome = run_script(&default_vm()?, "setsid sleep 1000 & echo started")?;
    assert_eq!(outcome.stdout, b"started\n");
    assert!(outcome.status.success());
    Ok(())
}

fn command_timeout_stops_vm() -> TestResult {
    // This word makes the VM recognisable among all processes.
    let mark = format!("zernel.test={}", std::process::id());
    let vm = default_vm()?
        .command_timeout(Duration::from_secs(2))
        .kernel_argument(&mark);
    let error = expect_failure(run_script(&vm, "echo so far; sleep 100000"))?;
    let VmError::CommandTimedOut { partial_output, .. } = &error else {
        return Err(error.into());
    };
    assert_eq!(partial_output.stdout, b"so far\n");
    assert!(
        error.to_string().contains("the end of its console"),
        "{error}"
    );
    assert_eq!(processes_with_argument(&mark), Vec::<PathBuf>::new());
    Ok(())
}

fn qemu_dies_with_its_parent() -> TestResult {
    let mark = format!("zernel.orphan={}", std::process::id());
    let folder = tempfile::tempdir()?;
    let mut parent = Command::new(std::env::current_exe()?)
        .env(ENDLESS_VM_VARIABLE, &mark)
        .env("TMPDIR", folder.path())
        .spawn()?;
    let started = catch_unwind(|| {
        eventually("the VM is started", || {
            !processes_with_argument(&mark).is_empty()
        });
    });
    // No handler can act on SIGKILL.
    parent.kill()?;
    parent.wait()?;
    assert!(started.is_ok(), "the VM was not started");
    eventually("the VM dies with its parent", || {
        processes_with_argument(&mark).is_empty()
    });
    Ok(())
}

/// The command lines of three runs: a success, a crash and a time-out.
fn boot_with_success_crash_and_timeout(mark: &str) -> TestResult {
    let vm = default_vm()?.kernel_argument(mark);
    run_script(&vm, "mount -t tmpfs tmpfs /tmp")?;
    expect_failure(run_script(&vm, "echo c >/proc/sysrq-trigger"))?;
    let vm_with_short_limit = vm.command_timeout(Duration::from_secs(1));
    expect_failure(run_script(&vm_with_short_limit, "sleep 100000"))?;
    Ok(())
}

fn boots_leave_no_process_file_or_mount() -> TestResult {
    let mark = format!("zernel.boots={}", std::process::id());
    let folder = tempfile::tempdir()?;
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let status = Command::new(std::env::current_exe()?)
        .env(BOOTING_COPY_VARIABLE, &mark)
        .env("TMPDIR", folder.path())
        .status()?;
    assert!(status.success());
    assert_eq!(processes_with_argument(&mark), Vec::<PathBuf>::new());
    assert_eq!(fs::read_dir(folder.path())?.count(), 0, "files are left");
    assert_eq!(fs::read_to_string("/proc/self/mounts")?, mounts);
    Ok(())
}

fn error_of_killed_qemu_shows_console() -> TestResult {
    let mark = format!("zernel.killed={}", std::process::id());
    let vm = default_vm()?
        .kernel_argument(&mark)
        .accelerator(Accelerator::Tcg);
    let run = thread::spawn(move || run_script(&vm, "echo so far; sleep 100000"));
    // QEMU runs in the folder of its files.
    eventually("the VM boots", || {
        processes_with_argument(&mark).iter().any(|process| {
            let console = fs::read(process.join("cwd/console")).unwrap_or_default();
            String::from_utf8_lossy(&console).contains("Linux version")
        })
    });
    for process in processes_with_argument(&mark) {
        let pid = process.file_name().ok_or("a process has a number")?;
        assert!(Command::new("kill").arg("-9").arg(pid).status()?.success());
    }
    let error = expect_failure(run.join().map_err(|_| "the run panicked")?)?;
    let VmError::QemuFailed {
        status,
        partial_output,
        ..
    } = &error
    else {
        return Err(error.into());
    };
    assert!(status.to_string().contains("signal: 9"), "{status}");
    assert!(
        partial_output.console_log.contains("Linux version"),
        "{error}"
    );
    Ok(())
}

fn boot_timeout_stops_vm() -> TestResult {
    let vm = default_vm()?
        .boot_timeout(Duration::from_millis(200))
        .accelerator(Accelerator::Tcg);
    let error = expect_failure(run_script(&vm, "true"))?;
    assert!(matches!(error, VmError::BootTimedOut { .. }), "{error}");
    Ok(())
}

fn kernel_panic_error_shows_console() -> TestResult {
    let error = expect_failure(run_script(&default_vm()?, "echo c >/proc/sysrq-trigger"))?;
    let VmError::KernelPanic {
        message,
        partial_output,
    } = &error
    else {
        return Err(error.into());
    };
    assert!(message.contains("sysrq triggered crash"), "{message}");
    assert!(
        partial_output.console_log.contains("Call Trace"),
        "{}",
        partial_output.console_log
    );
    Ok(())
}

fn guest_poweroff_during_command_is_error() -> TestResult {
    let error = expect_failure(run_script(&default_vm()?, "poweroff -f"))?;
    assert!(matches!(error, VmError::GuestStopped { .. }), "{error}");
    Ok(())
}

fn serial_ports_carry_all_bytes_unchanged() -> TestResult {
    let mut kernel =
        KernelCache::from_environment()?.obtain_kernel(&KernelRequest::NewestWithSchedExt)?;
    // A kernel whose configuration is unknown is not trusted to have virtio ports.
    kernel.config_path = None;
    let bytes = bytes_that_terminals_change(100_000);
    let mut files = Initramfs::new();
    files.add_file_with_content("/data", bytes.clone(), 0o644)?;
    let outcome = run_script(
        &VmSpec::new(kernel).files(files),
        "cat /data; cat /data >&2; exit 3",
    )?;
    assert_eq!(outcome.status, CommandStatus::Exited(3));
    assert!(
        outcome.stdout == bytes && outcome.stderr == bytes,
        "bytes changed on the way"
    );
    Ok(())
}

fn a_missing_program_is_refused_before_the_boot() -> TestResult {
    let error = expect_failure(default_vm()?.run("/no/such/program", [""; 0]))?;
    assert!(
        matches!(&error, VmError::ProgramMissing { program } if program == Path::new("/no/such/program"))
    );
    Ok(())
}

fn qemu_start_failure_shows_its_message() -> TestResult {
    let error = expect_failure(run_script(
        &default_vm()?.cpus(100_000).accelerator(Accelerator::Tcg),
        "true",
    ))?;
    assert!(
        matches!(&error, VmError::QemuFailed { message, .. } if message.contains("CPU")),
        "{error}"
    );
    Ok(())
}

/// The processes whose command line has this text in it, other than ourselves.
fn processes_with_argument(text: &str) -> Vec<PathBuf> {
    let processes = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    processes
        .filter(|process| {
            let command_line = fs::read(process.join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&command_line).contains(text)
        })
        .collect()
}
