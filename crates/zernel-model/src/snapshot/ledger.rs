//! Which functions are probed in which library file, and which processes map it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The resolution of start times in `/proc`.
pub const PROC_START_TIME_UNIT_NS: u64 = 10_000_000;

/// Which functions are probed in which library file, and which processes map it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Ledger {
    /// The files with probes.
    pub files: Vec<LibraryFile>,
    /// The processes that map one of the listed files.
    pub mapping_processes: Vec<MappingProcess>,
    /// Files that no probe can be attached to.
    pub refused: Arc<RefusedFiles>,
}

/// A library file.
#[derive(Debug, Clone, PartialEq)]
pub struct LibraryFile {
    /// Number that identifies the file within a snapshot.
    pub number: u64,
    /// Path of the file, as the processes that map it see it.
    pub path: PathBuf,
    /// Name of the library without its version.
    pub kind: &'static str,
    /// Its functions.
    pub functions: Vec<FunctionEntry>,
}

/// A function of a library file.
#[derive(Debug, Clone, PartialEq)]
pub struct FunctionEntry {
    /// Name in the file.
    pub symbol: &'static str,
    /// The name under which calls of the function are counted.
    pub call_counter_name: &'static str,
    /// Whether it is probed.
    pub state: AttachState,
    /// Offset of the probe from the entry of the function.
    pub bytes_after_entry: u64,
}

/// Whether a function is probed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttachState {
    /// All the time.
    Attached,
    /// In sampling windows.
    Sampled,
    /// The function is not probed, for this reason.
    NotAttached(Arc<str>),
}

/// A process that maps library files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappingProcess {
    /// Process id.
    pub pid: u32,
    /// Start time in nanoseconds since boot, rounded down to [`PROC_START_TIME_UNIT_NS`].
    pub start_ns: u64,
    /// User of the process.
    pub uid: Option<u32>,
    /// Numbers of the files.
    pub files: BTreeSet<u64>,
}

/// A file that no probe can be attached to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedFile {
    /// Its path.
    pub path: PathBuf,
    /// The kind of the reason.
    pub cause: RefusalCause,
    /// Why, in words.
    pub reason: String,
    /// The tenant whose process maps the file.
    pub tenant: String,
}

/// The kind of reason why no probe can be attached to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RefusalCause {
    /// The file's name is not that of a known library.
    UnknownName,
    /// It cannot be read.
    Unreadable,
    /// The file is a directory, a pipe or a device.
    NotAFile,
    /// The file's content is not that of a library.
    NotALibrary,
    /// The file exceeds a limit on what is read of a library.
    OverLimit,
    /// The file was written to while it was read.
    Changed,
    /// The file system of the file does not answer.
    NoAnswer,
    /// The file is on FUSE, or on an overlay that may have a layer on FUSE.
    OnFuse,
    /// No child process could be started to read the file.
    NoProcess,
    /// The kernel refuses probes in one of the processes that map the file.
    RefusedByKernel,
    /// A daemon died while it read the file.
    Quarantined,
    /// The tenant of the file has too many files.
    TooManyFiles,
}

impl RefusalCause {
    /// Its name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::UnknownName => "unknown name",
            Self::Unreadable => "unreadable",
            Self::NotAFile => "not a file",
            Self::NotALibrary => "not a library",
            Self::OverLimit => "over a limit",
            Self::Changed => "changed",
            Self::NoAnswer => "no answer",
            Self::OnFuse => "on FUSE",
            Self::NoProcess => "no process",
            Self::RefusedByKernel => "refused by the kernel",
            Self::Quarantined => "quarantined",
            Self::TooManyFiles => "too many files",
        }
    }
}

/// The files that were refused last. Any user can have files refused, so only a limited number of refused files is
/// kept.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RefusedFiles {
    kept_files: VecDeque<RefusedFile>,
    left_out_counts: BTreeMap<RefusalCause, u64>,
    refusal_counts: BTreeMap<RefusalCause, u64>,
}

impl RefusedFiles {
    /// The most refused files that are kept: more than a person reads.
    pub const MAX_KEPT_FILES: usize = 256;

