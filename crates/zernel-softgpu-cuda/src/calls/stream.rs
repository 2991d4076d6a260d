//! Functions for streams.

use std::ffi::c_void;
use std::sync::Arc;

use zernel_softgpu::abi_arguments::OutArgument;
use zernel_softgpu::exports;
use zernel_softgpu::registry::new_handle;
use zernel_softgpu::stream::StreamRole;
use zernel_softgpu::stream_work::{HostFunction, StreamWork};

use super::event::EVENTS;
use crate::context::{STREAMS, current_context, stream_of_handle};
use crate::status::{
    CudaError, INVALID_HANDLE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED, Outcome,
    STREAM_CAPTURE_MERGE, STREAM_CAPTURE_UNSUPPORTED,
};

const STREAM_NON_BLOCKING: u32 = 1;

fn create_stream(handle: &OutArgument<u64>, flags: u32, priority: i32) -> Result<u64, CudaError> {
    let context = current_context()?;
    let role = match flags {
        0 => StreamRole::Blocking,
        STREAM_NON_BLOCKING => StreamRole::NonBlocking,
        _ => return Err(INVALID_VALUE),
    };
    let new = new_handle();
    STREAMS.insert_with_handle(
        new,
        context.new_stream(new, role, flags, priority.clamp(-5, 0)),
    );
    handle.set(new)?;
    Ok(new)
}

exports! { "cuda" =>
    fn cuStreamCreate(call, handle: OutArgument<u64>, flags: u32) -> Outcome {
        call.stream = create_stream(&handle, flags, 0)?;
        Ok(())
    }

    fn cuStreamCreateWithPriority(call, handle: OutArgument<u64>, flags: u32, priority: i32) -> Outcome {
        call.stream = create_stream(&handle, flags, priority)?;
        Ok(())
    }

    /// Destroys a stream. Work that is already in the stream is still done.
    fn cuStreamDestroy_v2(call, handle: u64) -> Outcome {
        call.stream = handle;
        current_context()?;
        STREAMS.remove(handle).map(drop).ok_or(INVALID_HANDLE)
    }

    per_thread(cuStreamQuery_ptsz)
    fn cuStreamQuery(call, handle: u64) -> Outcome {
        let stream = stream_of_handle(call, handle)?;
        if stream.stream.is_capturing() {
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        match stream.is_idle()? {
            true => Ok(()),
            false => Err(NOT_READY),
        }
    }

    per_thread(cuStreamSynchronize_ptsz)
    fn cuStreamSynchronize(call, handle: u64) -> Outcome {
        stream_of_handle(call, handle)?.synchronize(call.symbol())
    }

    /// If the event was recorded in a graph capture, the waiting stream joins that capture.
    per_thread(cuStreamWaitEvent_ptsz)
    fn cuStreamWaitEvent(call, handle: u64, event: u64, flags: u32) -> Outcome {
        call.object = event;
        let stream = stream_of_handle(call, handle)?;
        let event = EVENTS.get(event).ok_or(INVALID_HANDLE)?;
        if flags & !1 != 0 {
            return Err(INVALID_VALUE);
        }
        if let Some(point) = event.capture_point() {
            return stream.stream.change_capture_point(|capture| match capture {
                None => {
                    *capture = Some(point);
                    Ok(())
                }
                Some(own) if Arc::ptr_eq(&own.capture, &point.capture) => {
                    own.add_predecessors_of(&point);
                    Ok(())
                }
                Some(_) => Err(STREAM_CAPTURE_MERGE),
            });
        }
        match event.completion() {
            Some(completion) => stream.submit_or_capture(StreamWork::WaitForCompletion(completion), call.symbol()),
            None => Ok(()),
        }
    }

    per_thread(cuStreamGetPriority_ptsz)
    fn cuStreamGetPriority(call, handle: u64, priority: OutArgument<i32>) -> Outcome {
        Ok(priority.set(stream_of_handle(call, handle)?.priority)?)
    }

    per_thread(cuStreamGetFlags_ptsz)
    fn cuStreamGetFlags(call, handle: u64, flags: OutArgument<u32>) -> Outcome {
        Ok(flags.set(stream_of_handle(call, handle)?.flags)?)
    }

    per_thread(cuStreamGetId_ptsz)
    fn cuStreamGetId(call, handle: u64, id: OutArgument<u64>) -> Outcome {
        stream_of_handle(call, handle)?;
        Ok(id.set(handle)?)
    }

    per_thread(cuStreamGetCtx_ptsz)
    fn cuStreamGetCtx(call, handle: u64, context: OutArgument<u64>) -> Outcome {
        Ok(context.set(stream_of_handle(call, handle)?.context()?.handle)?)
    }

    per_thread(cuStreamGetDevice_ptsz)
    fn cuStreamGetDevice(call, handle: u64, device: OutArgument<i32>) -> Outcome {
        Ok(device.set(stream_of_handle(call, handle)?.context()?.ordinal)?)
    }

    /// The driver calls the program's function on a thread of its own, after all earlier work of the stream.
    per_thread(cuLaunchHostFunc_ptsz)
    fn cuLaunchHostFunc(
        call, handle: u64, function: Option<extern "C" fn(*mut c_void)>, argument: u64,
    ) -> Outcome {
        let function = function.ok_or(INVALID_VALUE)?;
        let stream = stream_of_handle(call, handle)?;
        stream.submit_or_capture(StreamWork::Host(HostFunction { function, argument }), call.symbol())
    }

    per_thread(cuStreamAddCallback_ptsz)
    fn cuStreamAddCallback(
        call, handle: u64, callback: Option<StreamCallback>, argument: u64, flags: u32,
    ) -> Outcome {
        let callback = callback.ok_or(INVALID_VALUE)?;
        let stream = stream_of_handle(call, handle)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if stream.stream.is_capturing() {
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        let launch = Box::new(CallbackLaunch { callback, stream: handle, argument });
        let function = HostFunction { function: call_stream_callback, argument: Box::into_raw(launch) as u64 };
        stream.submit_or_capture(StreamWork::Host(function), call.symbol())
    }

    per_thread(cuStreamAttachMemAsync_ptsz)
    fn cuStreamAttachMemAsync(
        _call, _stream: u64, _address: u64, _bytes: usize, _flags: u32,
    ) -> Outcome {
        Err(NOT_SUPPORTED)
    }
}

/// `CUstreamCallback`, a program's function with the arguments stream, status and user data.
type StreamCallback = extern "C" fn(u64, i32, u64);

struct CallbackLaunch {
    callback: StreamCallback,
    stream: u64,
    argument: u64,
}

extern "C" fn call_stream_callback(launch: *mut c_void) {
    // SAFETY: made by `Box::into_raw` when the callback was added, and called once.
    let launch = unsafe { Box::from_raw(launch.cast::<CallbackLaunch>()) };
    (launch.callback)(launch.stream, 0, launch.argument);
}
