//! The kernel, and the privilege of this process.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use procfs::process::{Process, all_processes};
use rustix::system::uname;
use rustix::thread::CapabilitySet;
use zernel_ebpf::privilege;

use super::row::CheckRow;
use zernel_report::text::shorten_text;

pub(super) fn kernel_rows(processes: &ProcessVisibility) -> Vec<CheckRow> {
    let lacking = privilege::lacking_capabilities(
        &privilege::CAPABILITIES_TO_SEE_PROCESSES,
        Privilege::of_this_process().held_capabilities,
    );
    let others = other_processes_row(processes, &lacking);
    let mut rows = vec![kernel_version_row(), privilege_row(), others, btf_row()];
    rows.extend(lockdown_row());
    rows.extend([
        file_system_row(
            "bpffs",
            "bpf",
            "/sys/fs/bpf",
            "task state cannot be shared between the observer and the scheduler",
        ),
        file_system_row(
            "tracefs",
            "tracefs",
            "/sys/kernel/tracing",
            "no classic tracepoints; Zernel uses typed ones instead",
        ),
        perf_events_row(),
    ]);
    rows
}

fn kernel_version_row() -> CheckRow {
    let name = uname();
    let text = format!(
        "{} {} {}",
        name.sysname().to_string_lossy(),
        name.release().to_string_lossy(),
        name.machine().to_string_lossy()
    );
    match std::env::consts::ARCH {
        "x86_64" => CheckRow::ok("kernel", text),
        _ => CheckRow::degraded("kernel", text, "Zernel is tested on x86_64 only"),
    }
}

/// Capabilities of this process in the initial user namespace.
pub(super) struct Privilege {
    held_capabilities: CapabilitySet,
}

impl Privilege {
    pub(super) fn of_this_process() -> Self {
        Self {
            // Capabilities in another user namespace have no effect on BPF and on other processes.
            held_capabilities: if in_initial_namespace("user") {
                privilege::held_capabilities()
            } else {
                CapabilitySet::empty()
            },
        }
    }

    pub(super) fn is_root(&self) -> bool {
        self.held_capabilities.contains(CapabilitySet::SYS_ADMIN)
    }

    pub(super) fn can_load_bpf(&self) -> bool {
        privilege::lacking_capabilities(&privilege::CAPABILITIES_TO_LOAD, self.held_capabilities)
            .is_empty()
    }

    /// Names of the capabilities that observing needs and this process lacks.
    pub(super) fn missing_capabilities(&self) -> Vec<&'static str> {
        let needed = [
            &privilege::CAPABILITIES_TO_LOAD[..],
            &privilege::CAPABILITIES_TO_SEE_PROCESSES,
        ]
        .concat();
        privilege::lacking_capabilities(&needed, self.held_capabilities)
    }
}

/// Whether this process is in the namespace that the kernel started with.
fn in_initial_namespace(kind: &str) -> bool {
    let initial = match kind {
        "pid" => 0xEFFF_FFFC,
        _ => 0xEFFF_FFFD, // user
    };
    // If the file does not exist, the kernel has no namespaces of this kind.
    fs::metadata(format!("/proc/self/ns/{kind}"))
        .map_or(true, |namespace| namespace.ino() == initial)
}

fn privilege_row() -> CheckRow {
    let name = PRIVILEGE_ROW_NAME;
    let privilege = Privilege::of_this_process();
    let lacking = privilege.missing_capabilities();
    let user = rustix::process::geteuid().as_raw();
    if lacking.is_empty() {
        return CheckRow::ok(name, format!("uid {user} with all capabilities needed"));
    }
    let finding = match in_initial_namespace("user") {
        true => format!("uid {user} without {}", lacking.join(", ")),
        false => format!("uid {user} in a user namespace, whose capabilities have no effect here"),
    };
    let consequence = match privilege.can_load_bpf() {
        true => "libraries of other users' processes are not found",
        false => "no BPF program can be loaded by this user",
    };
    CheckRow::missing(name, finding, consequence).with_remedy(
        "run as root, outside user namespaces, or let the node's administrator run the observer",
    )
}

pub(super) const PRIVILEGE_ROW_NAME: &str = "privilege";
pub(super) const OTHER_PROCESSES_ROW_NAME: &str = "other processes";

