//! Wakes the observer when the overhead of a thread is far above the budget.

use std::os::fd::{AsFd, BorrowedFd};

use libbpf_rs::{MapHandle, RingBuffer, RingBufferBuilder};

use crate::discovery::sys::readable_descriptor;

/// The ring buffer of alarms. The data of an alarm is not read: the record of the process in the BPF maps has the call rate
/// of its busiest thread.
pub(crate) struct AlarmRing {
    ring: RingBuffer<'static>,
}

impl AlarmRing {
    pub(crate) fn new(map: &MapHandle) -> libbpf_rs::Result<Self> {
        let mut builder = RingBufferBuilder::new();
        builder.add(map, |_| 0)?;
        let ring = builder.build()?;
        Ok(Self { ring })
    }

    /// Whether an alarm about the overhead of a thread arrived since the last call of this function.
    pub(crate) fn had_alarm_since_last_call(&self) -> bool {
        self.ring.consume_raw() > 0
    }
}

impl AsFd for AlarmRing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        readable_descriptor(&self.ring)
    }
}
