//! The report of a worker, and a text table of reports.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use serde::{Deserialize, Serialize};

use crate::clock;
use crate::exit_info::WorkerExitInfo;
use crate::handle::WorkloadHandle;
use crate::histogram::Histogram;
use crate::shared_state::{RECORD_MAGIC, TraceEntry, WorkerRecord, WorkerStage};
use crate::stop_workers;
use crate::work::ml_training::PHASE_NAMES;
use crate::worker_settings::Setting;

/// The report of one worker. Times are nanoseconds; stamps are `CLOCK_MONOTONIC`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// The worker's index in the handle.
    pub worker: usize,
    /// The name of the worker's group.
    pub group: String,
    /// Pid of the worker's process: a process of the worker's own, its container, or the caller.
    pub pid: i32,
    /// The worker's kernel thread id.
    pub tid: i32,
    /// Units of work done. 0 if the worker did not complete, so that a check for starvation catches it.
    pub work_units: u64,
    /// Rounds of the worker's loop, also if the worker did not complete.
    pub iterations: u64,
    /// Whether the worker returned from its work function when it should.
    pub completed: bool,
    /// How the worker ended, if it did not complete.
    pub exit_info: Option<WorkerExitInfo>,
    /// Units of work done, if the worker did not complete.
    pub unfinished_work_units: u64,
    /// Time from the start of all workers until this worker first ran; `None` if it never ran.
    pub start_delay_ns: Option<u64>,
    /// Time from the worker's first run until its end. For a worker that was left behind: until the report. For a
    /// worker that was held while others did their first round: until it was held.
    pub wall_ns: u64,
    /// CPU time that the worker used.
    pub cpu_ns: u64,
    /// The worker's wall time less its CPU time: it was blocked or waited for a CPU.
    pub off_cpu_ns: u64,
    /// Time that the worker was runnable but not running; `None` on kernels without schedstat.
    pub run_delay_ns: Option<u64>,
    /// The longest time between two rounds in which the worker was not blocked; `None` if it never ran.
    pub largest_gap: Option<WorkGap>,
    /// How often the worker was seen on another CPU than before.
    pub migrations: u64,
    /// The CPUs that the worker was seen on.
    pub cpus_used: BTreeSet<usize>,
    /// Context switches because the worker blocked.
    pub voluntary_switches: u64,
    /// Context switches because the worker was preempted.
    pub involuntary_switches: u64,
    /// Times from a wake-up (the waker's stamp or the timer's expiry) until the worker ran again.
    pub wake_latency: Histogram,
    /// Times from the start of a blocking call until the worker ran again.
    pub blocked: Histogram,
    /// Settings that the workload file asks for and the kernel refused.
    pub setting_errors: Vec<SettingError>,
    /// For a training job: when this worker was in which phase.
    pub phase_intervals: Vec<WorkerPhaseInterval>,
    /// Number of phase intervals that were not recorded, because shared memory had no room.
    pub lost_intervals: u64,
}

/// A time that a worker of a training job spent in one phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerPhaseInterval {
    /// The step of a trainer, or the batch of a loader, counted from 0.
    pub step: u32,
    /// The name of the phase, as the phase detector spells it.
    pub phase: String,
    /// Start of the phase, on `CLOCK_MONOTONIC`.
    pub start_ns: u64,
    /// End of the phase, on `CLOCK_MONOTONIC`.
    pub end_ns: u64,
}

/// The longest time between two rounds of a worker in which it was not blocked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkGap {
    /// Length of the gap in nanoseconds.
    pub ns: u64,
    /// Start of the gap, on `CLOCK_MONOTONIC`.
    pub at_ns: u64,
    /// The CPU that the worker was on before the gap.
    pub cpu: u32,
}

/// A setting of a worker that the kernel refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingError {
    /// The setting that was refused.
    pub setting: Setting,
    /// The kernel's error.
    pub error: String,
}

