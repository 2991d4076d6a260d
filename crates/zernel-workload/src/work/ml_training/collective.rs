//! The all-reduce of a job's trainers: a ring of futexes without a GPU, NCCL with a driver.
//!
//! A collective of NCCL waits for every rank, and only a kill ends that wait. So before a rank enters a
//! collective, the ranks agree in shared memory on the number of collectives that all of them join: see
//! [`Agreement`].

use std::rc::Rc;
use std::sync::atomic::Ordering::{AcqRel, Acquire};

use rustix::io::Errno;

use super::MlTraining;
use super::gpu::{self, Gpu};
use crate::clock::{self, us};
use crate::shared::Slot;
use crate::sys::cuda::Device;
use crate::sys::library::{Address, LibraryError};
use crate::sys::nccl::{Communicator, Nccl, UniqueId};
use crate::worker::{Failure, Step, Worker};

/// Slots that the ranks of a job share.
pub(super) const SLOTS_PER_JOB: usize = 3;

/// The slots of a job's collectives, as one rank sees them.
#[derive(Clone, Copy)]
pub(super) struct CollectiveSlots<'a> {
    pub(super) arrived: &'a Slot,
    pub(super) next_arrived: &'a Slot,
    pub(super) job: &'a [Slot],
}

/// One rank's part in the collectives of its job.
pub(super) enum Collective<'a> {
    /// The job has a single rank.
    Alone,
    Ring(Ring<'a>),
    Nccl(NcclRank<'a>),
}

/// The result of a collective.
pub(super) enum Reduced {
    /// All ranks have the sum. The interval is from the entry of this rank to the end of its wait.
    Together(Interval),
    /// There was no collective to join.
    Alone,
    /// A rank was stopped before the collective was complete.
    Stopped,
}

/// When a collective began and ended.
pub(super) struct Interval {
    pub(super) start_ns: u64,
    pub(super) end_ns: u64,
}

impl Reduced {
    fn ended_now(start_ns: u64) -> Self {
        Self::Together(Interval {
            start_ns,
            end_ns: clock::now_ns(),
        })
    }
}

impl<'a> Collective<'a> {
    /// Joins the other ranks; `None` if the stop request comes before all have joined.
    pub(super) fn join(
        job: &MlTraining,
        worker: &mut Worker<'_>,
        rank: usize,
        gpu: &Gpu,
        slots: CollectiveSlots<'a>,
    ) -> Result<Option<Self>, Failure> {
        if job.ranks == 1 {
            return Ok(Some(Self::Alone));
        }
        if let (Some(driver), Some(device)) = (job.gpu.driver(), gpu.device()) {
            let nccl = Nccl::load_for(driver).map_err(failed)?;
            let rank = NcclRank::join(job, worker, rank, (nccl, device), slots.job)?;
            return Ok(rank.map(Self::Nccl));
        }
        let hops = 2 * (job.ranks as u64 - 1);
        Ok(Some(Self::Ring(Ring {
            slots,
            hops,
            hop_ns: us(job.all_reduce_us) / hops,
        })))
    }

    /// Adds up the gradients of all ranks.
    pub(super) fn all_reduce(&mut self, worker: &mut Worker<'_>) -> Result<Reduced, Failure> {
        match self {
            Self::Alone => Ok(Reduced::Alone),
            Self::Ring(ring) => Ok(ring.all_reduce(worker)),
            Self::Nccl(rank) => rank.all_reduce(worker),
        }
    }

    /// Closes the agreement and joins the last committed collective, in which another rank may wait.
    pub(super) fn finish(&mut self, worker: &mut Worker<'_>) -> Result<Reduced, Failure> {
        match self {
            Self::Nccl(rank) => rank.finish(worker),
            Self::Alone | Self::Ring(_) => Ok(Reduced::Alone),
        }
    }
}

/// A rank in the ring.
pub(super) struct Ring<'a> {
    slots: CollectiveSlots<'a>,
    hops: u64,
    hop_ns: u64,
}

impl Ring<'_> {
    /// Passes parts around the ring twice, once to add and once to share.
    fn all_reduce(&self, worker: &mut Worker<'_>) -> Reduced {
        let start_ns = clock::now_ns();
        let done = (0..self.hops).all(|_| {
            worker.burn_ns(self.hop_ns);
            worker.post(self.slots.next_arrived, 1);
            worker.take(self.slots.arrived)
        });
        match done {
            true => Reduced::ended_now(start_ns),
            false => Reduced::Stopped,
        }
    }
}

