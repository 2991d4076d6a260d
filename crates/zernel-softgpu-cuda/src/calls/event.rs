//! Functions for events.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use zernel_softgpu::abi_arguments::OutArgument;
use zernel_softgpu::clock::WaitMethod;
use zernel_softgpu::completion::Completion;
use zernel_softgpu::exports;
use zernel_softgpu::graph::CapturePoint;
use zernel_softgpu::registry::Registry;
use zernel_softgpu::stream_work::StreamWork;
use zernel_softgpu::truth::OpenCall;

use crate::context::{ContextObject, current_context, stream_of_handle};
use crate::driver::initialised_driver;
use crate::status::{
    CAPTURED_EVENT, CudaError, INVALID_HANDLE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED, Outcome,
};

const EVENT_BLOCKING_SYNC: u32 = 1;
const EVENT_DISABLE_TIMING: u32 = 2;
const EVENT_INTERPROCESS: u32 = 4;

/// All events that exist, by handle.
pub(super) static EVENTS: Registry<EventObject> = Registry::new();

/// An event, and where it was last recorded.
#[derive(Debug)]
pub(super) struct EventObject {
    flags: u32,
    context: Weak<ContextObject>,
    last_record: Mutex<LastRecord>,
}

#[derive(Debug, Clone, Default)]
enum LastRecord {
    /// The event was never recorded, which counts as done.
    #[default]
    Nothing,
    InStream(Arc<Completion>),
    InCapture(CapturePoint),
}

impl EventObject {
    fn lock_last_record(&self) -> MutexGuard<'_, LastRecord> {
        self.last_record
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The moment at which the stream reaches the event's last record.
    pub(super) fn completion(&self) -> Option<Arc<Completion>> {
        match &*self.lock_last_record() {
            LastRecord::InStream(completion) => Some(Arc::clone(completion)),
            _ => None,
        }
    }

    /// The place in a graph capture at which the event was last recorded.
    pub(super) fn capture_point(&self) -> Option<CapturePoint> {
        match &*self.lock_last_record() {
            LastRecord::InCapture(point) => Some(point.clone()),
            _ => None,
        }
    }

    /// The completion of the event's last record, to query or wait for; `None` if the event was never recorded.
    fn completion_to_await(&self) -> Result<Option<Arc<Completion>>, CudaError> {
        match &*self.lock_last_record() {
            LastRecord::Nothing => Ok(None),
            LastRecord::InStream(completion) => Ok(Some(Arc::clone(completion))),
            LastRecord::InCapture(_) => Err(CAPTURED_EVENT),
        }
    }

    fn wait_method(&self) -> WaitMethod {
        match self.flags & EVENT_BLOCKING_SYNC {
            0 => self
                .context
                .upgrade()
                .map_or(WaitMethod::Spin, |context| context.wait_method()),
            _ => WaitMethod::Block,
        }
    }

    /// The time at which the event happened, for `cuEventElapsedTime`.
    fn recorded_time(&self) -> Result<u64, CudaError> {
        if self.flags & EVENT_DISABLE_TIMING != 0 {
            return Err(INVALID_HANDLE);
        }
        let completion = self.completion_to_await()?.ok_or(INVALID_HANDLE)?;
        match completion.known_end() {
            Some(end) if completion.is_done() => Ok(end),
            _ => Err(NOT_READY),
        }
    }
}

fn event_of_handle(handle: u64) -> Result<Arc<EventObject>, CudaError> {
    initialised_driver()?;
    EVENTS.get(handle).ok_or(INVALID_HANDLE)
}

fn record_event(call: &mut OpenCall, handle: u64, stream_handle: u64) -> Outcome {
    call.object = handle;
    let event = event_of_handle(handle)?;
    let stream = stream_of_handle(call, stream_handle)?;
    let point = stream
        .stream
        .change_capture_point(|capture| capture.clone());
    let recorded = match point {
        Some(point) => LastRecord::InCapture(point),
        None => {
            let completion = Completion::with_unknown_end();
            stream.submit_or_capture(
                StreamWork::SetCompletion(Arc::clone(&completion)),
                call.symbol(),
            )?;
            LastRecord::InStream(completion)
        }
    };
    *event.lock_last_record() = recorded;
    Ok(())
}

fn store_elapsed_time(milliseconds: &OutArgument<f32>, start: u64, end: u64) -> Outcome {
    let (start, end) = (
        event_of_handle(start)?.recorded_time()?,
        event_of_handle(end)?.recorded_time()?,
    );
    let nanoseconds = end as f64 - start as f64;
    Ok(milliseconds.set((nanoseconds / 1e6) as f32)?)
}

exports! { "cuda" =>
    fn cuEventCreate(call, handle: OutArgument<u64>, flags: u32) -> Outcome {
        let context = current_context()?;
        if flags & !(EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING | EVENT_INTERPROCESS) != 0 {
            return Err(INVALID_VALUE);
        }
        if flags & EVENT_INTERPROCESS != 0 {
            return Err(NOT_SUPPORTED);
        }
        call.object = EVENTS.insert(Arc::new(EventObject {
            flags,
            context: Arc::downgrade(&context),
            last_record: Mutex::default(),
        }));
        Ok(handle.set(call.object)?)
    }

    fn cuEventDestroy_v2(call, handle: u64) -> Outcome {
        call.object = handle;
        initialised_driver()?;
        EVENTS.remove(handle).map(drop).ok_or(INVALID_HANDLE)
    }

    per_thread(cuEventRecord_ptsz)
    fn cuEventRecord(call, handle: u64, stream_handle: u64) -> Outcome {
        record_event(call, handle, stream_handle)
    }

    per_thread(cuEventRecordWithFlags_ptsz)
    fn cuEventRecordWithFlags(call, handle: u64, stream_handle: u64, flags: u32) -> Outcome {
        match flags {
            0 => record_event(call, handle, stream_handle),
            _ => Err(NOT_SUPPORTED),
        }
    }

    fn cuEventQuery(call, handle: u64) -> Outcome {
        call.object = handle;
        match event_of_handle(handle)?.completion_to_await()? {
            Some(completion) if !completion.is_done() => Err(NOT_READY),
            _ => Ok(()),
        }
    }

    fn cuEventSynchronize(call, handle: u64) -> Outcome {
        call.object = handle;
        let event = event_of_handle(handle)?;
        if let Some(completion) = event.completion_to_await()? {
            completion.wait_until_done(event.wait_method());
        }
        Ok(())
    }

    fn cuEventElapsedTime(_call, milliseconds: OutArgument<f32>, start: u64, end: u64) -> Outcome {
        store_elapsed_time(&milliseconds, start, end)
    }

    fn cuEventElapsedTime_v2(_call, milliseconds: OutArgument<f32>, start: u64, end: u64) -> Outcome {
        store_elapsed_time(&milliseconds, start, end)
    }
}
