//! Memory shared between processes.

use std::io;
use std::os::fd::AsFd;
use std::ptr;
use std::slice;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A mapping of a file that other processes map too. It is unmapped on drop.
#[derive(Debug)]
pub struct SharedMemory {
    start: usize,
    bytes: usize,
}

impl SharedMemory {
    /// Maps the first `bytes` bytes of `file`, which must be at least that long.
    pub fn map(file: impl AsFd, bytes: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address the kernel chooses aliases nothing.
        let start = unsafe {
            mmap(
                ptr::null_mut(),
                bytes,
                protection,
                MapFlags::SHARED,
                file,
                0,
            )?
        };
        Ok(Self {
            start: start as usize,
            bytes,
        })
    }

    fn checked_pointer(&self, offset: usize, bytes: usize, alignment: usize) -> *mut u8 {
        let fits = offset
            .checked_add(bytes)
            .is_some_and(|end| end <= self.bytes);
        assert!(
            fits && offset.is_multiple_of(alignment),
            "softgpu: outside of shared memory"
        );
        (self.start + offset) as *mut u8
    }

    /// The whole mapping as 64-bit words.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the whole mapping, page aligned; lives as long as `self`. Other processes write it
        // too, hence atomics.
        unsafe { slice::from_raw_parts(self.start as *const AtomicU64, self.bytes / 8) }
    }

    /// The 64-bit word at `offset` (in bytes).
    #[must_use]
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        let place = self.checked_pointer(offset, 8, 8);
        // SAFETY: inside the mapping and aligned; lives as long as `self`.
        unsafe { AtomicU64::from_ptr(place.cast()) }
    }

    /// The 32-bit word at `offset` (in bytes), to be used as a futex.
    #[must_use]
    pub fn futex_word_at(&self, offset: usize) -> &AtomicU32 {
        let place = self.checked_pointer(offset, 4, 4);
        // SAFETY: inside the mapping and aligned; lives as long as `self`.
        unsafe { AtomicU32::from_ptr(place.cast()) }
    }

    /// Copies `bytes` bytes from the address `source` of this process to `offset`.
    ///
    /// # Safety
    /// The source must be readable, and no other thread or process may use the destination meanwhile.
    pub unsafe fn store_bytes(&self, offset: usize, source: u64, bytes: usize) {
        let destination = self.checked_pointer(offset, bytes, 1);
        // SAFETY: the destination lies in the mapping; the rest is the caller's promise.
        unsafe { ptr::copy_nonoverlapping(source as *const u8, destination, bytes) };
    }

    /// The `bytes` bytes at `offset`.
    ///
    /// # Safety
    /// No thread or process may write these bytes while the slice is in use.
    #[must_use]
    pub unsafe fn slice(&self, offset: usize, bytes: usize) -> &[u8] {
        let start = self.checked_pointer(offset, bytes, 1);
        // SAFETY: inside the mapping; the caller promises that the bytes are not written.
        unsafe { slice::from_raw_parts(start, bytes) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no reference outlives it.
        let unmapped = unsafe { munmap(self.start as *mut _, self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}
