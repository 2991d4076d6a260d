//! The part of a run that the virtual machine executes: it makes the cgroups, starts the scheduler and the groups, runs
//! the steps, and measures.
//!
//! The measuring program runs above every scheduler under test (SCHED_FIFO), so that it still measures when a scheduler
//! stalls. Workers are spawned before the scheduler is loaded and start after it.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use zernel_workload::policy::outrank_all_threads;
use zernel_workload::{
    CloneMode, Histogram, Topology, WorkSpec, WorkType, WorkerReport, WorkloadConfig,
    WorkloadHandle,
};

use super::cgroup;
use super::figures::{CpuTimeFigures, GroupFigures, RunFigures};
use super::plan::GuestPlan;
use super::task_sampler::{TaskSampler, TaskTimes};
use super::{Scenario, ScenarioAction, TimedAction};
use crate::cpu_time_account::{CpuTimeAccount, CpuTimeReading};

mod companion_programs;

use companion_programs::{ObserverProcess, RunningScheduler};

/// Time between two samples of the states of all tasks.
const TASK_STATE_SAMPLE_INTERVAL_MS: u64 = 100;
/// Time between the first reading of all CPU time, which takes a while, and the start of the measurement.
const CPU_TIME_READING_LEAD_MS: u64 = 200;
/// The phase whose end is the end of a training job's step.
const PHASE_THAT_ENDS_STEP: &str = "OptimizerStep";
/// The phase of a trainer that copies, launches and waits for the GPU.
const GPU_PHASE_NAME: &str = "GpuCompute";

