//! Checks that `docs/metrics.md` lists exactly the exported metrics. `ZERNEL_REWRITE=1` rewrites the file.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

use zernel_ebpf::aggregation::AggregatedMetrics;
use zernel_ebpf::metrics::FAMILIES;

const METRICS_DOCUMENT_PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");

const DOCUMENT_INTRODUCTION: &str = "\
# Metrics

`zernel observe` exports these metrics on `/metrics`. This file is generated:
`ZERNEL_REWRITE=1 cargo test -p zernel-ebpf --test documented` writes it, and the same test fails when it is
out of date.

`pid` is the pid in the initial pid namespace. `gpu_id` is the index of the GPU in NVML, independent of
`CUDA_VISIBLE_DEVICES`; without NVML it is the index in CUDA. Join with `zernel_process_info` for job, rank, pod and
container. After pid reuse or exec, only the newest process is exported. A process that exited is exported for
another minute; families without a `pid` keep its counts. On the unix socket, users other than root get only their
own processes, and no metrics of the machine. With `--expose aggregate`, a client without the token gets the
families without `pid`, summed over all processes, and those of the machine, of the observer and of the scheduler.

The families `zernel_sched_` are those of a running `zernel sched`, which the daemon passes on ([scheduler.md](scheduler.md)).

Memory from CUDA's memory pools is exported while the pool functions are not sampled. If a program allocates from a
pool for every tensor, these functions are sampled, and the memory counts in `zernel_gpu_memory_unexplained_bytes`.

Histograms have buckets from 1 µs to 69 s, each four times as wide as the one before. `/metrics/quantiles` has
only the families of the first table, with quantiles instead of buckets. In OpenMetrics, the family name of a counter
has no `_total`.

";

/// A metric family, as a row of a table.
struct FamilyRow {
    name: String,
    kind: String,
    labels: String,
    help: String,
}

/// The metric families of `AggregatedMetrics`, parsed from the text that it writes.
fn aggregation_family_rows() -> Vec<FamilyRow> {
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
            FamilyRow {
                name: name.to_owned(),
                kind: kind.expect("a type").to_owned(),
                labels: labels_of(&text, name),
                help: help.to_owned(),
            }
        })
        .collect()
}

/// The labels of a family's series, without `le`.
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
    let names: Vec<_> = names.filter(|name| *name != "le").map(as_code).collect();
    names.join(", ")
}

fn observer_family_rows() -> Vec<FamilyRow> {
    let families = FAMILIES.iter();
    families
        .map(|family| FamilyRow {
            name: family.name.to_owned(),
            kind: family.kind.name().to_owned(),
            labels: family
                .labels
                .iter()
                .map(|label| as_code(label))
                .collect::<Vec<_>>()
                .join(", "),
            help: family.help.to_owned(),
        })
        .collect()
}

fn as_code(text: &str) -> String {
    format!("`{text}`")
}

fn family_table(title: &str, rows: &[FamilyRow]) -> String {
    let mut text = format!("## {title}\n\n| name | kind | labels | meaning |\n|---|---|---|---|\n");
    for FamilyRow {
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
        family_table("Metrics of every source", &aggregation_family_rows()),
        family_table("Metrics of the observer", &observer_family_rows()),
    ];
    let wanted = DOCUMENT_INTRODUCTION.to_owned() + &tables.join("\n");
    if env::var_os("ZERNEL_REWRITE").is_some() {
        fs::write(METRICS_DOCUMENT_PATH, &wanted).expect("the file can be written");
    }
    let file = fs::read_to_string(Path::new(METRICS_DOCUMENT_PATH)).unwrap_or_default();
    assert!(
        file == wanted,
        "docs/metrics.md is out of date: run this test with ZERNEL_REWRITE=1"
    );
}

#[test]
fn no_metric_family_is_listed_twice() {
    let mut names = BTreeSet::new();
    for row in aggregation_family_rows()
        .iter()
        .chain(&observer_family_rows())
    {
        assert!(names.insert(row.name.clone()), "{} twice", row.name);
    }
}
