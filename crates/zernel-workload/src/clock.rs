//! The two clocks of this crate, in nanoseconds: the monotonic clock, and the CPU time of a thread. Reading them is
//! fork safe.

use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_gettime};

const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// Reads `CLOCK_MONOTONIC`, the clock of every stamp in a report.
pub(crate) fn now_ns() -> u64 {
    timespec_to_ns(clock_gettime(ClockId::Monotonic))
}

/// The CPU time that the calling thread has used.
pub(crate) fn thread_cpu_ns() -> u64 {
    timespec_to_ns(clock_gettime(ClockId::ThreadCPUTime))
}

fn timespec_to_ns(time: Timespec) -> u64 {
    (time.tv_sec as u64)
        .saturating_mul(NANOS_PER_SECOND)
        .saturating_add(time.tv_nsec as u64)
}

/// Converts a moment or a span to the structure that system calls take.
pub(crate) fn ns_to_timespec(ns: u64) -> Timespec {
    Timespec {
        tv_sec: (ns / NANOS_PER_SECOND).try_into().unwrap_or(i64::MAX),
        tv_nsec: (ns % NANOS_PER_SECOND) as i64,
    }
}

/// Converts a span to nanoseconds; a span that is too long for a `u64` becomes `u64::MAX`.
pub(crate) fn duration_to_ns(span: Duration) -> u64 {
    span.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// Converts microseconds, the unit of work parameters, to nanoseconds.
pub(crate) fn us_to_ns(microseconds: u64) -> u64 {
    microseconds.saturating_mul(1000)
}
