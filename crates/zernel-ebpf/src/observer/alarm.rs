//! Tells at once when a thread pays far too much for being observed.

use std::os::fd::{AsFd, BorrowedFd};

use libbpf_rs::{MapHandle, RingBuffer, RingBufferBuilder};

use crate::discovery::sys::file_descriptor;

/// The ring buffer of alarms. What they say is in the maps anyway: they only wake.
pub(crate) struct Alarm {
    ring: RingBuffer<'static>,
}

impl Alarm {
    pub(crate) fn new(map: &MapHandle) -> libbpf_rs::Result<Self> {
        let mut builder = RingBufferBuilder::new();
        builder.add(map, |_| 0)?;
        let ring = builder.build()?;
        Ok(Self { ring })
    }

    /// Whether there was one since the last time.
    pub(crate) fn take(&self) -> bool {
        self.ring.consume_raw() > 0
    }
}

impl AsFd for Alarm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        file_descriptor(&self.ring)
    }
}
