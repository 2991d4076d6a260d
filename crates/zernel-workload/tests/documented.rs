//! `docs/workload.md` lists every key of a workload file and every work type, and only those.
//! `ZERNEL_REWRITE=1` writes it.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::ops::ControlFlow;
use std::{env, fs};

use zernel_workload::spec_keys::SpecKey;
use zernel_workload::{ReportTable, WorkType, WorkloadSpec};

const WORKLOAD_DOCUMENT_PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/workload.md");

const DOCUMENT_INTRODUCTION: &str = "\
# Workload files

`zernel workload run FILE` runs the workload that a TOML file describes and prints one report per worker. This page lists
every key of such a file. The page is generated: `ZERNEL_REWRITE=1 cargo test -p zernel-workload --test documented` writes
it, and the same test fails when the page is out of date. `zernel workload list` prints the work types with their parameters.

A workload file has some keys of its own, one `[[group]]` per group of workers, and one `[[cgroup]]` per cgroup. Unknown keys are
errors, and so is a file without workers; `zernel workload run` then exits with 2 and prints the name of the file.

## Example

This workload file runs as it is:

```toml
";

const EXAMPLE_SPEC: &str = r#"duration_ms = 2000

[[group]]
name = "batch"
workers = 2
nice = 5
work = "spin_wait" # a work type with its default parameters

[[group]]
name = "interactive"
workers = 4
affinity = { random_subset = { count = 1, seed = 7 } }
work.bursty = { burst_us = 500, sleep_us = 1000 } # a work type with parameters

[[group]]
name = "training"
workers = 4 # ranks * (1 trainer + 1 loader)

[group.work.ml_training] # another way to write a work type with parameters
ranks = 2
loaders = 1
gpu_us = 2000

[[cgroup]]
name = "background"
groups = ["batch"]
weight = 50
"#;

const DOCUMENT_CONVENTIONS: &str = "\
```

If the kernel refuses a setting of a cgroup or a worker, for example for want of privilege, the report names that setting.

## Units, types and paths

- A key that ends in `_ms` is in milliseconds, `_us` in microseconds, `_kib` in KiB (1024 bytes).
- *CPU time* is time in which the worker's own thread runs on a CPU; time in which it is preempted does not count.
- The type *choice* means that the list below the table has the values to choose from. In that list, the name of a type,
  like *integer*, stands for a value of that type.
- A relative *path* starts at the folder of the workload file, not at the working directory.
";

fn written_documentation() -> String {
    let mut text = [DOCUMENT_INTRODUCTION, EXAMPLE_SPEC, DOCUMENT_CONVENTIONS].concat();
    for (table, keys) in WorkloadSpec::documented_tables() {
        let title = match table {
            "" => "Keys of the file".to_owned(),
            table => format!("Keys of `{table}`"),
        };
        write!(text, "\n## {title}\n\n{}", table_of(&keys)).unwrap();
    }
    text.push_str("\n## Work types\n");
    for work in WorkType::all() {
        let about = work.describe();
        write!(
            text,
            "\n### `{}`\n\n- Does: {}.\n- Exercises: {}.\n- Workers of a group: {}.\n",
            about.name,
            about.does,
            about.exercises,
            work.worker_rule(),
        )
        .unwrap();
        match work.parameters() {
            keys if keys.is_empty() => text.push_str("\nNo parameters.\n"),
            keys => write!(text, "\n{}", table_of(&keys)).unwrap(),
        }
    }
    text
}

fn table_of(keys: &[SpecKey]) -> String {
    let mut text = "| key | type | default | meaning |\n|---|---|---|---|\n".to_owned();
    for key in keys {
        let default = match key.default.as_str() {
            word @ ("required" | "not set") => word.to_owned(),
            value => format!("`{value}`"),
        };
        let SpecKey {
            name,
            kind,
            meaning,
            ..
        } = key;
        writeln!(text, "| `{name}` | {kind} | {default} | {meaning} |").unwrap();
    }
    for key in keys.iter().filter(|key| !key.choices.is_empty()) {
        writeln!(text, "\nValues of `{}`:\n", key.name).unwrap();
        for choice in &key.choices {
            writeln!(text, "- `{}`: {}", choice.value, choice.meaning).unwrap();
            for key in &choice.keys {
                let (name, default, meaning) = (key.name, &key.default, &key.meaning);
                writeln!(text, "  - `{name}` ({default}): {meaning}").unwrap();
            }
        }
    }
    text
}

