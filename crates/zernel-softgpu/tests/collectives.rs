//! The software NCCL, between processes.

mod support;

use std::time::Duration;

use support::libraries::{NOT_READY, Nccl, Program, UniqueId, got, ok};
use support::{Stage, eventually, publish, published, role};
use zernel_softgpu::config;
use zernel_softgpu::truth::{EventKind, TruthLog};

const INT32: i32 = 2;
const FLOAT32: i32 = 7;
const SUM: i32 = 0;
const REMOTE_ERROR: i32 = 6;
const INVALID_ARGUMENT: i32 = 4;
const INVALID_USAGE: i32 = 5;

/// One rank's process.
struct Rank {
    program: Program,
    nccl: Nccl,
    communicator: u64,
    stream: u64,
    rank: usize,
}

impl Rank {
    /// Joins as the role says.
    fn join(ranks: usize) -> Self {
        let rank: usize = role().unwrap().parse().unwrap();
        let program = Program::new();
        let nccl = Nccl::load();
        let mut id = UniqueId([0; 128]);
        if rank == 0 {
            ok((nccl.ncclGetUniqueId)(&mut id));
            publish("id", &id.0);
        } else {
            id.0.copy_from_slice(&published("id"));
        }
        let communicator = got(|communicator| {
            (nccl.ncclCommInitRank)(communicator, ranks as i32, id, rank as i32)
        });
        let stream = program.stream();
        Self {
            program,
            nccl,
            communicator,
            stream,
            rank,
        }
    }

    fn upload<T: Copy>(&self, values: &[T]) -> u64 {
        let address = self.program.allocate(size_of_val(values).max(1));
        self.program.upload(address, values);
        address
    }

    fn synchronize(&self) {
        ok((self.program.cuda.cuStreamSynchronize)(self.stream));
    }

    fn all_reduce_i32(&self, communicator: u64, stream: u64, value: i32) -> u64 {
        let buffer = self.upload(&[value]);
        ok((self.nccl.ncclAllReduce)(
            buffer,
            buffer,
            1,
            INT32,
            SUM,
            communicator,
            stream,
        ));
        buffer
    }

    fn leave(&self) {
        ok((self.nccl.ncclCommDestroy)(self.communicator));
    }
}

/// A data type: its code, and small whole numbers as its bytes. Exact in every type, under every operation.
struct Type {
    code: i32,
    bytes: usize,
    encode: fn(i64) -> Vec<u8>,
}

const TYPES: [Type; 10] = [
    Type {
        code: 0,
        bytes: 1,
        encode: |value| (value as i8).to_ne_bytes().to_vec(),
    },
    Type {
        code: 1,
        bytes: 1,
        encode: |value| (value as u8).to_ne_bytes().to_vec(),
    },
    Type {
        code: 2,
        bytes: 4,
        encode: |value| (value as i32).to_ne_bytes().to_vec(),
    },
    Type {
        code: 3,
        bytes: 4,
        encode: |value| (value as u32).to_ne_bytes().to_vec(),
    },
    Type {
        code: 4,
        bytes: 8,
        encode: |value| value.to_ne_bytes().to_vec(),
    },
    Type {
        code: 5,
        bytes: 8,
        encode: |value| (value as u64).to_ne_bytes().to_vec(),
    },
    Type {
        code: 6,
        bytes: 2,
        encode: |value| half(value).to_ne_bytes().to_vec(),
    },
    Type {
        code: 7,
        bytes: 4,
        encode: |value| (value as f32).to_ne_bytes().to_vec(),
    },
    Type {
        code: 8,
        bytes: 8,
        encode: |value| (value as f64).to_ne_bytes().to_vec(),
    },
    Type {
        code: 9,
        bytes: 2,
        encode: |value| {
            (((value as f32).to_bits() >> 16) as u16)
                .to_ne_bytes()
                .to_vec()
        },
    },
];

