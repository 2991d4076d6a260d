//! State of the kernel's extensible scheduler class, from sysfs.

use std::path::Path;
use std::{fs, io};

/// The sysfs folder of sched_ext.
pub const SYSFS: &str = "/sys/kernel/sched_ext";

/// State of sched_ext in the running kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SchedExt {
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

impl SchedExt {
    /// Reads the state from the running kernel.
    pub fn current() -> io::Result<Self> {
        Self::read(Path::new(SYSFS))
    }

    fn read(sysfs: &Path) -> io::Result<Self> {
        let Some(state) = read_line(&sysfs.join("state"))? else {
            return Ok(Self::Absent);
        };
        Ok(match read_line(&sysfs.join("root/ops"))? {
            Some(scheduler) if state != "disabled" => Self::Loaded { state, scheduler },
            _ => Self::NoScheduler { state },
        })
    }
}

/// Returns the text of a file without its line end; `None` if the file does not exist.
fn read_line(path: &Path) -> io::Result<Option<String>> {
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
        let sysfs = tempfile::tempdir().unwrap();
        let read = || SchedExt::read(sysfs.path()).unwrap();
        assert_eq!(read(), SchedExt::Absent);

        fs::write(sysfs.path().join("state"), "disabled\n").unwrap();
        let no_scheduler = SchedExt::NoScheduler {
            state: "disabled".into(),
        };
        assert_eq!(read(), no_scheduler);

        fs::create_dir(sysfs.path().join("root")).unwrap();
        fs::write(sysfs.path().join("root/ops"), "rusty\n").unwrap();
        assert_eq!(
            read(),
            no_scheduler,
            "the name of an unloaded scheduler is ignored"
        );

        fs::write(sysfs.path().join("state"), "enabled\n").unwrap();
        let loaded = SchedExt::Loaded {
            state: "enabled".into(),
            scheduler: "rusty".into(),
        };
        assert_eq!(read(), loaded);
    }
}
