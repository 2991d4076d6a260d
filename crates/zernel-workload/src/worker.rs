//! What a work function can do: check for a stop request, count work, use CPU time, sleep, wait and wake other workers.
//! All work types use this interface, so their reports are comparable.
//!
//! All functions of a worker are fork safe: they do not allocate, take no lock and do not panic.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::sched_getcpu;

use crate::clock;
use crate::procfs;
use crate::shared_state::{
    FutexSlot, MAX_CPUS, SharedState, TraceEntry, WorkerCounters, WorkerPace, WorkerRecord,
    WorkerStage, command, wait_while_word_is, wake_waiters,
};
use crate::sys::sched::context_switches;

/// Time between two refreshes of a worker's kernel counters. A refresh takes about 10 µs.
const KERNEL_COUNTER_READ_INTERVAL_NS: u64 = 100_000_000;
/// Number of spin rounds between two reads of the clock: about a microsecond.
const SPIN_ROUNDS_PER_CLOCK_READ: u32 = 1024;

/// A pipe between two workers of a team.
#[derive(Debug)]
pub(crate) struct TeamPipe {
    pub(crate) reader: OwnedFd,
    pub(crate) writer: OwnedFd,
}

/// The workers that work together (a pair, a ring, a herd), as one of them sees them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkerTeam<'a> {
    /// This worker's index in its team.
    pub(crate) index: usize,
    /// Number of workers in the team.
    pub(crate) size: usize,
    /// Whether no member of the team waits for another, so that each member can be held.
    pub(crate) members_are_independent: bool,
    pub(crate) slots: &'a [FutexSlot],
    pub(crate) pipes: &'a [TeamPipe],
}

/// Why a work function gave up: the step that failed, and the kernel's error.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkFailure {
    pub(crate) step: FailingStep,
    pub(crate) errno: Errno,
}

/// A step of a work function that the kernel may refuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum FailingStep {
    MapMemory,
    MakeFile,
    WriteFile,
    ReadFile,
    UsePipe,
    ForkChild,
    SetNice,
    SetAffinity,
    OpenCgroup,
    MoveToCgroup,
    LoadDriver,
    UseGpu,
    LoadNccl,
    UseNccl,
    RunLoader,
}

impl FailingStep {
    /// What the worker tried to do in each step, in the order of the variants.
    pub(crate) const STEP_DESCRIPTIONS: [&'static str; 15] = [
        "map memory",
        "make a temporary file",
        "write to its file",
        "read its file",
        "use its pipe",
        "fork a child",
        "set its nice value",
        "set its affinity",
        "open a cgroup",
        "move to a cgroup",
        "load the GPU driver and find its functions",
        "use the GPU",
        "load libnccl.so.2 (from beside the GPU driver, or where the loader looks) and find its functions",
        "use NCCL",
        "run a loader, which read and decoded for it",
    ];

    /// Turns the kernel's refusal of this step into a [`WorkFailure`].
    pub(crate) fn as_failure(self) -> impl FnOnce(Errno) -> WorkFailure {
        move |errno| WorkFailure { step: self, errno }
    }
}

/// A running worker, as its work function sees it.
///
/// A work function is a loop: `while worker.should_do_another_round() { …; worker.count_round(1); }`.
///
/// In [`CloneMode::Fork`](crate::CloneMode::Fork) a work function runs in a process forked from a caller that may have
/// many threads: it must not print, and should not take locks that the caller's other threads use. Memory allocation is
/// safe with the system allocator.
#[derive(Debug)]
pub struct Worker<'a> {
    shared: &'a SharedState,
    number: usize,
    index: usize,
    record: &'a WorkerRecord,
    counters: &'a WorkerCounters,
    team: WorkerTeam<'a>,
    trace: &'a [TraceEntry],
    last_seen_ns: u64,
    kernel_counters_read_at_ns: u64,
    cpu: usize,
}

