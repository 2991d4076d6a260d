//! Contexts, their streams, and the current context of each thread.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use zernel_softgpu::clock::WaitMethod;
use zernel_softgpu::config;
use zernel_softgpu::device::Device;
use zernel_softgpu::registry::{Registry, new_handle};
use zernel_softgpu::stream::{LastEndsByRole, Stream, StreamRole};
use zernel_softgpu::stream_work::StreamWork;
use zernel_softgpu::truth::{LoggedSymbol, OpenCall};

use crate::driver::{ADDRESS_SPACE, initialised_driver};
use crate::status::{
    CudaError, INVALID_CONTEXT, INVALID_HANDLE, OUT_OF_MEMORY, STREAM_CAPTURE_IMPLICIT,
    STREAM_CAPTURE_UNSUPPORTED,
};

pub(crate) const SCHED_SPIN: u32 = 1;
pub(crate) const SCHED_YIELD: u32 = 2;
pub(crate) const SCHED_BLOCKING_SYNC: u32 = 4;
pub(crate) const SCHED_MASK: u32 = 7;

pub(crate) const STREAM_LEGACY: u64 = 1;
pub(crate) const STREAM_PER_THREAD: u64 = 2;

/// All contexts of this process, by handle.
pub(crate) static CONTEXTS: Registry<ContextObject> = Registry::new();
/// All streams that the program created, by handle.
pub(crate) static STREAMS: Registry<StreamObject> = Registry::new();
static PRIMARY_CONTEXTS: Mutex<Vec<PrimaryContext>> = Mutex::new(Vec::new());

/// A context on one device, with its streams.
#[derive(Debug)]
pub(crate) struct ContextObject {
    pub(crate) handle: u64,
    pub(crate) ordinal: i32,
    pub(crate) device: Arc<Device>,
    context_memory_bytes: u64,
    pub(crate) flags: AtomicU32,
    last_ends_by_role: Arc<LastEndsByRole>,
    legacy_stream: Arc<StreamObject>,
    /// The streams of the context, including those that the program has destroyed, until their work is done.
    streams: Mutex<Vec<Arc<Stream>>>,
}

/// A stream that the program has a handle for. Dropping the last reference closes the stream.
#[derive(Debug)]
pub(crate) struct StreamObject {
    pub(crate) stream: Arc<Stream>,
    pub(crate) context: Weak<ContextObject>,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
}

impl Drop for StreamObject {
    fn drop(&mut self) {
        self.stream.close();
    }
}

impl ContextObject {
    /// Creates a context on the device with this CUDA ordinal.
    pub(crate) fn new(ordinal: i32, flags: u32) -> Result<Arc<Self>, CudaError> {
        let device = Arc::clone(initialised_driver()?.device(ordinal)?);
        let context_memory_bytes = config::number_from_variable(config::CONTEXT_MEMORY_VARIABLE, 0);
        if !device.reserve_memory(context_memory_bytes) {
            return Err(OUT_OF_MEMORY);
        }
        device.count_created_context();
        let handle = new_handle();
        let context = Arc::new_cyclic(|context| {
            let last_ends_by_role = Arc::<LastEndsByRole>::default();
            let legacy = Arc::new(StreamObject {
                stream: Stream::new(
                    0,
                    StreamRole::Legacy,
                    Arc::clone(&device),
                    Arc::clone(&last_ends_by_role),
                ),
                context: Weak::clone(context),
                flags: 0,
                priority: 0,
            });
            Self {
                handle,
                ordinal,
                device,
                context_memory_bytes,
                flags: AtomicU32::new(flags),
                last_ends_by_role,
                legacy_stream: legacy,
                streams: Mutex::default(),
            }
        });
        CONTEXTS.insert_with_handle(handle, Arc::clone(&context));
        Ok(context)
    }

    /// Waits for all work of the context, then frees the memory, the streams and the handle of the context.
    pub(crate) fn destroy(&self, symbol: &'static LoggedSymbol) {
        self.wait_for_all_streams(symbol);
        STREAMS.retain(|stream| stream.context.as_ptr() != std::ptr::from_ref(self));
        ADDRESS_SPACE.remove_ranges_of_context(self.handle);
        self.device.release_memory(self.context_memory_bytes);
        self.device.count_destroyed_context();
        CONTEXTS.remove(self.handle);
    }

