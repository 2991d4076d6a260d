//! The dependencies between crates of the workspace are as listed here. Dev-dependencies are not restricted.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// Each crate and the crates that it may depend on. It may also depend on the crates that those depend on. No crate
/// depends on `zernel-testkit` or `zernel-testjob`: only tests use them.
const ALLOWED_CRATE_DEPENDENCIES: &[(&str, &[&str])] = &[
    (
        "zernel",
        &[
            "zernel-ebpf",
            "zernel-report",
            "zernel-serve",
            "zernel-scheduler",
            "zernel-truth",
            "zernel-workload",
            "zernel-lab",
            "zernel-lab-schedulers",
        ],
    ),
    ("zernel-ebpf", &["zernel-identity", "zernel-elf"]),
    ("zernel-identity", &["zernel-model"]),
    ("zernel-report", &["zernel-model"]),
    ("zernel-serve", &["zernel-identity", "zernel-model"]),
    ("zernel-model", &["zernel-phase"]),
    ("zernel-scheduler", &["zernel-model"]),
    ("zernel-truth", &["zernel-phase", "zernel-report"]),
    ("zernel-elf", &[]),
    ("zernel-phase", &[]),
    ("zernel-workload", &["zernel-model"]),
    ("zernel-lab", &["zernel-workload"]),
    ("zernel-lab-schedulers", &[]),
    ("zernel-softgpu", &[]),
    ("zernel-softgpu-cuda", &["zernel-softgpu"]),
    ("zernel-softgpu-nccl", &["zernel-softgpu"]),
    ("zernel-softgpu-nvml", &["zernel-softgpu"]),
    ("zernel-softgpu-torch", &[]),
    (
        "zernel-testjob",
        &[
            "zernel-softgpu-cuda",
            "zernel-softgpu-nccl",
            "zernel-softgpu-nvml",
            "zernel-softgpu-torch",
        ],
    ),
    ("zernel-testkit", &["zernel-softgpu", "zernel-lab"]),
];

type CrateGraph = BTreeMap<String, BTreeSet<String>>;

/// The crates of the workspace, and the crates of the workspace that each of them depends on.
fn workspace_graph() -> CrateGraph {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let output = Command::new(cargo)
        .args([
            "metadata",
            "--no-deps",
            "--offline",
            "--format-version",
            "1",
        ])
        .current_dir(crate::workspace())
        .output()
        .expect("cargo runs");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complaint}");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    graph_of_metadata(&metadata)
}

/// The dependency graph in the output of `cargo metadata`: dependencies on crates with a path, without
/// dev-dependencies.
fn graph_of_metadata(metadata: &Value) -> CrateGraph {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let name = |value: &Value| value["name"].as_str().expect("a name").to_owned();
    let packages = list(&metadata["packages"]).into_iter();
    packages
        .map(|package| {
            let dependencies = list(&package["dependencies"]).into_iter();
            let built_from = dependencies
                .filter(|dependency| dependency["kind"] != "dev" && dependency["path"].is_string());
            (
                name(&package),
                built_from.map(|value| name(&value)).collect(),
            )
        })
        .collect()
}

fn dependency_graph_of(arrows: &[(&str, &[&str])]) -> CrateGraph {
    let arrows = arrows.iter().map(|(from, to)| {
        let to = to.iter().map(|name| (*name).to_owned());
        ((*from).to_owned(), to.collect())
    });
    arrows.collect()
}

/// All crates that a crate depends on, directly or indirectly. In a circle, a crate depends on itself.
fn reachable_crates(graph: &CrateGraph, from: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut open: Vec<&str> = vec![from];
    while let Some(name) = open.pop() {
        for next in graph.get(name).into_iter().flatten() {
            if reached.insert(next.clone()) {
                open.push(next);
            }
        }
    }
    reached
}

/// Crates that depend on themselves, directly or indirectly.
fn crates_in_dependency_cycles(graph: &CrateGraph) -> Vec<&String> {
    let names = graph.keys();
    names
        .filter(|name| reachable_crates(graph, name).contains(*name))
        .collect()
}

/// The dependencies in `graph` that `allowed` does not list.
fn forbidden_dependencies(graph: &CrateGraph, allowed: &CrateGraph) -> Vec<String> {
    let arrows = graph
        .iter()
        .flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
    let upward = arrows.filter(|(from, to)| !reachable_crates(allowed, from).contains(*to));
    upward.map(|(from, to)| format!("{from} -> {to}")).collect()
}

#[test]
fn crate_dependencies_are_as_listed_and_acyclic() {
    let (graph, allowed) = (
        workspace_graph(),
        dependency_graph_of(ALLOWED_CRATE_DEPENDENCIES),
    );
    assert!(graph.len() > 10, "{graph:?}");
    assert_eq!(crates_in_dependency_cycles(&allowed), Vec::<&String>::new());
    assert_eq!(crates_in_dependency_cycles(&graph), Vec::<&String>::new());
    assert_eq!(
        forbidden_dependencies(&graph, &allowed),
        Vec::<String>::new()
    );
}

#[test]
fn every_listed_crate_and_dependency_exists() {
    let (graph, allowed) = (
        workspace_graph(),
        dependency_graph_of(ALLOWED_CRATE_DEPENDENCIES),
    );
    assert!(graph.keys().eq(allowed.keys()), "{graph:#?}");
    assert_eq!(
        forbidden_dependencies(&allowed, &graph),
        Vec::<String>::new()
    );
}

#[test]
fn cycles_and_unlisted_dependencies_are_found() {
    let allowed = dependency_graph_of(&[("a", &["b"]), ("b", &["c"]), ("c", &[])]);
    let short_cut = dependency_graph_of(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])]);
    assert_eq!(
        forbidden_dependencies(&short_cut, &allowed),
        Vec::<String>::new()
    );
    let circle = dependency_graph_of(&[("a", &["b"]), ("b", &["c"]), ("c", &["b"])]);
    assert_eq!(forbidden_dependencies(&circle, &allowed), ["c -> b"]);
    assert_eq!(crates_in_dependency_cycles(&circle), ["b", "c"]);
}

#[test]
fn dev_dependencies_are_not_checked() {
    let metadata = serde_json::json!({"packages": [{"name": "a", "dependencies": [
        {"name": "b", "kind": "dev", "path": "/b"},
        {"name": "c", "kind": "build", "path": "/c"},
        {"name": "d", "kind": null, "path": "/d"},
        {"name": "e", "kind": null},
    ]}]});
    assert_eq!(
        graph_of_metadata(&metadata),
        dependency_graph_of(&[("a", &["c", "d"])])
    );
}
