//! Functions for memory: allocation on device and host, and attributes of addresses.

use std::ffi::c_void;

use zernel_softgpu::abi_arguments::{InArgument, OutArgument};
use zernel_softgpu::exports;
use zernel_softgpu::memory::{MemoryKind, MemoryRange};
use zernel_softgpu::truth::OpenCall;

use crate::context::current_context;
use crate::driver::{ADDRESS_SPACE, initialised_driver};
use crate::status::{
    CudaError, HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, INVALID_VALUE,
    NOT_SUPPORTED, OUT_OF_MEMORY, Outcome,
};

/// Rows of pitched memory start at multiples of this number of bytes.
const PITCH_BYTES: usize = 512;

/// `CUipcMemHandle`, which is passed by value and so on the stack.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct IpcHandle {
    _reserved: [u8; 64],
}

fn allocate_memory(call: &mut OpenCall, bytes: usize, kind: MemoryKind) -> Result<u64, CudaError> {
    call.bytes = bytes as u64;
    let context = current_context()?;
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let allocated =
        ADDRESS_SPACE.allocate_range(&context.device, context.handle, bytes as u64, kind);
    call.object = allocated.ok_or(OUT_OF_MEMORY)?;
    Ok(call.object)
}

fn free_host(call: &mut OpenCall, address: u64) -> Outcome {
    call.object = address;
    current_context()?;
    call.bytes = ADDRESS_SPACE
        .remove_range(address, |kind| kind == MemoryKind::Host)
        .ok_or(INVALID_VALUE)?;
    Ok(())
}

