//! The memory that a handle and its workers share: one mapping, laid out before the first worker exists.
//!
//! ```text
//! Header | Counters × workers | WorkerRecord × workers | Slot × slots | TraceEntry × entries
//! ```
//!
//! Workers update their numbers while they run, so the numbers of a starved, killed or hung worker are
//! correct too. There is no pipe and no file descriptor per worker: all waits use futexes in this memory.

use std::io;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use rustix::thread::futex;

use crate::clock;
use crate::histogram::SharedHistogram;
use crate::sys::memory::{SharedMapping, SharedPlain};
use crate::sys::signal::STOP_BIT;

/// Largest number of CPUs that a report can name.
pub(crate) const MAX_CPUS: usize = 1024;
/// A ready worker writes this number into its record. Another number means that the record was overwritten.
pub(crate) const RECORD_MAGIC: u32 = 0x5a52_4e4c;

/// Bits of a worker's command word. While no bit is set, the worker works.
pub(crate) mod command {
    /// The worker is to stop.
    pub(crate) const STOP: u32 = super::STOP_BIT;
}

/// How fast all workers do their rounds.
///
/// All workers read the same pace word. A caller that wrote one word per worker would lose the CPU to the first of
/// thousands of workers before it had written the last word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum WorkerPace {
    /// Workers do rounds as fast as they can.
    FullSpeed = 0,
    /// Workers do rounds, but yield the CPU before each: others have not had the CPU yet, and the handle waits for
    /// them.
    YieldBeforeRound = 1,
    /// A worker that has done a round sleeps until the stop, if no other worker waits for it. The other workers yield
    /// before each round.
    HoldUntilStop = 2,
}

/// How far a worker has come. A worker passes the stages in this order and never returns to an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub(crate) enum WorkerStage {
    /// The worker published its tid, applied its settings and waits for the start.
    Ready = 1,
    /// The worker has run after the start.
    Running = 2,
    /// The worker has done its first round, or will do none.
    FirstRoundDone = 3,
    /// The worker's work function has returned.
    Ended = 4,
    /// The process of the worker is reaped, or its thread is about to return.
    Exited = 5,
}

const STAGE_COUNT: usize = 5;

/// How a worker's work function ended, as a number in shared memory.
pub(crate) mod outcome {
    /// The work function has not ended.
    pub(crate) const NOT_ENDED: u32 = 0;
    /// The work function returned.
    pub(crate) const FINISHED: u32 = 1;
    /// The work function panicked (threads only: the panic of a process aborts it).
    pub(crate) const PANICKED: u32 = 2;
    /// The work function gave up because a system call failed.
    pub(crate) const FAILED: u32 = 3;
}

/// The part of the shared memory that the handle writes, and all workers read.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct SharedHeader {
    /// 0 until the handle starts the workers. Blocked workers wait on this word.
    start_futex_word: AtomicU32,
    /// Number of workers that have passed each stage.
    passed_counts: [AtomicU32; STAGE_COUNT],
    /// When the handle started the workers, on `CLOCK_MONOTONIC`.
    pub(crate) started_ns: AtomicU64,
    /// The error number of the system call that kept a container from being set up.
    pub(crate) container_errno: AtomicI32,
    pace: PaceWord,
}

/// A [`WorkerPace`], on a cache line of its own: every worker reads it in every round.
#[derive(Debug)]
#[repr(C, align(128))]
struct PaceWord(AtomicU32);

/// A worker's progress counters, on a cache line of their own and dense enough to be read for all workers at once.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct WorkerCounters {
    pub(crate) iterations: AtomicU64,
    pub(crate) work_units: AtomicU64,
}

