//! The thread that owns an observer and publishes what it observes.
//!
//! Only the observer's thread touches the [`Observer`]. The thread publishes an immutable [`Snapshot`] after every
//! round. Readers take the newest snapshot without a lock, so they do not wait while the thread is busy with a slow file
//! system.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, SendError, Sender, SyncSender};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use zernel_model::snapshot::Snapshot;

use super::sampled_phases::SAMPLE_INTERVAL;
use super::{ObserveError, Observer, monotonic_ns};
use crate::child_task;
use crate::probe_link::{detach_links, leave_links_to_exit};

/// How often costs are checked.
const GOVERN_INTERVAL: Duration = Duration::from_millis(500);
/// Shortest time between two checks that an alarm causes: a function that cannot be sampled keeps raising alarms.
const MIN_ALARM_INTERVAL: Duration = Duration::from_secs(1);
/// How often every process of the machine is scanned.
const SCAN_INTERVAL: Duration = Duration::from_secs(10);
/// How often NVML is asked for the processes and the memory of GPUs.
const GPU_INTERVAL: Duration = Duration::from_secs(1);
/// How often NVML is asked for the utilization of GPUs: about as often as the driver of an H200 samples the
/// utilization.
const UTILIZATION_INTERVAL: Duration = Duration::from_millis(200);

/// A request to borrow the observer: where to send it, and where it comes back from.
struct BorrowRequest {
    lend_to: SyncSender<Observer>,
    returned_by: Receiver<Observer>,
}

/// A thread that owns an [`Observer`] and observes until the thread is stopped or dropped.
pub struct ObserverThread {
    published: Arc<PublishedSnapshot>,
    requests: Sender<BorrowRequest>,
    wake: Arc<OwnedFd>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Observer, ObserveError>>>,
}

/// The newest snapshot, for readers on any thread.
pub struct PublishedSnapshot {
    snapshot: ArcSwap<Snapshot>,
    /// Why the thread ended: an empty text if it was asked to stop.
    end_reason: OnceLock<String>,
}

impl PublishedSnapshot {
    /// The newest snapshot.
    #[must_use]
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.load_full()
    }

    fn publish_snapshot(&self, observer: &Observer) {
        self.snapshot.store(Arc::new(observer.snapshot()));
    }

    /// Why the thread ended; `None` while it runs. The text is empty if the thread was asked to stop.
    #[must_use]
    pub fn end_reason(&self) -> Option<&str> {
        self.end_reason.get().map(String::as_str)
    }

    /// The age of the newest snapshot.
    #[must_use]
    pub fn age_of_snapshot(&self) -> Duration {
        let taken_ns = self.snapshot.load().taken_ns;
        Duration::from_nanos(monotonic_ns().saturating_sub(taken_ns))
    }
}

impl ObserverThread {
    /// Moves an observer to a thread of its own, which reads what the probes counted every `interval`.
    pub fn start(mut observer: Observer, interval: Duration) -> Result<Self, ObserveError> {
        observer.read_counts()?;
        let published = Arc::new(PublishedSnapshot {
            snapshot: ArcSwap::from_pointee(observer.snapshot()),
            end_reason: OnceLock::new(),
        });
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let stop = Arc::new(AtomicBool::new(false));
        let (requests, received) = mpsc::channel();
        let rounds = RoundLoop {
            events: observer
                .discovery_descriptor()
                .map_err(|error| ObserveError::ReadMap(error.into()))?,
            interval,
            published: Arc::clone(&published),
            requests: received,
            wake: Arc::clone(&wake),
            stop: Arc::clone(&stop),
        };
        let thread = thread::Builder::new().name("observer".to_owned());
        let thread = thread.spawn(move || rounds.run_until_stopped(observer));
        Ok(Self {
            published,
            requests,
            wake,
            stop,
            thread: Some(thread.map_err(|error| ObserveError::ReadMap(error.into()))?),
        })
    }

