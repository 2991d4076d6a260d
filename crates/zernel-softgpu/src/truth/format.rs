//! Layout of a truth log file. The file consists of 64-bit words in the machine's byte order.
//!
//! | offset | what |
//! |---|---|
//! | 0 | [`HEADER_BYTES`]: magic, pid, start time, library name |
//! | [`HEADER_BYTES`] | symbol names, [`BYTES_PER_SYMBOL_NAME`] each, in order of first use |
//! | [`BLOCKS_OFFSET`] | blocks, each with its own length, each written by one thread |

pub(super) const LOG_FILE_MAGIC: u64 = u64::from_le_bytes(*b"zsgtrut1");
pub(super) const WORD_BYTES: usize = 8;

pub(super) const HEADER_BYTES: usize = 4096;
pub(super) const HEADER_MAGIC_WORD_INDEX: usize = 0;
pub(super) const HEADER_PID_WORD_INDEX: usize = 1;
pub(super) const HEADER_START_TIME_WORD_INDEX: usize = 2;
/// Index of the first of two header words with the name of the library.
pub(super) const HEADER_LIBRARY_WORD_INDEX: usize = 3;

pub(super) const BYTES_PER_SYMBOL_NAME: usize = 64;
pub(super) const MAX_SYMBOLS: usize = 512;
pub(super) const BLOCKS_OFFSET: usize = HEADER_BYTES + MAX_SYMBOLS * BYTES_PER_SYMBOL_NAME;

/// Number of words in the header of a block: kind, thread id, length of the whole block in bytes.
pub(super) const BLOCK_HEADER_WORDS: usize = 8;
pub(super) const BLOCK_KIND_WORD_INDEX: usize = 0;
pub(super) const BLOCK_TID_WORD_INDEX: usize = 1;
pub(super) const BLOCK_BYTES_WORD_INDEX: usize = 2;

/// The kind of a block of counters: first how often each symbol was entered, then the returns. A return entry is a key
/// ([`return_key`]), the number of calls, and their bytes. Entry `i` of the first [`MAX_SYMBOLS`] is for symbol `i`
/// returning 0; the other entries are an open-addressed table for all other results.
pub(super) const BLOCK_KIND_COUNTERS: u64 = 1;
pub(super) const ENTERED_COUNTS_OFFSET: usize = BLOCK_HEADER_WORDS;
pub(super) const RETURN_ENTRIES_OFFSET: usize = ENTERED_COUNTS_OFFSET + MAX_SYMBOLS;
pub(super) const WORDS_PER_RETURN_ENTRY: usize = 4;
pub(super) const MAX_FAILURE_KINDS: usize = 512;
pub(super) const COUNTER_BLOCK_BYTES: usize = ((RETURN_ENTRIES_OFFSET
    + (MAX_SYMBOLS + MAX_FAILURE_KINDS) * WORDS_PER_RETURN_ENTRY)
    * WORD_BYTES)
    .next_multiple_of(4096);

/// The kind of a block of events of [`WORDS_PER_EVENT`] words; all words of an unused event are zero.
pub(super) const BLOCK_KIND_EVENTS: u64 = 2;
pub(super) const WORDS_PER_EVENT: usize = 8;
pub(super) const EVENT_ENTER_WORD_INDEX: usize = 0;
pub(super) const EVENT_LEAVE_WORD_INDEX: usize = 1;
pub(super) const EVENT_BYTES_WORD_INDEX: usize = 2;
pub(super) const EVENT_STREAM_WORD_INDEX: usize = 3;
pub(super) const EVENT_OBJECT_WORD_INDEX: usize = 4;
pub(super) const EVENT_RESULT_WORD_INDEX: usize = 5;
/// Index of the event word with the symbol in its low half and the kind in its high half; never zero in a used event.
pub(super) const EVENT_KIND_AND_SYMBOL_WORD_INDEX: usize = 6;
pub(super) const EVENT_BLOCK_BYTES: usize = 1 << 20;
pub(super) const EVENTS_PER_BLOCK: usize =
    (EVENT_BLOCK_BYTES / WORD_BYTES - BLOCK_HEADER_WORDS) / WORDS_PER_EVENT;

pub(super) const EVENT_KIND_CALL: u64 = 1;
pub(super) const EVENT_KIND_DEVICE_WORK: u64 = 2;

/// The key of a return entry, which combines symbol and result; never zero.
pub(super) fn return_key(symbol: usize, result: i32) -> u64 {
    (symbol as u64 + 1) << 32 | u64::from(result.cast_unsigned())
}

/// The symbol and the result that a return entry's key combines.
pub(super) fn split_return_key(key: u64) -> (usize, i32) {
    ((key >> 32) as usize - 1, (key as u32).cast_signed())
}

pub(super) fn event_kind_and_symbol(kind: u64, symbol: usize) -> u64 {
    kind << 32 | symbol as u64
}
