//! The virtual machine's side: makes the cgroups, starts the scheduler and the groups, runs the steps,
//! and measures.
//!
//! It runs above every scheduler under test (SCHED_FIFO), so that it still measures when a scheduler
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
use super::figures::{AccountFigures, GroupFigures, RunFigures};
use super::plan::GuestPlan;
use super::sampler::{TaskSampler, TaskTimes};
use super::{Action, Scenario, TimedAction};
use crate::account::{Account, CpuTimeReading};

mod companion;

use companion::{Observer, RunningScheduler};

/// Time between two samples of the tasks.
const SAMPLE_EVERY_MS: u64 = 100;
/// Time between the first reading of all CPU time, which takes a while, and the measured time.
const READING_BEFORE_MS: u64 = 200;
/// The phase that ends a step of a training job.
const LAST_PHASE: &str = "OptimizerStep";

/// Runs a plan in this machine, as root, and measures. `program` is this program's file.
///
/// # Errors
/// The scenario could not be started: a cgroup or a worker was refused, or the scheduler did not load.
pub fn execute(plan: &GuestPlan, program: &Path) -> Result<RunFigures, String> {
    outrank_all_threads().map_err(|error| format!("cannot use SCHED_FIFO: {error}"))?;
    let hints = plan.scheduler.hint_map();
    let observer = match plan.scenario.observe || hints.is_some() {
        true => Some(Observer::start(program, hints)?),
        false => None,
    };
    let mut execution = Execution::prepare(&plan.scenario)?;
    execution
        .companions
        .extend(observer.iter().map(Observer::part));
    let mut scheduler = RunningScheduler::start(&plan.scheduler, program)?;
    execution.start(plan);
    execution.run();
    scheduler.look();
    let mut figures = execution.finish();
    figures.scheduler = scheduler.stop();
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

/// A group of a running scenario.
struct RunningGroup {
    spec: WorkSpec,
    handle: Option<WorkloadHandle>,
    pids: Vec<i32>,
    /// The cgroups that it was in. They hold no other group.
    leaves: Vec<PathBuf>,
    sampler: TaskSampler,
    before: Snapshot,
    after: Snapshot,
    reports: Vec<WorkerReport>,
}

/// The counters of a group at one moment.
#[derive(Default, Clone)]
struct Snapshot {
    cpu_ns: u64,
    times: TaskTimes,
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
            leaves: Vec::new(),
            sampler: TaskSampler::default(),
            before: Snapshot::default(),
            after: Snapshot::default(),
            reports: Vec::new(),
        })
    }

    /// Moves it to a cgroup.
    fn place(&mut self, cgroup: Option<&str>) -> Result<(), String> {
        let placed = cgroup::place(cgroup, &self.spec.name, &self.pids);
        let leaf = placed.map_err(|error| error.to_string())?;
        if !self.leaves.contains(&leaf) {
            self.leaves.push(leaf);
        }
        Ok(())
    }

    fn sample(&mut self) {
        if self.handle.is_some() {
            self.sampler.sample(&self.pids, now_ns());
        }
    }

    fn snapshot(&mut self) -> Snapshot {
        self.sample();
        let Some(handle) = &self.handle else {
            return self.after.clone();
        };
        let latencies = handle.snapshot_wake_latency();
        let merged = |sum: Histogram, latency: &Histogram| sum.merged(latency);
        Snapshot {
            cpu_ns: self.leaves.iter().map(|leaf| cgroup::cpu_ns(leaf)).sum(),
            times: self.sampler.total(),
            rounds: handle.snapshot_iterations().iter().sum(),
            wake_latency: latencies.iter().fold(Histogram::default(), merged),
        }
    }

    /// Stops the workers and keeps their reports.
    fn stop(&mut self) {
        if let Some(handle) = self.handle.take() {
            self.reports = handle.stop_and_collect();
        }
    }

    fn figures(&self, window: (u64, u64)) -> GroupFigures {
        let reports = &self.reports;
        let gaps = reports.iter().filter_map(|report| report.largest_gap);
        let early = reports.iter().filter_map(|report| {
            let info = report.exit_info.as_ref()?;
            Some(format!("worker {}: {info}", report.worker))
        });
        let refused = reports.iter().flat_map(|report| &report.setting_errors);
        GroupFigures {
            name: self.spec.name.clone(),
            workers: self.spec.workers,
            cpu_ns: self.after.cpu_ns.saturating_sub(self.before.cpu_ns),
            run_delay_ns: self
                .after
                .times
                .run_delay_ns
                .saturating_sub(self.before.times.run_delay_ns),
            rounds: self.after.rounds.saturating_sub(self.before.rounds),
            longest_wait_ns: self.sampler.longest_wait_ns(),
            largest_gap_ns: gaps.map(|gap| gap.ns).max().unwrap_or(0),
            never_ran: reports
                .iter()
                .filter(|report| report.start_delay_ns.is_none())
                .count(),
            ended_early: early.collect(),
            refused_settings: refused
                .map(|error| format!("`{}`: {}", error.setting.field(), error.error))
                .collect(),
            cpus_used: reports
                .iter()
                .flat_map(|report| report.cpus_used.clone())
                .collect(),
            wake_latency: self.after.wake_latency.since(&self.before.wake_latency),
            steps_ns: steps(&self.spec.work_type, reports, window),
        }
    }
}

