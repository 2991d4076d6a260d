//! Reads the mappings of processes: by an iterator in the kernel or, if the kernel refuses it, from procfs.

use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use libbpf_rs::{Iter, Link, Object, ObjectBuilder, OpenObject, ProgramMut};
use procfs::process::{MMPermissions, MMapPath, MemoryMap, Process};
use zernel_phase::mirrors;
use zerocopy::{FromBytes, IntoBytes};

use super::library::{Subject, prefixes};
use super::process::ProcessKey;
use super::{DiscoveryError, sys};
use crate::capability::quietly;

pub(super) static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/mappings.bpf.o"));
const PREFIX_MAP: &str = ".rodata.prefixes";

/// An executable mapping of a file of interest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) process: ProcessKey,
    /// The thread it was read from: the leader or, if the leader has exited, another one.
    pub(super) tid: u32,
    pub(super) subject: Subject,
    pub(super) device: u64,
    pub(super) inode: u64,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) offset: u64,
}

impl Mapping {
    /// Path that opens the mapped file.
    pub(super) fn map_files(&self) -> PathBuf {
        let (tid, start, end) = (self.tid, self.start, self.end);
        format!("/proc/{tid}/map_files/{start:x}-{end:x}").into()
    }
}

mirrors! {
    #[cfg(test)]
    pub(super) const MIRRORS;
    structs {
        struct RawMapping = "mapping" {
            start_boottime_ns: u64,
            start: u64,
            end: u64,
            page_offset: u64,
            inode: u64,
            device: u32,
            tgid: u32,
            tid: u32,
            reserved: u32,
            name: [u8; 48],
        }
    }
}

impl RawMapping {
    /// `None` if the name only begins like one of interest.
    fn mapping(&self) -> Option<Mapping> {
        let name = self.name.split(|byte| *byte == 0).next()?;
        let device = rustix::fs::makedev(self.device >> 20, self.device & 0xf_ffff);
        Some(Mapping {
            process: ProcessKey::new(self.tgid, self.start_boottime_ns),
            tid: self.tid,
            subject: Subject::from_file_name(name)?,
            device,
            inode: self.inode,
            start: self.start,
            end: self.end,
            offset: self.page_offset * rustix::param::page_size() as u64,
        })
    }
}

/// Finds mappings of interest.
pub(super) enum Scanner {
    /// The kernel's iterator, attached to all processes.
    Iterator { object: Object, everything: Link },
    /// Every `/proc/PID/maps`.
    Procfs,
}

impl Scanner {
    /// The iterator if the kernel accepts it, else procfs.
    pub(super) fn new() -> Self {
        quietly(iterator).unwrap_or(Self::Procfs)
    }

    /// The mappings of all processes.
    pub(super) fn everything(&self) -> Result<Vec<Mapping>, DiscoveryError> {
        match self {
            Self::Iterator { everything, .. } => read(everything).map_err(DiscoveryError::Iterate),
            Self::Procfs => every_process(),
        }
    }

    /// The mappings of one process; none if it has exited.
    pub(super) fn process(&self, pid: u32) -> Result<Vec<Mapping>, DiscoveryError> {
        let Self::Iterator { object, .. } = self else {
            return Ok(one_process(pid));
        };
        let program = program(object).map_err(DiscoveryError::Iterate)?;
        match quietly(|| sys::attach_to_process(&program, pid)) {
            Ok(link) => read(&link).map_err(DiscoveryError::Iterate),
            Err(_) => Ok(one_process(pid)),
        }
    }
}

fn iterator() -> io::Result<Scanner> {
    let mut open = ObjectBuilder::default()
        .open_memory(OBJECT)
        .map_err(io::Error::other)?;
    set_prefixes(&mut open)?;
    let object = open.load().map_err(io::Error::other)?;
    let everything = program(&object)?.attach().map_err(io::Error::other)?;
    read(&everything)?;
    Ok(Scanner::Iterator { object, everything })
}

fn set_prefixes(object: &mut OpenObject) -> io::Result<()> {
    let prefixes = prefixes();
    let prefixes = prefixes.as_bytes();
    let mut map = object
        .maps_mut()
        .find(|map| map.name() == PREFIX_MAP)
        .ok_or_else(|| io::Error::other("the iterator has no list of prefixes"))?;
    let room = map
        .initial_value_mut()
        .and_then(|value| value.get_mut(..prefixes.len()))
        .ok_or_else(|| io::Error::other("the iterator has no room for all prefixes"))?;
    room.copy_from_slice(prefixes);
    Ok(())
}

fn program(object: &Object) -> io::Result<ProgramMut<'_>> {
    object
        .progs_mut()
        .next()
        .ok_or_else(|| io::Error::other("the iterator's object has no program"))
}

/// Runs an iterator to its end.
fn read(link: &Link) -> io::Result<Vec<Mapping>> {
    let mut iterator = Iter::new(link).map_err(io::Error::other)?;
    let mut records = Vec::new();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match iterator.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => records.extend_from_slice(&buffer[..length]),
            // After a million mappings of no interest the kernel pauses.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let records = records.chunks_exact(size_of::<RawMapping>());
    let mut mappings: Vec<_> = records
        .filter_map(|record| RawMapping::read_from_bytes(record).ok()?.mapping())
        .collect();
    // Threads that outlive their leader each show the mappings of the process.
    mappings.sort_by_key(|mapping| (mapping.process, mapping.start));
    mappings.dedup_by_key(|mapping| (mapping.process, mapping.start));
    Ok(mappings)
}

fn every_process() -> Result<Vec<Mapping>, DiscoveryError> {
    let processes = procfs::process::all_processes().map_err(DiscoveryError::Procfs)?;
    Ok(processes
        .flatten()
        .flat_map(|process| maps_of(&process))
        .collect())
}

fn one_process(pid: u32) -> Vec<Mapping> {
    let process = i32::try_from(pid)
        .ok()
        .and_then(|pid| Process::new(pid).ok());
    process.map_or_else(Vec::new, |process| maps_of(&process))
}

/// The mappings of a process; none if it has exited, is a kernel thread, or may not be read.
fn maps_of(process: &Process) -> Vec<Mapping> {
    let Some(key) = ProcessKey::from_procfs(process) else {
        return Vec::new();
    };
    let of_thread = |thread: &Process| -> Vec<Mapping> {
        let maps = thread.maps().into_iter().flatten();
        maps.filter_map(|map| mapping_of(key, thread.pid, &map))
            .collect()
    };
    let own = of_thread(process);
    if !own.is_empty() || process.stat().is_ok_and(|stat| stat.state != 'Z') {
        return own;
    }
    // The leader has exited before its threads. procfs lists each thread under its own id as well.
    let threads = process.tasks().into_iter().flatten().flatten();
    threads
        .filter_map(|thread| Process::new(thread.tid).ok())
        .map(|thread| of_thread(&thread))
        .find(|mappings| !mappings.is_empty())
        .unwrap_or_default()
}

fn mapping_of(process: ProcessKey, tid: i32, map: &MemoryMap) -> Option<Mapping> {
    let MMapPath::Path(path) = &map.pathname else {
        return None;
    };
    if !map.perms.contains(MMPermissions::EXECUTE) {
        return None;
    }
    let name = path.file_name()?.as_bytes();
    let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
    let (major, minor) = map.dev;
    Some(Mapping {
        process,
        tid: tid.cast_unsigned(),
        subject: Subject::from_file_name(name)?,
        device: rustix::fs::makedev(major.cast_unsigned(), minor.cast_unsigned()),
        inode: map.inode,
        start: map.address.0,
        end: map.address.1,
        offset: map.offset,
    })
}
