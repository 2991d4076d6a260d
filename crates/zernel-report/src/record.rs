//! One process over time, sampled by snapshots.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use rustix::thread::CpuSet;
use zernel_model::snapshot;

use super::process::{ProcessReport, TrainingTime};
use super::steps::StepLog;
use super::times::ProcessTimes;

/// Most samples kept. Beyond that, every second one is dropped.
const MAX_KEPT_SAMPLES: usize = 1024;

/// Oldest time that the utilization of a GPU may be about: the driver samples it for about 0.2 s, and it is read every 0.2 s.
const MAX_GPU_READING_AGE_NS: u64 = 400_000_000;

/// State of a process at one time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RecordSample {
    /// CLOCK_MONOTONIC, in nanoseconds.
    pub(crate) at_ns: u64,
    /// Its times so far.
    pub(crate) times: ProcessTimes,
    /// GPU memory in use.
    pub(crate) memory_bytes: u64,
}

/// A process over time.
#[derive(Debug, Clone, Default)]
pub struct ProcessRecord {
    /// Time of the program's first probed call. An exec changes it.
    first_seen_ns: u64,
    /// From its start to that call, if known.
    before_first_call_seconds: Option<f64>,
    latest_report: ProcessReport,
    /// Totals from before it was attached to. They do not count.
    baseline: Option<ProcessReport>,
    samples: Vec<RecordSample>,
    steps: StepLog,
    /// Time in which its GPUs were busy. `None`: NVML reports no utilization.
    gpu_busy_seconds: Option<f64>,
    /// Last reading of the GPUs' busy time. It counts from the begin of observing, not of the process.
    gpu_busy_reading: Option<f64>,
    /// Pids of all processes that used its GPUs, as far as they are known.
    gpu_users: BTreeSet<u32>,
    /// CPUs in its affinity mask. Empty: unknown.
    pub cpus: CpuSet,
    /// Seconds for which CPU limits had throttled each of its cgroups when recording began.
    throttled_at_begin: BTreeMap<PathBuf, f64>,
    /// Seconds for which the limit of one of its cgroups has throttled it since then: the largest figure.
    throttled_seconds: f64,
}

impl ProcessRecord {
    /// A process that is observed from its start on. `asleep_ns` is the time that the machine was suspended since boot:
    /// start times include it, probe timestamps do not.
    pub fn for_new_process(process: &snapshot::ProcessSnapshot, asleep_ns: u64) -> Self {
        let start_ns = process.start_ns.saturating_sub(asleep_ns);
        let before_ns = process.first_seen_ns.saturating_sub(start_ns);
        Self {
            first_seen_ns: process.first_seen_ns,
            before_first_call_seconds: Some(before_ns as f64 / 1e9),
            ..Self::default()
        }
    }

    /// A process that ran before it was attached to. Only what the process does from now on counts.
    pub fn for_running_process(process: &snapshot::ProcessSnapshot) -> Self {
        Self {
            first_seen_ns: process.first_seen_ns,
            baseline: Some(ProcessReport::new(process)),
            steps: StepLog::for_running_process(&process.steps),
            ..Self::default()
        }
    }

    /// Sets for how many seconds the CPU limit of each of its cgroups has throttled threads since the cgroup was created.
    pub fn set_throttled_seconds(&mut self, by_cgroup: BTreeMap<PathBuf, f64>) {
        let mut largest: f64 = 0.0;
        for (cgroup, seconds) in by_cgroup {
            let begin = self.throttled_at_begin.entry(cgroup).or_insert(seconds);
            largest = largest.max(seconds - *begin);
        }
        self.throttled_seconds = self.throttled_seconds.max(largest);
    }

    /// Adds the current state of the process.
    pub fn add_sample(&mut self, process: &snapshot::ProcessSnapshot, now_ns: u64) {
        match process.first_seen_ns.cmp(&self.first_seen_ns) {
            Ordering::Equal => {}
            // The snapshot still has the program from before an exec.
            Ordering::Less => return,
            Ordering::Greater => {
                *self = Self {
                    first_seen_ns: process.first_seen_ns,
                    throttled_at_begin: std::mem::take(&mut self.throttled_at_begin),
                    throttled_seconds: self.throttled_seconds,
                    ..Self::default()
                };
            }
        }
        let report = ProcessReport::new(process);
        let report = match &self.baseline {
            Some(baseline) => report.subtract_baseline(baseline),
            None => report,
        };
        self.latest_report = report;
        self.latest_report.times.throttled_seconds = self.throttled_seconds;
        self.steps.add_new_steps(&process.steps);
        let ended_ns_ago = (1e9 * process.ended_seconds_ago.unwrap_or(0.0)) as u64;
        let mut sample = RecordSample {
            at_ns: now_ns.saturating_sub(ended_ns_ago),
            times: self.latest_report.times,
            memory_bytes: process
                .probes
                .gpu_mem
                .memory
                .iter()
                .map(|memory| memory.bytes)
                .sum(),
        };
        self.gpu_users.extend(&process.probes.gpu_mem.gpu_users);
        let last = self.samples.last();
        if let Some(reading) = process.probes.gpu_mem.gpu_busy_seconds {
            let before = self.gpu_busy_reading.replace(reading).unwrap_or(reading);
            let since = last.map_or(0.0, |last| last.times.wall_seconds);
            // The mean over its GPUs jumps when the process begins to use another one.
            let elapsed = (sample.times.wall_seconds - since).max(0.0);
            *self.gpu_busy_seconds.get_or_insert(0.0) += (reading - before).clamp(0.0, elapsed);
        }
        sample.times.gpu_busy_seconds = self.gpu_busy_seconds;
        self.latest_report.times.gpu_busy_seconds = self.gpu_busy_seconds;
        if last.is_none_or(|last| last.at_ns < sample.at_ns) {
            self.samples.push(sample);
        }
        if self.samples.len() > MAX_KEPT_SAMPLES {
            let mut is_odd = false;
            self.samples.retain(|_| {
                is_odd = !is_odd;
                is_odd
            });
        }
    }

