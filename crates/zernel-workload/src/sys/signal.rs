//! Signals that stop a forked worker, and that make a blocked thread worker check its stop word.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rustix::thread::futex;

/// The word in which `SIGUSR1` sets [`STOP_BIT`] in a worker process.
static STOP_WORD: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
/// The bit that `SIGUSR1` sets in the word of [`STOP_WORD`].
pub(crate) const STOP_BIT: u32 = 1 << 31;

extern "C" fn set_stop_bit(_signal: i32) {
    // SAFETY: null, or the word that `set_up_worker_signals` borrows for as long as the pointer is set.
    if let Some(word) = unsafe { STOP_WORD.load(Ordering::Acquire).as_ref() } {
        word.fetch_or(STOP_BIT, Ordering::Release);
        let _ = futex::wake(word, futex::Flags::empty(), u32::MAX);
    }
}

extern "C" fn interrupt_only(_signal: i32) {}

fn set_signal_handler(signal: i32, handler: libc::sighandler_t) {
    // SAFETY: `sigaction` is plain data for which zeros are valid: empty mask, no flags. Without
    // SA_RESTART a blocking call returns, which is the point.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    // SAFETY: `action` is valid, and the handlers of this module only do what a signal handler may.
    unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
}

fn handler_of(signal: i32) -> Option<libc::sighandler_t> {
    // SAFETY: plain data for which zeros are valid, filled by the kernel.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: `action` is valid for writing, and nothing is changed.
    let result = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
    (result == 0).then_some(action.sa_sigaction)
}

/// Blocks every signal in the calling thread, so that none of the caller's handlers runs in it or
/// in a fresh child.
pub(crate) fn block_all_signals() {
    // SAFETY: the set is initialised by `sigfillset` before it is used.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut set);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
    }
}

fn unblock_all_signals() {
    // SAFETY: as in `block_all_signals`.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
    }
}

/// The signals that the calling process has handlers for.
pub(crate) fn signals_with_handlers() -> Vec<i32> {
    let is_caught = |handler| handler != libc::SIG_DFL && handler != libc::SIG_IGN;
    (1..=libc::SIGRTMAX())
        .filter(|signal| handler_of(*signal).is_some_and(is_caught))
        .collect()
}

/// Runs `body` in a new worker process with its own signal handling. The handlers of the signals that the
/// caller `caught` are reset. Signals to the whole process group (Ctrl-C, the end of a terminal or a
/// service) are ignored: the caller handles them. `SIGUSR1` sets [`STOP_BIT`] in `stop_word` and interrupts
/// a blocking call. Fork safe.
pub(crate) fn set_up_worker_signals(
    caught: &[i32],
    stop_word: &AtomicU32,
    body: impl FnOnce() -> i32,
) -> i32 {
    STOP_WORD.store(std::ptr::from_ref(stop_word).cast_mut(), Ordering::Release);
    for signal in caught {
        set_signal_handler(*signal, libc::SIG_DFL);
    }
    for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGHUP] {
        set_signal_handler(signal, libc::SIG_IGN);
    }
    set_signal_handler(
        libc::SIGUSR1,
        set_stop_bit as *const () as libc::sighandler_t,
    );
    unblock_all_signals();
    let code = body();
    STOP_WORD.store(std::ptr::null_mut(), Ordering::Release);
    code
}

/// The signal that interrupts a blocked thread worker of this process: a real-time signal that had no
/// handler when the first handle with threads was created. Its handler does nothing.
pub(crate) fn thread_interrupt_signal() -> i32 {
    static INTERRUPT_SIGNAL: OnceLock<i32> = OnceLock::new();
    *INTERRUPT_SIGNAL.get_or_init(|| {
        let unused = (libc::SIGRTMIN()..=libc::SIGRTMAX())
            .rev()
            .find(|&signal| handler_of(signal) == Some(libc::SIG_DFL));
        let signal = unused.unwrap_or(libc::SIGURG);
        set_signal_handler(signal, interrupt_only as *const () as libc::sighandler_t);
        signal
    })
}

/// Lets the calling thread be interrupted by [`thread_interrupt_signal`], whatever mask it inherited.
pub(crate) fn unblock_thread_interrupt() {
    let signal = thread_interrupt_signal();
    // SAFETY: the set is initialised by `sigemptyset` before it is used.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
    }
}
