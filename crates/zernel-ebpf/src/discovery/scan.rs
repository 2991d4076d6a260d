//! Reads the mappings of processes: by an iterator in the kernel or, if the kernel refuses it, from procfs.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use libbpf_rs::{Iter, Link, Object, ObjectBuilder, OpenObject, ProgramMut};
use procfs::process::Process;
use zernel_identity::{MappedRegion, read_mapped_regions};
use zernel_phase::mirrors;
use zerocopy::{FromBytes, IntoBytes};

use super::library::{MappedFileKind, name_prefixes};
use super::process::ProcessKey;
use super::{DiscoveryError, sys};
use crate::capability::without_libbpf_messages;

pub(super) static MAPPINGS_OBJECT: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/mappings.bpf.o"));
const PREFIX_SECTION: &str = ".rodata.prefixes";

/// An executable mapping of a file of interest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping {
    pub(super) process: ProcessKey,
    /// The thread whose mappings were read: the first thread of the process or, if that has exited, another one.
    pub(super) tid: u32,
    pub(super) file_kind: MappedFileKind,
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
            file_name: [u8; 48],
        }
    }
}

impl RawMapping {
    /// The mapping that a record describes; `None` if its file name only begins like that of a known library.
    fn as_mapping(&self) -> Option<Mapping> {
        let name = self.file_name.split(|byte| *byte == 0).next()?;
        let device = rustix::fs::makedev(self.device >> 20, self.device & 0xf_ffff);
        Some(Mapping {
            process: ProcessKey::new(self.tgid, self.start_boottime_ns),
            tid: self.tid,
            file_kind: MappedFileKind::from_file_name(name)?,
            device,
            inode: self.inode,
            start: self.start,
            end: self.end,
            offset: self
                .page_offset
                .checked_mul(rustix::param::page_size() as u64)?,
        })
    }
}

/// Finds mappings of interest.
pub(super) enum Scanner {
    /// The kernel's iterator, attached to all processes.
    Iterator {
        object: Object,
        all_processes_link: Link,
    },
    /// Every `/proc/PID/maps`.
    Procfs,
}

impl Scanner {
    /// Reads mappings by the kernel's iterator if the kernel accepts it, else from procfs.
    pub(super) fn new() -> Self {
        without_libbpf_messages(load_iterator).unwrap_or(Self::Procfs)
    }

    /// The mappings of all processes.
    pub(super) fn mappings_of_all(&self) -> Result<Vec<Mapping>, DiscoveryError> {
        match self {
            Self::Iterator {
                all_processes_link, ..
            } => run_iterator(all_processes_link).map_err(DiscoveryError::IteratorUnreadable),
            Self::Procfs => all_mappings_from_procfs(),
        }
    }

    /// The mappings of one process; an empty list if the process has exited.
    pub(super) fn mappings_of_process(&self, pid: u32) -> Result<Vec<Mapping>, DiscoveryError> {
        let Self::Iterator { object, .. } = self else {
            return Ok(mappings_of_pid_from_procfs(pid));
        };
        let program = find_program(object).map_err(DiscoveryError::IteratorUnreadable)?;
        match without_libbpf_messages(|| sys::attach_to_process(&program, pid)) {
            Ok(link) => run_iterator(&link).map_err(DiscoveryError::IteratorUnreadable),
            Err(_) => Ok(mappings_of_pid_from_procfs(pid)),
        }
    }
}

fn load_iterator() -> io::Result<Scanner> {
    let mut open = ObjectBuilder::default()
        .open_memory(MAPPINGS_OBJECT)
        .map_err(io::Error::other)?;
    write_name_prefixes(&mut open)?;
    let object = open.load().map_err(io::Error::other)?;
    let all_processes_link = find_program(&object)?.attach().map_err(io::Error::other)?;
    run_iterator(&all_processes_link)?;
    Ok(Scanner::Iterator {
        object,
        all_processes_link,
    })
}

fn write_name_prefixes(object: &mut OpenObject) -> io::Result<()> {
    let prefixes = name_prefixes();
    let prefixes = prefixes.as_bytes();
    let mut map = object
        .maps_mut()
        .find(|map| map.name() == PREFIX_SECTION)
        .ok_or_else(|| io::Error::other("the iterator has no list of prefixes"))?;
    let room = map
        .initial_value_mut()
        .and_then(|value| value.get_mut(..prefixes.len()))
        .ok_or_else(|| io::Error::other("the iterator has no room for all prefixes"))?;
    room.copy_from_slice(prefixes);
    Ok(())
}