/// IEEE half precision of a whole number below 2048.
fn half(value: i64) -> u16 {
    if value == 0 {
        return 0;
    }
    let exponent = value.ilog2();
    let fraction = (value << 10 >> exponent) as u16 & 0x3ff;
    ((exponent + 15) as u16) << 10 | fraction
}

/// What an operation makes of one number from each rank.
type Reference = fn(&[i64]) -> i64;

const OPERATIONS: [(i32, Reference); 5] = [
    (0, |values| values.iter().sum()),
    (1, |values| values.iter().product()),
    (2, |values| *values.iter().max().unwrap()),
    (3, |values| *values.iter().min().unwrap()),
    (4, |values| values.iter().sum::<i64>() / values.len() as i64),
];

/// Element `index` of rank `rank`: sums of 2 and 4 ranks divide evenly, products stay small.
fn element(rank: usize, index: usize) -> i64 {
    match rank % 2 {
        0 => 1 + (index % 3) as i64,
        _ => 3 - (index % 3) as i64,
    }
}

impl Type {
    fn array(&self, values: impl Iterator<Item = i64>) -> Vec<u8> {
        values.flat_map(self.encode).collect()
    }

    fn of_rank(&self, rank: usize, count: usize) -> Vec<u8> {
        self.array((0..count).map(|index| element(rank, index)))
    }

    fn reduced(&self, operation: Reference, ranks: usize, count: usize) -> Vec<u8> {
        self.array((0..count).map(|index| {
            let values: Vec<i64> = (0..ranks).map(|rank| element(rank, index)).collect();
            operation(&values)
        }))
    }
}

#[test]
fn reductions_of_all_types_and_operations_two_ranks() {
    reductions("reductions_of_all_types_and_operations_two_ranks", 2);
}

#[test]
fn reductions_of_all_types_and_operations_four_ranks() {
    reductions("reductions_of_all_types_and_operations_four_ranks", 4);
}

fn reductions(test: &'static str, ranks: usize) {
    const COUNT: usize = 1000;
    if role().is_none() {
        return Stage::new(test).play(ranks);
    }
    let rank = Rank::join(ranks);
    let nccl = &rank.nccl;
    let root = ranks - 1;
    for kind in &TYPES {
        for (code, operation) in OPERATIONS {
            let whole = ranks * COUNT;
            let send = rank.upload(&kind.of_rank(rank.rank, whole));
            let blank = vec![0xeeu8; whole * kind.bytes];
            let (all, one, part) = (
                rank.upload(&blank),
                rank.upload(&blank),
                rank.upload(&blank),
            );
            ok((nccl.ncclAllReduce)(
                send,
                all,
                whole,
                kind.code,
                code,
                rank.communicator,
                rank.stream,
            ));
            ok((nccl.ncclReduce)(
                send,
                one,
                COUNT,
                kind.code,
                code,
                root as i32,
                rank.communicator,
                rank.stream,
            ));
            ok((nccl.ncclReduceScatter)(
                send,
                part,
                COUNT,
                kind.code,
                code,
                rank.communicator,
                rank.stream,
            ));
            rank.synchronize();
            let expected = kind.reduced(operation, ranks, whole);
            let bytes = COUNT * kind.bytes;
            assert_eq!(
                rank.program.download::<u8>(all, expected.len()),
                expected,
                "type {} operation {code}",
                kind.code
            );
            let of_root = if rank.rank == root { &expected } else { &blank };
            assert_eq!(rank.program.download::<u8>(one, bytes), of_root[..bytes]);
            let own = &expected[rank.rank * bytes..(rank.rank + 1) * bytes];
            assert_eq!(rank.program.download::<u8>(part, bytes), own);
            for buffer in [send, all, one, part] {
                ok((rank.program.cuda.cuMemFree_v2)(buffer));
            }
        }
    }
    rank.leave();
}