/// Everything that a worker writes about itself, except for its progress counters.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct WorkerRecord {
    /// The word by which the handle controls the worker; its bits are in [`command`]. A worker that sleeps waits on
    /// this word.
    pub(crate) command: AtomicU32,
    stage: AtomicU32,
    pub(crate) magic: AtomicU32,
    pub(crate) tid: AtomicI32,
    pub(crate) outcome: AtomicU32,
    /// For [`outcome::FAILED`]: the step that failed, by its number in [`FailingStep`](crate::worker::FailingStep).
    pub(crate) failed_step: AtomicU32,
    pub(crate) failed_errno: AtomicI32,
    /// The kernel's error number for each setting, by [`Setting`](crate::settings::Setting); 0 where the kernel
    /// accepted it.
    pub(crate) setting_errnos: [AtomicI32; 8],
    pub(crate) first_run_ns: AtomicU64,
    pub(crate) last_seen_ns: AtomicU64,
    /// When the work function returned, when the worker was held, or when its exit was noticed.
    pub(crate) ended_ns: AtomicU64,
    pub(crate) kernel_counters: KernelCounters,
    pub(crate) largest_gap_ns: AtomicU64,
    pub(crate) largest_gap_at_ns: AtomicU64,
    pub(crate) largest_gap_cpu: AtomicU32,
    /// The CPU on which the worker was last seen.
    pub(crate) cpu: AtomicU32,
    pub(crate) migrations: AtomicU64,
    pub(crate) cpus: [AtomicU64; MAX_CPUS / 64],
    /// Not 0 while the worker is blocked in one of our own calls.
    pub(crate) is_blocked: AtomicU32,
    pub(crate) traced_entries: AtomicU64,
    pub(crate) wake_latency: SharedHistogram,
    pub(crate) blocked_times: SharedHistogram,
}

/// The kernel's counters of a thread. The worker refreshes the counters regularly; if it cannot, the handle reads them
/// from `/proc`.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct KernelCounters {
    pub(crate) cpu_ns: AtomicU64,
    /// Run-queue delay plus one, in nanoseconds; 0 if the kernel does not count it.
    pub(crate) run_delay_plus_one: AtomicU64,
    pub(crate) voluntary_switches: AtomicU64,
    pub(crate) involuntary_switches: AtomicU64,
    /// The values of the four counters above at the worker's first run.
    pub(crate) values_at_first_run: [AtomicU64; 4],
}

/// A futex word with the times of its last changes. Workers of a team wait on it and wake each other.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct FutexSlot {
    /// The futex word that workers wait on.
    pub(crate) word: AtomicU32,
    /// The time of each change of the word, indexed by the value before the change. One stamp is not enough: a waiter
    /// that gets the CPU late needs the time of the change that woke it, not of the latest change.
    stamps_ns: [AtomicU64; STAMPS_PER_SLOT as usize],
}

/// Number of changes of its word that a slot remembers.
const STAMPS_PER_SLOT: u32 = 256;

impl FutexSlot {
    /// Stores the present time as that of the next change of the word, which has the value `value` now.
    pub(crate) fn store_time_of_change_from(&self, value: u32) {
        self.stamp_of_change_from(value)
            .store(clock::now_ns(), Ordering::Release);
    }

    /// Returns when the word changed from `seen`. For a waiter that missed more changes than the slot remembers: the
    /// time of the oldest remembered change.
    pub(crate) fn time_of_change_from_ns(&self, seen: u32) -> u64 {
        let word = self.word.load(Ordering::Acquire);
        let missed = word.wrapping_sub(seen);
        // If the word went down, no change was missed. The time of the change from `word` may be written at this
        // moment.
        let is_lost = (STAMPS_PER_SLOT..u32::MAX / 2).contains(&missed);
        let value = if is_lost { word.wrapping_add(1) } else { seen };
        self.stamp_of_change_from(value).load(Ordering::Acquire)
    }

    /// Stores a message where the slot otherwise keeps the times of changes. The slot must not be used for waiting.
    pub(crate) fn write_message(&self, message: &[u64]) {
        for (place, word) in self.stamps_ns.iter().zip(message) {
            place.store(*word, Ordering::Release);
        }
    }

