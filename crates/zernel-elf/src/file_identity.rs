//! Which file it is, whatever it is called.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

/// Which file it is, and in which state: the same after a rename, another after a replacement or a
/// change of the content.
///
/// Compare identities of files that were opened in the same way: in an overlay file system, a file has
/// another inode under its path than through `/proc/PID/map_files`. A second change within the same
/// tick of the file system's clock, a few milliseconds, goes unnoticed if the length stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// The file system's device number.
    pub device: u64,
    /// The inode's number there.
    pub inode: u64,
    /// Length in bytes.
    pub size: u64,
    /// Last change of the content, in nanoseconds since 1970. Not that of the inode, which a rename
    /// changes as well.
    pub modified_ns: i128,
}

impl FileIdentity {
    /// That of an open file.
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
