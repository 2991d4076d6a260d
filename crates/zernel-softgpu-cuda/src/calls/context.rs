//! Functions for primary contexts and other contexts.

use std::sync::atomic::Ordering::Relaxed;

use zernel_softgpu::abi_arguments::OutArgument;
use zernel_softgpu::exports;

use crate::context::{
    CONTEXTS, ContextObject, SCHED_BLOCKING_SYNC, SCHED_MASK, SCHED_SPIN, SCHED_YIELD,
    current_context, with_context_stack, with_primary_context,
};
use crate::driver::initialised_driver;
use crate::status::{CudaError, INVALID_CONTEXT, INVALID_VALUE, NOT_SUPPORTED, Outcome};

/// The bits that the flags of a context may have.
const CONTEXT_FLAGS_MASK: u32 = 0xff;
/// The values of `CU_LIMIT_*`: stack, printf buffer, heap, sync depth, pending launches, L2 granularity, persisting L2.
const CONTEXT_LIMITS: [usize; 7] = [1024, 1 << 20, 8 << 20, 2, 2048, 64, 0];

fn check_flags(flags: u32) -> Result<u32, CudaError> {
    let scheduling = flags & SCHED_MASK;
    let known = [0, SCHED_SPIN, SCHED_YIELD, SCHED_BLOCKING_SYNC].contains(&scheduling);
    match known && flags & !CONTEXT_FLAGS_MASK == 0 {
        true => Ok(flags),
        false => Err(INVALID_VALUE),
    }
}

fn create_context(handle: &OutArgument<u64>, flags: u32, device: i32) -> Outcome {
    let context = ContextObject::new(device, check_flags(flags)?)?;
    with_context_stack(|stack| stack.push(context.handle));
    Ok(handle.set(context.handle)?)
}

fn check_is_context(handle: u64) -> Result<(), CudaError> {
    initialised_driver()?;
    CONTEXTS.get(handle).map(drop).ok_or(INVALID_CONTEXT)
}