impl WorkerReport {
    /// Makes the report of a worker that was stopped.
    pub(crate) fn of_worker(handle: &WorkloadHandle, worker: usize) -> Self {
        let record = handle.shared.record(worker);
        let counters = &handle.shared.counters()[worker];
        let work_units = counters.work_units.load(Relaxed);
        let exit_info = stop_workers::exit_info(handle, worker)
            .or_else(|| is_record_corrupt(record).then_some(WorkerExitInfo::Corrupt));
        let completed = exit_info.is_none();
        let has_run = handle.shared.has_passed(worker, WorkerStage::Running)
            && record.first_run_ns.load(Relaxed) > 0;
        let ended_ns = ended_ns(record);
        let wall_ns = match has_run {
            true => ended_ns.saturating_sub(record.first_run_ns.load(Relaxed)),
            false => 0,
        };
        let cpu_ns = record.kernel_counters.cpu_ns();
        let (voluntary_switches, involuntary_switches) = record.kernel_counters.context_switches();
        let traced = record.traced_entries.load(Acquire);
        let phase_intervals = phase_intervals(handle, worker, traced);
        Self {
            worker,
            group: handle.plan.group_of(worker).name.clone(),
            pid: handle.process_pid_of_worker(worker),
            tid: record.tid.load(Relaxed),
            work_units: if completed { work_units } else { 0 },
            iterations: counters.iterations.load(Relaxed),
            completed,
            exit_info,
            unfinished_work_units: if completed { 0 } else { work_units },
            start_delay_ns: has_run.then(|| start_delay_ns(handle, record)),
            wall_ns,
            cpu_ns,
            off_cpu_ns: wall_ns.saturating_sub(cpu_ns),
            run_delay_ns: record.kernel_counters.run_delay_ns(),
            largest_gap: has_run.then(|| largest_gap(record, ended_ns)),
            migrations: record.migrations.load(Relaxed),
            cpus_used: cpus_used(record),
            voluntary_switches,
            involuntary_switches,
            wake_latency: record.wake_latency.snapshot(),
            blocked: record.blocked_times.snapshot(),
            setting_errors: setting_errors(record),
            lost_intervals: traced.saturating_sub(phase_intervals.len() as u64),
            phase_intervals,
        }
    }
}

fn is_record_corrupt(record: &WorkerRecord) -> bool {
    record.magic.load(Acquire) != RECORD_MAGIC || record.tid.load(Relaxed) <= 0
}

fn start_delay_ns(handle: &WorkloadHandle, record: &WorkerRecord) -> u64 {
    record
        .first_run_ns
        .load(Relaxed)
        .saturating_sub(handle.shared.header().started_ns.load(Relaxed))
}

/// When the worker ended; the present time if it has not ended.
fn ended_ns(record: &WorkerRecord) -> u64 {
    match record.ended_ns.load(Acquire) {
        0 => clock::now_ns(),
        ended_ns => ended_ns,
    }
}

/// The longest gap of a worker, including the last one, in which the worker ended.
fn largest_gap(record: &WorkerRecord, ended_ns: u64) -> WorkGap {
    let last_seen_ns = record.last_seen_ns.load(Relaxed);
    let closed = WorkGap {
        ns: record.largest_gap_ns.load(Relaxed),
        at_ns: record.largest_gap_at_ns.load(Relaxed),
        cpu: record.largest_gap_cpu.load(Relaxed),
    };
    let open = WorkGap {
        ns: ended_ns.saturating_sub(last_seen_ns),
        at_ns: last_seen_ns,
        cpu: record.cpu.load(Relaxed),
    };
    match record.is_blocked.load(Relaxed) == 0 && open.ns > closed.ns {
        true => open,
        false => closed,
    }
}

fn cpus_used(record: &WorkerRecord) -> BTreeSet<usize> {
    let bits = |(word, bits): (usize, u64)| {
        (0..64)
            .filter(move |bit| bits >> bit & 1 == 1)
            .map(move |bit| word * 64 + bit)
    };
    record
        .cpus
        .iter()
        .map(|word| word.load(Relaxed))
        .enumerate()
        .flat_map(bits)
        .collect()
}