    /// Creates a stream that the program refers to by `handle`.
    pub(crate) fn new_stream(
        self: &Arc<Self>,
        handle: u64,
        role: StreamRole,
        flags: u32,
        priority: i32,
    ) -> Arc<StreamObject> {
        let stream = Stream::new(
            handle,
            role,
            Arc::clone(&self.device),
            Arc::clone(&self.last_ends_by_role),
        );
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|stream| !stream.is_finished());
        streams.push(Arc::clone(&stream));
        Arc::new(StreamObject {
            stream,
            context: Arc::downgrade(self),
            flags,
            priority,
        })
    }

    fn live_streams(&self) -> Vec<Arc<Stream>> {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.clone()
    }

    fn deferred_blocking_streams(&self) -> Vec<Arc<Stream>> {
        let mut streams = self.live_streams();
        streams.retain(|stream| stream.role() == StreamRole::Blocking && stream.is_deferred());
        streams
    }

    /// How threads wait in this context. `AUTO` spins, as the real driver does while a process has no more contexts
    /// than CPUs.
    pub(crate) fn wait_method(&self) -> WaitMethod {
        match self.flags.load(Relaxed) & SCHED_MASK {
            SCHED_YIELD => WaitMethod::Yield,
            SCHED_BLOCKING_SYNC => WaitMethod::Block,
            _ => WaitMethod::Spin,
        }
    }

    /// `cuCtxSynchronize`: waits for all work of the context.
    pub(crate) fn synchronize(&self, symbol: &'static LoggedSymbol) -> Result<(), CudaError> {
        if self
            .live_streams()
            .iter()
            .any(|stream| stream.is_capturing())
        {
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        self.wait_for_all_streams(symbol);
        Ok(())
    }

    fn wait_for_all_streams(&self, symbol: &'static LoggedSymbol) {
        let waiting = self.wait_method();
        let streams = self.live_streams();
        let all = streams.iter().chain([&self.legacy_stream.stream]);
        let markers: Vec<_> = all
            .map(|stream| stream.submit_completion_marker(symbol))
            .collect();
        markers
            .iter()
            .for_each(|marker| marker.wait_until_done(waiting));
    }
}

impl StreamObject {
    /// The context that the stream belongs to.
    pub(crate) fn context(&self) -> Result<Arc<ContextObject>, CudaError> {
        self.context.upgrade().ok_or(INVALID_CONTEXT)
    }

    /// Puts `work` at the end of the stream, or into the graph that the stream is capturing.
    pub(crate) fn submit_or_capture(
        &self,
        work: StreamWork,
        symbol: &'static LoggedSymbol,
    ) -> Result<(), CudaError> {
        if self.stream.is_capturing() {
            self.stream.change_capture_point(|capture| match capture {
                Some(point) => point.record_work(work, symbol),
                None => self.stream.submit(work, symbol),
            });
            return Ok(());
        }
        self.wait_by_legacy_stream_rules(symbol)?;
        self.stream.submit(work, symbol);
        Ok(())
    }

    /// Waits for work of other streams that must run before this stream's next work and has no known end. Work with a
    /// known end needs no wait: its end already delays later work.
    fn wait_by_legacy_stream_rules(&self, symbol: &'static LoggedSymbol) -> Result<(), CudaError> {
        let before = match self.stream.role() {
            StreamRole::NonBlocking => return Ok(()),
            StreamRole::Blocking => {
                let legacy = Arc::clone(&self.context()?.legacy_stream.stream);
                if !legacy.is_deferred() {
                    return Ok(());
                }
                vec![legacy]
            }
            StreamRole::Legacy => {
                let streams = self.context()?.live_streams();
                let captures = |stream: &Arc<Stream>| {
                    stream.role() == StreamRole::Blocking && stream.is_capturing()
                };
                if streams.iter().any(captures) {
                    return Err(STREAM_CAPTURE_IMPLICIT);
                }
                self.context()?.deferred_blocking_streams()
            }
        };
        for stream in before {
            let marker = stream.submit_completion_marker(symbol);
            self.stream
                .submit(StreamWork::WaitForCompletion(marker), symbol);
        }
        Ok(())
    }

