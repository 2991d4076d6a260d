//! Probes on the software GPU, held against its own log of what really happened.

#[path = "../bpf/mod.rs"]
mod bpf;
mod target;

use std::collections::BTreeMap;
use std::process::ExitCode;

use target::{Stage, Target};
use zernel_ebpf::observer::{
    CallCount, GovernorOptions, ObservedProcess, Observer, Options, Rung, Seen,
};
use zernel_ebpf::probes::SYMBOLS;
use zernel_softgpu::install::Prologue;
use zernel_testkit::{root, trial};

fn main() -> ExitCode {
    let roles: &[(&str, target::Role)] = &[
        ("everything", target::everything),
        ("launches", target::launches),
    ];
    if let Some(code) = target::act(roles) {
        return code;
    }
    let needs = [root(), bpf::need()];
    zernel_testkit::main([
        trial(
            "every_call_is_counted_on_every_rung",
            &needs,
            counts_on_every_rung,
        ),
        trial(
            "a_million_calls_of_four_processes_are_counted",
            &needs,
            a_million_calls,
        ),
    ])
}

/// Observes with the libraries of a stage attached before anyone uses them, and counts everything.
fn observe(stage: &Stage, rungs: &[Rung]) -> Observer {
    let options = Options {
        rungs: rungs.to_vec(),
        libraries: ["libcuda.so.1", "libnccl.so.2"]
            .map(|name| stage.library(name))
            .to_vec(),
        governor: GovernorOptions::EXACT,
        ..Options::default()
    };
    Observer::start(&options).expect("this machine can observe")
}

fn run(targets: &mut [Target]) {
    for target in &mut *targets {
        target.go();
    }
    for target in targets {
        target.wait_until_done();
    }
}

/// What the software GPU says of a process, by the names we use.
fn truth_of(stage: &Stage, pid: u32) -> BTreeMap<&'static str, CallCount> {
    let names: BTreeMap<&str, &'static str> = SYMBOLS
        .iter()
        .flat_map(|symbol| symbol.names.iter().map(|name| (*name, symbol.name())))
        .collect();
    let mut calls: BTreeMap<&'static str, CallCount> = BTreeMap::new();
    for process in stage.truth().processes.iter().filter(|p| p.pid == pid) {
        for ((_, symbol, result), count) in &process.returned {
            let Some(name) = names.get(&**symbol) else {
                continue;
            };
            let total = calls.entry(name).or_default();
            total.calls += count.calls;
            if *result == 0 {
                total.bytes += count.bytes;
            } else {
                total.failed += count.calls;
            }
        }
    }
    calls
}

fn find(observer: &Observer, pid: u32) -> &ObservedProcess {
    let mut processes = observer.processes();
    let found = processes.find(|process| process.pid == pid);
    found.expect("the process was observed")
}

fn a_million_calls() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe(&stage, &Rung::LADDER);
    let mut targets: Vec<_> = (0..4)
        .map(|_| stage.target("everything", 14_000))
        .collect();
    run(&mut targets);
    observer.read().expect("maps can be read");
    let mut calls = 0;
    for target in &targets {
        let process = find(&observer, target.pid());
        let seen: BTreeMap<_, _> = process.calls().collect();
        assert_eq!(seen, truth_of(&stage, target.pid()));
        assert_eq!(process.seen, Seen::Complete);
        calls += seen.values().map(|count| count.calls).sum::<u64>();
    }
    assert!(calls >= 1_000_000, "{calls}");
    assert_eq!(observer.losses(), Default::default());
}

fn counts_on_every_rung() {
    for rung in Rung::LADDER {
        let stage = Stage::new(Prologue::Push);
        let mut observer = observe(&stage, &[rung]);
        let mut targets: Vec<_> = (0..4).map(|_| stage.target("everything", 200)).collect();
        run(&mut targets);
        observer.read().expect("maps can be read");
        for target in &targets {
            let process = find(&observer, target.pid());
            let seen: BTreeMap<_, _> = process.calls().collect();
            assert_eq!(seen, truth_of(&stage, target.pid()), "{}", rung.name());
            assert_eq!(process.seen, Seen::Complete);
            assert_eq!(process.memory[&0].total.current_bytes, 4096);
        }
        assert_eq!(observer.losses(), Default::default());
    }
}