    /// Adds a file. The file replaces an earlier entry with the same path. Beyond [`Self::MAX_KEPT_FILES`] entries, the
    /// oldest one of the tenant with the most entries is left out and counted.
    pub fn add_refused_file(&mut self, file: RefusedFile) {
        *self.refusal_counts.entry(file.cause).or_default() += 1;
        self.kept_files.retain(|known| known.path != file.path);
        self.kept_files.push_back(file);
        if self.kept_files.len() > Self::MAX_KEPT_FILES
            && let Some(oldest) = self.oldest_of_largest_tenant()
            && let Some(oldest) = self.kept_files.remove(oldest)
        {
            *self.left_out_counts.entry(oldest.cause).or_default() += 1;
        }
    }

    /// Position of the oldest entry of the tenant with the most entries.
    fn oldest_of_largest_tenant(&self) -> Option<usize> {
        let mut tenants: BTreeMap<&str, usize> = BTreeMap::new();
        for file in &self.kept_files {
            *tenants.entry(&file.tenant).or_default() += 1;
        }
        let (largest, _) = tenants.into_iter().max_by_key(|(_, files)| *files)?;
        self.kept_files
            .iter()
            .position(|file| file.tenant == largest)
    }

    /// The refused files that are kept, from the oldest to the newest.
    pub fn oldest_to_newest(&self) -> impl Iterator<Item = &RefusedFile> {
        self.kept_files.iter()
    }

    /// Number of refusals so far, by cause. A file may be tried and refused several times.
    #[must_use]
    pub fn refusal_counts(&self) -> &BTreeMap<RefusalCause, u64> {
        &self.refusal_counts
    }

    /// Number of entries that were left out, by cause.
    #[must_use]
    pub fn left_out_counts(&self) -> &BTreeMap<RefusalCause, u64> {
        &self.left_out_counts
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{Scope, Snapshot};
    use super::*;

    fn refused_file(number: usize, cause: RefusalCause) -> RefusedFile {
        RefusedFile {
            path: format!("/home/mallory/{number}/libcuda.so.1").into(),
            cause,
            reason: format!("number {number}"),
            tenant: "user 1000".to_owned(),
        }
    }

    #[test]
    fn the_newest_refused_files_are_kept_and_the_others_counted() {
        let mut files = RefusedFiles::default();
        for number in 0..20_000 {
            let cause = match number % 4 {
                0 => RefusalCause::OverLimit,
                _ => RefusalCause::NotALibrary,
            };
            files.add_refused_file(refused_file(number, cause));
        }
        let kept: Vec<_> = files
            .oldest_to_newest()
            .map(|file| file.reason.clone())
            .collect();
        assert_eq!(kept.len(), RefusedFiles::MAX_KEPT_FILES);
        assert_eq!(kept.last().map(String::as_str), Some("number 19999"));
        assert_eq!(files.left_out_counts()[&RefusalCause::OverLimit], 4936);
        assert_eq!(files.left_out_counts()[&RefusalCause::NotALibrary], 14_808);

        let mut snapshot = Snapshot::default();
        snapshot.ledger.refused = Arc::new(files);
        let json = snapshot.ledger_json(Scope::All);
        assert_eq!(json["refused"].as_array().unwrap().len(), 256);
        let left_out_counts = json!({ "not a library": 14_808, "over a limit": 4936 });
        assert_eq!(json["refused_left_out"], left_out_counts);
        let own = snapshot.ledger_json(Scope::User(1000));
        assert!(own.get("refused").is_none() && own.get("refused_left_out").is_none());
    }

    #[test]
    fn refused_files_of_one_tenant_replace_only_its_own() {
        let mut files = RefusedFiles::default();
        files.add_refused_file(RefusedFile {
            tenant: "user 2000".to_owned(),
            ..refused_file(0, RefusalCause::NotALibrary)
        });
        for number in 1..1000 {
            files.add_refused_file(refused_file(number, RefusalCause::NotALibrary));
        }
        let first = files.oldest_to_newest().next().unwrap();
        assert_eq!(first.reason, "number 0");
    }

    #[test]
    fn a_file_that_is_refused_again_has_one_entry() {
        let mut files = RefusedFiles::default();
        for _ in 0..1000 {
            files.add_refused_file(refused_file(1, RefusalCause::Changed));
            files.add_refused_file(refused_file(2, RefusalCause::NotAFile));
        }
        assert_eq!(files.oldest_to_newest().count(), 2);
        assert!(files.left_out_counts().is_empty());
    }
}