/// Durations of the steps that ended in the measured time: those of the first trainer of a job, or those of all
/// inference workers.
fn steps(work: &WorkType, reports: &[WorkerReport], (begin_ns, end_ns): (u64, u64)) -> Vec<u64> {
    let inside = |moment: &u64| (begin_ns..=end_ns).contains(moment);
    match work {
        WorkType::MlTraining(_) => {
            let intervals = reports
                .first()
                .map_or(&[][..], |report| report.phase_intervals.as_slice());
            let last = intervals
                .iter()
                .filter(|interval| interval.phase == LAST_PHASE);
            let ends: Vec<u64> = last
                .map(|interval| interval.end_ns)
                .filter(inside)
                .collect();
            ends.windows(2).map(|pair| pair[1] - pair[0]).collect()
        }
        WorkType::Inference(_) => reports
            .iter()
            .flat_map(|report| &report.phase_intervals)
            .filter(|interval| inside(&interval.end_ns))
            .map(|interval| interval.end_ns - interval.start_ns)
            .collect(),
        _ => Vec::new(),
    }
}

/// A CPU that was switched off for a while.
struct SwitchedOff {
    cpu: usize,
    since: Instant,
    until: Option<Instant>,
}

impl SwitchedOff {
    /// The CPU, and how long it was off since a reading.
    fn since_reading(&self, reading: &CpuTimeReading) -> (usize, Duration) {
        let until = self.until.unwrap_or_else(Instant::now);
        let since = self.since.max(reading.taken());
        (self.cpu, until.saturating_duration_since(since))
    }
}

/// A scenario that runs.
struct Execution<'a> {
    scenario: &'a Scenario,
    topology: Topology,
    groups: Vec<RunningGroup>,
    /// Programs beside the groups, by name and cgroup.
    companions: Vec<(String, PathBuf)>,
    started_ns: u64,
    window: (u64, u64),
    /// All CPU time shortly before the measured time.
    reading: Option<CpuTimeReading>,
    switched_off: Vec<SwitchedOff>,
    account: Option<AccountFigures>,
    problems: Vec<String>,
}

impl<'a> Execution<'a> {
    /// Makes the cgroups and the workers of the groups that start at once.
    fn prepare(scenario: &'a Scenario) -> Result<Self, String> {
        for cgroup in &scenario.cgroups {
            let failed = |error| format!("cgroup `{}`: {error}", cgroup.name);
            cgroup.create().map_err(failed)?;
        }
        let topology = Topology::read().map_err(|error| error.to_string())?;
        let mut execution = Self {
            scenario,
            topology,
            groups: Vec::new(),
            companions: Vec::new(),
            started_ns: 0,
            window: (0, 0),
            reading: None,
            switched_off: Vec::new(),
            account: None,
            problems: Vec::new(),
        };
        let at_once = |group: &&WorkSpec| !scenario.is_added_later(&group.name);
        for spec in scenario.groups.iter().filter(at_once) {
            execution.spawn_group(spec)?;
        }
        Ok(execution)
    }

    fn spawn_group(&mut self, spec: &WorkSpec) -> Result<(), String> {
        let mut group = RunningGroup::spawn_workers(spec, &self.topology)?;
        let cgroup = self.scenario.cgroup_of(&spec.name);
        group.place(cgroup.map(|cgroup| cgroup.name.as_str()))?;
        self.groups.push(group);
        Ok(())
    }

