//! The device clock, which is CLOCK_MONOTONIC, and the three ways to wait for it.

use rustix::time::{ClockId, Timespec, clock_gettime};

const NANOSECONDS_PER_SECOND: u64 = 1_000_000_000;

/// Nanoseconds of CLOCK_MONOTONIC.
#[must_use]
pub fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * NANOSECONDS_PER_SECOND + time.tv_nsec as u64
}

/// How a thread waits for the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WaitMethod {
    /// Burns its CPU.
    #[default]
    Spin,
    /// Burns its CPU, but offers it to others all the time.
    Yield,
    /// Sleeps.
    Block,
}

impl WaitMethod {
    /// One turn of a polling loop. Not for [`WaitMethod::Block`], which sleeps instead.
    pub(crate) fn poll_once(self) {
        match self {
            Self::Spin => std::hint::spin_loop(),
            Self::Yield | Self::Block => std::thread::yield_now(),
        }
    }
}

/// Returns when the clock has reached `deadline`.
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
    // An interrupted sleep is resumed by the caller's loop.
    let _ = rustix::thread::clock_nanosleep_absolute(rustix::thread::ClockId::Monotonic, &time);
}

/// How long `bytes` take at `bytes_per_second`.
#[must_use]
pub fn transfer_time(bytes: u64, bytes_per_second: u64) -> u64 {
    let time = u128::from(bytes) * u128::from(NANOSECONDS_PER_SECOND)
        / u128::from(bytes_per_second.max(1));
    u64::try_from(time).unwrap_or(u64::MAX / 4)
}
