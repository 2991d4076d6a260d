//! Library files that are replaced, written to, stripped, broken or hidden.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MapFlags, ProtFlags};
use zernel_ebpf::observer::{GovernorOptions, Observer, ObserverOptions, ProcessCoverage};
use zernel_model::snapshot::Scope;
use zernel_softgpu::install::{Prologue, install_libraries};
use zernel_testkit::target::{
    Driver, LIBRARIES_VARIABLE, Stage, Target, TargetRole, end_part_and_wait, stage_directory,
};
use zernel_testkit::{Need, eventually};

use crate::counts::target_launch_only;
use crate::harness::{
    assert_exact, find_process, functions_in_ledger, observe_stage, observed_calls, start_observer,
};

pub(crate) const FILE_ROLES: &[(&str, TargetRole)] = &[
    ("loads_and_launches", target_loads_and_launches),
    ("maps_garbage", target_maps_garbage),
    ("remaps", target_remaps_files),
];

/// Loads its libraries, waits for the test, and then launches kernels.
fn target_loads_and_launches(driver: &Driver, rounds: u64) {
    end_part_and_wait();
    target_launch_only(driver, rounds);
}

/// Maps a file that is not a library as if it were one.
fn target_maps_garbage(_driver: &Driver, _rounds: u64) {
    map_code(&stage_directory().join("garbage/libcuda.so.1"));
}

/// Maps the CUDA driver and a file with the name of another library at the same address, one after the other, until it is
/// killed.
fn target_remaps_files(_driver: &Driver, _rounds: u64) {
    let names = ["lib/libcuda.so.1", "remapped/libnccl.so.2"];
    let files =
        names.map(|name| fs::File::open(stage_directory().join(name)).expect("it is there"));
    let protection = ProtFlags::READ | ProtFlags::EXEC;
    let mut address = std::ptr::null_mut();
    let mut flags = MapFlags::PRIVATE;
    println!("done");
    for file in files.iter().cycle() {
        // SAFETY: a new mapping that is never executed. Only this function replaces the mapping.
        let mapped = unsafe { rustix::mm::mmap(address, 4096, protection, flags, file, 0) };
        address = mapped.expect("a file can be mapped");
        flags |= MapFlags::FIXED;
    }
}

/// A process remaps files while it is scanned. Each file gets the probes of the library that it really is.
pub(crate) fn a_remapped_file_gets_the_probes_of_its_own_kind() {
    let stage = Stage::new(Prologue::Push);
    let other = stage.path().join("remapped/libnccl.so.2");
    fs::create_dir(stage.path().join("remapped")).expect("ours");
    fs::copy(stage.library_path("libnccl.so.2"), &other).expect("ours");
    let mut observer = observe_nothing_yet();
    let mut remapping = stage.start_target("remaps", 0);
    remapping.start_part();
    remapping.wait_until_done();
    for _ in 0..100 {
        observer.scan().expect("processes can be scanned");
    }
    let cuda = functions_in_ledger(
        &observer,
        &stage.library_path("libcuda.so.1").to_string_lossy(),
    );
    assert_eq!(cuda["cuLaunchKernel"]["state"], "attached");
    let nccl = functions_in_ledger(&observer, &other.to_string_lossy());
    assert!(nccl.keys().all(|name| name.starts_with("nccl")), "{nccl:?}");
    assert!(!nccl.is_empty(), "it was found");
    let mut targets = [stage.start_target("everything", 10)];
    targets[0].run_part();
    assert_exact(&mut observer, &stage, &targets);
}

/// Maps a file as a program's loader and library are.
pub(crate) fn map_code(path: &Path) {
    let file = fs::File::open(path).expect("it is there");
    let protection = ProtFlags::READ | ProtFlags::EXEC;
    // SAFETY: a new mapping that is never executed.
    let mapped = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            4096,
            protection,
            MapFlags::PRIVATE,
            file,
            0,
        )
    };
    mapped.expect("a file can be mapped");
}