    /// Waits until all work that was submitted to the stream so far is done.
    pub(crate) fn synchronize(&self, symbol: &'static LoggedSymbol) -> Result<(), CudaError> {
        if self.stream.is_capturing() {
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        let waiting = self.context()?.wait_method();
        self.wait_by_legacy_stream_rules(symbol)?;
        self.stream
            .submit_completion_marker(symbol)
            .wait_until_done(waiting);
        Ok(())
    }

    /// Whether all work that was submitted to the stream so far is done.
    pub(crate) fn is_idle(&self) -> Result<bool, CudaError> {
        let others = match self.stream.role() {
            StreamRole::Legacy => self.context()?.deferred_blocking_streams(),
            _ => Vec::new(),
        };
        Ok(others.is_empty() && self.stream.is_idle())
    }
}

/// A device's primary context: created at the first retain, destroyed at the last release.
#[derive(Debug, Default)]
pub(crate) struct PrimaryContext {
    user_count: usize,
    flags: u32,
    context: Option<Arc<ContextObject>>,
}

impl PrimaryContext {
    pub(crate) fn retain(&mut self, ordinal: i32) -> Result<u64, CudaError> {
        let context = match &self.context {
            Some(context) => Arc::clone(context),
            None => ContextObject::new(ordinal, self.flags)?,
        };
        self.user_count += 1;
        let handle = context.handle;
        self.context = Some(context);
        Ok(handle)
    }

    pub(crate) fn release(&mut self, symbol: &'static LoggedSymbol) -> Result<(), CudaError> {
        self.user_count = self.user_count.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        if self.user_count == 0 {
            self.reset(symbol);
        }
        Ok(())
    }

    pub(crate) fn reset(&mut self, symbol: &'static LoggedSymbol) {
        self.user_count = 0;
        if let Some(context) = self.context.take() {
            context.destroy(symbol);
        }
    }

    pub(crate) fn set_flags(&mut self, flags: u32) {
        self.flags = flags;
        if let Some(context) = &self.context {
            context.flags.store(flags, Relaxed);
        }
    }

    /// The flags of the primary context, and whether the context exists.
    pub(crate) fn flags_and_is_active(&self) -> (u32, bool) {
        (self.flags, self.context.is_some())
    }
}

/// Calls `change` with the primary context of the device with this CUDA ordinal.
pub(crate) fn with_primary_context<T>(
    ordinal: i32,
    change: impl FnOnce(&mut PrimaryContext) -> Result<T, CudaError>,
) -> Result<T, CudaError> {
    initialised_driver()?.device(ordinal)?;
    let mut primaries = PRIMARY_CONTEXTS
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let index = ordinal as usize;
    if primaries.len() <= index {
        primaries.resize_with(index + 1, PrimaryContext::default);
    }
    change(&mut primaries[index])
}

thread_local! {
    static CURRENT_CONTEXT_STACK: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    static STREAMS_OF_THREAD: RefCell<Vec<Arc<StreamObject>>> = const { RefCell::new(Vec::new()) };
}

/// Calls `change` with the calling thread's stack of current contexts. For a thread that exits, returns the default
/// value.
pub(crate) fn with_context_stack<T: Default>(change: impl FnOnce(&mut Vec<u64>) -> T) -> T {
    CURRENT_CONTEXT_STACK
        .try_with(|stack| change(&mut stack.borrow_mut()))
        .unwrap_or_default()
}

/// The calling thread's current context.
pub(crate) fn current_context() -> Result<Arc<ContextObject>, CudaError> {
    initialised_driver()?;
    let handle = with_context_stack(|stack| stack.last().copied()).ok_or(INVALID_CONTEXT)?;
    CONTEXTS.get(handle).ok_or(INVALID_CONTEXT)
}

/// The stream that `handle` refers to in this call; 0, 1 and 2 are default streams.
pub(crate) fn stream_of_handle(
    call: &mut OpenCall,
    handle: u64,
) -> Result<Arc<StreamObject>, CudaError> {
    call.stream = handle;
    match handle {
        0 if call.per_thread_default_stream => stream_of_thread(),
        STREAM_PER_THREAD => stream_of_thread(),
        0 | STREAM_LEGACY => Ok(Arc::clone(&current_context()?.legacy_stream)),
        _ => {
            initialised_driver()?;
            STREAMS.get(handle).ok_or(INVALID_HANDLE)
        }
    }
}

/// The calling thread's own default stream in the current context.
fn stream_of_thread() -> Result<Arc<StreamObject>, CudaError> {
    let context = current_context()?;
    let find_or_make = |streams: &RefCell<Vec<Arc<StreamObject>>>| {
        let mut streams = streams.borrow_mut();
        streams.retain(|stream| stream.context.strong_count() > 0);
        let known = streams
            .iter()
            .find(|stream| stream.context.as_ptr() == Arc::as_ptr(&context));
        if let Some(stream) = known {
            return Arc::clone(stream);
        }
        let stream = context.new_stream(STREAM_PER_THREAD, StreamRole::Blocking, 0, 0);
        streams.push(Arc::clone(&stream));
        stream
    };
    STREAMS_OF_THREAD
        .try_with(find_or_make)
        .map_err(|_| INVALID_CONTEXT)
}