fn find_program(object: &Object) -> io::Result<ProgramMut<'_>> {
    object
        .progs_mut()
        .next()
        .ok_or_else(|| io::Error::other("the iterator's object has no program"))
}

/// The first mapping of each file in each process. A process may map one file many thousand times.
#[derive(Default)]
struct FirstMappings(HashMap<(ProcessKey, MappedFileKind, u64, u64), Mapping>);

impl FirstMappings {
    fn add(&mut self, mapping: Mapping) {
        let file = (
            mapping.process,
            mapping.file_kind,
            mapping.device,
            mapping.inode,
        );
        let known = self.0.entry(file).or_insert_with(|| mapping.clone());
        if mapping.start < known.start {
            *known = mapping;
        }
    }

    /// The mappings, by process and address.
    fn into_sorted(self) -> Vec<Mapping> {
        let mut mappings: Vec<Mapping> = self.0.into_values().collect();
        mappings.sort_by_key(|mapping| (mapping.process, mapping.start));
        mappings
    }
}

/// Runs the kernel's iterator over mappings to its end, and returns the mappings that it found.
fn run_iterator(link: &Link) -> io::Result<Vec<Mapping>> {
    let iterator = Iter::new(link).map_err(io::Error::other)?;
    read_records(iterator)
}

/// Reads all records of an iterator over mappings. Threads that outlive their leader each show the mappings of the
/// process.
fn read_records(mut records: impl Read) -> io::Result<Vec<Mapping>> {
    const RECORD_BYTES: usize = size_of::<RawMapping>();
    let mut mappings = FirstMappings::default();
    let mut buffer = vec![0; 64 * 1024];
    // Length of an incomplete record at the start of the buffer.
    let mut rest = 0;
    loop {
        match records.read(&mut buffer[rest..]) {
            Ok(0) => return Ok(mappings.into_sorted()),
            Ok(length) => {
                let filled = rest + length;
                for record in buffer[..filled].chunks_exact(RECORD_BYTES) {
                    let record = RawMapping::read_from_bytes(record).ok();
                    if let Some(mapping) = record.and_then(|record| record.as_mapping()) {
                        mappings.add(mapping);
                    }
                }
                rest = filled % RECORD_BYTES;
                buffer.copy_within(filled - rest..filled, 0);
            }
            // After a million mappings of no interest the kernel pauses.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn all_mappings_from_procfs() -> Result<Vec<Mapping>, DiscoveryError> {
    let processes = procfs::process::all_processes().map_err(DiscoveryError::ProcfsUnreadable)?;
    Ok(processes
        .flatten()
        .flat_map(|process| mappings_from_procfs(&process))
        .collect())
}

fn mappings_of_pid_from_procfs(pid: u32) -> Vec<Mapping> {
    let process = i32::try_from(pid)
        .ok()
        .and_then(|pid| Process::new(pid).ok());
    process.map_or_else(Vec::new, |process| mappings_from_procfs(&process))
}

/// The mappings of a process; none if it has exited, is a kernel thread, or may not be read.
fn mappings_from_procfs(process: &Process) -> Vec<Mapping> {
    let Some(key) = ProcessKey::from_procfs(process) else {
        return Vec::new();
    };
    let of_thread = |thread: &Process| {
        let maps = thread.open_relative("maps");
        maps.map_or_else(|_| Vec::new(), |maps| parse_maps(key, thread.pid, maps))
    };
    let own = of_thread(process);
    if !own.is_empty() || process.stat().is_ok_and(|stat| stat.state != 'Z') {
        return own;
    }
    // The first thread has exited before the others. procfs lists each thread under its own id as well.
    let threads = process.tasks().into_iter().flatten().flatten();
    threads
        .filter_map(|thread| Process::new(thread.tid).ok())
        .map(|thread| of_thread(&thread))
        .find(|mappings| !mappings.is_empty())
        .unwrap_or_default()
}

/// Reads the content of `/proc/PID/maps` as far as possible.
fn parse_maps(process: ProcessKey, tid: i32, maps: impl Read) -> Vec<Mapping> {
    let mut mappings = FirstMappings::default();
    let read = read_mapped_regions(maps, |region| {
        if let Some(mapping) = mapping_of_region(process, tid, region) {
            mappings.add(mapping);
        }
    });
    // A mapping cannot be read: the process has exited. The mappings that were read before the error are still used.
    drop(read);
    mappings.into_sorted()
}

fn mapping_of_region(process: ProcessKey, tid: i32, region: &MappedRegion<'_>) -> Option<Mapping> {
    let path = Path::new(OsStr::from_bytes(region.path?));
    if !region.is_executable {
        return None;
    }
    let name = path.file_name()?.as_bytes();
    let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
    let (major, minor) = region.device;
    Some(Mapping {
        process,
        tid: tid.cast_unsigned(),
        file_kind: MappedFileKind::from_file_name(name)?,
        device: rustix::fs::makedev(major, minor),
        inode: region.inode,
        start: region.start,
        end: region.end,
        offset: region.offset,
    })
}

#[cfg(test)]
mod tests {
    use zernel_testkit::fuzz::FuzzTarget;

    use super::*;

    const EXAMPLE_PID: u32 = 7;
    const CUDA_FILE_NAME: &[u8] = b"libcuda.so.1";

    fn record(start: u64, inode: u64, name: &[u8]) -> RawMapping {
        let mut mapping = RawMapping {
            start_boottime_ns: 10_000_000,
            start,
            end: start + 4096,
            page_offset: 0,
            inode,
            device: 1,
            tgid: EXAMPLE_PID,
            tid: EXAMPLE_PID,
            reserved: 0,
            file_name: [0; 48],
        };
        mapping.file_name[..name.len()].copy_from_slice(name);
        mapping
    }

    /// A reader that returns at most 1000 bytes at once, so that reads end within records.
    struct ShortReads<'a>(&'a [u8]);

    impl Read for ShortReads<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let length = buffer.len().min(1000);
            self.0.read(&mut buffer[..length])
        }
    }

    #[test]
    fn a_file_that_is_mapped_often_is_one_mapping() {
        let often = (1..=65_530).rev();
        let mut records: Vec<RawMapping> = often
            .map(|page| record(page * 8192, 1, CUDA_FILE_NAME))
            .collect();
        records.push(record(1 << 40, 2, CUDA_FILE_NAME));
        records.push(record(1 << 41, 1, b"ld-linux-x86-64.so.2"));
        records.push(record(1 << 42, 3, b"libc.so.6"));
        let found = read_records(ShortReads(records.as_bytes())).expect("no error");
        let found: Vec<_> = found.iter().map(|it| (it.inode, it.start)).collect();
        assert_eq!(found, [(1, 8192), (2, 1 << 40), (1, 1 << 41)]);
    }

    #[test]
    fn a_list_in_procfs_has_one_mapping_per_file() {
        let mut text = Vec::new();
        for page in 1..=1000 {
            let (start, end) = (page * 8192, page * 8192 + 4096);
            let line = format!("{start:x}-{end:x} r-xp 00000000 08:01 5 /opt/libcuda.so.1\n");
            text.extend(line.into_bytes());
        }
        text.extend(b"f0000000-f0001000 r-xp 00000000 08:01 6 /opt/\xff/libnccl.so.2\n");
        text.extend(b"f1000000-f1001000 r-xp 00000000 08:01 7 /opt/libnccl.so.2\n");
        text.extend(b"f1800000-f1801000 r-xp 00000000 08:01 9 /SYSV\n");
        text.extend(b"f2000000-f2001000 r--p 00000000 08:01 8 /opt/libcudart.so.12\n");
        let process = ProcessKey::new(EXAMPLE_PID, 10_000_000);
        let found = parse_maps(process, 7, &*text);
        let found: Vec<_> = found.iter().map(|it| (it.inode, it.start)).collect();
        assert_eq!(found, [(5, 8192), (6, 0xf000_0000), (7, 0xf100_0000)]);
    }

    #[test]
    fn fuzz_mapping_records() {
        let records = [
            record(8192, 1, CUDA_FILE_NAME),
            record(1 << 40, 2, b"ld-linux-x86-64.so.2"),
        ];
        let mut found = 0_u64;
        let target = FuzzTarget::new("mapping-records", 30_000)
            .input(records.as_bytes())
            .words(["libcuda.so.1\0", "ld-2.", "\0"]);
        let outcome = target.run(|bytes| {
            let mappings = read_records(bytes).expect("no error");
            found += u64::from(!mappings.is_empty());
        });
        assert!(found > outcome.inputs / 20, "{found}: {outcome:?}");
    }
}