#[test]
fn data_goes_where_it_belongs() {
    const TEST: &str = "data_goes_where_it_belongs";
    const RANKS: usize = 4;
    // Larger than a chunk, and no multiple of one.
    const COUNT: usize = 1_500_001;
    if role().is_none() {
        return Stage::new(TEST).play(RANKS);
    }
    let rank = Rank::join(RANKS);
    let (nccl, communicator, stream) = (&rank.nccl, rank.communicator, rank.stream);
    let value = |rank: usize, index: usize| (rank * 10_000_000 + index) as u32;
    let own: Vec<u32> = (0..COUNT).map(|index| value(rank.rank, index)).collect();
    let send = rank.upload(&own);

    let receive = rank.program.allocate(4 * COUNT * RANKS);
    ok((nccl.ncclAllGather)(
        send,
        receive,
        COUNT,
        INT32,
        communicator,
        stream,
    ));
    rank.synchronize();
    let gathered: Vec<u32> = rank.program.download(receive, COUNT * RANKS);
    for from in 0..RANKS {
        assert_eq!(gathered[from * COUNT], value(from, 0));
        assert_eq!(gathered[(from + 1) * COUNT - 1], value(from, COUNT - 1));
    }

    // In place: everybody has all of it, and sends part `r` of it to rank `r`.
    let parts = 1000;
    let out = rank.program.allocate(4 * parts * RANKS);
    ok((nccl.ncclAlltoAll)(
        send,
        out,
        parts,
        INT32,
        communicator,
        stream,
    ));
    rank.synchronize();
    let expected: Vec<u32> = (0..RANKS)
        .flat_map(|from| (0..parts).map(move |index| (from, index)))
        .map(|(from, index)| value(from, rank.rank * parts + index))
        .collect();
    assert_eq!(rank.program.download::<u32>(out, parts * RANKS), expected);

    ok((nccl.ncclBroadcast)(
        send,
        out,
        parts,
        INT32,
        2,
        communicator,
        stream,
    ));
    rank.synchronize();
    assert_eq!(
        rank.program.download::<u32>(out, 2),
        [value(2, 0), value(2, 1)]
    );

    ok((nccl.ncclScatter)(
        send,
        out,
        parts,
        INT32,
        1,
        communicator,
        stream,
    ));
    rank.synchronize();
    assert_eq!(
        rank.program.download::<u32>(out, 1),
        [value(1, rank.rank * parts)]
    );

    ok((nccl.ncclGather)(
        send,
        receive,
        parts,
        INT32,
        3,
        communicator,
        stream,
    ));
    rank.synchronize();
    if rank.rank == 3 {
        let firsts: Vec<u32> = (0..RANKS)
            .map(|from| {
                rank.program
                    .download::<u32>(receive + (4 * from * parts) as u64, 1)[0]
            })
            .collect();
        assert_eq!(firsts, [value(0, 0), value(1, 0), value(2, 0), value(3, 0)]);
    }

    ok((nccl.ncclBcast)(
        send,
        COUNT,
        INT32,
        0,
        communicator,
        stream,
    ));
    rank.synchronize();
    assert_eq!(
        rank.program.download::<u32>(send, 2),
        [value(0, 0), value(0, 1)]
    );

    let sums = rank.upload(&vec![1.0f32; COUNT]);
    ok((nccl.ncclAllReduce)(
        sums,
        sums,
        COUNT,
        FLOAT32,
        SUM,
        communicator,
        stream,
    ));
    rank.synchronize();
    assert!(
        rank.program
            .download::<f32>(sums, COUNT)
            .iter()
            .all(|sum| *sum == RANKS as f32)
    );
    rank.leave();
}