/// Which other processes this process can read.
#[derive(Default)]
pub(super) struct ProcessVisibility {
    pub(super) other_count: usize,
    /// Processes that cannot be read, each with the reason.
    pub(super) unreadable_processes: Vec<String>,
    /// Whether this process is in another pid namespace than the initial one, and cannot see processes outside it.
    pub(super) is_in_child_pid_namespace: bool,
}

impl ProcessVisibility {
    pub(super) fn count_readable_processes() -> Self {
        let own_pid = rustix::process::getpid().as_raw_nonzero().get();
        let others: Vec<_> = all_processes()
            .into_iter()
            .flatten()
            .flatten()
            .filter(|process| process.pid != own_pid && !is_kernel_thread(process))
            .map(|process| (open_a_mapped_file(process.pid), process))
            .filter(|(_, process)| process.is_alive())
            .collect();
        let unseen = others.iter().filter_map(|(followed, process)| {
            let error = followed.as_ref().err()?;
            let name = process.stat().map_or(String::new(), |stat| stat.comm);
            let name = shorten_text(&name, 15);
            Some(format!("{} {name}: {}", process.pid, os_message(error)))
        });
        Self {
            other_count: others.len(),
            unreadable_processes: unseen.collect(),
            is_in_child_pid_namespace: !in_initial_namespace("pid"),
        }
    }

    /// Whether there are other processes, and none can be read.
    pub(super) fn sees_no_other_process(&self) -> bool {
        self.other_count > 0 && self.unreadable_processes.len() == self.other_count
    }
}

/// Number of unreadable processes that are named.
const MAX_NAMED_PROCESSES: usize = 3;

/// The row that states whether this process can read other processes. `lacking` are the capabilities that this
/// process lacks.
fn other_processes_row(processes: &ProcessVisibility, lacking: &[&str]) -> CheckRow {
    let ProcessVisibility {
        other_count: others,
        unreadable_processes: unseen,
        ..
    } = processes;
    let mut finding = format!(
        "the libraries of {} of {others} can be seen",
        others - unseen.len()
    );
    // Without the capabilities no other user's process can be read, so naming some would not help.
    let remedy = match lacking.is_empty() {
        true => {
            let named = unseen.iter().take(MAX_NAMED_PROCESSES).map(String::as_str);
            let named = named.collect::<Vec<_>>().join(", ");
            finding = match unseen.len() {
                0 => finding,
                1..=MAX_NAMED_PROCESSES => format!("{finding}; not those of {named}"),
                more => format!(
                    "{finding}; not those of {named} and {} more",
                    more - MAX_NAMED_PROCESSES
                ),
            };
            "no capability is missing; a sandbox or security module (Landlock, SELinux, AppArmor) may keep zernel out: \
             if they train, run it outside of that"
                .to_owned()
        }
        false => format!("run with {}", lacking.join(", ")),
    };
    if processes.sees_no_other_process() {
        CheckRow::missing(
            OTHER_PROCESSES_ROW_NAME,
            finding,
            "no process can be observed",
        )
        .with_remedy(remedy)
    } else if processes.is_in_child_pid_namespace {
        CheckRow::degraded(
            OTHER_PROCESSES_ROW_NAME,
            finding,
            "only this container's processes are observed",
        )
        .with_remedy("run in the host's pid namespace")
    } else if !unseen.is_empty() {
        CheckRow::degraded(
            OTHER_PROCESSES_ROW_NAME,
            finding,
            "the other processes are not observed",
        )
        .with_remedy(remedy)
    } else {
        CheckRow::ok(OTHER_PROCESSES_ROW_NAME, finding)
    }
}

/// Lockdown mode; `None` unless lockdown is built in and securityfs is mounted.
fn lockdown_row() -> Option<CheckRow> {
    let modes = fs::read_to_string("/sys/kernel/security/lockdown").ok()?;
    let (_, rest) = modes.split_once('[')?;
    let (mode, _) = rest.split_once(']')?;
    Some(match mode {
        "confidentiality" => CheckRow::missing(
            "lockdown",
            mode,
            "BPF programs may not read the kernel's memory: nothing can be observed",
        )
        .with_remedy("boot with lockdown=integrity, or without it"),
        _ => CheckRow::ok("lockdown", mode),
    })
}

fn is_kernel_thread(process: &Process) -> bool {
    const PF_KTHREAD: u32 = 0x0020_0000;
    process
        .stat()
        .is_ok_and(|stat| stat.flags & PF_KTHREAD != 0)
}