impl<'a> Worker<'a> {
    /// Makes the interface of worker `number` of the handle, which is worker `index` of its group, at its first run.
    pub(crate) fn begin_first_round(
        shared: &'a SharedState,
        number: usize,
        index: usize,
        team: WorkerTeam<'a>,
        trace: &'a [TraceEntry],
    ) -> Self {
        let now = clock::now_ns();
        let cpu = sched_getcpu();
        let record = shared.record(number);
        let worker = Self {
            shared,
            number,
            index,
            record,
            counters: &shared.counters()[number],
            team,
            trace,
            last_seen_ns: now,
            kernel_counters_read_at_ns: now,
            cpu,
        };
        record.first_run_ns.store(now, Relaxed);
        record.last_seen_ns.store(now, Relaxed);
        worker.record_current_cpu();
        worker.refresh_counters();
        record.kernel_counters.store_values_at_first_run();
        shared.pass_stage(number, WorkerStage::Running);
        worker
    }

    /// Writes the worker's final numbers to shared memory.
    pub(crate) fn write_final_numbers(&mut self) {
        if self.record.ended_ns.load(Relaxed) == 0 {
            self.record_gap_since_last_call();
            self.refresh_counters();
            self.record.ended_ns.store(self.last_seen_ns, Relaxed);
        }
        self.shared
            .pass_stage(self.number, WorkerStage::FirstRoundDone);
    }

