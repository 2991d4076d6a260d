//! The commands that documents show exist: targets of make, crates, tests and benchmarks of cargo, scripts with their
//! options, paths of the daemon, services, and files. `crates/zernel/tests/documented.rs` checks commands of `zernel`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use zernel_testkit::documented::{DocumentedCommand, commands_of_page, documented_commands};

use crate::workspace;

/// Subcommands of cargo that documents may use.
const CARGO_SUBCOMMANDS: [&str; 6] = ["bench", "build", "check", "fmt", "test", "tree"];
/// Folders of the repository whose files occur in documented commands.
const NAMED_FOLDERS: [&str; 6] = [
    "deploy/",
    "docs/",
    "examples/",
    "scenarios/",
    "scripts/",
    "truth/",
];

/// What is wrong with a documented command; `None` if it could be run.
fn mistake_in_command(command: &DocumentedCommand) -> Option<String> {
    let arguments = &command.words[1..];
    let found = match &*command.words[0] {
        "make" => mistake_of_make(arguments),
        "cargo" => mistake_of_cargo(arguments),
        "curl" => mistake_of_curl(arguments),
        "systemctl" => mistake_of_systemctl(arguments),
        program if program.starts_with("scripts/") || program.starts_with("truth/") => {
            mistake_of_script(program, arguments)
        }
        _ => None,
    };
    found.or_else(|| missing_file(&command.words))
}