exports! { "cuda" =>
    fn cuDevicePrimaryCtxRetain(_call, context: OutArgument<u64>, device: i32) -> Outcome {
        let handle = with_primary_context(device, |primary| primary.retain(device))?;
        Ok(context.set(handle)?)
    }

    fn cuDevicePrimaryCtxRelease_v2(call, device: i32) -> Outcome {
        with_primary_context(device, |primary| primary.release(call.symbol()))
    }

    fn cuDevicePrimaryCtxReset_v2(call, device: i32) -> Outcome {
        with_primary_context(device, |primary| {
            primary.reset(call.symbol());
            Ok(())
        })
    }

    fn cuDevicePrimaryCtxSetFlags_v2(_call, device: i32, flags: u32) -> Outcome {
        let flags = check_flags(flags)?;
        with_primary_context(device, |primary| {
            primary.set_flags(flags);
            Ok(())
        })
    }

    fn cuDevicePrimaryCtxGetState(
        _call, device: i32, flags: OutArgument<u32>, active: OutArgument<i32>,
    ) -> Outcome {
        let (current_flags, is_active) = with_primary_context(device, |primary| Ok(primary.flags_and_is_active()))?;
        flags.set_unless_null(current_flags);
        active.set_unless_null(i32::from(is_active));
        Ok(())
    }

    fn cuCtxCreate_v2(_call, context: OutArgument<u64>, flags: u32, device: i32) -> Outcome {
        create_context(&context, flags, device)
    }

    fn cuCtxCreate_v3(
        _call, context: OutArgument<u64>, _affinities: u64, affinity_count: i32, flags: u32, device: i32,
    ) -> Outcome {
        match affinity_count {
            0 => create_context(&context, flags, device),
            _ => Err(NOT_SUPPORTED),
        }
    }

    fn cuCtxCreate_v4(
        _call, context: OutArgument<u64>, parameters: u64, flags: u32, device: i32,
    ) -> Outcome {
        match parameters {
            0 => create_context(&context, flags, device),
            _ => Err(NOT_SUPPORTED),
        }
    }

    fn cuCtxDestroy_v2(call, context: u64) -> Outcome {
        initialised_driver()?;
        let object = CONTEXTS.get(context).ok_or(INVALID_CONTEXT)?;
        object.destroy(call.symbol());
        with_context_stack(|stack| stack.retain(|handle| *handle != context));
        Ok(())
    }

    fn cuCtxSetCurrent(_call, context: u64) -> Outcome {
        if context != 0 {
            check_is_context(context)?;
        }
        with_context_stack(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
        initialised_driver().map(drop)
    }

    fn cuCtxGetCurrent(_call, context: OutArgument<u64>) -> Outcome {
        initialised_driver()?;
        Ok(context.set(with_context_stack(|stack| stack.last().copied()).unwrap_or(0))?)
    }

    fn cuCtxPushCurrent_v2(_call, context: u64) -> Outcome {
        check_is_context(context)?;
        with_context_stack(|stack| stack.push(context));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(_call, context: OutArgument<u64>) -> Outcome {
        initialised_driver()?;
        let popped = with_context_stack(Vec::pop).ok_or(INVALID_CONTEXT)?;
        context.set_unless_null(popped);
        Ok(())
    }

    fn cuCtxGetDevice(_call, device: OutArgument<i32>) -> Outcome {
        Ok(device.set(current_context()?.ordinal)?)
    }

    fn cuCtxGetFlags(_call, flags: OutArgument<u32>) -> Outcome {
        Ok(flags.set(current_context()?.flags.load(Relaxed))?)
    }

    fn cuCtxSetFlags(_call, flags: u32) -> Outcome {
        current_context()?.flags.store(check_flags(flags)?, Relaxed);
        Ok(())
    }

    fn cuCtxGetId(_call, context: u64, id: OutArgument<u64>) -> Outcome {
        let handle = match context {
            0 => current_context()?.handle,
            _ => context,
        };
        check_is_context(handle)?;
        Ok(id.set(handle)?)
    }

    fn cuCtxGetApiVersion(_call, context: u64, version: OutArgument<u32>) -> Outcome {
        if context != 0 {
            check_is_context(context)?;
        }
        Ok(version.set(3020)?)
    }

    fn cuCtxGetStreamPriorityRange(_call, least: OutArgument<i32>, greatest: OutArgument<i32>) -> Outcome {
        current_context()?;
        least.set_unless_null(0);
        greatest.set_unless_null(-5);
        Ok(())
    }

    fn cuCtxGetLimit(_call, value: OutArgument<usize>, limit: u32) -> Outcome {
        current_context()?;
        Ok(value.set(*CONTEXT_LIMITS.get(limit as usize).ok_or(INVALID_VALUE)?)?)
    }

    /// Limits cannot be changed: the simulated device has no stacks, heaps or buffers that could be made bigger.
    fn cuCtxSetLimit(_call, limit: u32, _value: usize) -> Outcome {
        current_context()?;
        CONTEXT_LIMITS.get(limit as usize).map(|_| ()).ok_or(INVALID_VALUE)
    }

    fn cuCtxGetCacheConfig(_call, configuration: OutArgument<i32>) -> Outcome {
        current_context()?;
        Ok(configuration.set(0)?)
    }

    fn cuCtxSetCacheConfig(_call, _configuration: i32) -> Outcome {
        current_context().map(drop)
    }

    /// All simulated devices live in the same host memory, so every context can always access every device.
    fn cuCtxEnablePeerAccess(_call, peer: u64, _flags: u32) -> Outcome {
        current_context()?;
        check_is_context(peer)
    }

    fn cuCtxDisablePeerAccess(_call, peer: u64) -> Outcome {
        current_context()?;
        check_is_context(peer)
    }

    fn cuCtxSynchronize(call) -> Outcome {
        current_context()?.synchronize(call.symbol())
    }
}