    /// The report on the process.
    pub fn into_report(self) -> ProcessReport {
        let Self {
            latest_report: mut latest,
            samples,
            steps,
            before_first_call_seconds,
            gpu_users,
            cpus,
            ..
        } = self;
        latest.gpu_users = gpu_users;
        latest.cpus = cpus;
        latest.before_first_call_seconds = before_first_call_seconds;
        if let Some((report, begin_ns, end_ns)) = steps.into_report() {
            let begin = interpolated_times_at(&samples, begin_ns);
            let end = interpolated_times_at(&samples, end_ns);
            latest.training = begin.zip(end).map(|(begin, end)| TrainingTime {
                begin_seconds: begin.wall_seconds,
                times: ProcessTimes {
                    gpu_busy_seconds: gpu_busy_between(&samples, begin_ns, end_ns),
                    ..end.combine_with(&begin, |end, begin| (end - begin).max(0.0))
                },
            });
            latest.steps = Some(report);
        }
        latest.timeline = samples;
        latest
    }
}

/// How long the GPU was busy between two times. The first readings may be about the time before, so the rate after them
/// counts for all of the time.
fn gpu_busy_between(samples: &[RecordSample], begin_ns: u64, end_ns: u64) -> Option<f64> {
    let span_ns = end_ns.saturating_sub(begin_ns);
    let steady_ns = begin_ns + MAX_GPU_READING_AGE_NS.min(span_ns / 2);
    let busy_at = |at_ns| interpolated_times_at(samples, at_ns)?.gpu_busy_seconds;
    let busy = (busy_at(end_ns)? - busy_at(steady_ns)?).max(0.0);
    Some(busy * span_ns as f64 / (end_ns - steady_ns).max(1) as f64)
}

/// The times of a process at `at_ns`, interpolated between samples.
fn interpolated_times_at(samples: &[RecordSample], at_ns: u64) -> Option<ProcessTimes> {
    let after = samples.partition_point(|sample| sample.at_ns < at_ns);
    let Some(next) = samples.get(after) else {
        return samples.last().map(|sample| sample.times);
    };
    // All times were 0 when observing began, before the first sample.
    let wall_ns = (1e9 * next.times.wall_seconds) as u64;
    let begin = RecordSample {
        at_ns: next.at_ns.saturating_sub(wall_ns),
        times: ProcessTimes {
            gpu_busy_seconds: Some(0.0),
            ..ProcessTimes::default()
        },
        memory_bytes: 0,
    };
    let before = after.checked_sub(1).map_or(begin, |index| samples[index]);
    let span = next.at_ns.saturating_sub(before.at_ns).max(1) as f64;
    let share = at_ns.saturating_sub(before.at_ns) as f64 / span;
    Some(next.times.combine_with(&before.times, |next, before| {
        before + share * (next - before)
    }))
}

#[cfg(test)]
mod tests {
    use zernel_model::snapshot::StepSnapshot;
    use zernel_phase::steps::{Step, StepMark};

    use super::*;

    fn sample(at_ns: u64, wall_seconds: f64, cpu_seconds: f64) -> RecordSample {
        let times = ProcessTimes {
            wall_seconds,
            cpu_seconds,
            ..ProcessTimes::default()
        };
        RecordSample {
            at_ns,
            times,
            memory_bytes: 0,
        }
    }

    /// A process with `steps` steps of one second. The snapshot has the last 64.
    fn process_with_steps(
        first_seen_ns: u64,
        steps: u64,
        observed_seconds: f64,
    ) -> snapshot::ProcessSnapshot {
        let step = |number| Step {
            begin_ns: first_seen_ns + 1_000_000_000 * number,
            end_ns: first_seen_ns + 1_000_000_000 * (number + 1),
            launches: None,
            marks: [0; 7],
            lacks_marks: false,
        };
        snapshot::ProcessSnapshot {
            first_seen_ns,
            observed_seconds,
            steps: StepSnapshot {
                boundary: Some(StepMark::Backward),
                count: steps,
                recent: (steps.saturating_sub(64)..steps).map(step).collect(),
                ..StepSnapshot::default()
            },
            ..snapshot::ProcessSnapshot::default()
        }
    }

