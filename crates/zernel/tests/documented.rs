//! Runs the documented commands that need no privilege, no GPU and no virtual machine, as the documents show them.

use std::path::Path;
use std::process::{Command, Output};

use zernel_testkit::documented::{documented_commands, workspace};

/// Documented commands, word by word, and a part of what each prints.
const QUICK_COMMANDS: &[(&str, &str)] = &[
    ("zernel --version", env!("CARGO_PKG_VERSION")),
    ("zernel workload list", "spin_wait"),
    ("zernel lab kernel list", ""),
    ("zernel lab peers --list", "scx_cosmos"),
];

/// Runs a command of the workspace, where `zernel` is the program under test.
fn run_documented_command(words: &[String]) -> Output {
    let program = match &*words[0] {
        "zernel" => Path::new(env!("CARGO_BIN_EXE_zernel")).to_owned(),
        script => workspace().join(script),
    };
    let mut command = Command::new(program);
    command.args(&words[1..]).current_dir(workspace());
    command.output().unwrap()
}

#[test]
fn quick_commands_run_as_documented() {
    let documented = documented_commands();
    for (line, part) in QUICK_COMMANDS {
        let mut commands = documented.iter();
        let is_line = |words: &[String]| words.join(" ").split(" [").next() == Some(line);
        let found = commands.find(|command| is_line(&command.words));
        let command = found.unwrap_or_else(|| panic!("no document shows `{line}`"));
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let output = run_documented_command(&words);
        let printed = String::from_utf8_lossy(&output.stdout);
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "{}: {complaints}",
            command.describe()
        );
        assert!(printed.contains(part), "{}: {printed}", command.describe());
    }
}

/// `zernel COMMAND --help`, for each command that the help of `zernel` lists.
#[test]
fn every_command_has_help() {
    let help = run_documented_command(&["zernel", "--help"].map(str::to_owned));
    let text = String::from_utf8(help.stdout).unwrap();
    let lines = text.lines().skip_while(|line| *line != "Commands:").skip(1);
    let lines = lines.take_while(|line| !line.is_empty());
    let names: Vec<&str> = lines
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(names.len() > 9, "{text}");
    for name in names.into_iter().filter(|name| *name != "help") {
        let output = run_documented_command(&["zernel", name, "--help"].map(str::to_owned));
        assert!(output.status.success(), "{name}");
        assert!(!output.stdout.is_empty(), "{name}");
    }
}

/// `sha256sum --check` of all six files of checksums, in truth/.
#[test]
fn the_held_out_variants_are_sealed() {
    let mut check = Command::new("sha256sum");
    check.args([
        "--check",
        "--strict",
        "held_out.sha256",
        "held_out_2.sha256",
        "held_out_3.sha256",
        "held_out_4.sha256",
        "held_out_5.sha256",
        "held_out_6.sha256",
    ]);
    let output = check.current_dir(workspace().join("truth")).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
}
