//! Creation, split and end of communicators.

mod support;

use std::time::Duration;

use support::libraries::{
    CUDA_ERROR_NOT_READY, CudaProgram, Nccl, UniqueId, assert_success, value_stored_by,
};
use support::ranks::{NCCL_INT32, NCCL_SUM, RankProcess};
use support::{Stage, publish_file, role_of_process, wait_for_file};
use zernel_softgpu::config;
use zernel_testkit::eventually;

const INVALID_ARGUMENT: i32 = 4;
const INVALID_USAGE: i32 = 5;
const REMOTE_ERROR: i32 = 6;

#[test]
fn split_communicators_run_concurrently() {
    const TEST: &str = "split_communicators_run_concurrently";
    const RANKS: usize = 4;
    if role_of_process().is_none() {
        return Stage::new(TEST).run_roles(RANKS);
    }
    let rank = RankProcess::join(RANKS);
    let nccl = &rank.nccl;
    // One communicator of the even ranks and one of the odd ranks, each in reverse order; rank 3 stays out of the
    // second split.
    let own = rank.rank as i32;
    let halves = value_stored_by(|new| {
        (nccl.ncclCommSplit)(rank.communicator, own % 2, -own, new, std::ptr::null())
    });
    assert_eq!(
        value_stored_by(|count| (nccl.ncclCommCount)(halves, count)),
        2
    );
    assert_eq!(
        value_stored_by(|new_rank| (nccl.ncclCommUserRank)(halves, new_rank)),
        i32::from(own < 2)
    );
    let color = if own == 3 { -1 } else { 7 };
    let three = value_stored_by(|new| {
        (nccl.ncclCommSplit)(rank.communicator, color, 0, new, std::ptr::null())
    });
    assert_eq!(three == 0, own == 3);

    // All collectives are in one group, on two streams.
    let other_stream = rank.program.create_stream();
    assert_success((nccl.ncclGroupStart)());
    let all = rank.all_reduce_i32(rank.communicator, rank.stream, 1 << own);
    let half = rank.all_reduce_i32(halves, other_stream, 1 << own);
    assert_success((nccl.ncclGroupEnd)());
    rank.synchronize();
    assert_success((rank.program.cuda.cuStreamSynchronize)(other_stream));
    assert_eq!(rank.program.download::<i32>(all, 1), [0b1111]);
    assert_eq!(
        rank.program.download::<i32>(half, 1),
        [if own % 2 == 0 { 0b0101 } else { 0b1010 }]
    );
    if three != 0 {
        let buffer = rank.all_reduce_i32(three, rank.stream, 1 << own);
        rank.synchronize();
        assert_eq!(rank.program.download::<i32>(buffer, 1), [0b0111]);
        assert_success((nccl.ncclCommDestroy)(three));
    }
    // One communicator on two streams runs its operations in the order of the calls.
    for round in 0..20 {
        let stream = if round % 2 == 0 {
            rank.stream
        } else {
            other_stream
        };
        rank.all_reduce_i32(rank.communicator, stream, 1);
    }
    assert_success((rank.program.cuda.cuCtxSynchronize)());
    assert_success((nccl.ncclCommFinalize)(halves));
    assert_eq!(
        (nccl.ncclAllReduce)(half, half, 1, NCCL_INT32, NCCL_SUM, halves, rank.stream),
        INVALID_USAGE
    );
    assert_success((nccl.ncclCommDestroy)(halves));
    rank.destroy_communicator();
}

#[test]
fn comm_init_all_makes_all_ranks_in_one_process() {
    const TEST: &str = "comm_init_all_makes_all_ranks_in_one_process";
    if role_of_process().is_none() {
        return Stage::new(TEST)
            .set_variable(config::DEVICES_VARIABLE, 3)
            .run_roles(1);
    }
    let program = CudaProgram::new();
    let nccl = Nccl::load();
    let mut communicators = [0; 3];
    assert_success((nccl.ncclCommInitAll)(
        communicators.as_mut_ptr(),
        3,
        std::ptr::null(),
    ));
    let buffer = program.allocate_memory(12);
    program.upload(buffer, &[1i32, 2, 4]);
    assert_success((nccl.ncclGroupStart)());
    for (rank, communicator) in communicators.iter().enumerate() {
        assert_eq!(
            value_stored_by(|device| (nccl.ncclCommCuDevice)(*communicator, device)),
            rank as i32
        );
        let own = buffer + 4 * rank as u64;
        // Stream 0 is the default stream of each communicator's own device.
        assert_success((nccl.ncclAllReduce)(
            own,
            own,
            1,
            NCCL_INT32,
            NCCL_SUM,
            *communicator,
            0,
        ));
    }
    assert_success((nccl.ncclGroupEnd)());
    for device in 0..3 {
        let context =
            value_stored_by(|context| (program.cuda.cuDevicePrimaryCtxRetain)(context, device));
        assert_success((program.cuda.cuCtxSetCurrent)(context));
        assert_success((program.cuda.cuCtxSynchronize)());
    }
    assert_eq!(program.download::<i32>(buffer, 3), [7, 7, 7]);
    communicators
        .iter()
        .for_each(|communicator| assert_success((nccl.ncclCommDestroy)(*communicator)));
}

