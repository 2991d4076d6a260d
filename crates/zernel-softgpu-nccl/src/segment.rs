//! The shared memory of a communicator, through which its ranks exchange data.
//!
//! The shared memory is a memfd of the process that made the communicator's unique id. The id contains the pid of that
//! process and the number of the descriptor, and the other ranks open the memfd through `/proc`. So the shared memory
//! has no name that could be left behind: the kernel frees it when the last process that maps it exits, even if that
//! process is killed.
//!
//! | part | for each | what |
//! |---|---|---|
//! | header | | cookie, number of ranks, bell |
//! | ranks | rank | identity, state, progress of collectives, start of the operation, control words |
//! | channels | pair of ranks | progress of point-to-point messages, starts of both sides |
//! | buffers | rank | [`COLLECTIVE_CHUNK_BYTES`] bytes |
//! | channel buffers | pair of ranks | [`MESSAGE_CHUNK_BYTES`] bytes |

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{
    AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::thread::futex;
use rustix::time::Timespec;
use zernel_softgpu::process::ProcessIdentity;
use zernel_softgpu::shared_memory::SharedMemory;

use crate::status::NcclError;

/// Number of bytes that each rank offers to the others at a time; a multiple of every element size.
pub(crate) const COLLECTIVE_CHUNK_BYTES: usize = 4 << 20;
/// Number of bytes of a message that are in its channel at a time.
pub(crate) const MESSAGE_CHUNK_BYTES: usize = 1 << 16;
/// Largest number of ranks in a communicator.
pub(crate) const MAX_RANKS: usize = 64;

const PAGE_BYTES: usize = 4096;
const COOKIE_OFFSET: usize = 0;
const RANKS_OFFSET: usize = 16;
const CHANGE_COUNT_OFFSET: usize = 24;
const RANK_WORDS_BYTES: usize = 256;
const CHANNEL_WORDS_BYTES: usize = 64;

/// The words that each rank has in the shared memory, by their index.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RankWord {
    Pid = 0,
    StartTime = 1,
    State = 2,
    /// Number of steps of collectives that this rank has reached.
    CollectiveStepCount = 3,
    /// Start of this rank's current operation on its device, in nanoseconds.
    Start = 4,
    /// Number of steps of control exchanges that this rank has reached.
    ControlStepCount = 5,
    /// The first of the rank's [`CONTROL_MESSAGE_WORD_COUNT`] words for control messages.
    Control = 8,
}

/// Number of words in a control message.
pub(crate) const CONTROL_MESSAGE_WORD_COUNT: usize = 8;

const STATE_JOINED: u64 = 1;
const STATE_LEFT: u64 = 2;

/// The words that each channel (pair of ranks) has in the shared memory, by their index.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ChannelWord {
    /// Number of chunks that the sender has put into the channel.
    Sent = 0,
    /// Number of chunks that the receiver has taken out of the channel.
    Received = 1,
    SenderStart = 2,
    ReceiverStart = 3,
}

/// `ncclUniqueId`: names the memfd of a communicator, and holds the cookie by which ranks recognise it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct UniqueId {
    cookie: u64,
    start_time: u64,
    pid: u32,
    descriptor: i32,
    padding: [u64; 13],
}

impl UniqueId {
    /// Packs the unique id into words of a control message.
    pub(crate) fn control_words(&self) -> [u64; 3] {
        let place = u64::from(self.pid) << 32 | u64::from(self.descriptor.cast_unsigned());
        [self.cookie, self.start_time, place]
    }

    /// Unpacks a unique id from the words of a control message.
    pub(crate) fn from_message_words([cookie, start_time, place]: [u64; 3]) -> Self {
        Self {
            cookie,
            start_time,
            pid: (place >> 32) as u32,
            descriptor: (place as u32).cast_signed(),
            padding: [0; 13],
        }
    }

    /// The cookie of the unique id, which is its first eight bytes. No two ids have the same cookie.
    pub(crate) fn cookie(&self) -> u64 {
        self.cookie
    }

    fn unique_id_creator(&self) -> ProcessIdentity {
        ProcessIdentity {
            pid: self.pid,
            start_time: self.start_time,
        }
    }
}

/// The memfds of the unique ids that this process created, by cookie. Each is kept until all ranks have opened it.
static MEMFDS_OF_OWN_IDS: Mutex<Vec<(u64, OwnedFd)>> = Mutex::new(Vec::new());