/// Runs a plan in this virtual machine, as root, and measures. `program` is the path of this program's file.
///
/// # Errors
/// The scenario could not be started: a cgroup or a worker was refused, or the scheduler did not load.
pub fn execute_plan(plan: &GuestPlan, program: &Path) -> Result<RunFigures, String> {
    outrank_all_threads().map_err(|error| format!("cannot use SCHED_FIFO: {error}"))?;
    let hints = plan.scheduler.hint_map_path();
    let mut observer = match plan.scenario.observe || hints.is_some() {
        true => Some(ObserverProcess::start(program, hints)?),
        false => None,
    };
    let mut execution = ScenarioExecution::create_cgroups_and_workers(&plan.scenario)?;
    execution
        .companion_cgroups
        .extend(observer.iter().map(ObserverProcess::name_and_cgroup));
    let mut scheduler = RunningScheduler::start(&plan.scheduler, program)?;
    execution.start_groups(plan);
    execution.run_steps_and_sample(&mut observer);
    scheduler.record_if_still_loaded();
    let mut figures = execution.stop_and_compute_figures();
    figures.scheduler = scheduler.stop();
    figures.observer_longest_wait_ns = observer.as_ref().map(ObserverProcess::longest_wait_ns);
    drop(observer);
    Ok(figures)
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

fn sleep_until(moment_ns: u64) {
    let left_ns = moment_ns.saturating_sub(now_ns());
    if left_ns > 0 {
        thread::sleep(Duration::from_nanos(left_ns));
    }
}

/// A group of a running scenario: its workers and what was measured about them.
struct RunningGroup {
    spec: WorkSpec,
    handle: Option<WorkloadHandle>,
    pids: Vec<i32>,
    /// The cgroups that the group was in. They hold no other group.
    leaf_cgroups: Vec<PathBuf>,
    task_sampler: TaskSampler,
    counters_at_begin: GroupCounters,
    counters_at_end: GroupCounters,
    reports: Vec<WorkerReport>,
}

/// The counters of a group at one moment, to be compared with those at another moment.
#[derive(Default, Clone)]
struct GroupCounters {
    cpu_ns: u64,
    task_times: TaskTimes,
    rounds: u64,
    wake_latency: Histogram,
}

impl RunningGroup {
    fn spawn_workers(spec: &WorkSpec, topology: &Topology) -> Result<Self, String> {
        let config = WorkloadConfig::from_specs(CloneMode::Fork, vec![spec.clone()]);
        let spawned = config
            .resolve(topology)
            .and_then(|config| WorkloadHandle::spawn(&config));
        let handle = spawned.map_err(|error| error.to_string())?;
        let pids = handle.worker_pids();
        Ok(Self {
            spec: spec.clone(),
            handle: Some(handle),
            pids,
            leaf_cgroups: Vec::new(),
            task_sampler: TaskSampler::default(),
            counters_at_begin: GroupCounters::default(),
            counters_at_end: GroupCounters::default(),
            reports: Vec::new(),
        })
    }

    /// Moves the group to another cgroup.
    fn move_to_cgroup(&mut self, cgroup: Option<&str>) -> Result<(), String> {
        let placed = cgroup::move_to_leaf_cgroup(cgroup, &self.spec.name, &self.pids);
        let leaf = placed.map_err(|error| error.to_string())?;
        if !self.leaf_cgroups.contains(&leaf) {
            self.leaf_cgroups.push(leaf);
        }
        Ok(())
    }

    fn sample_tasks(&mut self) {
        if self.handle.is_some() {
            self.task_sampler.sample_processes(&self.pids, now_ns());
        }
    }

    fn read_counters(&mut self) -> GroupCounters {
        self.sample_tasks();
        let Some(handle) = &self.handle else {
            return self.counters_at_end.clone();
        };
        let latencies = handle.snapshot_wake_latency();
        let merged = |sum: Histogram, latency: &Histogram| sum.merged(latency);
        GroupCounters {
            cpu_ns: self
                .leaf_cgroups
                .iter()
                .map(|leaf| cgroup::used_cpu_ns(leaf))
                .sum(),
            task_times: self.task_sampler.total_task_times(),
            rounds: handle.snapshot_iterations().iter().sum(),
            wake_latency: latencies.iter().fold(Histogram::default(), merged),
        }
    }

    /// Stops the workers of the group and keeps their reports.
    fn stop(&mut self) {
        if let Some(handle) = self.handle.take() {
            self.reports = handle.stop_and_collect();
        }
    }

    fn group_figures(&self, window_span_ns: (u64, u64)) -> GroupFigures {
        let reports = &self.reports;
        let gaps = reports.iter().filter_map(|report| report.largest_gap);
        let early_ends = reports.iter().filter_map(|report| {
            let info = report.exit_info.as_ref()?;
            Some(format!("worker {}: {info}", report.worker))
        });
        let refused_settings = reports.iter().flat_map(|report| &report.setting_errors);
        GroupFigures {
            name: self.spec.name.clone(),
            workers: self.spec.workers,
            cpu_ns: self
                .counters_at_end
                .cpu_ns
                .saturating_sub(self.counters_at_begin.cpu_ns),
            run_delay_ns: self
                .counters_at_end
                .task_times
                .run_delay_ns
                .saturating_sub(self.counters_at_begin.task_times.run_delay_ns),
            rounds: self
                .counters_at_end
                .rounds
                .saturating_sub(self.counters_at_begin.rounds),
            longest_wait_ns: self.task_sampler.longest_wait_ns(),
            largest_gap_ns: gaps.map(|gap| gap.ns).max().unwrap_or(0),
            never_ran: reports
                .iter()
                .filter(|report| report.start_delay_ns.is_none())
                .count(),
            ended_early: early_ends.collect(),
            refused_settings: refused_settings
                .map(|error| format!("`{}`: {}", error.setting.field(), error.error))
                .collect(),
            cpus_used: reports
                .iter()
                .flat_map(|report| report.cpus_used.clone())
                .collect(),
            wake_latency: self
                .counters_at_end
                .wake_latency
                .since(&self.counters_at_begin.wake_latency),
            steps_ns: step_durations_ns(&self.spec.work_type, reports, window_span_ns),
            gpu_phases_ns: gpu_phase_durations_ns(reports, window_span_ns),
        }
    }
}

/// Durations of the steps that ended during the measurement: those of a job's first trainer, or those of all inference
/// workers.
fn step_durations_ns(
    work: &WorkType,
    reports: &[WorkerReport],
    (begin_ns, end_ns): (u64, u64),
) -> Vec<u64> {
    let is_in_window = |moment: &u64| (begin_ns..=end_ns).contains(moment);
    match work {
        WorkType::MlTraining(_) => {
            let intervals = reports
                .first()
                .map_or(&[][..], |report| report.phase_intervals.as_slice());
            let last_phases = intervals
                .iter()
                .filter(|interval| interval.phase == PHASE_THAT_ENDS_STEP);
            let end_times_ns: Vec<u64> = last_phases
                .map(|interval| interval.end_ns)
                .filter(is_in_window)
                .collect();
            end_times_ns
                .windows(2)
                .map(|pair| pair[1] - pair[0])
                .collect()
        }
        WorkType::Inference(_) => reports
            .iter()
            .flat_map(|report| &report.phase_intervals)
            .filter(|interval| is_in_window(&interval.end_ns))
            .map(|interval| interval.end_ns - interval.start_ns)
            .collect(),
        _ => Vec::new(),
    }
}

/// Durations of all trainers' GPU phases that ended during the measurement. Such a phase ends with a wait for the GPU.
fn gpu_phase_durations_ns(reports: &[WorkerReport], (begin_ns, end_ns): (u64, u64)) -> Vec<u64> {
    let intervals = reports.iter().flat_map(|report| &report.phase_intervals);
    intervals
        .filter(|interval| interval.phase == GPU_PHASE_NAME)
        .filter(|interval| (begin_ns..=end_ns).contains(&interval.end_ns))
        .map(|interval| interval.end_ns - interval.start_ns)
        .collect()
}

/// A CPU that was switched off for a while during the scenario.
struct OfflinePeriod {
    cpu: usize,
    since: Instant,
    until: Option<Instant>,
}

impl OfflinePeriod {
    /// The CPU, and how long it was off since the reading of the CPU time.
    fn cpu_and_offline_time_since(&self, reading: &CpuTimeReading) -> (usize, Duration) {
        let until = self.until.unwrap_or_else(Instant::now);
        let since = self.since.max(reading.taken_at());
        (self.cpu, until.saturating_duration_since(since))
    }
}

/// A scenario that is running in the virtual machine.
struct ScenarioExecution<'a> {
    scenario: &'a Scenario,
    topology: Topology,
    groups: Vec<RunningGroup>,
    /// The programs that run beside the groups, by name and cgroup.
    companion_cgroups: Vec<(String, PathBuf)>,
    started_ns: u64,
    window_span_ns: (u64, u64),
    /// A reading of all CPU time shortly before the measurement.
    first_reading: Option<CpuTimeReading>,
    offline_periods: Vec<OfflinePeriod>,
    account: Option<CpuTimeFigures>,
    problems: Vec<String>,
}

