//! Events.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use zernel_softgpu::abi::Out;
use zernel_softgpu::clock::Waiting;
use zernel_softgpu::completion::Completion;
use zernel_softgpu::exports;
use zernel_softgpu::graph::CapturePoint;
use zernel_softgpu::registry::Registry;
use zernel_softgpu::truth::Call;
use zernel_softgpu::work::Work;

use crate::context::{Context, current, stream};
use crate::driver::driver;
use crate::status::{
    CAPTURED_EVENT, CudaError, INVALID_HANDLE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED, Outcome,
};

const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

/// All events.
pub(super) static EVENTS: Registry<Event> = Registry::new();

/// An event, with the state of its last record.
#[derive(Debug)]
pub(super) struct Event {
    flags: u32,
    context: Weak<Context>,
    recorded: Mutex<Recorded>,
}

#[derive(Debug, Clone, Default)]
enum Recorded {
    /// Never recorded, which counts as done.
    #[default]
    Nothing,
    InStream(Arc<Completion>),
    InCapture(CapturePoint),
}

impl Event {
    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When the stream got to the last record.
    pub(super) fn completion(&self) -> Option<Arc<Completion>> {
        match &*self.recorded() {
            Recorded::InStream(completion) => Some(Arc::clone(completion)),
            _ => None,
        }
    }

    /// The place in a capture of the last record.
    pub(super) fn captured(&self) -> Option<CapturePoint> {
        match &*self.recorded() {
            Recorded::InCapture(point) => Some(point.clone()),
            _ => None,
        }
    }

    /// The completion to look at or wait for, if there is one.
    fn awaited(&self) -> Result<Option<Arc<Completion>>, CudaError> {
        match &*self.recorded() {
            Recorded::Nothing => Ok(None),
            Recorded::InStream(completion) => Ok(Some(Arc::clone(completion))),
            Recorded::InCapture(_) => Err(CAPTURED_EVENT),
        }
    }

    fn waiting(&self) -> Waiting {
        match self.flags & BLOCKING_SYNC {
            0 => self
                .context
                .upgrade()
                .map_or(Waiting::Spin, |context| context.waiting()),
            _ => Waiting::Block,
        }
    }

    /// When the event happened, for time measurement.
    fn time(&self) -> Result<u64, CudaError> {
        if self.flags & DISABLE_TIMING != 0 {
            return Err(INVALID_HANDLE);
        }
        let completion = self.awaited()?.ok_or(INVALID_HANDLE)?;
        match completion.end() {
            Some(end) if completion.is_done() => Ok(end),
            _ => Err(NOT_READY),
        }
    }
}

fn event(handle: u64) -> Result<Arc<Event>, CudaError> {
    driver()?;
    EVENTS.get(handle).ok_or(INVALID_HANDLE)
}

fn record(call: &mut Call, handle: u64, stream_handle: u64) -> Outcome {
    call.object = handle;
    let event = event(handle)?;
    let stream = stream(call, stream_handle)?;
    let point = stream.stream.with_capture(|capture| capture.clone());
    let recorded = match point {
        Some(point) => Recorded::InCapture(point),
        None => {
            let completion = Completion::unknown();
            stream.submit(Work::Mark(Arc::clone(&completion)), call.symbol())?;
            Recorded::InStream(completion)
        }
    };
    *event.recorded() = recorded;
    Ok(())
}

fn elapsed(milliseconds: &Out<f32>, start: u64, end: u64) -> Outcome {
    let (start, end) = (event(start)?.time()?, event(end)?.time()?);
    let nanoseconds = end as f64 - start as f64;
    Ok(milliseconds.set((nanoseconds / 1e6) as f32)?)
}

exports! { "cuda" =>
    fn cuEventCreate(call, handle: Out<u64>, flags: u32) -> Outcome {
        let context = current()?;
        if flags & !(BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS) != 0 {
            return Err(INVALID_VALUE);
        }
        if flags & INTERPROCESS != 0 {
            return Err(NOT_SUPPORTED);
        }
        call.object = EVENTS.insert(Arc::new(Event {
            flags,
            context: Arc::downgrade(&context),
            recorded: Mutex::default(),
        }));
        Ok(handle.set(call.object)?)
    }

    fn cuEventDestroy_v2(call, handle: u64) -> Outcome {
        call.object = handle;
        driver()?;
        EVENTS.remove(handle).map(drop).ok_or(INVALID_HANDLE)
    }

    per_thread(cuEventRecord_ptsz)
    fn cuEventRecord(call, handle: u64, stream_handle: u64) -> Outcome {
        record(call, handle, stream_handle)
    }

    per_thread(cuEventRecordWithFlags_ptsz)
    fn cuEventRecordWithFlags(call, handle: u64, stream_handle: u64, flags: u32) -> Outcome {
        match flags {
            0 => record(call, handle, stream_handle),
            _ => Err(NOT_SUPPORTED),
        }
    }

    fn cuEventQuery(call, handle: u64) -> Outcome {
        call.object = handle;
        match event(handle)?.awaited()? {
            Some(completion) if !completion.is_done() => Err(NOT_READY),
            _ => Ok(()),
        }
    }

    fn cuEventSynchronize(call, handle: u64) -> Outcome {
        call.object = handle;
        let event = event(handle)?;
        if let Some(completion) = event.awaited()? {
            completion.wait(event.waiting());
        }
        Ok(())
    }

    fn cuEventElapsedTime(_call, milliseconds: Out<f32>, start: u64, end: u64) -> Outcome {
        elapsed(&milliseconds, start, end)
    }

    fn cuEventElapsedTime_v2(_call, milliseconds: Out<f32>, start: u64, end: u64) -> Outcome {
        elapsed(&milliseconds, start, end)
    }
}
