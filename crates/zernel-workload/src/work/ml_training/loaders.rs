//! Loaders that a trainer forks itself, as PyTorch's do. An observer assigns them to their rank because they are its
//! children. Forked loaders are not workers of the handle: the handle makes no reports of them, and they end with their
//! trainer.

use libc::pid_t;
use rustix::io::Errno;

use crate::shared_state::SharedState;
use crate::sys::process::{self, ChildEnd};
use crate::worker::{FailingStep, WorkFailure, Worker, WorkerTeam};

/// The forked loaders of one rank, by their pids.
pub(super) struct ForkedLoaders(Vec<pid_t>);

impl ForkedLoaders {
    /// Forks `count` loaders. Each of them runs `load` with its index. Fork safe.
    pub(super) fn fork(
        count: usize,
        load: impl Fn(usize, &mut Worker<'_>) -> Result<(), WorkFailure>,
    ) -> Result<Self, WorkFailure> {
        let trainer = rustix::process::getpid().as_raw_nonzero().get();
        let mut loaders = Self(Vec::with_capacity(count));
        for number in 0..count {
            let child = process::fork(|| match process::die_with_parent(trainer) {
                true => run_loader(|worker| load(number, worker)),
                false => 0,
            });
            let child = child.map_err(|error| {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::AGAIN);
                FailingStep::ForkChild.as_failure()(errno)
            })?;
            loaders.0.push(child);
        }
        Ok(loaders)
    }

    /// Ends the loaders. Returns an error if one of them had failed before.
    pub(super) fn end_loaders(mut self) -> Result<(), WorkFailure> {
        match self.kill_and_reap() {
            Some(errno) => Err(FailingStep::RunLoader.as_failure()(errno)),
            None => Ok(()),
        }
    }

    /// Kills and reaps all loaders. Returns the error of the first loader that had failed.
    fn kill_and_reap(&mut self) -> Option<Errno> {
        self.0
            .iter()
            .for_each(|loader| process::send_signal(*loader, libc::SIGKILL));
        let ends = self.0.drain(..).map(process::reap_child);
        let errors = ends.filter_map(|end| match end {
            Ok(ChildEnd::Exited(code)) if code != 0 => Some(Errno::from_raw_os_error(code)),
            _ => None,
        });
        errors.reduce(|first, _| first)
    }
}

impl Drop for ForkedLoaders {
    fn drop(&mut self) {
        self.kill_and_reap();
    }
}

/// Runs a loader and returns its exit code, from which the trainer learns how the loader ended.
fn run_loader(load: impl FnOnce(&mut Worker<'_>) -> Result<(), WorkFailure>) -> i32 {
    const TEAM_OF_ONE: WorkerTeam<'_> = WorkerTeam {
        index: 0,
        size: 1,
        members_are_independent: false,
        slots: &[],
        pipes: &[],
    };
    // The loader has its own record, so that its numbers do not mix with those of its trainer.
    let Ok(own) = SharedState::new(1, 0, 0) else {
        return Errno::NOMEM.raw_os_error();
    };
    let mut worker = Worker::begin_first_round(&own, 0, 0, TEAM_OF_ONE, &[]);
    match load(&mut worker) {
        Ok(()) => 0,
        Err(failure) => failure.errno.raw_os_error(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_forked_loader_is_returned() {
        let failing = FailingStep::ReadFile.as_failure()(Errno::IO);
        let loaders = ForkedLoaders::fork(2, |_, _| Err(failing)).unwrap();
        loaders
            .0
            .iter()
            .for_each(|loader| while !process::has_child_ended(*loader) {});
        assert_eq!(loaders.end_loaders().unwrap_err().errno, Errno::IO);
    }

    #[test]
    fn end_loaders_ends_and_reaps_loaders() {
        let forever = |_: usize, worker: &mut Worker<'_>| {
            while worker.sleep(std::time::Duration::from_secs(1)) {}
            Ok(())
        };
        let loaders = ForkedLoaders::fork(2, forever).unwrap();
        let pids = loaders.0.clone();
        loaders.end_loaders().unwrap();
        assert!(
            pids.into_iter()
                .all(|pid| process::reap_child(pid).is_err())
        );
    }
}
