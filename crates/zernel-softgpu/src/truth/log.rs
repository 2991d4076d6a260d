//! Writes the truth log: one file per process and library, one block per thread.

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{
    AtomicPtr, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::Release,
};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::call::{LoggedSymbol, OpenCall};
use super::format::*;
use crate::{clock, config, process, sys};

/// Number of forks from the first process to this one. A log file of another generation belongs to an ancestor of this
/// process.
static FORK_GENERATION: AtomicU32 = AtomicU32::new(1);
static PROCESS_LOG: AtomicPtr<LogFile> = AtomicPtr::new(ptr::null_mut());

thread_local! {
    static THREAD_LOG: Cell<Option<&'static ThreadLog>> = const { Cell::new(None) };
}

/// The directory of the truth log; `None` without a log.
fn log_directory() -> Option<&'static Path> {
    static LOG_DIRECTORY: OnceLock<Option<PathBuf>> = OnceLock::new();
    LOG_DIRECTORY
        .get_or_init(|| {
            let directory = config::path_from_variable(config::LOG_VARIABLE)?;
            process::after_fork_in_child(forget_log_of_parent);
            Some(directory)
        })
        .as_deref()
}

extern "C" fn forget_log_of_parent() {
    FORK_GENERATION.fetch_add(1, Relaxed);
    PROCESS_LOG.store(ptr::null_mut(), Release);
}

#[inline]
pub(super) fn is_logging() -> bool {
    log_directory().is_some()
}

/// The log file of one process for one library.
#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    file: File,
    header: &'static [AtomicU64],
    records_events: bool,
    log_size: Mutex<LogSize>,
}

#[derive(Debug)]
struct LogSize {
    end: usize,
    symbols: usize,
}

/// The log file of this process, opened at first use.
///
/// This function takes no lock, because a fork may happen while another thread is inside it. Of several threads that
/// create a file at the same time one installs its file, and the others remove theirs.
fn log_of_process(library: &str) -> Option<&'static LogFile> {
    let directory = log_directory()?;
    let current = || {
        // SAFETY: PROCESS_LOG is null or a leaked Box, which lives for ever.
        unsafe { PROCESS_LOG.load(Acquire).as_ref() }
    };
    if let Some(log) = current() {
        return Some(log);
    }
    let own = LogFile::create(directory, library)
        .unwrap_or_else(|error| abort_without_log(directory, &error));
    let path = own.path.clone();
    let own = Box::into_raw(Box::new(own));
    if PROCESS_LOG
        .compare_exchange(ptr::null_mut(), own, AcqRel, Acquire)
        .is_err()
    {
        // If this thread's file cannot be removed, it stays as an empty log, which is still correct.
        let _ = std::fs::remove_file(path);
    }
    current()
}

/// Ends the process, because without the requested truth log every comparison would be wrong.
fn abort_without_log(directory: &Path, error: &io::Error) -> ! {
    eprintln!(
        "softgpu: cannot write the truth log in {} ({} is set): {error}",
        directory.display(),
        config::LOG_VARIABLE
    );
    std::process::abort()
}

