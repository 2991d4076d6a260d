//! Streams: queues of device work that runs in order on the device clock.
//!
//! A piece of work starts when it was submitted or when the work before it ends, whichever is later, and usually ends a
//! known time after its start. So a stream needs no thread: a submission computes the end, and a wait waits for the
//! clock. The work changes memory at once, because the program may not look at that memory before the end of the work.
//!
//! Work whose end is not known (host functions, collectives) goes into a queue, and so does all work after it. A thread
//! of the stream runs the work in the queue.

use std::collections::VecDeque;
use std::sync::atomic::{
    AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::clock;
use crate::completion::Completion;
use crate::device::Device;
use crate::graph::CapturePoint;
use crate::process;
use crate::stream_work::StreamWork;
use crate::truth::{DeviceWork, LoggedSymbol, log_device_work};

/// How a stream relates to the context's legacy default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamRole {
    /// The legacy default stream itself: it waits for blocking streams, and they wait for it.
    Legacy,
    /// The stream waits for the legacy default stream, and the legacy default stream waits for it.
    Blocking,
    /// The stream and the legacy default stream do not wait for each other.
    NonBlocking,
}

/// The last known ends of work in a context, by which the legacy default stream and blocking streams wait for each
/// other.
#[derive(Debug, Default)]
pub struct LastEndsByRole {
    legacy: AtomicU64,
    blocking: AtomicU64,
}

/// A queue of device work that runs in order.
#[derive(Debug)]
pub struct Stream {
    handle: u64,
    role: StreamRole,
    device: Arc<Device>,
    last_ends_by_role: Arc<LastEndsByRole>,
    state: Mutex<StreamState>,
    work_arrived: Condvar,
    /// Whether work is queued or running on the stream's thread, so that its end is unknown.
    has_deferred_work: AtomicBool,
    capture: Mutex<Option<CapturePoint>>,
    capturing: AtomicBool,
}

#[derive(Debug, Default)]
struct StreamState {
    last_end: u64,
    queue: VecDeque<QueuedWork>,
    has_queue_thread: bool,
    is_closed: bool,
}

#[derive(Debug)]
struct QueuedWork {
    work: StreamWork,
    symbol: &'static LoggedSymbol,
    submitted_at_ns: u64,
}

impl Stream {
    /// Creates a stream on `device`. The program refers to the stream by `handle`.
    #[must_use]
    pub fn new(
        handle: u64,
        role: StreamRole,
        device: Arc<Device>,
        last_ends_by_role: Arc<LastEndsByRole>,
    ) -> Arc<Self> {
        Arc::new(Self {
            handle,
            role,
            device,
            last_ends_by_role,
            state: Mutex::default(),
            work_arrived: Condvar::new(),
            has_deferred_work: AtomicBool::new(false),
            capture: Mutex::new(None),
            capturing: AtomicBool::new(false),
        })
    }

    /// The handle by which the program refers to the stream.
    #[must_use]
    pub fn handle(&self) -> u64 {
        self.handle
    }

    /// How the stream relates to the legacy default stream.
    #[must_use]
    pub fn role(&self) -> StreamRole {
        self.role
    }

    /// The device that the stream's work runs on.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    fn lock_state(&self) -> MutexGuard<'_, StreamState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts `work` at the end of the stream.
    pub fn submit(self: &Arc<Self>, work: StreamWork, symbol: &'static LoggedSymbol) {
        self.submit_at(clock::now_ns(), work, symbol);
    }

    fn submit_at(self: &Arc<Self>, now: u64, work: StreamWork, symbol: &'static LoggedSymbol) {
        let mut state = self.lock_state();
        if !self.is_deferred() && work.has_known_duration() {
            let start = now
                .max(state.last_end)
                .max(self.earliest_start_by_legacy_rules());
            let end = self.execute_work(&work, symbol, start);
            self.store_last_end(&mut state, end);
            return;
        }
        self.has_deferred_work.store(true, Release);
        state.queue.push_back(QueuedWork {
            work,
            symbol,
            submitted_at_ns: now,
        });
        self.ensure_thread(&mut state);
        self.work_arrived.notify_one();
    }

    /// The earliest time at which work may start by the rules of the legacy default stream.
    fn earliest_start_by_legacy_rules(&self) -> u64 {
        match self.role {
            StreamRole::Legacy => self.last_ends_by_role.blocking.load(Acquire),
            StreamRole::Blocking => self.last_ends_by_role.legacy.load(Acquire),
            StreamRole::NonBlocking => 0,
        }
    }

