//! Functions that copy and fill memory.

use zernel_softgpu::abi_arguments::InArgument;
use zernel_softgpu::clock::WaitMethod;
use zernel_softgpu::exports;
use zernel_softgpu::stream_work::{MemoryCopy, MemoryFill, StreamWork};
use zernel_softgpu::truth::OpenCall;

use crate::context::{StreamObject, stream_of_handle};
use crate::driver::ADDRESS_SPACE;
use crate::status::{CudaError, INVALID_VALUE, NOT_SUPPORTED, Outcome};
use crate::types::{Copy2D, Copy3D, CopySide2D, CopySide3D};

use ClaimedMemoryType::{Device, Host, Unified};
use CopyReturnTime::{AfterCopyIsDone, BeforeCopyIsDone};

/// The type of a memory address, as the caller states it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClaimedMemoryType {
    Device,
    Host,
    /// The caller does not state the type; the driver finds it out from the address.
    Unified,
}

/// The actual type of the memory at one side of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ActualMemoryType {
    Device,
    /// Host memory that the driver knows, so that the device can reach it at any time.
    Pinned,
    /// Host memory that the driver does not know.
    Pageable,
}

fn check_claimed_memory_type(
    claim: ClaimedMemoryType,
    address: u64,
    bytes: u64,
) -> Result<ActualMemoryType, CudaError> {
    let known = ADDRESS_SPACE
        .find_range(address)
        .map(|range| range.kind.is_host());
    let place = match (claim, known) {
        (ClaimedMemoryType::Device, None) => return Err(INVALID_VALUE),
        (ClaimedMemoryType::Host | ClaimedMemoryType::Unified, None) => ActualMemoryType::Pageable,
        (_, Some(true)) => ActualMemoryType::Pinned,
        (_, Some(false)) => ActualMemoryType::Device,
    };
    if address == 0 && bytes > 0
        || place == ActualMemoryType::Device && !ADDRESS_SPACE.is_known_memory(address, bytes)
    {
        return Err(INVALID_VALUE);
    }
    Ok(place)
}

/// When a function that copies returns to its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CopyReturnTime {
    BeforeCopyIsDone,
    AfterCopyIsDone,
}

/// The number of bytes between the first and the last byte of one side of a copy.
fn byte_extent_of_side(pitch: u64, copy: &MemoryCopy) -> u64 {
    copy.rows.saturating_sub(1) * pitch + copy.width
}

fn submit_copy(
    call: &mut OpenCall,
    copy: MemoryCopy,
    claims: [ClaimedMemoryType; 2],
    stream_handle: u64,
    returns: CopyReturnTime,
) -> Outcome {
    call.bytes = copy.bytes();
    let stream = stream_of_handle(call, stream_handle)?;
    if copy.bytes() == 0 {
        return Ok(());
    }
    let destination_extent = byte_extent_of_side(copy.destination_pitch, &copy);
    let destination = check_claimed_memory_type(claims[0], copy.destination, destination_extent)?;
    let source = check_claimed_memory_type(
        claims[1],
        copy.source,
        byte_extent_of_side(copy.source_pitch, &copy),
    )?;
    let device = stream.stream.device();
    let within_device =
        destination == ActualMemoryType::Device && source == ActualMemoryType::Device;
    let duration = match within_device {
        true => device.device_memory_time_ns(copy.bytes()),
        false => device.copy_time_ns(copy.bytes()),
    };
    stream.submit_or_capture(StreamWork::Copy { copy, duration }, call.symbol())?;
    if destination == ActualMemoryType::Pageable || source == ActualMemoryType::Pageable {
        wait_for_copies(&stream, call);
    }
    // As CUDA documents it: the caller of a synchronous copy within the device does not wait, and the caller of an
    // asynchronous copy into pageable memory does.
    let waits = match returns {
        AfterCopyIsDone => !within_device,
        BeforeCopyIsDone => {
            destination == ActualMemoryType::Pageable && !stream.stream.is_capturing()
        }
    };
    match waits {
        true => stream.synchronize(call.symbol()),
        false => Ok(()),
    }
}

fn copy_linear(
    call: &mut OpenCall,
    claims: [ClaimedMemoryType; 2],
    (destination, source): (u64, u64),
    bytes: usize,
    stream_handle: u64,
    returns: CopyReturnTime,
) -> Outcome {
    let row = MemoryCopy::linear(destination, source, bytes as u64);
    submit_copy(call, row, claims, stream_handle, returns)
}

/// Waits until the stream has made its copies: the program may free pageable memory when the copy function returns.
fn wait_for_copies(stream: &StreamObject, call: &OpenCall) {
    if stream.stream.is_deferred() && !stream.stream.is_capturing() {
        let marker = stream.stream.submit_completion_marker(call.symbol());
        marker.wait_until_end_is_known(WaitMethod::Block);
    }
}

