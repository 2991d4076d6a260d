//! Ranks, their communicators and what they exchange.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use libloading::Symbol;
use zernel_ebpf::metrics::{self, TextFormat};
use zernel_ebpf::observer::{GovernorOptions, Observer, ObserverOptions};
use zernel_ebpf::probes::Communicator;
use zernel_ebpf::probes::{DurationKind, NcclOperation};
use zernel_model::snapshot::Scope;
use zernel_softgpu::config;
use zernel_softgpu::install::Prologue;
use zernel_softgpu::truth::LoggedEventKind;
use zernel_testkit::communicator::{
    NCCL_IN_PROGRESS, NcclConfiguration, RANK_VARIABLE, UniqueId, create_stream, join_communicator,
    join_communicator_as, own_rank,
};
use zernel_testkit::target::{
    Driver, Stage, Target, TargetRole, call, end_part_and_wait, out_pointer,
};

use crate::harness::{
    ObserverOnThread, assert_exact, find_process, observe_stage, options_that_count_everything,
    run_next_parts, start_observer,
};

pub(crate) const NCCL_ROLES: &[(&str, TargetRole)] = &[
    ("rank", target_run_rank),
    ("communicators", target_create_communicators),
    ("late_parts", target_uses_communicators_stored_late),
    ("broadcasts", target_broadcasts_by_both_names),
    ("two_streams", target_reduces_on_two_streams),
    ("waits_late", target_waits_late),
    ("records", target_records_events),
];

const RANK_COUNT: u64 = 2;
/// Elements of a message: with the bandwidth below, some milliseconds.
const MESSAGE_ELEMENTS: u64 = 50_000;
const BANDWIDTH_BYTES_PER_SECOND: &str = "20000000";
/// Bytes that take half a second.
const LONG_MESSAGE_BYTES: u64 = 10_000_000;
/// `ncclDataType_t`, less the last two, which the software GPU does not have.
const DATA_TYPES: u64 = 10;

fn split_communicator(driver: &Driver, communicator: u64, color: u64) -> u64 {
    let mut made = 0_u64;
    call!(
        driver.nccl(),
        "ncclCommSplit",
        communicator,
        color,
        0,
        out_pointer(&mut made),
        0
    );
    made
}

/// After each collective it waits for another stream, which does not show the end of the collective, and
/// then for its own.
fn target_run_rank(driver: &Driver, rounds: u64) {
    let rank = own_rank();
    let (cuda, nccl) = (driver.cuda(), driver.nccl());
    driver.open_first_device();
    let communicator = join_communicator(driver, rank, RANK_COUNT);
    let [own, later, other] = [(); 3].map(|()| create_stream(driver));
    let mut event = 0_u64;
    call!(cuda, "cuEventCreate", out_pointer(&mut event), 0);
    let (from, to) = (
        driver.allocate_memory(8 * MESSAGE_ELEMENTS),
        driver.allocate_memory(8 * MESSAGE_ELEMENTS),
    );
    let wait_for = |stream: u64| {
        call!(cuda, "cuStreamSynchronize", other);
        call!(cuda, "cuStreamSynchronize", stream);
    };
    for round in 0..rounds {
        let kind = round % DATA_TYPES;
        call!(
            nccl,
            "ncclAllReduce",
            from,
            to,
            MESSAGE_ELEMENTS,
            kind,
            0,
            communicator,
            own
        );
        wait_for(own);
        call!(
            nccl,
            "ncclBroadcast",
            from,
            to,
            MESSAGE_ELEMENTS,
            kind,
            0,
            communicator,
            own
        );
        call!(cuda, "cuEventRecord", event, own);
        call!(cuda, "cuStreamWaitEvent", later, event, 0);
        wait_for(later);
        call!(nccl, "ncclGroupStart");
        call!(
            nccl,
            "ncclSend",
            from,
            MESSAGE_ELEMENTS,
            kind,
            1 - rank,
            communicator,
            own
        );
        call!(
            nccl,
            "ncclRecv",
            to,
            MESSAGE_ELEMENTS,
            kind,
            1 - rank,
            communicator,
            own
        );
        call!(nccl, "ncclGroupEnd");
        wait_for(own);
    }
    let together = split_communicator(driver, communicator, 7);
    let apart = split_communicator(driver, communicator, rank);
    end_part_and_wait();
    for made in [apart, together, communicator] {
        call!(nccl, "ncclCommDestroy", made);
    }
}

