//! What happens while the scheduler is loaded: statistics, a new configuration, the service manager.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use zernel_model::scheduler::SchedulerStatistics;
use zernel_scheduler::scheduler::{LoadedScheduler, Privilege, SchedSettings};

use super::config_file::ConfigFile;
use super::interval_table::IntervalTable;
use super::policy_options::{PolicyOptions, PrivilegeOption};
use super::published_statistics::{self, StatisticsPublisher};
use crate::service_manager::ServiceManager;

/// How often the path of the privileged cgroup is looked up.
const CGROUP_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The time in which the scheduler is loaded, once or several times.
pub(crate) struct SchedulerSession {
    policy: PolicyOptions,
    /// Times that the scheduler was loaded again after an ejection.
    pub(super) restarts: u32,
    statistics_publisher: StatisticsPublisher,
    interval_printer: Option<IntervalPrinter>,
    config_file: Option<ConfigFile>,
    manager: Option<ServiceManager>,
    is_announced: bool,
    /// Whether the last message stated that an observer writes the task states; `None` if this session prints no such
    /// messages.
    is_observed: Option<bool>,
    cgroup_checked_at: Option<Instant>,
    /// The reason that was printed last why the privileged cgroup has no privilege.
    cgroup_problem: Option<String>,
}

impl SchedulerSession {
    pub(super) fn new(policy: PolicyOptions) -> Self {
        Self {
            policy,
            restarts: 0,
            statistics_publisher: StatisticsPublisher::new(Path::new(
                published_statistics::STATISTICS_DIRECTORY,
            )),
            interval_printer: None,
            config_file: None,
            manager: ServiceManager::from_environment(),
            is_announced: false,
            is_observed: Some(true),
            cgroup_checked_at: None,
            cgroup_problem: None,
        }
    }

    /// A session that prints nothing about itself and notifies no service manager.
    pub(super) fn new_quiet(policy: PolicyOptions) -> Self {
        let mut session = Self::new(policy);
        session.manager = None;
        session.is_announced = true;
        session.is_observed = None;
        session
    }

    /// A session in which this process and its descendants are privileged.
    pub(crate) fn with_own_tree_privileged() -> Self {
        Self::new_quiet(PolicyOptions {
            privilege: PrivilegeOption::for_own_process_tree(),
            ..PolicyOptions::default()
        })
    }

    /// Prints statistics every `seconds`.
    pub(super) fn with_statistics_every(mut self, seconds: u64) -> Self {
        self.interval_printer = Some(IntervalPrinter::new(seconds));
        self
    }

    /// Follows the changes of a configuration file.
    pub(super) fn with_config_file(mut self, file: ConfigFile) -> Self {
        self.config_file = Some(file);
        self
    }

    /// The settings to load the scheduler with.
    pub(crate) fn load_settings(&self) -> SchedSettings {
        SchedSettings {
            may_privilege: self.config_file.is_some(),
            ..self.policy.scheduler_settings()
        }
    }

    /// Counts that the scheduler is loaded again.
    pub(super) fn begin_restart(&mut self) {
        self.restarts += 1;
        self.is_announced = false;
    }

