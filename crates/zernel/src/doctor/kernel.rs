//! The kernel, our privilege, and what BPF accepts.

use std::fs;
use std::path::{Path, PathBuf};

use procfs::process::{Process, all_processes};
use rustix::system::uname;
use rustix::thread::{CapabilitySet, capabilities};
use zernel_ebpf::capability::{Capability, Refusal};

use super::Trials;
use super::row::Row;

pub(super) fn rows() -> Vec<Row> {
    vec![
        version(),
        privilege(),
        other_processes(),
        btf(),
        file_system(
            "bpffs",
            "bpf",
            "/sys/fs/bpf",
            "task state cannot be shared between the observer and the scheduler",
        ),
        file_system(
            "tracefs",
            "tracefs",
            "/sys/kernel/tracing",
            "no classic tracepoints; Zernel uses typed ones instead",
        ),
        perf_events(),
    ]
}

fn version() -> Row {
    let name = uname();
    let text = format!(
        "{} {} {}",
        name.sysname().to_string_lossy(),
        name.release().to_string_lossy(),
        name.machine().to_string_lossy()
    );
    match std::env::consts::ARCH {
        "x86_64" => Row::ok("kernel", text),
        _ => Row::degraded("kernel", text, "Zernel is tested on x86_64 only"),
    }
}

/// The capabilities that observing needs, with the names people know.
const WANTED: [(CapabilitySet, &str); 3] = [
    (CapabilitySet::BPF, "CAP_BPF"),
    (CapabilitySet::PERFMON, "CAP_PERFMON"),
    (CapabilitySet::SYS_PTRACE, "CAP_SYS_PTRACE"),
];

fn privilege() -> Row {
    let lacking = lacking_capabilities();
    let user = rustix::process::geteuid().as_raw();
    if lacking.is_empty() {
        return Row::ok(
            "privilege",
            format!("uid {user} with all capabilities needed"),
        );
    }
    Row::missing(
        "privilege",
        format!("uid {user} without {}", lacking.join(", ")),
        "no BPF program can be loaded by this user",
    )
    .remedy("run as root, or let the node's administrator run the observer")
}

fn lacking_capabilities() -> Vec<&'static str> {
    let held = capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
    WANTED
        .into_iter()
        // CAP_SYS_ADMIN stands in for the newer, smaller ones.
        .filter(|(wanted, _)| {
            !held.contains(*wanted)
                && (*wanted == CapabilitySet::SYS_PTRACE
                    || !held.contains(CapabilitySet::SYS_ADMIN))
        })
        .map(|(_, name)| name)
        .collect()
}

fn other_processes() -> Row {
    let name = "other processes";
    let processes = all_processes().into_iter().flatten().flatten();
    let readable: Vec<_> = processes
        .filter(|process| !is_kernel_thread(process))
        .map(|process| (maps_can_be_followed(process.pid), process.is_alive()))
        .filter_map(|(readable, alive)| alive.then_some(readable))
        .collect();
    let (seen, all) = (
        readable.iter().filter(|seen| **seen).count(),
        readable.len(),
    );
    let finding = format!("the libraries of {seen} of {all} processes can be seen");
    if seen == all {
        return Row::ok(name, finding);
    }
    Row::degraded(name, finding, "what the others do is not observed").remedy(
        "run as root with all capabilities: at least CAP_SYS_PTRACE and CAP_CHECKPOINT_RESTORE",
    )
}

fn is_kernel_thread(process: &Process) -> bool {
    const PF_KTHREAD: u32 = 0x0020_0000;
    process
        .stat()
        .is_ok_and(|stat| stat.flags & PF_KTHREAD != 0)
}

/// Whether the files a process maps can be reached as it sees them, through its own name for them.
fn maps_can_be_followed(pid: i32) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/map_files"));
    let mut entries = files.into_iter().flatten().flatten();
    entries
        .next()
        .is_some_and(|entry| fs::metadata(entry.path()).is_ok())
}

