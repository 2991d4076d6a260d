//! `zernel sched --monitor`: prints what a scheduler that runs already does, from what it publishes.

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use super::interval_table::IntervalTable;
use super::published_statistics;
use crate::interrupt_flags;

/// Time between two looks at the published statistics.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Prints a line per interval until Ctrl-C, or until the scheduler ends.
pub(super) fn run(seconds: u64) -> Result<ExitCode, Box<dyn Error>> {
    let stop = interrupt_flags::interrupt_flag()?;
    let interval = Duration::from_secs(seconds);
    let mut table = IntervalTable::default();
    let mut next = Instant::now();
    let mut has_printed = false;
    while !stop.load(Ordering::Relaxed) {
        thread::sleep(POLL_INTERVAL);
        if Instant::now() < next {
            continue;
        }
        let statistics = match published_statistics::read_statistics(Path::new(
            published_statistics::STATISTICS_DIRECTORY,
        )) {
            Err(_) if has_printed => return Err("the scheduler was unloaded".into()),
            read => read?,
        };
        if table.is_already_in_table(&statistics) {
            // A scheduler that runs publishes new statistics within a second.
            continue;
        }
        next = Instant::now() + interval;
        if let Some(text) = table.add_interval(&statistics) {
            crate::print_to_stdout(text.as_bytes())?;
            has_printed = true;
        }
    }
    Ok(ExitCode::SUCCESS)
}
