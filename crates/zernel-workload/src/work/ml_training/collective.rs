//! The all-reduce of a job's trainers: a ring of futexes without a GPU, NCCL with a driver.
//!
//! A collective of NCCL waits for every rank, and only a kill ends that wait. So before a rank enters a collective, the
//! ranks agree in shared memory on the number of collectives that all of them join: see [`CollectiveAgreement`].

use std::rc::Rc;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

use rustix::io::Errno;

use super::MlTraining;
use super::gpu::{self, TrainerGpu};
use crate::clock::{self, us_to_ns};
use crate::shared_state::FutexSlot;
use crate::sys::cuda::OpenedCudaDevice;
use crate::sys::library::{DeviceAddress, LibraryError};
use crate::sys::nccl::{JoinedCommunicator, LoadedNccl, UniqueId};
use crate::worker::{FailingStep, WorkFailure, Worker};

/// Number of futex slots that the ranks of a job share.
pub(super) const FUTEX_SLOTS_PER_JOB: usize = 3;

/// The futex slots by which one rank takes part in the job's collectives.
#[derive(Clone, Copy)]
pub(super) struct CollectiveSlots<'a> {
    pub(super) turn_of_this_rank: &'a FutexSlot,
    pub(super) turn_of_next_rank: &'a FutexSlot,
    pub(super) job: &'a [FutexSlot],
}

/// One rank's part in the collectives of its job.
pub(super) enum Collective<'a> {
    /// The job has a single rank, so there are no collectives.
    SingleRank,
    Ring(RingRank<'a>),
    Nccl(NcclRank<'a>),
}

/// The result of one rank's part in a collective.
pub(super) enum CollectiveResult {
    /// All ranks have the sum. The interval is from the moment at which this rank entered the collective to the end of
    /// its wait.
    Complete(CollectiveInterval),
    /// The job has a single rank, so there was no collective to join.
    SingleRank,
    /// A rank was stopped before the collective was complete.
    Stopped,
}

/// The start and the end of a collective on one rank.
pub(super) struct CollectiveInterval {
    pub(super) start_ns: u64,
    pub(super) end_ns: u64,
}

impl CollectiveResult {
    fn ended_now(start_ns: u64) -> Self {
        Self::Complete(CollectiveInterval {
            start_ns,
            end_ns: clock::now_ns(),
        })
    }
}

impl<'a> Collective<'a> {
    /// Joins the other ranks of the job. Returns `None` if the stop request comes before all ranks have joined.
    pub(super) fn join(
        job: &MlTraining,
        worker: &mut Worker<'_>,
        rank: usize,
        gpu: &TrainerGpu,
        slots: CollectiveSlots<'a>,
    ) -> Result<Option<Self>, WorkFailure> {
        if job.ranks == 1 {
            return Ok(Some(Self::SingleRank));
        }
        if let (Some(driver), Some(device)) = (job.gpu.driver_path(), gpu.device()) {
            let nccl = LoadedNccl::load_beside_driver(driver).map_err(library_failure)?;
            let rank = NcclRank::join(job, worker, rank, (nccl, device), slots.job)?;
            return Ok(rank.map(Self::Nccl));
        }
        let hop_count = 2 * (job.ranks as u64 - 1);
        Ok(Some(Self::Ring(RingRank {
            slots,
            hop_count,
            hop_ns: us_to_ns(job.all_reduce_us) / hop_count,
        })))
    }

    /// Adds up the gradients of all ranks. Every rank waits for the others.
    pub(super) fn all_reduce(
        &mut self,
        worker: &mut Worker<'_>,
    ) -> Result<CollectiveResult, WorkFailure> {
        match self {
            Self::SingleRank => Ok(CollectiveResult::SingleRank),
            Self::Ring(ring) => Ok(ring.all_reduce(worker)),
            Self::Nccl(rank) => rank.all_reduce(worker),
        }
    }

    /// Ends the collectives of this rank. With NCCL it closes the agreement and joins the last committed collective, in
    /// which another rank may wait.
    pub(super) fn finish_collectives(
        &mut self,
        worker: &mut Worker<'_>,
    ) -> Result<CollectiveResult, WorkFailure> {
        match self {
            Self::Nccl(rank) => rank.finish_collectives(worker),
            Self::SingleRank | Self::Ring(_) => Ok(CollectiveResult::SingleRank),
        }
    }
}

/// A rank in a ring of futexes.
pub(super) struct RingRank<'a> {
    slots: CollectiveSlots<'a>,
    hop_count: u64,
    hop_ns: u64,
}

impl RingRank<'_> {
    /// Passes turns along the ring as an all-reduce of n ranks passes parts: n - 1 hops to add them up, and n - 1 hops to
    /// share the sums.
    fn all_reduce(&self, worker: &mut Worker<'_>) -> CollectiveResult {
        let start_ns = clock::now_ns();
        let done = (0..self.hop_count).all(|_| {
            worker.burn_cpu_ns(self.hop_ns);
            worker.post_to_slot(self.slots.turn_of_next_rank, 1);
            worker.take_from_slot(self.slots.turn_of_this_rank)
        });
        match done {
            true => CollectiveResult::ended_now(start_ns),
            false => CollectiveResult::Stopped,
        }
    }
}

/// The number of collectives that the ranks of a job join, in the word of a futex slot.
///
/// A rank enters a collective only after it has *committed* to the collective in this word, and no rank commits after a
/// rank has *closed* the agreement. A rank that stops closes the agreement, and then joins the collectives that are
/// committed. At most one collective is outstanding: no rank commits to the collective after the next before all ranks
/// have left the current one. The first collective is the creation of the communicator.
struct CollectiveAgreement<'a>(&'a FutexSlot);

