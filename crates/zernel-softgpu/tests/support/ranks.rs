//! Processes that are ranks of one communicator.

use super::libraries::{Nccl, Program, UniqueId, got, ok};
use super::{publish, published, role};

pub(crate) const INT32: i32 = 2;
pub(crate) const FLOAT32: i32 = 7;
pub(crate) const SUM: i32 = 0;

/// One rank's process.
pub(crate) struct Rank {
    pub(crate) program: Program,
    pub(crate) nccl: Nccl,
    pub(crate) communicator: u64,
    pub(crate) stream: u64,
    pub(crate) rank: usize,
}

impl Rank {
    /// Joins as the role says.
    pub(crate) fn join(ranks: usize) -> Self {
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

    pub(crate) fn upload<T: Copy>(&self, values: &[T]) -> u64 {
        let address = self.program.allocate(size_of_val(values).max(1));
        self.program.upload(address, values);
        address
    }

    pub(crate) fn synchronize(&self) {
        ok((self.program.cuda.cuStreamSynchronize)(self.stream));
    }

    pub(crate) fn all_reduce_i32(&self, communicator: u64, stream: u64, value: i32) -> u64 {
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

    pub(crate) fn leave(&self) {
        ok((self.nccl.ncclCommDestroy)(self.communicator));
    }
}
