//! BPF array maps, mapped into memory: read and written without a system call.

use std::ffi::c_void;
use std::io;
use std::marker::PhantomData;
use std::os::fd::AsFd;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// An array map of `T`, shared with the BPF programs that write it.
#[derive(Debug)]
pub(crate) struct MappedArray<T> {
    first_word: *mut AtomicU64,
    length: usize,
    element: PhantomData<T>,
}

// SAFETY: the value owns the mapping, which is valid until it is dropped and accessed only through atomics.
unsafe impl<T> Send for MappedArray<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for MappedArray<T> {}

impl<T: FromBytes + IntoBytes + Immutable> MappedArray<T> {
    const WORDS_PER_ELEMENT: usize = size_of::<T>() / 8;

    /// Maps all `length` elements of the array map `map`, whose values are `T`s.
    pub(crate) fn new(map: impl AsFd, length: usize) -> io::Result<Self> {
        const { assert!(size_of::<T>().is_multiple_of(8)) };
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                length * size_of::<T>(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                map,
                0,
            )?
        };
        Ok(Self {
            first_word: start.cast(),
            length,
            element: PhantomData,
        })
    }

    fn words_of(&self, index: usize) -> &[AtomicU64] {
        assert!(index < self.length, "element {index} of {}", self.length);
        // SAFETY: in bounds of the mapping, which lives as long as `self`; the kernel writes to it
        // with atomics of its own or with single stores.
        unsafe {
            std::slice::from_raw_parts(
                self.first_word.add(index * Self::WORDS_PER_ELEMENT),
                Self::WORDS_PER_ELEMENT,
            )
        }
    }

    /// Returns a copy of an element of the map. Each 64-bit word is read atomically, the element as a whole is not.
    pub(crate) fn read(&self, index: usize) -> T {
        let mut element = T::new_zeroed();
        let words = self.words_of(index);
        for (bytes, word) in element.as_mut_bytes().chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes());
        }
        element
    }

    /// Overwrites an element, word by word.
    pub(crate) fn write(&self, index: usize, element: &T) {
        for (bytes, word) in element.as_bytes().chunks_exact(8).zip(self.words_of(index)) {
            let value = u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
            word.store(value, Ordering::Release);
        }
    }

    /// The 64-bit word at a byte offset of an element.
    pub(crate) fn word(&self, index: usize, offset: usize) -> &AtomicU64 {
        &self.words_of(index)[offset / 8]
    }
}

impl<T> Drop for MappedArray<T> {
    fn drop(&mut self) {
        let size = self.length * size_of::<T>();
        // SAFETY: `new` mapped the memory with that size; references into the memory cannot outlive `self`.
        unsafe {
            let _ = rustix::mm::munmap(self.first_word.cast::<c_void>(), size);
        }
    }
}