fn read_repository_file(path: &str) -> String {
    fs::read_to_string(workspace().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Whether a word is a placeholder for a name that the reader chooses.
fn is_placeholder(word: &str) -> bool {
    word.chars().all(|c| c.is_ascii_uppercase() || c == '_') || word.contains('…')
}

fn mistake_of_make(arguments: &[String]) -> Option<String> {
    let makefile = read_repository_file("Makefile");
    let begins = |start: &str| makefile.lines().any(|line| line.starts_with(start));
    arguments.iter().find_map(|argument| {
        let (is_known, kind) = match argument.split_once('=') {
            Some((variable, _)) => (begins(&format!("{variable} ?=")), "variable"),
            None => (begins(&format!("{argument}:")), "target"),
        };
        (!is_known).then(|| format!("make has no {kind} {argument}"))
    })
}

fn mistake_of_cargo(arguments: &[String]) -> Option<String> {
    let subcommand = arguments.first()?;
    if !CARGO_SUBCOMMANDS.contains(&&**subcommand) {
        return Some(format!("cargo {subcommand} is not listed"));
    }
    let (options, filters) = match arguments.iter().position(|argument| argument == "--") {
        Some(end) => (&arguments[..end], &arguments[end + 1..]),
        None => (arguments, &[][..]),
    };
    let values = |option: &'static str| {
        let pairs = options.windows(2).filter(move |pair| pair[0] == option);
        pairs.map(|pair| &*pair[1])
    };
    let mut sources: Vec<PathBuf> = Vec::new();
    for package in values("-p") {
        let folder = workspace().join("crates").join(package);
        if !folder.join("Cargo.toml").exists() {
            return Some(format!("there is no crate {package}"));
        }
        for (option, kind) in [("--test", "tests"), ("--bench", "benches")] {
            for name in values(option) {
                let places = [format!("{name}.rs"), format!("{name}/main.rs")];
                let mut places = places
                    .map(|place| folder.join(kind).join(place))
                    .into_iter();
                let Some(source) = places.find(|place| place.exists()) else {
                    return Some(format!("{package} has no {name} in {kind}"));
                };
                sources.push(source);
            }
        }
    }
    let mut filters = filters.iter().filter(|filter| !filter.starts_with('-'));
    let missing =
        filters.find(|filter| !is_placeholder(filter) && !any_source_contains(&sources, filter))?;
    Some(format!("no test has {missing} in its name"))
}

/// Whether the source of a test, or of a module in the same folder, contains a text.
fn any_source_contains(sources: &[PathBuf], text: &str) -> bool {
    let files = sources.iter().flat_map(|source| {
        let is_main = source.file_name().is_some_and(|name| name == "main.rs");
        let modules = is_main.then(|| files_in(source.parent().expect("a folder")));
        modules.unwrap_or_else(|| vec![source.clone()])
    });
    let mut texts = files.filter_map(|file| fs::read_to_string(file).ok());
    texts.any(|source| source.contains(text))
}

fn files_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

fn mistake_of_curl(arguments: &[String]) -> Option<String> {
    let routes = read_repository_file("crates/zernel-serve/src/http_api.rs");
    let mut urls = arguments
        .iter()
        .filter(|word| word.starts_with("localhost"));
    let path = urls.next()?.split_once('/').map_or("", |(_, path)| path);
    let is_served = routes.contains(&format!(".route(\"/{path}\","));
    (!is_served).then(|| format!("the daemon does not serve /{path}"))
}

fn mistake_of_systemctl(arguments: &[String]) -> Option<String> {
    let unit = arguments.last()?;
    let exists = workspace().join(format!("deploy/{unit}.service")).exists();
    (!exists).then(|| format!("there is no service {unit}"))
}

/// An option of a script must occur in the text of the script. Options after `--` are not checked.
fn mistake_of_script(script: &str, arguments: &[String]) -> Option<String> {
    let Ok(attributes) = fs::metadata(workspace().join(script)) else {
        return Some(format!("there is no {script}"));
    };
    if attributes.permissions().mode() & 0o111 == 0 {
        return Some(format!("{script} is not executable"));
    }
    let text = read_repository_file(script);
    let own = arguments.iter().take_while(|argument| *argument != "--");
    let mut options = own.filter(|argument| argument.starts_with("--"));
    let unknown = options.find(|option| !text.contains(&**option))?;
    Some(format!("{script} has no option {unknown}"))
}

/// The first word of a command that names files of this repository of which there are none.
fn missing_file(words: &[String]) -> Option<String> {
    let is_inside = |word: &&String| NAMED_FOLDERS.iter().any(|folder| word.starts_with(folder));
    let mut paths = words.iter().filter(is_inside);
    let missing = paths.find(|path| !names_a_file(path))?;
    Some(format!("there is no {missing}"))
}

/// Whether the path names an existing file. A `*` or `NAME` in its last part stands for any text.
fn names_a_file(path: &str) -> bool {
    let path = workspace().join(path.replace("NAME", "*"));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let Some((start, end)) = name.split_once('*') else {
        return path.exists();
    };
    let names = files_in(path.parent().expect("inside a folder"));
    let mut names = names.iter().filter_map(|path| path.file_name()?.to_str());
    names.any(|name| name.starts_with(start) && name.ends_with(end))
}

#[test]
fn every_documented_command_exists() {
    let commands = documented_commands();
    assert!(commands.len() > 100, "{} commands", commands.len());
    let describe = |command: &DocumentedCommand| {
        Some(format!(
            "{}: {}",
            command.describe(),
            mistake_in_command(command)?
        ))
    };
    let mistakes: Vec<String> = commands.iter().filter_map(describe).collect();
    assert!(mistakes.is_empty(), "{}", mistakes.join("\n"));
}

#[test]
fn invalid_documented_commands_are_found() {
    let mistake_of = |line: &str| {
        let commands = commands_of_page("page", &format!("    {line}\n"));
        mistake_in_command(&commands[0])
    };
    for line in [
        "make chekc",
        "make fuzz MINUTE=1",
        "cargo rest",
        "cargo test -p zernel-nothing",
        "cargo test -p zernel --test nothing",
        "cargo bench -p zernel-ebpf --bench observe",
        "cargo test -p zernel --test verdict -- no_such_trial",
        "curl -s localhost:9091/metric",
        "systemctl start zernell",
        "scripts/nothing",
        "scripts/gpu/compare.py --bach 8",
        "zernel workload run examples/mixed.tom",
        "zernel lab test scenarios/no-*.toml",
    ] {
        assert!(mistake_of(line).is_some(), "{line}");
    }
    for line in [
        "make fuzz MINUTES=1",
        "cargo test -p zernel --test verdict -- steps_of --nocapture",
        "curl -s localhost:9091/metrics/quantiles",
        "systemctl enable --now zernel-sched",
        "zernel lab test scenarios/train-*.toml",
    ] {
        assert_eq!(mistake_of(line), None, "{line}");
    }
}
