//! Virtual memory management: reserved addresses, physical memory, and mappings of physical memory at reserved
//! addresses.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect};

use crate::device::Device;
use crate::sys::MemoryMapping;

/// Sizes and addresses of mappings are multiples of this number of bytes.
pub const MAPPING_GRANULARITY: u64 = 2 << 20;

/// Physical memory of a device that has no address of its own. It is released on drop.
#[derive(Debug)]
pub struct PhysicalMemory {
    /// The device that the memory is on.
    pub device: Arc<Device>,
    /// Length of the memory in bytes.
    pub bytes: u64,
    offset: u64,
}

/// The memfd that holds all physical memory of this process. The file is sparse, so unused memory takes no space. One
/// file serves all, because one per allocation would exceed the limit of open files.
fn backing_file() -> io::Result<&'static OwnedFd> {
    static BACKING_FILE: OnceLock<OwnedFd> = OnceLock::new();
    if BACKING_FILE.get().is_none() {
        let file = memfd_create("softgpu-physical-memory", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, 1 << 46)?;
        let _ = BACKING_FILE.set(file);
    }
    BACKING_FILE
        .get()
        .ok_or_else(|| io::Error::other("no backing file"))
}

impl PhysicalMemory {
    /// Reserves memory of `device`; `None` if the device does not have enough.
    #[must_use]
    pub fn new(device: &Arc<Device>, bytes: u64) -> Option<Self> {
        static NEXT_OFFSET: AtomicU64 = AtomicU64::new(0);
        backing_file().ok()?;
        device.reserve_memory(bytes).then(|| Self {
            device: Arc::clone(device),
            bytes,
            offset: NEXT_OFFSET.fetch_add(bytes, Relaxed),
        })
    }
}

impl Drop for PhysicalMemory {
    fn drop(&mut self) {
        if let Ok(file) = backing_file() {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // If the hole cannot be made, the pages stay until the process ends, and nothing else depends on it.
            let _ = fallocate(file, hole, self.offset, self.bytes);
        }
        self.device.release_memory(self.bytes);
    }
}

/// The address ranges that a process has reserved, and the memory that is mapped there.
#[derive(Debug, Default)]
pub struct VirtualMemory(Mutex<VirtualMemoryState>);

#[derive(Debug, Default)]
struct VirtualMemoryState {
    reservations: BTreeMap<u64, Reservation>,
    mapped: BTreeMap<u64, Arc<PhysicalMemory>>,
}

#[derive(Debug)]
struct Reservation {
    bytes: u64,
    _mapping: MemoryMapping,
}

/// Why a virtual memory function refuses a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VirtualMemoryRefusal {
    /// The range is not inside a reservation, not aligned, or not a range that was mapped.
    InvalidRange,
    /// The machine does not have enough memory or addresses.
    OutOfMemory,
}

impl VirtualMemoryState {
    fn is_reserved(&self, start: u64, bytes: u64) -> bool {
        let reservation = self.reservations.range(..=start).next_back();
        reservation.is_some_and(|(base, reservation)| {
            start.saturating_add(bytes) <= base + reservation.bytes
        })
    }

    fn is_mapped_in(&self, start: u64, bytes: u64) -> bool {
        let before = self.mapped.range(..start + bytes).next_back();
        before.is_some_and(|(base, memory)| base + memory.bytes > start)
    }
}