/// Set if the agreement is closed. The other bits of the word are the number of collectives that ranks have committed
/// to.
const AGREEMENT_CLOSED_BIT: u32 = 1 << 31;

impl CollectiveAgreement<'_> {
    /// Commits this rank to the collective after the first `joined`. Returns whether all ranks will join it.
    fn commit_to_next_collective(&self, joined: u32) -> bool {
        let commit = |word: u32| match word & !AGREEMENT_CLOSED_BIT > joined {
            true => Some(word),
            false => (word & AGREEMENT_CLOSED_BIT == 0).then_some(joined + 1),
        };
        self.0.word.fetch_update(AcqRel, Acquire, commit).is_ok()
    }

    /// Closes the agreement and returns the number of collectives that all ranks join.
    fn close_agreement(&self) -> u32 {
        self.0.word.fetch_or(AGREEMENT_CLOSED_BIT, AcqRel) & !AGREEMENT_CLOSED_BIT
    }
}

/// A rank in an NCCL communicator.
pub(super) struct NcclRank<'a> {
    device: Rc<OpenedCudaDevice>,
    communicator: JoinedCommunicator,
    agreement: CollectiveAgreement<'a>,
    /// Number of collectives that this rank has joined.
    joined_collective_count: u32,
    gradients: DeviceAddress,
    gradient_count: usize,
}

impl<'a> NcclRank<'a> {
    fn join(
        job: &MlTraining,
        worker: &mut Worker<'_>,
        rank: usize,
        (nccl, device): (LoadedNccl, Rc<OpenedCudaDevice>),
        slots: &'a [FutexSlot],
    ) -> Result<Option<Self>, WorkFailure> {
        let [agreement, ready, id] = slots else {
            return Ok(None);
        };
        let agreement = CollectiveAgreement(agreement);
        let gradient_count = (job.gradient_kib << 10) / size_of::<f32>();
        let gradients = device
            .allocate_memory(gradient_count * size_of::<f32>())
            .map_err(gpu::library_failure)?;
        if rank == 0 {
            id.write_message(&nccl.new_unique_id().map_err(library_failure)?.0);
        }
        // To join the communicator means to wait for all ranks, so each rank first checks that all can join.
        worker.post_to_all_waiters(ready);
        if !wait_until_all_ranks_are_ready(worker, ready, job.ranks) {
            // Another rank may have seen that all ranks are ready, and wait for this one: only the agreement shows
            // whether it does.
            agreement.close_agreement();
        }
        if !agreement.commit_to_next_collective(0) {
            return Ok(None);
        }
        let id = UniqueId(id.read_message());
        let communicator = worker
            .count_as_blocked(|| nccl.join_communicator(id, rank, job.ranks))
            .map_err(library_failure)?;
        Ok(Some(Self {
            device,
            communicator,
            agreement,
            joined_collective_count: 1,
            gradients,
            gradient_count,
        }))
    }

    fn all_reduce(&mut self, worker: &mut Worker<'_>) -> Result<CollectiveResult, WorkFailure> {
        if worker.is_stopped() {
            self.agreement.close_agreement();
        }
        if !self
            .agreement
            .commit_to_next_collective(self.joined_collective_count)
        {
            return Ok(CollectiveResult::Stopped);
        }
        self.joined_collective_count += 1;
        let (communicator, device) = (&self.communicator, &self.device);
        let start_ns = clock::now_ns();
        communicator
            .all_reduce(self.gradients, self.gradient_count, device.stream())
            .map_err(library_failure)?;
        worker
            .count_as_blocked(|| device.synchronize())
            .map_err(gpu::library_failure)?;
        Ok(CollectiveResult::ended_now(start_ns))
    }

    fn finish_collectives(
        &mut self,
        worker: &mut Worker<'_>,
    ) -> Result<CollectiveResult, WorkFailure> {
        match self.agreement.close_agreement() > self.joined_collective_count {
            true => self.all_reduce(worker),
            false => Ok(CollectiveResult::Stopped),
        }
    }
}

/// Waits until all ranks are ready to join the communicator; false after the stop request.
fn wait_until_all_ranks_are_ready(
    worker: &mut Worker<'_>,
    ready: &FutexSlot,
    ranks: usize,
) -> bool {
    loop {
        let there = ready.word.load(Acquire);
        if there as usize >= ranks {
            return true;
        }
        if !worker.wait_while_slot_has(ready, there) {
            return false;
        }
    }
}

fn library_failure(error: LibraryError) -> WorkFailure {
    match error {
        LibraryError::NotLoaded => WorkFailure {
            step: FailingStep::LoadNccl,
            errno: Errno::NOENT,
        },
        LibraryError::Code(code) => WorkFailure {
            step: FailingStep::UseNccl,
            errno: Errno::from_raw_os_error(code),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared_state::SharedState;

    #[test]
    fn committed_collectives_are_joined_but_none_after_close() {
        let shared = SharedState::new(1, 1, 0).unwrap();
        let agreement = || CollectiveAgreement(&shared.slots(&(0..1))[0]);
        let (early, late) = (agreement(), agreement());
        assert!(early.commit_to_next_collective(0) && late.commit_to_next_collective(0));
        assert!(early.commit_to_next_collective(1));
        assert_eq!(late.close_agreement(), 2);
        assert!(
            late.commit_to_next_collective(1),
            "the other one waits in it"
        );
        assert!(!late.commit_to_next_collective(2) && !early.commit_to_next_collective(2));
        assert_eq!(early.close_agreement(), 2);
    }
}
