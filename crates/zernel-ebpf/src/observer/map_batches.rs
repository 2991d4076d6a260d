//! Reads and deletes many entries of a BPF hash map with few system calls.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

use libbpf_rs::{MapCore, MapHandle, libbpf_sys};
use rustix::io::Errno;
use zerocopy::FromBytes;

/// Number of entries that the first system call has room for: most maps have fewer.
const FIRST_BATCH_CAPACITY: usize = 256;
/// Number of entries that each further system call has room for.
const NEXT_BATCH_CAPACITY: usize = 4096;

/// Reads all entries of a BPF hash map.
pub(super) fn read_all_entries<K: FromBytes, V: FromBytes>(
    map: &MapHandle,
) -> libbpf_rs::Result<Vec<(K, V)>> {
    let mut entries = Vec::new();
    for_each_entry(map, |_, key, value| entries.push((key, value)))?;
    Ok(entries)
}

/// What [`delete_where`] did.
pub(super) struct DeletedEntries<K> {
    /// Number of entries that `delete_where` visited.
    pub(super) visited_count: u64,
    /// Keys of the entries that `delete_where` deleted. Entries that a BPF program deleted first are not included.
    pub(super) deleted_keys: Vec<K>,
}

/// Deletes the entries that meet a condition, in one pass over the map.
pub(super) fn delete_where<K: FromBytes, V: FromBytes>(
    map: &MapHandle,
    condition: impl Fn(&K, &V) -> bool,
) -> libbpf_rs::Result<DeletedEntries<K>> {
    let mut visited = 0;
    let mut keys = Vec::new();
    for_each_entry(map, |bytes, key, value| {
        visited += 1;
        if condition(&key, &value) {
            keys.extend_from_slice(bytes);
        }
    })?;
    let mut deleted = Vec::new();
    delete_keys(map, keys, |bytes| {
        deleted.extend(K::read_from_bytes(bytes).ok());
    })?;
    Ok(DeletedEntries {
        visited_count: visited,
        deleted_keys: deleted,
    })
}

/// Calls a function for every entry of a hash map, with the bytes of its key, the key and the value.
fn for_each_entry<K: FromBytes, V: FromBytes>(
    map: &MapHandle,
    mut function: impl FnMut(&[u8], K, V),
) -> libbpf_rs::Result<()> {
    let (key_bytes, value_bytes) = (map.key_size() as usize, map.value_size() as usize);
    let mut batch = EntryBatch::new(map, FIRST_BATCH_CAPACITY);
    let mut position = None;
    loop {
        let next = match batch.read(map, position)? {
            BatchEnd::BufferTooSmall => {
                batch = EntryBatch::new(map, batch.capacity * 2);
                continue;
            }
            BatchEnd::MoreFrom(next) => Some(next),
            BatchEnd::NoMore => None,
        };
        let keys = batch.keys.chunks_exact(key_bytes);
        let values = batch.values.chunks_exact(value_bytes);
        for (bytes, value) in keys.zip(values).take(batch.count) {
            let (key, value) = (K::read_from_bytes(bytes), V::read_from_bytes(value));
            let (key, value) = key
                .ok()
                .zip(value.ok())
                .ok_or_else(|| wrong_size_error(map))?;
            function(bytes, key, value);
        }
        if next.is_none() {
            return Ok(());
        }
        position = next;
        if batch.capacity < NEXT_BATCH_CAPACITY {
            batch = EntryBatch::new(map, NEXT_BATCH_CAPACITY);
        }
    }
}

/// Entries of a map that one system call reads.
struct EntryBatch {
    capacity: usize,
    count: usize,
    keys: Vec<u8>,
    values: Vec<u8>,
}

/// How a batch ended.
enum BatchEnd {
    /// The map may have more entries, from this position on.
    MoreFrom(u32),
    /// This batch was the last one.
    NoMore,
    /// The buffer is too small for the entries of one bucket.
    BufferTooSmall,
}

impl EntryBatch {
    fn new(map: &MapHandle, capacity: usize) -> Self {
        Self {
            capacity,
            count: 0,
            keys: vec![0; capacity * map.key_size() as usize],
            values: vec![0; capacity * map.value_size() as usize],
        }
    }

    /// Reads entries from a position on, or from the start.
    fn read(&mut self, map: &MapHandle, from: Option<u32>) -> io::Result<BatchEnd> {
        let mut from = from;
        let from = from.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        let mut next = 0_u32;
        let mut count = self.capacity as u32;
        // SAFETY: the descriptor is that of a hash map, whose positions are four bytes long, and both buffers hold
        // `count` entries.
        let result = unsafe {
            libbpf_sys::bpf_map_lookup_batch(
                map.as_fd().as_raw_fd(),
                from.cast(),
                (&raw mut next).cast(),
                self.keys.as_mut_ptr().cast(),
                self.values.as_mut_ptr().cast(),
                &raw mut count,
                ptr::null(),
            )
        };
        self.count = count as usize;
        if result == 0 {
            return Ok(BatchEnd::MoreFrom(next));
        }
        match Errno::from_raw_os_error(-result) {
            Errno::NOENT => Ok(BatchEnd::NoMore),
            Errno::NOSPC => Ok(BatchEnd::BufferTooSmall),
            error => Err(error.into()),
        }
    }
}

/// Deletes the entries of a map that have these keys, which lie one after another. Skips keys without an entry. Calls
/// `on_deleted` with the key of every deleted entry.
fn delete_keys(
    map: &MapHandle,
    mut keys: Vec<u8>,
    mut on_deleted: impl FnMut(&[u8]),
) -> io::Result<()> {
    let key_bytes = map.key_size() as usize;
    let mut rest = &mut keys[..];
    while !rest.is_empty() {
        let mut count = (rest.len() / key_bytes) as u32;
        // SAFETY: the descriptor is that of a map, and `rest` holds `count` of its keys.
        let result = unsafe {
            libbpf_sys::bpf_map_delete_batch(
                map.as_fd().as_raw_fd(),
                rest.as_mut_ptr().cast(),
                &raw mut count,
                ptr::null(),
            )
        };
        let deleted = count as usize * key_bytes;
        rest[..deleted]
            .chunks_exact(key_bytes)
            .for_each(&mut on_deleted);
        if result == 0 {
            return Ok(());
        }
        match Errno::from_raw_os_error(-result) {
            // A BPF program has deleted the entry meanwhile, or is using its bucket.
            Errno::NOENT | Errno::BUSY => rest = &mut rest[deleted + key_bytes..],
            error => return Err(error.into()),
        }
    }
    Ok(())
}

fn wrong_size_error(map: &MapHandle) -> libbpf_rs::Error {
    let map = map.name().to_string_lossy();
    io::Error::other(format!(
        "entries of the BPF map {map} have an unexpected size"
    ))
    .into()
}