/// Makes a unique id, and the memfd that it names.
pub(crate) fn new_unique_id() -> io::Result<UniqueId> {
    let file = memfd_create("softgpu-nccl", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, PAGE_BYTES as u64)?;
    let own = ProcessIdentity::of_this_process();
    let mut cookie = [0; 8];
    rustix::rand::getrandom(&mut cookie, rustix::rand::GetRandomFlags::empty())?;
    let id = UniqueId {
        cookie: u64::from_ne_bytes(cookie),
        start_time: own.start_time,
        pid: own.pid,
        descriptor: file.as_raw_fd(),
        padding: [0; 13],
    };
    SharedMemory::map(&file, PAGE_BYTES)?
        .word(COOKIE_OFFSET)
        .store(id.cookie, Release);
    MEMFDS_OF_OWN_IDS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push((id.cookie, file));
    Ok(id)
}

/// Closes the memfd of a unique id, because all ranks have opened it.
fn close_memfd_of(id: &UniqueId) {
    let mut made = MEMFDS_OF_OWN_IDS
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    made.retain(|(cookie, _)| *cookie != id.cookie);
}

/// An operation stopped waiting for other ranks, because the communicator was aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OperationAborted;

/// The shared memory of a communicator, as one rank uses it.
#[derive(Debug)]
pub(crate) struct SharedSegment {
    memory: SharedMemory,
    rank: usize,
    ranks: usize,
}

fn segment_bytes(ranks: usize) -> usize {
    buffers_offset(ranks) + ranks * COLLECTIVE_CHUNK_BYTES + ranks * ranks * MESSAGE_CHUNK_BYTES
}

fn channels_offset(ranks: usize) -> usize {
    PAGE_BYTES + ranks * RANK_WORDS_BYTES
}

fn buffers_offset(ranks: usize) -> usize {
    (channels_offset(ranks) + ranks * ranks * CHANNEL_WORDS_BYTES).next_multiple_of(PAGE_BYTES)
}

fn open_memfd_of(id: &UniqueId) -> Result<File, NcclError> {
    let path = format!("/proc/{}/fd/{}", id.pid, id.descriptor);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|_| NcclError::RemoteError)?;
    let long_enough = file.metadata()?.len() >= PAGE_BYTES as u64;
    if !long_enough
        || SharedMemory::map(&file, PAGE_BYTES)?
            .word(COOKIE_OFFSET)
            .load(Acquire)
            != id.cookie
    {
        return Err(NcclError::InvalidArgument);
    }
    Ok(file)
}

impl SharedSegment {
    /// Joins the communicator of `id` as `rank`, and waits until all other ranks have joined.
    pub(crate) fn join(id: &UniqueId, rank: usize, ranks: usize) -> Result<Self, NcclError> {
        if rank >= ranks || ranks > MAX_RANKS {
            return Err(NcclError::InvalidArgument);
        }
        let file = open_memfd_of(id)?;
        // Each rank may enlarge the file. It never shrinks, and all ranks that pass the same number of ranks give it
        // the same size.
        if file.metadata()?.len() < segment_bytes(ranks) as u64 {
            file.set_len(segment_bytes(ranks) as u64)?;
        }
        let segment = Self {
            memory: SharedMemory::map(&file, segment_bytes(ranks))?,
            rank,
            ranks,
        };
        segment.mark_rank_joined()?;
        segment.wait_for_all_ranks(id)?;
        close_memfd_of(id);
        Ok(segment)
    }

    fn mark_rank_joined(&self) -> Result<(), NcclError> {
        let agreed = self.memory.word(RANKS_OFFSET);
        let first = agreed.compare_exchange(0, self.ranks as u64, AcqRel, Acquire);
        if first.is_err_and(|agreed| agreed != self.ranks as u64) {
            return Err(NcclError::InvalidArgument);
        }
        let own = ProcessIdentity::of_this_process();
        let pid = self.rank_word(self.rank, RankWord::Pid);
        if pid
            .compare_exchange(0, u64::from(own.pid), AcqRel, Acquire)
            .is_err()
        {
            return Err(NcclError::InvalidUsage);
        }
        self.rank_word(self.rank, RankWord::StartTime)
            .store(own.start_time, Relaxed);
        self.rank_word(self.rank, RankWord::State)
            .store(STATE_JOINED, Release);
        self.wake_ranks();
        Ok(())
    }

