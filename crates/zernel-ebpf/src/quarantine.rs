//! Files that were being read or attached to when the daemon died.
//!
//! Nothing in a file should be able to end the daemon. If a file does so anyway, the service manager starts the daemon
//! again, the file ends it again, and nobody is observed. So a state file names the files that child processes are reading
//! or attaching to. If the state file names files when a daemon starts, the last daemon died while it read them. These
//! files are refused until they change, or for an hour.

use std::fmt::Write as _;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;
use zernel_elf::FileIdentity;

/// How long a file is refused.
const QUARANTINE_TIME: Duration = Duration::from_secs(3600);
/// Why a file is refused.
pub(crate) const QUARANTINE_REASON: &str =
    "the daemon died while it read this file; it is read again when it changes, or after an hour";
/// Largest state file that is read: more than the child processes of all users can have in hand.
const MAX_STATE_FILE_BYTES: u64 = 64 << 10;

/// The name of the state file.
const STATE_FILE_NAME: &str = "files-in-hand";

static PROCESS_QUARANTINE: Mutex<Quarantine> = Mutex::new(Quarantine {
    state_file: None,
    in_progress: Vec::new(),
    refused_until: Vec::new(),
});

struct Quarantine {
    /// The state file, which is locked as long as this process runs.
    state_file: Option<File>,
    in_progress: Vec<FileIdentity>,
    /// Refused files, and until when, in seconds since 1970.
    refused_until: Vec<(FileIdentity, u64)>,
}

fn lock_quarantine() -> MutexGuard<'static, Quarantine> {
    PROCESS_QUARANTINE
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// Reads the state file in a directory, which is created if it is missing, and writes it from now on. The directory must
/// belong to root or to the user of this process.
pub fn keep_state_in(directory: &Path) -> io::Result<()> {
    DirBuilder::new()
        .mode(0o750)
        .recursive(true)
        .create(directory)?;
    let mut state = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(directory.join(STATE_FILE_NAME))?;
    let status = state.metadata()?;
    if !status.is_file() || ![0, geteuid().as_raw()].contains(&status.uid()) {
        let problem = "the state file belongs to another user";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
    }
    flock(&state, FlockOperation::NonBlockingLockExclusive)?;
    let mut text = String::new();
    (&mut state)
        .take(MAX_STATE_FILE_BYTES)
        .read_to_string(&mut text)?;
    let mut quarantine = lock_quarantine();
    quarantine.refused_until = parse_state_file(&text, unix_seconds_now());
    quarantine.state_file = Some(state);
    quarantine.write_state_file();
    Ok(())
}

/// Whether a daemon died while it read or attached to this file.
pub(crate) fn is_quarantined(file: &FileIdentity) -> bool {
    let mut quarantine = lock_quarantine();
    let now = unix_seconds_now();
    quarantine.refused_until.retain(|(_, until)| *until > now);
    quarantine
        .refused_until
        .iter()
        .any(|(refused, _)| refused == file)
}

/// Marks a file that a child process is reading or attaching to, until the value is dropped.
#[derive(Debug)]
pub(crate) struct FileInProgress(FileIdentity);

impl FileInProgress {
    pub(crate) fn new(file: FileIdentity) -> Self {
        let mut quarantine = lock_quarantine();
        quarantine.in_progress.push(file);
        quarantine.write_state_file();
        Self(file)
    }
}

impl Drop for FileInProgress {
    fn drop(&mut self) {
        let mut quarantine = lock_quarantine();
        let mut in_progress = quarantine.in_progress.iter();
        if let Some(position) = in_progress.position(|file| *file == self.0) {
            quarantine.in_progress.swap_remove(position);
            quarantine.write_state_file();
        }
    }
}

impl Quarantine {
    /// Writes the state file, if there is one. A file that a child process is reading is written with the end time 0.
    fn write_state_file(&self) {
        let Some(state) = &self.state_file else {
            return;
        };
        let in_progress = self.in_progress.iter().map(|file| (file, 0));
        let refused = self
            .refused_until
            .iter()
            .map(|(file, until)| (file, *until));
        let mut text = String::new();
        for (file, until) in in_progress.chain(refused) {
            let FileIdentity {
                device,
                inode,
                size,
                modified_ns,
            } = file;
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{device} {inode} {size} {modified_ns} {until}");
        }
        // If the disk is full, a file is not refused that could have been.
        let written = state.write_all_at(text.as_bytes(), 0);
        let _ = written.and_then(|()| state.set_len(text.len() as u64));
    }
}

/// The files that a state file names, and until when they are refused. Even after the clock was changed, a file is refused
/// for at most an hour. Lines that are no file are left out.
fn parse_state_file(text: &str, now: u64) -> Vec<(FileIdentity, u64)> {
    let last = now + QUARANTINE_TIME.as_secs();
    let file = |line: &str| {
        let mut words = line.split(' ');
        let file = FileIdentity {
            device: words.next()?.parse().ok()?,
            inode: words.next()?.parse().ok()?,
            size: words.next()?.parse().ok()?,
            modified_ns: words.next()?.parse().ok()?,
        };
        let until: u64 = words.next()?.parse().ok()?;
        Some((file, if until == 0 { last } else { until.min(last) }))
    };
    let files = text.lines().filter_map(file);
    files.filter(|(_, until)| *until > now).collect()
}

/// Seconds since 1970.
fn unix_seconds_now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE_FILE: FileIdentity = FileIdentity {
        device: 1,
        inode: 2,
        size: 3,
        modified_ns: i128::MAX,
    };

    #[test]
    fn a_file_in_hand_is_refused_for_an_hour_after_the_next_start() {
        let text = format!("1 2 3 {} 0\n", i128::MAX);
        assert_eq!(parse_state_file(&text, 1000), [(EXAMPLE_FILE, 4600)]);
    }

    #[test]
    fn a_refused_file_stays_refused_until_its_time() {
        let text = format!("1 2 3 {} 1010\n", i128::MAX);
        assert_eq!(parse_state_file(&text, 1000), [(EXAMPLE_FILE, 1010)]);
        assert_eq!(parse_state_file(&text, 1010), []);
        // The clock was set back.
        assert_eq!(parse_state_file(&text, 1), [(EXAMPLE_FILE, 1010)]);
        let text = format!("1 2 3 {} 900000\n", i128::MAX);
        assert_eq!(parse_state_file(&text, 1000), [(EXAMPLE_FILE, 4600)]);
    }

    #[test]
    fn lines_that_are_no_file_are_left_out() {
        let text = format!("\nx\n1 2\n-1 2 3 4 0\n1 2 3 {} 0\n1 2 3 4", i128::MAX);
        assert_eq!(parse_state_file(&text, 1000), [(EXAMPLE_FILE, 4600)]);
    }

    #[test]
    fn the_state_file_names_what_is_in_hand() {
        let folder = tempfile::tempdir().unwrap();
        let read = || std::fs::read_to_string(folder.path().join(STATE_FILE_NAME)).unwrap();
        keep_state_in(folder.path()).unwrap();
        let in_progress = FileInProgress::new(EXAMPLE_FILE);
        assert_eq!(read(), format!("1 2 3 {} 0\n", i128::MAX));
        assert!(!is_quarantined(&EXAMPLE_FILE));
        assert!(keep_state_in(folder.path()).is_err(), "it is locked");
        drop(in_progress);
        assert_eq!(read(), "");
    }
}