    /// What the thread publishes.
    #[must_use]
    pub fn published_snapshot(&self) -> Arc<PublishedSnapshot> {
        Arc::clone(&self.published)
    }

    /// A handle for other threads to send requests through.
    #[must_use]
    pub fn requests(&self) -> ObserverRequests {
        ObserverRequests {
            requests: self.requests.clone(),
            wake: Arc::clone(&self.wake),
        }
    }

    /// Has the observer's thread read the counts of the probes and publish a snapshot, waits for the snapshot and
    /// returns it; `None` if the thread has ended.
    #[must_use]
    pub fn refresh_snapshot(&self) -> Option<Arc<Snapshot>> {
        self.requests().call_with_observer(|observer| {
            // If the counts cannot be read now, the next round reads them or reports the error.
            let _ = observer.read_counts();
            self.published.publish_snapshot(observer);
            self.published.snapshot()
        })
    }

    /// Whether the thread has ended by itself.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Stops the observer's thread and returns the observer that the thread owned.
    pub fn stop(mut self) -> Result<Observer, ObserveError> {
        self.ask_to_stop();
        let thread = self.thread.take().expect("only `stop` and `drop` take it");
        match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Stops the thread in a process that is about to exit. The kernel detaches the probes when the process exits.
    pub fn stop_before_exit(self) -> Result<(), ObserveError> {
        leave_links_to_exit();
        self.stop().map(drop)
    }

    /// Asks the observer's thread to stop, and does not wait until it has stopped.
    pub fn ask_to_stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        wake_thread(&self.wake);
    }
}

impl Drop for ObserverThread {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.ask_to_stop();
            let _ = thread.join();
        }
    }
}

/// Lets other threads borrow the observer that an observer's thread owns.
#[derive(Clone)]
pub struct ObserverRequests {
    requests: Sender<BorrowRequest>,
    wake: Arc<OwnedFd>,
}

impl ObserverRequests {
    /// Runs a function on the observer, on the caller's thread, while the observer's own thread waits. Returns `None`
    /// if the observer's thread has ended.
    pub fn call_with_observer<T>(&self, function: impl FnOnce(&mut Observer) -> T) -> Option<T> {
        let (to, received) = mpsc::sync_channel(1);
        let (give_back, back) = mpsc::sync_channel(1);
        self.requests
            .send(BorrowRequest {
                lend_to: to,
                returned_by: back,
            })
            .ok()?;
        wake_thread(&self.wake);
        let mut observer = received.recv().ok()?;
        let result = function(&mut observer);
        // The observer's thread waits for its observer, so the channel is open.
        let _ = give_back.send(observer);
        Some(result)
    }
}

impl BorrowRequest {
    /// Lends the observer to the thread that requested it, and waits until it is given back; `None` if the borrower
    /// panicked.
    fn lend_observer(self, observer: Observer) -> Option<Observer> {
        match self.lend_to.send(observer) {
            Ok(()) => self.returned_by.recv().ok(),
            Err(SendError(observer)) => Some(observer),
        }
    }
}

/// Adds to an eventfd. Writing to an eventfd fails only if its counter is full, and then the thread wakes anyway.
fn wake_thread(descriptor: &OwnedFd) {
    let _ = rustix::io::write(descriptor, &1_u64.to_ne_bytes());
}

/// The main loop of the observer's thread.
struct RoundLoop {
    interval: Duration,
    published: Arc<PublishedSnapshot>,
    requests: Receiver<BorrowRequest>,
    wake: Arc<OwnedFd>,
    stop: Arc<AtomicBool>,
    /// A descriptor that is readable when there are events of processes, changes of files or alarms about overhead.
    events: OwnedFd,
}

/// When each kind of work is due.
struct DueTimes {
    next_read: Instant,
    next_govern: Instant,
    next_alarm: Instant,
    next_scan: Instant,
    next_gpus: Instant,
    next_utilization: Instant,
    next_sample: Instant,
}