/// Tries to open a file that a process maps, through `/proc/PID/map_files`. Succeeds too if the process maps no file.
fn open_a_mapped_file(pid: i32) -> io::Result<()> {
    for entry in fs::read_dir(format!("/proc/{pid}/map_files"))? {
        match fs::metadata(entry?.path()) {
            // It was unmapped meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            reached => return reached.map(drop),
        }
    }
    Ok(())
}

fn btf_row() -> CheckRow {
    const VMLINUX_BTF_PATH: &str = "/sys/kernel/btf/vmlinux";
    match fs::File::open(VMLINUX_BTF_PATH).and_then(|file| file.metadata()) {
        Ok(metadata) => CheckRow::ok(
            "BTF",
            format!("{VMLINUX_BTF_PATH}, {} KiB", metadata.len() / 1024),
        ),
        Err(error) => CheckRow::missing(
            "BTF",
            format!("{VMLINUX_BTF_PATH} cannot be read ({})", os_message(&error)),
            "BPF programs cannot be fitted to this kernel",
        )
        .with_remedy(
            "use a kernel built with CONFIG_DEBUG_INFO_BTF=y (all current distributions')",
        ),
    }
}

fn file_system_row(
    name: &'static str,
    kind: &str,
    usual_place: &str,
    consequence: &'static str,
) -> CheckRow {
    match mount_point(kind) {
        Some(place) => CheckRow::ok(name, format!("mounted on {}", place.display())),
        None => CheckRow::degraded(name, "not mounted", consequence)
            .with_remedy(format!("mount -t {kind} {kind} {usual_place}")),
    }
}

/// Where a file system of this kind is mounted.
pub(super) fn mount_point(kind: &str) -> Option<PathBuf> {
    let mounts = Process::myself().ok()?.mountinfo().ok()?;
    let mount = mounts.0.into_iter().find(|mount| mount.fs_type == kind)?;
    Some(mount.mount_point)
}

fn perf_events_row() -> CheckRow {
    const PERF_EVENT_PARANOID_PATH: &str = "/proc/sys/kernel/perf_event_paranoid";
    match fs::read_to_string(PERF_EVENT_PARANOID_PATH) {
        Ok(level) => CheckRow::ok(
            "perf events",
            format!("perf_event_paranoid is {}", level.trim()),
        ),
        Err(_) if Path::new("/proc/sys/kernel").exists() => CheckRow::missing(
            "perf events",
            "the kernel has none",
            "no uprobes on kernels without uprobe.multi",
        )
        .with_remedy("use a kernel built with CONFIG_PERF_EVENTS=y"),
        Err(error) => CheckRow::missing(
            "perf events",
            os_message(&error),
            "it is unknown whether perf events work",
        ),
    }
}

/// The system's message without Rust's ` (os error N)`.
pub(super) fn os_message(error: &io::Error) -> String {
    let text = error.to_string();
    match text.split_once(" (os error") {
        Some((message, _)) => message.to_owned(),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn other_processes_row_with(unseen: usize, lacking: &[&str]) -> CheckRow {
        let unseen = (1..=unseen).map(|pid| format!("{pid} init: Permission denied"));
        let processes = ProcessVisibility {
            other_count: 9,
            unreadable_processes: unseen.collect(),
            is_in_child_pid_namespace: false,
        };
        other_processes_row(&processes, lacking)
    }

    #[test]
    fn with_all_capabilities_the_remedy_is_not_root() {
        let found = other_processes_row_with(1, &[]);
        let remedy = found.remedy.expect("a remedy");
        assert!(!remedy.contains("root"), "{remedy}");
        assert!(remedy.contains("no capability is missing"), "{remedy}");
        let finding = "the libraries of 8 of 9 can be seen; not those of 1 init: Permission denied";
        assert_eq!(found.finding, finding);
        let found = other_processes_row_with(5, &[]).finding;
        assert!(
            found.ends_with("3 init: Permission denied and 2 more"),
            "{found}"
        );
        assert_eq!(other_processes_row_with(0, &[]).remedy, None);
    }

    #[test]
    fn missing_capabilities_are_named() {
        for unseen in [8, 9] {
            let found = other_processes_row_with(unseen, &["CAP_SYS_PTRACE"]);
            let remedy = found.remedy.expect("a remedy");
            assert!(remedy.contains("CAP_SYS_PTRACE"), "{remedy}");
            assert!(!remedy.contains("CHECKPOINT"), "{remedy}");
            assert!(!found.finding.contains("init"), "{}", found.finding);
        }
    }
}
