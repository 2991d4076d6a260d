//! Reads a trace. Any bytes are accepted as input; damaged ones are an error.

use zernel_phase::WorkloadPhase;

use super::varint::{read_byte, read_signed_varint, read_varint};
use super::{
    COVERAGE_TAG, CodedThreadState, CoverageEntry, EVENT_TAG, EventEntry, HAS_SYMBOL_BIT, LOSS_TAG,
    NEW_DEADLINE_BIT, NEW_FLAGS_BIT, NEW_PHASE_BIT, NEW_THREAD_BIT, PROCESS_TAG, ProcessEntry,
    RecordedTrace, SAMPLE_TAG, SampleEntry, TAG_KIND_MASK, TRACE_FIRST_LINE, TraceEntry,
};

/// Longest header line.
const MAX_HEADER_BYTES: usize = 1 << 20;

/// Why a file is no trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file does not begin with the bytes of a trace.
    #[error("it is not a trace of version 1; record it again with `zernel truth record`")]
    NotATrace,
    /// The header is not valid.
    #[error("its header is damaged: {0}")]
    DamagedHeader(String),
    /// An entry is not valid.
    #[error("it is damaged at byte {0}")]
    DamagedEntry(usize),
}

impl RecordedTrace {
    /// Parses a file.
    pub fn parse(file: &[u8]) -> Result<Self, TraceError> {
        let after_magic = file
            .strip_prefix(TRACE_FIRST_LINE.as_bytes())
            .ok_or(TraceError::NotATrace)?;
        let header_length = after_magic
            .iter()
            .take(MAX_HEADER_BYTES)
            .position(|byte| *byte == b'\n');
        let header_length =
            header_length.ok_or_else(|| TraceError::DamagedHeader("it has no end".to_owned()))?;
        let header = serde_json::from_slice(&after_magic[..header_length])
            .map_err(|error| TraceError::DamagedHeader(error.to_string()))?;
        let mut decoder = TraceDecoder {
            remaining_bytes: &after_magic[header_length + 1..],
            last_time_ns: 0,
            threads: Vec::new(),
        };
        let mut entries = Vec::new();
        while !decoder.remaining_bytes.is_empty() {
            let entry_offset = file.len() - decoder.remaining_bytes.len();
            let entry = decoder
                .read_entry()
                .ok_or(TraceError::DamagedEntry(entry_offset))?;
            entries.push(entry);
        }
        Ok(Self { header, entries })
    }
}

struct TraceDecoder<'a> {
    remaining_bytes: &'a [u8],
    last_time_ns: u64,
    threads: Vec<CodedThreadState>,
}

