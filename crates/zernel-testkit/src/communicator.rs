//! Targets that are ranks of one NCCL communicator. The first rank creates the unique id and stores it in the directory
//! of the stage, where the other ranks wait for it.

use std::{env, fs};

use libloading::Symbol;

use crate::eventually;
use crate::target::{Driver, call, out_pointer, stage_directory};

/// The variable that names the rank of a target process.
pub const RANK_VARIABLE: &str = "ZERNEL_TARGET_RANK";

/// `ncclUniqueId`, which is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// The rank of this target process.
pub fn own_rank() -> u64 {
    env::var(RANK_VARIABLE)
        .expect("set")
        .parse()
        .expect("a number")
}

/// The unique id of the stage's communicator. The first rank creates the unique id, the other ranks wait for it.
pub fn unique_id(driver: &Driver, rank: u64) -> UniqueId {
    let path = stage_directory().join("unique-id");
    let mut id = UniqueId([0; 128]);
    if rank == 0 {
        call!(driver.nccl(), "ncclGetUniqueId", out_pointer(&mut id));
        let unfinished = path.with_extension("new");
        fs::write(&unfinished, id.0).expect("our directory");
        fs::rename(unfinished, path).expect("our directory");
        return id;
    }
    eventually("the first rank publishes the unique id", || path.exists());
    id.0 = fs::read(path).expect("a file").try_into().expect("whole");
    id
}

/// The beginning of `ncclConfig_t`, with the fields that tests set.
#[repr(C)]
pub struct NcclConfiguration {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
}

impl NcclConfiguration {
    /// A configuration for calls that block (`blocking` = 1) or do not block (0).
    pub fn new(blocking: i32) -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 22_809,
            blocking,
        }
    }
}

/// `ncclInProgress`: the call goes on in the background, which is not an error.
pub const NCCL_IN_PROGRESS: i32 = 7;

/// Makes a communicator of all targets of the stage, and returns this rank's handle.
pub fn join_communicator(driver: &Driver, rank: u64, ranks: u64) -> u64 {
    join_communicator_as(driver, unique_id(driver, rank), rank, ranks)
}

/// Makes a communicator of the ranks that pass the same `id`. Every second rank uses calls that do not block.
pub fn join_communicator_as(driver: &Driver, id: UniqueId, rank: u64, ranks: u64) -> u64 {
    type InitRankConfigFunction =
        unsafe extern "C" fn(*mut u64, i32, UniqueId, i32, *const NcclConfiguration) -> i32;
    let blocking = rank.is_multiple_of(2).into();
    let configuration = NcclConfiguration::new(blocking);
    let mut communicator = 0;
    // SAFETY: this is the signature of ncclCommInitRankConfig.
    let result = unsafe {
        let join: Symbol<'_, InitRankConfigFunction> = driver
            .nccl()
            .get(b"ncclCommInitRankConfig\0")
            .expect("exported");
        let (ranks, rank) = (ranks as i32, rank as i32);
        join(
            &raw mut communicator,
            ranks,
            id,
            rank,
            &raw const configuration,
        )
    };
    let expected = if blocking == 1 { 0 } else { NCCL_IN_PROGRESS };
    assert_eq!(result, expected, "ncclCommInitRankConfig");
    communicator
}

/// Creates a non-blocking stream on the current device.
pub fn create_stream(driver: &Driver) -> u64 {
    let mut stream = 0_u64;
    call!(driver.cuda(), "cuStreamCreate", out_pointer(&mut stream), 1);
    stream
}
