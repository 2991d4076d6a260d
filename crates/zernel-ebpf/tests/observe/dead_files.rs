//! Libraries on a file system that does not answer. These tests run alone: children that wait for it count for this process.

use std::fs;
use std::os::unix::fs::MetadataExt;

use rustix::mm::{MapFlags, ProtFlags};
use zernel_ebpf::observer::Observer;
use zernel_model::snapshot::Scope;
use zernel_softgpu::install::Prologue;
use zernel_testkit::target::{Driver, Stage, Target, TargetRole, directory};
use zernel_testkit::{Need, StallingFs};

use crate::files::map_code;
use crate::harness::{Watcher, assert_exact, exact, find, functions_of};

/// Whether a FUSE file system can be mounted.
pub(crate) const FUSE: Need = Need {
    name: "fuse",
    check: || match fs::metadata("/dev/fuse") {
        Ok(device) if device.rdev() != 0 => Ok(()),
        _ => Err("there is no /dev/fuse".into()),
    },
};

/// Why a file is refused, in the ledger.
fn refusal(observer: &Observer, path: &str) -> Option<String> {
    let ledger = observer.snapshot().ledger_json(Scope::All);
    let refused = ledger["refused"].as_array().expect("a list").iter();
    let mut of_file = refused.filter(|entry| entry["path"].as_str() == Some(path));
    Some(of_file.next()?["reason"].as_str()?.to_owned())
}

pub(crate) const ROLES: &[(&str, TargetRole)] = &[
    ("maps_dead_files", maps_dead_files),
    ("maps_dead_environment", maps_dead_environment),
];

/// The names of a library and of a dynamic loader.
const NAMES: [&str; 2] = ["libcuda.so.1", "ld-linux-x86-64.so.2"];

fn maps_dead_files(_driver: &Driver, _rounds: u64) {
    for name in NAMES {
        map_code(&directory().join("dead").join(name).join(name));
    }
}

/// Maps a file over the middle of its environment, so that a read of the environment reads the file.
fn maps_dead_environment(_driver: &Driver, _rounds: u64) {
    let stat = procfs::process::Process::myself().and_then(|own| own.stat());
    let stat = stat.expect("our own process");
    let page = rustix::param::page_size() as u64;
    let start = stat.env_start.expect("it has one").next_multiple_of(page);
    let end = stat.env_end.expect("it has one") / page * page;
    let name = NAMES[0];
    let file = fs::File::open(directory().join("dead").join(name).join(name)).expect("there");
    // SAFETY: replaces whole pages of the environment. They hold a long variable that this process never
    // reads.
    let mapped = unsafe {
        rustix::mm::mmap(
            start as *mut _,
            (end - start) as usize,
            ProtFlags::READ,
            MapFlags::PRIVATE | MapFlags::FIXED,
            file,
            0,
        )
    };
    mapped.expect("a file can be mapped");
}

/// A process that maps a library and a loader, and their file systems, which then stop answering.
struct DeadFiles {
    holder: Target,
    files: Vec<StallingFs>,
    library: String,
}

impl DeadFiles {
    fn new(stage: &Stage, role: &str) -> Self {
        let directory = stage.path().join("dead");
        let content = fs::read(stage.library("libcuda.so.1")).expect("it is installed");
        let mount = |name| {
            fs::create_dir_all(directory.join(name)).expect("ours");
            StallingFs::mount(&directory.join(name), name, content.clone()).expect("FUSE is there")
        };
        let files = NAMES.map(mount).into();
        let mut command = stage.command(role, 0);
        let mut holder = Target::start(command.env("BALLAST", "x".repeat(100_000)));
        holder.step();
        let library = directory.join(NAMES[0]).join(NAMES[0]);
        let dead = Self {
            holder,
            files,
            library: library.to_str().expect("text").to_owned(),
        };
        dead.files.iter().for_each(StallingFs::stall);
        dead
    }
}

/// While the file system does not answer, other processes are counted exactly, the file is refused, and the
/// observer can end.
pub(crate) fn observing_goes_on() {
    let stage = Stage::alone(Prologue::Push);
    let dead = DeadFiles::new(&stage, "maps_dead_files");
    let watcher = Watcher::start(&exact(&stage));
    let mut targets = [stage.target("everything", 10)];
    targets[0].step();
    let pid = targets[0].pid();
    watcher.with(|observer| assert_exact(observer, &stage, &targets));
    watcher.wait_until("the file is refused", |observer| {
        refusal(observer, &dead.library).is_some_and(|reason| reason.contains("did not answer"))
    });
    let observer = watcher.stop();
    assert_eq!(find(&observer, pid).pid, pid);
    drop(observer);
    drop(dead.holder);
}

/// A library is read when its file system answers again. No probe is attached to it: the server could stop all forks.
pub(crate) fn on_fuse() {
    let stage = Stage::alone(Prologue::Push);
    let dead = DeadFiles::new(&stage, "maps_dead_files");
    let watcher = Watcher::start(&exact(&stage));
    assert_eq!(
        watcher.with(|observer| refusal(observer, &dead.library)),
        None
    );
    dead.files.iter().for_each(StallingFs::answer);
    watcher.wait_until("the file is refused", |observer| {
        refusal(observer, &dead.library).is_some_and(|reason| reason.contains("on FUSE"))
    });
    watcher.with(|observer| assert!(functions_of(observer, &dead.library).is_empty()));
    drop(watcher.stop());
    drop(dead.holder);
}

/// Other processes are observed although reads of one process's environment do not return.
pub(crate) fn dead_environment() {
    let stage = Stage::alone(Prologue::Push);
    let dead = DeadFiles::new(&stage, "maps_dead_environment");
    let watcher = Watcher::start(&exact(&stage));
    let mut targets = [stage.target("everything", 10)];
    targets[0].step();
    watcher.with(|observer| assert_exact(observer, &stage, &targets));
    let observer = watcher.stop();
    let healthy = find(&observer, targets[0].pid()).identity.clone();
    assert!(healthy.is_some_and(|identity| identity.environment_read));
    drop(observer);
    drop(dead.holder);
}