    /// Starts the groups, each after its offset.
    fn start(&mut self, plan: &GuestPlan) {
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

    /// Goes through the steps and samples in between.
    fn run(&mut self) {
        let begin_ms = self.scenario.warmup_ms;
        let end_ms = begin_ms + self.scenario.duration_ms;
        let mut steps: Vec<&TimedAction> = self.scenario.steps.iter().collect();
        steps.sort_by_key(|step| step.at_ms);
        let mut steps = steps.into_iter().peekable();
        let mut sample_ms = SAMPLE_EVERY_MS;
        let mut reading_ms = begin_ms.saturating_sub(READING_BEFORE_MS);
        loop {
            let step_ms = steps.peek().map_or(u64::MAX, |step| step.at_ms);
            let window_ms = match self.window.0 {
                0 => begin_ms,
                _ => end_ms,
            };
            let next_ms = step_ms.min(window_ms).min(sample_ms).min(reading_ms);
            sleep_until(self.started_ns + next_ms * 1_000_000);
            if next_ms == reading_ms {
                self.take_first_reading();
                reading_ms = u64::MAX;
            } else if next_ms == window_ms && self.window.0 == 0 {
                self.begin_window();
            } else if next_ms == step_ms {
                if let Some(step) = steps.next() {
                    self.take(step);
                }
            } else if next_ms == window_ms {
                return self.end_window();
            } else {
                self.groups.iter_mut().for_each(RunningGroup::sample);
                sample_ms += SAMPLE_EVERY_MS;
            }
        }
    }

    /// The cgroups of all groups and companions, by name.
    fn parts(&self) -> Vec<(String, PathBuf)> {
        let leaves = |group: &RunningGroup| -> Vec<(String, PathBuf)> {
            let name = &group.spec.name;
            group
                .leaves
                .iter()
                .map(|leaf| (name.clone(), leaf.clone()))
                .collect()
        };
        let groups = self.groups.iter().flat_map(leaves);
        groups.chain(self.companions.clone()).collect()
    }

    fn take_first_reading(&mut self) {
        // One attempt only, because this thread occupies a CPU meanwhile.
        self.reading = CpuTimeReading::take_once(&self.parts()).ok();
    }

    fn begin_window(&mut self) {
        self.window.0 = now_ns();
        for group in &mut self.groups {
            group.before = group.snapshot();
        }
    }

    fn end_window(&mut self) {
        self.window.1 = now_ns();
        for group in &mut self.groups {
            group.after = group.snapshot();
        }
        self.account = self.reading.take().and_then(|first| {
            let second = CpuTimeReading::take_once(&self.parts()).ok()?;
            let account = Account::between(&first, &second);
            let off = self
                .switched_off
                .iter()
                .map(|off| off.since_reading(&first));
            Some(account.with_offline(&off.collect::<Vec<_>>()).into())
        });
    }

    fn take(&mut self, step: &TimedAction) {
        let result = match &step.action {
            Action::Add(name) => self.add(name),
            Action::Remove(name) => {
                for group in self.named(name) {
                    group.after = group.snapshot();
                    group.stop();
                }
                Ok(())
            }
            Action::Move { group, to } => self
                .named(group)
                .try_for_each(|group| group.place(Some(to))),
            Action::Freeze(name) => {
                cgroup::set_frozen(name, true).map_err(|error| error.to_string())
            }
            Action::Thaw(name) => {
                cgroup::set_frozen(name, false).map_err(|error| error.to_string())
            }
            Action::Set(cgroup) => cgroup.apply().map_err(|error| error.to_string()),
            Action::Offline(cpu) => self.switch_cpu(*cpu, false),
            Action::Online(cpu) => self.switch_cpu(*cpu, true),
        };
        if let Err(problem) = result {
            self.problems
                .push(format!("step at {} ms: {problem}", step.at_ms));
        }
    }

    fn switch_cpu(&mut self, cpu: usize, online: bool) -> Result<(), String> {
        cgroup::switch_cpu(cpu, online).map_err(|error| error.to_string())?;
        match online {
            true => {
                let mut off = self.switched_off.iter_mut();
                if let Some(off) = off.find(|off| off.cpu == cpu && off.until.is_none()) {
                    off.until = Some(Instant::now());
                }
            }
            false => self.switched_off.push(SwitchedOff {
                cpu,
                since: Instant::now(),
                until: None,
            }),
        }
        Ok(())
    }

    fn named(&mut self, name: &str) -> impl Iterator<Item = &mut RunningGroup> {
        self.groups
            .iter_mut()
            .filter(move |group| group.spec.name == name)
    }

    fn add(&mut self, name: &str) -> Result<(), String> {
        let spec = self.scenario.group(name).ok_or("there is no such group")?;
        self.spawn_group(spec)?;
        for group in self.named(name) {
            if let Some(handle) = &mut group.handle {
                handle.start();
            }
        }
        Ok(())
    }

    /// Stops all groups and computes the figures.
    fn finish(mut self) -> RunFigures {
        // Frozen workers cannot stop.
        for cgroup in &self.scenario.cgroups {
            let _ = cgroup::set_frozen(&cgroup.name, false);
        }
        self.groups.iter_mut().for_each(RunningGroup::stop);
        let place = |group: &RunningGroup| {
            let named = |spec: &WorkSpec| spec.name == group.spec.name;
            self.scenario.groups.iter().position(named)
        };
        let mut ordered: Vec<&RunningGroup> = self.groups.iter().collect();
        ordered.sort_by_key(|group| place(group));
        RunFigures {
            window_ns: self.window.1.saturating_sub(self.window.0),
            groups: ordered
                .iter()
                .map(|group| group.figures(self.window))
                .collect(),
            problems: self.problems.clone(),
            account: self.account.clone(),
            ..RunFigures::default()
        }
    }
}
