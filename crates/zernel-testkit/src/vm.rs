//! Kernels for virtual machines in which trials run their own program, and the needs of such trials.

use zernel_lab::kernel::BadKernelVersion;
use zernel_lab::{Kernel, KernelCache, KernelRequest};

use crate::Need;

/// The need for a virtual machine whose kernel has sched_ext. The check downloads the kernel.
#[must_use]
pub fn newest_kernel_need() -> Need {
    Need {
        name: "vm",
        check: || obtain_kernel(&KernelRequest::NewestWithSchedExt).map(drop),
    }
}

/// The need for a virtual machine with the oldest kernel that Zernel supports. The check downloads the kernel.
#[must_use]
pub fn oldest_kernel_need() -> Need {
    Need {
        name: "vm",
        check: || obtain_kernel_of_version("6.1").map(drop),
    }
}

/// Downloads the newest kernel of a version such as `6.12`, or takes it from the cache.
///
/// # Errors
/// The version is malformed, this machine boots no virtual machines, or the download fails.
pub fn obtain_kernel_of_version(version: &str) -> Result<Kernel, String> {
    let request = version.parse();
    obtain_kernel(&request.map_err(|error: BadKernelVersion| error.to_string())?)
}

/// Downloads the kernel of a request, or takes it from the cache.
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