    fn wait_for_all_ranks(&self, id: &UniqueId) -> Result<(), NcclError> {
        let all_joined =
            || (0..self.ranks).all(|rank| self.rank_word(rank, RankWord::State).load(Acquire) != 0);
        // No rank can join after the process that created the id has exited.
        let check_joinable = || match id.unique_id_creator().is_alive()
            && !(0..self.ranks).any(|rank| self.has_rank_left_or_exited(rank))
        {
            true => Ok(()),
            false => Err(OperationAborted),
        };
        match self.wait_until(all_joined, check_joinable) {
            // The wait may end with an error although all ranks have joined: the rank that made the id may have joined
            // last and left at once.
            Err(OperationAborted) if !all_joined() => Err(NcclError::RemoteError),
            _ => Ok(()),
        }
    }

    /// Number of ranks in the communicator.
    pub(crate) fn rank_count(&self) -> usize {
        self.ranks
    }

    /// The number of this rank.
    pub(crate) fn own_rank(&self) -> usize {
        self.rank
    }

    /// A word that belongs to `rank`.
    pub(crate) fn rank_word(&self, rank: usize, word: RankWord) -> &AtomicU64 {
        self.memory
            .word(PAGE_BYTES + rank * RANK_WORDS_BYTES + word as usize * 8)
    }

    fn control_word(&self, rank: usize, index: usize) -> &AtomicU64 {
        self.memory
            .word(PAGE_BYTES + rank * RANK_WORDS_BYTES + (RankWord::Control as usize + index) * 8)
    }

    /// A word of the channel from one rank to another.
    pub(crate) fn channel_word(&self, from: usize, to: usize, word: ChannelWord) -> &AtomicU64 {
        let channel = channels_offset(self.ranks) + (from * self.ranks + to) * CHANNEL_WORDS_BYTES;
        self.memory.word(channel + word as usize * 8)
    }

    fn buffer_offset(&self, rank: usize) -> usize {
        buffers_offset(self.ranks) + rank * COLLECTIVE_CHUNK_BYTES
    }

    fn message_offset(&self, from: usize, to: usize) -> usize {
        buffers_offset(self.ranks)
            + self.ranks * COLLECTIVE_CHUNK_BYTES
            + (from * self.ranks + to) * MESSAGE_CHUNK_BYTES
    }

    /// Offers `bytes` bytes to the other ranks: copies them from the address `source` of this process to the shared
    /// memory.
    pub(crate) fn offer_bytes(&self, source: u64, bytes: usize) {
        // SAFETY: the source is the program's buffer, for which it vouches; the others read this rank's
        // buffer only between the two steps of a chunk, and this is before the first.
        unsafe {
            self.memory
                .store_bytes(self.buffer_offset(self.rank), source, bytes);
        };
    }

    /// The bytes that `rank` offers.
    pub(crate) fn offered_bytes(&self, rank: usize, bytes: usize) -> &[u8] {
        // SAFETY: no rank writes between the two steps of a chunk.
        unsafe { self.memory.slice(self.buffer_offset(rank), bytes) }
    }

    /// Puts a chunk of a message into the channel to rank `to`. The channel must be empty.
    pub(crate) fn send_chunk(&self, to: usize, source: u64, bytes: usize) {
        // SAFETY: the source is the program's buffer, for which it vouches; the receiver reads the
        // channel only after it is counted as sent.
        unsafe {
            self.memory
                .store_bytes(self.message_offset(self.rank, to), source, bytes);
        };
    }

    /// The chunk that is in the channel from rank `from`. The channel must be full.
    pub(crate) fn received_chunk(&self, from: usize, bytes: usize) -> &[u8] {
        // SAFETY: the sender writes the channel only after it is counted as received.
        unsafe {
            self.memory
                .slice(self.message_offset(from, self.rank), bytes)
        }
    }

    fn futex_word(&self) -> &AtomicU32 {
        self.memory.futex_word_at(CHANGE_COUNT_OFFSET)
    }

    /// Wakes all ranks that wait for a change of the shared memory.
    pub(crate) fn wake_ranks(&self) {
        self.futex_word().fetch_add(1, AcqRel);
        // A wake-up fails only if the address is not mapped.
        let _ = futex::wake(
            self.futex_word(),
            futex::Flags::empty(),
            i32::MAX.cast_unsigned(),
        );
    }