#[test]
fn killed_rank_is_async_error_and_others_can_abort() {
    const TEST: &str = "killed_rank_is_async_error_and_others_can_abort";
    const RANKS: usize = 3;
    if role_of_process().is_none() {
        let before = shared_memory_files();
        let stage = Stage::new(TEST);
        let mut actors: Vec<_> = (0..RANKS)
            .map(|rank| stage.start(&rank.to_string()))
            .collect();
        eventually("the victim is there", || {
            stage.path().join("ready-2").exists()
        });
        actors.remove(2).kill();
        actors
            .into_iter()
            .for_each(support::RoleProcess::expect_success);
        assert_eq!(shared_memory_files(), before, "nothing is left behind");
        return;
    }
    let rank = RankProcess::join(RANKS);
    let (cuda, nccl) = (&rank.program.cuda, &rank.nccl);
    rank.all_reduce_i32(rank.communicator, rank.stream, 1);
    rank.synchronize();
    if rank.rank == 2 {
        publish_file("ready-2", b"");
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
    let buffer = rank.all_reduce_i32(rank.communicator, rank.stream, 1);
    let error = || value_stored_by(|error| (nccl.ncclCommGetAsyncError)(rank.communicator, error));
    eventually("the loss is noticed", || error() == REMOTE_ERROR);
    assert_eq!(
        (cuda.cuStreamQuery)(rank.stream),
        CUDA_ERROR_NOT_READY,
        "the collective does not end before an abort"
    );
    let refused = (nccl.ncclAllReduce)(
        buffer,
        buffer,
        1,
        NCCL_INT32,
        NCCL_SUM,
        rank.communicator,
        rank.stream,
    );
    assert_eq!(refused, REMOTE_ERROR);
    assert_success((nccl.ncclCommAbort)(rank.communicator));
    rank.synchronize();
    assert_eq!((nccl.ncclCommDestroy)(rank.communicator), INVALID_ARGUMENT);
}

/// The names of shared memory on this machine. Communicators add no name, because their memory has none.
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
fn rank_killed_before_join_is_error() {
    const TEST: &str = "rank_killed_before_join_is_error";
    if role_of_process().is_none() {
        let stage = Stage::new(TEST);
        let maker = stage.start("maker");
        let joiner = stage.start("joiner");
        eventually("the joiner waits", || stage.path().join("joining").exists());
        maker.kill();
        joiner.expect_success();
        return;
    }
    let _program = CudaProgram::new();
    let nccl = Nccl::load();
    let mut id = UniqueId([0; 128]);
    if role_of_process().as_deref() == Some("maker") {
        assert_success((nccl.ncclGetUniqueId)(&mut id));
        publish_file("id", &id.0);
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
    id.0.copy_from_slice(&wait_for_file("id"));
    publish_file("joining", b"");
    assert_eq!((nccl.ncclCommInitRank)(&mut 0, 2, id, 1), REMOTE_ERROR);
    assert_eq!(
        (nccl.ncclCommInitRank)(&mut 0, 2, id, 1),
        REMOTE_ERROR,
        "there is nobody left to join"
    );
}

#[test]
fn nccl_calls_refuse_invalid_arguments() {
    support::run_in_fresh_process("nccl_calls_refuse_invalid_arguments", || {
        let program = CudaProgram::new();
        let nccl = Nccl::load();
        assert_eq!(
            value_stored_by(|version| (nccl.ncclGetVersion)(version)),
            22809
        );
        let mut id = UniqueId([0; 128]);
        assert_success((nccl.ncclGetUniqueId)(&mut id));
        assert_eq!((nccl.ncclCommInitRank)(&mut 0, 2, id, 2), INVALID_ARGUMENT);
        assert_eq!((nccl.ncclCommInitRank)(&mut 0, 0, id, 0), INVALID_ARGUMENT);
        let communicator =
            value_stored_by(|communicator| (nccl.ncclCommInitRank)(communicator, 1, id, 0));
        let buffer = program.allocate_memory(4);
        assert_eq!(
            (nccl.ncclAllReduce)(buffer, buffer, 1, 99, NCCL_SUM, communicator, 0),
            INVALID_ARGUMENT
        );
        assert_eq!(
            (nccl.ncclAllReduce)(buffer, buffer, 1, NCCL_INT32, 99, communicator, 0),
            INVALID_ARGUMENT
        );
        assert_eq!(
            (nccl.ncclBcast)(buffer, 1, NCCL_INT32, 1, communicator, 0),
            INVALID_ARGUMENT
        );
        assert_eq!(
            (nccl.ncclAllReduce)(buffer, buffer, 1, NCCL_INT32, NCCL_SUM, 0x1234, 0),
            INVALID_ARGUMENT
        );
        assert_eq!((nccl.ncclGroupEnd)(), INVALID_USAGE);
        assert_success((nccl.ncclGroupStart)());
        assert_eq!(
            (nccl.ncclBcast)(buffer, 1, NCCL_INT32, 1, communicator, 0),
            INVALID_ARGUMENT
        );
        assert_eq!(
            (nccl.ncclGroupEnd)(),
            INVALID_ARGUMENT,
            "an error in a group is the group's"
        );
        assert_success((nccl.ncclAllReduce)(
            buffer,
            buffer,
            1,
            NCCL_INT32,
            NCCL_SUM,
            communicator,
            0,
        ));
        assert_success((program.cuda.cuCtxSynchronize)());
        assert_success((nccl.ncclCommDestroy)(communicator));
    });
}