    /// Reads the message that another worker left in the slot.
    pub(crate) fn read_message<const WORDS: usize>(&self) -> [u64; WORDS] {
        std::array::from_fn(|index| self.stamps_ns[index].load(Ordering::Acquire))
    }

    fn stamp_of_change_from(&self, value: u32) -> &AtomicU64 {
        &self.stamps_ns[(value % STAMPS_PER_SLOT) as usize]
    }
}

/// One interval of a training job's ground truth: a phase of a step, with its start and end.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct TraceEntry {
    pub(crate) step: AtomicU32,
    pub(crate) phase: AtomicU32,
    pub(crate) start_ns: AtomicU64,
    pub(crate) end_ns: AtomicU64,
}

// SAFETY: `#[repr(C)]`, atomics only.
unsafe impl SharedPlain for SharedHeader {}
// SAFETY: `#[repr(C)]`, atomics only.
unsafe impl SharedPlain for WorkerCounters {}
// SAFETY: `#[repr(C)]`, atomics only.
unsafe impl SharedPlain for WorkerRecord {}
// SAFETY: `#[repr(C)]`, atomics only.
unsafe impl SharedPlain for FutexSlot {}
// SAFETY: `#[repr(C)]`, atomics only.
unsafe impl SharedPlain for TraceEntry {}

/// The shared memory of a handle and its workers, with the offsets of its parts.
#[derive(Debug)]
pub(crate) struct SharedState {
    mapping: SharedMapping,
    workers: usize,
    worker_records_offset: usize,
    futex_slots_offset: usize,
    trace_entries_offset: usize,
}

impl SharedState {
    /// Maps shared memory for this number of workers, futex slots and trace entries.
    pub(crate) fn new(workers: usize, slots: usize, trace_capacity: usize) -> io::Result<Self> {
        let too_large = || io::Error::from(rustix::io::Errno::NOMEM);
        let (_, end) = offset_and_end_of_region::<SharedHeader>(0, 1).ok_or_else(too_large)?;
        let (_, end) =
            offset_and_end_of_region::<WorkerCounters>(end, workers).ok_or_else(too_large)?;
        let (worker_records_offset, end) =
            offset_and_end_of_region::<WorkerRecord>(end, workers).ok_or_else(too_large)?;
        let (futex_slots_offset, end) =
            offset_and_end_of_region::<FutexSlot>(end, slots).ok_or_else(too_large)?;
        let (trace_entries_offset, end) =
            offset_and_end_of_region::<TraceEntry>(end, trace_capacity).ok_or_else(too_large)?;
        Ok(Self {
            mapping: SharedMapping::new(end)?,
            workers,
            worker_records_offset,
            futex_slots_offset,
            trace_entries_offset,
        })
    }

    pub(crate) fn header(&self) -> &SharedHeader {
        &self.mapping.slice(0, 1)[0]
    }

    pub(crate) fn counters(&self) -> &[WorkerCounters] {
        self.mapping.slice(size_of::<SharedHeader>(), self.workers)
    }

    pub(crate) fn records(&self) -> &[WorkerRecord] {
        self.mapping.slice(self.worker_records_offset, self.workers)
    }

    pub(crate) fn record(&self, worker: usize) -> &WorkerRecord {
        &self.records()[worker]
    }

    pub(crate) fn slots(&self, range: &Range<usize>) -> &[FutexSlot] {
        self.mapping.slice(
            self.futex_slots_offset + range.start * size_of::<FutexSlot>(),
            range.len(),
        )
    }

    pub(crate) fn trace_entries(&self, range: &Range<usize>) -> &[TraceEntry] {
        self.mapping.slice(
            self.trace_entries_offset + range.start * size_of::<TraceEntry>(),
            range.len(),
        )
    }

    pub(crate) fn worker_count(&self) -> usize {
        self.workers
    }

