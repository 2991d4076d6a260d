//! Streams: work that runs in order on the device clock.
//!
//! A piece of work starts when it was submitted or when the work before it ends, whichever is
//! later, and usually ends a known time after that. So a stream needs no thread: a
//! submission computes the end, and a wait waits for the clock. The work changes memory at once, because
//! the program may not look at that memory before the end.
//!
//! Work whose end is not known (host functions, collectives) goes into a queue, and so does
//! all work after it. A thread of the stream runs the queue.

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
use crate::truth::{DeviceWork, Symbol, device_work};
use crate::work::Work;

/// How a stream relates to the context's legacy default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamRole {
    /// It is that stream: it waits for blocking streams, and they wait for it.
    Legacy,
    /// It waits for the legacy stream, and the legacy stream for it.
    Blocking,
    /// It is independent of that stream.
    NonBlocking,
}

/// Ends of all known work in a context, which order blocking streams and the legacy one.
#[derive(Debug, Default)]
pub struct ContextTails {
    legacy: AtomicU64,
    blocking: AtomicU64,
}

/// A stream.
#[derive(Debug)]
pub struct Stream {
    handle: u64,
    role: StreamRole,
    device: Arc<Device>,
    tails: Arc<ContextTails>,
    state: Mutex<State>,
    arrived: Condvar,
    /// Work is queued or running on the stream's thread.
    deferred: AtomicBool,
    capture: Mutex<Option<CapturePoint>>,
    capturing: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    tail: u64,
    queue: VecDeque<Queued>,
    has_thread: bool,
    closed: bool,
}

#[derive(Debug)]
struct Queued {
    work: Work,
    symbol: &'static Symbol,
    submitted: u64,
}

impl Stream {
    /// Creates a stream of `device`. The program refers to it by `handle`.
    #[must_use]
    pub fn new(
        handle: u64,
        role: StreamRole,
        device: Arc<Device>,
        tails: Arc<ContextTails>,
    ) -> Arc<Self> {
        Arc::new(Self {
            handle,
            role,
            device,
            tails,
            state: Mutex::default(),
            arrived: Condvar::new(),
            deferred: AtomicBool::new(false),
            capture: Mutex::new(None),
            capturing: AtomicBool::new(false),
        })
    }

    /// Its handle.
    #[must_use]
    pub fn handle(&self) -> u64 {
        self.handle
    }

