//! Memory mappings for shared state, for device memory and for reserved addresses.

use std::os::fd::AsFd;
use std::ptr;
use std::sync::atomic::AtomicU64;
use std::{io, slice};

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// Maps `bytes` bytes of `file` from `offset` on as shared 64-bit words, for the rest of the process's life.
pub(crate) fn map_file_as_words(
    file: impl AsFd,
    offset: u64,
    bytes: usize,
) -> io::Result<&'static [AtomicU64]> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address the kernel chooses aliases nothing.
    let start = unsafe {
        mmap(
            ptr::null_mut(),
            bytes,
            protection,
            MapFlags::SHARED,
            file,
            offset,
        )?
    };
    // SAFETY: the mapping is page aligned, readable, writable, `bytes` long and never unmapped; other
    // processes may write it, hence atomics.
    Ok(unsafe { slice::from_raw_parts(start.cast(), bytes / size_of::<AtomicU64>()) })
}

/// A private anonymous mapping, which is unmapped on drop.
#[derive(Debug)]
pub(crate) struct MemoryMapping {
    start: usize,
    bytes: usize,
}

impl MemoryMapping {
    /// Maps zeroed memory that takes no physical memory until it is touched.
    pub(crate) fn zeroed_on_touch(bytes: usize) -> io::Result<Self> {
        Self::map_anonymous(bytes, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// Reserves addresses. An access to one of them faults.
    pub(crate) fn reserve_addresses(bytes: usize) -> io::Result<Self> {
        Self::map_anonymous(bytes, ProtFlags::empty())
    }

    fn map_anonymous(bytes: usize, protection: ProtFlags) -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address the kernel chooses aliases nothing.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes, protection, flags)? };
        Ok(Self {
            start: start as usize,
            bytes,
        })
    }

    pub(crate) fn start(&self) -> u64 {
        self.start as u64
    }
}

impl Drop for MemoryMapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the range. A program that still uses an address in it uses freed device
        // memory, which faults on real hardware too.
        let unmapped = unsafe { munmap(self.start as *mut _, self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}
