//! A disk that does not answer: a file system on which files can be opened, and reads never return.
//!
//! The disk is mounted in a mount namespace of the calling thread and of the processes that this thread starts. So
//! the mount ends with these processes, even if the test is killed. Closing the connection fails all pending reads.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use zernel_testkit::{Need, eventually};

// Operations and layouts of the protocol, from linux/fuse.h.
const FUSE_LOOKUP: u32 = 1;
const FUSE_FORGET: u32 = 2;
const FUSE_GETATTR: u32 = 3;
const FUSE_OPEN: u32 = 14;
const FUSE_READ: u32 = 15;
const FUSE_INIT: u32 = 26;
const REQUEST_HEADER_BYTES: usize = 40;
const ATTRIBUTES_BYTES: usize = 88;
const ROOT_NODE: u64 = 1;
const FILE_NODE: u64 = 2;
const FILE_BYTES: u64 = 1 << 20;

/// The need for a kernel with FUSE.
pub(crate) fn fuse_need() -> Need {
    Need {
        name: "fuse",
        check: || match open_fuse_device() {
            Ok(_) => Ok(()),
            Err(error) => Err(format!("/dev/fuse is not usable: {error}")),
        },
    }
}

fn open_fuse_device() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/fuse")
}

pub(crate) struct DeadDisk {
    directory: PathBuf,
    must_server_stop: Arc<AtomicBool>,
    server: Option<JoinHandle<()>>,
    was_file_read: Arc<AtomicBool>,
}

impl DeadDisk {
    /// Mounts the disk on a directory, for this thread and the processes that it starts.
    pub(crate) fn mount(directory: &Path) -> Self {
        let connection = open_fuse_device().expect("checked before");
        mount_fuse(directory, &connection).expect("we are root");
        let (must_server_stop, was_file_read) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let server = FuseServer {
            connection,
            must_server_stop: Arc::clone(&must_server_stop),
            was_file_read: Arc::clone(&was_file_read),
        };
        Self {
            directory: directory.to_owned(),
            must_server_stop,
            server: Some(thread::spawn(move || server.answer_requests())),
            was_file_read,
        }
    }

    /// A file on it.
    pub(crate) fn file_path(&self) -> PathBuf {
        self.directory.join("batch")
    }

    /// Waits until a process reads the file.
    pub(crate) fn wait_until_file_is_read(&self) {
        eventually("the file is read", || {
            self.was_file_read.load(Ordering::Relaxed)
        });
    }
}

impl Drop for DeadDisk {
    fn drop(&mut self) {
        self.must_server_stop.store(true, Ordering::Relaxed);
        // The server's thread closes the connection when it ends.
        let _ = self.server.take().map(JoinHandle::join);
        if let Ok(directory) = CString::new(self.directory.as_os_str().as_bytes()) {
            // SAFETY: a string that ends with zero.
            unsafe { libc::umount2(directory.as_ptr(), libc::MNT_DETACH) };
        }
    }
}

fn mount_fuse(directory: &Path, connection: &File) -> io::Result<()> {
    let checked = |result: i32| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    let directory = CString::new(directory.as_os_str().as_bytes())?;
    let fd = connection.as_raw_fd();
    let options = CString::new(format!("fd={fd},rootmode=40000,user_id=0,group_id=0"))?;
    // SAFETY: strings that end with zero; only this thread gets another namespace.
    unsafe {
        checked(libc::unshare(libc::CLONE_NEWNS))?;
        checked(libc::mount(
            ptr::null(),
            c"/".as_ptr(),
            ptr::null(),
            libc::MS_REC | libc::MS_PRIVATE,
            ptr::null(),
        ))?;
        checked(libc::mount(
            c"dead-disk".as_ptr(),
            directory.as_ptr(),
            c"fuse".as_ptr(),
            0,
            options.as_ptr().cast(),
        ))
    }
}

/// Answers everything but reads.
struct FuseServer {
    connection: File,
    must_server_stop: Arc<AtomicBool>,
    was_file_read: Arc<AtomicBool>,
}

impl FuseServer {
    fn answer_requests(mut self) {
        let a_while = Timespec {
            tv_sec: 0,
            tv_nsec: 20_000_000,
        };
        let mut request = vec![0; 1 << 18];
        while !self.must_server_stop.load(Ordering::Relaxed) {
            let mut ready = [PollFd::new(&self.connection, PollFlags::IN)];
            if poll(&mut ready, Some(&a_while)) != Ok(1) {
                continue;
            }
            match self.connection.read(&mut request) {
                Ok(length) if length >= REQUEST_HEADER_BYTES => {
                    self.answer_request(&request[..length]);
                }
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return,
                _ => {}
            }
        }
    }

    fn answer_request(&mut self, request: &[u8]) {
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().expect("four"));
        let node = u64::from(word(16));
        let answer = match word(4) {
            FUSE_READ => return self.was_file_read.store(true, Ordering::Relaxed),
            FUSE_FORGET => return,
            FUSE_INIT => Ok(init_reply(word(REQUEST_HEADER_BYTES + 8))),
            FUSE_GETATTR => Ok([vec![0; 16], node_attributes(node)].concat()),
            FUSE_LOOKUP if node == ROOT_NODE => Ok(lookup_reply()),
            FUSE_OPEN => Ok(vec![0; 16]),
            _ => Err(libc::ENOSYS),
        };
        let (error, body) = match answer {
            Ok(body) => (0, body),
            Err(error) => (-error, Vec::new()),
        };
        let mut reply = Vec::new();
        reply.extend_from_slice(&(16 + body.len() as u32).to_ne_bytes());
        reply.extend_from_slice(&error.to_ne_bytes());
        reply.extend_from_slice(&request[8..16]);
        reply.extend_from_slice(&body);
        // Writing the reply fails if the process that sent the request has been killed.
        let _ = self.connection.write(&reply);
    }
}

/// `struct fuse_init_out`: version 7.31, nothing special.
fn init_reply(readahead: u32) -> Vec<u8> {
    let mut body = Vec::new();
    for word in [7, 31, readahead, 0, 0, 1 << 16] {
        body.extend_from_slice(&u32::to_ne_bytes(word));
    }
    body.resize(64, 0);
    body
}

/// `struct fuse_entry_out`: the file, whatever its name.
fn lookup_reply() -> Vec<u8> {
    let mut body = FILE_NODE.to_ne_bytes().to_vec();
    body.resize(40, 0);
    body.extend(node_attributes(FILE_NODE));
    body
}

/// `struct fuse_attr`.
fn node_attributes(node: u64) -> Vec<u8> {
    let (size, mode) = match node {
        ROOT_NODE => (0, libc::S_IFDIR | 0o755),
        _ => (FILE_BYTES, libc::S_IFREG | 0o644),
    };
    let mut body = Vec::new();
    for word in [node, size, 0, 0, 0, 0] {
        body.extend_from_slice(&u64::to_ne_bytes(word));
    }
    body.resize(60, 0);
    for word in [mode, 1] {
        body.extend_from_slice(&u32::to_ne_bytes(word));
    }
    body.resize(ATTRIBUTES_BYTES, 0);
    body
}
