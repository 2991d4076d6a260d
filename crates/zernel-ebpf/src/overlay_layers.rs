//! Finds out which file systems are below an overlay.
//!
//! Any user can mount an overlay in a user namespace, with layers on FUSE. The kernel attaches probes to the file in the layer,
//! so what holds for files on FUSE holds for such an overlay. `statfs` does not report the layers. A BPF program reads them from
//! the kernel's own list, which asks no file system.

use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use libbpf_rs::{Iter, Object, ObjectBuilder};
use zernel_phase::mirrors;
use zerocopy::FromBytes;

use crate::capability::without_libbpf_messages;
use crate::discovery::sys::attach_to_process;

pub(crate) static OVERLAY_OBJECT: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/overlay_layers.bpf.o"));

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    structs {
        struct OverlayFile = "overlay_file" {
            descriptor: u32,
            layers: u32,
        }
    }
    constants {
        u32 = "overlay_layers", "OVERLAY_" {
            WITHOUT_FUSE = 0,
            ON_FUSE = 1,
            ON_OVERLAY = 2,
            OF_ROOT = 3,
            OF_USER = 4,
        }
    }
}

/// The time between two attempts to load the program for a kernel that does not describe overlays. Support for overlays may
/// be in a kernel module that is loaded later.
const RELOAD_INTERVAL: Duration = Duration::from_secs(60);

/// The loaded BPF program, and when it was loaded. `None`: the program is not loaded yet, or the kernel refuses it.
static LOADED_PROGRAM: Mutex<Option<(Option<Object>, Instant)>> = Mutex::new(None);

/// Why no probe is attached to a file on an overlay, if its layers could hold up an attachment. `None` for files that are on no
/// overlay, and if the kernel cannot report the layers (before Linux 6.1).
pub(crate) fn refusal_of_overlay(file: BorrowedFd<'_>) -> Option<&'static str> {
    match layers_below(file).ok()?? {
        ON_FUSE => Some(
            "it is on an overlay with a layer on FUSE, whose server could hold up every fork of the machine while a probe is \
             attached; if you trust the server, name the file with --library",
        ),
        ON_OVERLAY => Some(
            "it is on an overlay of an overlay, which could be on FUSE; if you trust its layers, name the file with --library",
        ),
        OF_USER => Some(
            "it is on an overlay that a user has mounted, and the kernel does not report its layers, which could be on FUSE; if \
             you trust them, name the file with --library",
        ),
        _ => None,
    }
}

/// What is below the overlay of an open file of this process; `None` if the file is on no overlay.
fn layers_below(file: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let mut program = LOADED_PROGRAM
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let (object, loaded) = program.get_or_insert_with(|| (load_program().ok(), Instant::now()));
    let found = find_record(object.as_ref(), file)?;
    if !matches!(found, Some(OF_ROOT | OF_USER)) || loaded.elapsed() < RELOAD_INTERVAL {
        return Ok(found);
    }
    (*object, *loaded) = (load_program().ok(), Instant::now());
    find_record(object.as_ref(), file)
}

fn load_program() -> libbpf_rs::Result<Object> {
    without_libbpf_messages(|| ObjectBuilder::default().open_memory(OVERLAY_OBJECT)?.load())
}

/// Reads the records of this process's open files until the record of the given descriptor.
fn find_record(object: Option<&Object>, file: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let program = object.and_then(|object| object.progs_mut().next());
    let program = program.ok_or(io::ErrorKind::Unsupported)?;
    let link = without_libbpf_messages(|| attach_to_process(&program, std::process::id()))?;
    let mut iterator = Iter::new(&link).map_err(io::Error::other)?;
    let mut records = Vec::new();
    iterator.read_to_end(&mut records)?;
    let mut files = records
        .chunks_exact(size_of::<OverlayFile>())
        .filter_map(|record| OverlayFile::read_from_bytes(record).ok());
    let file = files.find(|found| i64::from(found.descriptor) == i64::from(file.as_raw_fd()));
    Ok(file.map(|found| found.layers))
}
