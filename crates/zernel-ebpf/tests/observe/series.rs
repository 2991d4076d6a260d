//! The number of series of a node, and that all are documented.

use std::collections::{BTreeMap, BTreeSet};

use zernel_ebpf::metrics::{self, FAMILIES, TextFormat};
use zernel_ebpf::observer::ObservedProcess;
use zernel_model::snapshot::Scope;
use zernel_softgpu::config;
use zernel_softgpu::install::Prologue;
use zernel_testkit::communicator::{RANK_VARIABLE, join_communicator, own_rank};
use zernel_testkit::target::{Driver, Stage, Target, TargetRole, call};

use crate::counts::target_make_every_kind_of_call;
use crate::harness::{observe_stage, run_next_parts};
use crate::processes::{assert_exported_once, fork_waiting_child};

pub(crate) const SERIES_ROLES: &[(&str, TargetRole)] =
    &[("trainer", target_run_trainer_with_loaders)];

const RANK_COUNT: u64 = 8;
const LOADERS_PER_RANK: u64 = 8;

/// A rank that calls functions of every probe, with loader children.
fn target_run_trainer_with_loaders(driver: &Driver, rounds: u64) {
    let (rank, nccl) = (own_rank(), driver.nccl());
    target_make_every_kind_of_call(driver, rounds);
    for _ in 0..LOADERS_PER_RANK {
        fork_waiting_child();
    }
    let communicator = join_communicator(driver, rank, RANK_COUNT);
    let (from, to) = (
        driver.allocate_memory(1 << 16),
        driver.allocate_memory(1 << 16),
    );
    call!(nccl, "ncclAllReduce", from, to, 1000, 7, 0, communicator, 0);
    call!(nccl, "ncclBroadcast", from, to, 1000, 7, 0, communicator, 0);
    call!(nccl, "ncclReduce", from, to, 1000, 7, 0, 0, communicator, 0);
    call!(nccl, "ncclAllGather", from, to, 1000, 7, communicator, 0);
    call!(
        nccl,
        "ncclReduceScatter",
        from,
        to,
        1000,
        7,
        0,
        communicator,
        0
    );
    call!(nccl, "ncclGroupStart");
    call!(
        nccl,
        "ncclSend",
        from,
        1000,
        7,
        (rank + 1) % RANK_COUNT,
        communicator,
        0
    );
    call!(
        nccl,
        "ncclRecv",
        to,
        1000,
        7,
        (rank + RANK_COUNT - 1) % RANK_COUNT,
        communicator,
        0
    );
    call!(nccl, "ncclGroupEnd");
    call!(driver.cuda(), "cuStreamSynchronize", 0);
}

/// The names of a series' labels.
fn label_names(series: &str) -> BTreeSet<&str> {
    let (_, labels) = series.split_once('{').expect("labels");
    let labels = labels
        .split("\",")
        .filter_map(|label| Some(label.split_once('=')?.0));
    labels.filter(|name| *name != "le").collect()
}

fn assert_as_documented(text: &str) {
    let kinds: BTreeMap<&str, &str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '))
        .collect();
    for family in FAMILIES.iter() {
        let wanted: BTreeSet<&str> = family.labels.iter().copied().collect();
        assert_eq!(
            kinds.get(family.name),
            Some(&family.kind.name()),
            "{}",
            family.name
        );
        let part = match family.kind.name() {
            "histogram" => format!("{}_bucket{{", family.name),
            _ => format!("{}{{", family.name),
        };
        for series in text.lines().filter(|line| line.starts_with(&part)) {
            assert_eq!(label_names(series), wanted, "{series}");
        }
    }
}

/// Eight ranks with eight loaders each.
pub(crate) fn the_number_of_series_of_a_node_is_bounded() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut targets: Vec<_> = (0..RANK_COUNT)
        .map(|rank| {
            let mut command = stage.target_command("trainer", 3);
            command.env(config::DEVICES_VARIABLE, "1");
            Target::start(command.env(RANK_VARIABLE, rank.to_string()))
        })
        .collect();
    run_next_parts(&mut targets);
    observer.discover().expect("processes can be discovered");
    observer.read_counts().expect("maps can be read");
    let text = metrics::metrics_text(&observer.snapshot(), Scope::All, TextFormat::Prometheus);
    // Series of processes that do not belong to this test do not count.
    let trainers: Vec<u32> = targets.iter().map(Target::pid).collect();
    let is_own = |process: &&ObservedProcess| {
        let trainer = process.loads_for.unwrap_or(process.pid);
        trainers.contains(&trainer)
    };
    let own: Vec<_> = (observer.processes().filter(is_own))
        .map(|process| format!("{{pid=\"{}\"", process.pid))
        .collect();
    assert_eq!(own.len() as u64, RANK_COUNT * (1 + LOADERS_PER_RANK));
    let series = text.lines().filter(|line| {
        let counts = own.iter().any(|pid| line.contains(pid)) || !line.contains("{pid=");
        counts && !line.starts_with('#')
    });
    let series = series.count();
    assert!(series <= 2000, "{series} series");
    for target in &targets {
        let sample = format!(
            "zernel_nccl_calls_total{{pid=\"{}\",op=\"AllReduce\"}} 1",
            target.pid()
        );
        assert!(text.contains(&sample), "{sample}");
    }
    assert_exported_once(&observer);
    assert_as_documented(&text);
    eprintln!("{series} series of {RANK_COUNT} ranks with {LOADERS_PER_RANK} loaders each");
}
