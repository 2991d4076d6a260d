//! `zernel sched --config`: the numbers of the policy in a TOML file, which is read again when it changes or on SIGHUP.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::policy_options::PolicyOptions;

/// Time between two looks at the file. A file that changed must be the same at two of them, because an editor may still
/// be writing.
const FILE_CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Longer files are refused.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Reads and checks a file.
pub(super) fn read_policy_file(path: &Path) -> Result<PolicyOptions, String> {
    let failed = |problem: String| format!("{}: {problem}", path.display());
    let status = fs::metadata(path).map_err(|error| failed(error.to_string()))?;
    if !status.is_file() || status.len() > MAX_FILE_BYTES {
        return Err(failed(
            "it is not a regular file of at most 1 MiB".to_owned(),
        ));
    }
    let text = fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    toml::from_str(&text).map_err(|error| failed(error.to_string().trim_end().to_owned()))
}

/// Identifies a version of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileVersion {
    inode: u64,
    length: u64,
    modified: (i64, i64),
}

impl FileVersion {
    fn of_file(path: &Path) -> Option<Self> {
        let status = fs::metadata(path).ok()?;
        Some(Self {
            inode: status.ino(),
            length: status.len(),
            modified: (status.mtime(), status.mtime_nsec()),
        })
    }
}

/// A configuration file that may change.
pub(super) struct ConfigFile {
    pub(super) path: PathBuf,
    /// Set by SIGHUP.
    is_reload_requested: Arc<AtomicBool>,
    checked_at: Instant,
    /// Version of the file when it was loaded last.
    loaded_version: Option<FileVersion>,
    /// The version at the last look.
    last_checked_version: Option<FileVersion>,
}

impl ConfigFile {
    /// Begins to watch a file that was just read.
    pub(super) fn new(path: &Path, is_reload_requested: Arc<AtomicBool>) -> Self {
        let version = FileVersion::of_file(path);
        Self {
            path: path.to_owned(),
            is_reload_requested,
            checked_at: Instant::now(),
            loaded_version: version,
            last_checked_version: version,
        }
    }

    /// The new policy, or what is wrong with it, if the file was changed or SIGHUP came.
    pub(super) fn read_policy_if_changed(&mut self) -> Option<Result<PolicyOptions, String>> {
        let is_reload_requested = self.is_reload_requested.swap(false, Ordering::Relaxed);
        if !is_reload_requested && self.checked_at.elapsed() < FILE_CHECK_INTERVAL {
            return None;
        }
        self.checked_at = Instant::now();
        let version = FileVersion::of_file(&self.path);
        let is_stable = std::mem::replace(&mut self.last_checked_version, version) == version;
        if !is_reload_requested && (!is_stable || version == self.loaded_version) {
            return None;
        }
        self.loaded_version = version;
        Some(read_policy_file(&self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zernel_scheduler::scheduler::Privilege;

    fn write_config(text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sched.toml");
        fs::write(&path, text).unwrap();
        (folder, path)
    }

    #[test]
    fn a_config_file_sets_the_policy_flags() {
        let (_folder, path) =
            write_config("slice_us = 2000\nprivilege = \"all\"\nguarantee = 1\nlend = true\n");
        let policy = read_policy_file(&path).unwrap();
        assert_eq!(policy.slice_us, 2000);
        assert_eq!(policy.privilege.privilege, Privilege::All);
        assert_eq!(policy.guarantee.as_share(), 1.0);
        assert!(policy.lend);
        let (_folder, path) = write_config("");
        assert_eq!(read_policy_file(&path), Ok(PolicyOptions::default()));
    }

    #[test]
    fn the_file_of_the_package_has_the_defaults() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/sched.toml");
        assert_eq!(
            read_policy_file(Path::new(path)),
            Ok(PolicyOptions::default())
        );
    }

    #[test]
    fn config_errors_name_their_line() {
        for (text, line, named) in [
            ("\nslice = 2000", 2, "unknown field `slice`"),
            ("slice_us = 99", 1, "a slice is between 100 and 100000 µs"),
            ("\n\nguarantee = 1.5", 3, "between 0 and 1"),
            ("guarantee = \"half\"", 1, "invalid type"),
            ("lend = 1", 1, "invalid type"),
            ("privilege = \"some\"", 1, "cgroup=PATH or user=NAME"),
            ("privilege =", 1, "privilege ="),
        ] {
            let (_folder, path) = write_config(text);
            let error = read_policy_file(&path).unwrap_err();
            assert!(error.contains(&format!("line {line},")), "{error}");
            assert!(error.contains(named), "{error}");
            assert!(error.contains("sched.toml"), "{error}");
        }
        assert!(read_policy_file(Path::new("/nowhere/sched.toml")).is_err());
        assert!(read_policy_file(Path::new("/dev/null")).is_err());
    }

    #[test]
    fn a_file_is_read_again_once_per_change_and_request() {
        let (_folder, path) = write_config("slice_us = 2000");
        let request = Arc::new(AtomicBool::new(false));
        let mut file = ConfigFile::new(&path, Arc::clone(&request));
        let mut look = || {
            file.checked_at = Instant::now().checked_sub(FILE_CHECK_INTERVAL).unwrap();
            file.read_policy_if_changed()
        };
        assert_eq!(look(), None);
        fs::write(&path, "slice_us = 40000").unwrap();
        assert_eq!(look(), None, "it may still be written");
        assert_eq!(look().unwrap().unwrap().slice_us, 40000);
        assert_eq!(look(), None);
        request.store(true, Ordering::Relaxed);
        assert!(look().unwrap().is_ok());
        assert_eq!(look(), None);
        fs::write(&path, "slice_us = 1").unwrap();
        assert_eq!(look(), None);
        assert!(look().unwrap().is_err());
        assert_eq!(look(), None, "a mistake is reported once");
        fs::remove_file(&path).unwrap();
        assert_eq!(look(), None);
        assert!(look().unwrap().is_err());
    }
}
