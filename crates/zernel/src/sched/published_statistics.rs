//! The file in which `zernel sched` publishes its statistics for other processes. `zernel sched` replaces the file once
//! a second, and the file's age shows whether the scheduler still runs. So `zernel sched` and its readers can be
//! restarted or killed at any time.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use zernel_model::scheduler::SchedulerStatistics;

/// Directory of the published file. All users may read the directory, only root may write to it.
pub(crate) const STATISTICS_DIRECTORY: &str = "/run/zernel-sched";
const STATISTICS_FILE: &str = "statistics.json";
const PUBLISH_INTERVAL: Duration = Duration::from_secs(1);

/// Writes the file.
pub(super) struct StatisticsPublisher {
    directory: PathBuf,
    last_published: Option<Instant>,
    /// Whether the user was informed that the file cannot be written.
    has_printed_write_error: bool,
}

impl StatisticsPublisher {
    pub(super) fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
            last_published: None,
            has_printed_write_error: false,
        }
    }

    /// Publishes statistics, if that is due.
    pub(super) fn publish_if_due(&mut self, statistics: impl FnOnce() -> SchedulerStatistics) {
        if self
            .last_published
            .is_some_and(|last| last.elapsed() < PUBLISH_INTERVAL)
        {
            return;
        }
        self.last_published = Some(Instant::now());
        let written = self.write_statistics(&statistics());
        if let Err(error) = written
            && !std::mem::replace(&mut self.has_printed_write_error, true)
        {
            let directory = self.directory.display();
            eprintln!("zernel: cannot publish statistics in {directory}: {error}");
        }
    }

    fn write_statistics(&self, statistics: &SchedulerStatistics) -> io::Result<()> {
        if !self.directory.exists() {
            fs::create_dir(&self.directory)?;
            fs::set_permissions(&self.directory, Permissions::from_mode(0o755))?;
        }
        let new = self.directory.join("statistics.json.new");
        fs::write(&new, serde_json::to_vec(statistics)?)?;
        fs::set_permissions(&new, Permissions::from_mode(0o644))?;
        // Because the file is renamed, a reader sees the old file or the new one, never a part.
        fs::rename(&new, self.directory.join(STATISTICS_FILE))
    }
}

impl Drop for StatisticsPublisher {
    fn drop(&mut self) {
        // A process that published nothing did not load a scheduler: the file is that of another one.
        if self.last_published.is_none() {
            return;
        }
        let _ = fs::remove_file(self.directory.join(STATISTICS_FILE));
        let _ = fs::remove_dir(&self.directory);
    }
}

/// The statistics of the running scheduler.
///
/// # Errors
/// No scheduler publishes any.
pub(crate) fn read_statistics(directory: &Path) -> Result<SchedulerStatistics, String> {
    let none = "no `zernel sched` runs on this machine";
    let path = directory.join(STATISTICS_FILE);
    let text = fs::read(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => none.to_owned(),
        _ => format!("cannot read {}: {error}", path.display()),
    })?;
    let statistics: SchedulerStatistics = serde_json::from_slice(&text)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    match statistics.is_scheduler_running(monotonic_ns()) {
        true => Ok(statistics),
        false => Err(none.to_owned()),
    }
}

/// The clock of published times.
pub(super) fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_published_until_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("sched");
        assert!(
            read_statistics(&directory)
                .unwrap_err()
                .contains("no `zernel sched`")
        );
        let statistics = SchedulerStatistics {
            pid: 7,
            taken_ns: monotonic_ns(),
            ..SchedulerStatistics::default()
        };
        let mut publisher = StatisticsPublisher::new(&directory);
        publisher.publish_if_due(|| statistics.clone());
        assert_eq!(read_statistics(&directory), Ok(statistics));
        publisher.publish_if_due(|| unreachable!("a second has not passed"));
        drop(StatisticsPublisher::new(&directory));
        assert!(
            read_statistics(&directory).is_ok(),
            "one that published nothing removes nothing"
        );
        drop(publisher);
        assert!(!directory.exists());
    }

    #[test]
    fn statistics_of_a_killed_scheduler_are_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let publisher = StatisticsPublisher::new(folder.path());
        let taken_ns = monotonic_ns();
        let old = SchedulerStatistics {
            taken_ns: taken_ns.saturating_sub(SchedulerStatistics::MAX_AGE_OF_RUNNING_NS),
            ..SchedulerStatistics::default()
        };
        publisher.write_statistics(&old).unwrap();
        assert!(read_statistics(folder.path()).is_err());
        fs::write(folder.path().join(STATISTICS_FILE), "{").unwrap();
        assert!(
            read_statistics(folder.path())
                .unwrap_err()
                .contains("cannot read")
        );
    }
}
