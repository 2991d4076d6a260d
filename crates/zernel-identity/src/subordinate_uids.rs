//! Subordinate uids: additional uids that a user may use, by `/etc/subuid`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Largest part of a subuid file that is read; files are smaller. The rest is ignored.
const MAX_SUBUID_FILE_BYTES: u64 = 4 << 20;

/// A range of uids that a user may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubordinateRange {
    /// First uid of the range.
    pub first_uid: u32,
    /// Last uid of the range.
    pub last_uid: u32,
    /// The user. If its name is unknown to `/etc/passwd`, the first uid of the range stands for it.
    pub owner_uid: u32,
}

/// The subordinate uids of all users but root.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SubordinateUids {
    ranges: Vec<SubordinateRange>,
}

/// The table of this machine, with the time and size of the files that it was read from.
type CachedSubordinateUids = Option<([Option<(i64, i64, u64)>; 2], Arc<SubordinateUids>)>;

const SUBUID_AND_PASSWD_FILES: [&str; 2] = ["/etc/subuid", "/etc/passwd"];

impl SubordinateUids {
    /// The table of this machine. The files of the table are read again when they have changed.
    #[must_use]
    pub fn read_from_machine() -> Arc<Self> {
        static TABLE_CACHE: Mutex<CachedSubordinateUids> = Mutex::new(None);
        let version = SUBUID_AND_PASSWD_FILES.map(|path| {
            let file = std::fs::metadata(path).ok()?;
            Some((file.mtime(), file.mtime_nsec(), file.size()))
        });
        let mut cache = TABLE_CACHE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, table)) = &*cache
            && *of == version
        {
            return Arc::clone(table);
        }
        let [subordinates, users] =
            SUBUID_AND_PASSWD_FILES.map(|path| read_or_empty(Path::new(path)));
        let table = Arc::new(Self::parse(&subordinates, &users));
        *cache = Some((version, Arc::clone(&table)));
        table
    }

    /// From the texts of `/etc/subuid` and `/etc/passwd`. Lines that are not understood are skipped.
    #[must_use]
    pub fn parse(subordinates: &str, users: &str) -> Self {
        let uids: BTreeMap<&str, u32> = users.lines().filter_map(name_and_uid).collect();
        let ranges = subordinates.lines().filter_map(|line| {
            let mut parts = line.split(':');
            let name = parts.next()?;
            let first = parts.next()?.parse::<u32>().ok()?;
            let count = parts.next()?.trim().parse::<u32>().ok()?;
            let uid = uids.get(name).copied().or_else(|| name.parse().ok());
            Some(SubordinateRange {
                first_uid: first,
                last_uid: first.checked_add(count.checked_sub(1)?)?,
                owner_uid: uid.unwrap_or(first),
            })
        });
        // Ranges of root are left out: they are for containers that root starts, which are not root.
        let ranges = ranges.filter(|range| range.owner_uid != 0 && range.first_uid != 0);
        Self {
            ranges: ranges.collect(),
        }
    }

    /// The user who may use a uid, or the uid itself if it is no subordinate one.
    #[must_use]
    pub fn user_of(&self, uid: u32) -> u32 {
        let mut ranges = self.ranges.iter();
        let range = ranges.find(|range| (range.first_uid..=range.last_uid).contains(&uid));
        range.map_or(uid, |range| range.owner_uid)
    }

    /// All ranges, in the order of the file.
    #[must_use]
    pub fn ranges(&self) -> &[SubordinateRange] {
        &self.ranges
    }
}

fn name_and_uid(line: &str) -> Option<(&str, u32)> {
    let mut parts = line.split(':');
    let name = parts.next()?;
    Some((name, parts.nth(1)?.parse().ok()?))
}

/// Returns the text of a file, or an empty text if the file cannot be read.
fn read_or_empty(path: &Path) -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = File::open(path) {
        // What was read before an error is used.
        let _ = file.take(MAX_SUBUID_FILE_BYTES).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE_PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\n\
        alice:x:1000:1000::/home/alice:/bin/bash\n\
        bob:x:1001:1001::/home/bob:/bin/bash\nbroken\n";

    #[test]
    fn subordinate_uids_stand_for_their_user() {
        let text = "alice:100000:65536\nbob:165536:65536\n1002:231072:10\nroot:1000000:65536\n";
        let table = SubordinateUids::parse(text, EXAMPLE_PASSWD);
        let cases = [
            (0, 0),
            (1000, 1000),
            (99_999, 99_999),
            (100_000, 1000),
            (165_535, 1000),
            (165_536, 1001),
            (231_081, 1002),
            (231_082, 231_082),
            // Containers that root starts are not root.
            (1_000_000, 1_000_000),
        ];
        for (uid, user) in cases {
            assert_eq!(table.user_of(uid), user, "{uid}");
        }
    }

    /// A user of a directory service is not in `/etc/passwd`. The range of a user of a directory service is still one
    /// user.
    #[test]
    fn a_range_of_an_unknown_user_is_one_user() {
        let table = SubordinateUids::parse("carol:500000:65536\n", EXAMPLE_PASSWD);
        assert_eq!(table.user_of(500_000), 500_000);
        assert_eq!(table.user_of(565_535), 500_000);
    }

    #[test]
    fn lines_that_are_not_understood_are_skipped() {
        let text = "\n:\nalice\nalice:1\nalice:x:3\nalice:4294967295:2\nalice:7:0\nalice:-1:5\n\
            nobody:0:4294967295\nalice:100000:65536";
        let table = SubordinateUids::parse(text, EXAMPLE_PASSWD);
        let range = SubordinateRange {
            first_uid: 100_000,
            last_uid: 165_535,
            owner_uid: 1000,
        };
        assert_eq!(table.ranges(), [range]);
    }
}
