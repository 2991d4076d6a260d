//! Reads step marks: the events from which steps are detected.

use std::sync::mpsc::{self, Receiver};

use libbpf_rs::{MapHandle, RingBuffer, RingBufferBuilder};
use zerocopy::FromBytes;

use crate::probes::layout;

/// The ring buffer of step marks. A new mark does not wake the observer.
pub(crate) struct StepMarks {
    ring: RingBuffer<'static>,
    received: Receiver<layout::RawStepMark>,
}

impl StepMarks {
    pub(crate) fn new(map: &MapHandle) -> libbpf_rs::Result<Self> {
        let (sender, received) = mpsc::channel();
        let mut builder = RingBufferBuilder::new();
        builder.add(map, move |bytes| {
            if let Ok((mark, _)) = layout::RawStepMark::read_from_prefix(bytes) {
                // The receiver lives as long as the ring.
                let _ = sender.send(mark);
            }
            0
        })?;
        let ring = builder.build()?;
        Ok(Self { ring, received })
    }

    /// All marks since the last call, in the order of the kernel.
    pub(crate) fn take_marks(
        &self,
    ) -> libbpf_rs::Result<impl Iterator<Item = layout::RawStepMark>> {
        self.ring.consume()?;
        Ok(self.received.try_iter())
    }
}
