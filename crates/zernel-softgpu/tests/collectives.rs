//! The data and the times of collectives and messages.

mod support;

use support::libraries::{CUDA_ERROR_NOT_READY, assert_success, value_stored_by};
use support::ranks::{NCCL_FLOAT32, NCCL_INT32, NCCL_SUM, RankProcess};
use support::{Stage, role_of_process};
use zernel_softgpu::config;
use zernel_softgpu::truth::{LoggedEventKind, TruthLog};

#[test]
fn collectives_move_data_to_right_ranks() {
    const TEST: &str = "collectives_move_data_to_right_ranks";
    const RANKS: usize = 4;
    // Number of elements: larger than a chunk, and no multiple of a chunk.
    const ELEMENT_COUNT: usize = 1_500_001;
    if role_of_process().is_none() {
        return Stage::new(TEST).run_roles(RANKS);
    }
    let rank = RankProcess::join(RANKS);
    let (nccl, communicator, stream) = (&rank.nccl, rank.communicator, rank.stream);
    let value = |rank: usize, index: usize| (rank * 10_000_000 + index) as u32;
    let own: Vec<u32> = (0..ELEMENT_COUNT)
        .map(|index| value(rank.rank, index))
        .collect();
    let send = rank.upload(&own);

    let receive = rank.program.allocate_memory(4 * ELEMENT_COUNT * RANKS);
    assert_success((nccl.ncclAllGather)(
        send,
        receive,
        ELEMENT_COUNT,
        NCCL_INT32,
        communicator,
        stream,
    ));
    rank.synchronize();
    let gathered: Vec<u32> = rank.program.download(receive, ELEMENT_COUNT * RANKS);
    for from in 0..RANKS {
        assert_eq!(gathered[from * ELEMENT_COUNT], value(from, 0));
        assert_eq!(
            gathered[(from + 1) * ELEMENT_COUNT - 1],
            value(from, ELEMENT_COUNT - 1)
        );
    }

    // In an all-to-all, part `r` of every rank's data goes to rank `r`.
    let parts = 1000;
    let out = rank.program.allocate_memory(4 * parts * RANKS);
    assert_success((nccl.ncclAlltoAll)(
        send,
        out,
        parts,
        NCCL_INT32,
        communicator,
        stream,
    ));
    rank.synchronize();
    let expected: Vec<u32> = (0..RANKS)
        .flat_map(|from| (0..parts).map(move |index| (from, index)))
        .map(|(from, index)| value(from, rank.rank * parts + index))
        .collect();
    assert_eq!(rank.program.download::<u32>(out, parts * RANKS), expected);

    assert_success((nccl.ncclBroadcast)(
        send,
        out,
        parts,
        NCCL_INT32,
        2,
        communicator,
        stream,
    ));
    rank.synchronize();
    assert_eq!(
        rank.program.download::<u32>(out, 2),
        [value(2, 0), value(2, 1)]
    );

    assert_success((nccl.ncclScatter)(
        send,
        out,
        parts,
        NCCL_INT32,
        1,
        communicator,
        stream,
    ));
    rank.synchronize();
    assert_eq!(
        rank.program.download::<u32>(out, 1),
        [value(1, rank.rank * parts)]
    );

    assert_success((nccl.ncclGather)(
        send,
        receive,
        parts,
        NCCL_INT32,
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

    assert_success((nccl.ncclBcast)(
        send,
        ELEMENT_COUNT,
        NCCL_INT32,
        0,
        communicator,
        stream,
    ));
    rank.synchronize();
    assert_eq!(
        rank.program.download::<u32>(send, 2),
        [value(0, 0), value(0, 1)]
    );

    let sums = rank.upload(&vec![1.0f32; ELEMENT_COUNT]);
    assert_success((nccl.ncclAllReduce)(
        sums,
        sums,
        ELEMENT_COUNT,
        NCCL_FLOAT32,
        NCCL_SUM,
        communicator,
        stream,
    ));
    rank.synchronize();
    assert!(
        rank.program
            .download::<f32>(sums, ELEMENT_COUNT)
            .iter()
            .all(|sum| *sum == RANKS as f32)
    );
    rank.destroy_communicator();
}

#[test]
fn grouped_sends_and_receives_run_at_once() {
    const TEST: &str = "grouped_sends_and_receives_run_at_once";
    const RANKS: usize = 4;
    const ELEMENT_COUNT: usize = 100_003;
    if role_of_process().is_none() {
        return Stage::new(TEST).run_roles(RANKS);
    }
    let rank = RankProcess::join(RANKS);
    let (nccl, communicator, stream) = (&rank.nccl, rank.communicator, rank.stream);
    // Every rank sends to every rank, itself included. This hangs unless all transfers run at once.
    let send = rank.upload(&vec![rank.rank as i32; ELEMENT_COUNT]);
    let receive = rank.program.allocate_memory(4 * ELEMENT_COUNT * RANKS);
    assert_success((nccl.ncclGroupStart)());
    for peer in 0..RANKS {
        assert_success((nccl.ncclSend)(
            send,
            ELEMENT_COUNT,
            NCCL_INT32,
            peer as i32,
            communicator,
            stream,
        ));
        let place = receive + (4 * ELEMENT_COUNT * peer) as u64;
        assert_success((nccl.ncclRecv)(
            place,
            ELEMENT_COUNT,
            NCCL_INT32,
            peer as i32,
            communicator,
            stream,
        ));
    }
    assert_success((nccl.ncclGroupEnd)());
    rank.synchronize();
    let received: Vec<i32> = rank.program.download(receive, ELEMENT_COUNT * RANKS);
    assert!(
        received
            .iter()
            .enumerate()
            .all(|(index, value)| *value == (index / ELEMENT_COUNT) as i32)
    );

    // Each rank sends two messages to its neighbour in a ring, one after the other, and an empty one.
    let next = ((rank.rank + 1) % RANKS) as i32;
    let previous = ((rank.rank + RANKS - 1) % RANKS) as i32;
    let second = rank.upload(&[100 + rank.rank as i32]);
    assert_success((nccl.ncclGroupStart)());
    assert_success((nccl.ncclSend)(
        send,
        1,
        NCCL_INT32,
        next,
        communicator,
        stream,
    ));
    assert_success((nccl.ncclSend)(
        send,
        0,
        NCCL_INT32,
        next,
        communicator,
        stream,
    ));
    assert_success((nccl.ncclSend)(
        second,
        1,
        NCCL_INT32,
        next,
        communicator,
        stream,
    ));
    assert_success((nccl.ncclRecv)(
        receive,
        1,
        NCCL_INT32,
        previous,
        communicator,
        stream,
    ));
    assert_success((nccl.ncclRecv)(
        receive,
        0,
        NCCL_INT32,
        previous,
        communicator,
        stream,
    ));
    assert_success((nccl.ncclRecv)(
        receive + 4,
        1,
        NCCL_INT32,
        previous,
        communicator,
        stream,
    ));
    assert_success((nccl.ncclGroupEnd)());
    rank.synchronize();
    assert_eq!(
        rank.program.download::<i32>(receive, 2),
        [previous, 100 + previous]
    );
    rank.destroy_communicator();
}

#[test]
fn captured_collectives_run_at_every_graph_launch() {
    const TEST: &str = "captured_collectives_run_at_every_graph_launch";
    if role_of_process().is_none() {
        return Stage::new(TEST).run_roles(2);
    }
    let rank = RankProcess::join(2);
    let cuda = &rank.program.cuda;
    let buffer = rank.upload(&[1i32]);
    assert_success((cuda.cuStreamBeginCapture_v2)(rank.stream, 0));
    assert_success((rank.nccl.ncclAllReduce)(
        buffer,
        buffer,
        1,
        NCCL_INT32,
        NCCL_SUM,
        rank.communicator,
        rank.stream,
    ));
    let graph = value_stored_by(|graph| (cuda.cuStreamEndCapture)(rank.stream, graph));
    let executable =
        value_stored_by(|executable| (cuda.cuGraphInstantiateWithFlags)(executable, graph, 0));
    for _ in 0..5 {
        assert_success((cuda.cuGraphLaunch)(executable, rank.stream));
    }
    rank.synchronize();
    assert_eq!(rank.program.download::<i32>(buffer, 1), [32]);
    assert_success((cuda.cuGraphExecDestroy)(executable));
    assert_success((cuda.cuGraphDestroy)(graph));
    rank.destroy_communicator();
}

/// An NCCL call returns at once. The collective ends when the last rank has arrived and the bytes are transferred.
#[test]
fn collective_lasts_until_last_rank_and_transfer() {
    const TEST: &str = "collective_lasts_until_last_rank_and_transfer";
    const LATE_KERNEL_NS: u64 = 300_000_000;
    const BYTES: usize = 1_000_000;
    if role_of_process().is_some() {
        let rank = RankProcess::join(2);
        let buffer = rank.upload(&vec![0u8; BYTES]);
        if rank.rank == 1 {
            rank.program.launch(rank.stream, LATE_KERNEL_NS);
        }
        assert_success((rank.nccl.ncclAllReduce)(
            buffer,
            buffer,
            BYTES,
            1,
            NCCL_SUM,
            rank.communicator,
            rank.stream,
        ));
        assert_eq!(
            (rank.program.cuda.cuStreamQuery)(rank.stream),
            CUDA_ERROR_NOT_READY,
            "the call only puts it in the stream"
        );
        rank.synchronize();
        rank.destroy_communicator();
        return;
    }
    // At 10 MB/s, the transfer of 1 MB takes 100 ms.
    let stage = Stage::new(TEST)
        .with_truth_log()
        .set_variable(config::LOG_EVENTS_VARIABLE, 1)
        .set_variable(config::NCCL_BANDWIDTH_VARIABLE, 10_000_000);
    stage.run_roles(2);
    let log = TruthLog::read(&stage.log_path()).unwrap();
    let device = |symbol: &str| -> Vec<_> {
        let events = log.processes.iter().flat_map(|process| &process.events);
        events
            .filter(|event| event.kind == LoggedEventKind::Device && event.symbol == symbol)
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
    let totals = log.returned_calls();
    assert_eq!(totals[&("ncclAllReduce".into(), 0)].bytes, 2 * BYTES as u64);
    assert_eq!(
        totals[&("cuLaunchKernelEx".into(), 0)].calls,
        2,
        "one launch for each collective"
    );
}