fn submit_fill(call: &mut OpenCall, fill: MemoryFill, stream_handle: u64) -> Outcome {
    call.bytes = fill.bytes();
    let stream = stream_of_handle(call, stream_handle)?;
    if !fill.destination.is_multiple_of(fill.width)
        || !ADDRESS_SPACE.is_known_memory(fill.destination, fill.bytes())
    {
        return Err(INVALID_VALUE);
    }
    let duration = stream.stream.device().device_memory_time_ns(fill.bytes());
    stream.submit_or_capture(StreamWork::Fill { fill, duration }, call.symbol())
}

fn memory_fill(destination: u64, value: u32, width: u64, count: usize) -> MemoryFill {
    MemoryFill {
        destination,
        value,
        width,
        count: count as u64,
    }
}

fn side_2d(side: &CopySide2D) -> Result<(ClaimedMemoryType, u64), CudaError> {
    let (claim, base) = match side.kind {
        1 => (ClaimedMemoryType::Host, side.host),
        2 => (ClaimedMemoryType::Device, side.device),
        4 => (ClaimedMemoryType::Unified, side.device),
        _ => return Err(NOT_SUPPORTED),
    };
    Ok((claim, base + (side.y * side.pitch + side.x) as u64))
}

fn copy_2d(
    call: &mut OpenCall,
    description: &Copy2D,
    stream_handle: u64,
    returns: CopyReturnTime,
) -> Outcome {
    let (source_claim, source) = side_2d(&description.source)?;
    let (destination_claim, destination) = side_2d(&description.destination)?;
    let pitch = |side: &CopySide2D| match side.pitch {
        0 => description.width as u64,
        pitch => pitch as u64,
    };
    let rows = MemoryCopy {
        destination,
        destination_pitch: pitch(&description.destination),
        source,
        source_pitch: pitch(&description.source),
        width: description.width as u64,
        rows: description.height as u64,
    };
    submit_copy(
        call,
        rows,
        [destination_claim, source_claim],
        stream_handle,
        returns,
    )
}

/// One layer of one side of a three-dimensional copy.
fn layer_of_side(side: &CopySide3D, z: usize) -> CopySide2D {
    let offset = (side.z + z) * side.height * side.pitch;
    CopySide2D {
        x: side.x,
        y: side.y,
        kind: side.kind,
        host: side.host + offset as u64,
        device: side.device + offset as u64,
        array: side.array,
        pitch: side.pitch,
    }
}

/// Copies three-dimensional data, one layer after the other.
fn copy_3d(
    call: &mut OpenCall,
    description: &Copy3D,
    stream_handle: u64,
    returns: CopyReturnTime,
) -> Outcome {
    for z in 0..description.depth {
        let layer = Copy2D {
            source: layer_of_side(&description.source, z),
            destination: layer_of_side(&description.destination, z),
            width: description.width,
            height: description.height,
        };
        copy_2d(call, &layer, stream_handle, returns)?;
    }
    call.bytes = (description.width * description.height * description.depth) as u64;
    Ok(())
}

