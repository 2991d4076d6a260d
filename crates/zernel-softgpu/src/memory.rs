//! The address space: the ranges that are device memory, with the device and context of each.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::Device;
use crate::sys::MemoryMapping;

/// The kind of an address range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Allocated on a device.
    Device,
    /// Allocated on a device, in stream order, from the pool of this handle.
    Pool(u64),
    /// Managed: usable by host and device alike.
    Managed,
    /// Host memory of the driver's own.
    Host,
    /// Host memory of the program's own, made known to the driver.
    Registered,
    /// Physical memory mapped at a reserved address.
    Mapped,
}

impl MemoryKind {
    /// Whether the bytes come out of a device's memory when the range is made.
    fn takes_device_memory(self) -> bool {
        matches!(self, Self::Device | Self::Pool(_) | Self::Managed)
    }

    /// Whether copies go over the bus to the host.
    #[must_use]
    pub fn is_host(self) -> bool {
        matches!(self, Self::Host | Self::Registered)
    }
}

/// A range of addresses that the driver knows.
#[derive(Debug, Clone)]
pub struct MemoryRange {
    /// First address.
    pub start: u64,
    /// Length.
    pub bytes: u64,
    /// What it is.
    pub kind: MemoryKind,
    /// The device it belongs to.
    pub device: Arc<Device>,
    /// The context it was made in.
    pub context: u64,
    _mapping: Option<Arc<MemoryMapping>>,
}

/// A range that releases its device memory on drop.
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

/// The driver's map of the address space.
#[derive(Debug, Default)]
pub struct AddressSpace(Mutex<BTreeMap<u64, OwnedRange>>);

impl AddressSpace {
    /// No memory at all.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    fn lock_ranges(&self) -> MutexGuard<'_, BTreeMap<u64, OwnedRange>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates zeroed memory of `kind`; `None` if the device or the machine has not enough.
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

    /// Registers memory that was allocated elsewhere. False if part of it is already registered.
    #[must_use]
    pub fn adopt_range(
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

    /// Removes the range that starts at `start` if `right` accepts its kind, and frees its memory.
    pub fn remove_range(&self, start: u64, right: impl FnOnce(MemoryKind) -> bool) -> Option<u64> {
        let mut ranges = self.lock_ranges();
        if !right(ranges.get(&start)?.range.kind) {
            return None;
        }
        let given = ranges.remove(&start)?;
        drop(ranges);
        Some(given.range.bytes)
    }

    /// Removes all ranges of a context.
    pub fn remove_ranges_of_context(&self, context: u64) {
        self.lock_ranges()
            .retain(|_, given| given.range.context != context);
    }

    /// The range that holds `address`.
    pub fn find_range(&self, address: u64) -> Option<MemoryRange> {
        let ranges = self.lock_ranges();
        range_containing(&ranges, address).cloned()
    }

    /// Whether all of `bytes` at `address` are known memory. They may lie in several ranges side by side.
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
