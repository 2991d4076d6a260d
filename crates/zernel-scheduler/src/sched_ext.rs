//! State of the kernel's extensible scheduler class, from sysfs.

use std::path::Path;
use std::{fs, io};

/// The sysfs folder of sched_ext.
pub const SCHED_EXT_FOLDER: &str = "/sys/kernel/sched_ext";

/// State of sched_ext in the running kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SchedExtState {
    /// The kernel has no sched_ext.
    Absent,
    /// No scheduler is loaded.
    NoScheduler {
        /// The kernel's name of the state, usually `disabled`.
        state: String,
    },
    /// A scheduler is loaded.
    Loaded {
        /// The kernel's name of the state, usually `enabled`.
        state: String,
        /// Name of the scheduler.
        scheduler: String,
    },
}

impl SchedExtState {
    /// Reads the state from the running kernel.
    pub fn read_current() -> io::Result<Self> {
        Self::read_from(Path::new(SCHED_EXT_FOLDER))
    }

    fn read_from(sched_ext_folder: &Path) -> io::Result<Self> {
        let Some(state) = read_trimmed(&sched_ext_folder.join("state"))? else {
            return Ok(Self::Absent);
        };
        Ok(match read_trimmed(&sched_ext_folder.join("root/ops"))? {
            Some(scheduler) if state != "disabled" => Self::Loaded { state, scheduler },
            _ => Self::NoScheduler { state },
        })
    }
}

/// Returns the text of a file without its line end; `None` if the file does not exist.
fn read_trimmed(path: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text.trim_end().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sysfs_state_is_read() {
        let sched_ext_folder = tempfile::tempdir().unwrap();
        let read_state = || SchedExtState::read_from(sched_ext_folder.path()).unwrap();
        assert_eq!(read_state(), SchedExtState::Absent);

        fs::write(sched_ext_folder.path().join("state"), "disabled\n").unwrap();
        let no_scheduler = SchedExtState::NoScheduler {
            state: "disabled".into(),
        };
        assert_eq!(read_state(), no_scheduler);

        fs::create_dir(sched_ext_folder.path().join("root")).unwrap();
        fs::write(sched_ext_folder.path().join("root/ops"), "rusty\n").unwrap();
        assert_eq!(
            read_state(),
            no_scheduler,
            "the name of an unloaded scheduler is ignored"
        );

        fs::write(sched_ext_folder.path().join("state"), "enabled\n").unwrap();
        let loaded = SchedExtState::Loaded {
            state: "enabled".into(),
            scheduler: "rusty".into(),
        };
        assert_eq!(read_state(), loaded);
    }
}