    /// Waits until `done` returns true. Calls `check_abort` now and then, which may end the wait with an error.
    pub(crate) fn wait_until(
        &self,
        mut done: impl FnMut() -> bool,
        mut check_abort: impl FnMut() -> Result<(), OperationAborted>,
    ) -> Result<(), OperationAborted> {
        loop {
            let bell = self.change_count();
            if done() {
                return Ok(());
            }
            self.wait_for_change(bell, &mut check_abort)?;
        }
    }

    /// The number of changes so far. To be read before looking at the words whose change a rank then waits for.
    pub(crate) fn change_count(&self) -> u32 {
        self.futex_word().load(Acquire)
    }

    /// Sleeps until another rank has changed the shared memory, or for a while, and then calls `check_abort`.
    pub(crate) fn wait_for_change(
        &self,
        value: u32,
        check_abort: impl FnOnce() -> Result<(), OperationAborted>,
    ) -> Result<(), OperationAborted> {
        let a_while = Timespec {
            tv_sec: 0,
            tv_nsec: 20_000_000,
        };
        match futex::wait(
            self.futex_word(),
            futex::Flags::empty(),
            value,
            Some(&a_while),
        ) {
            Err(rustix::io::Errno::TIMEDOUT) => check_abort(),
            _ => Ok(()),
        }
    }

    /// Whether `rank` has left the communicator, or its process has exited.
    pub(crate) fn has_rank_left_or_exited(&self, rank: usize) -> bool {
        let identity = ProcessIdentity {
            pid: self.rank_word(rank, RankWord::Pid).load(Relaxed) as u32,
            start_time: self.rank_word(rank, RankWord::StartTime).load(Relaxed),
        };
        match self.rank_word(rank, RankWord::State).load(Acquire) {
            STATE_JOINED => !identity.is_alive(),
            STATE_LEFT => true,
            _ => false,
        }
    }

    /// Marks this rank as left, and wakes the other ranks.
    pub(crate) fn mark_rank_left(&self) {
        self.rank_word(self.rank, RankWord::State)
            .store(STATE_LEFT, Release);
        self.wake_ranks();
    }

    /// Publishes this rank's control words, and returns the control words of all ranks.
    pub(crate) fn exchange_control_words(
        &self,
        words: [u64; CONTROL_MESSAGE_WORD_COUNT],
        check_abort: impl Fn() -> Result<(), OperationAborted>,
    ) -> Result<Vec<[u64; CONTROL_MESSAGE_WORD_COUNT]>, OperationAborted> {
        for (index, word) in words.into_iter().enumerate() {
            self.control_word(self.rank, index).store(word, Relaxed);
        }
        self.await_all_ranks_for_control_words(&check_abort)?;
        let words_of =
            |rank| std::array::from_fn(|index| self.control_word(rank, index).load(Relaxed));
        let all = (0..self.ranks).map(words_of).collect();
        self.await_all_ranks_for_control_words(&check_abort)?;
        Ok(all)
    }

    fn await_all_ranks_for_control_words(
        &self,
        check_abort: &impl Fn() -> Result<(), OperationAborted>,
    ) -> Result<(), OperationAborted> {
        self.await_all_ranks(RankWord::ControlStepCount, check_abort)
    }

    /// Increments this rank's counter, and waits until the counters of all ranks have reached it.
    pub(crate) fn await_all_ranks(
        &self,
        counter: RankWord,
        check_abort: impl Fn() -> Result<(), OperationAborted>,
    ) -> Result<(), OperationAborted> {
        let step = self.rank_word(self.rank, counter).fetch_add(1, AcqRel) + 1;
        self.wake_ranks();
        let there = |rank| self.rank_word(rank, counter).load(Acquire) >= step;
        self.wait_until(|| (0..self.ranks).all(there), check_abort)
    }

    /// Whether a rank that this rank waits for in `counter` has left the communicator, or its process has exited.
    pub(crate) fn waits_for_lost_rank(&self, counter: RankWord) -> bool {
        let step = self.rank_word(self.rank, counter).load(Acquire);
        (0..self.ranks).any(|rank| {
            self.rank_word(rank, counter).load(Acquire) < step && self.has_rank_left_or_exited(rank)
        })
    }
}
