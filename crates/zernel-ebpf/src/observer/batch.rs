//! Reads hash maps whole, with one system call where there are few entries.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

use libbpf_rs::{MapCore, MapHandle, libbpf_sys};
use rustix::io::Errno;
use zerocopy::FromBytes;

/// For how many entries there is room at first.
const INITIAL_CAPACITY: usize = 256;

/// All entries of a hash map.
pub(super) fn entries<K: FromBytes, V: FromBytes>(
    map: &MapHandle,
) -> libbpf_rs::Result<Vec<(K, V)>> {
    let mut capacity = INITIAL_CAPACITY;
    loop {
        match entries_up_to(map, capacity)? {
            Some(entries) => return Ok(entries),
            None => capacity *= 2,
        }
    }
}

/// All entries of a map; `None` if there are more than there is room for.
fn entries_up_to<K: FromBytes, V: FromBytes>(
    map: &MapHandle,
    capacity: usize,
) -> libbpf_rs::Result<Option<Vec<(K, V)>>> {
    let (key_bytes, value_bytes) = (map.key_size() as usize, map.value_size() as usize);
    let mut keys = vec![0; capacity * key_bytes];
    let mut values = vec![0; capacity * value_bytes];
    // Where the next batch would begin, which nobody asks for.
    let mut next = 0_u64;
    let mut count = capacity as u32;
    // SAFETY: a map, a place for a cursor, which takes four bytes, and for as many keys and values as `count` says.
    let result = unsafe {
        libbpf_sys::bpf_map_lookup_batch(
            map.as_fd().as_raw_fd(),
            ptr::null_mut(),
            (&raw mut next).cast(),
            keys.as_mut_ptr().cast(),
            values.as_mut_ptr().cast(),
            &raw mut count,
            ptr::null(),
        )
    };
    if result == 0 {
        return Ok(None);
    }
    match Errno::from_raw_os_error(-result) {
        // That was the last batch.
        Errno::NOENT => {}
        // Not even what is in the first bucket fits.
        Errno::NOSPC => return Ok(None),
        error => return Err(io::Error::from(error).into()),
    }
    let keys = keys.chunks_exact(key_bytes);
    let entries = keys
        .zip(values.chunks_exact(value_bytes))
        .take(count as usize);
    let typed = entries.map(|(key, value)| {
        let (key, value) = (K::read_from_bytes(key), V::read_from_bytes(value));
        key.ok().zip(value.ok()).ok_or_else(|| wrong_size(map))
    });
    typed.collect::<libbpf_rs::Result<_>>().map(Some)
}

fn wrong_size(map: &MapHandle) -> libbpf_rs::Error {
    let map = map.name().to_string_lossy();
    io::Error::other(format!("entries of the BPF map {map} are of another size")).into()
}