    /// Index of the worker among the workers of its group.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    pub(crate) fn team(&self) -> WorkerTeam<'a> {
        self.team
    }

    /// Whether the handle has requested the stop of the worker.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.record.command.load(Acquire) & command::STOP != 0
    }

    /// Whether the worker is to do another round. A work function calls this once per round: it also measures the time
    /// since the last call, and counts migrations.
    #[must_use]
    pub fn should_do_another_round(&mut self) -> bool {
        self.record_gap_since_last_call();
        let pace = self.shared.current_pace();
        if pace != WorkerPace::FullSpeed && !self.is_stopped() {
            self.yield_or_hold(pace);
        }
        !self.is_stopped()
    }

    fn yield_or_hold(&mut self, pace: WorkerPace) {
        let has_worked = self.counters.iterations.load(Relaxed) > 0;
        if pace == WorkerPace::HoldUntilStop && has_worked && self.team.members_are_independent {
            self.hold_until_stop();
        } else {
            rustix::thread::sched_yield();
        }
    }

    /// Makes the worker sleep until the stop request.
    ///
    /// The handle holds the worker, so the worker's report ends here: later time counts neither as wall time, gap nor
    /// blocked time, and later wake-ups and context switches do not count. Built-in work returns afterwards.
    fn hold_until_stop(&mut self) {
        self.refresh_counters();
        self.record.ended_ns.store(self.last_seen_ns, Relaxed);
        while !self.is_stopped() {
            wait_while_word_is(&self.record.command, 0, None);
        }
        self.last_seen_ns = clock::now_ns();
    }

    /// Counts a round that did `work_units` units of work.
    pub fn count_round(&self, work_units: u64) {
        let is_first = self.counters.iterations.load(Relaxed) == 0;
        add_to_own_counter(&self.counters.iterations, 1);
        add_to_own_counter(&self.counters.work_units, work_units);
        if is_first {
            self.shared
                .pass_stage(self.number, WorkerStage::FirstRoundDone);
        }
    }

    /// Keeps the CPU busy until the worker has used `cpu_time` of CPU time, or until the stop request.
    pub fn burn_cpu(&mut self, cpu_time: Duration) {
        self.burn_cpu_ns(clock::duration_to_ns(cpu_time));
    }

    pub(crate) fn burn_cpu_ns(&mut self, cpu_ns: u64) {
        let end = clock::thread_cpu_ns().saturating_add(cpu_ns);
        while clock::thread_cpu_ns() < end && self.should_do_another_round() {
            self.spin_about_a_microsecond();
        }
    }

    /// Keeps the CPU busy for about a microsecond.
    pub(crate) fn spin_about_a_microsecond(&self) {
        for _ in 0..SPIN_ROUNDS_PER_CLOCK_READ {
            std::hint::black_box(());
        }
    }

    /// Sleeps for `span`. The stop request ends the sleep at once; then the result is false.
    pub fn sleep(&mut self, span: Duration) -> bool {
        self.sleep_until_ns(clock::now_ns().saturating_add(clock::duration_to_ns(span)));
        !self.is_stopped()
    }

    /// Sleeps until the moment `deadline_ns`. The delay between this moment and the worker's next run counts as a
    /// wake-up latency.
    pub(crate) fn sleep_until_ns(&mut self, deadline_ns: u64) {
        let began = self.begin_blocking_call();
        loop {
            let command = self.record.command.load(Acquire);
            let now = clock::now_ns();
            if now >= deadline_ns || command & command::STOP != 0 {
                self.end_blocking_call(
                    began,
                    (now >= deadline_ns && began < deadline_ns).then_some(deadline_ns),
                );
                return;
            }
            wait_while_word_is(&self.record.command, command, Some(deadline_ns));
        }
    }

    /// Waits while the word of `slot` has the value `seen`; false after the stop request. The wake-up latency counts
    /// from the first change of the word.
    pub(crate) fn wait_while_slot_has(&mut self, slot: &FutexSlot, seen: u32) -> bool {
        if slot.word.load(Acquire) != seen {
            return !self.is_stopped();
        }
        let began = self.begin_blocking_call();
        while slot.word.load(Acquire) == seen {
            if self.is_stopped() {
                self.end_blocking_call(began, None);
                return false;
            }
            wait_while_word_is(&slot.word, seen, None);
        }
        self.end_blocking_call(began, Some(slot.time_of_change_from_ns(seen)));
        true
    }

    /// Takes one of the units that other workers post to `slot`, and waits if there is none; false after the stop
    /// request.
    pub(crate) fn take_from_slot(&mut self, slot: &FutexSlot) -> bool {
        loop {
            let there = slot.word.load(Acquire);
            if there == 0 {
                if !self.wait_while_slot_has(slot, 0) {
                    return false;
                }
            } else if slot
                .word
                .compare_exchange(there, there - 1, AcqRel, Acquire)
                .is_ok()
            {
                return true;
            }
        }
    }

    /// Posts a unit to `slot` and wakes at most `count` workers that wait on it.
    pub(crate) fn post_to_slot(&self, slot: &FutexSlot, count: u32) {
        slot.store_time_of_change_from(slot.word.load(Acquire));
        slot.word.fetch_add(1, AcqRel);
        wake_waiters(&slot.word, count);
    }

    /// Posts a unit to `slot` and wakes every worker that waits on it.
    pub(crate) fn post_to_all_waiters(&self, slot: &FutexSlot) {
        self.post_to_slot(slot, i32::MAX as u32);
    }

    /// Sends the present time through a pipe; false after the stop request.
    pub(crate) fn send_through_pipe(&self, pipe: &TeamPipe) -> Result<bool, Errno> {
        let message = clock::now_ns().to_ne_bytes();
        self.retry_interrupted(|| rustix::io::write(pipe.writer.as_fd(), &message))
            .map(|written| written.is_some())
    }

    /// Receives the time that [`send_through_pipe`](Self::send_through_pipe) sent; false after the stop request. The
    /// wake-up latency counts from the received time.
    pub(crate) fn receive_from_pipe(&mut self, pipe: &TeamPipe) -> Result<bool, Errno> {
        let began = self.begin_blocking_call();
        let mut message = [0; 8];
        let received =
            self.retry_interrupted(|| rustix::io::read(pipe.reader.as_fd(), &mut message))?;
        let stamp = u64::from_ne_bytes(message);
        let slept = received.is_some() && stamp > began;
        self.end_blocking_call(began, slept.then_some(stamp));
        Ok(received.is_some())
    }

    /// Repeats a call that a signal interrupted until it is done (`Some`) or the stop is requested (`None`).
    fn retry_interrupted<T>(
        &self,
        mut call: impl FnMut() -> Result<T, Errno>,
    ) -> Result<Option<T>, Errno> {
        while !self.is_stopped() {
            match call() {
                Err(Errno::INTR) => {}
                result => return result.map(Some),
            }
        }
        Ok(None)
    }

    /// Runs a call that may block for long, such as file I/O, and counts its duration as time that the worker was
    /// blocked.
    pub(crate) fn count_as_blocked<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let began = self.begin_blocking_call();
        let result = call();
        self.end_blocking_call(began, None);
        result
    }

    /// Records an interval of the training job's ground truth.
    pub(crate) fn trace_interval(&self, step: u32, phase: u32, start_ns: u64, end_ns: u64) {
        let index = self.record.traced_entries.load(Relaxed);
        if let Some(entry) = usize::try_from(index)
            .ok()
            .and_then(|index| self.trace.get(index))
        {
            entry.step.store(step, Relaxed);
            entry.phase.store(phase, Relaxed);
            entry.start_ns.store(start_ns, Relaxed);
            entry.end_ns.store(end_ns, Relaxed);
        }
        self.record.traced_entries.store(index + 1, Release);
    }

    fn begin_blocking_call(&mut self) -> u64 {
        self.record_gap_since_last_call();
        self.record.is_blocked.store(1, Relaxed);
        self.last_seen_ns
    }

    fn end_blocking_call(&mut self, began_ns: u64, woken_at_ns: Option<u64>) {
        let now = clock::now_ns();
        // Time in which the worker was blocked does not count as a gap.
        self.last_seen_ns = now;
        self.record.last_seen_ns.store(now, Relaxed);
        self.record.is_blocked.store(0, Relaxed);
        self.record
            .blocked_times
            .record(now.saturating_sub(began_ns));
        if let Some(woken_at_ns) = woken_at_ns {
            self.record
                .wake_latency
                .record(now.saturating_sub(woken_at_ns.max(began_ns)));
        }
    }

    fn record_gap_since_last_call(&mut self) {
        let now = clock::now_ns();
        let gap = now.saturating_sub(self.last_seen_ns);
        self.last_seen_ns = now;
        self.record.last_seen_ns.store(now, Relaxed);
        if gap > self.record.largest_gap_ns.load(Relaxed) {
            self.record.largest_gap_ns.store(gap, Relaxed);
            self.record.largest_gap_at_ns.store(now - gap, Relaxed);
            self.record.largest_gap_cpu.store(self.cpu as u32, Relaxed);
        }
        let cpu = sched_getcpu();
        if cpu != self.cpu {
            self.cpu = cpu;
            add_to_own_counter(&self.record.migrations, 1);
            self.record_current_cpu();
        }
        if now - self.kernel_counters_read_at_ns >= KERNEL_COUNTER_READ_INTERVAL_NS {
            self.kernel_counters_read_at_ns = now;
            self.refresh_counters();
        }
    }

    fn record_current_cpu(&self) {
        self.record.cpu.store(self.cpu as u32, Relaxed);
        let cpu = self.cpu.min(MAX_CPUS - 1);
        self.record.cpus[cpu / 64].fetch_or(1 << (cpu % 64), Relaxed);
    }

    fn refresh_counters(&self) {
        let kernel = &self.record.kernel_counters;
        let (voluntary, involuntary) = context_switches();
        kernel.voluntary_switches.store(voluntary, Relaxed);
        kernel.involuntary_switches.store(involuntary, Relaxed);
        kernel.cpu_ns.store(clock::thread_cpu_ns(), Relaxed);
        if let Some(run_delay) = procfs::own_run_delay_ns() {
            kernel.run_delay_plus_one.store(run_delay + 1, Relaxed);
        }
    }
}