    fn store_last_end(&self, state: &mut StreamState, end: u64) {
        state.last_end = end;
        match self.role {
            StreamRole::Legacy => self.last_ends_by_role.legacy.fetch_max(end, Release),
            StreamRole::Blocking => self.last_ends_by_role.blocking.fetch_max(end, Release),
            StreamRole::NonBlocking => 0,
        };
    }

    fn execute_work(&self, work: &StreamWork, symbol: &'static LoggedSymbol, start: u64) -> u64 {
        if let StreamWork::Graph(graph) = work {
            return graph.run_nodes(start, |node, start| {
                self.execute_work(&node.work, node.symbol, start)
            });
        }
        let end = work.execute(start);
        if work.occupies_device() {
            self.device.record_busy_time(start, end);
            log_device_work(&DeviceWork {
                symbol,
                stream: self.handle,
                bytes: work.bytes(),
                start,
                end,
            });
        }
        end
    }

    fn ensure_thread(self: &Arc<Self>, state: &mut StreamState) {
        if state.has_queue_thread {
            return;
        }
        let stream = Arc::clone(self);
        process::spawn_thread_without_signals("softgpu-stream", move || stream.run_queued_work());
        state.has_queue_thread = true;
    }

    /// The body of the stream's thread: runs queued work until the stream is closed.
    fn run_queued_work(self: Arc<Self>) {
        while let Some(queued) = self.next_queued() {
            let tail = self.lock_state().last_end;
            let start = queued
                .submitted_at_ns
                .max(tail)
                .max(self.earliest_start_by_legacy_rules());
            let end = self.execute_work(&queued.work, queued.symbol, start);
            drop(queued);
            self.store_last_end(&mut self.lock_state(), end);
        }
    }

    fn next_queued(&self) -> Option<QueuedWork> {
        let mut state = self.lock_state();
        loop {
            if let Some(queued) = state.queue.pop_front() {
                return Some(queued);
            }
            self.has_deferred_work.store(false, Release);
            if state.is_closed {
                return None;
            }
            state = self
                .work_arrived
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the end of some work in the stream is not known yet.
    #[must_use]
    pub fn is_deferred(&self) -> bool {
        self.has_deferred_work.load(Acquire)
    }

    /// Whether the device has done all work of the stream.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let state = self.lock_state();
        !self.is_deferred() && self.last_end(&state) <= clock::now_ns()
    }

    /// Closes the stream. Queued work is still done.
    pub fn close(&self) {
        self.change_capture_point(|capture| *capture = None);
        self.lock_state().is_closed = true;
        self.work_arrived.notify_one();
    }

    /// Whether the stream is closed and all its work is done.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        let closed = self.lock_state().is_closed;
        closed && self.is_idle()
    }

    /// The end of the stream's last work. For the legacy stream: the last end of all streams that it waits for. A
    /// blocking stream without work does not wait for the legacy stream.
    fn last_end(&self, state: &StreamState) -> u64 {
        match self.role {
            StreamRole::Legacy => state.last_end.max(self.earliest_start_by_legacy_rules()),
            StreamRole::Blocking | StreamRole::NonBlocking => state.last_end,
        }
    }

    /// Adds a marker to the stream, and returns the completion of all work submitted before it.
    #[must_use]
    pub fn submit_completion_marker(
        self: &Arc<Self>,
        symbol: &'static LoggedSymbol,
    ) -> Arc<Completion> {
        let state = self.lock_state();
        if !self.is_deferred() {
            return Completion::with_known_end(self.last_end(&state));
        }
        drop(state);
        let completion = Completion::with_unknown_end();
        self.submit(StreamWork::SetCompletion(Arc::clone(&completion)), symbol);
        completion
    }

    /// Whether the stream captures its work in a graph instead of doing it. The check is cheap.
    #[must_use]
    pub fn is_capturing(&self) -> bool {
        self.capturing.load(Relaxed)
    }

    /// Calls `change` with the stream's position in a graph capture.
    pub fn change_capture_point<T>(
        &self,
        change: impl FnOnce(&mut Option<CapturePoint>) -> T,
    ) -> T {
        let mut capture = self.capture.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut capture);
        self.capturing.store(capture.is_some(), Relaxed);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::WaitMethod;
    use crate::node::{Node, NodeHardware};
    use crate::stream_work::HostFunction;
    use crate::test_directory::TestDirectory;

    static SYMBOL: LoggedSymbol = LoggedSymbol::new("test", "test");

    /// Streams of one context. The test passes the time of each submission.
    struct TestStreams {
        _directory: TestDirectory,
        device: Arc<Device>,
        last_ends_by_role: Arc<LastEndsByRole>,
    }

