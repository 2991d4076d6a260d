//! Shared code of the tests: an observer, and the truth to compare it with.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use zernel_ebpf::observer::{
    CallCount, GovernorOptions, ObservedProcess, Observer, ObserverOptions, ObserverThread,
    UprobeKind,
};
use zernel_ebpf::probes::SYMBOLS;
use zernel_model::snapshot::{AttachState, Scope};
use zernel_testkit::communicator::NCCL_IN_PROGRESS;
use zernel_testkit::eventually;
use zernel_testkit::target::{Stage, Target};

/// Options that count everything, with the libraries of a stage attached before any process uses them.
pub(crate) fn options_that_count_everything(stage: &Stage) -> ObserverOptions {
    ObserverOptions {
        libraries: libraries_of_stage(stage),
        governor: GovernorOptions::COUNT_EVERYTHING,
        ..ObserverOptions::default()
    }
}

pub(crate) fn libraries_of_stage(stage: &Stage) -> Vec<PathBuf> {
    let names = ["libcuda.so.1", "libnccl.so.2"];
    names.map(|name| stage.library_path(name)).to_vec()
}

pub(crate) fn start_observer(options: &ObserverOptions) -> Observer {
    Observer::start(options).expect("this machine can observe")
}

pub(crate) fn observe_stage(stage: &Stage) -> Observer {
    start_attached(&options_that_count_everything(stage))
}

pub(crate) fn observe_stage_with_uprobe_kind(stage: &Stage, rung: UprobeKind) -> Observer {
    start_attached(&ObserverOptions {
        rungs: vec![rung],
        ..options_that_count_everything(stage)
    })
}

/// Starts an observer and waits until probes are attached to all libraries of its options.
pub(crate) fn start_attached(options: &ObserverOptions) -> Observer {
    let mut observer = start_observer(options);
    attach_rest(&mut observer);
    observer
}

/// Attaches to the libraries that have no probes yet. On a busy machine attaching may take longer than the
/// observer waits; then the next scan attaches.
pub(crate) fn attach_rest(observer: &mut Observer) {
    eventually("every library has probes", || {
        let is_attached = observer.snapshot().ledger.files.iter().all(|file| {
            let mut functions = file.functions.iter();
            functions.any(|function| function.state == AttachState::Attached)
        });
        if !is_attached {
            observer.scan().expect("processes can be scanned");
        }
        is_attached
    });
}

/// An observer on its own thread, as a daemon has it.
pub(crate) struct ObserverOnThread(ObserverThread);

impl ObserverOnThread {
    pub(crate) fn start(options: &ObserverOptions) -> Self {
        let round = Duration::from_millis(500);
        Self(ObserverThread::start(start_observer(options), round).expect("it runs"))
    }

    /// Runs a function on the observer.
    pub(crate) fn with_observer<T>(&self, function: impl FnOnce(&mut Observer) -> T) -> T {
        let result = self.0.requests().call_with_observer(function);
        result.expect("the observer runs")
    }

    /// Waits until a condition holds for the observer.
    pub(crate) fn wait_until(&self, what: &str, condition: impl Fn(&Observer) -> bool) {
        eventually(what, || self.with_observer(|observer| condition(observer)));
    }

    /// Stops the thread, which must not have failed.
    pub(crate) fn stop(self) -> Observer {
        self.0.stop().expect("observing does not fail")
    }
}

/// Runs the next part of all targets at the same time.
pub(crate) fn run_next_parts(targets: &mut [Target]) {
    for target in &mut *targets {
        target.start_part();
    }
    for target in targets {
        target.wait_until_done();
    }
}

/// True calls of a process from the software GPU's log, by the names in reports.
pub(crate) fn logged_calls(stage: &Stage, pid: u32) -> BTreeMap<&'static str, CallCount> {
    let names: BTreeMap<&str, &'static str> = SYMBOLS
        .iter()
        .flat_map(|symbol| symbol.names.iter().map(|name| (*name, symbol.name())))
        .collect();
    let mut calls: BTreeMap<&'static str, CallCount> = BTreeMap::new();
    for process in stage
        .read_truth_log()
        .processes
        .iter()
        .filter(|p| p.pid == pid)
    {
        for ((_, symbol, result), count) in &process.returned {
            let Some(name) = names.get(&**symbol) else {
                continue;
            };
            let total = calls.entry(name).or_default();
            total.calls += count.calls;
            if *result == 0 || (symbol.starts_with("nccl") && *result == NCCL_IN_PROGRESS) {
                total.bytes += count.bytes;
            } else {
                total.failed_calls += count.calls;
            }
        }
    }
    calls
}

/// Observed calls of a process.
pub(crate) fn observed_calls(process: &ObservedProcess) -> BTreeMap<&'static str, CallCount> {
    process.calls_by_function().collect()
}

pub(crate) fn find_process(observer: &Observer, pid: u32) -> &ObservedProcess {
    let mut processes = observer.processes();
    let found = processes.find(|process| process.pid == pid);
    found.expect("the process was observed")
}

/// Reads the maps, and compares every target with the truth.
pub(crate) fn assert_exact(observer: &mut Observer, stage: &Stage, targets: &[Target]) {
    observer.read_counts().expect("maps can be read");
    for target in targets {
        let process = find_process(observer, target.pid());
        assert_eq!(observed_calls(process), logged_calls(stage, target.pid()));
    }
    assert_eq!(observer.losses(), Default::default());
}

/// Functions of a file in the ledger, by name.
pub(crate) fn functions_in_ledger(observer: &Observer, file: &str) -> BTreeMap<String, Value> {
    let ledger = observer.snapshot().ledger_json(Scope::All);
    let files = ledger["files"].as_array().expect("a list").iter();
    let functions = files
        .filter(|entry| entry["path"].as_str() == Some(file))
        .flat_map(|entry| entry["functions"].as_array().expect("a list").clone());
    functions
        .map(|entry| (entry["symbol"].as_str().expect("a name").to_owned(), entry))
        .collect()
}