/// Adds to a counter that only this worker writes.
fn add_to_own_counter(counter: &AtomicU64, value: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(value), Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEAM_OF_ONE: WorkerTeam<'_> = WorkerTeam {
        index: 0,
        size: 1,
        members_are_independent: true,
        slots: &[],
        pipes: &[],
    };

    #[test]
    fn gaps_before_stop_and_before_end_are_recorded() {
        let shared = SharedState::new(1, 0, 0).unwrap();
        let record = shared.record(0);
        let mut worker = Worker::begin_first_round(&shared, 0, 0, TEAM_OF_ONE, &[]);
        shared.request_stop();
        std::thread::sleep(Duration::from_millis(20));
        assert!(!worker.should_do_another_round());
        assert!(record.largest_gap_ns.load(Relaxed) >= 20_000_000);
        std::thread::sleep(Duration::from_millis(40));
        worker.write_final_numbers();
        assert!(record.largest_gap_ns.load(Relaxed) >= 40_000_000);
    }

    #[test]
    fn held_worker_sleeps_and_holding_is_not_counted() {
        let shared = SharedState::new(1, 0, 0).unwrap();
        let record = shared.record(0);
        let mut worker = Worker::begin_first_round(&shared, 0, 0, TEAM_OF_ONE, &[]);
        shared.set_pace(WorkerPace::HoldUntilStop);
        assert!(
            worker.should_do_another_round(),
            "a worker without a round is not held"
        );
        worker.count_round(1);
        let stop = || {
            while record.ended_ns.load(Relaxed) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(20));
            let stopped_ns = clock::now_ns();
            shared.request_stop();
            stopped_ns
        };
        let stopped_ns = std::thread::scope(|scope| {
            let stopping = scope.spawn(stop);
            assert!(!worker.should_do_another_round());
            stopping.join().unwrap()
        });
        assert!(
            clock::now_ns() >= stopped_ns,
            "it came back before the stop"
        );
        worker.write_final_numbers();
        let ended_ns = record.ended_ns.load(Relaxed);
        assert!(ended_ns + 20_000_000 <= stopped_ns);
        assert!(
            record.largest_gap_ns.load(Relaxed) <= ended_ns - record.first_run_ns.load(Relaxed)
        );
        assert_eq!(record.blocked_times.snapshot().count, 0);
        assert_eq!(record.wake_latency.snapshot().count, 0);
        assert_eq!(shared.passed_count(WorkerStage::FirstRoundDone), 1);
    }

    #[test]
    fn worker_that_team_members_need_is_not_held() {
        let shared = SharedState::new(1, 0, 0).unwrap();
        let team = WorkerTeam {
            members_are_independent: false,
            ..TEAM_OF_ONE
        };
        let mut worker = Worker::begin_first_round(&shared, 0, 0, team, &[]);
        shared.set_pace(WorkerPace::HoldUntilStop);
        worker.count_round(1);
        assert!(worker.should_do_another_round());
        assert_eq!(shared.record(0).ended_ns.load(Relaxed), 0);
    }

    #[test]
    fn first_round_stage_is_passed_after_round_or_at_end() {
        let shared = SharedState::new(2, 0, 0).unwrap();
        let busy = Worker::begin_first_round(&shared, 0, 0, TEAM_OF_ONE, &[]);
        let mut idle = Worker::begin_first_round(&shared, 1, 1, TEAM_OF_ONE, &[]);
        assert_eq!(shared.passed_count(WorkerStage::Running), 2);
        assert_eq!(shared.passed_count(WorkerStage::FirstRoundDone), 0);
        busy.count_round(1);
        busy.count_round(1);
        assert_eq!(shared.passed_count(WorkerStage::FirstRoundDone), 1);
        idle.write_final_numbers();
        assert_eq!(shared.passed_count(WorkerStage::FirstRoundDone), 2);
    }
}
