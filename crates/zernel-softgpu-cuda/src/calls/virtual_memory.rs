//! Functions for virtual memory management.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use zernel_softgpu::abi_arguments::{InArgument, OutArgument};
use zernel_softgpu::exports;
use zernel_softgpu::memory::MemoryKind;
use zernel_softgpu::registry::Registry;
use zernel_softgpu::virtual_memory::{MAPPING_GRANULARITY, PhysicalMemory};

use crate::driver::{ADDRESS_SPACE, VIRTUAL_MEMORY, initialised_driver};
use crate::status::{
    CudaError, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, Outcome,
};
use crate::types::{AccessDescription, AllocationProperties, MemoryLocation};

static PHYSICAL_ALLOCATIONS: Registry<PhysicalAllocation> = Registry::new();

/// The object behind a `CUmemGenericAllocationHandle`. Mappings keep the memory when the handle is released.
#[derive(Debug)]
struct PhysicalAllocation {
    memory: Arc<PhysicalMemory>,
    properties: AllocationProperties,
    references: AtomicU64,
}

fn check_properties(
    properties: InArgument<AllocationProperties>,
) -> Result<AllocationProperties, CudaError> {
    let properties = properties.get()?;
    if properties.allocation_type != 1 || !properties.location.is_device() {
        return Err(INVALID_VALUE);
    }
    initialised_driver()?.device(properties.location.id)?;
    Ok(properties)
}

fn allocation_of_handle(handle: u64) -> Result<Arc<PhysicalAllocation>, CudaError> {
    initialised_driver()?;
    PHYSICAL_ALLOCATIONS.get(handle).ok_or(INVALID_HANDLE)
}

exports! { "cuda" =>
    fn cuMemGetAllocationGranularity(
        _call, granularity: OutArgument<usize>, properties: InArgument<AllocationProperties>, option: i32,
    ) -> Outcome {
        check_properties(properties)?;
        match option {
            0 | 1 => Ok(granularity.set(MAPPING_GRANULARITY as usize)?),
            _ => Err(INVALID_VALUE),
        }
    }

    /// The address that the caller requests is a hint, and is ignored.
    fn cuMemAddressReserve(
        call, address: OutArgument<u64>, bytes: usize, alignment: usize, _wish: u64, flags: u64,
    ) -> Outcome {
        call.bytes = bytes as u64;
        initialised_driver()?;
        let alignment = alignment.max(1) as u64;
        if flags != 0 || alignment > MAPPING_GRANULARITY || !alignment.is_power_of_two() {
            return Err(INVALID_VALUE);
        }
        call.object = VIRTUAL_MEMORY.reserve_addresses(bytes as u64)?;
        Ok(address.set(call.object)?)
    }

    fn cuMemAddressFree(call, address: u64, bytes: usize) -> Outcome {
        call.object = address;
        call.bytes = bytes as u64;
        initialised_driver()?;
        Ok(VIRTUAL_MEMORY.free_reservation(address, bytes as u64)?)
    }

    fn cuMemCreate(
        call, handle: OutArgument<u64>, bytes: usize, properties: InArgument<AllocationProperties>, flags: u64,
    ) -> Outcome {
        call.bytes = bytes as u64;
        let properties = check_properties(properties)?;
        if bytes == 0 || !(bytes as u64).is_multiple_of(MAPPING_GRANULARITY) || flags != 0 {
            return Err(INVALID_VALUE);
        }
        if properties.handle_types != 0 {
            return Err(NOT_SUPPORTED);
        }
        let device = initialised_driver()?.device(properties.location.id)?;
        let memory = PhysicalMemory::new(device, bytes as u64).ok_or(OUT_OF_MEMORY)?;
        call.object = PHYSICAL_ALLOCATIONS.insert(Arc::new(PhysicalAllocation {
            memory: Arc::new(memory),
            properties,
            references: AtomicU64::new(1),
        }));
        Ok(handle.set(call.object)?)
    }

    fn cuMemRelease(call, handle: u64) -> Outcome {
        call.object = handle;
        let allocation = allocation_of_handle(handle)?;
        call.bytes = allocation.memory.bytes;
        if allocation.references.fetch_sub(1, Relaxed) == 1 {
            PHYSICAL_ALLOCATIONS.remove(handle);
        }
        Ok(())
    }

    fn cuMemRetainAllocationHandle(call, handle: OutArgument<u64>, address: u64) -> Outcome {
        initialised_driver()?;
        let memory = VIRTUAL_MEMORY.mapped_at(address).ok_or(INVALID_VALUE)?;
        let known = |object: &PhysicalAllocation| Arc::ptr_eq(&object.memory, &memory);
        let (found, allocation) = PHYSICAL_ALLOCATIONS.find(known).ok_or(INVALID_VALUE)?;
        allocation.references.fetch_add(1, Relaxed);
        call.object = found;
        Ok(handle.set(found)?)
    }

    fn cuMemGetAllocationPropertiesFromHandle(
        _call, properties: OutArgument<AllocationProperties>, handle: u64,
    ) -> Outcome {
        Ok(properties.set(allocation_of_handle(handle)?.properties)?)
    }

    fn cuMemMap(
        call, address: u64, bytes: usize, offset: usize, handle: u64, flags: u64,
    ) -> Outcome {
        call.object = address;
        call.bytes = bytes as u64;
        let memory = &allocation_of_handle(handle)?.memory;
        if offset != 0 || flags != 0 || bytes as u64 != memory.bytes {
            return Err(INVALID_VALUE);
        }
        VIRTUAL_MEMORY.map_memory(address, memory)?;
        let known = ADDRESS_SPACE.add_foreign_range(&memory.device, 0, address, bytes as u64, MemoryKind::Mapped);
        debug_assert!(known, "reserved addresses hold nothing else");
        Ok(())
    }

    fn cuMemUnmap(call, address: u64, bytes: usize) -> Outcome {
        call.object = address;
        call.bytes = bytes as u64;
        initialised_driver()?;
        VIRTUAL_MEMORY.unmap_memory(address, bytes as u64)?;
        let mut start = address;
        while let Some(length) = ADDRESS_SPACE.remove_range(start, |kind| kind == MemoryKind::Mapped) {
            start += length;
            if start >= address + bytes as u64 {
                break;
            }
        }
        Ok(())
    }

    fn cuMemSetAccess(
        call, address: u64, bytes: usize, descriptions: InArgument<AccessDescription>, count: usize,
    ) -> Outcome {
        call.object = address;
        call.bytes = bytes as u64;
        initialised_driver()?;
        for index in 0..count {
            let description = descriptions.get_at(index)?;
            VIRTUAL_MEMORY.allow_access(address, bytes as u64, description.flags != 0)?;
        }
        Ok(())
    }

    fn cuMemGetAccess(_call, flags: OutArgument<u64>, location: InArgument<MemoryLocation>, address: u64) -> Outcome {
        initialised_driver()?;
        VIRTUAL_MEMORY.mapped_at(address).ok_or(INVALID_VALUE)?;
        match location.get()?.is_device() {
            true => Ok(flags.set(3)?),
            false => Err(INVALID_VALUE),
        }
    }

    fn cuMemExportToShareableHandle(
        _call, _shareable: u64, _handle: u64, _kind: i32, _flags: u64,
    ) -> Outcome {
        Err(NOT_SUPPORTED)
    }

    fn cuMemImportFromShareableHandle(_call, _handle: u64, _shareable: u64, _kind: i32) -> Outcome {
        Err(NOT_SUPPORTED)
    }
}