/// An observer that knows no library before a process maps it.
fn observe_nothing_yet() -> Observer {
    start_observer(&ObserverOptions {
        governor: GovernorOptions::COUNT_EVERYTHING,
        ..ObserverOptions::default()
    })
}

/// Has a target load its libraries, attaches to them, and has it use them.
fn load_and_run(observer: &mut Observer, target: &mut Target) {
    target.run_part();
    observer.discover().expect("processes can be discovered");
    target.run_part();
}

fn assert_discovered_exactly(stage: &Stage, command: &mut Command) {
    let mut observer = observe_nothing_yet();
    let mut targets = [Target::start(command)];
    load_and_run(&mut observer, &mut targets[0]);
    assert_exact(&mut observer, stage, &targets);
    let seen = observed_calls(find_process(&observer, targets[0].pid()));
    assert_eq!(seen["cuLaunchKernel"].calls, 100);
}

pub(crate) fn a_replaced_library_is_attached_to_anew() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut before = stage.start_target("loads_and_launches", 10);
    before.run_part();
    install_libraries(&stage.path().join("lib"), Prologue::Endbr64)
        .expect("the libraries are built");
    let mut after = stage.start_target("loads_and_launches", 20);
    load_and_run(&mut observer, &mut after);
    before.run_part();
    assert_exact(&mut observer, &stage, &[before, after]);
}

/// A library that is written to while mapped loses its probes, because the addresses of its functions are
/// then unknown.
pub(crate) fn a_written_library_is_detached() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("loads_and_launches", 10);
    target.run_part();
    observer.discover().expect("processes can be discovered");
    let library = stage.library_path("libcuda.so.1");
    overwrite_library(&library);
    observer.scan().expect("processes can be scanned");
    wait_until_detached(&mut observer, &stage);
    target.run_part();
    observer.read_counts().expect("maps can be read");
    let launch = &functions_in_ledger(&observer, &library.to_string_lossy())["cuLaunchKernel"];
    assert_eq!(launch["state"], "not attached");
    let reason = launch["reason"].as_str().expect("a reason");
    assert!(reason.contains("written to"), "{reason}");
    let mut processes = observer.processes();
    assert!(!processes.any(|process| process.pid == target.pid()));
}

/// Waits until the kernel has detached the probes of a library, which it does in the background: until the calls of a
/// new process are not observed.
fn wait_until_detached(observer: &mut Observer, stage: &Stage) {
    eventually("the probes are detached", || {
        let mut late = stage.start_target("loads_and_launches", 1);
        late.run_part();
        late.run_part();
        observer.read_counts().expect("maps can be read");
        let mut processes = observer.processes();
        !processes.any(|process| process.pid == late.pid())
    });
}

/// Reason in the ledger why the launches of a library are not probed; `None` if they are probed.
fn why_not_probed(observer: &Observer, library: &Path) -> Option<String> {
    let launch =
        functions_in_ledger(observer, &library.to_string_lossy())["cuLaunchKernel"].clone();
    (launch["state"] == "not attached").then(|| launch["reason"].to_string())
}

fn overwrite_library(library: &Path) {
    let content = fs::read(library).expect("it is there");
    let mut file = OpenOptions::new().write(true).open(library).expect("ours");
    file.write_all(&content).expect("ours");
}

/// A process that still uses a detached library is no longer complete. The observer notices the detached library
/// without a scan.
pub(crate) fn a_process_with_a_detached_library_is_not_complete() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("initialises_again", 10);
    target.run_part();
    observer.discover().expect("processes can be discovered");
    observer.read_counts().expect("maps can be read");
    assert_eq!(
        find_process(&observer, target.pid()).coverage,
        ProcessCoverage::Complete
    );
    overwrite_library(&stage.library_path("libcuda.so.1"));
    observer.discover().expect("processes can be discovered");
    target.run_part();
    observer.read_counts().expect("maps can be read");
    let coverage = find_process(&observer, target.pid()).coverage;
    assert!(
        matches!(coverage, ProcessCoverage::Since(_)),
        "{coverage:?}"
    );
}