impl LogFile {
    fn create(directory: &Path, library: &str) -> io::Result<Self> {
        let process = process::ProcessIdentity::of_this_process();
        std::fs::create_dir_all(directory)?;
        // One process may exec several programs. The time in the names of their log files makes the names differ.
        let (pid, start_time, now) = (process.pid, process.start_time, clock::now_ns());
        let path = directory.join(format!("{pid}-{start_time}-{now}-{library}.truth"));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)?;
        file.set_len(BLOCKS_OFFSET as u64)?;
        let header = sys::map_file_as_words(&file, 0, BLOCKS_OFFSET)?;
        header[HEADER_PID_WORD_INDEX].store(u64::from(process.pid), Relaxed);
        header[HEADER_START_TIME_WORD_INDEX].store(process.start_time, Relaxed);
        store_text(
            &header[HEADER_LIBRARY_WORD_INDEX..HEADER_LIBRARY_WORD_INDEX + 2],
            library,
        );
        header[HEADER_MAGIC_WORD_INDEX].store(LOG_FILE_MAGIC, Release);
        Ok(Self {
            path,
            file,
            header,
            records_events: config::is_variable_set(config::LOG_EVENTS_VARIABLE),
            log_size: Mutex::new(LogSize {
                end: BLOCKS_OFFSET,
                symbols: 0,
            }),
        })
    }

    /// Appends a block for the calling thread to the file.
    fn append_block(&self, kind: u64, bytes: usize) -> &'static [AtomicU64] {
        let mut log_size = self.log_size.lock().unwrap_or_else(PoisonError::into_inner);
        let block = self
            .file
            .set_len((log_size.end + bytes) as u64)
            .and_then(|()| sys::map_file_as_words(&self.file, log_size.end as u64, bytes));
        let block = block.unwrap_or_else(|error| abort_without_log(&self.path, &error));
        log_size.end += bytes;
        block[BLOCK_TID_WORD_INDEX].store(u64::from(process::thread_id()), Relaxed);
        block[BLOCK_BYTES_WORD_INDEX].store(bytes as u64, Relaxed);
        block[BLOCK_KIND_WORD_INDEX].store(kind, Release);
        block
    }

    /// Gives `symbol` an index in the symbol table of this log file.
    fn register_symbol(&self, symbol: &LoggedSymbol, generation: u32) -> usize {
        let mut log_size = self.log_size.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = known_symbol_index(symbol, generation) {
            return index;
        }
        let index = log_size.symbols;
        assert!(
            index < MAX_SYMBOLS,
            "softgpu: more exported functions than the truth log has room for"
        );
        log_size.symbols += 1;
        let words = BYTES_PER_SYMBOL_NAME / WORD_BYTES;
        let first = HEADER_BYTES / WORD_BYTES + index * words;
        store_text(&self.header[first..first + words], symbol.name);
        symbol
            .index_and_generation
            .store(u64::from(generation) << 32 | index as u64, Release);
        index
    }
}

fn known_symbol_index(symbol: &LoggedSymbol, generation: u32) -> Option<usize> {
    let place = symbol.index_and_generation.load(Acquire);
    (place >> 32 == u64::from(generation)).then_some((place & 0xffff_ffff) as usize)
}

fn store_text(words: &[AtomicU64], text: &str) {
    for (word, bytes) in words.iter().zip(text.as_bytes().chunks(WORD_BYTES)) {
        let mut padded = [0; WORD_BYTES];
        padded[..bytes.len()].copy_from_slice(bytes);
        word.store(u64::from_ne_bytes(padded), Relaxed);
    }
}

/// The counters and events of one thread in a log file. Only that thread writes it, so an addition is a load and a
/// store.
#[derive(Debug)]
pub(super) struct ThreadLog {
    log: &'static LogFile,
    generation: u32,
    counters: &'static [AtomicU64],
    events: Cell<&'static [AtomicU64]>,
}

/// The log of the calling thread.
pub(super) fn log_of_thread(library: &str) -> Option<&'static ThreadLog> {
    let generation = FORK_GENERATION.load(Relaxed);
    match THREAD_LOG.get() {
        Some(thread) if thread.generation == generation => Some(thread),
        _ => ThreadLog::open(library, generation),
    }
}

fn add_to_word(word: &AtomicU64, value: u64) {
    word.store(word.load(Relaxed).wrapping_add(value), Relaxed);
}

