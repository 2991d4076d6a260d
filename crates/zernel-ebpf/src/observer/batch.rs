//! Reads all entries of a BPF hash map, with one system call if there are few.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

use libbpf_rs::{MapCore, MapHandle, libbpf_sys};
use rustix::io::Errno;
use zerocopy::FromBytes;

/// Number of entries that the first system call has room for.
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

/// All entries of a map; `None` if there are more than `capacity`.
fn entries_up_to<K: FromBytes, V: FromBytes>(
    map: &MapHandle,
    capacity: usize,
) -> libbpf_rs::Result<Option<Vec<(K, V)>>> {
    let (key_bytes, value_bytes) = (map.key_size() as usize, map.value_size() as usize);
    let mut keys = vec![0; capacity * key_bytes];
    let mut values = vec![0; capacity * value_bytes];
    // The kernel writes the position of the next batch here. It is not used.
    let mut next = 0_u64;
    let mut count = capacity as u32;
    // SAFETY: the descriptor is that of a map, the cursor needs four bytes of `next`, and both buffers hold `count`
    // entries.
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
        // The entries of the first bucket do not fit.
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
    io::Error::other(format!(
        "entries of the BPF map {map} have an unexpected size"
    ))
    .into()
}