impl<'a> ScenarioExecution<'a> {
    /// Makes the cgroups, and spawns the workers of the groups that start at once.
    fn create_cgroups_and_workers(scenario: &'a Scenario) -> Result<Self, String> {
        for cgroup in &scenario.cgroups {
            let failed = |error| format!("cgroup `{}`: {error}", cgroup.name);
            cgroup.create_in_kernel().map_err(failed)?;
        }
        let topology = Topology::read().map_err(|error| error.to_string())?;
        let mut execution = Self {
            scenario,
            topology,
            groups: Vec::new(),
            companion_cgroups: Vec::new(),
            started_ns: 0,
            window_span_ns: (0, 0),
            first_reading: None,
            offline_periods: Vec::new(),
            account: None,
            problems: Vec::new(),
        };
        let starts_at_once = |group: &&WorkSpec| !scenario.is_added_by_step(&group.name);
        for spec in scenario.groups.iter().filter(starts_at_once) {
            execution.spawn_group(spec)?;
        }
        Ok(execution)
    }

    fn spawn_group(&mut self, spec: &WorkSpec) -> Result<(), String> {
        let mut group = RunningGroup::spawn_workers(spec, &self.topology)?;
        let cgroup = self.scenario.cgroup_of_group(&spec.name);
        group.move_to_cgroup(cgroup.map(|cgroup| cgroup.name.as_str()))?;
        self.groups.push(group);
        Ok(())
    }