fn btf() -> Row {
    const FILE: &str = "/sys/kernel/btf/vmlinux";
    match fs::File::open(FILE).and_then(|file| file.metadata()) {
        Ok(metadata) => Row::ok("BTF", format!("{FILE}, {} KiB", metadata.len() / 1024)),
        Err(error) => Row::missing(
            "BTF",
            format!("{FILE} cannot be read ({})", os_message(&error)),
            "BPF programs cannot be fitted to this kernel",
        )
        .remedy("use a kernel built with CONFIG_DEBUG_INFO_BTF=y (all current distributions')"),
    }
}

fn file_system(
    name: &'static str,
    kind: &str,
    usual_place: &str,
    consequence: &'static str,
) -> Row {
    match mount_point(kind) {
        Some(place) => Row::ok(name, format!("mounted on {}", place.display())),
        None => Row::degraded(name, "not mounted", consequence)
            .remedy(format!("mount -t {kind} {kind} {usual_place}")),
    }
}

/// Where a file system of this kind is mounted.
pub(super) fn mount_point(kind: &str) -> Option<PathBuf> {
    let mounts = Process::myself().ok()?.mountinfo().ok()?;
    let mount = mounts.0.into_iter().find(|mount| mount.fs_type == kind)?;
    Some(mount.mount_point)
}

fn perf_events() -> Row {
    const FILE: &str = "/proc/sys/kernel/perf_event_paranoid";
    match fs::read_to_string(FILE) {
        Ok(level) => Row::ok(
            "perf events",
            format!("perf_event_paranoid is {}", level.trim()),
        ),
        Err(_) if Path::new("/proc/sys/kernel").exists() => Row::missing(
            "perf events",
            "the kernel has none",
            "no uprobes on kernels without uprobe.multi",
        )
        .remedy("use a kernel built with CONFIG_PERF_EVENTS=y"),
        Err(error) => Row::missing(
            "perf events",
            os_message(&error),
            "nothing can be said of them",
        ),
    }
}

pub(super) fn bpf_rows(trials: &Trials) -> Vec<Row> {
    trials
        .iter()
        .map(|(capability, trial)| match trial {
            Ok(()) => Row::ok(capability.name(), "loads, attaches and runs"),
            Err(refusal) => refused(*capability, refusal),
        })
        .collect()
}

fn refused(capability: Capability, refusal: &Refusal) -> Row {
    let row = Row::missing(
        capability.name(),
        refusal.to_string(),
        consequence(capability),
    );
    match capability {
        Capability::UprobePerf if refusal.is_permission() => row.remedy("run as root"),
        _ if refusal.is_permission() && !lacking_capabilities().is_empty() => {
            row.remedy("run as root, or with CAP_BPF and CAP_PERFMON")
        }
        Capability::UprobeSession => row.remedy("Linux 6.13 or newer"),
        Capability::UprobeMulti => row.remedy("Linux 6.6 or newer"),
        Capability::Tracepoint => row.remedy("mount -t tracefs tracefs /sys/kernel/tracing"),
        _ => row,
    }
}

fn consequence(capability: Capability) -> &'static str {
    match capability {
        Capability::BtfTracepoint => "no scheduler events: nothing can be observed",
        Capability::TaskStorage => "no state per task: nothing can be observed",
        Capability::MmapArray => "no shared histograms: nothing can be observed",
        Capability::UprobeSession => {
            "calls are timed with two probes and a map instead of one link"
        }
        Capability::UprobeMulti => "each function takes a perf event of its own, slow to detach",
        Capability::UprobePerf => "nothing is lost where uprobe.multi works",
        Capability::TaskVmaIterator => "libraries are found by reading /proc, more slowly",
        Capability::RingBuffer => "new processes are found by scanning, more slowly",
        Capability::RawTracepoint | Capability::Tracepoint => "nothing is lost: Zernel uses tp_btf",
        Capability::Fentry | Capability::Kprobe => {
            "nothing is lost: Zernel attaches to no kernel function"
        }
    }
}

/// The system's message without Rust's ` (os error N)`.
pub(super) fn os_message(error: &std::io::Error) -> String {
    let text = error.to_string();
    match text.split_once(" (os error") {
        Some((message, _)) => message.to_owned(),
        None => text,
    }
}
