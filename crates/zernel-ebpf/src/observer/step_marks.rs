//! What tells the steps of processes apart, as the kernel tells it.

use std::sync::mpsc::{self, Receiver};

use libbpf_rs::{MapHandle, RingBuffer, RingBufferBuilder};
use zerocopy::FromBytes;

use crate::probes::layout;

/// The ring buffer of marks. Nobody is woken for them: they are there when someone looks.
pub(crate) struct StepMarks {
    ring: RingBuffer<'static>,
    received: Receiver<layout::StepMark>,
}

impl StepMarks {
    pub(crate) fn new(map: &MapHandle) -> libbpf_rs::Result<Self> {
        let (sender, received) = mpsc::channel();
        let mut builder = RingBufferBuilder::new();
        builder.add(map, move |bytes| {
            if let Ok((mark, _)) = layout::StepMark::read_from_prefix(bytes) {
                // Who receives it lives as long as the ring.
                let _ = sender.send(mark);
            }
            0
        })?;
        let ring = builder.build()?;
        Ok(Self { ring, received })
    }

    /// All that came since the last time, in the order in which it was told.
    pub(crate) fn take(&self) -> libbpf_rs::Result<impl Iterator<Item = layout::StepMark>> {
        self.ring.consume()?;
        Ok(self.received.try_iter())
    }
}
