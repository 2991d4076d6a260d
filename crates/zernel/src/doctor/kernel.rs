//! The kernel, and what we may do to it.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use procfs::process::{Process, all_processes};
use rustix::system::uname;
use rustix::thread::CapabilitySet;
use zernel_ebpf::privilege;

use super::row::Row;
use zernel_report::text::shortened;

pub(super) fn rows(processes: &Visibility) -> Vec<Row> {
    let lacking = privilege::lacking(&privilege::TO_SEE, Privilege::own().held);
    let others = other_processes(processes, &lacking);
    let mut rows = vec![version(), privilege(), others, btf()];
    rows.extend(lockdown());
    rows.extend([
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
    ]);
    rows
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

/// What this process may do, as far as the kernel as a whole is concerned.
pub(super) struct Privilege {
    held: CapabilitySet,
}

impl Privilege {
    pub(super) fn own() -> Self {
        Self {
            // In a user namespace of its own a process holds everything, and may do nothing.
            held: if in_initial_namespace("user") {
                privilege::held()
            } else {
                CapabilitySet::empty()
            },
        }
    }

    pub(super) fn is_root(&self) -> bool {
        self.held.contains(CapabilitySet::SYS_ADMIN)
    }

    pub(super) fn can_load_bpf(&self) -> bool {
        privilege::lacking(&privilege::TO_LOAD, self.held).is_empty()
    }

    /// The capabilities that observing needs and that are not held.
    pub(super) fn lacking(&self) -> Vec<&'static str> {
        let needed = [&privilege::TO_LOAD[..], &privilege::TO_SEE].concat();
        privilege::lacking(&needed, self.held)
    }
}

/// Whether this process is in the namespace that the kernel started with.
fn in_initial_namespace(kind: &str) -> bool {
    let initial = match kind {
        "pid" => 0xEFFF_FFFC,
        _ => 0xEFFF_FFFD, // user
    };
    // A kernel without such namespaces has only the one.
    fs::metadata(format!("/proc/self/ns/{kind}"))
        .map_or(true, |namespace| namespace.ino() == initial)
}

fn privilege() -> Row {
    let name = PRIVILEGE;
    let privilege = Privilege::own();
    let lacking = privilege.lacking();
    let user = rustix::process::geteuid().as_raw();
    if lacking.is_empty() {
        return Row::ok(name, format!("uid {user} with all capabilities needed"));
    }
    let finding = match in_initial_namespace("user") {
        true => format!("uid {user} without {}", lacking.join(", ")),
        false => format!("uid {user} in a user namespace, which counts for nothing here"),
    };
    let consequence = match privilege.can_load_bpf() {
        true => "the libraries of others' processes are not found",
        false => "no BPF program can be loaded by this user",
    };
    Row::missing(name, finding, consequence).remedy(
        "run as root, outside user namespaces, or let the node's administrator run the observer",
    )
}

pub(super) const PRIVILEGE: &str = "privilege";
pub(super) const OTHER_PROCESSES: &str = "other processes";

/// Which of the other processes can be looked into.
#[derive(Default)]
pub(super) struct Visibility {
    pub(super) others: usize,
    /// Those that cannot, and why not.
    pub(super) unseen: Vec<String>,
    /// In a pid namespace of its own: there are more processes than it knows.
    pub(super) in_container: bool,
}

impl Visibility {
    pub(super) fn look() -> Self {
        let own_pid = rustix::process::getpid().as_raw_nonzero().get();
        let others: Vec<_> = all_processes()
            .into_iter()
            .flatten()
            .flatten()
            .filter(|process| process.pid != own_pid && !is_kernel_thread(process))
            .map(|process| (follow_maps(process.pid), process))
            .filter(|(_, process)| process.is_alive())
            .collect();
        let unseen = others.iter().filter_map(|(followed, process)| {
            let error = followed.as_ref().err()?;
            let name = process.stat().map_or(String::new(), |stat| stat.comm);
            let name = shortened(&name, 15);
            Some(format!("{} {name}: {}", process.pid, os_message(error)))
        });
        Self {
            others: others.len(),
            unseen: unseen.collect(),
            in_container: !in_initial_namespace("pid"),
        }
    }

    /// Others are there, and none can be looked into.
    pub(super) fn is_blind(&self) -> bool {
        self.others > 0 && self.unseen.len() == self.others
    }
}

