//! What the scheduler has decided since it was loaded. `zernel sched` publishes these statistics as JSON; `zernel sched
//! --monitor` and the metrics of `zernel observe` read them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use zernel_phase::class::TaskClass;

use crate::aggregation::LatencyHistogram;

/// Calls a macro with the scheduler's counters: name and meaning.
#[macro_export]
macro_rules! for_each_sched_counter {
    ($callback:ident) => {
        $callback! {
            idle_wakeups "Wake-ups that found an idle CPU.",
            preempting_wakeups "Wake-ups that preempted another task.",
            queued "Times that a task waited in a queue.",
            kept "Times that a task ran on after its slice, because it was still first.",
            stolen "Times that a CPU took a task from another cache's queue.",
            throttled "Times that a task waited because of a cpu.max.",
            aged "Times that a task went to the front of its queue because it had waited for too long.",
            critical_wakeups "Wake-ups of critical threads that preempted another task.",
            critical_kept "Times that a critical thread was kept on its CPU.",
            guarantee_hits "Decisions in which a CPU had to pay the guarantee while it ran a critical thread, or one or a loader waited.",
            handoffs "Threads that a critical thread woke, and that became critical.",
            raised "Threads that waited in a queue when a critical thread of their process blocked, and that rose.",
            feed_wakeups "Wake-ups of loaders that preempted another task.",
            feed_kept "Times that a loader was kept on its CPU.",
            lent "Turns in which a task ran on the CPU of a thread that spins until the GPU is done.",
            moved_to_gpu "Wake-ups of threads that left their NUMA node for that of their GPU.",
            uncounted_cgroups "Cgroups that the scheduler had no room for. Their tasks count as tasks of the root.",
        }
    };
}

macro_rules! declare_sched_counters {
    ($($name:ident $meaning:literal,)*) => {
        /// How often the scheduler decided what.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
        #[serde(default)]
        pub struct SchedCounters {
            $(#[doc = $meaning]
            pub $name: u64,)*
        }

        impl SchedCounters {
            /// Names and values.
            pub fn names_and_values(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }

            /// What was counted since `earlier`.
            #[must_use]
            pub fn counted_since(&self, earlier: &Self) -> Self {
                Self { $($name: self.$name.saturating_sub(earlier.$name)),* }
            }
        }
    };
}
for_each_sched_counter!(declare_sched_counters);

/// How the threads of one class ran and waited.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ClassStatistics {
    /// How often a thread of the class was chosen to run.
    pub runs: u64,
    /// Time on CPUs.
    pub run_ns: u64,
    /// Wake-ups and forks after which a thread has run.
    pub wakeups: u64,
    /// Sum of the times between a wake-up or fork and running, in nanoseconds.
    pub wait_ns: u64,
    /// Waits by power of two: the first bucket ends at [`FIRST_WAIT_BUCKET_ENDS_NS`], each further one at twice the end
    /// before, and the last holds all longer waits.
    pub wait_buckets: Vec<u64>,
}

/// End of the first bucket of [`ClassStatistics::wait_buckets`].
pub const FIRST_WAIT_BUCKET_ENDS_NS: u64 = 1 << 10;

impl ClassStatistics {
    /// Adds what another CPU counted.
    pub fn add_from_cpu(&mut self, other: &Self) {
        self.runs += other.runs;
        self.run_ns += other.run_ns;
        self.wakeups += other.wakeups;
        self.wait_ns += other.wait_ns;
        let length = self.wait_buckets.len().max(other.wait_buckets.len());
        self.wait_buckets.resize(length, 0);
        for (ours, theirs) in self.wait_buckets.iter_mut().zip(&other.wait_buckets) {
            *ours += theirs;
        }
    }

    /// What was counted since `earlier`.
    #[must_use]
    pub fn counted_since(&self, earlier: &Self) -> Self {
        let before = earlier.wait_buckets.iter().chain(std::iter::repeat(&0));
        let buckets = self.wait_buckets.iter().zip(before);
        Self {
            runs: self.runs.saturating_sub(earlier.runs),
            run_ns: self.run_ns.saturating_sub(earlier.run_ns),
            wakeups: self.wakeups.saturating_sub(earlier.wakeups),
            wait_ns: self.wait_ns.saturating_sub(earlier.wait_ns),
            wait_buckets: buckets
                .map(|(now, before)| now.saturating_sub(*before))
                .collect(),
        }
    }

    /// Times from a wake-up to running. A quantile is that of the end of its bucket: at most twice as long as the exact
    /// one, within the error of [`LatencyHistogram`].
    #[must_use]
    pub fn wait_histogram(&self) -> LatencyHistogram {
        let mut histogram = LatencyHistogram::default();
        let (mut longest_ns, mut shortest_ns) = (0, u64::MAX);
        let mut ends_ns = FIRST_WAIT_BUCKET_ENDS_NS;
        for count in &self.wait_buckets {
            if *count > 0 {
                longest_ns = ends_ns - 1;
                shortest_ns = shortest_ns.min(longest_ns);
                histogram.record_bucket_counts(longest_ns, *count);
            }
            ends_ns = ends_ns.saturating_mul(2);
        }
        if histogram.count > 0 {
            histogram.add_sum_and_extremes(self.wait_ns, shortest_ns, longest_ns);
        }
        histogram
    }
}