    /// Records that a worker has passed `stage` and all stages before. The worker itself calls this, or the thread that
    /// reaped it.
    pub(crate) fn pass_stage(&self, worker: usize, stage: WorkerStage) {
        if stage == WorkerStage::Exited {
            let ended_ns = &self.record(worker).ended_ns;
            let now = clock::now_ns();
            let _ = ended_ns.compare_exchange(0, now, Ordering::AcqRel, Ordering::Acquire);
        }
        let before = self
            .record(worker)
            .stage
            .fetch_max(stage as u32, Ordering::AcqRel);
        for passed in before..stage as u32 {
            let word = &self.header().passed_counts[passed as usize];
            if word.fetch_add(1, Ordering::AcqRel) + 1 == self.workers as u32 {
                wake_all_waiters(word);
            }
        }
    }

    pub(crate) fn has_passed(&self, worker: usize, stage: WorkerStage) -> bool {
        self.record(worker).stage.load(Ordering::Acquire) >= stage as u32
    }

    /// Number of workers that have passed `stage`.
    pub(crate) fn passed_count(&self, stage: WorkerStage) -> usize {
        self.header().passed_counts[stage as usize - 1].load(Ordering::Acquire) as usize
    }

    /// Waits until all workers have passed `stage`, or until the moment `until_ns`. Returns whether all workers have
    /// passed it.
    pub(crate) fn wait_until_all_passed(&self, stage: WorkerStage, until_ns: u64) -> bool {
        let word = &self.header().passed_counts[stage as usize - 1];
        loop {
            let passed = word.load(Ordering::Acquire);
            if passed as usize >= self.workers {
                return true;
            }
            if clock::now_ns() >= until_ns {
                return false;
            }
            wait_while_word_is(word, passed, Some(until_ns));
        }
    }

    /// Whether the handle has started the workers.
    pub(crate) fn is_started(&self) -> bool {
        self.header().start_futex_word.load(Ordering::Acquire) != 0
    }

    /// Releases the workers that are blocked until the start. The second call does nothing.
    pub(crate) fn release_workers(&self) {
        if !self.is_started() {
            let header = self.header();
            header.started_ns.store(clock::now_ns(), Ordering::Release);
            header.start_futex_word.store(1, Ordering::Release);
            wake_all_waiters(&header.start_futex_word);
        }
    }

    /// Blocks a worker until the handle starts the workers or requests their stop.
    pub(crate) fn wait_for_start(&self, worker: usize) {
        let started = &self.header().start_futex_word;
        let command = &self.record(worker).command;
        while started.load(Ordering::Acquire) == 0
            && command.load(Ordering::Acquire) & command::STOP == 0
        {
            wait_while_word_is(started, 0, None);
        }
    }

    /// Requests the stop of every worker, and wakes the workers that sleep on their command words.
    ///
    /// All command words are written before the first system call: among thousands of spinning workers the caller may
    /// lose the CPU for seconds in any system call.
    pub(crate) fn request_stop(&self) {
        for record in self.records() {
            record.command.fetch_or(command::STOP, Ordering::Release);
        }
        self.records()
            .iter()
            .for_each(|record| wake_all_waiters(&record.command));
    }

    /// Sets the pace of all workers.
    pub(crate) fn set_pace(&self, pace: WorkerPace) {
        self.header().pace.0.store(pace as u32, Ordering::Release);
    }

    pub(crate) fn current_pace(&self) -> WorkerPace {
        match self.header().pace.0.load(Ordering::Acquire) {
            0 => WorkerPace::FullSpeed,
            1 => WorkerPace::YieldBeforeRound,
            _ => WorkerPace::HoldUntilStop,
        }
    }
}

/// The start and end of an array of `count` values of type `T`, placed behind offset `end`; `None` on overflow.
fn offset_and_end_of_region<T>(end: usize, count: usize) -> Option<(usize, usize)> {
    let start = end.checked_next_multiple_of(align_of::<T>())?;
    let bytes = count.checked_mul(size_of::<T>())?;
    Some((start, start.checked_add(bytes)?))
}

