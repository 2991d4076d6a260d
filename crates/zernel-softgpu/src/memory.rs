//! The address space of a process: the address ranges that are known to the driver, with the device and context of
//! each.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::Device;
use crate::sys::MemoryMapping;

/// The kind of memory that an address range is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Memory that was allocated on a device.
    Device,
    /// Memory that was allocated on a device in stream order, from the pool with this handle.
    Pool(u64),
    /// Managed memory, which both host and device can use.
    Managed,
    /// Host memory that the driver allocated.
    Host,
    /// Host memory that the program allocated and registered with the driver.
    Registered,
    /// Physical memory of a device, mapped at a reserved address.
    Mapped,
}

impl MemoryKind {
    /// Whether memory of this kind is reserved on a device when the range is made.
    fn takes_device_memory(self) -> bool {
        matches!(self, Self::Device | Self::Pool(_) | Self::Managed)
    }

    /// Whether a copy from or to memory of this kind is a transfer between host and device.
    #[must_use]
    pub fn is_host(self) -> bool {
        matches!(self, Self::Host | Self::Registered)
    }
}

/// A range of addresses that is known to the driver.
#[derive(Debug, Clone)]
pub struct MemoryRange {
    /// First address of the range.
    pub start: u64,
    /// Length of the range in bytes.
    pub bytes: u64,
    /// The kind of memory that the range is.
    pub kind: MemoryKind,
    /// The device that the range belongs to.
    pub device: Arc<Device>,
    /// The handle of the context in which the range was made.
    pub context: u64,
    _mapping: Option<Arc<MemoryMapping>>,
}

/// A range that releases its device memory when it is dropped.
#[derive(Debug)]
struct OwnedRange {
    range: MemoryRange,
}

impl Drop for OwnedRange {
    fn drop(&mut self) {
        if self.range.kind.takes_device_memory() {
            self.range.device.release_memory(self.range.bytes);
        }
    }
}

/// The address ranges of this process that are known to the driver, by their first address.
#[derive(Debug, Default)]
pub struct AddressSpace(Mutex<BTreeMap<u64, OwnedRange>>);

impl AddressSpace {
    /// Creates an address space without any range.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    fn lock_ranges(&self) -> MutexGuard<'_, BTreeMap<u64, OwnedRange>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates zeroed memory of `kind`; `None` if the device or the machine does not have enough.
    pub fn allocate_range(
        &self,
        device: &Arc<Device>,
        context: u64,
        bytes: u64,
        kind: MemoryKind,
    ) -> Option<u64> {
        if kind.takes_device_memory() && !device.reserve_memory(bytes) {
            return None;
        }
        let Ok(mapping) = MemoryMapping::zeroed_on_touch(bytes as usize) else {
            if kind.takes_device_memory() {
                device.release_memory(bytes);
            }
            return None;
        };
        let start = mapping.start();
        let range = MemoryRange {
            start,
            bytes,
            kind,
            device: Arc::clone(device),
            context,
            _mapping: Some(Arc::new(mapping)),
        };
        self.lock_ranges().insert(start, OwnedRange { range });
        Some(start)
    }

    /// Adds a range of memory that was allocated elsewhere. Returns false if part of it is already known.
    #[must_use]
    pub fn add_foreign_range(
        &self,
        device: &Arc<Device>,
        context: u64,
        start: u64,
        bytes: u64,
        kind: MemoryKind,
    ) -> bool {
        let mut ranges = self.lock_ranges();
        let before = ranges.range(..start.saturating_add(bytes)).next_back();
        if before.is_some_and(|(_, given)| given.range.start + given.range.bytes > start) {
            return false;
        }
        let range = MemoryRange {
            start,
            bytes,
            kind,
            device: Arc::clone(device),
            context,
            _mapping: None,
        };
        ranges.insert(start, OwnedRange { range });
        true
    }

    /// Removes the range that starts at `start` if `right` returns true for its kind, and frees its memory.
    pub fn remove_range(&self, start: u64, right: impl FnOnce(MemoryKind) -> bool) -> Option<u64> {
        let mut ranges = self.lock_ranges();
        if !right(ranges.get(&start)?.range.kind) {
            return None;
        }
        let given = ranges.remove(&start)?;
        drop(ranges);
        Some(given.range.bytes)
    }

    /// Removes all ranges that were made in a context.
    pub fn remove_ranges_of_context(&self, context: u64) {
        self.lock_ranges()
            .retain(|_, given| given.range.context != context);
    }

    /// The range that contains `address`.
    pub fn find_range(&self, address: u64) -> Option<MemoryRange> {
        let ranges = self.lock_ranges();
        range_containing(&ranges, address).cloned()
    }

    /// Whether all `bytes` bytes from `address` on are known memory. They may lie in several adjacent ranges.
    pub fn is_known_memory(&self, address: u64, bytes: u64) -> bool {
        let ranges = self.lock_ranges();
        let Some(end) = address.checked_add(bytes) else {
            return false;
        };
        let mut covered = address;
        while covered < end {
            match range_containing(&ranges, covered) {
                Some(range) => covered = range.start + range.bytes,
                None => return false,
            }
        }
        true
    }
}

fn range_containing(ranges: &BTreeMap<u64, OwnedRange>, address: u64) -> Option<&MemoryRange> {
    let (_, given) = ranges.range(..=address).next_back()?;
    (address - given.range.start < given.range.bytes).then_some(&given.range)
}
