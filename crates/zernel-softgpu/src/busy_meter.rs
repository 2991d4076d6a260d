//! Measures the utilization of a device from its work. The end of each piece of work is known, and may be in the
//! future.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::clock;

/// Length of the time over which utilization is computed.
const UTILIZATION_WINDOW_NS: u64 = 500_000_000;
/// Least time between two kept past states; together the past states reach back further than [`UTILIZATION_WINDOW_NS`].
const MIN_PAST_STATE_INTERVAL_NS: u64 = 1 << 26;
const MAX_PAST_BUSY_STATES: usize = 16;
const BUSY_STATE_WORDS: usize = 3;

/// Number of words of a busy meter: the current state, the number of past states, and the past states.
pub(crate) const BUSY_METER_WORDS: usize =
    BUSY_STATE_WORDS + 1 + MAX_PAST_BUSY_STATES * BUSY_STATE_WORDS;

/// The busy time of one process on one device, in shared memory. One thread at a time writes it, any process reads it.
#[derive(Clone, Copy)]
pub(crate) struct BusyMeter<'a>(pub(crate) &'a [AtomicU64]);

/// The sum of all work that was known at one time: the total busy time of the device, and the end of the last work.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct BusyState {
    changed_at_ns: u64,
    busy_ns: u64,
    busy_until: u64,
}

impl BusyState {
    fn load(words: &[AtomicU64]) -> Self {
        let [at, busy, until] = [0, 1, 2].map(|index| words[index].load(Relaxed));
        Self {
            changed_at_ns: at,
            busy_ns: busy,
            busy_until: until,
        }
    }

    fn store(self, words: &[AtomicU64]) {
        words[0].store(self.changed_at_ns, Relaxed);
        words[1].store(self.busy_ns, Relaxed);
        words[2].store(self.busy_until, Relaxed);
    }

    /// Busy time from the beginning up to `time`, without work after `time`.
    fn busy_until(self, time: u64) -> u64 {
        self.busy_ns - self.busy_until.saturating_sub(time).min(self.busy_ns)
    }

    /// Adds work from `start` to `end`. While it overlaps with earlier work, the device is busy only once.
    fn add_work(&mut self, start: u64, end: u64) {
        let from = start.max(self.busy_until);
        self.busy_ns += end.saturating_sub(from);
        self.busy_until = self.busy_until.max(end);
    }
}