/// Waits while `word` has the value `seen`, until the moment `until_ns` at most. Any signal ends the wait early. Fork
/// safe.
pub(crate) fn wait_while_word_is(word: &AtomicU32, seen: u32, until_ns: Option<u64>) {
    let until = until_ns.map(clock::ns_to_timespec);
    // A futex wait with a bitset takes an absolute time, so a delay before the system call does not make the wait
    // longer. After every outcome (woken, changed, timed out, interrupted) the callers check the word again.
    let _ = futex::wait_bitset(
        word,
        futex::Flags::empty(),
        seen,
        until.as_ref(),
        NonZeroU32::MAX,
    );
}

/// Wakes at most `count` workers that wait on `word`. Fork safe.
pub(crate) fn wake_waiters(word: &AtomicU32, count: u32) {
    let _ = futex::wake(word, futex::Flags::empty(), count);
}

/// Wakes every worker that waits on `word`. Fork safe.
pub(crate) fn wake_all_waiters(word: &AtomicU32) {
    wake_waiters(word, i32::MAX as u32);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_stages_count_each_worker_once() {
        let shared = SharedState::new(2, 0, 0).unwrap();
        shared.pass_stage(0, WorkerStage::Ready);
        shared.pass_stage(0, WorkerStage::Ready);
        assert_eq!(shared.passed_count(WorkerStage::Ready), 1);
        assert!(!shared.wait_until_all_passed(WorkerStage::Ready, 0));
        shared.pass_stage(1, WorkerStage::Exited);
        assert!(shared.wait_until_all_passed(WorkerStage::Ready, 0));
        assert_eq!(shared.passed_count(WorkerStage::Running), 1);
    }

    #[test]
    fn slot_returns_time_of_missed_or_oldest_change() {
        let shared = SharedState::new(1, 1, 0).unwrap();
        let slot = &shared.slots(&(0..1))[0];
        let mut moments_ns = Vec::new();
        for value in 0..2 * STAMPS_PER_SLOT {
            slot.store_time_of_change_from(value);
            slot.word.store(value + 1, Ordering::Release);
            moments_ns.push(slot.stamp_of_change_from(value).load(Ordering::Acquire));
            let first_kept = (value + 1).saturating_sub(STAMPS_PER_SLOT - 1) as usize;
            let first_ns = match value < STAMPS_PER_SLOT - 1 {
                true => moments_ns[0],
                false => moments_ns[first_kept],
            };
            assert_eq!(slot.time_of_change_from_ns(0), first_ns, "after {value}");
            assert_eq!(
                slot.time_of_change_from_ns(value),
                moments_ns[value as usize]
            );
        }
    }

    #[test]
    fn futex_wait_ends_at_its_deadline() {
        let word = AtomicU32::new(1);
        let until_ns = clock::now_ns() + 20_000_000;
        while clock::now_ns() < until_ns {
            wait_while_word_is(&word, 1, Some(until_ns));
        }
        // A wait until a moment in the past ends at once, even if the moment would be far ahead as a span from now.
        wait_while_word_is(&word, 1, Some(until_ns));
    }

    #[test]
    fn shared_memory_regions_do_not_overlap() {
        let shared = SharedState::new(3, 2, 4).unwrap();
        shared.slots(&(0..2))[1].store_time_of_change_from(STAMPS_PER_SLOT - 1);
        shared.trace_entries(&(1..4))[2]
            .end_ns
            .store(9, Ordering::Relaxed);
        shared.counters()[2].work_units.store(5, Ordering::Relaxed);
        assert!(
            shared
                .records()
                .iter()
                .all(|record| record.tid.load(Ordering::Relaxed) == 0)
        );
        assert_eq!(
            shared.trace_entries(&(3..4))[0]
                .end_ns
                .load(Ordering::Relaxed),
            9
        );
    }

    #[test]
    fn too_large_shared_memory_is_refused() {
        for (workers, slots, entries) in
            [(usize::MAX, 0, 0), (1, usize::MAX / 64, 0), (1, 1, 1 << 62)]
        {
            assert!(SharedState::new(workers, slots, entries).is_err());
        }
    }
}