fn phase_intervals(
    handle: &WorkloadHandle,
    worker: usize,
    traced: u64,
) -> Vec<WorkerPhaseInterval> {
    let entries = handle
        .shared
        .trace_entries(&handle.plan.worker_plan(worker).trace);
    let name = |phase: u32| PHASE_NAMES.get(phase as usize).unwrap_or(&PHASE_NAMES[0]);
    let interval = |entry: &TraceEntry| WorkerPhaseInterval {
        step: entry.step.load(Relaxed),
        phase: (*name(entry.phase.load(Relaxed))).to_owned(),
        start_ns: entry.start_ns.load(Relaxed),
        end_ns: entry.end_ns.load(Relaxed),
    };
    entries
        .iter()
        .take(usize::try_from(traced).unwrap_or(usize::MAX))
        .map(interval)
        .collect()
}

fn setting_errors(record: &WorkerRecord) -> Vec<SettingError> {
    let refused = |setting: Setting| match record.setting_errnos[setting as usize].load(Relaxed) {
        0 => None,
        errno => Some(SettingError {
            setting,
            error: io::Error::from_raw_os_error(errno).to_string(),
        }),
    };
    Setting::ALL.into_iter().filter_map(refused).collect()
}

/// Reports as a text table: one line per worker, and one line per failure.
#[derive(Debug, Clone, Copy)]
pub struct ReportTable<'a>(pub &'a [WorkerReport]);

impl fmt::Display for ReportTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let group_width = self
            .0
            .iter()
            .map(|report| report.group.chars().count())
            .max()
            .unwrap_or(0)
            .max(5);
        writeln!(
            f,
            "{:<group_width$} {:>7} {:>12} {:>8} {:>8} {:>9} {:>9} {:>9} {:>9} {:>6}  ended",
            "group",
            "tid",
            "units",
            "cpu s",
            "wall s",
            "queue ms",
            "gap ms",
            "wake p50",
            "wake p99",
            "migr"
        )?;
        for report in self.0 {
            let units = report.work_units + report.unfinished_work_units;
            writeln!(
                f,
                "{:<group_width$} {:>7} {:>12} {:>8.3} {:>8.3} {:>9} {:>9} {:>9} {:>9} {:>6}  {}",
                report.group,
                report.tid,
                units,
                ns_to_seconds(report.cpu_ns),
                ns_to_seconds(report.wall_ns),
                format_milliseconds(report.run_delay_ns),
                format_milliseconds(report.largest_gap.map(|gap| gap.ns)),
                format_microseconds(report.wake_latency.quantile(0.5)),
                format_microseconds(report.wake_latency.quantile(0.99)),
                report.migrations,
                report
                    .exit_info
                    .as_ref()
                    .map_or_else(|| "ok".to_owned(), ToString::to_string),
            )?;
            for error in &report.setting_errors {
                let (group, tid, field) = (&report.group, report.tid, error.setting.field());
                writeln!(
                    f,
                    "  {group} tid {tid}: `{field}` was not applied: {}",
                    error.error
                )?;
            }
        }
        Ok(())
    }
}

fn ns_to_seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn format_milliseconds(ns: Option<u64>) -> String {
    ns.map_or_else(|| "-".to_owned(), |ns| format!("{:.3}", ns as f64 / 1e6))
}

fn format_microseconds(ns: Option<u64>) -> String {
    ns.map_or_else(|| "-".to_owned(), |ns| format!("{:.1}us", ns as f64 / 1e3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::WorkloadConfig;

    #[test]
    fn corrupt_worker_record_is_reported() {
        let handle = WorkloadHandle::spawn(&WorkloadConfig::default().workers(2)).unwrap();
        handle.shared.record(1).magic.store(0xbad, Relaxed);
        let reports = handle.stop_and_collect();
        assert!(reports[0].completed);
        assert_eq!(reports[1].exit_info, Some(WorkerExitInfo::Corrupt));
        assert_eq!((reports[1].work_units, reports[1].completed), (0, false));
    }
}