    /// How it relates to the legacy default stream.
    #[must_use]
    pub fn role(&self) -> StreamRole {
        self.role
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts `work` at the end of the stream.
    pub fn submit(self: &Arc<Self>, work: Work, symbol: &'static Symbol) {
        self.submit_at(clock::now(), work, symbol);
    }

    fn submit_at(self: &Arc<Self>, now: u64, work: Work, symbol: &'static Symbol) {
        let mut state = self.state();
        if !self.is_deferred() && work.is_immediate() {
            let start = now.max(state.tail).max(self.floor());
            let end = self.execute(&work, symbol, start);
            self.advance(&mut state, end);
            return;
        }
        self.deferred.store(true, Release);
        state.queue.push_back(Queued {
            work,
            symbol,
            submitted: now,
        });
        self.ensure_thread(&mut state);
        self.arrived.notify_one();
    }

    /// The earliest start by the rules of the legacy default stream.
    fn floor(&self) -> u64 {
        match self.role {
            StreamRole::Legacy => self.tails.blocking.load(Acquire),
            StreamRole::Blocking => self.tails.legacy.load(Acquire),
            StreamRole::NonBlocking => 0,
        }
    }

    fn advance(&self, state: &mut State, end: u64) {
        state.tail = end;
        match self.role {
            StreamRole::Legacy => self.tails.legacy.fetch_max(end, Release),
            StreamRole::Blocking => self.tails.blocking.fetch_max(end, Release),
            StreamRole::NonBlocking => 0,
        };
    }

    fn execute(&self, work: &Work, symbol: &'static Symbol, start: u64) -> u64 {
        if let Work::Graph(graph) = work {
            return graph.run(start, |node, start| {
                self.execute(&node.work, node.symbol, start)
            });
        }
        let end = work.execute(start);
        if work.occupies_device() {
            self.device.busy(start, end);
            device_work(&DeviceWork {
                symbol,
                stream: self.handle,
                bytes: work.bytes(),
                start,
                end,
            });
        }
        end
    }

    fn ensure_thread(self: &Arc<Self>, state: &mut State) {
        if state.has_thread {
            return;
        }
        let stream = Arc::clone(self);
        process::spawn_quiet_thread("softgpu-stream", move || stream.work_off());
        state.has_thread = true;
    }

    /// The stream's thread: runs the queue until the stream is closed.
    fn work_off(self: Arc<Self>) {
        while let Some(queued) = self.next() {
            let tail = self.state().tail;
            let start = queued.submitted.max(tail).max(self.floor());
            let end = self.execute(&queued.work, queued.symbol, start);
            drop(queued);
            self.advance(&mut self.state(), end);
        }
    }

    fn next(&self) -> Option<Queued> {
        let mut state = self.state();
        loop {
            if let Some(queued) = state.queue.pop_front() {
                return Some(queued);
            }
            self.deferred.store(false, Release);
            if state.closed {
                return None;
            }
            state = self
                .arrived
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether part of its work has no known end yet.
    #[must_use]
    pub fn is_deferred(&self) -> bool {
        self.deferred.load(Acquire)
    }

    /// Whether the device has done all of its work.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let state = self.state();
        !self.is_deferred() && self.last_end(&state) <= clock::now()
    }

    /// Closes the stream. Queued work is still done.
    pub fn close(&self) {
        self.with_capture(|capture| *capture = None);
        self.state().closed = true;
        self.arrived.notify_one();
    }

    /// Whether the stream is closed and has nothing left to do.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        let closed = self.state().closed;
        closed && self.is_idle()
    }

    /// The end of its last work. For the legacy stream: the last end of all streams that it waits for. A
    /// blocking stream without work does not wait for the legacy stream.
    fn last_end(&self, state: &State) -> u64 {
        match self.role {
            StreamRole::Legacy => state.tail.max(self.floor()),
            StreamRole::Blocking | StreamRole::NonBlocking => state.tail,
        }
    }

    /// When everything submitted so far is done.
    #[must_use]
    pub fn marker(self: &Arc<Self>, symbol: &'static Symbol) -> Arc<Completion> {
        let state = self.state();
        if !self.is_deferred() {
            return Completion::at(self.last_end(&state));
        }
        drop(state);
        let completion = Completion::unknown();
        self.submit(Work::Mark(Arc::clone(&completion)), symbol);
        completion
    }

    /// Whether the stream records a graph instead of working. Cheap.
    #[must_use]
    pub fn is_capturing(&self) -> bool {
        self.capturing.load(Relaxed)
    }

    /// Calls `change` with its position in a capture.
    pub fn with_capture<T>(&self, change: impl FnOnce(&mut Option<CapturePoint>) -> T) -> T {
        let mut capture = self.capture.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut capture);
        self.capturing.store(capture.is_some(), Relaxed);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Waiting;
    use crate::node::{Hardware, Node};
    use crate::test_directory::TestDirectory;
    use crate::work::HostFunction;

    static SYMBOL: Symbol = Symbol::new("test", "test");

    /// Streams of one context, on a clock that the test reads out.
    struct TestStreams {
        _directory: TestDirectory,
        device: Arc<Device>,
        tails: Arc<ContextTails>,
    }

    impl TestStreams {
        fn new(name: &str) -> Self {
            let directory = TestDirectory::new(name);
            let hardware = Hardware {
                devices: 1,
                memory: 1,
            };
            let node = Node::open_in(directory.path(), hardware).unwrap();
            Self {
                _directory: directory,
                device: Arc::new(Device::new(0, Arc::new(node.join().unwrap()))),
                tails: Arc::default(),
            }
        }

        fn stream(&self, role: StreamRole) -> Arc<Stream> {
            Stream::new(9, role, Arc::clone(&self.device), Arc::clone(&self.tails))
        }
    }

    fn kernel(stream: &Arc<Stream>, now: u64, duration: u64) {
        stream.submit_at(now, Work::Kernel { duration }, &SYMBOL);
    }

    fn mark(stream: &Arc<Stream>, now: u64) -> Arc<Completion> {
        let completion = Completion::unknown();
        stream.submit_at(now, Work::Mark(Arc::clone(&completion)), &SYMBOL);
        completion
    }

    #[test]
    fn work_starts_when_submitted_or_when_the_work_before_ends() {
        let stream = TestStreams::new("stream-order").stream(StreamRole::NonBlocking);
        kernel(&stream, 100, 50);
        assert_eq!(mark(&stream, 101).end(), Some(150));
        kernel(&stream, 120, 30);
        assert_eq!(mark(&stream, 121).end(), Some(180));
        kernel(&stream, 500, 1);
        assert_eq!(mark(&stream, 500).end(), Some(501));
    }

    #[test]
    fn streams_overlap_unless_one_waits_for_the_other() {
        let bench = TestStreams::new("stream-wait");
        let (first, second) = (
            bench.stream(StreamRole::NonBlocking),
            bench.stream(StreamRole::NonBlocking),
        );
        kernel(&first, 100, 1000);
        kernel(&second, 110, 20);
        assert_eq!(mark(&second, 110).end(), Some(130));
        second.submit_at(120, Work::Wait(mark(&first, 115)), &SYMBOL);
        kernel(&second, 121, 5);
        assert_eq!(mark(&second, 122).end(), Some(1105));
        kernel(&first, 123, 1);
        assert_eq!(mark(&first, 124).end(), Some(1101));
    }

    #[test]
    fn the_legacy_stream_is_a_barrier_for_blocking_streams_only() {
        let bench = TestStreams::new("stream-legacy");
        let (legacy, blocking, free) = (
            bench.stream(StreamRole::Legacy),
            bench.stream(StreamRole::Blocking),
            bench.stream(StreamRole::NonBlocking),
        );
        kernel(&blocking, 100, 100);
        kernel(&free, 100, 5000);
        kernel(&legacy, 101, 10);
        assert_eq!(mark(&legacy, 101).end(), Some(210));
        kernel(&blocking, 102, 1);
        assert_eq!(mark(&blocking, 102).end(), Some(211));
        let other = bench.stream(StreamRole::Blocking);
        kernel(&other, 103, 1);
        assert_eq!(mark(&other, 103).end(), Some(211));
        assert_eq!(mark(&free, 104).end(), Some(5100));
        let idle = bench.stream(StreamRole::Blocking);
        assert_eq!(idle.marker(&SYMBOL).end(), Some(0), "nothing to wait for");
        assert_eq!(
            legacy.marker(&SYMBOL).end(),
            Some(211),
            "waits for the blocking streams"
        );
    }

    #[test]
    fn what_follows_work_of_unknown_length_waits_for_it() {
        extern "C" fn nap(_: *mut std::ffi::c_void) {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let stream = TestStreams::new("stream-deferred").stream(StreamRole::NonBlocking);
        let begin = clock::now();
        let function = HostFunction {
            function: nap,
            argument: 0,
        };
        stream.submit(Work::Host(function), &SYMBOL);
        kernel(&stream, begin, 1_000_000);
        let end = mark(&stream, begin);
        assert!(stream.is_deferred());
        assert!(!stream.is_idle());
        assert!(end.wait_known(Waiting::Block) >= begin + 21_000_000);
        end.wait(Waiting::Block);
        while stream.is_deferred() {
            std::thread::yield_now();
        }
        assert!(stream.is_idle());
        stream.close();
    }
}
