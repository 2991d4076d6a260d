//! Signals that ask a command to stop.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Exit code of a command that Ctrl-C ended.
pub(crate) const EXIT_CODE: u8 = 130;

/// A flag that SIGINT, SIGTERM and SIGHUP set from now on. The command can then clean up before it exits.
pub(crate) fn flag() -> io::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&flag))?;
    }
    Ok(flag)
}
