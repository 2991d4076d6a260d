//! Libraries on a file system that does not answer. These tests run alone, because child processes that wait for such a
//! file system count towards limits of this process.

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::mm::{MapFlags, ProtFlags};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use zernel_ebpf::observer::Observer;
use zernel_model::snapshot::Scope;
use zernel_softgpu::install::Prologue;
use zernel_testkit::target::{Driver, Stage, Target, TargetRole, stage_directory};
use zernel_testkit::{Need, StallingFs};

use crate::files::map_code;
use crate::harness::{
    ObserverOnThread, assert_exact, find_process, functions_in_ledger,
    options_that_count_everything,
};

/// Whether a FUSE file system can be mounted.
pub(crate) const FUSE_NEED: Need = Need {
    name: "fuse",
    check: || match fs::metadata("/dev/fuse") {
        Ok(device) if device.rdev() != 0 => Ok(()),
        _ => Err("there is no /dev/fuse".into()),
    },
};

/// Why a file is refused, in the ledger.
pub(crate) fn refusal_in_ledger(observer: &Observer, path: &str) -> Option<String> {
    let ledger = observer.snapshot().ledger_json(Scope::All);
    let refused = ledger["refused"].as_array().expect("a list").iter();
    let mut of_file = refused.filter(|entry| entry["path"].as_str() == Some(path));
    Some(of_file.next()?["reason"].as_str()?.to_owned())
}

pub(crate) const DEAD_FILE_ROLES: &[(&str, TargetRole)] = &[
    ("maps_dead_files", target_maps_dead_files),
    ("maps_dead_environment", target_maps_dead_environment),
    ("maps_overlay_file", target_maps_overlay_file),
];

/// The names of a library and of a dynamic loader.
const DEAD_FILE_NAMES: [&str; 2] = ["libcuda.so.1", "ld-linux-x86-64.so.2"];

fn target_maps_dead_files(_driver: &Driver, _rounds: u64) {
    for name in DEAD_FILE_NAMES {
        map_code(&stage_directory().join("dead").join(name).join(name));
    }
}

fn target_maps_overlay_file(_driver: &Driver, _rounds: u64) {
    map_code(&stage_directory().join("overlay").join(DEAD_FILE_NAMES[0]));
}

/// Maps a file over the middle of its environment, so that a read of the environment reads the file.
fn target_maps_dead_environment(_driver: &Driver, _rounds: u64) {
    let stat = procfs::process::Process::myself().and_then(|own| own.stat());
    let stat = stat.expect("our own process");
    let page = rustix::param::page_size() as u64;
    let start = stat.env_start.expect("it has one").next_multiple_of(page);
    let end = stat.env_end.expect("it has one") / page * page;
    let name = DEAD_FILE_NAMES[0];
    let file = fs::File::open(stage_directory().join("dead").join(name).join(name)).expect("there");
    // SAFETY: replaces whole pages of the environment. The pages hold a long variable that this process never reads.
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
        let content = fs::read(stage.library_path("libcuda.so.1")).expect("it is installed");
        let mount = |name| {
            fs::create_dir_all(directory.join(name)).expect("ours");
            StallingFs::mount(&directory.join(name), name, content.clone()).expect("FUSE is there")
        };
        let files = DEAD_FILE_NAMES.map(mount).into();
        let mut command = stage.target_command(role, 0);
        let mut holder = Target::start(command.env("BALLAST", "x".repeat(100_000)));
        holder.run_part();
        let library = directory.join(DEAD_FILE_NAMES[0]).join(DEAD_FILE_NAMES[0]);
        let dead = Self {
            holder,
            files,
            library: library.to_str().expect("text").to_owned(),
        };
        dead.files.iter().for_each(StallingFs::stop_answering);
        dead
    }
}

/// While the file system does not answer, other processes are counted exactly, the file is refused, and the
/// observer can end.
pub(crate) fn a_hung_file_system_blocks_no_observation() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let dead = DeadFiles::new(&stage, "maps_dead_files");
    let watcher = ObserverOnThread::start(&options_that_count_everything(&stage));
    let mut targets = [stage.start_target("everything", 10)];
    targets[0].run_part();
    let pid = targets[0].pid();
    watcher.with_observer(|observer| assert_exact(observer, &stage, &targets));
    watcher.wait_until("the file is refused", |observer| {
        refusal_in_ledger(observer, &dead.library)
            .is_some_and(|reason| reason.contains("did not answer"))
    });
    let observer = watcher.stop();
    assert_eq!(find_process(&observer, pid).pid, pid);
    drop(observer);
    drop(dead.holder);
}

