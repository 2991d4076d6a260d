//! Reads truth log files back as counts and events.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use super::format::*;

/// The content of a directory of truth log files.
#[derive(Debug, Default, Clone)]
pub struct TruthLog {
    /// One entry for each log file, that is for each process and library.
    pub processes: Vec<ProcessTruth>,
}

/// The calls of one process into one library.
#[derive(Debug, Clone)]
pub struct ProcessTruth {
    /// Pid of the process.
    pub pid: u32,
    /// When the process started, in clock ticks after boot, as in `/proc/PID/stat`.
    pub start_time: u64,
    /// The name of the library: `cuda` or `nccl`.
    pub library: String,
    /// How often each thread entered each function, by thread id and function name.
    pub entered: BTreeMap<(u32, String), u64>,
    /// The calls that returned, by thread id, function name and result.
    pub returned: BTreeMap<(u32, String, i32), ReturnedCalls>,
    /// Every call and every piece of device work, ordered by start; empty unless events were logged.
    pub events: Vec<LoggedEvent>,
}

/// A number of calls that returned, and the bytes that they were about.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ReturnedCalls {
    /// Number of calls that returned.
    pub calls: u64,
    /// Sum of the bytes of all these calls.
    pub bytes: u64,
}

/// Whether an event happened on the host or on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoggedEventKind {
    /// A call of an exported function, from entry to return.
    Call,
    /// Work on the simulated device.
    Device,
}

/// One call, or one piece of device work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoggedEvent {
    /// Whether the event happened on the host or on the device.
    pub kind: LoggedEventKind,
    /// The thread that called the function. For device work that ran later: a thread of the driver.
    pub tid: u32,
    /// The name of the function that was called.
    pub symbol: String,
    /// Entry of the call or start of the device work on CLOCK_MONOTONIC, in nanoseconds.
    pub enter: u64,
    /// Return of the call or end of the device work on CLOCK_MONOTONIC, in nanoseconds; 0 if the call never returned.
    pub leave: u64,
    /// Bytes that the call allocated, freed, copied or reduced.
    pub bytes: u64,
    /// Handle of the stream: as the caller passed it, or of the stream that the call created. For work of the device, of the
    /// stream that ran it. 0 if there is none.
    pub stream: u64,
    /// The object that the call is about: the address allocated or freed, the function launched, the event, the graph,
    /// the communicator; for making a communicator the first eight bytes of its unique id.
    pub object: u64,
    /// The result code that the call returned.
    pub result: i32,
}

/// Why a truth log cannot be read.
#[derive(Debug)]
pub struct TruthError {
    path: PathBuf,
    reason: String,
}

impl fmt::Display for TruthError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "truth log {}: {}",
            self.path.display(),
            self.reason
        )
    }
}

impl std::error::Error for TruthError {}

impl TruthLog {
    /// Reads every truth log file in `directory`; processes may still be writing these files.
    pub fn read(directory: &Path) -> Result<Self, TruthError> {
        let unreadable = |error: io::Error| TruthError {
            path: directory.to_owned(),
            reason: error.to_string(),
        };
        let mut paths = Vec::new();
        for entry in fs::read_dir(directory).map_err(unreadable)? {
            let path = entry.map_err(unreadable)?.path();
            if path
                .extension()
                .is_some_and(|extension| extension == "truth")
            {
                paths.push(path);
            }
        }
        paths.sort();
        let processes = paths
            .iter()
            .map(|path| read_file(path))
            .collect::<Result<_, _>>()?;
        Ok(Self { processes })
    }

    /// How often threads of all processes entered the function `symbol`.
    #[must_use]
    pub fn entered_count(&self, symbol: &str) -> u64 {
        let entered = self.processes.iter().flat_map(|process| &process.entered);
        entered
            .filter(|((_, name), _)| name == symbol)
            .map(|(_, count)| count)
            .sum()
    }

    /// The calls of all threads of all processes that returned, by function name and result.
    #[must_use]
    pub fn returned_calls(&self) -> BTreeMap<(String, i32), ReturnedCalls> {
        let mut totals = BTreeMap::<_, ReturnedCalls>::new();
        for ((_, symbol, result), count) in
            self.processes.iter().flat_map(|process| &process.returned)
        {
            let total = totals.entry((symbol.clone(), *result)).or_default();
            total.calls += count.calls;
            total.bytes += count.bytes;
        }
        totals
    }

    /// Every event of every process, ordered by start, with the pid of the process.
    #[must_use]
    pub fn events_of_all_processes(&self) -> Vec<(u32, &LoggedEvent)> {
        let mut events: Vec<_> = self
            .processes
            .iter()
            .flat_map(|process| process.events.iter().map(|event| (process.pid, event)))
            .collect();
        events.sort_by_key(|(_, event)| event.enter);
        events
    }
}