#[test]
fn messages_of_a_group_move_together() {
    const TEST: &str = "messages_of_a_group_move_together";
    const RANKS: usize = 4;
    const COUNT: usize = 100_003;
    if role().is_none() {
        return Stage::new(TEST).play(RANKS);
    }
    let rank = Rank::join(RANKS);
    let (nccl, communicator, stream) = (&rank.nccl, rank.communicator, rank.stream);
    // Everybody to everybody, itself included: in any other order than all at once this hangs.
    let send = rank.upload(&vec![rank.rank as i32; COUNT]);
    let receive = rank.program.allocate(4 * COUNT * RANKS);
    ok((nccl.ncclGroupStart)());
    for peer in 0..RANKS {
        ok((nccl.ncclSend)(
            send,
            COUNT,
            INT32,
            peer as i32,
            communicator,
            stream,
        ));
        let place = receive + (4 * COUNT * peer) as u64;
        ok((nccl.ncclRecv)(
            place,
            COUNT,
            INT32,
            peer as i32,
            communicator,
            stream,
        ));
    }
    ok((nccl.ncclGroupEnd)());
    rank.synchronize();
    let received: Vec<i32> = rank.program.download(receive, COUNT * RANKS);
    assert!(
        received
            .iter()
            .enumerate()
            .all(|(index, value)| *value == (index / COUNT) as i32)
    );

    // A ring, one message at a time, twice to the same neighbour, and an empty one.
    let next = ((rank.rank + 1) % RANKS) as i32;
    let previous = ((rank.rank + RANKS - 1) % RANKS) as i32;
    let second = rank.upload(&[100 + rank.rank as i32]);
    ok((nccl.ncclGroupStart)());
    ok((nccl.ncclSend)(send, 1, INT32, next, communicator, stream));
    ok((nccl.ncclSend)(send, 0, INT32, next, communicator, stream));
    ok((nccl.ncclSend)(
        second,
        1,
        INT32,
        next,
        communicator,
        stream,
    ));
    ok((nccl.ncclRecv)(
        receive,
        1,
        INT32,
        previous,
        communicator,
        stream,
    ));
    ok((nccl.ncclRecv)(
        receive,
        0,
        INT32,
        previous,
        communicator,
        stream,
    ));
    ok((nccl.ncclRecv)(
        receive + 4,
        1,
        INT32,
        previous,
        communicator,
        stream,
    ));
    ok((nccl.ncclGroupEnd)());
    rank.synchronize();
    assert_eq!(
        rank.program.download::<i32>(receive, 2),
        [previous, 100 + previous]
    );
    rank.leave();
}

#[test]
fn communicators_split_and_work_side_by_side() {
    const TEST: &str = "communicators_split_and_work_side_by_side";
    const RANKS: usize = 4;
    if role().is_none() {
        return Stage::new(TEST).play(RANKS);
    }
    let rank = Rank::join(RANKS);
    let nccl = &rank.nccl;
    // Even and odd ranks, in reverse; rank 3 stays out of the second split.
    let own = rank.rank as i32;
    let halves =
        got(|new| (nccl.ncclCommSplit)(rank.communicator, own % 2, -own, new, std::ptr::null()));
    assert_eq!(got(|count| (nccl.ncclCommCount)(halves, count)), 2);
    assert_eq!(
        got(|new_rank| (nccl.ncclCommUserRank)(halves, new_rank)),
        i32::from(own < 2)
    );
    let color = if own == 3 { -1 } else { 7 };
    let three = got(|new| (nccl.ncclCommSplit)(rank.communicator, color, 0, new, std::ptr::null()));
    assert_eq!(three == 0, own == 3);

    // All in one group, on two streams.
    let other_stream = rank.program.stream();
    ok((nccl.ncclGroupStart)());
    let all = rank.all_reduce_i32(rank.communicator, rank.stream, 1 << own);
    let half = rank.all_reduce_i32(halves, other_stream, 1 << own);
    ok((nccl.ncclGroupEnd)());
    rank.synchronize();
    ok((rank.program.cuda.cuStreamSynchronize)(other_stream));
    assert_eq!(rank.program.download::<i32>(all, 1), [0b1111]);
    assert_eq!(
        rank.program.download::<i32>(half, 1),
        [if own % 2 == 0 { 0b0101 } else { 0b1010 }]
    );
    if three != 0 {
        let buffer = rank.all_reduce_i32(three, rank.stream, 1 << own);
        rank.synchronize();
        assert_eq!(rank.program.download::<i32>(buffer, 1), [0b0111]);
        ok((nccl.ncclCommDestroy)(three));
    }
    // One communicator on two streams: in the order of the calls, whatever the streams do.
    for round in 0..20 {
        let stream = if round % 2 == 0 {
            rank.stream
        } else {
            other_stream
        };
        rank.all_reduce_i32(rank.communicator, stream, 1);
    }
    ok((rank.program.cuda.cuCtxSynchronize)());
    ok((nccl.ncclCommFinalize)(halves));
    assert_eq!(
        (nccl.ncclAllReduce)(half, half, 1, INT32, SUM, halves, rank.stream),
        INVALID_USAGE
    );
    ok((nccl.ncclCommDestroy)(halves));
    rank.leave();
}

