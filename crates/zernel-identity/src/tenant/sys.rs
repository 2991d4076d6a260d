//! Requests about user namespaces. See `ioctl_nsfs(2)`.

use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::io::Result;
use rustix::ioctl::{Getter, Ioctl, IoctlOutput, Opcode, ioctl, opcode};

const NS_GET_PARENT: Opcode = opcode::none(0xb7, 2);
const NS_GET_OWNER_UID: Opcode = opcode::none(0xb7, 4);

/// The parent of a user namespace. Fails if the parent is not visible from the namespace of this process.
pub(super) fn parent_of_namespace(namespace: &File) -> Result<File> {
    // SAFETY: the request takes no argument and returns a new descriptor.
    unsafe { ioctl(namespace, GetParentNamespace) }
}

/// The user who created a user namespace, by its uid in the namespace of this process.
pub(super) fn owner_of_namespace(namespace: &File) -> Result<u32> {
    // SAFETY: the request writes one uid.
    unsafe { ioctl(namespace, Getter::<NS_GET_OWNER_UID, u32>::new()) }
}

struct GetParentNamespace;

// SAFETY: the request takes no argument and returns a new descriptor.
unsafe impl Ioctl for GetParentNamespace {
    type Output = File;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        NS_GET_PARENT
    }

    fn as_ptr(&mut self) -> *mut rustix::ffi::c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(
        descriptor: IoctlOutput,
        _: *mut rustix::ffi::c_void,
    ) -> Result<File> {
        use std::os::fd::FromRawFd;
        // SAFETY: the kernel has just opened it for this process.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }.into())
    }
}
