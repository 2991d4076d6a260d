//! `docs/metrics.md` lists every metric, and only those. `ZERNEL_REWRITE=1` writes it anew.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

use zernel_ebpf::aggregation::AggregatedMetrics;
use zernel_ebpf::metrics::FAMILIES;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");

const INTRODUCTION: &str = "\
# Metrics

What `zernel observe` tells on `/metrics`. This file is generated:
`ZERNEL_REWRITE=1 cargo test -p zernel-ebpf --test documented` writes it, and the same test fails when it is
out of date.

A `pid` is that of the initial pid namespace. `gpu_id` is NVML's number of a GPU, whatever
`CUDA_VISIBLE_DEVICES` says; where NVML is not there, it is CUDA's own. Join with `zernel_process_info` for
job, rank, pod and container. Of a pid that is used again, and of a program that executes another, the last
life is told. What has ended is told for another minute; families without a `pid` keep what it did. Users
other than root, on the unix socket, are told of their own processes, and not of the machine.

Memory that a process takes from CUDA's pools is told as long as the functions that do so are not sampled; a program
that takes it for every tensor has it in `zernel_gpu_memory_unexplained_bytes`.

Histograms have buckets from 1 µs to 69 s, each four times as wide as the one before. `/metrics/quantiles` has
the families of the first table only, with quantiles in place of buckets. In OpenMetrics the name of a
counter's family lacks `_total`.

";

/// A row of a table.
struct Row {
    name: String,
    kind: String,
    labels: String,
    help: String,
}

/// The families of the aggregation, told from what it writes.
fn aggregated() -> Vec<Row> {
    let mut metrics = AggregatedMetrics::default();
    metrics.record_gpu_mem(1, 0, 1, 1);
    metrics.record_cuda_latency(1, 1);
    metrics.record_nccl("AllReduce", 1);
    metrics.record_dataloader_wait(1, 1);
    metrics.record_dist_sync(1, 1);
    let text = metrics.to_prometheus();
    let heads = text.lines().filter_map(|line| line.strip_prefix("# HELP "));
    heads
        .map(|head| {
            let (name, help) = head.split_once(' ').expect("a help text");
            let kind = format!("# TYPE {name} ");
            let kind = text.lines().find_map(|line| line.strip_prefix(&*kind));
            Row {
                name: name.to_owned(),
                kind: kind.expect("a type").to_owned(),
                labels: labels_of(&text, name),
                help: help.to_owned(),
            }
        })
        .collect()
}

/// The labels of a family's series, less those that say which part of a histogram it is.
fn labels_of(text: &str, name: &str) -> String {
    let mut samples = text.lines().filter(|line| line.starts_with(name));
    let (_, rest) = samples
        .next()
        .and_then(|line| line.split_once('{'))
        .expect("a sample");
    let (labels, _) = rest.split_once('}').expect("the end of its labels");
    let names = labels
        .split(',')
        .filter_map(|label| Some(label.split_once('=')?.0));
    let names: Vec<_> = names.filter(|name| *name != "le").map(code).collect();
    names.join(", ")
}

fn observed() -> Vec<Row> {
    let families = FAMILIES.iter();
    families
        .map(|family| Row {
            name: family.name.to_owned(),
            kind: family.kind.name().to_owned(),
            labels: family
                .labels
                .iter()
                .map(|label| code(label))
                .collect::<Vec<_>>()
                .join(", "),
            help: family.help.to_owned(),
        })
        .collect()
}

fn code(text: &str) -> String {
    format!("`{text}`")
}

fn table(title: &str, rows: &[Row]) -> String {
    let mut text =
        format!("## {title}\n\n| name | kind | labels | what it says |\n|---|---|---|---|\n");
    for Row {
        name,
        kind,
        labels,
        help,
    } in rows
    {
        writeln!(text, "| `{name}` | {kind} | {labels} | {help} |")
            .expect("a String takes everything");
    }
    text
}

#[test]
fn every_metric_is_documented() {
    let tables = [
        table("What every source of metrics has", &aggregated()),
        table("What observing adds", &observed()),
    ];
    let wanted = INTRODUCTION.to_owned() + &tables.join("\n");
    if env::var_os("ZERNEL_REWRITE").is_some() {
        fs::write(FILE, &wanted).expect("the file can be written");
    }
    let file = fs::read_to_string(Path::new(FILE)).unwrap_or_default();
    assert!(
        file == wanted,
        "docs/metrics.md is out of date: run this test with ZERNEL_REWRITE=1"
    );
}

#[test]
fn no_family_is_there_twice() {
    let mut names = BTreeSet::new();
    for row in aggregated().iter().chain(&observed()) {
        assert!(names.insert(row.name.clone()), "{} twice", row.name);
    }
}