#[test]
fn one_process_can_be_all_ranks() {
    const TEST: &str = "one_process_can_be_all_ranks";
    if role().is_none() {
        return Stage::new(TEST).set(config::DEVICES, 3).play(1);
    }
    let program = Program::new();
    let nccl = Nccl::load();
    let mut communicators = [0; 3];
    ok((nccl.ncclCommInitAll)(
        communicators.as_mut_ptr(),
        3,
        std::ptr::null(),
    ));
    let buffer = program.allocate(12);
    program.upload(buffer, &[1i32, 2, 4]);
    ok((nccl.ncclGroupStart)());
    for (rank, communicator) in communicators.iter().enumerate() {
        assert_eq!(
            got(|device| (nccl.ncclCommCuDevice)(*communicator, device)),
            rank as i32
        );
        let own = buffer + 4 * rank as u64;
        // The default stream of each communicator's own device.
        ok((nccl.ncclAllReduce)(
            own,
            own,
            1,
            INT32,
            SUM,
            *communicator,
            0,
        ));
    }
    ok((nccl.ncclGroupEnd)());
    for device in 0..3 {
        let context = got(|context| (program.cuda.cuDevicePrimaryCtxRetain)(context, device));
        ok((program.cuda.cuCtxSetCurrent)(context));
        ok((program.cuda.cuCtxSynchronize)());
    }
    assert_eq!(program.download::<i32>(buffer, 3), [7, 7, 7]);
    communicators
        .iter()
        .for_each(|communicator| ok((nccl.ncclCommDestroy)(*communicator)));
}

#[test]
fn collectives_in_a_graph_run_at_every_launch() {
    const TEST: &str = "collectives_in_a_graph_run_at_every_launch";
    if role().is_none() {
        return Stage::new(TEST).play(2);
    }
    let rank = Rank::join(2);
    let cuda = &rank.program.cuda;
    let buffer = rank.upload(&[1i32]);
    ok((cuda.cuStreamBeginCapture_v2)(rank.stream, 0));
    ok((rank.nccl.ncclAllReduce)(
        buffer,
        buffer,
        1,
        INT32,
        SUM,
        rank.communicator,
        rank.stream,
    ));
    let graph = got(|graph| (cuda.cuStreamEndCapture)(rank.stream, graph));
    let executable = got(|executable| (cuda.cuGraphInstantiateWithFlags)(executable, graph, 0));
    for _ in 0..5 {
        ok((cuda.cuGraphLaunch)(executable, rank.stream));
    }
    rank.synchronize();
    assert_eq!(rank.program.download::<i32>(buffer, 1), [32]);
    ok((cuda.cuGraphExecDestroy)(executable));
    ok((cuda.cuGraphDestroy)(graph));
    rank.leave();
}

