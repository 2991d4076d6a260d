//! One call of an exported function, from entry to return.

use std::sync::atomic::AtomicU64;

use super::log::{self, ThreadLog};
use crate::clock;

/// An exported function, as the truth log identifies it.
#[derive(Debug)]
pub struct LoggedSymbol {
    pub(super) library: &'static str,
    pub(super) name: &'static str,
    /// Index of the function in the symbol table of this process's log file, and the generation of that file.
    pub(super) index_and_generation: AtomicU64,
}

impl LoggedSymbol {
    /// Creates the symbol of the function `name` of `library` (`"cuda"`, `"nccl"`).
    #[must_use]
    pub const fn new(library: &'static str, name: &'static str) -> Self {
        Self {
            library,
            name,
            index_and_generation: AtomicU64::new(0),
        }
    }
}

/// A running call of an exported function. The body of the function stores here what the log needs.
#[derive(Debug)]
pub struct OpenCall {
    /// Bytes that the call allocates, frees, copies or reduces.
    pub bytes: u64,
    /// The stream that the call names, as the caller spelled it.
    pub stream: u64,
    /// The object that the call is about: the address allocated or freed, the function launched, the event, the graph,
    /// the communicator; for making a communicator the first eight bytes of its unique id.
    pub object: u64,
    /// Whether stream 0 means the calling thread's own default stream.
    pub per_thread_default_stream: bool,
    symbol: &'static LoggedSymbol,
    log: Option<OpenLogEntry>,
}

#[derive(Debug, Clone, Copy)]
struct OpenLogEntry {
    thread: &'static ThreadLog,
    symbol: usize,
    event: Option<&'static [AtomicU64]>,
}

impl OpenCall {
    /// Counts the entry of a thread into the function.
    #[inline]
    #[must_use]
    pub fn enter_call(symbol: &'static LoggedSymbol, per_thread_default_stream: bool) -> Self {
        Self {
            bytes: 0,
            stream: 0,
            object: 0,
            per_thread_default_stream,
            symbol,
            log: log::is_logging()
                .then(|| OpenLogEntry::begin_entry(symbol))
                .flatten(),
        }
    }

    /// The function that was called.
    #[must_use]
    pub fn symbol(&self) -> &'static LoggedSymbol {
        self.symbol
    }

    /// Counts the return of the call with its result.
    #[inline]
    pub fn leave_call(self, result: i32) {
        if let Some(logged) = self.log {
            logged.end_entry(&self, result);
        }
    }
}

impl OpenLogEntry {
    fn begin_entry(symbol: &'static LoggedSymbol) -> Option<Self> {
        let thread = log::log_of_thread(symbol.library)?;
        let index = thread.symbol_index(symbol);
        thread.count_entry(index);
        let event = thread.begin_event(index);
        Some(Self {
            thread,
            symbol: index,
            event,
        })
    }

    fn end_entry(self, call: &OpenCall, result: i32) {
        self.thread.count_return(self.symbol, result, call.bytes);
        if let Some(event) = self.event {
            log::end_event(event, call, result, clock::now_ns());
        }
    }
}