pub(crate) fn a_library_is_detached_as_soon_as_it_is_written() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("loads_and_launches", 10);
    target.run_part();
    observer.discover().expect("processes can be discovered");
    let library = stage.library_path("libcuda.so.1");
    assert_eq!(why_not_probed(&observer, &library), None);
    let events = observer.discovery_descriptor().expect("a descriptor");
    overwrite_library(&library);
    assert!(is_readable(&events), "a waiting thread wakes up");
    observer.discover().expect("processes can be discovered");
    let reason = why_not_probed(&observer, &library).expect("it is detached");
    assert!(reason.contains("written to"), "{reason}");
    target.run_part();
    target.let_exit();
}

/// The layers of a container are an overlay file system: the mapped file is not the file that is written
/// to.
pub(crate) fn a_library_written_to_in_an_overlay_layer_is_detached() {
    let stage = Stage::new(Prologue::Push);
    let place = stage.path().join("overlay");
    fs::create_dir(&place).expect("ours");
    let script = r#"mount -t tmpfs none "$1" && mkdir "$1"/lower "$1"/upper "$1"/work "$1"/merged &&
        mount -t overlay -o lowerdir="$1"/lower,upperdir="$1"/upper,workdir="$1"/work none "$1"/merged &&
        cp "$2"/* "$1"/merged && exec "$3""#;
    let mut command = stage.target_command_of("unshare".as_ref(), "loads_and_launches", 10);
    command
        .args(["--mount", "sh", "-c", script, "sh"])
        .args([&place, &stage.path().join("lib")])
        .arg(std::env::current_exe().expect("we run"))
        .env(LIBRARIES_VARIABLE, place.join("merged"));
    let mut observer = observe_nothing_yet();
    let mut target = Target::start(&mut command);
    target.run_part();
    observer.discover().expect("processes can be discovered");
    let library = place.join("merged/libcuda.so.1");
    assert_eq!(why_not_probed(&observer, &library), None);
    let inside = format!("/proc/{}/root{}", target.pid(), library.display());
    overwrite_library(inside.as_ref());
    observer.discover().expect("processes can be discovered");
    let reason = why_not_probed(&observer, &library).expect("it is detached");
    assert!(reason.contains("written to"), "{reason}");
    target.run_part();
    target.let_exit();
}

fn is_readable(descriptor: &OwnedFd) -> bool {
    let mut descriptors = [PollFd::new(descriptor, PollFlags::IN)];
    let ready = poll(&mut descriptors, Some(&Timespec::default()));
    ready.expect("it can be polled") > 0
}

pub(crate) fn overlayfs_need() -> Need {
    Need {
        name: "overlayfs",
        check: || match fs::read_to_string("/proc/filesystems") {
            Ok(list) if list.contains("\toverlay\n") => Ok(()),
            _ => Err("this kernel has no overlayfs".to_owned()),
        },
    }
}

pub(crate) fn strip_need() -> Need {
    Need {
        name: "strip",
        check: || match Command::new("strip").arg("--version").output() {
            Ok(_) => Ok(()),
            Err(error) => Err(format!("strip does not run: {error}")),
        },
    }
}

/// Stripping keeps the dynamic symbols.
pub(crate) fn a_stripped_library_is_counted() {
    let stage = Stage::new(Prologue::Push);
    for name in ["libcuda.so.1", "libnccl.so.2"] {
        let mut strip = Command::new("strip");
        let strip = strip.arg("--strip-all").arg(stage.library_path(name));
        assert!(strip.status().expect("strip runs").success());
    }
    assert_discovered_exactly(&stage, &mut stage.target_command("loads_and_launches", 100));
}

fn copy_first_third(path: &Path, to: &Path) {
    let whole = fs::read(path).expect("it is there");
    fs::write(to, &whole[..whole.len() / 3]).expect("ours");
}

/// Copies a library, with headers that claim 300 MB of symbol names.
fn copy_with_huge_symbol_names(path: &Path, to: &Path) {
    const SECTIONS_FIELD: usize = 40;
    const LENGTH_FIELD: usize = 32;
    let mut content = fs::read(path).expect("it is there");
    let number = |content: &[u8], at: usize, length: usize| {
        let mut bytes = [0; 8];
        bytes[..length].copy_from_slice(&content[at..at + length]);
        u64::from_le_bytes(bytes) as usize
    };
    let sections = number(&content, SECTIONS_FIELD, 8);
    let table = (sections..content.len()).step_by(64);
    let symbols = table.clone().find(|at| number(&content, at + 4, 4) == 11);
    let names = sections + 64 * number(&content, symbols.expect("it has exports") + 40, 4);
    let length = 300_000_000_u64;
    content[names + LENGTH_FIELD..][..8].copy_from_slice(&length.to_le_bytes());
    fs::write(to, &content).expect("ours");
    let file = OpenOptions::new().write(true).open(to).expect("ours");
    file.set_len(length + content.len() as u64).expect("ours");
}

pub(crate) fn a_malformed_library_is_refused() {
    let stage = Stage::new(Prologue::Push);
    let library = stage.path().join("garbage/libcuda.so.1");
    fs::create_dir(stage.path().join("garbage")).expect("ours");
    let mut observer = observe_stage(&stage);
    let noise: Vec<u8> = (0..20_000_u32)
        .map(|number| ((number * 31) >> 3) as u8)
        .collect();
    let real = stage.library_path("libcuda.so.1");
    let make: [(&dyn Fn(), &str); 3] = [
        (&|| fs::write(&library, &noise).expect("ours"), "ELF magic"),
        (&|| copy_first_third(&real, &library), "ends before"),
        (
            &|| copy_with_huge_symbol_names(&real, &library),
            "268435456 bytes of names",
        ),
    ];
    for (make, expected) in make {
        make();
        let mut holder = stage.start_target("maps_garbage", 0);
        holder.run_part();
        // A scan does not wait for long until a file is read.
        eventually("the file is refused", || {
            observer.scan().expect("processes can be scanned");
            let refused = observer.snapshot().ledger_json(Scope::All)["refused"].clone();
            let entries = refused.as_array().expect("a list").iter();
            let of_library = entries.filter(|entry| entry["path"].as_str() == library.to_str());
            let reasons: Vec<&str> = of_library.filter_map(|it| it["reason"].as_str()).collect();
            assert!(reasons.len() <= 1, "refused once: {reasons:?}");
            reasons.iter().any(|reason| reason.contains(expected))
        });
        let mut targets = [stage.start_target("everything", 10)];
        targets[0].run_part();
        assert_exact(&mut observer, &stage, &targets);
    }
}

/// In a container a path names another file than outside.
pub(crate) fn files_in_a_mount_namespace_are_found() {
    let stage = Stage::new(Prologue::Push);
    let inside = stage.path().join("inside");
    fs::create_dir(&inside).expect("ours");
    let script = r#"mount -t tmpfs none "$1" && cp "$2"/* "$1" && exec "$3""#;
    let mut command = stage.target_command_of("unshare".as_ref(), "loads_and_launches", 100);
    command
        .args(["--mount", "sh", "-c", script, "sh"])
        .args([&inside, &stage.path().join("lib")])
        .arg(std::env::current_exe().expect("we run"))
        .env(LIBRARIES_VARIABLE, &inside);
    assert_discovered_exactly(&stage, &mut command);
    assert_eq!(fs::read_dir(&inside).expect("ours").count(), 0);
}
