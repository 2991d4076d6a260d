//! Measures how much memory a piece of code allocates.
//!
//! A test binary opts in with `#[global_allocator] static ALLOCATOR: CountingAllocator = CountingAllocator;`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes that this thread has allocated and not freed. The number is negative if the thread frees memory of other
    /// threads.
    static ALLOCATED_BYTES: Cell<isize> = const { Cell::new(0) };
    /// Highest value of `ALLOCATED_BYTES` since the measurement began.
    static PEAK_ALLOCATED_BYTES: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, which also counts the allocated bytes of each thread.
#[derive(Debug)]
pub struct CountingAllocator;

fn count_allocation(change: isize) {
    // An exiting thread may free memory after its counters are destroyed.
    let _ = ALLOCATED_BYTES.try_with(|current| {
        let now = current.get() + change;
        current.set(now);
        let _ = PEAK_ALLOCATED_BYTES.try_with(|peak| peak.set(peak.get().max(now)));
    });
}

// SAFETY: every call goes to the system's allocator with the caller's arguments. Counting allocates nothing.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_allocation(layout.size().cast_signed());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_allocation(layout.size().cast_signed());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count_allocation(-layout.size().cast_signed());
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count_allocation(new_size.cast_signed() - layout.size().cast_signed());
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

/// Runs `work` and returns its result with the most bytes that this thread had allocated at once, beyond those before.
/// Returns zero bytes in a binary without [`CountingAllocator`].
pub fn peak_bytes<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = ALLOCATED_BYTES.get();
    PEAK_ALLOCATED_BYTES.set(before);
    let result = work();
    (
        result,
        (PEAK_ALLOCATED_BYTES.get() - before).max(0).cast_unsigned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    #[test]
    fn peak_bytes_counts_freed_memory() {
        let ((), peak) = peak_bytes(|| {
            drop(std::hint::black_box(vec![0_u8; 1 << 20]));
            drop(std::hint::black_box(vec![0_u8; 3 << 20]));
        });
        assert!((3 << 20..(3 << 20) + 4096).contains(&peak), "{peak}");
        let ((), nothing) = peak_bytes(|| ());
        assert_eq!(nothing, 0);
    }
}
