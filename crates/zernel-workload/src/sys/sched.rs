//! System calls for scheduling, memory policy and accounting that `rustix` does not wrap. All are fork safe.

use libc::pid_t;
use rustix::io::Errno;

use super::process::last_errno;

/// The argument of `sched_setattr`, laid out as the kernel's `struct sched_attr`, version 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct SchedAttributes {
    pub(crate) size: u32,
    pub(crate) policy: u32,
    pub(crate) flags: u64,
    pub(crate) nice: i32,
    pub(crate) priority: u32,
    pub(crate) runtime_ns: u64,
    pub(crate) deadline_ns: u64,
    pub(crate) period_ns: u64,
}

fn check_result(result: libc::c_long) -> Result<(), Errno> {
    if result == 0 {
        Ok(())
    } else {
        Err(last_errno())
    }
}

/// Sets the scheduling attributes of a thread; 0 is the calling thread.
pub(crate) fn set_sched_attributes(
    thread: pid_t,
    attributes: SchedAttributes,
) -> Result<(), Errno> {
    let attributes = SchedAttributes {
        size: size_of::<SchedAttributes>() as u32,
        ..attributes
    };
    // SAFETY: the kernel reads `size` bytes of a structure of that size.
    check_result(unsafe {
        libc::syscall(libc::SYS_sched_setattr, thread, &raw const attributes, 0)
    })
}

/// Reads the scheduling attributes of a thread.
pub(crate) fn read_sched_attributes(thread: pid_t) -> Result<SchedAttributes, Errno> {
    let mut attributes = SchedAttributes::default();
    let size = size_of::<SchedAttributes>();
    // SAFETY: the kernel writes at most `size` bytes.
    check_result(unsafe {
        libc::syscall(
            libc::SYS_sched_getattr,
            thread,
            &raw mut attributes,
            size,
            0,
        )
    })?;
    Ok(attributes)
}

/// Sets the memory policy of the calling thread: a `MPOL_` mode and the NUMA nodes 0 to 63 as bits.
pub(crate) fn set_memory_policy(mode: i32, nodes: u64) -> Result<(), Errno> {
    let mask = if nodes == 0 {
        std::ptr::null()
    } else {
        &raw const nodes
    };
    // The kernel reads one bit less than the number of bits that it is given.
    let bits = if nodes == 0 { 0 } else { 65 };
    // SAFETY: the mask is null or one readable word, of which the kernel reads 64 bits.
    check_result(unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask, bits) })
}

/// Voluntary and involuntary context switches of the calling thread so far.
pub(crate) fn context_switches() -> (u64, u64) {
    // SAFETY: `rusage` is plain data for which zeros are valid, and the kernel fills it.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is valid for writing.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    (usage.ru_nvcsw as u64, usage.ru_nivcsw as u64)
}