/// The times from every call of a function to the end of the second wait after it, which shows that it is
/// done.
fn logged_ns_until_sync(stage: &Stage, pid: u32, symbol: &str) -> u64 {
    let truth = stage.read_truth_log();
    let events: Vec<_> = truth
        .events_of_all_processes()
        .into_iter()
        .filter(|(of, event)| *of == pid && event.tid == pid && event.kind == LoggedEventKind::Call)
        .map(|(_, event)| event)
        .collect();
    let calls = events.iter().enumerate();
    calls
        .filter(|(_, event)| event.symbol == symbol)
        .map(|(place, event)| {
            let later = events[place..].iter();
            let mut waits = later.filter(|later| later.symbol == "cuStreamSynchronize");
            waits.nth(1).expect("the role waits twice").leave - event.enter
        })
        .sum()
}

fn assert_until_sync(observer: &Observer, stage: &Stage, pid: u32, rounds: u64) {
    let process = find_process(observer, pid);
    for (operation, symbol) in [
        (NcclOperation::AllReduce, "ncclAllReduce"),
        (NcclOperation::Broadcast, "ncclBroadcast"),
        (NcclOperation::Send, "ncclSend"),
    ] {
        let seen = process
            .duration_histogram(DurationKind::UntilSync(operation))
            .expect(symbol);
        let truth = logged_ns_until_sync(stage, pid, symbol);
        assert_eq!(seen.count, rounds, "{symbol}");
        // The allowed error: a tenth, plus 3 ms per round, because a busy machine may preempt the program between its
        // two clock readings.
        let margin = truth / 10 + rounds * 3_000_000;
        let off = seen.sum_ns.abs_diff(truth);
        assert!(off < margin, "{symbol}: {} for {truth} ns", seen.sum_ns);
        assert!(
            truth > 2 * margin,
            "{symbol} is too short to measure: {truth} ns"
        );
    }
}

/// The hashes of a process' communicators: the first made, and the two made of it.
fn communicator_hashes(observer: &Observer, pid: u32) -> (u64, Vec<u64>) {
    let communicators = &find_process(observer, pid).probes.nccl.communicators;
    let (whole, parts): (Vec<&Communicator>, Vec<_>) = communicators
        .iter()
        .partition(|communicator| communicator.sequence > 0);
    assert_eq!(whole.len(), 1);
    (
        whole[0].unique_id_hash,
        parts.iter().map(|part| part.unique_id_hash).collect(),
    )
}

fn target_create_communicators(driver: &Driver, count: u64) {
    driver.open_first_device();
    for _ in 0..count {
        let mut id = UniqueId([0; 128]);
        call!(driver.nccl(), "ncclGetUniqueId", out_pointer(&mut id));
        join_communicator_as(driver, id, 0, 1);
    }
}

/// Splits off a part of a communicator without blocking, and waits until the new handle is stored.
fn split_without_blocking(
    driver: &Driver,
    communicator: u64,
    color: i32,
    place: &AtomicU64,
) -> u64 {
    type SplitFunction =
        unsafe extern "C" fn(u64, i32, i32, *const AtomicU64, *const NcclConfiguration) -> i32;
    let configuration = NcclConfiguration::new(0);
    // SAFETY: the signature of ncclCommSplit, and the place is there until it has written to it.
    let result = unsafe {
        let split: Symbol<'_, SplitFunction> =
            driver.nccl().get(b"ncclCommSplit\0").expect("exported");
        split(communicator, color, 0, place, &raw const configuration)
    };
    assert_eq!(result, NCCL_IN_PROGRESS, "ncclCommSplit");
    while place.load(Ordering::Acquire) == 0 {
        thread::sleep(Duration::from_millis(1));
    }
    place.load(Ordering::Acquire)
}

