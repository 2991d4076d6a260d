//! A file system that stops answering: a FUSE mount with one file.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation,
    INodeNo, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
    SessionACL,
};
use rustix::mount::UnmountFlags;

/// How long the kernel may cache an answer: not at all, so every open of the file waits for an answer.
const CACHE_TIME: Duration = Duration::ZERO;
const FILE_INODE: INodeNo = INodeNo(2);

/// A mounted file system with one file, which can stop answering. When this value is dropped, the file system answers
/// again and is unmounted.
pub struct StallingFs {
    gate: Arc<AnswerGate>,
    directory: PathBuf,
    _session: BackgroundSession,
}

impl StallingFs {
    /// Mounts the file system on a directory. Every user may read and map its file.
    pub fn mount(directory: &Path, name: &str, content: Vec<u8>) -> io::Result<Self> {
        let gate = Arc::<AnswerGate>::default();
        let files = OneFileFs {
            name: name.to_owned(),
            content,
            gate: Arc::clone(&gate),
        };
        let mut options = Config::default();
        options.acl = SessionACL::All;
        let session = fuser::spawn_mount(files, directory, &options)?;
        Ok(Self {
            gate,
            directory: directory.to_owned(),
            _session: session,
        })
    }

    /// Makes the file system answer no request from now on.
    pub fn stop_answering(&self) {
        self.gate.set_gate_closed(true);
    }

    /// Makes the file system answer requests again, those that wait included.
    pub fn answer_again(&self) {
        self.gate.set_gate_closed(false);
    }
}

impl Drop for StallingFs {
    fn drop(&mut self) {
        self.answer_again();
        // The file system is unmounted lazily, because a process may still map the file.
        let _ = rustix::mount::unmount(&self.directory, UnmountFlags::DETACH);
    }
}

#[derive(Default)]
struct AnswerGate {
    is_closed: Mutex<bool>,
    gate_opened_condvar: Condvar,
}

impl AnswerGate {
    fn set_gate_closed(&self, is_closed: bool) {
        *self
            .is_closed
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = is_closed;
        self.gate_opened_condvar.notify_all();
    }

    fn wait_until_open(&self) {
        let is_closed = self
            .is_closed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let _open = self
            .gate_opened_condvar
            .wait_while(is_closed, |is_closed| *is_closed);
    }
}

struct OneFileFs {
    name: String,
    content: Vec<u8>,
    gate: Arc<AnswerGate>,
}

impl OneFileFs {
    fn attributes_of(&self, number: INodeNo) -> FileAttr {
        let is_file = number == FILE_INODE;
        FileAttr {
            ino: number,
            size: if is_file {
                self.content.len() as u64
            } else {
                0
            },
            blocks: 1,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: match is_file {
                true => FileType::RegularFile,
                false => FileType::Directory,
            },
            perm: 0o755,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            flags: 0,
            blksize: 4096,
        }
    }
}

impl Filesystem for OneFileFs {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.gate.wait_until_open();
        match name == OsStr::new(&self.name) {
            true => reply.entry(&CACHE_TIME, &self.attributes_of(FILE_INODE), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.gate.wait_until_open();
        reply.attr(&CACHE_TIME, &self.attributes_of(number));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.gate.wait_until_open();
        reply.opened(FileHandle(0), fuser::FopenFlags::empty());
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.gate.wait_until_open();
        let start = (offset as usize).min(self.content.len());
        let end = (start + size as usize).min(self.content.len());
        reply.data(&self.content[start..end]);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn stalled_file_is_readable_after_answer_again() {
        let directory = tempfile::tempdir().unwrap();
        let Ok(files) = StallingFs::mount(directory.path(), "file", b"content".to_vec()) else {
            return; // no FUSE here
        };
        let path = directory.path().join("file");
        assert_eq!(fs::read(&path).unwrap(), b"content");
        files.stop_answering();
        let (sender, content) = mpsc::channel();
        let reader = thread::spawn(move || sender.send(fs::read(path)));
        assert!(content.recv_timeout(Duration::from_millis(100)).is_err());
        files.answer_again();
        assert_eq!(content.recv().unwrap().unwrap(), b"content");
        reader.join().unwrap().unwrap();
    }
}
