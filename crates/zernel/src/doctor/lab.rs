//! Requirements for booting kernels in virtual machines.

use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::process::Command;

use zernel_lab::{KernelCache, KernelRequest};

use super::kernel::os_message;
use super::row::CheckRow;

pub(super) fn lab_rows() -> Vec<CheckRow> {
    vec![virtual_machines_row(), qemu_row(), kvm_row()]
}

fn virtual_machines_row() -> CheckRow {
    let name = "virtual machines";
    let request = KernelRequest::NewestWithSchedExt;
    if let Err(unavailable) = zernel_lab::check_vm_available(&request) {
        return CheckRow::missing(
            name,
            unavailable.missing_requirements.join("; "),
            "schedulers cannot be compared in the lab",
        );
    }
    match KernelCache::from_environment().and_then(|cache| cache.newest_cached(&request)) {
        Ok(Some(kernel)) => CheckRow::ok(name, format!("kernel {} is there", kernel.version)),
        _ => CheckRow::degraded(
            name,
            "no kernel with sched_ext is here yet",
            "the first use of the lab fetches one over the network",
        )
        .with_remedy("zernel lab run true"),
    }
}

fn qemu_row() -> CheckRow {
    let name = "QEMU";
    match Command::new("qemu-system-x86_64").arg("--version").output() {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout);
            CheckRow::ok(name, text.lines().next().unwrap_or_default())
        }
        Ok(output) => CheckRow::missing(
            name,
            format!("qemu-system-x86_64 --version fails: {}", output.status),
            "schedulers cannot be compared in the lab",
        ),
        Err(error) => CheckRow::missing(
            name,
            format!("qemu-system-x86_64: {}", os_message(&error)),
            "schedulers cannot be compared in the lab",
        )
        .with_remedy("apt-get install qemu-system-x86"),
    }
}

fn kvm_row() -> CheckRow {
    let name = "KVM";
    let slow = "virtual machines are emulated, which is much slower";
    match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) if is_virtual_machine() => CheckRow::degraded(
            name,
            "/dev/kvm opens, but this is itself a virtual machine",
            "stock kernels may not boot with it; the lab then emulates",
        ),
        Ok(_) => CheckRow::ok(name, "/dev/kvm opens"),
        Err(error) => {
            let row = CheckRow::missing(name, format!("/dev/kvm: {}", os_message(&error)), slow);
            match error.kind() {
                ErrorKind::PermissionDenied => row.with_remedy("become a member of the group kvm"),
                _ => row,
            }
        }
    }
}

fn is_virtual_machine() -> bool {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = cpus.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"))
}
