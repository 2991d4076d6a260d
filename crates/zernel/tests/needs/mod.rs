//! What the tests of this crate need from the machine.

use zernel_lab::{KernelCache, KernelRequest};
use zernel_testkit::Need;

/// The need for a virtual machine with sched_ext, its kernel fetched.
#[allow(dead_code)] // not every test file has new kernels
pub(crate) fn vm() -> Need {
    Need {
        name: "vm",
        check: || obtain(&KernelRequest::SchedExt),
    }
}

/// The need for a virtual machine with a kernel older than most of what we use.
#[allow(dead_code)] // not every test file has old kernels
pub(crate) fn old_vm() -> Need {
    Need {
        name: "vm",
        check: || obtain(&KernelRequest::Series(vec![6, 1])),
    }
}

fn obtain(request: &KernelRequest) -> Result<(), String> {
    zernel_lab::available(request).map_err(|error| error.to_string())?;
    let cache = KernelCache::from_environment().map_err(|error| error.to_string())?;
    cache
        .obtain(request)
        .map(drop)
        .map_err(|error| error.to_string())
}
