//! Writes a trace.

use std::collections::HashMap;

use super::varint::{write_signed_varint, write_varint};
use super::{
    COVERAGE_TAG, CodedThreadState, CoverageEntry, EVENT_TAG, EventEntry, HAS_SYMBOL_BIT, LOSS_TAG,
    NEW_DEADLINE_BIT, NEW_FLAGS_BIT, NEW_PHASE_BIT, NEW_THREAD_BIT, PROCESS_TAG, ProcessEntry,
    SAMPLE_TAG, SampleEntry, TRACE_FIRST_LINE, TraceEntry, TraceHeader,
};

/// Encodes the entries of a trace one after the other.
#[derive(Debug, Default)]
pub struct TraceEncoder {
    bytes: Vec<u8>,
    last_time_ns: u64,
    threads: Vec<CodedThreadState>,
    thread_indices: HashMap<(u32, u32), usize>,
}

impl TraceEncoder {
    /// Number of bytes that all entries so far take.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether no entry was encoded yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Appends an entry.
    pub fn push_entry(&mut self, entry: &TraceEntry) {
        match entry {
            TraceEntry::Event(event) => self.write_event(event),
            TraceEntry::Process(process) => self.write_process(process),
            TraceEntry::Sample(sample) => self.write_sample(sample),
            TraceEntry::Coverage { at_ns, coverage } => self.write_coverage(*at_ns, *coverage),
            TraceEntry::Loss { at_ns, lost_events } => {
                self.bytes.push(LOSS_TAG);
                self.write_time(*at_ns);
                write_varint(&mut self.bytes, *lost_events);
            }
        }
    }

    /// The file.
    #[must_use]
    pub fn into_file(self, header: &TraceHeader) -> Vec<u8> {
        let mut file = TRACE_FIRST_LINE.as_bytes().to_vec();
        // Encoding cannot fail, because a header has only strings, numbers and lists of them.
        file.extend(serde_json::to_vec(header).unwrap_or_default());
        file.push(b'\n');
        file.extend(self.bytes);
        file
    }

    fn write_time(&mut self, at_ns: u64) {
        let elapsed_ns = at_ns.wrapping_sub(self.last_time_ns) as i64;
        write_signed_varint(&mut self.bytes, elapsed_ns);
        self.last_time_ns = at_ns;
    }

    fn write_event(&mut self, event: &EventEntry) {
        let key = (event.tid, event.process_handle);
        let known_index = self.thread_indices.get(&key).copied();
        let index = known_index.unwrap_or(self.threads.len());
        if known_index.is_none() {
            self.thread_indices.insert(key, index);
            self.threads.push(CodedThreadState::default());
        }
        let earlier = self.threads[index];
        let time_to_deadline_ns = (event.deadline_ns != u64::MAX)
            .then(|| event.deadline_ns.wrapping_sub(event.at_ns) as i64);
        let phase = (event.phase, event.sequence, event.phase_start_ns);
        let is_new_phase = phase != (earlier.phase, earlier.sequence, earlier.phase_start_ns);
        let bits_and_conditions = [
            (known_index.is_none(), NEW_THREAD_BIT),
            (event.symbol_number.is_some(), HAS_SYMBOL_BIT),
            (is_new_phase, NEW_PHASE_BIT),
            (event.tracker_flags != earlier.tracker_flags, NEW_FLAGS_BIT),
            (
                time_to_deadline_ns != earlier.time_to_deadline_ns,
                NEW_DEADLINE_BIT,
            ),
        ];
        let bits_and_conditions = bits_and_conditions.iter().filter(|(applies, _)| *applies);
        let tag = bits_and_conditions.fold(EVENT_TAG, |tag, (_, bit)| tag | bit);
        self.bytes.push(tag);
        self.write_time(event.at_ns);
        let bytes = &mut self.bytes;
        write_varint(bytes, index as u64);
        if known_index.is_none() {
            write_varint(bytes, event.tid.into());
            write_varint(bytes, event.process_handle.into());
        }
        bytes.push(event.event_number);
        bytes.extend(event.symbol_number);
        if is_new_phase {
            bytes.push(event.phase as u8);
            write_varint(bytes, event.sequence.into());
            write_signed_varint(bytes, event.at_ns.wrapping_sub(event.phase_start_ns) as i64);
        }
        if event.tracker_flags != earlier.tracker_flags {
            write_varint(bytes, event.tracker_flags.into());
        }
        if time_to_deadline_ns != earlier.time_to_deadline_ns {
            bytes.push(time_to_deadline_ns.is_some().into());
            write_signed_varint(bytes, time_to_deadline_ns.unwrap_or(0));
        }
        self.threads[index] = CodedThreadState {
            tid: event.tid,
            process_handle: event.process_handle,
            phase: event.phase,
            sequence: event.sequence,
            phase_start_ns: event.phase_start_ns,
            tracker_flags: event.tracker_flags,
            time_to_deadline_ns,
        };
    }

    fn write_process(&mut self, process: &ProcessEntry) {
        self.bytes.push(PROCESS_TAG);
        write_varint(&mut self.bytes, process.handle.into());
        write_varint(&mut self.bytes, process.pid.into());
        self.bytes.push(process.is_loader.into());
        write_varint(&mut self.bytes, process.trainer_handle.into());
    }

    fn write_sample(&mut self, sample: &SampleEntry) {
        self.bytes.push(SAMPLE_TAG);
        self.write_time(sample.at_ns);
        for field in [
            sample.tid.into(),
            sample.pid.into(),
            sample.last_gpu_sync_ns,
            sample.cpu_burst_ns,
            sample.io_wait_q16.into(),
            sample.futex_waits.into(),
        ] {
            write_varint(&mut self.bytes, field);
        }
        self.bytes.push(sample.gpu_utilization_percent);
        self.bytes.push(sample.nccl_active.into());
    }

    fn write_coverage(&mut self, at_ns: u64, coverage: CoverageEntry) {
        self.bytes.push(COVERAGE_TAG);
        self.write_time(at_ns);
        let (kind, value, handle) = match coverage {
            CoverageEntry::ProbesAttached(attached) => (0, attached, 0),
            CoverageEntry::WindowOpen(open) => (1, open, 0),
            CoverageEntry::LaunchesAssumed(assumed) => (2, assumed, 0),
            CoverageEntry::ProcessObserved {
                handle,
                is_observed,
            } => (3, is_observed, handle),
        };
        self.bytes.extend([kind, value.into()]);
        write_varint(&mut self.bytes, handle.into());
    }
}