/// How many collectives the ranks of a job join, in the word of a slot.
///
/// A rank enters a collective only after it has *committed* to it here, and no rank commits after a
/// rank has *closed* the agreement. A rank that stops closes it, and then joins the collectives that are
/// committed. At most one collective is outstanding: no rank commits to the collective after the next before all
/// ranks have left the current one. The first collective is the creation of the communicator.
struct Agreement<'a>(&'a Slot);

/// The agreement is closed; the other bits are the number of collectives committed to.
const CLOSED: u32 = 1 << 31;

impl Agreement<'_> {
    /// Whether all ranks will join the collective after the first `joined`.
    fn commit(&self, joined: u32) -> bool {
        let commit = |word: u32| match word & !CLOSED > joined {
            true => Some(word),
            false => (word & CLOSED == 0).then_some(joined + 1),
        };
        self.0.word.fetch_update(AcqRel, Acquire, commit).is_ok()
    }

    /// Closes the agreement and returns the number of collectives that all ranks join.
    fn close(&self) -> u32 {
        self.0.word.fetch_or(CLOSED, AcqRel) & !CLOSED
    }
}

/// A rank in a communicator.
pub(super) struct NcclRank<'a> {
    device: Rc<Device>,
    communicator: Communicator,
    agreement: Agreement<'a>,
    /// Collectives that this rank has joined.
    joined: u32,
    gradients: Address,
    floats: usize,
}

impl<'a> NcclRank<'a> {
    fn join(
        job: &MlTraining,
        worker: &mut Worker<'_>,
        rank: usize,
        (nccl, device): (Nccl, Rc<Device>),
        slots: &'a [Slot],
    ) -> Result<Option<Self>, Failure> {
        let [agreement, ready, id] = slots else {
            return Ok(None);
        };
        let agreement = Agreement(agreement);
        let floats = (job.gradient_kib << 10) / size_of::<f32>();
        let gradients = device
            .allocate(floats * size_of::<f32>())
            .map_err(gpu::failed)?;
        if rank == 0 {
            id.leave_message(&nccl.unique_id().map_err(failed)?.0);
        }
        // The join waits for all ranks, so each rank first checks that all can join.
        worker.post_all(ready);
        if !wait_for_all(worker, ready, job.ranks) {
            // Another rank may have seen that all are ready, and wait.
            agreement.close();
        }
        if !agreement.commit(0) {
            return Ok(None);
        }
        let id = UniqueId(id.message());
        let communicator = worker
            .blocking(|| nccl.join(id, rank, job.ranks))
            .map_err(failed)?;
        Ok(Some(Self {
            device,
            communicator,
            agreement,
            joined: 1,
            gradients,
            floats,
        }))
    }

    fn all_reduce(&mut self, worker: &mut Worker<'_>) -> Result<Reduced, Failure> {
        if worker.is_stopped() {
            self.agreement.close();
        }
        if !self.agreement.commit(self.joined) {
            return Ok(Reduced::Stopped);
        }
        self.joined += 1;
        let (communicator, device) = (&self.communicator, &self.device);
        let start_ns = clock::now_ns();
        communicator
            .all_reduce(self.gradients, self.floats, device.stream())
            .map_err(failed)?;
        worker
            .blocking(|| device.synchronize())
            .map_err(gpu::failed)?;
        Ok(Reduced::ended_now(start_ns))
    }

    fn finish(&mut self, worker: &mut Worker<'_>) -> Result<Reduced, Failure> {
        match self.agreement.close() > self.joined {
            true => self.all_reduce(worker),
            false => Ok(Reduced::Stopped),
        }
    }
}

/// Waits until all ranks are ready; false after the stop request.
fn wait_for_all(worker: &mut Worker<'_>, ready: &Slot, ranks: usize) -> bool {
    loop {
        let there = ready.word.load(Acquire);
        if there as usize >= ranks {
            return true;
        }
        if !worker.wait_while(ready, there) {
            return false;
        }
    }
}

fn failed(error: LibraryError) -> Failure {
    match error {
        LibraryError::NotLoaded => Failure {
            step: Step::LoadNccl,
            errno: Errno::NOENT,
        },
        LibraryError::Code(code) => Failure {
            step: Step::UseNccl,
            errno: Errno::from_raw_os_error(code),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::Shared;

    #[test]
    fn all_join_what_one_has_committed_to_and_nothing_after_the_close() {
        let shared = Shared::new(1, 1, 0).unwrap();
        let agreement = || Agreement(&shared.slots(&(0..1))[0]);
        let (early, late) = (agreement(), agreement());
        assert!(early.commit(0) && late.commit(0));
        assert!(early.commit(1));
        assert_eq!(late.close(), 2);
        assert!(late.commit(1), "the other one waits in it");
        assert!(!late.commit(2) && !early.commit(2));
        assert_eq!(early.close(), 2);
    }
}
