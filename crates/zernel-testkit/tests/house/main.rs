//! Checks house rules: the dependencies between crates, the length of files and functions, that every public type of
//! the workspace has a name of its own, that the drills of CONTRIBUTING.md still apply, that documented commands
//! and links between documents lead to something that exists, and the words of all texts.

mod commands;
mod crate_dependencies;
mod drills;
mod exceptions;
mod links;
mod sources;
mod tokens;
mod words;

use std::collections::{BTreeMap, BTreeSet};

use exceptions::{LONG_FILES, LONG_FUNCTIONS, SHARED_NAMES};
use sources::product_sources;
use zernel_testkit::documented::workspace;

/// The most lines that a file may have, without its tests.
const MAX_FILE_LINES: usize = 600;
/// The most lines that a function may have.
const MAX_FUNCTION_LINES: usize = 60;

/// Compares the texts that break a rule with the exceptions from the rule. A text that breaks the rule without an
/// exception is an error, and so is an exception without such a text. `found` maps each text that breaks the rule to
/// its description.
fn compare_with_exceptions(
    rule: &str,
    found: &BTreeMap<String, String>,
    exceptions: &[&str],
) -> Result<(), String> {
    let listed: BTreeSet<&str> = exceptions.iter().copied().collect();
    let new = found.iter().filter(|(name, _)| !listed.contains(&***name));
    let new: Vec<String> = new
        .map(|(name, why)| format!("  {name}: {why}\n"))
        .collect();
    let stale = listed.iter().filter(|name| !found.contains_key(**name));
    let stale: Vec<String> = stale.map(|name| format!("  {name}\n")).collect();
    match (new.is_empty(), stale.is_empty()) {
        (true, true) => Ok(()),
        (false, _) => Err(format!("{rule}:\n{}", new.concat())),
        (true, false) => Err(format!(
            "these keep the rule, so delete their exceptions ({rule}):\n{}",
            stale.concat()
        )),
    }
}

#[track_caller]
fn check_rule(rule: &str, found: &BTreeMap<String, String>, exceptions: &[&str]) {
    if let Err(report) = compare_with_exceptions(rule, found, exceptions) {
        panic!("{report}");
    }
}

#[test]
fn no_source_file_exceeds_line_limit() {
    let sources = product_sources(&workspace());
    assert!(sources.len() > 100, "{} files", sources.len());
    let long = sources
        .into_iter()
        .filter(|source| source.lines > MAX_FILE_LINES);
    let found = long.map(|source| (source.path, format!("{} lines", source.lines)));
    let rule = format!("a file has at most {MAX_FILE_LINES} lines");
    check_rule(&rule, &found.collect(), LONG_FILES);
}

#[test]
fn no_function_exceeds_line_limit() {
    let (mut found, mut functions) = (BTreeMap::new(), 0);
    for source in product_sources(&workspace()) {
        for function in source.functions() {
            functions += 1;
            if function.lines > MAX_FUNCTION_LINES {
                let name = format!("{} {}", source.path, function.name);
                found.insert(name, format!("{} lines", function.lines));
            }
        }
    }
    assert!(functions > 1000, "{functions} functions");
    let rule = format!("a function has at most {MAX_FUNCTION_LINES} lines");
    check_rule(&rule, &found, LONG_FUNCTIONS);
}

#[test]
fn no_two_public_types_share_a_name() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in product_sources(&workspace()) {
        for name in source.public_types() {
            places.entry(name).or_default().push(source.path.clone());
        }
    }
    assert!(places.len() > 100, "{} types", places.len());
    let shared = places.into_iter().filter(|(_, paths)| paths.len() > 1);
    let found = shared.map(|(name, paths)| (name, paths.join(", ")));
    check_rule(
        "a public name means one type",
        &found.collect(),
        SHARED_NAMES,
    );
}

#[test]
fn rule_check_reports_new_offenders_and_stale_exceptions() {
    let found = BTreeMap::from([("a".to_owned(), "61 lines".to_owned())]);
    assert_eq!(compare_with_exceptions("rule", &found, &["a"]), Ok(()));
    assert_eq!(
        compare_with_exceptions("rule", &found, &[]),
        Err("rule:\n  a: 61 lines\n".into())
    );
    let stale = compare_with_exceptions("rule", &found, &["a", "b"]).unwrap_err();
    assert!(stale.ends_with("  b\n"), "{stale}");
}
