//! Compares the truth log with the calls that the test made.

mod support;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use support::libraries::{CudaProgram, MILLISECOND_NS, assert_success, value_stored_by};
use support::{Stage, role_of_process};
use zernel_softgpu::clock;
use zernel_softgpu::config;
use zernel_softgpu::truth::{LoggedEventKind, ReturnedCalls, TruthLog};

const THREAD_COUNT: u64 = 4;
const ROUNDS_PER_THREAD: u64 = 50_000;
/// Number of calls that all threads make in all rounds: five in each round.
const CALL_COUNT: u64 = THREAD_COUNT * ROUNDS_PER_THREAD * 5;

/// Makes five calls. The call of `cuMemFree_v2` fails, `cuStreamQuery` may report unfinished work, the others succeed.
fn make_five_calls(program: &CudaProgram, context: u64, round: u64) {
    let cuda = &program.cuda;
    assert_success((cuda.cuCtxSetCurrent)(context));
    program.launch(0, 1);
    assert_eq!((cuda.cuMemFree_v2)(0x10), 1);
    assert_success((cuda.cuStreamQuery)(0).min(0));
    let mut current = 0;
    assert_success((cuda.cuCtxGetCurrent)(&mut current));
    assert_eq!(current, context, "round {round}");
}

#[test]
fn truth_log_counts_a_million_calls_exactly() {
    const TEST: &str = "truth_log_counts_a_million_calls_exactly";
    if role_of_process().is_some() {
        let program = &CudaProgram::new();
        let context = value_stored_by(|context| (program.cuda.cuCtxGetCurrent)(context));
        std::thread::scope(|scope| {
            for _ in 0..THREAD_COUNT {
                scope.spawn(move || {
                    (0..ROUNDS_PER_THREAD)
                        .for_each(|number| make_five_calls(program, context, number));
                });
            }
        });
        return;
    }
    let stage = Stage::new(TEST).with_truth_log();
    stage.run_roles(1);
    let log = TruthLog::read(&stage.log_path()).unwrap();
    let totals = log.returned_calls();
    let calls = |symbol: &str, result| {
        totals
            .get(&(symbol.to_owned(), result))
            .map_or(0, |count: &ReturnedCalls| count.calls)
    };
    let each = THREAD_COUNT * ROUNDS_PER_THREAD;
    // The main thread calls these two functions once more, to make the context current and to get it.
    assert_eq!(calls("cuCtxSetCurrent", 0), each + 1);
    assert_eq!(calls("cuCtxGetCurrent", 0), each + 1);
    assert_eq!(calls("cuLaunchKernel", 0), each);
    assert_eq!(calls("cuMemFree_v2", 1), each);
    assert_eq!(calls("cuMemFree_v2", 0), 0);
    assert_eq!(
        calls("cuStreamQuery", 0) + calls("cuStreamQuery", 600),
        each
    );
    let all: u64 = totals.values().map(|count| count.calls).sum();
    assert!(all > CALL_COUNT);
    for symbol in ["cuCtxSetCurrent", "cuLaunchKernel", "cuMemFree_v2"] {
        let threads = log.processes[0]
            .entered
            .iter()
            .filter(|((_, name), count)| name == symbol && **count >= ROUNDS_PER_THREAD);
        assert_eq!(
            threads.count() as u64,
            THREAD_COUNT,
            "each thread has its own count of {symbol}"
        );
    }
    let entered: u64 = log.processes[0].entered.values().sum();
    assert_eq!(entered, all, "every entered call returned");
}

#[test]
fn truth_events_record_calls_and_device_work() {
    const TEST: &str = "truth_events_record_calls_and_device_work";
    if role_of_process().is_some() {
        let program = CudaProgram::new();
        let cuda = &program.cuda;
        let stream = program.create_stream();
        let memory = program.allocate_memory(4096);
        program.launch(stream, 500 * MILLISECOND_NS);
        program.launch(stream, 7 * MILLISECOND_NS);
        assert_success((cuda.cuStreamSynchronize)(stream));
        assert_success((cuda.cuMemFree_v2)(memory));
        support::publish_file("stream", &stream.to_ne_bytes());
        return;
    }
    let stage = Stage::new(TEST)
        .with_truth_log()
        .set_variable(config::LOG_EVENTS_VARIABLE, 1);
    let before = clock::now_ns();
    stage.run_roles(1);
    let log = TruthLog::read(&stage.log_path()).unwrap();
    let stream = u64::from_ne_bytes(
        std::fs::read(stage.path().join("stream"))
            .unwrap()
            .try_into()
            .unwrap(),
    );
    let process = &log.processes[0];
    let calls: Vec<_> = process
        .events
        .iter()
        .filter(|event| event.kind == LoggedEventKind::Call)
        .collect();
    assert!(calls.iter().all(|event| before <= event.enter
        && event.enter <= event.leave
        && event.leave <= clock::now_ns()));
    let entered: u64 = process.entered.values().sum();
    assert_eq!(calls.len() as u64, entered);
    let called = |symbol: &str| calls.iter().find(|event| event.symbol == symbol).unwrap();
    let (allocated, freed) = (called("cuMemAlloc_v2"), called("cuMemFree_v2"));
    assert_eq!((allocated.bytes, freed.bytes), (4096, 4096));
    assert_eq!(allocated.object, freed.object);
    assert_eq!(called("cuStreamSynchronize").stream, stream);
    let device: Vec<_> = process
        .events
        .iter()
        .filter(|event| event.kind == LoggedEventKind::Device)
        .collect();
    assert_eq!(device.len(), 2);
    assert_eq!(device[0].leave - device[0].enter, 500 * MILLISECOND_NS);
    assert_eq!(device[1].enter, device[0].leave);
    assert_eq!(device[1].leave - device[1].enter, 7 * MILLISECOND_NS);
    assert_eq!(
        (device[1].stream, device[1].symbol.as_str()),
        (stream, "cuLaunchKernel")
    );
    assert!(called("cuStreamSynchronize").leave >= device[1].leave);
}

