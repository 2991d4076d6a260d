//! Signals that ask a command to stop.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Exit code of a command that Ctrl-C ended.
pub(crate) const INTERRUPTED_EXIT_CODE: u8 = 130;

/// Returns a flag that SIGINT, SIGTERM and SIGHUP set from now on, instead of ending the process. A command that sees
/// the flag can clean up before it exits.
pub(crate) fn interrupt_flag() -> io::Result<Arc<AtomicBool>> {
    flag_set_by(&[SIGINT, SIGTERM, SIGHUP])
}

/// A flag that SIGINT and SIGTERM set, and one that SIGHUP sets: it asks a daemon to read its configuration again.
pub(crate) fn interrupt_and_reload_flags() -> io::Result<(Arc<AtomicBool>, Arc<AtomicBool>)> {
    Ok((flag_set_by(&[SIGINT, SIGTERM])?, flag_set_by(&[SIGHUP])?))
}

fn flag_set_by(signals: &[i32]) -> io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in signals {
        signal_hook::flag::register(*signal, Arc::clone(&flag))?;
    }
    Ok(flag)
}