exports! { "cuda" =>
    fn cuMemGetInfo_v2(_call, free: OutArgument<usize>, total: OutArgument<usize>) -> Outcome {
        let context = current_context()?;
        free.set(context.device.free_memory() as usize)?;
        Ok(total.set(context.device.total_memory() as usize)?)
    }

    fn cuMemAlloc_v2(call, address: OutArgument<u64>, bytes: usize) -> Outcome {
        let allocated = allocate_memory(call, bytes, MemoryKind::Device)?;
        Ok(address.set(allocated)?)
    }

    fn cuMemAllocPitch_v2(
        call, address: OutArgument<u64>, pitch: OutArgument<usize>, width: usize, height: usize, element: u32,
    ) -> Outcome {
        if ![4, 8, 16].contains(&element) || width == 0 {
            return Err(INVALID_VALUE);
        }
        let row = width.next_multiple_of(PITCH_BYTES);
        let bytes = row.checked_mul(height).ok_or(OUT_OF_MEMORY)?;
        let allocated = allocate_memory(call, bytes, MemoryKind::Device)?;
        pitch.set(row)?;
        Ok(address.set(allocated)?)
    }

    fn cuMemAllocManaged(call, address: OutArgument<u64>, bytes: usize, flags: u32) -> Outcome {
        // The allowed flags: the memory is attached globally (1) or to the host (2).
        if ![1, 2].contains(&flags) {
            return Err(INVALID_VALUE);
        }
        let allocated = allocate_memory(call, bytes, MemoryKind::Managed)?;
        Ok(address.set(allocated)?)
    }

    /// `cuMemFree` waits for the device first, as in the real driver, because running work may use the memory.
    fn cuMemFree_v2(call, address: u64) -> Outcome {
        call.object = address;
        let context = current_context()?;
        if address == 0 {
            return Ok(());
        }
        ADDRESS_SPACE.find_range(address).filter(|range| range.start == address).ok_or(INVALID_VALUE)?;
        context.synchronize(call.symbol())?;
        let ours = |kind| matches!(kind, MemoryKind::Device | MemoryKind::Managed | MemoryKind::Pool(_));
        call.bytes = ADDRESS_SPACE.remove_range(address, ours).ok_or(INVALID_VALUE)?;
        Ok(())
    }

    fn cuMemAllocHost_v2(call, address: OutArgument<u64>, bytes: usize) -> Outcome {
        let allocated = allocate_memory(call, bytes, MemoryKind::Host)?;
        Ok(address.set(allocated)?)
    }

    fn cuMemHostAlloc(call, address: OutArgument<u64>, bytes: usize, flags: u32) -> Outcome {
        // The allowed flags: portable, mapped for the device, write-combined.
        if flags & !7 != 0 {
            return Err(INVALID_VALUE);
        }
        let allocated = allocate_memory(call, bytes, MemoryKind::Host)?;
        Ok(address.set(allocated)?)
    }

    fn cuMemFreeHost(call, address: u64) -> Outcome {
        free_host(call, address)
    }

    fn cuMemHostRegister_v2(call, address: u64, bytes: usize, flags: u32) -> Outcome {
        call.object = address;
        call.bytes = bytes as u64;
        let context = current_context()?;
        if address == 0 || bytes == 0 || flags & !15 != 0 {
            return Err(INVALID_VALUE);
        }
        let (device, kind) = (&context.device, MemoryKind::Registered);
        match ADDRESS_SPACE.add_foreign_range(device, context.handle, address, bytes as u64, kind) {
            true => Ok(()),
            false => Err(HOST_MEMORY_ALREADY_REGISTERED),
        }
    }

    fn cuMemHostUnregister(call, address: u64) -> Outcome {
        call.object = address;
        current_context()?;
        let registered = ADDRESS_SPACE.remove_range(address, |kind| kind == MemoryKind::Registered);
        call.bytes = registered.ok_or(HOST_MEMORY_NOT_REGISTERED)?;
        Ok(())
    }

    fn cuMemHostGetDevicePointer_v2(
        _call, device_address: OutArgument<u64>, address: u64, _flags: u32,
    ) -> Outcome {
        current_context()?;
        ADDRESS_SPACE.find_range(address).filter(|range| range.kind.is_host()).ok_or(INVALID_VALUE)?;
        Ok(device_address.set(address)?)
    }

    fn cuMemHostGetFlags(_call, flags: OutArgument<u32>, address: u64) -> Outcome {
        current_context()?;
        ADDRESS_SPACE.find_range(address).filter(|range| range.kind == MemoryKind::Host).ok_or(INVALID_VALUE)?;
        // All host memory of the driver is portable and mapped for the device.
        Ok(flags.set(3)?)
    }

    fn cuMemGetAddressRange_v2(_call, start: OutArgument<u64>, bytes: OutArgument<usize>, address: u64) -> Outcome {
        current_context()?;
        let range = ADDRESS_SPACE.find_range(address).ok_or(INVALID_VALUE)?;
        start.set_unless_null(range.start);
        bytes.set_unless_null(range.bytes as usize);
        Ok(())
    }

    fn cuPointerGetAttribute(_call, value: u64, attribute: i32, address: u64) -> Outcome {
        initialised_driver()?;
        let range = ADDRESS_SPACE.find_range(address).ok_or(INVALID_VALUE)?;
        if value == 0 {
            return Err(INVALID_VALUE);
        }
        let found = pointer_attribute(attribute, address, Some(&range)).ok_or(NOT_SUPPORTED)?;
        found.store_attribute_at(value as *mut c_void);
        Ok(())
    }

    /// Unlike `cuPointerGetAttribute`, this function never fails for an address that CUDA does not know: it stores
    /// zero.
    fn cuPointerGetAttributes(
        _call, count: u32, attributes: InArgument<i32>, values: InArgument<u64>, address: u64,
    ) -> Outcome {
        initialised_driver()?;
        let range = ADDRESS_SPACE.find_range(address);
        for index in 0..count as usize {
            let attribute = pointer_attribute(attributes.get_at(index)?, address, range.as_ref());
            let value = values.get_at(index)?;
            if value == 0 {
                return Err(INVALID_VALUE);
            }
            attribute.ok_or(NOT_SUPPORTED)?.store_attribute_at(value as *mut c_void);
        }
        Ok(())
    }

    fn cuPointerSetAttribute(_call, _value: u64, attribute: i32, address: u64) -> Outcome {
        initialised_driver()?;
        ADDRESS_SPACE.find_range(address).ok_or(INVALID_VALUE)?;
        // The only attribute that can be set asks for synchronous memory operations. Copies between host and device are
        // never reordered here, so setting it changes nothing.
        match attribute {
            6 => Ok(()),
            _ => Err(NOT_SUPPORTED),
        }
    }

    fn cuMemAdvise(_call, address: u64, bytes: usize, advice: i32, _device: i32) -> Outcome {
        initialised_driver()?;
        match ADDRESS_SPACE.is_known_memory(address, bytes as u64) && (1..=6).contains(&advice) {
            true => Ok(()),
            false => Err(INVALID_VALUE),
        }
    }

    fn cuIpcGetMemHandle(_call, _handle: u64, _address: u64) -> Outcome {
        Err(NOT_SUPPORTED)
    }

    fn cuIpcOpenMemHandle_v2(_call, _address: u64, _handle: IpcHandle, _flags: u32) -> Outcome {
        Err(NOT_SUPPORTED)
    }

    fn cuIpcCloseMemHandle(_call, _address: u64) -> Outcome {
        Err(NOT_SUPPORTED)
    }
}

