//! The overhead of the probes on one process, and how often it calls.

use std::collections::BTreeMap;

use super::call_counts::CountersBySymbol;

/// The cost of the probes to one process.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ProcessCost {
    /// Probed calls per second of the process's busiest thread.
    pub busiest_calls_per_second: f64,
    /// Overhead of the process's busiest thread, as a share of the thread's time.
    pub busiest_thread_overhead: f64,
    /// Overhead of all threads of the process so far, in CPU seconds.
    pub overhead_cpu_seconds: f64,
}

/// Overhead and call rates, measured once per round.
#[derive(Debug, Default)]
pub(in crate::observer) struct ProcessOverhead {
    pub(in crate::observer) cost: ProcessCost,
    /// Overhead of permanent probes on the busiest thread, as a share of its time.
    pub(in crate::observer) permanent_cost: f64,
    /// Number of consecutive rounds in which the overhead was above the ceiling although frequent functions are
    /// sampled.
    pub(in crate::observer) rounds_over_ceiling: u32,
    /// Whether the calls of the process are not counted for a while, because its overhead stayed above the ceiling.
    pub(in crate::observer) is_excluded: bool,
    hits_before: u64,
    counters_before: CountersBySymbol,
    /// Calls per second of each function in the last round.
    calls_per_second: BTreeMap<usize, f64>,
}

impl ProcessOverhead {
    /// Measures the overhead and the call rates of a round that took `elapsed` seconds. `hits` and `counters` are totals;
    /// `busiest` is the probe hits per second of the busiest thread.
    pub(super) fn measure_round(
        &mut self,
        counters: &CountersBySymbol,
        hits: u64,
        busiest: f64,
        ns_per_call: f64,
        elapsed: f64,
    ) {
        self.calls_per_second.clear();
        for (symbol, now) in counters {
            let before = self.counters_before.get(symbol);
            let calls = now
                .calls
                .wrapping_sub(before.map_or(0, |before| before.calls));
            if calls > 0 && elapsed > 0.0 {
                self.calls_per_second
                    .insert(*symbol, calls as f64 / elapsed);
            }
        }
        self.counters_before.clone_from(counters);
        self.add_hits(hits, ns_per_call);
        // Smoothed, because windows make the overhead jump.
        let share = busiest.min(self.total_rate()) * ns_per_call / 1e9;
        self.cost.busiest_calls_per_second = busiest;
        self.cost.busiest_thread_overhead = 0.9 * self.cost.busiest_thread_overhead + 0.1 * share;
    }

    /// Adds the overhead of the probe hits since the last call.
    pub(super) fn add_hits(&mut self, hits: u64, ns_per_call: f64) {
        let new = hits.saturating_sub(self.hits_before);
        self.hits_before = hits;
        self.cost.overhead_cpu_seconds += new as f64 * ns_per_call / 1e9;
    }

    /// Probed calls per second of all threads in the last round.
    fn total_rate(&self) -> f64 {
        self.calls_per_second.values().sum()
    }

    /// The functions for which `is_wanted` holds, with their calls per second in the last round, most frequent first.
    pub(in crate::observer) fn call_rates(
        &self,
        wanted: impl Fn(usize) -> bool,
    ) -> Vec<(usize, f64)> {
        let rates = self.calls_per_second.iter();
        let mut rates: Vec<(usize, f64)> = rates
            .filter(|(symbol, _)| wanted(**symbol))
            .map(|(symbol, rate)| (*symbol, *rate))
            .collect();
        rates.sort_by(|a, b| b.1.total_cmp(&a.1));
        rates
    }

    /// Whether several threads call at once, which makes a probed call more expensive.
    pub(in crate::observer) fn is_contended(&self) -> bool {
        self.total_rate() > 1.5 * self.cost.busiest_calls_per_second
    }

    /// Upper bound of the share of all calls that the busiest thread makes.
    pub(super) fn busiest_share(&self) -> f64 {
        let (busiest, total) = (self.cost.busiest_calls_per_second, self.total_rate());
        match busiest > 0.0 && total > 0.0 {
            true => (busiest / total).min(1.0),
            false => 1.0,
        }
    }
}