#[test]
fn workload_document_is_up_to_date() {
    let wanted = written_documentation();
    if env::var_os("ZERNEL_REWRITE").is_some() {
        fs::write(WORKLOAD_DOCUMENT_PATH, &wanted).expect("the file can be written");
    }
    let file = fs::read_to_string(WORKLOAD_DOCUMENT_PATH).unwrap_or_default();
    assert!(
        file == wanted,
        "docs/workload.md is out of date: run this test with ZERNEL_REWRITE=1"
    );
}

/// The names that the parser takes where `spec` has the unknown name `nonsense`, from its error.
fn accepted_names(spec: &str) -> BTreeSet<String> {
    let error = WorkloadSpec::parse(spec, "spec.toml")
        .unwrap_err()
        .to_string();
    let (_, expected) = error.split_once("`nonsense`, ").expect(&error);
    let names = expected.split('`').skip(1).step_by(2);
    names.map(str::to_owned).collect()
}

/// The names of `keys`.
fn key_names(keys: &[SpecKey]) -> BTreeSet<String> {
    keys.iter().map(|key| key.name.to_owned()).collect()
}

#[test]
fn the_parser_takes_the_documented_keys_and_no_others() {
    let [(_, file), (_, group), (_, cgroup)] = WorkloadSpec::documented_tables();
    assert_eq!(accepted_names("nonsense = 1"), key_names(&file));
    assert_eq!(accepted_names("[[group]]\nnonsense = 1"), key_names(&group));
    assert_eq!(
        accepted_names("[[cgroup]]\nnonsense = 1"),
        key_names(&cgroup)
    );
    let types = WorkType::all();
    let documented = types.iter().map(|work| work.name().to_owned());
    assert_eq!(
        accepted_names("[[group]]\nwork = 'nonsense'"),
        documented.collect()
    );
    for work in types.iter().filter(|work| !work.parameters().is_empty()) {
        let spec = format!("[[group]]\nwork.{} = {{ nonsense = 1 }}", work.name());
        assert_eq!(
            accepted_names(&spec),
            key_names(&work.parameters()),
            "{spec}"
        );
    }
}

#[test]
fn the_parser_takes_the_documented_choices_and_no_others() {
    let in_group = |key: &SpecKey| format!("[[group]]\n{} = 'nonsense'", key.name);
    let [(_, file), (_, group), _] = WorkloadSpec::documented_tables();
    let mut keys: Vec<(SpecKey, String)> = group
        .into_iter()
        .map(|key| (key.clone(), in_group(&key)))
        .collect();
    keys.extend(
        file.into_iter()
            .map(|key| (key.clone(), format!("{} = 'nonsense'", key.name))),
    );
    for work in WorkType::all() {
        for key in work.parameters() {
            let value = match key.kind.starts_with("array") {
                true => "['nonsense']",
                false => "'nonsense'",
            };
            let spec = format!(
                "[[group]]\nwork.{} = {{ {} = {value} }}",
                work.name(),
                key.name
            );
            keys.push((key, spec));
        }
    }
    let choices: Vec<_> = keys
        .iter()
        .filter(|(key, _)| !key.choices.is_empty())
        .collect();
    assert!(choices.len() >= 6, "{choices:?}");
    for (key, spec) in choices {
        let documented = key.choices.iter().map(|choice| {
            let name = choice.value.trim_start_matches(['{', ' ', '"']);
            name.split([' ', '"']).next().unwrap().to_owned()
        });
        assert_eq!(accepted_names(spec), documented.collect(), "{spec}");
    }
}

#[test]
fn documented_defaults_are_the_parsers() {
    let mut checked = 0;
    for work in WorkType::all() {
        for key in work.parameters() {
            if key.default == "required" || key.kind == "path" {
                continue;
            }
            let name = work.name();
            let stated = format!(
                "[[group]]\nworkers = 2\nwork.{name} = {{ {} = {} }}",
                key.name, key.default
            );
            let absent = format!("[[group]]\nworkers = 2\nwork.{name} = {{}}");
            // `cgroup_churn` has a parameter without a usable default.
            if name != "cgroup_churn" {
                let parse = |spec: &str| WorkloadSpec::parse(spec, "spec.toml").unwrap();
                assert_eq!(parse(&stated), parse(&absent), "{stated}");
                checked += 1;
            }
        }
    }
    assert!(checked > 20, "{checked}");
}

#[test]
fn documented_example_spec_runs() {
    let spec = WorkloadSpec::parse(EXAMPLE_SPEC, "example.toml").unwrap();
    let outcome = spec
        .run(
            |progress| match progress.rounds.iter().all(|(_, rounds)| *rounds > 2) {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            },
        )
        .unwrap();
    assert!(
        outcome.reports.iter().all(|report| report.completed),
        "{}",
        ReportTable(&outcome.reports)
    );
}
