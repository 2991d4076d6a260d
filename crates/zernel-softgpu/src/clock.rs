//! The device clock, which is CLOCK_MONOTONIC, and the three ways in which threads wait for it.

use rustix::time::{ClockId, Timespec, clock_gettime};

const NANOSECONDS_PER_SECOND: u64 = 1_000_000_000;

/// The present time of CLOCK_MONOTONIC in nanoseconds.
#[must_use]
pub fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * NANOSECONDS_PER_SECOND + time.tv_nsec as u64
}

/// How a thread waits for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WaitMethod {
    /// The thread polls, and keeps its CPU busy.
    #[default]
    Spin,
    /// The thread polls, and yields its CPU each time.
    Yield,
    /// The thread sleeps.
    Block,
}

impl WaitMethod {
    /// Does one turn of a polling loop. Not for [`WaitMethod::Block`], with which threads do not poll.
    pub(crate) fn poll_once(self) {
        match self {
            Self::Spin => std::hint::spin_loop(),
            Self::Yield | Self::Block => std::thread::yield_now(),
        }
    }
}

/// Waits in the given way until the clock has reached `deadline`.
pub fn wait_until(deadline: u64, how: WaitMethod) {
    while now_ns() < deadline {
        match how {
            WaitMethod::Block => sleep_until(deadline),
            _ => how.poll_once(),
        }
    }
}

fn sleep_until(deadline: u64) {
    let time = Timespec {
        tv_sec: (deadline / NANOSECONDS_PER_SECOND) as i64,
        tv_nsec: (deadline % NANOSECONDS_PER_SECOND) as i64,
    };
    // If a signal ends the sleep early, the caller's loop sleeps again.
    let _ = rustix::thread::clock_nanosleep_absolute(rustix::thread::ClockId::Monotonic, &time);
}

/// The nanoseconds that a transfer of `bytes` takes at `bytes_per_second`.
#[must_use]
pub fn transfer_time_ns(bytes: u64, bytes_per_second: u64) -> u64 {
    let time = u128::from(bytes) * u128::from(NANOSECONDS_PER_SECOND)
        / u128::from(bytes_per_second.max(1));
    u64::try_from(time).unwrap_or(u64::MAX / 4)
}