/// How many processes that cannot be seen are named.
const NAMED: usize = 3;

/// What can be seen of others, where these capabilities are not held.
fn other_processes(processes: &Visibility, lacking: &[&str]) -> Row {
    let Visibility { others, unseen, .. } = processes;
    let mut finding = format!(
        "the libraries of {} of {others} can be seen",
        others - unseen.len()
    );
    // Who lacks capabilities sees nobody else's: there is no use in naming them.
    let remedy = match lacking.is_empty() {
        true => {
            let named = unseen.iter().take(NAMED).map(String::as_str);
            let named = named.collect::<Vec<_>>().join(", ");
            finding = match unseen.len() {
                0 => finding,
                1..=NAMED => format!("{finding}; not those of {named}"),
                more => format!("{finding}; not those of {named} and {} more", more - NAMED),
            };
            "no capability is missing; a sandbox or security module (Landlock, SELinux, AppArmor) may keep zernel out: \
             if they train, run it outside of that"
                .to_owned()
        }
        false => format!("run with {}", lacking.join(", ")),
    };
    if processes.is_blind() {
        Row::missing(
            OTHER_PROCESSES,
            finding,
            "there is nothing that could be observed",
        )
        .remedy(remedy)
    } else if processes.in_container {
        Row::degraded(
            OTHER_PROCESSES,
            finding,
            "only this container's processes are observed",
        )
        .remedy("run in the host's pid namespace")
    } else if !unseen.is_empty() {
        Row::degraded(
            OTHER_PROCESSES,
            finding,
            "what the rest does is not observed",
        )
        .remedy(remedy)
    } else {
        Row::ok(OTHER_PROCESSES, finding)
    }
}

/// Only where the kernel tells: the file is there when lockdown is built in and securityfs mounted.
fn lockdown() -> Option<Row> {
    let modes = fs::read_to_string("/sys/kernel/security/lockdown").ok()?;
    let (_, rest) = modes.split_once('[')?;
    let (mode, _) = rest.split_once(']')?;
    Some(match mode {
        "confidentiality" => Row::missing(
            "lockdown",
            mode,
            "BPF programs may not read the kernel's memory: nothing can be observed",
        )
        .remedy("boot with lockdown=integrity, or without it"),
        _ => Row::ok("lockdown", mode),
    })
}

fn is_kernel_thread(process: &Process) -> bool {
    const PF_KTHREAD: u32 = 0x0020_0000;
    process
        .stat()
        .is_ok_and(|stat| stat.flags & PF_KTHREAD != 0)
}

/// Tries to reach a file that a process maps as it sees it, through its own name for it. One that maps none hides
/// nothing.
fn follow_maps(pid: i32) -> io::Result<()> {
    for entry in fs::read_dir(format!("/proc/{pid}/map_files"))? {
        match fs::metadata(entry?.path()) {
            // It was unmapped meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            reached => return reached.map(drop),
        }
    }
    Ok(())
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

    fn row(unseen: usize, lacking: &[&str]) -> Row {
        let unseen = (1..=unseen).map(|pid| format!("{pid} init: Permission denied"));
        let processes = Visibility {
            others: 9,
            unseen: unseen.collect(),
            in_container: false,
        };
        other_processes(&processes, lacking)
    }

    #[test]
    fn who_has_all_capabilities_is_not_told_to_be_root() {
        let told = row(1, &[]);
        let remedy = told.remedy.expect("a remedy");
        assert!(!remedy.contains("root"), "{remedy}");
        assert!(remedy.contains("no capability is missing"), "{remedy}");
        let finding = "the libraries of 8 of 9 can be seen; not those of 1 init: Permission denied";
        assert_eq!(told.finding, finding);
        let told = row(5, &[]).finding;
        assert!(
            told.ends_with("3 init: Permission denied and 2 more"),
            "{told}"
        );
        assert_eq!(row(0, &[]).remedy, None);
    }

    #[test]
    fn who_lacks_capabilities_is_told_which() {
        for unseen in [8, 9] {
            let told = row(unseen, &["CAP_SYS_PTRACE"]);
            let remedy = told.remedy.expect("a remedy");
            assert!(remedy.contains("CAP_SYS_PTRACE"), "{remedy}");
            assert!(!remedy.contains("CHECKPOINT"), "{remedy}");
            assert!(!told.finding.contains("init"), "{}", told.finding);
        }
    }
}