impl DueTimes {
    fn new(interval: Duration) -> Self {
        let now = Instant::now();
        Self {
            next_read: now + interval,
            next_govern: now + GOVERN_INTERVAL,
            next_alarm: now,
            next_scan: now + SCAN_INTERVAL,
            next_gpus: now + GPU_INTERVAL,
            next_utilization: now + UTILIZATION_INTERVAL,
            next_sample: now,
        }
    }
}

impl RoundLoop {
    fn run_until_stopped(self, observer: Observer) -> Result<Observer, ObserveError> {
        child_task::set_thread_stop_flag(Arc::clone(&self.stop));
        let result = self.run_rounds(observer);
        let end = result.as_ref().err().map(ToString::to_string);
        let _ = self.published.end_reason.set(end.unwrap_or_default());
        result
    }

    fn run_rounds(&self, mut observer: Observer) -> Result<Observer, ObserveError> {
        let mut due = DueTimes::new(self.interval);
        while !self.stop.load(Ordering::Relaxed) {
            let turn = observer.next_window_change();
            let mut until = due.next_read.min(due.next_govern);
            if observer.has_gpus() {
                until = until.min(due.next_utilization);
            }
            if observer.has_sampled_processes() {
                until = until.min(due.next_sample);
            }
            self.wait_for_event(turn.map_or(until, |turn| turn.min(until)));
            for loan in self.requests.try_iter() {
                observer = loan
                    .lend_observer(observer)
                    .ok_or(ObserveError::BorrowerPanicked)?;
            }
            observer.discover()?;
            if observer.had_alarm_since_last_call() && Instant::now() >= due.next_alarm {
                due.next_read = Instant::now();
                due.next_govern = due.next_read;
                due.next_alarm = due.next_read + MIN_ALARM_INTERVAL;
            }
            self.do_what_is_due(&mut observer, &mut due)?;
            detach_links(observer.open_or_close_window());
        }
        detach_links(observer.close_window());
        Ok(observer)
    }

    fn do_what_is_due(
        &self,
        observer: &mut Observer,
        due: &mut DueTimes,
    ) -> Result<(), ObserveError> {
        let is_due = |time: Instant| Instant::now() >= time;
        if is_due(due.next_read) || is_due(due.next_govern) {
            observer.read_counts()?;
            if is_due(due.next_govern) {
                observer.govern();
                due.next_govern = Instant::now() + GOVERN_INTERVAL;
                observer.refresh_identities();
            }
            self.published.publish_snapshot(observer);
            due.next_read = Instant::now() + self.interval;
        }
        if observer.has_gpus() && is_due(due.next_utilization) {
            observer.refresh_utilization();
            due.next_utilization = Instant::now() + UTILIZATION_INTERVAL;
        }
        if is_due(due.next_sample) {
            observer.sample_phases();
            due.next_sample = Instant::now() + SAMPLE_INTERVAL;
        }
        if is_due(due.next_gpus) {
            observer.refresh_gpus();
            due.next_gpus = Instant::now() + GPU_INTERVAL;
        }
        if is_due(due.next_scan) {
            observer.scan()?;
            due.next_scan = Instant::now() + SCAN_INTERVAL;
        }
        Ok(())
    }

    /// Waits for an event or a request, at most until a moment.
    fn wait_for_event(&self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).unwrap_or_default();
        let mut descriptors = [
            PollFd::new(&self.events, PollFlags::IN),
            PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN),
        ];
        // A signal ends the wait early, which does no harm.
        let _ = poll(&mut descriptors, Some(&timeout));
        let mut count = [0; 8];
        match rustix::io::read(&self.wake, &mut count) {
            // Reading fails if nobody woke the thread, because the eventfd does not block.
            Ok(_) | Err(rustix::io::Errno::AGAIN) => {}
            Err(error) => {
                debug_assert!(false, "{}", io::Error::from(error));
            }
        }
    }
}