    impl TestStreams {
        fn new(name: &str) -> Self {
            let directory = TestDirectory::new(name);
            let hardware = NodeHardware {
                device_count: 1,
                bytes_per_device: 1,
            };
            let node = Node::open_in_directory(directory.path(), hardware).unwrap();
            Self {
                _directory: directory,
                device: Arc::new(Device::new(0, Arc::new(node.register_process().unwrap()))),
                last_ends_by_role: Arc::default(),
            }
        }

        fn stream(&self, role: StreamRole) -> Arc<Stream> {
            Stream::new(
                9,
                role,
                Arc::clone(&self.device),
                Arc::clone(&self.last_ends_by_role),
            )
        }
    }

    fn submit_kernel(stream: &Arc<Stream>, now: u64, duration: u64) {
        stream.submit_at(now, StreamWork::Kernel { duration }, &SYMBOL);
    }

    fn submit_marker_at(stream: &Arc<Stream>, now: u64) -> Arc<Completion> {
        let completion = Completion::with_unknown_end();
        stream.submit_at(
            now,
            StreamWork::SetCompletion(Arc::clone(&completion)),
            &SYMBOL,
        );
        completion
    }

    #[test]
    fn work_starts_at_submission_or_end_of_previous_work() {
        let stream = TestStreams::new("stream-order").stream(StreamRole::NonBlocking);
        submit_kernel(&stream, 100, 50);
        assert_eq!(submit_marker_at(&stream, 101).known_end(), Some(150));
        submit_kernel(&stream, 120, 30);
        assert_eq!(submit_marker_at(&stream, 121).known_end(), Some(180));
        submit_kernel(&stream, 500, 1);
        assert_eq!(submit_marker_at(&stream, 500).known_end(), Some(501));
    }

    #[test]
    fn streams_overlap_unless_one_waits_for_the_other() {
        let bench = TestStreams::new("stream-wait");
        let (first, second) = (
            bench.stream(StreamRole::NonBlocking),
            bench.stream(StreamRole::NonBlocking),
        );
        submit_kernel(&first, 100, 1000);
        submit_kernel(&second, 110, 20);
        assert_eq!(submit_marker_at(&second, 110).known_end(), Some(130));
        second.submit_at(
            120,
            StreamWork::WaitForCompletion(submit_marker_at(&first, 115)),
            &SYMBOL,
        );
        submit_kernel(&second, 121, 5);
        assert_eq!(submit_marker_at(&second, 122).known_end(), Some(1105));
        submit_kernel(&first, 123, 1);
        assert_eq!(submit_marker_at(&first, 124).known_end(), Some(1101));
    }

    #[test]
    fn the_legacy_stream_is_a_barrier_for_blocking_streams_only() {
        let bench = TestStreams::new("stream-legacy");
        let (legacy, blocking, free) = (
            bench.stream(StreamRole::Legacy),
            bench.stream(StreamRole::Blocking),
            bench.stream(StreamRole::NonBlocking),
        );
        submit_kernel(&blocking, 100, 100);
        submit_kernel(&free, 100, 5000);
        submit_kernel(&legacy, 101, 10);
        assert_eq!(submit_marker_at(&legacy, 101).known_end(), Some(210));
        submit_kernel(&blocking, 102, 1);
        assert_eq!(submit_marker_at(&blocking, 102).known_end(), Some(211));
        let other = bench.stream(StreamRole::Blocking);
        submit_kernel(&other, 103, 1);
        assert_eq!(submit_marker_at(&other, 103).known_end(), Some(211));
        assert_eq!(submit_marker_at(&free, 104).known_end(), Some(5100));
        let idle = bench.stream(StreamRole::Blocking);
        assert_eq!(
            idle.submit_completion_marker(&SYMBOL).known_end(),
            Some(0),
            "nothing to wait for"
        );
        assert_eq!(
            legacy.submit_completion_marker(&SYMBOL).known_end(),
            Some(211),
            "waits for the blocking streams"
        );
    }

    #[test]
    fn work_waits_for_earlier_work_of_unknown_length() {
        extern "C" fn sleep_20_ms(_: *mut std::ffi::c_void) {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let stream = TestStreams::new("stream-deferred").stream(StreamRole::NonBlocking);
        let begin = clock::now_ns();
        let function = HostFunction {
            function: sleep_20_ms,
            argument: 0,
        };
        stream.submit(StreamWork::Host(function), &SYMBOL);
        submit_kernel(&stream, begin, 1_000_000);
        let end = submit_marker_at(&stream, begin);
        assert!(stream.is_deferred());
        assert!(!stream.is_idle());
        assert!(end.wait_until_end_is_known(WaitMethod::Block) >= begin + 21_000_000);
        end.wait_until_done(WaitMethod::Block);
        while stream.is_deferred() {
            std::thread::yield_now();
        }
        assert!(stream.is_idle());
        stream.close();
    }
}
