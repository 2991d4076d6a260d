//! Reads a trace. Any bytes are accepted as input; damaged ones are an error.

use zernel_phase::WorkloadPhase;

use super::varint::{byte, read, read_signed};
use super::{
    COVERAGE_TAG, CoverageEntry, EVENT_TAG, EventEntry, HAS_SYMBOL, KIND_BITS, LOSS_TAG, MAGIC,
    NEW_DEADLINE, NEW_FLAGS, NEW_PHASE, NEW_THREAD, PROCESS_TAG, ProcessEntry, SAMPLE_TAG,
    SampleEntry, ThreadState, TraceEntry, TraceFile,
};

/// Longest header line.
const MAX_HEADER_BYTES: usize = 1 << 20;

/// Why a file is no trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// It begins with other bytes.
    #[error("it is not a trace of version 1; record it again with `zernel truth record`")]
    NoTrace,
    /// The header is not valid.
    #[error("its header is damaged: {0}")]
    Header(String),
    /// An entry is not valid.
    #[error("it is damaged at byte {0}")]
    Entry(usize),
}

impl TraceFile {
    /// Parses a file.
    pub fn parse(file: &[u8]) -> Result<Self, TraceError> {
        let rest = file
            .strip_prefix(MAGIC.as_bytes())
            .ok_or(TraceError::NoTrace)?;
        let length = rest.iter().take(MAX_HEADER_BYTES).position(|b| *b == b'\n');
        let length = length.ok_or_else(|| TraceError::Header("it has no end".to_owned()))?;
        let header = serde_json::from_slice(&rest[..length])
            .map_err(|error| TraceError::Header(error.to_string()))?;
        let mut decoder = Decoder {
            rest: &rest[length + 1..],
            last_ns: 0,
            threads: Vec::new(),
        };
        let mut entries = Vec::new();
        while !decoder.rest.is_empty() {
            let place = file.len() - decoder.rest.len();
            let entry = decoder.entry().ok_or(TraceError::Entry(place))?;
            entries.push(entry);
        }
        Ok(Self { header, entries })
    }
}

struct Decoder<'a> {
    rest: &'a [u8],
    last_ns: u64,
    threads: Vec<ThreadState>,
}

impl Decoder<'_> {
    fn entry(&mut self) -> Option<TraceEntry> {
        let tag = byte(&mut self.rest)?;
        let parts = tag & !KIND_BITS;
        match tag & KIND_BITS {
            EVENT_TAG => self.event(parts).map(TraceEntry::Event),
            _ if parts != 0 => None,
            PROCESS_TAG => self.process().map(TraceEntry::Process),
            SAMPLE_TAG => self.sample().map(TraceEntry::Sample),
            COVERAGE_TAG => self.coverage(),
            LOSS_TAG => Some(TraceEntry::Loss {
                at_ns: self.time()?,
                events: read(&mut self.rest)?,
            }),
            _ => None,
        }
    }

    fn time(&mut self) -> Option<u64> {
        let elapsed = read_signed(&mut self.rest)?;
        self.last_ns = self.last_ns.wrapping_add(elapsed as u64);
        Some(self.last_ns)
    }

    fn number(&mut self) -> Option<u32> {
        read(&mut self.rest)?.try_into().ok()
    }

    fn boolean(&mut self) -> Option<bool> {
        match byte(&mut self.rest)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn event(&mut self, parts: u8) -> Option<EventEntry> {
        let at_ns = self.time()?;
        let index = usize::try_from(read(&mut self.rest)?).ok()?;
        if parts & NEW_THREAD != 0 {
            let thread = ThreadState {
                tid: self.number()?,
                process: self.number()?,
                ..ThreadState::default()
            };
            if index != self.threads.len() {
                return None;
            }
            self.threads.push(thread);
        }
        let mut thread = *self.threads.get(index)?;
        let event = byte(&mut self.rest)?;
        let symbol = match parts & HAS_SYMBOL != 0 {
            true => Some(byte(&mut self.rest)?),
            false => None,
        };
        if parts & NEW_PHASE != 0 {
            let phase = byte(&mut self.rest)?;
            thread.phase = WorkloadPhase::ALL.get(usize::from(phase)).copied()?;
            thread.sequence = read(&mut self.rest)?.try_into().ok()?;
            let age = read_signed(&mut self.rest)?;
            thread.phase_start_ns = at_ns.wrapping_sub(age as u64);
        }
        if parts & NEW_FLAGS != 0 {
            thread.flags = read(&mut self.rest)?.try_into().ok()?;
        }
        if parts & NEW_DEADLINE != 0 {
            let has_deadline = self.boolean()?;
            let left = read_signed(&mut self.rest)?;
            thread.deadline = has_deadline.then_some(left);
        }
        self.threads[index] = thread;
        Some(EventEntry {
            at_ns,
            tid: thread.tid,
            process: thread.process,
            event,
            symbol,
            phase: thread.phase,
            sequence: thread.sequence,
            phase_start_ns: thread.phase_start_ns,
            deadline_ns: thread
                .deadline
                .map_or(u64::MAX, |left| at_ns.wrapping_add(left as u64)),
            flags: thread.flags,
        })
    }

    fn process(&mut self) -> Option<ProcessEntry> {
        Some(ProcessEntry {
            handle: self.number()?,
            pid: self.number()?,
            is_loader: self.boolean()?,
            trainer: self.number()?,
        })
    }

    fn sample(&mut self) -> Option<SampleEntry> {
        Some(SampleEntry {
            at_ns: self.time()?,
            tid: self.number()?,
            pid: self.number()?,
            last_gpu_sync_ns: read(&mut self.rest)?,
            cpu_burst_ns: read(&mut self.rest)?,
            io_wait_q16: self.number()?,
            futex_waits: self.number()?,
            gpu_utilization: byte(&mut self.rest)?,
            nccl_active: self.boolean()?,
        })
    }

    fn coverage(&mut self) -> Option<TraceEntry> {
        let at_ns = self.time()?;
        let kind = byte(&mut self.rest)?;
        let value = self.boolean()?;
        let handle = self.number()?;
        let coverage = match kind {
            0 => CoverageEntry::Probes(value),
            1 => CoverageEntry::Window(value),
            2 => CoverageEntry::AssumedLaunches(value),
            3 => CoverageEntry::Process {
                handle,
                observed: value,
            },
            _ => return None,
        };
        Some(TraceEntry::Coverage { at_ns, coverage })
    }
}
