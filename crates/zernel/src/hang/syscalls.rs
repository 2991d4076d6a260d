//! System calls in which a process may block.

use std::ffi::c_long;

/// System calls with a file descriptor as their first argument.
const SYSCALLS_WITH_DESCRIPTOR: [(c_long, &str); 20] = [
    (libc::SYS_read, "read"),
    (libc::SYS_pread64, "pread"),
    (libc::SYS_readv, "readv"),
    (libc::SYS_preadv, "preadv"),
    (libc::SYS_preadv2, "preadv2"),
    (libc::SYS_write, "write"),
    (libc::SYS_pwrite64, "pwrite"),
    (libc::SYS_writev, "writev"),
    (libc::SYS_pwritev, "pwritev"),
    (libc::SYS_pwritev2, "pwritev2"),
    (libc::SYS_fsync, "fsync"),
    (libc::SYS_fdatasync, "fdatasync"),
    (libc::SYS_sync_file_range, "sync_file_range"),
    (libc::SYS_ftruncate, "ftruncate"),
    (libc::SYS_fallocate, "fallocate"),
    (libc::SYS_fstat, "fstat"),
    (libc::SYS_getdents64, "getdents"),
    (libc::SYS_close, "close"),
    (libc::SYS_readahead, "readahead"),
    (libc::SYS_copy_file_range, "copy_file_range"),
];

/// System calls with a path.
const SYSCALLS_WITH_PATH: [(c_long, &str); 11] = [
    (libc::SYS_openat, "openat"),
    (libc::SYS_openat2, "openat2"),
    (libc::SYS_newfstatat, "stat"),
    (libc::SYS_statx, "statx"),
    (libc::SYS_faccessat, "access"),
    (libc::SYS_faccessat2, "access"),
    (libc::SYS_readlinkat, "readlink"),
    (libc::SYS_renameat2, "rename"),
    (libc::SYS_unlinkat, "unlink"),
    (libc::SYS_mkdirat, "mkdir"),
    (libc::SYS_statfs, "statfs"),
];

fn syscall_name(table: &[(c_long, &'static str)], number: i64) -> Option<&'static str> {
    let found = table.iter().find(|(known, _)| *known == number);
    found.map(|(_, name)| *name)
}

/// The name of a system call on files.
pub(super) fn file_syscall_name(number: i64) -> Option<&'static str> {
    syscall_name(&SYSCALLS_WITH_DESCRIPTOR, number)
        .or_else(|| syscall_name(&SYSCALLS_WITH_PATH, number))
}

pub(super) fn syscall_takes_descriptor(number: i64) -> bool {
    syscall_name(&SYSCALLS_WITH_DESCRIPTOR, number).is_some()
}

pub(super) fn syscall_takes_path(number: i64) -> bool {
    syscall_name(&SYSCALLS_WITH_PATH, number).is_some()
}

/// Whether a system call waits for another thread.
pub(super) fn is_futex_syscall(number: i64) -> bool {
    [libc::SYS_futex, libc::SYS_futex_waitv].contains(&number)
}
