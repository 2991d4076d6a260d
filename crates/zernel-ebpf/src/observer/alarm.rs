//! Wakes the observer when the overhead of a thread is far above the budget.

use std::os::fd::{AsFd, BorrowedFd};

use libbpf_rs::{MapHandle, RingBuffer, RingBufferBuilder};

use crate::discovery::sys::readable_descriptor;

/// The ring buffer of alarms. An alarm carries no data, because the BPF maps already have the counts of the thread.
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