/// The value of a pointer attribute, in the width in which C expects it.
enum AttributeValue {
    Word(u64),
    Half(u32),
    Byte(bool),
}

impl AttributeValue {
    fn store_attribute_at(self, place: *mut c_void) {
        // SAFETY: not null (checked by the callers), so by the C caller's promise it has room for the
        // attribute it asked for.
        unsafe {
            match self {
                Self::Word(value) => place.cast::<u64>().write_unaligned(value),
                Self::Half(value) => place.cast::<u32>().write_unaligned(value),
                Self::Byte(value) => place.cast::<u8>().write(u8::from(value)),
            }
        }
    }
}

/// The value of a `CUpointer_attribute` of an address; zero for an address that CUDA does not know.
fn pointer_attribute(
    attribute: i32,
    address: u64,
    range: Option<&MemoryRange>,
) -> Option<AttributeValue> {
    let of_range = |value: fn(&MemoryRange) -> u64| range.map_or(0, value);
    let is = |test: fn(MemoryKind) -> bool| range.is_some_and(|range| test(range.kind));
    let value = match attribute {
        // Attributes: context, memory type (host 1, device 2), device address and host address.
        1 => AttributeValue::Word(of_range(|range| range.context)),
        2 => {
            AttributeValue::Half(of_range(|range| if range.kind.is_host() { 1 } else { 2 }) as u32)
        }
        3 => AttributeValue::Word(range.map_or(0, |_| address)),
        4 if is(|kind| kind.is_host() || kind == MemoryKind::Managed) => {
            AttributeValue::Word(address)
        }
        4 => AttributeValue::Word(0),
        // Attributes: synchronous memory operations, buffer id, managed memory, device ordinal.
        6 => AttributeValue::Byte(false),
        7 => AttributeValue::Word(of_range(|range| range.start)),
        8 => AttributeValue::Byte(is(|kind| kind == MemoryKind::Managed)),
        9 => AttributeValue::Half(range.map_or(-2, device_ordinal_of).cast_unsigned()),
        // Attributes: IPC, start and length of the range, mapped, handle types, RDMA, access.
        10 | 15 => AttributeValue::Byte(false),
        11 => AttributeValue::Word(of_range(|range| range.start)),
        12 => AttributeValue::Word(of_range(|range| range.bytes)),
        13 => AttributeValue::Byte(range.is_some()),
        14 => AttributeValue::Word(0),
        16 => AttributeValue::Half(of_range(|_| 3) as u32),
        17 => AttributeValue::Word(of_range(|range| match range.kind {
            MemoryKind::Pool(pool) => pool,
            _ => 0,
        })),
        _ => return None,
    };
    Some(value)
}

fn device_ordinal_of(range: &MemoryRange) -> i32 {
    initialised_driver().map_or(-2, |driver| driver.ordinal_of(&range.device))
}