impl ThreadLog {
    /// The log of a thread is never freed: destructors of other thread-local values may still call exported functions
    /// after the destructor of this one.
    fn open(library: &str, generation: u32) -> Option<&'static Self> {
        let log = log_of_process(library)?;
        let thread: &'static Self = Box::leak(Box::new(Self {
            log,
            generation,
            counters: log.append_block(BLOCK_KIND_COUNTERS, COUNTER_BLOCK_BYTES),
            events: Cell::new(&[]),
        }));
        THREAD_LOG.set(Some(thread));
        Some(thread)
    }

    pub(super) fn symbol_index(&self, symbol: &LoggedSymbol) -> usize {
        known_symbol_index(symbol, self.generation)
            .unwrap_or_else(|| self.log.register_symbol(symbol, self.generation))
    }

    pub(super) fn count_entry(&self, symbol: usize) {
        add_to_word(&self.counters[ENTERED_COUNTS_OFFSET + symbol], 1);
    }

    pub(super) fn count_return(&self, symbol: usize, result: i32, bytes: u64) {
        let entry = self.return_entry(symbol, result);
        add_to_word(&entry[2], bytes);
        add_to_word(&entry[1], 1);
    }

    fn return_entry(&self, symbol: usize, result: i32) -> &'static [AtomicU64] {
        let key = return_key(symbol, result);
        let entries =
            || self.counters[RETURN_ENTRIES_OFFSET..].chunks_exact(WORDS_PER_RETURN_ENTRY);
        let candidates = match result {
            0 => entries().skip(symbol).take(1),
            _ => entries().skip(MAX_SYMBOLS).take(MAX_FAILURE_KINDS),
        };
        for entry in candidates {
            match entry[0].load(Relaxed) {
                0 => entry[0].store(key, Relaxed),
                other if other != key => continue,
                _ => {}
            }
            return entry;
        }
        panic!(
            "softgpu: more than {MAX_FAILURE_KINDS} different failures in one thread's truth log"
        );
    }

    /// The next event of this thread, already stamped as entered; `None` if only counts are logged.
    pub(super) fn begin_event(&self, symbol: usize) -> Option<&'static [AtomicU64]> {
        if !self.log.records_events {
            return None;
        }
        let event = self.next_event();
        event[EVENT_ENTER_WORD_INDEX].store(clock::now_ns(), Relaxed);
        event[EVENT_KIND_AND_SYMBOL_WORD_INDEX]
            .store(event_kind_and_symbol(EVENT_KIND_CALL, symbol), Release);
        Some(event)
    }

    fn next_event(&self) -> &'static [AtomicU64] {
        if self.events.get().is_empty() {
            let block = self.log.append_block(BLOCK_KIND_EVENTS, EVENT_BLOCK_BYTES);
            let events = &block[BLOCK_HEADER_WORDS..];
            self.events
                .set(&events[..EVENTS_PER_BLOCK * WORDS_PER_EVENT]);
        }
        let (event, rest) = self.events.get().split_at(WORDS_PER_EVENT);
        self.events.set(rest);
        event
    }
}

pub(super) fn end_event(event: &[AtomicU64], call: &OpenCall, result: i32, now: u64) {
    event[EVENT_BYTES_WORD_INDEX].store(call.bytes, Relaxed);
    event[EVENT_STREAM_WORD_INDEX].store(call.stream, Relaxed);
    event[EVENT_OBJECT_WORD_INDEX].store(call.object, Relaxed);
    event[EVENT_RESULT_WORD_INDEX].store(u64::from(result.cast_unsigned()), Relaxed);
    event[EVENT_LEAVE_WORD_INDEX].store(now, Release);
}

/// A piece of work of the simulated device, for the truth log.
#[derive(Debug, Clone, Copy)]
pub struct DeviceWork {
    /// The exported function that was called for the work.
    pub symbol: &'static LoggedSymbol,
    /// The handle of the stream.
    pub stream: u64,
    /// Bytes that the work copied, filled or reduced.
    pub bytes: u64,
    /// Start of the device work on the device clock (CLOCK_MONOTONIC), in nanoseconds.
    pub start: u64,
    /// End of the device work on the device clock, in nanoseconds; may be in the future.
    pub end: u64,
}

/// Adds device work to the truth log, if events are logged.
pub fn log_device_work(work: &DeviceWork) {
    if !is_logging() {
        return;
    }
    let Some(thread) = log_of_thread(work.symbol.library) else {
        return;
    };
    if !thread.log.records_events {
        return;
    }
    let symbol = thread.symbol_index(work.symbol);
    let event = thread.next_event();
    event[EVENT_ENTER_WORD_INDEX].store(work.start, Relaxed);
    event[EVENT_BYTES_WORD_INDEX].store(work.bytes, Relaxed);
    event[EVENT_STREAM_WORD_INDEX].store(work.stream, Relaxed);
    event[EVENT_LEAVE_WORD_INDEX].store(work.end, Relaxed);
    event[EVENT_KIND_AND_SYMBOL_WORD_INDEX].store(
        event_kind_and_symbol(EVENT_KIND_DEVICE_WORK, symbol),
        Release,
    );
}