/// The call returns at once; the stream gets there when the last rank has arrived and the bytes have gone over.
#[test]
fn a_collective_takes_until_the_last_rank_arrives_and_its_bytes_are_through() {
    const TEST: &str = "a_collective_takes_until_the_last_rank_arrives_and_its_bytes_are_through";
    const LATE: u64 = 300_000_000;
    const BYTES: usize = 1_000_000;
    if role().is_some() {
        let rank = Rank::join(2);
        let buffer = rank.upload(&vec![0u8; BYTES]);
        if rank.rank == 1 {
            rank.program.launch(rank.stream, LATE);
        }
        ok((rank.nccl.ncclAllReduce)(
            buffer,
            buffer,
            BYTES,
            1,
            SUM,
            rank.communicator,
            rank.stream,
        ));
        assert_eq!(
            (rank.program.cuda.cuStreamQuery)(rank.stream),
            NOT_READY,
            "the call only puts it in the stream"
        );
        rank.synchronize();
        rank.leave();
        return;
    }
    // 10 MB/s: 100 ms.
    let stage = Stage::new(TEST)
        .logged()
        .set(config::LOG_EVENTS, 1)
        .set(config::NCCL_BANDWIDTH, 10_000_000);
    stage.play(2);
    let log = TruthLog::read(&stage.log()).unwrap();
    let device = |symbol: &str| -> Vec<_> {
        let events = log.processes.iter().flat_map(|process| &process.events);
        events
            .filter(|event| event.kind == EventKind::Device && event.symbol == symbol)
            .collect()
    };
    let collectives = device("ncclAllReduce");
    let late = device("cuLaunchKernel");
    assert_eq!((collectives.len(), late.len()), (2, 1));
    for collective in &collectives {
        assert_eq!(collective.bytes, BYTES as u64);
        assert!(
            collective.leave >= late[0].leave + 100_000_000,
            "ends when the last rank's bytes are through"
        );
    }
    let waited = collectives
        .iter()
        .map(|collective| collective.leave - collective.enter)
        .max()
        .unwrap();
    assert!(waited >= 100_000_000);
    let totals = log.totals();
    assert_eq!(totals[&("ncclAllReduce".into(), 0)].bytes, 2 * BYTES as u64);
    assert_eq!(
        totals[&("cuLaunchKernelEx".into(), 0)].calls,
        2,
        "one launch for each collective"
    );
}

