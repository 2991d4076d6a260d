//! Calls that libbpf-rs lacks: an iterator over one process, and a ring buffer's descriptor as a `BorrowedFd`.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use libbpf_rs::{AsRawLibbpf, Link, ProgramMut, RingBuffer, libbpf_sys};

/// Attaches an iterator over tasks to the thread group `pid`. Kernels older than 6.1 refuse.
pub(crate) fn attach_to_process(program: &ProgramMut<'_>, pid: u32) -> io::Result<Link> {
    let mut info = libbpf_sys::bpf_iter_link_info::default();
    info.task.pid = pid;
    let options = libbpf_sys::bpf_iter_attach_opts {
        sz: size_of::<libbpf_sys::bpf_iter_attach_opts>() as _,
        link_info: &raw mut info,
        link_info_len: size_of::<libbpf_sys::bpf_iter_link_info>() as _,
        ..Default::default()
    };
    // SAFETY: the program lives as long as the borrow, and `options` and `info` outlive the call,
    // which copies what it needs.
    let link = unsafe {
        libbpf_sys::bpf_program__attach_iter(
            program.as_libbpf_object().as_ptr(),
            &raw const options,
        )
    };
    let link = NonNull::new(link).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: libbpf made this link just now, so there is no other owner.
    Ok(unsafe { Link::from_ptr(link) })
}

/// Readable when the ring buffer has data.
pub(crate) fn readable_descriptor<'a>(ring: &'a RingBuffer<'_>) -> BorrowedFd<'a> {
    // SAFETY: the descriptor belongs to the ring buffer, which outlives the borrow.
    unsafe { BorrowedFd::borrow_raw(ring.epoll_fd()) }
}
