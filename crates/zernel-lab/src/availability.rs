//! Checks, before a boot, whether this machine can boot a virtual machine.

use thiserror::Error;

use crate::apt;
use crate::guest::find_busybox;
use crate::kernel::{KernelCache, KernelRequest};
use crate::qemu::QemuPrograms;

/// What this machine lacks to boot a virtual machine, one line each, with the remedy.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("no VM can be booted here: {}", .missing_requirements.join("; "))]
pub struct VmUnavailable {
    /// What is missing, one entry each.
    pub missing_requirements: Vec<String>,
}

/// Checks whether a virtual machine with this kernel can be booted: there is QEMU, a static busybox, and either the
/// kernel in the cache or apt to download it with. The network is not tried.
pub fn check_vm_available(request: &KernelRequest) -> Result<(), VmUnavailable> {
    let checks = [
        check_architecture(),
        QemuPrograms::find()
            .map(drop)
            .map_err(|error| error.to_string()),
        find_busybox().map(drop).map_err(|error| error.to_string()),
        check_kernel_source(request),
    ];
    let missing_requirements: Vec<String> = checks.into_iter().filter_map(Result::err).collect();
    if missing_requirements.is_empty() {
        Ok(())
    } else {
        Err(VmUnavailable {
            missing_requirements,
        })
    }
}

/// The guest runs programs of this machine, so both need the same architecture.
fn check_architecture() -> Result<(), String> {
    match std::env::consts::ARCH {
        "x86_64" => Ok(()),
        other => Err(format!(
            "the guest is an x86_64 machine and cannot run {other} programs"
        )),
    }
}

fn check_kernel_source(request: &KernelRequest) -> Result<(), String> {
    let cache = KernelCache::from_environment().map_err(|error| error.to_string())?;
    match cache.newest_cached(request) {
        Ok(Some(_)) => Ok(()),
        Ok(None) => apt::check_can_fetch_packages().map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    }
}