    /// Starts the groups, each after its delay.
    fn start_groups(&mut self, plan: &GuestPlan) {
        self.started_ns = now_ns();
        let offset = |group: &RunningGroup| {
            plan.start_offsets
                .get(&group.spec.name)
                .copied()
                .unwrap_or(0)
        };
        let mut order: Vec<usize> = (0..self.groups.len()).collect();
        order.sort_by_key(|index| offset(&self.groups[*index]));
        for index in order {
            let group = &mut self.groups[index];
            sleep_until(self.started_ns + offset(group) * 1000);
            if let Some(handle) = &mut group.handle {
                handle.start();
            }
        }
    }

    /// Runs the steps at their moments, and samples the tasks in between.
    fn run_steps_and_sample(&mut self, observer: &mut Option<ObserverProcess>) {
        let begin_ms = self.scenario.warmup_ms;
        let end_ms = begin_ms + self.scenario.duration_ms;
        let mut steps: Vec<&TimedAction> = self.scenario.steps.iter().collect();
        steps.sort_by_key(|step| step.at_ms);
        let mut steps = steps.into_iter().peekable();
        let mut sample_ms = TASK_STATE_SAMPLE_INTERVAL_MS;
        let mut reading_ms = begin_ms.saturating_sub(CPU_TIME_READING_LEAD_MS);
        loop {
            let step_ms = steps.peek().map_or(u64::MAX, |step| step.at_ms);
            let window_ms = match self.window_span_ns.0 {
                0 => begin_ms,
                _ => end_ms,
            };
            let next_ms = step_ms.min(window_ms).min(sample_ms).min(reading_ms);
            sleep_until(self.started_ns + next_ms * 1_000_000);
            if next_ms == reading_ms {
                self.read_first_cpu_time();
                reading_ms = u64::MAX;
            } else if next_ms == window_ms && self.window_span_ns.0 == 0 {
                self.begin_measurement();
            } else if next_ms == step_ms {
                if let Some(step) = steps.next() {
                    self.perform_action(step);
                }
            } else if next_ms == window_ms {
                return self.end_measurement();
            } else {
                self.groups.iter_mut().for_each(RunningGroup::sample_tasks);
                observer.iter_mut().for_each(ObserverProcess::sample_tasks);
                sample_ms += TASK_STATE_SAMPLE_INTERVAL_MS;
            }
        }
    }

    /// The cgroups of all groups and of the programs beside them, by name.
    fn named_cgroups(&self) -> Vec<(String, PathBuf)> {
        let leaf_cgroups = |group: &RunningGroup| -> Vec<(String, PathBuf)> {
            let name = &group.spec.name;
            group
                .leaf_cgroups
                .iter()
                .map(|leaf| (name.clone(), leaf.clone()))
                .collect()
        };
        let groups = self.groups.iter().flat_map(leaf_cgroups);
        groups.chain(self.companion_cgroups.clone()).collect()
    }

    fn read_first_cpu_time(&mut self) {
        // The CPU time is read only once, because this thread occupies a CPU meanwhile.
        self.first_reading = CpuTimeReading::read_once(&self.named_cgroups()).ok();
    }

    fn begin_measurement(&mut self) {
        self.window_span_ns.0 = now_ns();
        for group in &mut self.groups {
            group.counters_at_begin = group.read_counters();
        }
    }

