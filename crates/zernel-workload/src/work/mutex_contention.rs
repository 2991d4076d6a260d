//! Tasks that compete for one lock.

use std::sync::atomic::Ordering::{AcqRel, Acquire};

use super::{Work, WorkTypeInfo};
use crate::clock::us_to_ns;
use crate::shared_state::{FutexSlot, wake_waiters};
use crate::spec_keys::spec_table;
use crate::worker::{WorkFailure, Worker};

spec_table! {
    /// See [`WorkType::MutexContention`](super::WorkType::MutexContention).
    #[derive(Eq)]
    pub struct MutexContention {
        /// CPU time that a worker uses while it holds the lock.
        pub hold_us: u64 = 50,
        /// CPU time that a worker uses between two acquisitions of the lock.
        pub think_us: u64 = 50,
    }
}

const LOCK_FREE: u32 = 0;
const LOCK_HELD: u32 = 1;
const LOCK_CONTENDED: u32 = 2;

impl Work for MutexContention {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "mutex_contention",
            does: "takes a lock that the whole group shares, computes, releases the lock, computes again, and counts a unit for each time that it had the lock",
            exercises: "blocking on a held lock, hand-over latency, what happens when the holder is preempted",
        }
    }

    fn team_size(&self, workers: usize) -> usize {
        workers
    }

    fn futex_slot_count(&self, _team_size: usize) -> usize {
        1
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let lock = &worker.team().slots[0];
        while worker.should_do_another_round() {
            if !acquire_lock(worker, lock) {
                break;
            }
            worker.burn_cpu_ns(us_to_ns(self.hold_us));
            release_lock(lock);
            worker.count_round(1);
            worker.burn_cpu_ns(us_to_ns(self.think_us));
        }
        Ok(())
    }
}

/// Takes the lock; false after the stop request. A worker that waited marks the lock as contended, so that the next
/// release wakes another waiter.
fn acquire_lock(worker: &mut Worker<'_>, lock: &FutexSlot) -> bool {
    if lock
        .word
        .compare_exchange(LOCK_FREE, LOCK_HELD, Acquire, Acquire)
        .is_ok()
    {
        return true;
    }
    while lock.word.swap(LOCK_CONTENDED, AcqRel) != LOCK_FREE {
        if !worker.wait_while_slot_has(lock, LOCK_CONTENDED) && worker.is_stopped() {
            return false;
        }
    }
    true
}

fn release_lock(lock: &FutexSlot) {
    lock.store_time_of_change_from(LOCK_CONTENDED);
    if lock.word.swap(LOCK_FREE, AcqRel) == LOCK_CONTENDED {
        wake_waiters(&lock.word, 1);
    }
}
