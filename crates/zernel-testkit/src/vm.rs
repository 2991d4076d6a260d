//! Virtual machines with other kernels than this machine's: the needs for them, and the kernels to
//! boot. A trial that runs its own program on another kernel starts here.

use zernel_lab::kernel::BadKernelVersion;
use zernel_lab::{Kernel, KernelCache, KernelRequest};

use crate::Need;

/// The need for a virtual machine with sched_ext, its kernel downloaded.
#[must_use]
pub fn newest_kernel_need() -> Need {
    Need {
        name: "vm",
        check: || obtain_kernel(&KernelRequest::NewestWithSchedExt).map(drop),
    }
}

/// The need for a virtual machine with the oldest kernel that we support, downloaded.
#[must_use]
pub fn oldest_kernel_need() -> Need {
    Need {
        name: "vm",
        check: || obtain_kernel_of_version("6.1").map(drop),
    }
}

/// The kernel of a version such as `6.12`, downloaded.
///
/// # Errors
/// The version is malformed, this machine boots no virtual machines, or the download fails.
pub fn obtain_kernel_of_version(version: &str) -> Result<Kernel, String> {
    let request = version.parse();
    obtain_kernel(&request.map_err(|error: BadKernelVersion| error.to_string())?)
}

/// A kernel, downloaded.
///
/// # Errors
/// This machine boots no virtual machines, or the download fails.
pub fn obtain_kernel(request: &KernelRequest) -> Result<Kernel, String> {
    zernel_lab::check_vm_available(request).map_err(|error| error.to_string())?;
    let cache = KernelCache::from_environment().map_err(|error| error.to_string())?;
    cache
        .obtain_kernel(request)
        .map_err(|error| error.to_string())
}