impl VirtualMemory {
    /// Creates a value without reservations.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(VirtualMemoryState {
            reservations: BTreeMap::new(),
            mapped: BTreeMap::new(),
        }))
    }

    fn lock_state(&self) -> std::sync::MutexGuard<'_, VirtualMemoryState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves a range of addresses, aligned to [`MAPPING_GRANULARITY`].
    pub fn reserve_addresses(&self, bytes: u64) -> Result<u64, VirtualMemoryRefusal> {
        if bytes == 0 || !bytes.is_multiple_of(MAPPING_GRANULARITY) {
            return Err(VirtualMemoryRefusal::InvalidRange);
        }
        let mapping = MemoryMapping::reserve_addresses((bytes + MAPPING_GRANULARITY) as usize)
            .map_err(|_| VirtualMemoryRefusal::OutOfMemory)?;
        let start = mapping.start().next_multiple_of(MAPPING_GRANULARITY);
        let reservation = Reservation {
            bytes,
            _mapping: mapping,
        };
        self.lock_state().reservations.insert(start, reservation);
        Ok(start)
    }

    /// Frees a reservation. The range must be exactly as it was reserved, with nothing mapped in it.
    pub fn free_reservation(&self, start: u64, bytes: u64) -> Result<(), VirtualMemoryRefusal> {
        let mut state = self.lock_state();
        let exact = state
            .reservations
            .get(&start)
            .is_some_and(|reservation| reservation.bytes == bytes);
        if !exact || state.is_mapped_in(start, bytes) {
            return Err(VirtualMemoryRefusal::InvalidRange);
        }
        state.reservations.remove(&start);
        Ok(())
    }

    /// Maps all of `memory` at a reserved address. The memory cannot be touched before [`Self::allow_access`].
    pub fn map_memory(
        &self,
        start: u64,
        memory: &Arc<PhysicalMemory>,
    ) -> Result<(), VirtualMemoryRefusal> {
        let mut state = self.lock_state();
        let aligned = start.is_multiple_of(MAPPING_GRANULARITY);
        if !aligned
            || !state.is_reserved(start, memory.bytes)
            || state.is_mapped_in(start, memory.bytes)
        {
            return Err(VirtualMemoryRefusal::InvalidRange);
        }
        let file = backing_file().map_err(|_| VirtualMemoryRefusal::OutOfMemory)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the range lies in a reservation of ours where nothing is mapped.
        let mapped = unsafe {
            mmap(
                start as *mut _,
                memory.bytes as usize,
                ProtFlags::empty(),
                flags,
                file,
                memory.offset,
            )
        };
        mapped.map_err(|_| VirtualMemoryRefusal::OutOfMemory)?;
        state.mapped.insert(start, Arc::clone(memory));
        Ok(())
    }

    /// Removes the mappings that together cover exactly the `bytes` bytes from `start` on.
    pub fn unmap_memory(&self, start: u64, bytes: u64) -> Result<(), VirtualMemoryRefusal> {
        let mut state = self.lock_state();
        let mut end = start;
        while end < start.saturating_add(bytes) {
            end += state
                .mapped
                .get(&end)
                .ok_or(VirtualMemoryRefusal::InvalidRange)?
                .bytes;
        }
        if end != start + bytes {
            return Err(VirtualMemoryRefusal::InvalidRange);
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: exactly mappings of ours, replaced by reserved addresses as before.
        let unmapped =
            unsafe { mmap_anonymous(start as *mut _, bytes as usize, ProtFlags::empty(), flags) };
        unmapped.map_err(|_| VirtualMemoryRefusal::OutOfMemory)?;
        state.mapped.retain(|base, _| !(start..end).contains(base));
        Ok(())
    }

    /// Allows or forbids access to mapped memory.
    pub fn allow_access(
        &self,
        start: u64,
        bytes: u64,
        allowed: bool,
    ) -> Result<(), VirtualMemoryRefusal> {
        let state = self.lock_state();
        if !state.is_reserved(start, bytes) || !state.is_mapped_in(start, bytes) {
            return Err(VirtualMemoryRefusal::InvalidRange);
        }
        let protection = match allowed {
            true => MprotectFlags::READ | MprotectFlags::WRITE,
            false => MprotectFlags::empty(),
        };
        // SAFETY: mappings of ours; the driver itself holds no references into device memory.
        unsafe { mprotect(start as *mut _, bytes as usize, protection) }
            .map_err(|_| VirtualMemoryRefusal::InvalidRange)
    }

    /// The physical memory that is mapped at `address`.
    pub fn mapped_at(&self, address: u64) -> Option<Arc<PhysicalMemory>> {
        let state = self.lock_state();
        let (base, memory) = state.mapped.range(..=address).next_back()?;
        (address - base < memory.bytes).then(|| Arc::clone(memory))
    }
}
