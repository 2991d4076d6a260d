//! The time at which device work ends, which may be unknown or in the future.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Acquire, Ordering::Release};

use rustix::thread::futex;

use crate::clock::{self, WaitMethod};

const UNKNOWN_END_TIME: u64 = u64::MAX;

/// The end of one piece of device work, on the device clock.
///
/// The end of most work is known at once: its start plus its duration. The end of work that depends on the host or on
/// other processes becomes known later, and threads may wait for it.
#[derive(Debug)]
pub struct Completion {
    end: AtomicU64,
    is_end_known: AtomicU32,
}

impl Completion {
    /// Creates the completion of work whose end is not known yet.
    #[must_use]
    pub fn with_unknown_end() -> Arc<Self> {
        Arc::new(Self {
            end: AtomicU64::new(UNKNOWN_END_TIME),
            is_end_known: AtomicU32::new(0),
        })
    }

    /// Creates the completion of work that ends at the time `end`.
    #[must_use]
    pub fn with_known_end(end: u64) -> Arc<Self> {
        Arc::new(Self {
            end: AtomicU64::new(end),
            is_end_known: AtomicU32::new(1),
        })
    }

    /// Stores the end and wakes all threads that wait for it.
    pub fn set_end(&self, end: u64) {
        self.end.store(end, Release);
        self.is_end_known.store(1, Release);
        // A wake-up fails only if the address is not mapped.
        let _ = futex::wake(
            &self.is_end_known,
            futex::Flags::PRIVATE,
            i32::MAX.cast_unsigned(),
        );
    }

    /// The end of the work; `None` while it is not known.
    #[must_use]
    pub fn known_end(&self) -> Option<u64> {
        Some(self.end.load(Acquire)).filter(|end| *end != UNKNOWN_END_TIME)
    }

    /// Whether the device clock has reached the end of the work.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.known_end().is_some_and(|end| end <= clock::now_ns())
    }

    /// Waits until the end of the work is known, and returns it.
    pub fn wait_until_end_is_known(&self, how: WaitMethod) -> u64 {
        loop {
            if let Some(end) = self.known_end() {
                return end;
            }
            match how {
                WaitMethod::Block => {
                    // The wait ended by a wake-up, by a signal, or because the end was already known, so the loop
                    // checks again.
                    let _ = futex::wait(&self.is_end_known, futex::Flags::PRIVATE, 0, None);
                }
                _ => how.poll_once(),
            }
        }
    }

    /// Waits until the device clock has reached the end of the work.
    pub fn wait_until_done(&self, how: WaitMethod) {
        let end = self.wait_until_end_is_known(how);
        clock::wait_until(end, how);
    }
}
