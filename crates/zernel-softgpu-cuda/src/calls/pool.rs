//! Functions for memory pools, and for allocation in stream order.
//!
//! A simulated pool releases freed memory to the device at once and ignores the release threshold. So the reserved
//! bytes of a pool are always its used bytes.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use zernel_softgpu::abi_arguments::{InArgument, OutArgument};
use zernel_softgpu::device::Device;
use zernel_softgpu::exports;
use zernel_softgpu::memory::MemoryKind;
use zernel_softgpu::registry::{Registry, new_handle};
use zernel_softgpu::stream_work::StreamWork;
use zernel_softgpu::truth::OpenCall;

use crate::context::stream_of_handle;
use crate::driver::{ADDRESS_SPACE, initialised_driver};
use crate::status::{
    CudaError, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, Outcome,
    STREAM_CAPTURE_UNSUPPORTED,
};
use crate::types::{AccessDescription, MemoryLocation, PoolProperties};

static MEMORY_POOLS: Registry<MemoryPool> = Registry::new();
static DEVICE_POOLS: Mutex<Vec<DevicePools>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct MemoryPool {
    handle: u64,
    device: Arc<Device>,
    settings: [AtomicU64; 4],
    used_bytes: AtomicU64,
    most_used_bytes: AtomicU64,
}

/// The pools of one device: its default pool and its current pool.
#[derive(Debug, Clone, Copy)]
struct DevicePools {
    ordinal: i32,
    default: u64,
    current: u64,
}

impl MemoryPool {
    fn create(device: &Arc<Device>) -> u64 {
        let handle = new_handle();
        let pool = Self {
            handle,
            device: Arc::clone(device),
            // A new pool allows the three ways to reuse memory (value 1 each), and has a release threshold of 0.
            settings: [1, 1, 1, 0].map(AtomicU64::new),
            used_bytes: AtomicU64::new(0),
            most_used_bytes: AtomicU64::new(0),
        };
        MEMORY_POOLS.insert_with_handle(handle, Arc::new(pool));
        handle
    }

    fn count_used_bytes(&self, bytes: u64) {
        let used = self.used_bytes.fetch_add(bytes, Relaxed) + bytes;
        self.most_used_bytes.fetch_max(used, Relaxed);
    }
}

fn with_device_pools<T>(
    ordinal: i32,
    change: impl FnOnce(&mut DevicePools) -> T,
) -> Result<T, CudaError> {
    let device = initialised_driver()?.device(ordinal)?;
    let mut all = DEVICE_POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    let known = all.iter().position(|pools| pools.ordinal == ordinal);
    let index = known.unwrap_or_else(|| {
        let default = MemoryPool::create(device);
        all.push(DevicePools {
            ordinal,
            default,
            current: default,
        });
        all.len() - 1
    });
    Ok(change(&mut all[index]))
}

fn pool_of_handle(handle: u64) -> Result<Arc<MemoryPool>, CudaError> {
    initialised_driver()?;
    MEMORY_POOLS.get(handle).ok_or(INVALID_HANDLE)
}