    fn end_measurement(&mut self) {
        self.window_span_ns.1 = now_ns();
        for group in &mut self.groups {
            group.counters_at_end = group.read_counters();
        }
        self.account = self.first_reading.take().and_then(|first| {
            let second = CpuTimeReading::read_once(&self.named_cgroups()).ok()?;
            let account = CpuTimeAccount::between_readings(&first, &second);
            let periods = self
                .offline_periods
                .iter()
                .map(|period| period.cpu_and_offline_time_since(&first));
            Some(
                account
                    .with_offline_time(&periods.collect::<Vec<_>>())
                    .into(),
            )
        });
    }

    fn perform_action(&mut self, step: &TimedAction) {
        let result = match &step.action {
            ScenarioAction::Add(name) => self.add_group(name),
            ScenarioAction::Remove(name) => {
                for group in self.running_groups_named(name) {
                    group.counters_at_end = group.read_counters();
                    group.stop();
                }
                Ok(())
            }
            ScenarioAction::Move { group, to } => self
                .running_groups_named(group)
                .try_for_each(|group| group.move_to_cgroup(Some(to))),
            ScenarioAction::Freeze(name) => {
                cgroup::set_frozen(name, true).map_err(|error| error.to_string())
            }
            ScenarioAction::Thaw(name) => {
                cgroup::set_frozen(name, false).map_err(|error| error.to_string())
            }
            ScenarioAction::Set(cgroup) => {
                cgroup.write_settings().map_err(|error| error.to_string())
            }
            ScenarioAction::Offline(cpu) => self.set_cpu_online_and_record(*cpu, false),
            ScenarioAction::Online(cpu) => self.set_cpu_online_and_record(*cpu, true),
        };
        if let Err(problem) = result {
            self.problems
                .push(format!("step at {} ms: {problem}", step.at_ms));
        }
    }

    fn set_cpu_online_and_record(&mut self, cpu: usize, is_online: bool) -> Result<(), String> {
        cgroup::set_cpu_online(cpu, is_online).map_err(|error| error.to_string())?;
        match is_online {
            true => {
                let mut periods = self.offline_periods.iter_mut();
                if let Some(period) =
                    periods.find(|period| period.cpu == cpu && period.until.is_none())
                {
                    period.until = Some(Instant::now());
                }
            }
            false => self.offline_periods.push(OfflinePeriod {
                cpu,
                since: Instant::now(),
                until: None,
            }),
        }
        Ok(())
    }

    fn running_groups_named(&mut self, name: &str) -> impl Iterator<Item = &mut RunningGroup> {
        self.groups
            .iter_mut()
            .filter(move |group| group.spec.name == name)
    }

    fn add_group(&mut self, name: &str) -> Result<(), String> {
        let spec = self
            .scenario
            .find_group(name)
            .ok_or("there is no such group")?;
        self.spawn_group(spec)?;
        for group in self.running_groups_named(name) {
            if let Some(handle) = &mut group.handle {
                handle.start();
            }
        }
        Ok(())
    }

    /// Stops all groups and computes the figures of the run.
    fn stop_and_compute_figures(mut self) -> RunFigures {
        // Cgroups are thawed first: frozen workers cannot stop.
        for cgroup in &self.scenario.cgroups {
            let _ = cgroup::set_frozen(&cgroup.name, false);
        }
        self.groups.iter_mut().for_each(RunningGroup::stop);
        let position_in_scenario = |group: &RunningGroup| {
            let has_same_name = |spec: &WorkSpec| spec.name == group.spec.name;
            self.scenario.groups.iter().position(has_same_name)
        };
        let mut ordered: Vec<&RunningGroup> = self.groups.iter().collect();
        ordered.sort_by_key(|group| position_in_scenario(group));
        RunFigures {
            window_ns: self.window_span_ns.1.saturating_sub(self.window_span_ns.0),
            groups: ordered
                .iter()
                .map(|group| group.group_figures(self.window_span_ns))
                .collect(),
            problems: self.problems.clone(),
            account: self.account.clone(),
            ..RunFigures::default()
        }
    }
}