/// Splits a communicator in calls that store the new handles only later, uses the first new one once and the second twice.
fn target_uses_communicators_stored_late(driver: &Driver, _rounds: u64) {
    driver.open_first_device();
    let nccl = driver.nccl();
    let communicator = join_communicator(driver, 0, 1);
    let mut grouped = 0_u64;
    call!(nccl, "ncclGroupStart");
    call!(
        nccl,
        "ncclCommSplit",
        communicator,
        3,
        0,
        out_pointer(&mut grouped),
        0
    );
    assert_eq!(grouped, 0);
    call!(nccl, "ncclGroupEnd");
    let place = AtomicU64::new(0);
    let unblocked = split_without_blocking(driver, communicator, 4, &place);
    let (memory, stream) = (driver.allocate_memory(64), create_stream(driver));
    for part in [grouped, unblocked, unblocked] {
        call!(nccl, "ncclAllReduce", memory, memory, 8, 7, 0, part, stream);
    }
    call!(driver.cuda(), "cuStreamSynchronize", stream);
}

pub(crate) fn communicators_that_are_stored_late_are_seen() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("late_parts", 1);
    target.run_part();
    observer.read_counts().expect("maps can be read");
    let communicators = find_process(&observer, target.pid())
        .probes
        .nccl
        .communicators
        .iter();
    let mut sequences: Vec<u64> = communicators.map(|made| made.sequence).collect();
    sequences.sort_unstable();
    assert_eq!(sequences, [0, 1, 2]);
}

/// While a long collective runs on one stream, the program waits for a short one on another stream, and
/// records an event again that had followed the long one.
fn target_reduces_on_two_streams(driver: &Driver, _rounds: u64) {
    let (cuda, nccl) = (driver.cuda(), driver.nccl());
    driver.open_first_device();
    let communicator = join_communicator(driver, own_rank(), RANK_COUNT);
    let other = split_communicator(driver, communicator, 7);
    let [long, short] = [(); 2].map(|()| create_stream(driver));
    let mut event = 0_u64;
    call!(cuda, "cuEventCreate", out_pointer(&mut event), 0);
    let data = driver.allocate_memory(LONG_MESSAGE_BYTES);
    call!(
        nccl,
        "ncclAllReduce",
        data,
        data,
        LONG_MESSAGE_BYTES,
        0,
        0,
        communicator,
        long
    );
    call!(cuda, "cuEventRecord", event, long);
    call!(nccl, "ncclBroadcast", data, data, 8, 0, 0, other, short);
    call!(cuda, "cuEventRecord", event, short);
    call!(cuda, "cuEventSynchronize", event);
    call!(cuda, "cuStreamSynchronize", short);
    call!(cuda, "cuStreamSynchronize", long);
}

/// A wait ends the collectives that it covers, and no others that were enqueued before.
pub(crate) fn a_wait_ends_only_the_collectives_it_covers() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut targets: Vec<_> = (0..RANK_COUNT)
        .map(|rank| {
            let mut command = stage.target_command("two_streams", 0);
            command.env(RANK_VARIABLE, rank.to_string());
            Target::start(command.env(config::NCCL_BANDWIDTH_VARIABLE, BANDWIDTH_BYTES_PER_SECOND))
        })
        .collect();
    run_next_parts(&mut targets);
    observer.read_counts().expect("maps can be read");
    for target in &targets {
        let process = find_process(&observer, target.pid());
        let until_sync = |operation| {
            let seen = process.duration_histogram(DurationKind::UntilSync(operation));
            seen.map(|seen| (seen.count, seen.sum_ns)).expect("it ran")
        };
        let (long, short) = (
            until_sync(NcclOperation::AllReduce),
            until_sync(NcclOperation::Broadcast),
        );
        assert_eq!((long.0, short.0), (1, 1));
        let least = LONG_MESSAGE_BYTES * 1_000_000_000
            / BANDWIDTH_BYTES_PER_SECOND.parse::<u64>().expect("a number");
        assert!(long.1 >= least && short.1 < least, "{long:?} {short:?}");
    }
}

/// Calls `ncclAllReduce` `rounds` times, and then waits for all of them.
fn target_waits_late(driver: &Driver, rounds: u64) {
    driver.open_first_device();
    let communicator = join_communicator(driver, 0, 1);
    let (data, stream) = (driver.allocate_memory(100), create_stream(driver));
    for _ in 0..rounds {
        call!(
            driver.nccl(),
            "ncclAllReduce",
            data,
            data,
            100,
            0,
            0,
            communicator,
            stream
        );
    }
    call!(driver.cuda(), "cuStreamSynchronize", stream);
}

