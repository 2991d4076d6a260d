//! `scripts/setup`, with an apt-get that only records how it is called.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Command, Output};

use tempfile::TempDir;

const SETUP_SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/setup");

/// Programs of this machine that the script uses.
const USED_PROGRAMS: [&str; 7] = ["bash", "cat", "env", "grep", "ldd", "mktemp", "rm"];

/// A machine with a Rust toolchain and without the packages that Zernel needs.
struct FakeMachine {
    /// The only folder on PATH.
    program_folder: TempDir,
    /// Records each call of apt-get, one per line.
    calls: PathBuf,
}

impl FakeMachine {
    /// `apt_get` is a part of the script that stands in for apt-get: what it does after it has recorded its call.
    fn new(apt_get: &str) -> Self {
        let bin = tempfile::tempdir().unwrap();
        for program in USED_PROGRAMS {
            symlink(find_program(program), bin.path().join(program)).unwrap();
        }
        let calls = bin.path().join("calls");
        let machine = Self {
            program_folder: bin,
            calls,
        };
        let record = format!("echo \"$@\" >>'{}'", machine.calls.display());
        machine.add_program("apt-get", &format!("{record}\n{apt_get}"));
        machine.add_program("cargo", "exit 0");
        machine.add_program("id", "echo 0");
        machine.add_program("sleep", "exit 0");
        machine
    }

    fn add_program(&self, program: &str, script: &str) {
        let file = self.program_folder.path().join(program);
        fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
    }

    fn run_setup_script(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(self.program_folder.path().join("bash"));
        command
            .arg(SETUP_SCRIPT)
            .args(arguments)
            .env("PATH", self.program_folder.path());
        command.output().unwrap()
    }