/// The process that is killed keeps a count of its own in a file that it shares with the test.
#[test]
fn truth_log_survives_kill_of_process() {
    const TEST: &str = "truth_log_survives_kill_of_process";
    if role_of_process().is_some() {
        let program = CudaProgram::new();
        let counter = SharedCounter::open(&support::stage_path().join("count"));
        loop {
            counter.0.fetch_add(1, Relaxed);
            assert_eq!((program.cuda.cuMemAlloc_v2)(&mut 0, 0), 1);
            counter.0.fetch_add(1 << 32, Relaxed);
        }
    }
    for events in [0, 1] {
        let stage = Stage::new(TEST)
            .with_truth_log()
            .set_variable(config::LOG_EVENTS_VARIABLE, events);
        let counter = SharedCounter::open(&stage.path().join("count"));
        let actor = stage.start("0");
        zernel_testkit::eventually("calls are made", || {
            counter.0.load(Relaxed) & 0xffff_ffff > 20_000
        });
        actor.kill();
        let count = counter.0.load(Relaxed);
        let (begun, done) = (count & 0xffff_ffff, count >> 32);
        let log = TruthLog::read(&stage.log_path()).unwrap();
        let entered = log.entered_count("cuMemAlloc_v2");
        let returned = log.returned_calls()[&("cuMemAlloc_v2".to_owned(), 1)].calls;
        assert!(
            (done..=begun).contains(&entered),
            "{entered} entered, but {done} to {begun} made"
        );
        assert!(
            (done..=entered).contains(&returned),
            "{returned} returned of {entered}, but {done} seen to"
        );
        let logged = log
            .events_of_all_processes()
            .iter()
            .filter(|(_, event)| event.symbol == "cuMemAlloc_v2")
            .count() as u64;
        match events {
            0 => assert_eq!(logged, 0),
            _ => assert!(
                (entered - 1..=entered).contains(&logged),
                "{logged} events of {entered} calls"
            ),
        }
    }
}

/// A 64-bit word in a file, shared between processes.
struct SharedCounter(&'static AtomicU64);

impl SharedCounter {
    fn open(path: &std::path::Path) -> Self {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .unwrap();
        file.set_len(4096).unwrap();
        let memory = zernel_softgpu::shared_memory::SharedMemory::map(&file, 4096).unwrap();
        Self(Box::leak(Box::new(memory)).word(0))
    }
}

#[test]
fn forked_child_writes_its_own_truth_log() {
    const TEST: &str = "forked_child_writes_its_own_truth_log";
    if role_of_process().is_some() {
        let program = CudaProgram::new();
        let refused = || (0..3).all(|_| (program.cuda.cuCtxSynchronize)() == 3);
        assert!(support::in_forked_child(refused));
        assert_success((program.cuda.cuCtxSynchronize)());
        return;
    }
    let stage = Stage::new(TEST).with_truth_log();
    stage.run_roles(1);
    let log = TruthLog::read(&stage.log_path()).unwrap();
    assert_eq!(log.processes.len(), 2);
    let totals = log.returned_calls();
    assert_eq!(totals[&("cuCtxSynchronize".to_owned(), 3)].calls, 3);
    assert_eq!(totals[&("cuCtxSynchronize".to_owned(), 0)].calls, 1);
    let child = log
        .processes
        .iter()
        .find(|process| process.entered.len() == 1)
        .unwrap();
    assert!(child.entered.keys().all(|(tid, _)| *tid == child.pid));
}

#[test]
fn exec_starts_new_truth_log_and_memory() {
    const TEST: &str = "exec_starts_new_truth_log_and_memory";
    let Some(role) = role_of_process() else {
        let stage = Stage::new(TEST).with_truth_log();
        stage.start("first").expect_success();
        let log = TruthLog::read(&stage.log_path()).unwrap();
        assert_eq!(log.processes.len(), 2);
        assert_eq!(log.processes[0].pid, log.processes[1].pid);
        assert_eq!(
            log.returned_calls()[&("cuMemAlloc_v2".to_owned(), 0)].bytes,
            5000
        );
        return;
    };
    let program = CudaProgram::new();
    assert_eq!(program.used_memory(), 0);
    if role == "first" {
        program.allocate_memory(3000);
        panic!(
            "cannot run the second program: {}",
            support::exec_in_role("second")
        );
    }
    program.allocate_memory(2000);
}

#[test]
fn what_is_not_a_truth_log_is_refused() {
    let stage = Stage::new("what_is_not_a_truth_log_is_refused");
    std::fs::create_dir_all(stage.log_path()).unwrap();
    std::fs::write(stage.log_path().join("1-2-cuda.truth"), vec![7; 100_000]).unwrap();
    let error = TruthLog::read(&stage.log_path()).unwrap_err().to_string();
    assert!(
        error.contains("1-2-cuda.truth") && error.contains("not a truth file"),
        "{error}"
    );
    assert!(TruthLog::read(&stage.path().join("nowhere")).is_err());
}