impl<'a> BusyMeter<'a> {
    fn current_state_words(self) -> &'a [AtomicU64] {
        &self.0[..BUSY_STATE_WORDS]
    }

    fn past_state_count(self) -> &'a AtomicU64 {
        &self.0[BUSY_STATE_WORDS]
    }

    fn past_state(self, number: u64) -> &'a [AtomicU64] {
        let start =
            BUSY_STATE_WORDS + 1 + number as usize % MAX_PAST_BUSY_STATES * BUSY_STATE_WORDS;
        &self.0[start..start + BUSY_STATE_WORDS]
    }

    pub(crate) fn add_busy_time(self, start: u64, end: u64) {
        self.add_busy_time_at(clock::now_ns(), start, end);
    }

    fn add_busy_time_at(self, now: u64, start: u64, end: u64) {
        let mut state = BusyState::load(self.current_state_words());
        let recorded = self.past_state_count().load(Relaxed);
        let last = recorded.checked_sub(1).map_or(0, |last| {
            BusyState::load(self.past_state(last)).changed_at_ns
        });
        if now >= last + MIN_PAST_STATE_INTERVAL_NS {
            BusyState {
                changed_at_ns: now,
                ..state
            }
            .store(self.past_state(recorded));
            self.past_state_count().store(recorded + 1, Relaxed);
        }
        state.add_work(start, end);
        state.store(self.current_state_words());
    }

    /// The share (0 to 1) of the last [`UTILIZATION_WINDOW_NS`] before `now` in which the device was busy.
    pub(crate) fn utilization(self, now: u64) -> f64 {
        let begin = now.saturating_sub(UTILIZATION_WINDOW_NS);
        let (begin, busy_time_known_before) = self.busy_time_known_before(begin);
        let busy = BusyState::load(self.current_state_words())
            .busy_until(now)
            .saturating_sub(busy_time_known_before);
        (busy as f64 / (now - begin).max(1) as f64).min(1.0)
    }

    /// The last moment at or before `time` at which the busy time is known exactly, and the busy time at that moment.
    ///
    /// A past state is exact at its own time. At later times it stays exact until the next past state, except during
    /// the first [`MIN_PAST_STATE_INTERVAL_NS`], in which changes are not recorded.
    fn busy_time_known_before(self, time: u64) -> (u64, u64) {
        let recorded = self.past_state_count().load(Relaxed);
        let mut later = BusyState::load(self.current_state_words());
        for number in (recorded.saturating_sub(MAX_PAST_BUSY_STATES as u64)..recorded).rev() {
            let past = BusyState::load(self.past_state(number));
            if past.changed_at_ns + MIN_PAST_STATE_INTERVAL_NS <= time {
                return (time, later.busy_until(time));
            }
            if past.changed_at_ns <= time {
                return (past.changed_at_ns, past.busy_until(past.changed_at_ns));
            }
            later = past;
        }
        (time, later.busy_until(time))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND_NS: u64 = 1_000_000;

    fn new_meter_words() -> Vec<AtomicU64> {
        (0..BUSY_METER_WORDS).map(|_| AtomicU64::new(0)).collect()
    }

    fn utilization_percent(words: &[AtomicU64], now: u64) -> u32 {
        (BusyMeter(words).utilization(now) * 100.0).round() as u32
    }

    #[test]
    fn utilization_of_steady_load_is_its_share() {
        let words = new_meter_words();
        for step in 100..400 {
            let now = step * 10 * MILLISECOND_NS;
            BusyMeter(&words).add_busy_time_at(now, now, now + 4 * MILLISECOND_NS);
            if step > 200 {
                assert!(
                    (39..=41).contains(&utilization_percent(&words, now + 7 * MILLISECOND_NS)),
                    "step {step}"
                );
            }
        }
    }

    #[test]
    fn queued_work_counts_only_while_it_runs() {
        let words = new_meter_words();
        let now = 10_000 * MILLISECOND_NS;
        BusyMeter(&words).add_busy_time_at(
            now,
            now + 1000 * MILLISECOND_NS,
            now + 3000 * MILLISECOND_NS,
        );
        assert_eq!(utilization_percent(&words, now + 500 * MILLISECOND_NS), 0);
        assert_eq!(utilization_percent(&words, now + 1250 * MILLISECOND_NS), 50);
        assert_eq!(
            utilization_percent(&words, now + 2500 * MILLISECOND_NS),
            100
        );
        assert_eq!(utilization_percent(&words, now + 9000 * MILLISECOND_NS), 0);
    }

    #[test]
    fn overlapping_work_is_busy_once() {
        let words = new_meter_words();
        let now = 10_000 * MILLISECOND_NS;
        for _ in 0..4 {
            BusyMeter(&words).add_busy_time_at(now, now, now + 250 * MILLISECOND_NS);
        }
        assert_eq!(utilization_percent(&words, now + 500 * MILLISECOND_NS), 50);
    }

    #[test]
    fn utilization_window_excludes_earlier_idle_time() {
        let words = new_meter_words();
        BusyMeter(&words).add_busy_time_at(
            1000 * MILLISECOND_NS,
            1000 * MILLISECOND_NS,
            1100 * MILLISECOND_NS,
        );
        BusyMeter(&words).add_busy_time_at(
            60_000 * MILLISECOND_NS,
            60_000 * MILLISECOND_NS,
            60_250 * MILLISECOND_NS,
        );
        assert_eq!(utilization_percent(&words, 60_300 * MILLISECOND_NS), 50);
    }
}