/// How much CPU time a tenant took, and how much it owes for its critical threads and loaders.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TenantStatistics {
    /// Path of the tenant's cgroup below the root of all cgroups; `/` is the root.
    pub cgroup: String,
    /// Time that tasks of the tenant have spent on CPUs, in nanoseconds.
    pub run_ns: u64,
    /// Time that critical threads and loaders of the tenant took beyond their share, and that the tenant's other tasks
    /// have not paid yet.
    pub debt_ns: u64,
}

/// What the scheduler publishes.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SchedulerStatistics {
    /// The process that keeps the scheduler loaded.
    pub pid: u32,
    /// When these statistics were read, in nanoseconds of the monotonic clock.
    pub taken_ns: u64,
    /// When the scheduler was loaded.
    pub since_ns: u64,
    /// How often the scheduler was loaded again after the kernel had ejected it.
    pub restarts: u32,
    /// Time that a task runs before others get their turn.
    pub slice_us: u64,
    /// Value of `--privilege`: the processes with critical threads that run first.
    pub privilege: String,
    /// Part of their fair share of CPU time that other tasks keep beside critical threads, 0 to 1.
    pub guarantee: f64,
    /// Value of `--lend`: whether threads that spin until the GPU is done lend their CPU.
    pub lend: bool,
    /// CPU time of the guarantee that other tasks have not received yet, in microseconds.
    pub loss_us: u64,
    /// Time that tasks ran on CPUs that others lent them, in nanoseconds.
    pub lent_ns: u64,
    /// Decisions.
    pub counters: SchedCounters,
    /// How the threads of each class ran and waited.
    pub classes: BTreeMap<TaskClass, ClassStatistics>,
    /// The tenants that took most time since loading, at most [`Self::MAX_PUBLISHED_TENANTS`]; none without privilege.
    pub tenants: Vec<TenantStatistics>,
}

impl SchedulerStatistics {
    /// The largest age of statistics of a scheduler that runs. A scheduler that runs publishes once a second.
    pub const MAX_AGE_OF_RUNNING_NS: u64 = 3_000_000_000;

    /// The largest number of tenants that are published.
    pub const MAX_PUBLISHED_TENANTS: usize = 16;

    /// Whether the scheduler runs at `now_ns` of the monotonic clock.
    #[must_use]
    pub fn is_scheduler_running(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.taken_ns) < Self::MAX_AGE_OF_RUNNING_NS
    }

    /// Returns what was counted after the statistics `earlier`; everything if the scheduler was loaded later.
    #[must_use]
    pub fn counted_since(&self, earlier: &Self) -> Self {
        if (self.pid, self.since_ns) != (earlier.pid, earlier.since_ns) {
            return self.clone();
        }
        let nothing = ClassStatistics::default();
        let classes = self.classes.iter().map(|(class, now)| {
            let before = earlier.classes.get(class).unwrap_or(&nothing);
            (*class, now.counted_since(before))
        });
        Self {
            counters: self.counters.counted_since(&earlier.counters),
            classes: classes.collect(),
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class_with_wait_buckets(wait_buckets: Vec<u64>) -> ClassStatistics {
        let wakeups = wait_buckets.iter().sum();
        ClassStatistics {
            runs: wakeups + 1,
            run_ns: 5000,
            wakeups,
            wait_ns: 1000 * wakeups,
            wait_buckets,
        }
    }

    #[test]
    fn quantiles_are_the_ends_of_their_buckets() {
        let waits = class_with_wait_buckets(vec![98, 0, 0, 2]).wait_histogram();
        assert_eq!(waits.count, 100);
        assert_eq!(waits.sum_ns, 100_000);
        assert_eq!(waits.p50_ns(), 1023);
        let error = (8191.0 - waits.p99_ns() as f64) / 8191.0;
        assert!((0.0..=LatencyHistogram::MAX_QUANTILE_ERROR).contains(&error));
        assert_eq!(
            class_with_wait_buckets(Vec::new()).wait_histogram(),
            LatencyHistogram::default()
        );
        assert_eq!(
            class_with_wait_buckets(vec![0; 28]).wait_histogram(),
            LatencyHistogram::default()
        );
    }

    #[test]
    fn counted_since_returns_the_difference() {
        let mut earlier = SchedulerStatistics {
            pid: 7,
            since_ns: 1,
            ..SchedulerStatistics::default()
        };
        earlier.counters.queued = 10;
        earlier
            .classes
            .insert(TaskClass::Feed, class_with_wait_buckets(vec![1, 2]));
        let mut later = earlier.clone();
        later.counters.queued = 15;
        later
            .classes
            .insert(TaskClass::Feed, class_with_wait_buckets(vec![1, 5, 1]));
        later
            .classes
            .insert(TaskClass::Other, class_with_wait_buckets(vec![4]));
        let interval = later.counted_since(&earlier);
        assert_eq!(interval.counters.queued, 5);
        assert_eq!(interval.classes[&TaskClass::Feed].wakeups, 4);
        assert_eq!(interval.classes[&TaskClass::Feed].wait_buckets, [0, 3, 1]);
        assert_eq!(interval.classes[&TaskClass::Other].wakeups, 4);
        // A scheduler that was loaded again counts from zero.
        later.since_ns = 2;
        assert_eq!(later.counted_since(&earlier), later);
    }

    #[test]
    fn statistics_of_another_version_are_parsed() {
        let text = r#"{"pid": 7, "new": 1, "counters": {"queued": 3, "new": 4}}"#;
        let read: SchedulerStatistics = serde_json::from_str(text).unwrap();
        assert_eq!((read.pid, read.counters.queued), (7, 3));
    }
}
