//! A communicator, as one of its ranks uses it.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use zernel_softgpu::registry::{Registry, new_handle};

use crate::driver::DeviceAndContext;
use crate::segment::{OperationAborted, RankWord, SharedSegment, UniqueId};
use crate::status::NcclError;

static COMMUNICATORS: Registry<Communicator> = Registry::new();

/// `NCCL_SPLIT_NOCOLOR`: the rank gets no communicator from a split.
pub(crate) const SPLIT_NO_COLOR: i32 = -1;

/// The communicator of one rank in this process.
#[derive(Debug)]
pub(crate) struct Communicator {
    pub(crate) handle: u64,
    pub(crate) segment: SharedSegment,
    pub(crate) device_and_context: DeviceAndContext,
    aborted: AtomicBool,
    error: AtomicI32,
    operation_order: Mutex<OperationOrder>,
    operation_finished: Condvar,
}

/// The order of a communicator's operations. They run in the order in which they were issued, whatever streams they are
/// in.
#[derive(Debug, Default)]
struct OperationOrder {
    issued_count: u64,
    finished_count: u64,
    is_finalized: bool,
}

impl Communicator {
    /// Joins the communicator of `id` as `rank`, and waits until all ranks have joined.
    pub(crate) fn join(
        id: &UniqueId,
        rank: i32,
        ranks: i32,
        device_and_context: DeviceAndContext,
    ) -> Result<Arc<Self>, NcclError> {
        let rank = usize::try_from(rank).map_err(|_| NcclError::InvalidArgument)?;
        let ranks = usize::try_from(ranks).map_err(|_| NcclError::InvalidArgument)?;
        let segment = SharedSegment::join(id, rank, ranks)?;
        let communicator = Arc::new(Self {
            handle: new_handle(),
            segment,
            device_and_context,
            aborted: AtomicBool::new(false),
            error: AtomicI32::new(0),
            operation_order: Mutex::default(),
            operation_finished: Condvar::new(),
        });
        COMMUNICATORS.insert_with_handle(communicator.handle, Arc::clone(&communicator));
        Ok(communicator)
    }

    /// The communicator with this handle.
    pub(crate) fn from_handle(handle: u64) -> Result<Arc<Self>, NcclError> {
        COMMUNICATORS.get(handle).ok_or(NcclError::InvalidArgument)
    }

    /// The communicator with this handle, or an error if it can take no more operations.
    pub(crate) fn usable_from_handle(handle: u64) -> Result<Arc<Self>, NcclError> {
        let communicator = Self::from_handle(handle)?;
        if let Some(error) = communicator.async_error() {
            return Err(error);
        }
        let finalized = communicator.lock_operation_order().is_finalized;
        match finalized {
            true => Err(NcclError::InvalidUsage),
            false => Ok(communicator),
        }
    }

    fn lock_operation_order(&self) -> MutexGuard<'_, OperationOrder> {
        self.operation_order
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The error that `ncclCommGetAsyncError` returns; `None` if there is none.
    pub(crate) fn async_error(&self) -> Option<NcclError> {
        NcclError::from_code(self.error.load(Acquire))
    }

    /// Returns an error if the communicator was aborted. An operation calls this while it waits for other ranks. A lost
    /// rank sets the error that `ncclCommGetAsyncError` returns. As in the real library, the operation itself continues
    /// until an abort.
    pub(crate) fn check_abort(&self, waits_for_lost_rank: bool) -> Result<(), OperationAborted> {
        if self.aborted.load(Acquire) {
            return Err(OperationAborted);
        }
        if waits_for_lost_rank {
            self.error.store(NcclError::RemoteError.into(), Release);
        }
        Ok(())
    }

    /// Returns the number of a new operation in the order of the communicator's operations.
    pub(crate) fn new_operation_number(&self) -> u64 {
        let mut order = self.lock_operation_order();
        order.issued_count += 1;
        order.issued_count - 1
    }

    /// Waits until all operations with a number below `operation_number` have finished.
    pub(crate) fn wait_for_earlier_operations(&self, operation_number: u64) {
        let waiting = self
            .operation_finished
            .wait_while(self.lock_operation_order(), |order| {
                order.finished_count != operation_number
            });
        drop(waiting.unwrap_or_else(PoisonError::into_inner));
    }

    /// Records that the operation whose turn it was has finished, and wakes the next one.
    pub(crate) fn mark_operation_finished(&self) {
        self.lock_operation_order().finished_count += 1;
        self.operation_finished.notify_all();
    }

    /// Refuses later operations, and waits until all operations issued so far have finished.
    pub(crate) fn finalize(&self) {
        let mut order = self.lock_operation_order();
        order.is_finalized = true;
        let waiting = self
            .operation_finished
            .wait_while(order, |order| order.finished_count != order.issued_count);
        drop(waiting.unwrap_or_else(PoisonError::into_inner));
    }

    /// Waits for all operations of this rank, and leaves the communicator.
    pub(crate) fn destroy(&self) {
        self.finalize();
        self.segment.mark_rank_left();
        COMMUNICATORS.remove(self.handle);
    }

    /// Leaves the communicator at once. Operations that still run end without a result.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Release);
        self.segment.wake_ranks();
        self.destroy();
    }

    /// Splits the ranks into one communicator per colour. Returns `None` for a rank without a colour.
    pub(crate) fn split(&self, color: i32, key: i32) -> Result<Option<Arc<Self>>, NcclError> {
        let check_abort =
            || self.check_abort(self.segment.waits_for_lost_rank(RankWord::ControlStepCount));
        let own_rank = self.segment.own_rank();
        let mut message = [0; 8];
        message[0] = u64::from(color.cast_unsigned());
        message[1] = u64::from(key.cast_unsigned());
        let all = self
            .segment
            .exchange_control_words(message, check_abort)
            .map_err(|OperationAborted| NcclError::InvalidUsage)?;
        let members = members_of_color(&all, color);
        let leads = members.first() == Some(&own_rank) && color != SPLIT_NO_COLOR;
        let mut message = [0; 8];
        if leads {
            message[..3].copy_from_slice(&crate::segment::new_unique_id()?.control_words());
        }
        let all = self
            .segment
            .exchange_control_words(message, check_abort)
            .map_err(|OperationAborted| NcclError::InvalidUsage)?;
        if color == SPLIT_NO_COLOR {
            return Ok(None);
        }
        let id = all[members[0]];
        let new_rank = members
            .iter()
            .position(|rank| *rank == own_rank)
            .unwrap_or(0);
        let id = UniqueId::from_message_words([id[0], id[1], id[2]]);
        Self::join(
            &id,
            new_rank as i32,
            members.len() as i32,
            self.device_and_context,
        )
        .map(Some)
    }
}

/// The ranks of one colour, ordered by key, then by rank.
fn members_of_color(all: &[[u64; 8]], color: i32) -> Vec<usize> {
    let same = |rank: &usize| all[*rank][0] == u64::from(color.cast_unsigned());
    let mut members: Vec<usize> = (0..all.len()).filter(same).collect();
    members.sort_by_key(|rank| (all[*rank][1] as u32).cast_signed());
    members
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_members_are_ordered_by_key_then_rank() {
        let word = |value: i32| u64::from(value.cast_unsigned());
        let all: Vec<[u64; 8]> = [(1, 5), (0, 0), (1, -1), (1, 5)]
            .map(|(color, key)| [word(color), word(key), 0, 0, 0, 0, 0, 0])
            .to_vec();
        assert_eq!(members_of_color(&all, 1), [2, 0, 3]);
        assert_eq!(members_of_color(&all, 0), [1]);
    }
}
