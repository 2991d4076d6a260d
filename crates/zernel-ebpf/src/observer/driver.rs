//! The loop that makes an observer do its work.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::files::detach;
use super::{ObserveError, Observer};

/// How often the kernel's maps are read and costs are looked at.
const ROUND: Duration = Duration::from_millis(500);
/// How often alarms are heeded, at most: what cannot be sampled goes on raising them.
const ALARM: Duration = Duration::from_secs(1);
/// How often every process of the machine is looked at.
const SCAN: Duration = Duration::from_secs(10);
/// How often GPUs are asked how busy they are.
const GPUS: Duration = Duration::from_secs(1);

/// Observes until `stop` is set. Others may ask `observer` meanwhile: it is locked for milliseconds
/// at a time, and longer only while it attaches to a library that is new, or to functions that are sampled.
pub fn run(observer: &Mutex<Observer>, stop: &AtomicBool) -> Result<(), ObserveError> {
    let descriptor = lock(observer)
        .discovery_descriptor()
        .map_err(|error| ObserveError::Read(error.into()))?;
    let mut next_round = Instant::now() + ROUND;
    let mut next_alarm = Instant::now();
    let mut next_scan = Instant::now() + SCAN;
    let mut next_gpus = Instant::now() + GPUS;
    while !stop.load(Ordering::Relaxed) {
        let next_turn = lock(observer).governor.next_turn();
        let until = next_turn.map_or(next_round, |turn| turn.min(next_round));
        if wait(&descriptor, until) {
            let mut observer = lock(observer);
            observer.discover()?;
            if observer.take_alarm() && Instant::now() >= next_alarm {
                next_round = Instant::now();
                next_alarm = next_round + ALARM;
            }
        }
        if Instant::now() >= next_round {
            {
                let mut observer = lock(observer);
                observer.read()?;
                observer.govern();
            }
            let questions = lock(observer).questions();
            let answers = questions.ask();
            lock(observer).take_answers(answers);
            next_round = Instant::now() + ROUND;
        }
        if Instant::now() >= next_gpus {
            lock(observer).ask_gpus();
            next_gpus = Instant::now() + GPUS;
        }
        if Instant::now() >= next_scan {
            lock(observer).scan()?;
            next_scan = Instant::now() + SCAN;
        }
        let links = lock(observer).turn_window();
        detach(links);
    }
    let links = lock(observer).close_window();
    detach(links);
    Ok(())
}

/// Waits until the descriptor is readable, `until` at most; says whether it is.
fn wait(descriptor: &OwnedFd, until: Instant) -> bool {
    let left = until.saturating_duration_since(Instant::now());
    let timeout = Timespec::try_from(left).unwrap_or_default();
    let mut descriptors = [PollFd::new(descriptor, PollFlags::IN)];
    match poll(&mut descriptors, Some(&timeout)) {
        Ok(ready) => ready > 0,
        // A signal: look around.
        Err(error) => io::Error::from(error).kind() != io::ErrorKind::Interrupted,
    }
}

/// A panic elsewhere leaves nothing half done that would matter here.
fn lock(observer: &Mutex<Observer>) -> MutexGuard<'_, Observer> {
    observer.lock().unwrap_or_else(PoisonError::into_inner)
}