    fn recorded_calls(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.calls).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

fn find_program(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap();
    let found = std::env::split_paths(&path).map(|folder| folder.join(program));
    found.into_iter().find(|file| file.is_file()).unwrap()
}

fn stderr_of(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn apt_waits_for_the_lock_and_removes_nothing() {
    let machine = FakeMachine::new("echo noise; echo noise >&2");
    let output = machine.run_setup_script(&[]);
    assert!(output.status.success(), "{output:?}");
    let calls = machine.recorded_calls();
    assert_eq!(calls.len(), 2, "{calls:?}");
    for call in &calls {
        assert!(call.contains("-o DPkg::Lock::Timeout=300 "), "{call}");
    }
    assert!(calls[0].ends_with(" update"), "{calls:?}");
    assert!(calls[1].contains(" install -y --no-remove "), "{calls:?}");
    assert!(calls[1].contains(" clang-19"), "{calls:?}");
    // Success is quiet.
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8(printed).unwrap();
    assert!(!printed.contains("noise"), "{printed}");
}

#[test]
fn virtual_machines_are_for_tests_only() {
    for arguments in [&[] as &[&str], &["check"]] {
        let machine = FakeMachine::new("");
        assert!(machine.run_setup_script(arguments).status.success());
        let calls = machine.recorded_calls().join("\n");
        assert!(!calls.contains("qemu"), "{arguments:?}: {calls}");
        assert!(!calls.contains("busybox"), "{arguments:?}: {calls}");
    }
    let machine = FakeMachine::new("");
    assert!(machine.run_setup_script(&["test"]).status.success());
    let install = machine.recorded_calls().pop().unwrap();
    assert!(install.contains(" qemu-system-x86"), "{install}");
}

/// The `dpkg` says whether the installed qemu-utils is newer.
fn machine_with_qemu_utils(dpkg: &str) -> FakeMachine {
    let machine = FakeMachine::new("");
    machine.add_program("dpkg-query", "echo 1:10.0");
    machine.add_program(
        "apt-cache",
        "echo '  Installed: (none)'; echo '  Candidate: 1:7.2'",
    );
    machine.add_program("dpkg", dpkg);
    machine
}

#[test]
fn a_newer_qemu_utils_is_replaced_and_that_is_printed() {
    let machine = machine_with_qemu_utils("[ \"$*\" = '--compare-versions 1:10.0 gt 1:7.2' ]");
    let output = machine.run_setup_script(&["test"]);
    assert!(output.status.success(), "{output:?}");
    let install = machine.recorded_calls().pop().unwrap();
    assert!(install.contains(" --no-remove "), "{install}");
    assert!(install.contains(" --allow-downgrades "), "{install}");
    assert!(install.ends_with(" qemu-utils=1:7.2"), "{install}");
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(
        printed.contains("also qemu-utils=1:7.2, because"),
        "{printed}"
    );

    for (machine, argument) in [
        (machine_with_qemu_utils("exit 1"), "test"),
        (machine_with_qemu_utils("exit 0"), "check"),
    ] {
        assert!(machine.run_setup_script(&[argument]).status.success());
        let install = machine.recorded_calls().pop().unwrap();
        assert!(!install.contains("downgrades"), "{install}");
        assert!(!install.contains("qemu-utils"), "{install}");
    }
}

#[test]
fn a_failure_of_apt_is_shown_with_what_to_do() {
    for (command, calls) in [("update", 1), ("install", 2)] {
        let apt_get = format!(
            "case \"$*\" in *{command}*) echo 'E: the mirror is on fire' >&2; exit 100;; esac"
        );
        let machine = FakeMachine::new(&apt_get);
        let error = stderr_of(&machine.run_setup_script(&[]));
        let lines: Vec<&str> = error.lines().collect();
        assert_eq!(lines.len(), 2, "{error}");
        assert_eq!(lines[0], "E: the mirror is on fire");
        let sentence = format!("setup: apt-get {command} failed with the output above; fix that");
        assert!(lines[1].starts_with(&sentence), "{error}");
        assert!(lines[1].contains("clang-19"), "{error}");
        assert_eq!(machine.recorded_calls().len(), calls, "{error}");
    }
}

/// An apt-get that fails `times` times in `update`, as it does while another apt-get updates the lists.
fn apt_get_with_locked_lists(times: usize) -> String {
    format!(
        "case \"$*\" in *update*)
            if [ $(grep -c update \"${{0%/*}}/calls\") -le {times} ]; then
                echo 'E: Could not get lock /var/lib/apt/lists/lock' >&2
                exit 100
            fi;;
        esac"
    )
}

#[test]
fn locked_package_lists_are_waited_for() {
    let machine = FakeMachine::new(&apt_get_with_locked_lists(3));
    let output = machine.run_setup_script(&[]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(machine.recorded_calls().len(), 5);
}

#[test]
fn package_lists_that_stay_locked_are_an_error() {
    let machine = FakeMachine::new(&apt_get_with_locked_lists(usize::MAX / 2));
    let error = stderr_of(&machine.run_setup_script(&[]));
    assert!(error.starts_with("E: Could not get lock"), "{error}");
    // The script tries once, and again after each of 60 pauses of 5 seconds.
    assert_eq!(machine.recorded_calls().len(), 61);
}

#[test]
fn without_root_it_uses_sudo_or_says_so() {
    let machine = FakeMachine::new("");
    machine.add_program("id", "echo 1000");
    let error = stderr_of(&machine.run_setup_script(&[]));
    assert!(error.contains("as root, install: clang-19"), "{error}");
    assert!(machine.recorded_calls().is_empty());
    machine.add_program("sudo", "echo sudo >>\"${0%/*}/calls\"; exec \"$@\"");
    assert!(machine.run_setup_script(&[]).status.success());
    let calls = machine.recorded_calls();
    assert_eq!((calls.len(), calls[0].as_str()), (4, "sudo"), "{calls:?}");
}

#[test]
fn an_unknown_argument_is_refused() {
    let machine = FakeMachine::new("");
    let error = stderr_of(&machine.run_setup_script(&["tset"]));
    assert!(error.contains("unknown argument tset"), "{error}");
    assert!(machine.recorded_calls().is_empty());
}
