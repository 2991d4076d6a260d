//! Records which part of its work a rank is doing at each time, as a stamp log.
//!
//! A stamp log is written only if the environment names a folder for it, as for the scripts in `truth/`.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs, io};

use rustix::time::ClockId;

use crate::sys::now_ns;

/// The variable with the folder for stamp logs.
const STAMP_FOLDER_VARIABLE: &str = "ZERNEL_TRUTH";

/// The labels that the training thread has entered and left. A job has one training thread per process.
pub(crate) struct ThreadLabels {
    folder: Option<PathBuf>,
    begin_ns: u64,
    stamps: Vec<(u64, &'static str)>,
}

impl ThreadLabels {
    pub(crate) fn new() -> Self {
        Self {
            folder: env::var_os(STAMP_FOLDER_VARIABLE).map(PathBuf::from),
            begin_ns: now_ns(ClockId::Monotonic),
            stamps: Vec::new(),
        }
    }

    /// Records that the thread enters a label (`+label`), or leaves the innermost label (`-`).
    pub(crate) fn stamp(&mut self, label: &'static str) {
        if self.folder.is_some() {
            self.stamps.push((now_ns(ClockId::Monotonic), label));
        }
    }

    /// Writes the stamp log. The job's plan determines `verdict` and `absent`.
    pub(crate) fn write_log(
        &self,
        variant: &str,
        verdict: &str,
        absent: &[&str],
    ) -> io::Result<()> {
        let Some(folder) = &self.folder else {
            return Ok(());
        };
        let pid = std::process::id();
        let head = serde_json::json!({
            "version": 1, "pid": pid, "variant": variant, "clock": "monotonic", "begin": self.begin_ns,
            "known": {"verdict": verdict, "absent": absent},
        });
        let mut text = format!("{head}\n");
        for (at_ns, label) in &self.stamps {
            // Writing to a string never fails.
            let _ = writeln!(text, "[{at_ns}, {pid}, \"{label}\"]");
        }
        let end_ns = now_ns(ClockId::Monotonic);
        let _ = writeln!(text, "{{\"end\": {end_ns}, \"gpu_busy\": null}}");
        fs::write(folder.join(format!("stamps-{pid}.jsonl")), text)
    }
}
