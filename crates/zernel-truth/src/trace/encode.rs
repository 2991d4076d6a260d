//! Writes a trace.

use std::collections::HashMap;

use super::varint::{write, write_signed};
use super::{
    COVERAGE_TAG, CoverageEntry, EVENT_TAG, EventEntry, HAS_SYMBOL, LOSS_TAG, MAGIC, NEW_DEADLINE,
    NEW_FLAGS, NEW_PHASE, NEW_THREAD, PROCESS_TAG, ProcessEntry, SAMPLE_TAG, SampleEntry,
    ThreadState, TraceEntry, TraceHeader,
};

/// Encodes entries as they come.
#[derive(Debug, Default)]
pub struct TraceEncoder {
    bytes: Vec<u8>,
    last_ns: u64,
    threads: Vec<ThreadState>,
    indices: HashMap<(u32, u32), usize>,
}

impl TraceEncoder {
    /// Bytes of all entries so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there is no entry yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Appends an entry.
    pub fn push(&mut self, entry: &TraceEntry) {
        match entry {
            TraceEntry::Event(event) => self.event(event),
            TraceEntry::Process(process) => self.process(process),
            TraceEntry::Sample(sample) => self.sample(sample),
            TraceEntry::Coverage { at_ns, coverage } => self.coverage(*at_ns, *coverage),
            TraceEntry::Loss { at_ns, events } => {
                self.bytes.push(LOSS_TAG);
                self.time(*at_ns);
                write(&mut self.bytes, *events);
            }
        }
    }

    /// The file.
    #[must_use]
    pub fn finish(self, header: &TraceHeader) -> Vec<u8> {
        let mut file = MAGIC.as_bytes().to_vec();
        // A header has only strings, numbers and lists of them.
        file.extend(serde_json::to_vec(header).unwrap_or_default());
        file.push(b'\n');
        file.extend(self.bytes);
        file
    }

    fn time(&mut self, at_ns: u64) {
        let elapsed = at_ns.wrapping_sub(self.last_ns) as i64;
        write_signed(&mut self.bytes, elapsed);
        self.last_ns = at_ns;
    }

    fn event(&mut self, event: &EventEntry) {
        let key = (event.tid, event.process);
        let known = self.indices.get(&key).copied();
        let index = known.unwrap_or(self.threads.len());
        if known.is_none() {
            self.indices.insert(key, index);
            self.threads.push(ThreadState::default());
        }
        let before = self.threads[index];
        let deadline = (event.deadline_ns != u64::MAX)
            .then(|| event.deadline_ns.wrapping_sub(event.at_ns) as i64);
        let phase = (event.phase, event.sequence, event.phase_start_ns);
        let is_new_phase = phase != (before.phase, before.sequence, before.phase_start_ns);
        let parts = [
            (known.is_none(), NEW_THREAD),
            (event.symbol.is_some(), HAS_SYMBOL),
            (is_new_phase, NEW_PHASE),
            (event.flags != before.flags, NEW_FLAGS),
            (deadline != before.deadline, NEW_DEADLINE),
        ];
        let parts = parts.iter().filter(|(is_there, _)| *is_there);
        let tag = parts.fold(EVENT_TAG, |tag, (_, bit)| tag | bit);
        self.bytes.push(tag);
        self.time(event.at_ns);
        let bytes = &mut self.bytes;
        write(bytes, index as u64);
        if known.is_none() {
            write(bytes, event.tid.into());
            write(bytes, event.process.into());
        }
        bytes.push(event.event);
        bytes.extend(event.symbol);
        if is_new_phase {
            bytes.push(event.phase as u8);
            write(bytes, event.sequence.into());
            write_signed(bytes, event.at_ns.wrapping_sub(event.phase_start_ns) as i64);
        }
        if event.flags != before.flags {
            write(bytes, event.flags.into());
        }
        if deadline != before.deadline {
            bytes.push(deadline.is_some().into());
            write_signed(bytes, deadline.unwrap_or(0));
        }
        self.threads[index] = ThreadState {
            tid: event.tid,
            process: event.process,
            phase: event.phase,
            sequence: event.sequence,
            phase_start_ns: event.phase_start_ns,
            flags: event.flags,
            deadline,
        };
    }

    fn process(&mut self, process: &ProcessEntry) {
        self.bytes.push(PROCESS_TAG);
        write(&mut self.bytes, process.handle.into());
        write(&mut self.bytes, process.pid.into());
        self.bytes.push(process.is_loader.into());
        write(&mut self.bytes, process.trainer.into());
    }

    fn sample(&mut self, sample: &SampleEntry) {
        self.bytes.push(SAMPLE_TAG);
        self.time(sample.at_ns);
        for field in [
            sample.tid.into(),
            sample.pid.into(),
            sample.last_gpu_sync_ns,
            sample.cpu_burst_ns,
            sample.io_wait_q16.into(),
            sample.futex_waits.into(),
        ] {
            write(&mut self.bytes, field);
        }
        self.bytes.push(sample.gpu_utilization);
        self.bytes.push(sample.nccl_active.into());
    }

    fn coverage(&mut self, at_ns: u64, coverage: CoverageEntry) {
        self.bytes.push(COVERAGE_TAG);
        self.time(at_ns);
        let (kind, value, handle) = match coverage {
            CoverageEntry::Probes(attached) => (0, attached, 0),
            CoverageEntry::Window(open) => (1, open, 0),
            CoverageEntry::AssumedLaunches(assumed) => (2, assumed, 0),
            CoverageEntry::Process { handle, observed } => (3, observed, handle),
        };
        self.bytes.extend([kind, value.into()]);
        write(&mut self.bytes, handle.into());
    }
}