exports! { "cuda" =>
    per_thread(cuMemcpy_ptds)
    fn cuMemcpy(call, destination: u64, source: u64, bytes: usize) -> Outcome {
        copy_linear(call, [Unified, Unified], (destination, source), bytes, 0, AfterCopyIsDone)
    }

    per_thread(cuMemcpyAsync_ptsz)
    fn cuMemcpyAsync(
        call, destination: u64, source: u64, bytes: usize, stream_handle: u64,
    ) -> Outcome {
        copy_linear(call, [Unified, Unified], (destination, source), bytes, stream_handle, BeforeCopyIsDone)
    }

    per_thread(cuMemcpyHtoD_v2_ptds)
    fn cuMemcpyHtoD_v2(call, destination: u64, source: u64, bytes: usize) -> Outcome {
        copy_linear(call, [Device, Host], (destination, source), bytes, 0, AfterCopyIsDone)
    }

    per_thread(cuMemcpyHtoDAsync_v2_ptsz)
    fn cuMemcpyHtoDAsync_v2(
        call, destination: u64, source: u64, bytes: usize, stream_handle: u64,
    ) -> Outcome {
        copy_linear(call, [Device, Host], (destination, source), bytes, stream_handle, BeforeCopyIsDone)
    }

    per_thread(cuMemcpyDtoH_v2_ptds)
    fn cuMemcpyDtoH_v2(call, destination: u64, source: u64, bytes: usize) -> Outcome {
        copy_linear(call, [Host, Device], (destination, source), bytes, 0, AfterCopyIsDone)
    }

    per_thread(cuMemcpyDtoHAsync_v2_ptsz)
    fn cuMemcpyDtoHAsync_v2(
        call, destination: u64, source: u64, bytes: usize, stream_handle: u64,
    ) -> Outcome {
        copy_linear(call, [Host, Device], (destination, source), bytes, stream_handle, BeforeCopyIsDone)
    }

    per_thread(cuMemcpyDtoD_v2_ptds)
    fn cuMemcpyDtoD_v2(call, destination: u64, source: u64, bytes: usize) -> Outcome {
        copy_linear(call, [Device, Device], (destination, source), bytes, 0, AfterCopyIsDone)
    }

    per_thread(cuMemcpyDtoDAsync_v2_ptsz)
    fn cuMemcpyDtoDAsync_v2(
        call, destination: u64, source: u64, bytes: usize, stream_handle: u64,
    ) -> Outcome {
        copy_linear(call, [Device, Device], (destination, source), bytes, stream_handle, BeforeCopyIsDone)
    }

    per_thread(cuMemcpyPeer_ptds)
    fn cuMemcpyPeer(
        call, destination: u64, _destination_context: u64, source: u64, _source_context: u64,
        bytes: usize,
    ) -> Outcome {
        copy_linear(call, [Device, Device], (destination, source), bytes, 0, AfterCopyIsDone)
    }

    per_thread(cuMemcpyPeerAsync_ptsz)
    fn cuMemcpyPeerAsync(
        call, destination: u64, _destination_context: u64, source: u64, _source_context: u64,
        bytes: usize, stream_handle: u64,
    ) -> Outcome {
        copy_linear(call, [Device, Device], (destination, source), bytes, stream_handle, BeforeCopyIsDone)
    }

    per_thread(cuMemcpy2D_v2_ptds)
    fn cuMemcpy2D_v2(call, description: InArgument<Copy2D>) -> Outcome {
        copy_2d(call, &description.get()?, 0, AfterCopyIsDone)
    }

    per_thread(cuMemcpy2DUnaligned_v2_ptds)
    fn cuMemcpy2DUnaligned_v2(call, description: InArgument<Copy2D>) -> Outcome {
        copy_2d(call, &description.get()?, 0, AfterCopyIsDone)
    }

    per_thread(cuMemcpy2DAsync_v2_ptsz)
    fn cuMemcpy2DAsync_v2(call, description: InArgument<Copy2D>, stream_handle: u64) -> Outcome {
        copy_2d(call, &description.get()?, stream_handle, BeforeCopyIsDone)
    }

    per_thread(cuMemcpy3D_v2_ptds)
    fn cuMemcpy3D_v2(call, description: InArgument<Copy3D>) -> Outcome {
        copy_3d(call, &description.get()?, 0, AfterCopyIsDone)
    }

    per_thread(cuMemcpy3DAsync_v2_ptsz)
    fn cuMemcpy3DAsync_v2(call, description: InArgument<Copy3D>, stream_handle: u64) -> Outcome {
        copy_3d(call, &description.get()?, stream_handle, BeforeCopyIsDone)
    }

    per_thread(cuMemsetD8_v2_ptds)
    fn cuMemsetD8_v2(call, destination: u64, value: u8, count: usize) -> Outcome {
        submit_fill(call, memory_fill(destination, value.into(), 1, count), 0)
    }

    per_thread(cuMemsetD8Async_ptsz)
    fn cuMemsetD8Async(
        call, destination: u64, value: u8, count: usize, stream_handle: u64,
    ) -> Outcome {
        submit_fill(call, memory_fill(destination, value.into(), 1, count), stream_handle)
    }

    per_thread(cuMemsetD16_v2_ptds)
    fn cuMemsetD16_v2(call, destination: u64, value: u16, count: usize) -> Outcome {
        submit_fill(call, memory_fill(destination, value.into(), 2, count), 0)
    }

    per_thread(cuMemsetD16Async_ptsz)
    fn cuMemsetD16Async(
        call, destination: u64, value: u16, count: usize, stream_handle: u64,
    ) -> Outcome {
        submit_fill(call, memory_fill(destination, value.into(), 2, count), stream_handle)
    }

    per_thread(cuMemsetD32_v2_ptds)
    fn cuMemsetD32_v2(call, destination: u64, value: u32, count: usize) -> Outcome {
        submit_fill(call, memory_fill(destination, value, 4, count), 0)
    }

    per_thread(cuMemsetD32Async_ptsz)
    fn cuMemsetD32Async(
        call, destination: u64, value: u32, count: usize, stream_handle: u64,
    ) -> Outcome {
        submit_fill(call, memory_fill(destination, value, 4, count), stream_handle)
    }

    /// Managed memory never moves, so a prefetch only checks the stream.
    per_thread(cuMemPrefetchAsync_ptsz)
    fn cuMemPrefetchAsync(
        call, address: u64, bytes: usize, _device: i32, stream_handle: u64,
    ) -> Outcome {
        call.bytes = bytes as u64;
        stream_of_handle(call, stream_handle)?;
        match ADDRESS_SPACE.is_known_memory(address, bytes as u64) {
            true => Ok(()),
            false => Err(INVALID_VALUE),
        }
    }
}
