//! Every `zernel` command in the documents and in the help has valid arguments, and tests run its subcommand.

use std::fs;
use std::path::Path;

use clap::error::ErrorKind;
use clap::{Command, CommandFactory};
use zernel_testkit::documented::{DocumentedCommand, commands_of_block, documented_commands};

use crate::Cli;

/// Subcommands, each with the test file that runs it; paths are relative to this crate.
const TESTS_OF_SUBCOMMANDS: &[(&str, &str)] = &[
    ("attach", "tests/run/attach.rs"),
    ("doctor", "tests/doctor.rs"),
    ("generate", "src/generate_manuals.rs"),
    ("hang", "tests/hang/main.rs"),
    ("lab kernel list", "tests/documented.rs"),
    ("lab peers", "tests/documented.rs"),
    ("lab run", "tests/lab.rs"),
    ("lab scenario", "tests/scenarios.rs"),
    ("lab test", "tests/scenarios.rs"),
    ("observe", "tests/observe/main.rs"),
    ("ps", "tests/observe/main.rs"),
    ("run", "tests/run/main.rs"),
    ("sched", "tests/sched/guest.rs"),
    ("truth record", "tests/truth.rs"),
    ("truth score", "tests/truth.rs"),
    ("workload list", "tests/documented.rs"),
    ("workload run", "tests/workload.rs"),
];

/// Subcommands whose arguments are only parsed.
const ONLY_PARSED_SUBCOMMANDS: &[&str] = &[
    // Minutes of virtual machines. Tests of zernel-lab cover the parts of `zernel lab compare`.
    "lab compare",
    // Downloads a kernel.
    "lab kernel get",
    // Changes the kernel of later tests.
    "lab kernel use",
    // Needs an observer. A unit test covers what `zernel sched explain` prints.
    "sched explain",
];

/// Placeholders in documented commands, each with a value that the parser accepts.
const PLACEHOLDER_VALUES: &[(&str, &str)] = &[
    ("PID", "4711"),
    ("N", "1"),
    ("SECONDS", "1"),
    ("TIME", "10m"),
    ("VERSION", "6.1"),
    ("COMMAND", "doctor"),
];

/// The `zernel` commands in the words of a command, each from `zernel` on: `zernel lab run zernel doctor` has two.
fn zernel_commands(words: &[String]) -> Vec<Vec<String>> {
    let is_subcommand = |word: &str| Cli::command().find_subcommand(word).is_some();
    let is_zernel = |word: &str| word == "zernel" || word.ends_with("/zernel");
    let starts = (0..words.len()).filter(|start| {
        let next = words.get(start + 1);
        is_zernel(&words[*start]) && next.is_some_and(|next| *start == 0 || is_subcommand(next))
    });
    starts
        .map(|start| {
            words[start..]
                .iter()
                .map(|word| fill_in_placeholder(word))
                .collect()
        })
        .collect()
}

/// A word without the brackets of an optional argument, with a value for a placeholder.
fn fill_in_placeholder(word: &str) -> String {
    let word = word.trim_matches(['[', ']']);
    let mut placeholders = PLACEHOLDER_VALUES.iter();
    let known = placeholders.find(|(placeholder, _)| *placeholder == word);
    match known {
        Some((_, value)) => (*value).to_owned(),
        None if word.starts_with("$(") => "4711".to_owned(),
        None => word.to_owned(),
    }
}

/// What the parser finds wrong with a command.
fn parser_error_of_command(words: &[String], is_inside_sentence: bool) -> Option<String> {
    let error = Cli::command().try_get_matches_from(words).err()?;
    let is_allowed = match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => true,
        // A command that is named in a sentence may lack its arguments.
        ErrorKind::MissingRequiredArgument
        | ErrorKind::MissingSubcommand
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => is_inside_sentence,
        _ => false,
    };
    (!is_allowed).then(|| error.to_string())
}

/// The names of the subcommands, such as `lab kernel list`.
fn subcommand_names(words: &[String]) -> String {
    let (mut command, mut names) = (Cli::command(), Vec::new());
    for word in &words[1..] {
        let Some(found) = command.find_subcommand(word).cloned() else {
            break;
        };
        names.push(word.clone());
        command = found;
    }
    names.join(" ")
}

/// The examples in the help of a command and of its subcommands.
fn examples_in_help(command: &Command) -> Vec<DocumentedCommand> {
    let text = command.get_after_help().map(ToString::to_string);
    let text = text.unwrap_or_default();
    let lines = text.lines().filter(|line| line.starts_with("  "));
    // A line that only explains an example is indented further than the examples.
    let lines = lines.filter(|line| !line.starts_with("     "));
    let block: String = lines.map(|line| format!("{line}\n")).collect();
    let own = commands_of_block(&block)
        .into_iter()
        .map(|words| DocumentedCommand {
            place: format!("help of {}", command.get_name()),
            words,
            is_inside_sentence: false,
        });
    let below = command.get_subcommands().flat_map(examples_in_help);
    own.chain(below).collect()
}

#[test]
fn every_documented_command_is_parsed() {
    let mut commands = documented_commands();
    commands.extend(examples_in_help(&Cli::command()));
    let (mut parsed, mut mistakes) = (0, Vec::new());
    for command in &commands {
        for words in zernel_commands(&command.words) {
            parsed += 1;
            if let Some(mistake) = parser_error_of_command(&words, command.is_inside_sentence) {
                mistakes.push(format!("{}\n{mistake}", command.describe()));
            }
        }
    }
    assert!(mistakes.is_empty(), "{}", mistakes.join("\n"));
    assert!(parsed > 150, "{parsed} commands");
}

#[test]
fn every_documented_subcommand_is_run_or_listed_as_parsed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    for command in documented_commands() {
        for words in zernel_commands(&command.words) {
            let name = subcommand_names(&words);
            let is_group = Cli::command()
                .find_subcommand(&name)
                .is_some_and(Command::is_subcommand_required_set);
            if name.is_empty() || is_group || ONLY_PARSED_SUBCOMMANDS.contains(&&*name) {
                continue;
            }
            let mut entries = TESTS_OF_SUBCOMMANDS
                .iter()
                .filter(|(subcommand, _)| *subcommand == name);
            let (_, file) = entries
                .next()
                .unwrap_or_else(|| panic!("no test runs `zernel {name}` of {}", command.place));
            let text = fs::read_to_string(folder.join(file)).unwrap();
            let last = name.split(' ').next_back().unwrap();
            assert!(text.contains(last), "{file} does not run {name}");
        }
    }
}

#[test]
fn wrong_commands_are_found() {
    let mistake_of = |line: &str| {
        let commands = commands_of_block(line);
        let mut parts = zernel_commands(&commands[0]).into_iter();
        parts.find_map(|words| parser_error_of_command(&words, false))
    };
    assert!(mistake_of("zernel run --htlm a -- b").is_some());
    assert!(mistake_of("zernel attach PIDS").is_some());
    assert!(mistake_of("zernel watch").is_some());
    assert!(mistake_of("zernel lab compare a.toml --seed").is_some());
    assert!(mistake_of("zernel lab run zernel doctor --jason").is_some());
    assert!(mistake_of("zernel workload run").is_some());
    assert_eq!(mistake_of("zernel attach PID --for 60s"), None);
    assert_eq!(mistake_of("zernel lab kernel list [--available]"), None);
}
