//! Processes that are ranks of one communicator.

use super::libraries::{CudaProgram, Nccl, UniqueId, assert_success, value_stored_by};
use super::{publish_file, role_of_process, wait_for_file};

pub(crate) const NCCL_INT32: i32 = 2;
pub(crate) const NCCL_FLOAT32: i32 = 7;
pub(crate) const NCCL_SUM: i32 = 0;

/// A process that is one rank of a communicator, with its stream.
pub(crate) struct RankProcess {
    pub(crate) program: CudaProgram,
    pub(crate) nccl: Nccl,
    pub(crate) communicator: u64,
    pub(crate) stream: u64,
    pub(crate) rank: usize,
}

impl RankProcess {
    /// Joins the communicator as the rank that the role of this process names.
    pub(crate) fn join(ranks: usize) -> Self {
        let rank: usize = role_of_process().unwrap().parse().unwrap();
        let program = CudaProgram::new();
        let nccl = Nccl::load();
        let mut id = UniqueId([0; 128]);
        if rank == 0 {
            assert_success((nccl.ncclGetUniqueId)(&mut id));
            publish_file("id", &id.0);
        } else {
            id.0.copy_from_slice(&wait_for_file("id"));
        }
        let communicator = value_stored_by(|communicator| {
            (nccl.ncclCommInitRank)(communicator, ranks as i32, id, rank as i32)
        });
        let stream = program.create_stream();
        Self {
            program,
            nccl,
            communicator,
            stream,
            rank,
        }
    }

    pub(crate) fn upload<T: Copy>(&self, values: &[T]) -> u64 {
        let address = self.program.allocate_memory(size_of_val(values).max(1));
        self.program.upload(address, values);
        address
    }

    pub(crate) fn synchronize(&self) {
        assert_success((self.program.cuda.cuStreamSynchronize)(self.stream));
    }

    pub(crate) fn all_reduce_i32(&self, communicator: u64, stream: u64, value: i32) -> u64 {
        let buffer = self.upload(&[value]);
        assert_success((self.nccl.ncclAllReduce)(
            buffer,
            buffer,
            1,
            NCCL_INT32,
            NCCL_SUM,
            communicator,
            stream,
        ));
        buffer
    }

    pub(crate) fn destroy_communicator(&self) {
        assert_success((self.nccl.ncclCommDestroy)(self.communicator));
    }
}