    /// Called every 50 ms. Breaks when the flag is set.
    pub(crate) fn poll_session(
        &mut self,
        loaded: &LoadedScheduler<'_>,
        stop: &AtomicBool,
    ) -> ControlFlow<()> {
        if !std::mem::replace(&mut self.is_announced, true) {
            self.announce_loaded();
        }
        if let Some(manager) = &mut self.manager {
            // If the service manager cannot be notified, it restarts the scheduler.
            let _ = manager.notify_watchdog_if_due();
        }
        self.apply_changed_config(loaded);
        self.follow_privileged_cgroup(loaded);
        self.report_observer_changes(loaded);
        let statistics = || collect_statistics(loaded, &self.policy, self.restarts);
        self.statistics_publisher.publish_if_due(statistics);
        if let Some(stats) = &mut self.interval_printer {
            stats.print_if_due(statistics);
        }
        match stop.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    fn announce_loaded(&self) {
        eprintln!("zernel: the scheduler is loaded; Ctrl-C unloads it");
        if let Some(Err(error)) = self.manager.as_ref().map(ServiceManager::notify_ready) {
            eprintln!("zernel: cannot notify the service manager: {error}");
        }
    }

    /// Prints when privilege has no effect for want of an observer, and when it has one again.
    fn report_observer_changes(&mut self, loaded: &LoadedScheduler<'_>) {
        if self.policy.privilege.privilege == Privilege::Nobody {
            return;
        }
        let is_observed = loaded.is_observer_alive();
        match self.is_observed {
            Some(before) if before != is_observed => self.is_observed = Some(is_observed),
            _ => return,
        }
        eprintln!(
            "zernel: {}",
            match is_observed {
                true => "an observer runs; critical threads go first",
                false => "no observer runs, so no thread goes first; start `zernel observe`",
            }
        );
    }

    /// A cgroup that is removed and created again has another id. Applies the new id of the privileged cgroup, and
    /// prints each change.
    fn follow_privileged_cgroup(&mut self, loaded: &LoadedScheduler<'_>) {
        let is_due = self
            .cgroup_checked_at
            .is_none_or(|checked_at| checked_at.elapsed() >= CGROUP_CHECK_INTERVAL);
        if !matches!(self.policy.privilege.privilege, Privilege::Cgroup(_)) || !is_due {
            return;
        }
        self.cgroup_checked_at = Some(Instant::now());
        let before = self.cgroup_problem.take();
        match self.apply_current_cgroup_id(loaded) {
            Ok(false) if before.is_none() => {}
            Ok(_) => eprintln!("zernel: privileged again: {}", self.policy.privilege.text),
            Err(problem) => {
                if before.as_ref() != Some(&problem) {
                    eprintln!("zernel: no thread goes first: {problem}");
                }
                self.cgroup_problem = Some(problem);
            }
        }
    }

    /// Looks the privileged cgroup up by its path. Returns whether its id has changed.
    fn apply_current_cgroup_id(&mut self, loaded: &LoadedScheduler<'_>) -> Result<bool, String> {
        let present: PrivilegeOption = self.policy.privilege.text.parse()?;
        if present == self.policy.privilege {
            return Ok(false);
        }
        let policy = PolicyOptions {
            privilege: present,
            ..self.policy.clone()
        };
        let applied = loaded.set_policy(&policy.scheduler_settings());
        applied.map_err(|error| error.to_string())?;
        self.policy = policy;
        Ok(true)
    }

    /// Applies a changed configuration file. A file with a mistake changes nothing.
    fn apply_changed_config(&mut self, loaded: &LoadedScheduler<'_>) {
        let Some(changed) = self
            .config_file
            .as_mut()
            .and_then(ConfigFile::read_policy_if_changed)
        else {
            return;
        };
        let applied = changed.and_then(|policy| {
            let applied = loaded.set_policy(&policy.scheduler_settings());
            applied.map_err(|error| error.to_string())?;
            Ok(policy)
        });
        match applied {
            Ok(policy) => {
                eprintln!("zernel: the configuration was read again: {policy}");
                self.policy = policy;
                self.cgroup_problem = None;
            }
            Err(error) => eprintln!("zernel: the configuration stays as it was: {error}"),
        }
    }
}

fn collect_statistics(
    loaded: &LoadedScheduler<'_>,
    policy: &PolicyOptions,
    restarts: u32,
) -> SchedulerStatistics {
    SchedulerStatistics {
        pid: std::process::id(),
        taken_ns: published_statistics::monotonic_ns(),
        since_ns: loaded.loaded_since_ns(),
        restarts,
        slice_us: loaded.slice().as_micros() as u64,
        privilege: policy.privilege.text.clone(),
        guarantee: f64::from(loaded.guarantee_percent()) / 100.0,
        lend: loaded.lends(),
        loss_us: loaded.unpaid_guarantee_time().as_micros() as u64,
        lent_ns: loaded.lent_time().as_nanos() as u64,
        counters: loaded.counters(),
        classes: loaded.class_statistics(),
        tenants: loaded.tenant_statistics(),
    }
}

/// Prints the lines of `--stats`.
struct IntervalPrinter {
    interval: Duration,
    next_print_at: Instant,
    table: IntervalTable,
}

impl IntervalPrinter {
    fn new(seconds: u64) -> Self {
        Self {
            interval: Duration::from_secs(seconds),
            next_print_at: Instant::now(),
            table: IntervalTable::default(),
        }
    }

    fn print_if_due(&mut self, statistics: impl FnOnce() -> SchedulerStatistics) {
        if Instant::now() < self.next_print_at {
            return;
        }
        self.next_print_at = Instant::now() + self.interval;
        if let Some(text) = self.table.add_interval(&statistics()) {
            // Scheduling goes on without a reader.
            let _ = crate::print_to_stdout(text.as_bytes());
        }
    }
}
