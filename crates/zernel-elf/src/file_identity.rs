//! Identity of a file, independent of its path.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

/// Identity and state of a file: equal after a rename, different after a replacement or a change of
/// the content.
///
/// Compare only identities of files that were opened in the same way. On an overlay file system a
/// file has another inode number under its path than through `/proc/PID/map_files`. A second change
/// within the same tick of the file system's clock, a few milliseconds, is not detected if the size
/// stays the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// Device number of the file system.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Size in bytes.
    pub size: u64,
    /// Last modification, in nanoseconds since 1970. The change time of the inode is not used, because a rename also
    /// changes it.
    pub modified_ns: i128,
}

impl FileIdentity {
    /// Reads the identity of an open file.
    pub fn read(file: &File) -> io::Result<Self> {
        let status = file.metadata()?;
        Ok(Self {
            device: status.dev(),
            inode: status.ino(),
            size: status.size(),
            modified_ns: i128::from(status.mtime()) * 1_000_000_000
                + i128::from(status.mtime_nsec()),
        })
    }
}