#[test]
fn a_killed_rank_is_an_error_that_the_others_can_abort() {
    const TEST: &str = "a_killed_rank_is_an_error_that_the_others_can_abort";
    const RANKS: usize = 3;
    if role().is_none() {
        let before = shared_memory_files();
        let stage = Stage::new(TEST);
        let mut actors: Vec<_> = (0..RANKS)
            .map(|rank| stage.start(&rank.to_string()))
            .collect();
        eventually("the victim is there", || {
            stage.path().join("ready-2").exists()
        });
        actors.remove(2).kill();
        actors.into_iter().for_each(support::Actor::succeeds);
        assert_eq!(shared_memory_files(), before, "nothing is left behind");
        return;
    }
    let rank = Rank::join(RANKS);
    let (cuda, nccl) = (&rank.program.cuda, &rank.nccl);
    rank.all_reduce_i32(rank.communicator, rank.stream, 1);
    rank.synchronize();
    if rank.rank == 2 {
        publish("ready-2", b"");
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
    let buffer = rank.all_reduce_i32(rank.communicator, rank.stream, 1);
    let error = || got(|error| (nccl.ncclCommGetAsyncError)(rank.communicator, error));
    eventually("the loss is noticed", || error() == REMOTE_ERROR);
    assert_eq!(
        (cuda.cuStreamQuery)(rank.stream),
        NOT_READY,
        "the collective stays until somebody aborts"
    );
    let refused = (nccl.ncclAllReduce)(
        buffer,
        buffer,
        1,
        INT32,
        SUM,
        rank.communicator,
        rank.stream,
    );
    assert_eq!(refused, REMOTE_ERROR);
    ok((nccl.ncclCommAbort)(rank.communicator));
    rank.synchronize();
    assert_eq!((nccl.ncclCommDestroy)(rank.communicator), INVALID_ARGUMENT);
}

/// The shared memory of communicators has no name, so there is nothing to be found here.
fn shared_memory_files() -> Vec<String> {
    let files = std::fs::read_dir("/dev/shm").map(|entries| {
        entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect::<Vec<_>>()
    });
    let mut files = files.unwrap_or_default();
    files.retain(|name| name.contains("softgpu") || name.contains("nccl"));
    files.sort();
    files
}

#[test]
fn a_rank_killed_before_all_have_joined_is_an_error_too() {
    const TEST: &str = "a_rank_killed_before_all_have_joined_is_an_error_too";
    if role().is_none() {
        let stage = Stage::new(TEST);
        let maker = stage.start("maker");
        let joiner = stage.start("joiner");
        eventually("the joiner waits", || stage.path().join("joining").exists());
        maker.kill();
        joiner.succeeds();
        return;
    }
    let _program = Program::new();
    let nccl = Nccl::load();
    let mut id = UniqueId([0; 128]);
    if role().as_deref() == Some("maker") {
        ok((nccl.ncclGetUniqueId)(&mut id));
        publish("id", &id.0);
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
    id.0.copy_from_slice(&published("id"));
    publish("joining", b"");
    assert_eq!((nccl.ncclCommInitRank)(&mut 0, 2, id, 1), REMOTE_ERROR);
    assert_eq!(
        (nccl.ncclCommInitRank)(&mut 0, 2, id, 1),
        REMOTE_ERROR,
        "there is nobody left to join"
    );
}

#[test]
fn wrong_arguments_are_refused() {
    support::alone("wrong_arguments_are_refused", || {
        let program = Program::new();
        let nccl = Nccl::load();
        assert_eq!(got(|version| (nccl.ncclGetVersion)(version)), 22809);
        let mut id = UniqueId([0; 128]);
        ok((nccl.ncclGetUniqueId)(&mut id));
        assert_eq!((nccl.ncclCommInitRank)(&mut 0, 2, id, 2), INVALID_ARGUMENT);
        assert_eq!((nccl.ncclCommInitRank)(&mut 0, 0, id, 0), INVALID_ARGUMENT);
        let communicator = got(|communicator| (nccl.ncclCommInitRank)(communicator, 1, id, 0));
        let buffer = program.allocate(4);
        assert_eq!(
            (nccl.ncclAllReduce)(buffer, buffer, 1, 99, SUM, communicator, 0),
            INVALID_ARGUMENT
        );
        assert_eq!(
            (nccl.ncclAllReduce)(buffer, buffer, 1, INT32, 99, communicator, 0),
            INVALID_ARGUMENT
        );
        assert_eq!(
            (nccl.ncclBcast)(buffer, 1, INT32, 1, communicator, 0),
            INVALID_ARGUMENT
        );
        assert_eq!(
            (nccl.ncclAllReduce)(buffer, buffer, 1, INT32, SUM, 0x1234, 0),
            INVALID_ARGUMENT
        );
        assert_eq!((nccl.ncclGroupEnd)(), INVALID_USAGE);
        ok((nccl.ncclGroupStart)());
        assert_eq!(
            (nccl.ncclBcast)(buffer, 1, INT32, 1, communicator, 0),
            INVALID_ARGUMENT
        );
        assert_eq!(
            (nccl.ncclGroupEnd)(),
            INVALID_ARGUMENT,
            "an error in a group is the group's"
        );
        ok((nccl.ncclAllReduce)(
            buffer,
            buffer,
            1,
            INT32,
            SUM,
            communicator,
            0,
        ));
        ok((program.cuda.cuCtxSynchronize)());
        ok((nccl.ncclCommDestroy)(communicator));
    });
}