fn allocate_from_pool(
    call: &mut OpenCall,
    address: &OutArgument<u64>,
    bytes: usize,
    pool: &MemoryPool,
    stream_handle: u64,
) -> Outcome {
    call.bytes = bytes as u64;
    let stream = stream_of_handle(call, stream_handle)?;
    if stream.stream.is_capturing() {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let context = stream.context()?;
    let kind = MemoryKind::Pool(pool.handle);
    let allocated = ADDRESS_SPACE
        .allocate_range(&pool.device, context.handle, bytes as u64, kind)
        .ok_or(OUT_OF_MEMORY)?;
    call.object = allocated;
    pool.count_used_bytes(bytes as u64);
    Ok(address.set(allocated)?)
}

/// Stream work that frees an allocation when the stream reaches it (`cuMemFreeAsync`).
fn free_in_stream_order(address: u64, pool: Option<Arc<MemoryPool>>) -> StreamWork {
    StreamWork::Action(Arc::new(move || {
        let freed = ADDRESS_SPACE.remove_range(address, |_| true).unwrap_or(0);
        if let Some(pool) = &pool {
            pool.used_bytes.fetch_sub(freed, Relaxed);
        }
    }))
}

exports! { "cuda" =>
    per_thread(cuMemAllocAsync_ptsz)
    fn cuMemAllocAsync(call, address: OutArgument<u64>, bytes: usize, stream_handle: u64) -> Outcome {
        let ordinal = stream_of_handle(call, stream_handle)?.context()?.ordinal;
        let current = with_device_pools(ordinal, |pools| pools.current)?;
        allocate_from_pool(call, &address, bytes, &*pool_of_handle(current)?, stream_handle)
    }

    per_thread(cuMemAllocFromPoolAsync_ptsz)
    fn cuMemAllocFromPoolAsync(
        call, address: OutArgument<u64>, bytes: usize, pool_handle: u64, stream_handle: u64,
    ) -> Outcome {
        allocate_from_pool(call, &address, bytes, &*pool_of_handle(pool_handle)?, stream_handle)
    }

    per_thread(cuMemFreeAsync_ptsz)
    fn cuMemFreeAsync(call, address: u64, stream_handle: u64) -> Outcome {
        call.object = address;
        let stream = stream_of_handle(call, stream_handle)?;
        let range = ADDRESS_SPACE.find_range(address).filter(|range| range.start == address).ok_or(INVALID_VALUE)?;
        let pool = match range.kind {
            MemoryKind::Pool(pool) => MEMORY_POOLS.get(pool),
            MemoryKind::Device | MemoryKind::Managed => None,
            _ => return Err(INVALID_VALUE),
        };
        call.bytes = range.bytes;
        drop(range);
        stream.submit_or_capture(free_in_stream_order(address, pool), call.symbol())
    }

    fn cuDeviceGetDefaultMemPool(_call, pool: OutArgument<u64>, device: i32) -> Outcome {
        Ok(pool.set(with_device_pools(device, |pools| pools.default)?)?)
    }

    fn cuDeviceGetMemPool(_call, pool: OutArgument<u64>, device: i32) -> Outcome {
        Ok(pool.set(with_device_pools(device, |pools| pools.current)?)?)
    }

    fn cuDeviceSetMemPool(_call, device: i32, pool_handle: u64) -> Outcome {
        pool_of_handle(pool_handle)?;
        with_device_pools(device, |pools| pools.current = pool_handle)
    }

    fn cuMemPoolCreate(_call, pool: OutArgument<u64>, properties: InArgument<PoolProperties>) -> Outcome {
        let properties = properties.get()?;
        if !properties.location.is_device() || properties.allocation_type != 1 {
            return Err(INVALID_VALUE);
        }
        let device = initialised_driver()?.device(properties.location.id)?;
        Ok(pool.set(MemoryPool::create(device))?)
    }

    /// Memory that was allocated from the destroyed pool stays valid.
    fn cuMemPoolDestroy(_call, pool_handle: u64) -> Outcome {
        pool_of_handle(pool_handle)?;
        let mut devices = DEVICE_POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        if devices.iter().any(|pools| pools.default == pool_handle) {
            return Err(INVALID_VALUE);
        }
        for pools in devices.iter_mut().filter(|pools| pools.current == pool_handle) {
            pools.current = pools.default;
        }
        MEMORY_POOLS.remove(pool_handle);
        Ok(())
    }

    fn cuMemPoolTrimTo(_call, pool_handle: u64, _keep: usize) -> Outcome {
        pool_of_handle(pool_handle).map(drop)
    }

    fn cuMemPoolGetAttribute(_call, pool_handle: u64, attribute: i32, value: u64) -> Outcome {
        let pool = pool_of_handle(pool_handle)?;
        let place = value as *mut c_void;
        if place.is_null() {
            return Err(INVALID_VALUE);
        }
        let (number, is_flag) = match attribute {
            1..=3 => (&pool.settings[attribute as usize - 1], true),
            4 => (&pool.settings[3], false),
            5 | 7 => (&pool.used_bytes, false),
            6 | 8 => (&pool.most_used_bytes, false),
            _ => return Err(INVALID_VALUE),
        };
        let number = number.load(Relaxed);
        // SAFETY: not null, so by the C caller's promise it has room for the attribute: an int for a
        // flag, 64 bits for a number.
        unsafe {
            match is_flag {
                true => place.cast::<i32>().write_unaligned(number as i32),
                false => place.cast::<u64>().write_unaligned(number),
            }
        }
        Ok(())
    }

    fn cuMemPoolSetAttribute(_call, pool_handle: u64, attribute: i32, value: InArgument<u8>) -> Outcome {
        let pool = pool_of_handle(pool_handle)?;
        let flag = || value.cast::<i32>().get().map(|flag| u64::from(flag != 0));
        let number = || value.cast::<u64>().get();
        match attribute {
            1..=3 => pool.settings[attribute as usize - 1].store(flag()?, Relaxed),
            4 => pool.settings[3].store(number()?, Relaxed),
            // A program can only reset the high-water marks of a pool, not set them.
            6 | 8 if number()? == 0 => pool.most_used_bytes.store(pool.used_bytes.load(Relaxed), Relaxed),
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }

    /// All simulated devices live in the same host memory, so a pool's access cannot be taken away.
    fn cuMemPoolSetAccess(
        _call, pool_handle: u64, descriptions: InArgument<AccessDescription>, count: usize,
    ) -> Outcome {
        pool_of_handle(pool_handle)?;
        for index in 0..count {
            descriptions.get_at(index)?;
        }
        Ok(())
    }

    fn cuMemPoolGetAccess(
        _call, flags: OutArgument<i32>, pool_handle: u64, location: InArgument<MemoryLocation>,
    ) -> Outcome {
        pool_of_handle(pool_handle)?;
        match location.get()?.is_device() {
            true => Ok(flags.set(3)?),
            false => Err(INVALID_VALUE),
        }
    }

    fn cuMemPoolExportToShareableHandle(
        _call, _handle: u64, _pool: u64, _kind: i32, _flags: u64,
    ) -> Outcome {
        Err(NOT_SUPPORTED)
    }
}