/// Collectives beyond the kernel's memory are counted as lost.
pub(crate) fn lost_collectives_are_counted() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("waits_late", 100);
    target.run_part();
    observer.read_counts().expect("maps can be read");
    let process = find_process(&observer, target.pid());
    let seen = process.duration_histogram(DurationKind::UntilSync(NcclOperation::AllReduce));
    assert_eq!(seen.map(|seen| seen.count), Some(64));
    assert_eq!(observer.losses().collectives, 36);
}

/// For `milliseconds`, runs collectives on one stream. An event makes a second stream wait for each, and the program
/// synchronizes that one. Between collectives the program records events as fast as it can.
fn target_records_events(driver: &Driver, milliseconds: u64) {
    driver.open_first_device();
    let communicator = join_communicator(driver, 0, 1);
    let data = driver.allocate_memory(100);
    let [own, later] = [(); 2].map(|()| create_stream(driver));
    let (cuda, mut event) = (driver.cuda(), 0_u64);
    call!(cuda, "cuEventCreate", out_pointer(&mut event), 0);
    let end = Instant::now() + Duration::from_millis(milliseconds);
    while Instant::now() < end {
        let nccl = driver.nccl();
        call!(
            nccl,
            "ncclAllReduce",
            data,
            data,
            100,
            0,
            0,
            communicator,
            own
        );
        call!(cuda, "cuEventRecord", event, own);
        call!(cuda, "cuStreamWaitEvent", later, event, 0);
        call!(cuda, "cuStreamSynchronize", later);
        let next = Instant::now() + Duration::from_millis(4);
        while Instant::now() < next {
            call!(cuda, "cuEventRecord", event, later);
        }
    }
}

/// While event functions are sampled, collectives are timed in windows only. No collective is timed across a gap between
/// windows.
pub(crate) fn collectives_are_not_timed_across_sampling_gaps() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let watcher = ObserverOnThread::start(&ObserverOptions {
        governor: GovernorOptions::with_budget(0.03),
        ..options_that_count_everything(&stage)
    });
    let mut target = stage.start_target("records", 600_000);
    let pid = target.pid();
    target.start_part();
    watcher.wait_until("there are windows", |observer| {
        let mut sampled = observer.sampled_function_names();
        sampled.any(|name| name == "cuEventRecord") && observer.probe_cost().sampling_windows >= 5
    });
    let observer = watcher.stop();
    let process = find_process(&observer, pid);
    let seen = process.duration_histogram(DurationKind::UntilSync(NcclOperation::AllReduce));
    let seen = seen.expect("some were seen whole");
    assert!(
        seen.p50_ns() < 50_000_000 && seen.mean_ns() < 50_000_000.0,
        "{seen:?}"
    );
    assert_eq!(observer.losses(), Default::default());
}

/// Both broadcast functions. One calls the other.
fn target_broadcasts_by_both_names(driver: &Driver, rounds: u64) {
    driver.open_first_device();
    let mut id = UniqueId([0; 128]);
    call!(driver.nccl(), "ncclGetUniqueId", out_pointer(&mut id));
    let communicator = join_communicator_as(driver, id, 0, 1);
    let data = driver.allocate_memory(100);
    let nccl = driver.nccl();
    for _ in 0..rounds {
        call!(nccl, "ncclBcast", data, 100, 0, 0, communicator, 0);
        call!(
            nccl,
            "ncclBroadcast",
            data,
            data,
            100,
            0,
            0,
            communicator,
            0
        );
    }
}

pub(crate) fn a_broadcast_is_counted_once_by_either_name() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("broadcasts", 10);
    target.run_part();
    observer.read_counts().expect("maps can be read");
    let process = find_process(&observer, target.pid());
    let mut calls = process.calls_by_function();
    let (_, count) = calls.find(|(name, _)| *name == "ncclBroadcast").unwrap();
    assert_eq!((count.calls, count.bytes), (20, 2000));
    assert_eq!(process.probes.nccl.communicators[0].sequence, 20);
}

