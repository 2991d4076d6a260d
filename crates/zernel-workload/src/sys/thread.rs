//! Threads inside a forked container process.
//!
//! The threads come from libc's `pthread_create`. libc's fork leaves its allocator and its thread lists usable in the
//! child, and threads made this way have their own thread-local storage and `errno`, which custom work functions need.
//! Threads made by bare `clone` would share the leader's.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::io::Errno;

struct ThreadStart<'a> {
    body: &'a (dyn Fn(usize) + Sync),
    argument: usize,
}

extern "C" fn thread_entry(start: *mut c_void) -> *mut c_void {
    // SAFETY: `run_threads` keeps the `ThreadStart` alive until this thread is joined.
    let start = unsafe { &*start.cast::<ThreadStart<'_>>() };
    // A panic must end the process of a container the same way in builds that unwind and in builds that abort.
    if catch_unwind(AssertUnwindSafe(|| (start.body)(start.argument))).is_err() {
        // SAFETY: ends the process.
        unsafe { libc::abort() };
    }
    std::ptr::null_mut()
}

/// Runs `body(0)` to `body(count - 1)`, each in a thread of its own, runs `meanwhile` in the calling thread, and
/// returns when all have ended.
///
/// If a thread cannot be created, `failed` is called with the error and the process exits: the existing
/// threads wait for a start that never comes, and borrow from this thread.
pub(crate) fn run_threads(
    count: usize,
    stack_bytes: usize,
    body: &(dyn Fn(usize) + Sync),
    meanwhile: impl FnOnce(),
    failed: impl FnOnce(Errno),
) {
    let start = |argument| ThreadStart { body, argument };
    let starts: Vec<ThreadStart<'_>> = (0..count).map(start).collect();
    let threads: Result<Vec<_>, _> = starts
        .iter()
        .map(|start| create_thread(stack_bytes, start))
        .collect();
    match threads {
        Ok(threads) => {
            meanwhile();
            for thread in threads {
                // SAFETY: joined exactly once.
                unsafe { libc::pthread_join(thread, std::ptr::null_mut()) };
            }
        }
        Err(errno) => {
            failed(errno);
            // SAFETY: ends the process.
            unsafe { libc::_exit(1) };
        }
    }
}

fn create_thread(stack_bytes: usize, start: &ThreadStart<'_>) -> Result<libc::pthread_t, Errno> {
    // SAFETY: attribute and handle are initialised by the calls that precede their use; `start`
    // outlives the thread because `run_threads` joins it, or ends the process where it cannot.
    let (result, thread) = unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        libc::pthread_attr_init(&raw mut attributes);
        libc::pthread_attr_setstacksize(&raw mut attributes, stack_bytes);
        let mut thread: libc::pthread_t = std::mem::zeroed();
        let argument = std::ptr::from_ref(start).cast_mut().cast::<c_void>();
        let result = libc::pthread_create(
            &raw mut thread,
            &raw const attributes,
            thread_entry,
            argument,
        );
        libc::pthread_attr_destroy(&raw mut attributes);
        (result, thread)
    };
    match result {
        0 => Ok(thread),
        error => Err(Errno::from_raw_os_error(error)),
    }
}
