//! `zernel run --sched`: keeps the scheduler loaded while the command runs, with the command's processes privileged.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use zernel_scheduler::scheduler::{self, SchedCounters, SchedError};

use crate::sched::load_scheduler::check_scheduler_can_load;
use crate::sched::published_statistics;
use crate::sched::scheduler_session::SchedulerSession;

/// The scheduler that `zernel run --sched` loads for one command. The thread of the scheduler unloads it when the
/// stop flag is set.
pub(super) struct JobScheduler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<SchedCounters, SchedError>>,
}

impl JobScheduler {
    /// Loads the scheduler. An error states why the command is not privileged.
    pub(super) fn start() -> Result<Self, String> {
        if let Ok(loaded) = published_statistics::read_statistics(Path::new(
            published_statistics::STATISTICS_DIRECTORY,
        )) {
            return Err(format!(
                "`zernel sched` (pid {}) is loaded, and root chose its privilege: {}",
                loaded.pid, loaded.privilege
            ));
        }
        check_scheduler_can_load().map_err(|error| error.to_string())?;
        let stop = Arc::new(AtomicBool::new(false));
        let (loaded, is_loaded) = mpsc::channel();
        let thread = thread::spawn({
            let stop = Arc::clone(&stop);
            move || {
                let mut session = SchedulerSession::with_own_tree_privileged();
                scheduler::run_scheduler(&session.load_settings(), |scheduler| {
                    // The receiver waits for the first message only.
                    let _ = loaded.send(());
                    session.poll_session(scheduler, &stop)
                })
            }
        });
        if is_loaded.recv().is_ok() {
            return Ok(Self { stop, thread });
        }
        // The thread ended before the scheduler was loaded.
        match thread.join() {
            Ok(Err(error)) => Err(error.to_string()),
            _ => Err("the scheduler ended at once".to_owned()),
        }
    }

    /// Unloads the scheduler. An error states why the scheduler was unloaded before the command exited.
    pub(super) fn unload(self) -> Result<SchedCounters, String> {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.join() {
            Ok(ended) => ended.map_err(|error| error.to_string()),
            Err(_) => Err("the thread of the scheduler panicked".to_owned()),
        }
    }
}