impl TraceDecoder<'_> {
    fn read_entry(&mut self) -> Option<TraceEntry> {
        let tag = read_byte(&mut self.remaining_bytes)?;
        let tag_bits = tag & !TAG_KIND_MASK;
        match tag & TAG_KIND_MASK {
            EVENT_TAG => self.read_event(tag_bits).map(TraceEntry::Event),
            _ if tag_bits != 0 => None,
            PROCESS_TAG => self.read_process().map(TraceEntry::Process),
            SAMPLE_TAG => self.read_sample().map(TraceEntry::Sample),
            COVERAGE_TAG => self.read_coverage(),
            LOSS_TAG => Some(TraceEntry::Loss {
                at_ns: self.read_time_ns()?,
                lost_events: read_varint(&mut self.remaining_bytes)?,
            }),
            _ => None,
        }
    }

    fn read_time_ns(&mut self) -> Option<u64> {
        let elapsed_ns = read_signed_varint(&mut self.remaining_bytes)?;
        self.last_time_ns = self.last_time_ns.wrapping_add(elapsed_ns as u64);
        Some(self.last_time_ns)
    }

    fn read_u32(&mut self) -> Option<u32> {
        read_varint(&mut self.remaining_bytes)?.try_into().ok()
    }

    fn read_bool(&mut self) -> Option<bool> {
        match read_byte(&mut self.remaining_bytes)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn read_event(&mut self, tag_bits: u8) -> Option<EventEntry> {
        let at_ns = self.read_time_ns()?;
        let thread_index = usize::try_from(read_varint(&mut self.remaining_bytes)?).ok()?;
        if tag_bits & NEW_THREAD_BIT != 0 {
            let thread = CodedThreadState {
                tid: self.read_u32()?,
                process_handle: self.read_u32()?,
                ..CodedThreadState::default()
            };
            if thread_index != self.threads.len() {
                return None;
            }
            self.threads.push(thread);
        }
        let mut thread = *self.threads.get(thread_index)?;
        let event_number = read_byte(&mut self.remaining_bytes)?;
        let symbol_number = match tag_bits & HAS_SYMBOL_BIT != 0 {
            true => Some(read_byte(&mut self.remaining_bytes)?),
            false => None,
        };
        if tag_bits & NEW_PHASE_BIT != 0 {
            let phase = read_byte(&mut self.remaining_bytes)?;
            thread.phase = WorkloadPhase::ALL.get(usize::from(phase)).copied()?;
            thread.sequence = read_varint(&mut self.remaining_bytes)?.try_into().ok()?;
            let phase_age_ns = read_signed_varint(&mut self.remaining_bytes)?;
            thread.phase_start_ns = at_ns.wrapping_sub(phase_age_ns as u64);
        }
        if tag_bits & NEW_FLAGS_BIT != 0 {
            thread.tracker_flags = read_varint(&mut self.remaining_bytes)?.try_into().ok()?;
        }
        if tag_bits & NEW_DEADLINE_BIT != 0 {
            let has_deadline = self.read_bool()?;
            let time_left_ns = read_signed_varint(&mut self.remaining_bytes)?;
            thread.time_to_deadline_ns = has_deadline.then_some(time_left_ns);
        }
        self.threads[thread_index] = thread;
        Some(EventEntry {
            at_ns,
            tid: thread.tid,
            process_handle: thread.process_handle,
            event_number,
            symbol_number,
            phase: thread.phase,
            sequence: thread.sequence,
            phase_start_ns: thread.phase_start_ns,
            deadline_ns: thread.time_to_deadline_ns.map_or(u64::MAX, |time_left_ns| {
                at_ns.wrapping_add(time_left_ns as u64)
            }),
            tracker_flags: thread.tracker_flags,
        })
    }

    fn read_process(&mut self) -> Option<ProcessEntry> {
        Some(ProcessEntry {
            handle: self.read_u32()?,
            pid: self.read_u32()?,
            is_loader: self.read_bool()?,
            trainer_handle: self.read_u32()?,
        })
    }

    fn read_sample(&mut self) -> Option<SampleEntry> {
        Some(SampleEntry {
            at_ns: self.read_time_ns()?,
            tid: self.read_u32()?,
            pid: self.read_u32()?,
            last_gpu_sync_ns: read_varint(&mut self.remaining_bytes)?,
            cpu_burst_ns: read_varint(&mut self.remaining_bytes)?,
            io_wait_q16: self.read_u32()?,
            futex_waits: self.read_u32()?,
            gpu_utilization_percent: read_byte(&mut self.remaining_bytes)?,
            nccl_active: self.read_bool()?,
        })
    }

    fn read_coverage(&mut self) -> Option<TraceEntry> {
        let at_ns = self.read_time_ns()?;
        let kind = read_byte(&mut self.remaining_bytes)?;
        let value = self.read_bool()?;
        let handle = self.read_u32()?;
        let coverage = match kind {
            0 => CoverageEntry::ProbesAttached(value),
            1 => CoverageEntry::WindowOpen(value),
            2 => CoverageEntry::LaunchesAssumed(value),
            3 => CoverageEntry::ProcessObserved {
                handle,
                is_observed: value,
            },
            _ => return None,
        };
        Some(TraceEntry::Coverage { at_ns, coverage })
    }
}
