//! Memory mappings: the region that a handle and its workers share, and a worker's private buffer.

use std::ffi::c_void;
use std::io;
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// Types made of atomics only: any bytes are a valid value, and any number of processes may use one
/// at once.
///
/// # Safety
/// The type must be `#[repr(C)]`, valid for every bit pattern, and consist of atomics and padding.
pub(crate) unsafe trait SharedPlain: Sync {}

/// Zeroed memory that stays shared across `fork`. It holds no file descriptor, and the kernel frees it with the last
/// process that maps it.
#[derive(Debug)]
pub(crate) struct SharedMapping {
    base: NonNull<c_void>,
    length: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread; it is only read through
// `SharedPlain` references.
unsafe impl Send for SharedMapping {}
// SAFETY: only read through `SharedPlain` references, which any thread may hold.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps `length` zeroed bytes, listed as `/memfd:zernel-workload` in `/proc/PID/maps`.
    pub(crate) fn new(length: usize) -> io::Result<Self> {
        let length = length.max(1);
        let file = memfd_create(c"zernel-workload", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, length as u64)?;
        // SAFETY: a fresh mapping at an address the kernel chooses; nothing else refers to it.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )?
        };
        let base =
            NonNull::new(base).ok_or_else(|| io::Error::other("mmap returned address zero"))?;
        Ok(Self { base, length })
    }

    /// The `count` values of type `T` that start `offset` bytes into the region. Fork safe.
    ///
    /// # Panics
    /// If the values do not lie inside the region or are not aligned, which is a mistake in the caller's
    /// layout.
    pub(crate) fn slice<T: SharedPlain>(&self, offset: usize, count: usize) -> &[T] {
        let end = count
            .checked_mul(size_of::<T>())
            .and_then(|bytes| bytes.checked_add(offset));
        assert!(
            end.is_some_and(|end| end <= self.length),
            "the slice lies outside the shared region"
        );
        assert_eq!(offset % align_of::<T>(), 0, "the slice is not aligned");
        // SAFETY: in bounds and aligned (checked above; the base is page aligned); `SharedPlain`
        // allows any bytes and concurrent use; the mapping lives as long as `self`.
        unsafe {
            std::slice::from_raw_parts(self.base.as_ptr().byte_add(offset).cast::<T>(), count)
        }
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: this object made the mapping, and no reference into it outlives `self`.
        let _ = unsafe { munmap(self.base.as_ptr(), self.length) };
    }
}

/// Private, zeroed memory of one worker.
#[derive(Debug)]
pub(crate) struct PrivateMapping {
    base: NonNull<c_void>,
    length: usize,
}

impl PrivateMapping {
    /// Maps `length` bytes. Fork safe.
    pub(crate) fn new(length: usize) -> Result<Self, rustix::io::Errno> {
        let length = length.max(1);
        // SAFETY: a fresh mapping at an address the kernel chooses.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?
        };
        let base = NonNull::new(base).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { base, length })
    }

    /// The whole mapping as bytes. Fork safe.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is readable, writable, `length` bytes long and borrowed mutably from
        // its only owner.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().cast::<u8>(), self.length) }
    }

    /// Gives the physical pages back; the next access to each page faults. Fork safe.
    pub(crate) fn discard_pages(&mut self) -> Result<(), rustix::io::Errno> {
        // SAFETY: private anonymous memory of this object, which reads as zeros afterwards. It is not
        // borrowed now.
        unsafe { madvise(self.base.as_ptr(), self.length, Advice::LinuxDontNeed) }
    }
}

impl Drop for PrivateMapping {
    fn drop(&mut self) {
        // SAFETY: this object made the mapping and is its only user.
        let _ = unsafe { munmap(self.base.as_ptr(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    // SAFETY: an atomic integer, valid for every bit pattern.
    unsafe impl SharedPlain for AtomicU64 {}

    #[test]
    fn shared_memory_is_zeroed_named_and_unmapped_on_drop() {
        let mapping = SharedMapping::new(4096).unwrap();
        let words = mapping.slice::<AtomicU64>(8, 2);
        assert_eq!(words[1].load(Ordering::Relaxed), 0);
        let address = format!("{:x}-", mapping.base.as_ptr() as usize);
        let line = |maps: &str| {
            maps.lines()
                .find(|line| line.starts_with(&address))
                .map(str::to_owned)
        };
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(line(&maps()).unwrap().contains("zernel-workload"));
        drop(mapping);
        assert!(line(&maps()).is_none_or(|line| !line.contains("zernel-workload")));
    }

    #[test]
    #[should_panic(expected = "outside the shared region")]
    fn slice_outside_shared_mapping_panics() {
        let mapping = SharedMapping::new(64).unwrap();
        let _ = mapping.slice::<AtomicU64>(0, 9);
    }

    #[test]
    fn discarded_pages_read_as_zeros() {
        let mut mapping = PrivateMapping::new(8192).unwrap();
        mapping.bytes()[5000] = 7;
        mapping.discard_pages().unwrap();
        assert_eq!(mapping.bytes()[5000], 0);
    }
}
