//! Requirements for booting kernels in virtual machines.

use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::process::Command;

use zernel_lab::{KernelCache, KernelRequest};

use super::kernel::os_message;
use super::row::Row;

pub(super) fn rows() -> Vec<Row> {
    vec![virtual_machines(), qemu(), kvm()]
}

fn virtual_machines() -> Row {
    let name = "virtual machines";
    let request = KernelRequest::SchedExt;
    if let Err(unavailable) = zernel_lab::available(&request) {
        return Row::missing(
            name,
            unavailable.reasons.join("; "),
            "schedulers cannot be compared in the lab",
        );
    }
    match KernelCache::from_environment().and_then(|cache| cache.cached(&request)) {
        Ok(Some(kernel)) => Row::ok(name, format!("kernel {} is there", kernel.version)),
        _ => Row::degraded(
            name,
            "no kernel with sched_ext is here yet",
            "the first use of the lab fetches one over the network",
        )
        .remedy("zernel lab run true"),
    }
}

fn qemu() -> Row {
    let name = "QEMU";
    match Command::new("qemu-system-x86_64").arg("--version").output() {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout);
            Row::ok(name, text.lines().next().unwrap_or_default())
        }
        Ok(output) => Row::missing(
            name,
            format!("qemu-system-x86_64 --version fails: {}", output.status),
            "schedulers cannot be compared in the lab",
        ),
        Err(error) => Row::missing(
            name,
            format!("qemu-system-x86_64: {}", os_message(&error)),
            "schedulers cannot be compared in the lab",
        )
        .remedy("apt-get install qemu-system-x86"),
    }
}

fn kvm() -> Row {
    let name = "KVM";
    let slow = "virtual machines are emulated, which is much slower";
    match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) if is_virtual_machine() => Row::degraded(
            name,
            "/dev/kvm opens, but this is itself a virtual machine",
            "stock kernels may not boot with it; the lab then emulates",
        ),
        Ok(_) => Row::ok(name, "/dev/kvm opens"),
        Err(error) => {
            let row = Row::missing(name, format!("/dev/kvm: {}", os_message(&error)), slow);
            match error.kind() {
                ErrorKind::PermissionDenied => row.remedy("become a member of the group kvm"),
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