fn read_file(path: &Path) -> Result<ProcessTruth, TruthError> {
    let broken = |reason: String| TruthError {
        path: path.to_owned(),
        reason,
    };
    let words = words_of(&fs::read(path).map_err(|error| broken(error.to_string()))?);
    if words.len() * WORD_BYTES < BLOCKS_OFFSET || words[HEADER_MAGIC_WORD_INDEX] != LOG_FILE_MAGIC
    {
        return Err(broken(
            "not a truth file of this version, or its process died while creating it".into(),
        ));
    }
    let mut process = ProcessTruth {
        pid: words[HEADER_PID_WORD_INDEX] as u32,
        start_time: words[HEADER_START_TIME_WORD_INDEX],
        library: decode_text(&words[HEADER_LIBRARY_WORD_INDEX..HEADER_LIBRARY_WORD_INDEX + 2]),
        entered: BTreeMap::new(),
        returned: BTreeMap::new(),
        events: Vec::new(),
    };
    let symbols: Vec<String> = words[HEADER_BYTES / WORD_BYTES..BLOCKS_OFFSET / WORD_BYTES]
        .chunks_exact(BYTES_PER_SYMBOL_NAME / WORD_BYTES)
        .map(decode_text)
        .collect();
    let mut rest = &words[BLOCKS_OFFSET / WORD_BYTES..];
    while let Some(block) = next_block(&mut rest) {
        match block[BLOCK_KIND_WORD_INDEX] {
            BLOCK_KIND_COUNTERS => read_counters(block, &symbols, &mut process),
            BLOCK_KIND_EVENTS => read_events(block, &symbols, &mut process),
            kind => return Err(broken(format!("unknown block kind {kind}"))),
        }
    }
    process.events.sort_by_key(|event| event.enter);
    Ok(process)
}

fn words_of(bytes: &[u8]) -> Vec<u64> {
    let words = bytes.as_chunks::<WORD_BYTES>().0;
    words.iter().map(|word| u64::from_ne_bytes(*word)).collect()
}

fn decode_text(words: &[u64]) -> String {
    let bytes: Vec<u8> = words
        .iter()
        .flat_map(|word| word.to_ne_bytes())
        .take_while(|byte| *byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Cuts the next block off `rest`; `None` at the end, or where a process died while it appended a block.
fn next_block<'a>(rest: &mut &'a [u64]) -> Option<&'a [u64]> {
    let header = rest.get(..BLOCK_HEADER_WORDS)?;
    if header[BLOCK_KIND_WORD_INDEX] == 0 {
        return None;
    }
    let (block, after) =
        rest.split_at_checked(header[BLOCK_BYTES_WORD_INDEX] as usize / WORD_BYTES)?;
    *rest = after;
    Some(block)
}

fn read_counters(block: &[u64], symbols: &[String], process: &mut ProcessTruth) {
    let tid = block[BLOCK_TID_WORD_INDEX] as u32;
    for (symbol, count) in symbols
        .iter()
        .zip(&block[ENTERED_COUNTS_OFFSET..RETURN_ENTRIES_OFFSET])
    {
        if *count > 0 {
            *process.entered.entry((tid, symbol.clone())).or_default() += count;
        }
    }
    for entry in block[RETURN_ENTRIES_OFFSET..]
        .chunks_exact(WORDS_PER_RETURN_ENTRY)
        .take(MAX_SYMBOLS + MAX_FAILURE_KINDS)
    {
        if entry[0] == 0 {
            continue;
        }
        let (symbol, result) = split_return_key(entry[0]);
        let count = process
            .returned
            .entry((tid, symbols[symbol].clone(), result))
            .or_default();
        count.calls += entry[1];
        count.bytes += entry[2];
    }
}

fn read_events(block: &[u64], symbols: &[String], process: &mut ProcessTruth) {
    let tid = block[BLOCK_TID_WORD_INDEX] as u32;
    for event in block[BLOCK_HEADER_WORDS..].chunks_exact(WORDS_PER_EVENT) {
        let kind = match event[EVENT_KIND_AND_SYMBOL_WORD_INDEX] >> 32 {
            0 => continue,
            EVENT_KIND_DEVICE_WORK => LoggedEventKind::Device,
            _ => LoggedEventKind::Call,
        };
        process.events.push(LoggedEvent {
            kind,
            tid,
            symbol: symbols[event[EVENT_KIND_AND_SYMBOL_WORD_INDEX] as u32 as usize].clone(),
            enter: event[EVENT_ENTER_WORD_INDEX],
            leave: event[EVENT_LEAVE_WORD_INDEX],
            bytes: event[EVENT_BYTES_WORD_INDEX],
            stream: event[EVENT_STREAM_WORD_INDEX],
            object: event[EVENT_OBJECT_WORD_INDEX],
            result: (event[EVENT_RESULT_WORD_INDEX] as u32).cast_signed(),
        });
    }
}