    fn step_count_and_begin(record: ProcessRecord) -> (u64, f64) {
        let report = record.into_report();
        let steps = report.steps.expect("steps");
        let training = report.training.expect("a training loop");
        (steps.count, training.begin_seconds)
    }

    #[test]
    fn a_process_that_exits_just_before_the_last_sample_keeps_its_steps() {
        let mut record = ProcessRecord::default();
        for seconds in 1..=99 {
            record.add_sample(
                &process_with_steps(1, seconds, seconds as f64),
                1_000_000_000 * seconds,
            );
        }
        // This sample was taken while the process exited, so the process ended a little earlier.
        record.add_sample(&process_with_steps(1, 100, 100.01), 100_010_000_000);
        record.add_sample(&process_with_steps(1, 100, 100.0), 100_200_000_000);
        let (steps, begin_seconds) = step_count_and_begin(record);
        assert_eq!(steps, 100);
        assert!(begin_seconds < 0.01, "{begin_seconds}");
    }

    #[test]
    fn start_up_time_is_known_for_new_processes_only() {
        let process = snapshot::ProcessSnapshot {
            start_ns: 107_000_000_000,
            ..process_with_steps(12_500_000_000, 10, 10.0)
        };
        let before = |mut record: ProcessRecord, process: &snapshot::ProcessSnapshot| {
            record.add_sample(process, 30_000_000_000);
            record.into_report().before_first_call_seconds
        };
        let started = ProcessRecord::for_new_process(&process, 100_000_000_000);
        assert_eq!(before(started.clone(), &process), Some(5.5));
        assert_eq!(
            before(ProcessRecord::for_running_process(&process), &process),
            None
        );
        // After an exec, the first call is not the first of the process.
        let later = process_with_steps(20_000_000_000, 5, 5.0);
        assert_eq!(before(started, &later), None);
    }

    #[test]
    fn throttling_counts_from_the_begin_of_the_record() {
        let mut record = ProcessRecord::default();
        // A cgroup above was throttled for longer, but not since the record began.
        for (seconds, throttled) in [(1, 50.0), (2, 50.5), (3, 52.0)] {
            let cgroups = [("/job", throttled), ("/", 500.0)];
            record.set_throttled_seconds(
                cgroups.map(|(path, seconds)| (path.into(), seconds)).into(),
            );
            let process = process_with_steps(1, seconds, seconds as f64);
            record.add_sample(&process, 1_000_000_000 * seconds);
        }
        assert_eq!(record.into_report().times.throttled_seconds, 2.0);
    }

    #[test]
    fn an_exec_begins_a_new_record() {
        let mut record = ProcessRecord::default();
        record.add_sample(&process_with_steps(1, 40, 40.0), 40_000_000_000);
        // Snapshots have both programs for a while, in any order.
        for order in [[0, 1], [1, 0]] {
            for which in order {
                let programs = [
                    process_with_steps(1, 40, 40.0),
                    process_with_steps(50_000_000_000, 30, 30.0),
                ];
                record.add_sample(&programs[which], 90_000_000_000);
            }
        }
        assert_eq!(step_count_and_begin(record).0, 30);
    }

    /// A GPU that was idle before the training is still shown as idle when it begins.
    #[test]
    fn readings_about_the_time_before_training_do_not_count() {
        let busy = |milliseconds: u64, gpu_busy_seconds| {
            let mut sample = sample(1_000_000 * milliseconds, milliseconds as f64 / 1e3, 0.0);
            sample.times.gpu_busy_seconds = Some(gpu_busy_seconds);
            sample
        };
        let samples = [busy(10_000, 0.0), busy(10_400, 0.1), busy(16_000, 5.14)];
        let between = |begin, end| gpu_busy_between(&samples, begin, end).unwrap();
        assert!((between(10_000_000_000, 16_000_000_000) - 5.4).abs() < 1e-9);
        // Of a short training, only its second half counts.
        assert!((between(10_000_000_000, 10_400_000_000) - 0.1).abs() < 1e-9);
    }

    #[test]
    fn times_are_interpolated_between_samples() {
        let samples = [
            sample(3_000_000_000, 2.0, 4.0),
            sample(5_000_000_000, 4.0, 5.0),
        ];
        let cpu_at = |at_ns| interpolated_times_at(&samples, at_ns).map(|times| times.cpu_seconds);
        for (at_ns, cpu) in [
            (0, 0.0),
            (1_000_000_000, 0.0),
            (2_000_000_000, 2.0),
            (3_000_000_000, 4.0),
            (4_000_000_000, 4.5),
            (9_000_000_000, 5.0),
        ] {
            assert_eq!(cpu_at(at_ns), Some(cpu), "{at_ns}");
        }
        assert_eq!(interpolated_times_at(&[], 7), None);
    }
}