/// A process has more communicators than one system call reads, and all are seen.
pub(crate) fn many_communicators_are_all_seen() {
    const COMMUNICATOR_COUNT: usize = 600;
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("communicators", COMMUNICATOR_COUNT as u64);
    target.run_part();
    observer.read_counts().expect("maps can be read");
    let mut hashes: Vec<u64> = (find_process(&observer, target.pid())
        .probes
        .nccl
        .communicators
        .iter())
    .map(|communicator| communicator.unique_id_hash)
    .collect();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), COMMUNICATOR_COUNT);
}

pub(crate) fn ranks_and_their_collectives_are_seen() {
    const ROUND_COUNT: u64 = DATA_TYPES;
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut targets: Vec<_> = (0..RANK_COUNT)
        .map(|rank| {
            let mut command = stage.target_command("rank", ROUND_COUNT);
            command.env(RANK_VARIABLE, rank.to_string());
            command.env(config::LOG_EVENTS_VARIABLE, "1");
            Target::start(command.env(config::NCCL_BANDWIDTH_VARIABLE, BANDWIDTH_BYTES_PER_SECOND))
        })
        .collect();
    run_next_parts(&mut targets);
    assert_exact(&mut observer, &stage, &targets);
    for (rank, target) in targets.iter().enumerate() {
        assert_until_sync(&observer, &stage, target.pid(), ROUND_COUNT);
        let communicators = &find_process(&observer, target.pid())
            .probes
            .nccl
            .communicators;
        let whole = communicators.iter().find(|made| made.sequence > 0);
        let whole = whole.expect("collectives are counted");
        assert_eq!((whole.rank, whole.ranks), (Some(rank as u32), Some(2)));
        assert_eq!(whole.sequence, 2 * ROUND_COUNT);
        assert_eq!(whole.operation, NcclOperation::Broadcast);
        let identity = find_process(&observer, target.pid()).identity.as_ref();
        assert_eq!(
            identity.and_then(|identity| identity.rank),
            Some(rank as u32)
        );
    }
    let (whole, parts) = communicator_hashes(&observer, targets[0].pid());
    let (whole_too, parts_too) = communicator_hashes(&observer, targets[1].pid());
    assert_eq!(whole, whole_too);
    assert_eq!((parts.len(), parts_too.len()), (2, 2));
    let shared: Vec<_> = parts
        .iter()
        .filter(|part| parts_too.contains(part))
        .collect();
    assert_eq!(shared.len(), 1, "{parts:x?} and {parts_too:x?}");
    assert!(!parts.contains(&whole));
    run_next_parts(&mut targets);
    observer.read_counts().expect("maps can be read");
    for target in &targets {
        assert_eq!(
            find_process(&observer, target.pid())
                .probes
                .nccl
                .communicators,
            []
        );
    }
}

/// The sum of a counter over all ranks does not decrease when an exited rank is removed. Prometheus would take a decrease
/// for a restart.
pub(crate) fn collectives_stay_counted_when_ranks_are_forgotten() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = start_observer(&ObserverOptions {
        grace_period: Duration::ZERO,
        ..options_that_count_everything(&stage)
    });
    let mut targets: Vec<_> = (0..RANK_COUNT)
        .map(|rank| {
            Target::start(
                stage
                    .target_command("rank", 2)
                    .env(RANK_VARIABLE, rank.to_string()),
            )
        })
        .collect();
    run_next_parts(&mut targets);
    let mut counts = |scope| {
        observer.read_counts().expect("maps can be read");
        let text = metrics::metrics_text(&observer.snapshot(), scope, TextFormat::Prometheus);
        [
            "enqueue_seconds",
            "until_sync_seconds",
            "collective_duration_seconds",
        ]
        .map(|family| {
            let count = format!("zernel_nccl_{family}_count{{op=\"AllReduce\"}} ");
            let value = text.lines().find_map(|line| line.strip_prefix(&count));
            value.map_or(0, |value| value.parse::<u64>().expect("a number"))
        })
    };
    let before = counts(Scope::User(0));
    assert!(
        before.iter().all(|count| *count >= 2 * RANK_COUNT),
        "{before:?}"
    );
    targets.into_iter().for_each(Target::kill);
    assert_eq!(counts(Scope::User(0)), before);
    assert_eq!(counts(Scope::User(0)), before);
    assert!(counts(Scope::All) >= before);
    assert_eq!(counts(Scope::User(65533)), [0; 3]);
}