/// A library is read when its file system answers again. No probe is attached to a library on FUSE, because the
/// server of the file system could stop all forks.
pub(crate) fn a_library_on_fuse_gets_no_probes() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let dead = DeadFiles::new(&stage, "maps_dead_files");
    let watcher = ObserverOnThread::start(&options_that_count_everything(&stage));
    assert_eq!(
        watcher.with_observer(|observer| refusal_in_ledger(observer, &dead.library)),
        None
    );
    dead.files.iter().for_each(StallingFs::answer_again);
    watcher.wait_until("the file is refused", |observer| {
        refusal_in_ledger(observer, &dead.library).is_some_and(|reason| reason.contains("on FUSE"))
    });
    watcher
        .with_observer(|observer| assert!(functions_in_ledger(observer, &dead.library).is_empty()));
    drop(watcher.stop());
    drop(dead.holder);
}

/// Other processes are observed although reads of one process's environment do not return.
pub(crate) fn an_unreadable_environment_blocks_no_observation() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let dead = DeadFiles::new(&stage, "maps_dead_environment");
    let watcher = ObserverOnThread::start(&options_that_count_everything(&stage));
    let mut targets = [stage.start_target("everything", 10)];
    targets[0].run_part();
    watcher.with_observer(|observer| assert_exact(observer, &stage, &targets));
    let observer = watcher.stop();
    let healthy = find_process(&observer, targets[0].pid()).identity.clone();
    assert!(healthy.is_some_and(|identity| identity.environment_read));
    drop(observer);
    drop(dead.holder);
}

/// A read-only overlay of two directories, unmounted when dropped.
struct MountedOverlay {
    directory: PathBuf,
}

impl MountedOverlay {
    fn mount(directory: PathBuf, layers: [&Path; 2]) -> Self {
        fs::create_dir_all(&directory).expect("ours");
        let [first, second] = layers.map(|layer| layer.to_str().expect("text"));
        let data = CString::new(format!("lowerdir={first}:{second}")).expect("text");
        mount("overlay", &directory, "overlay", MountFlags::RDONLY, &*data).expect("root may");
        Self { directory }
    }
}

impl Drop for MountedOverlay {
    fn drop(&mut self) {
        // A process may still map the file.
        let _ = unmount(&self.directory, UnmountFlags::DETACH);
    }
}

/// A library on an overlay gets probes, unless a layer is on FUSE: its server could stop all forks. A library on an overlay
/// of an overlay gets no probes, because that may hide a layer on FUSE.
pub(crate) fn a_library_on_an_overlay_of_fuse_gets_no_probes() {
    for (below, expected) in [
        ("plain", None),
        ("fuse", Some("on an overlay with a layer on FUSE")),
        ("overlay", Some("on an overlay")),
    ] {
        let stage = Stage::with_machine_alone(Prologue::Push);
        let path = |name: &str| stage.path().join(name);
        for name in ["empty", "plain", "fuse"] {
            fs::create_dir_all(path(name)).expect("ours");
        }
        let installed = stage.library_path("libcuda.so.1");
        fs::copy(&installed, path("plain").join(DEAD_FILE_NAMES[0])).expect("ours");
        let content = fs::read(&installed).expect("it is installed");
        let fuse =
            StallingFs::mount(&path("fuse"), DEAD_FILE_NAMES[0], content).expect("FUSE is there");
        let lower = match below {
            "overlay" => Some(MountedOverlay::mount(
                path("lower"),
                [&path("fuse"), &path("empty")],
            )),
            _ => None,
        };
        let layer = match &lower {
            Some(lower) => lower.directory.clone(),
            None => path(below),
        };
        let overlay = MountedOverlay::mount(path("overlay"), [&layer, &path("empty")]);
        // Of a file on an overlay of an overlay the kernel shows the path below the inner one.
        let paths = [overlay.directory.clone(), PathBuf::from("/")].map(|directory| {
            let library = directory.join(DEAD_FILE_NAMES[0]);
            library.to_str().expect("text").to_owned()
        });
        let mut holder = stage.start_target("maps_overlay_file", 0);
        holder.run_part();
        let watcher = ObserverOnThread::start(&options_that_count_everything(&stage));
        let awaited = format!("the file on an overlay of {below} has probes or is refused");
        watcher.wait_until(&awaited, |observer| {
            let mut probed = paths.iter().map(|path| functions_in_ledger(observer, path));
            let is_probed = probed.any(|functions| !functions.is_empty());
            let refusal = paths
                .iter()
                .find_map(|path| refusal_in_ledger(observer, path));
            match (refusal, expected) {
                (Some(reason), Some(expected)) => reason.contains(expected) && !is_probed,
                (reason, _) => reason.is_none() && is_probed && expected.is_none(),
            }
        });
        drop(watcher.stop());
        holder.kill();
        drop((overlay, lower, fuse));
    }
}
