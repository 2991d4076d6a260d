//! A process in which the kernel cannot change the code of a library that other processes map too.

use std::ffi::c_void;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::thread;
use std::time::Duration;

use rustix::mm::{Advice, MapFlags, ProtFlags, UserfaultfdFlags};
use tempfile::TempDir;
use zernel_ebpf::observer::{GovernorOptions, Observer, ObserverOptions};
use zernel_softgpu::install::Prologue;
use zernel_testkit::Need;
use zernel_testkit::target::{
    Driver, LIBRARIES_VARIABLE, Stage, Target, TargetRole, end_part_and_wait, stage_directory,
};

use crate::dead_files::refusal_in_ledger;
use crate::governor::wait_for_interval;
use crate::harness::{
    ObserverOnThread, find_process, functions_in_ledger, options_that_count_everything,
};

/// Whether there is a tmpfs, where mappings of files can have a `userfaultfd`, and whether there is that.
pub(crate) const PAGE_FAULTS_ON_TMPFS_NEED: Need = Need {
    name: "userfaultfd",
    check: || {
        fs::metadata("/dev/shm").map_err(|error| format!("/dev/shm: {error}"))?;
        let faults = open_userfaultfd().map_err(|error| format!("userfaultfd: {error}"));
        faults.map(drop)
    },
};

pub(crate) const REFUSING_ROLES: &[(&str, TargetRole)] = &[
    ("holds_page_faults", target_holds_page_faults),
    ("maps_shared_library", target_maps_shared_library),
];

const LIBRARY_NAME: &str = "libcuda.so.1";

/// `UFFDIO_API` and `UFFDIO_REGISTER` of `linux/userfaultfd.h`, with their arguments.
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFD_API: u64 = 0xaa;
const UFFD_FEATURE_MINOR_SHMEM: u64 = 1 << 10;
const UFFD_MODES_MISSING_AND_MINOR: u64 = 1 | 1 << 2;

fn open_userfaultfd() -> rustix::io::Result<OwnedFd> {
    // SAFETY: nothing is registered yet.
    unsafe { rustix::mm::userfaultfd(UserfaultfdFlags::CLOEXEC) }
}

fn map_library() -> (*mut c_void, usize) {
    let file =
        fs::File::open(stage_directory().join("shared").join(LIBRARY_NAME)).expect("it is there");
    let length = file.metadata().expect("ours").len().next_multiple_of(4096) as usize;
    let protection = ProtFlags::READ | ProtFlags::EXEC;
    let address = std::ptr::null_mut();
    // SAFETY: a new mapping that is never executed.
    let mapped =
        unsafe { rustix::mm::mmap(address, length, protection, MapFlags::PRIVATE, file, 0) };
    (mapped.expect("a file can be mapped"), length)
}

fn target_maps_shared_library(_driver: &Driver, _rounds: u64) {
    map_library();
}

/// Has the kernel report all page faults on its mapping of the library to itself. The kernel does not wait for such a
/// report when it changes the code, and fails to attach probes.
fn target_holds_page_faults(_driver: &Driver, _rounds: u64) {
    let (address, length) = map_library();
    let faults = open_userfaultfd().expect("the test needs it");
    let mut api = [UFFD_API, UFFD_FEATURE_MINOR_SHMEM, 0];
    let mut range = [
        address as u64,
        length as u64,
        UFFD_MODES_MISSING_AND_MINOR,
        0,
    ];
    // SAFETY: both arguments have the layout of the kernel's, and outlive the calls.
    let results = unsafe {
        [
            libc::ioctl(faults.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()),
            libc::ioctl(faults.as_raw_fd(), UFFDIO_REGISTER, range.as_mut_ptr()),
        ]
    };
    assert_eq!(results, [0, 0], "{}", std::io::Error::last_os_error());
    // SAFETY: nothing uses the mapping. Pages that the kernel has changed already would not fault.
    let dropped = unsafe { rustix::mm::madvise(address, length, Advice::LinuxDontNeed) };
    dropped.expect("it is mapped");
    end_part_and_wait();
}

/// Copies the library to a tmpfs, where targets of the stage find it.
fn share_library(stage: &Stage) -> (TempDir, String) {
    let shared = tempfile::tempdir_in("/dev/shm").expect("a tmpfs");
    let library = shared.path().join(LIBRARY_NAME);
    fs::copy(stage.library_path(LIBRARY_NAME), &library).expect("ours");
    symlink(shared.path(), stage.path().join("shared")).expect("ours");
    let path = library.to_str().expect("text").to_owned();
    (shared, path)
}

/// While a process handles its own page faults, probes on the library are refused with that reason. When the process has
/// ended, probes are attached.
pub(crate) fn a_refused_library_gets_probes_when_its_refuser_ends() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let (_shared, library) = share_library(&stage);
    let library = library.as_str();
    let mut holder = stage.start_target("holds_page_faults", 0);
    holder.run_part();
    let mut other = stage.start_target("maps_shared_library", 0);
    other.run_part();
    let watcher = ObserverOnThread::start(&options_that_count_everything(&stage));
    watcher.wait_until("the file is refused", |observer| {
        let reason = refusal_in_ledger(observer, library);
        reason.is_some_and(|reason| reason.contains("the kernel refuses the probes"))
    });
    watcher.with_observer(|observer| assert!(functions_in_ledger(observer, library).is_empty()));
    holder.kill();
    watcher.wait_until("the file has probes", |observer| {
        !functions_in_ledger(observer, library).is_empty()
    });
    drop(watcher.stop());
    other.kill();
}

/// A process that holds its page faults keeps sampling windows from opening on a library. The permanent probes on that
/// library stay attached.
pub(crate) fn a_library_whose_windows_are_refused_keeps_its_other_probes() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let (_shared, library) = share_library(&stage);
    let mut other = stage.start_target("maps_shared_library", 0);
    other.run_part();
    let watcher = ObserverOnThread::start(&ObserverOptions {
        governor: GovernorOptions::with_budget(0.05),
        ..options_that_count_everything(&stage)
    });
    let mut launcher = stage.start_target("launches_for", 30_000);
    launcher.start_part();
    let state_of = |observer: &Observer, function: &str| {
        let functions = functions_in_ledger(observer, &library);
        functions
            .get(function)
            .map(|entry| entry["state"].to_string())
    };
    watcher.wait_until("launches are sampled", |observer| {
        state_of(observer, "cuLaunchKernel").is_some_and(|state| state.contains("sampled"))
    });
    let mut holder = stage.start_target("holds_page_faults", 0);
    holder.run_part();
    watcher.wait_until("a window is refused", |observer| {
        let problems = observer.problems();
        problems.iter().any(|it| it.contains("is not sampled"))
    });
    for _ in 0..10 {
        thread::sleep(Duration::from_millis(100));
        watcher.with_observer(|observer| {
            let state = state_of(observer, "cuStreamSynchronize").expect("a row");
            assert_eq!(state, "\"attached\"");
        });
    }
    drop(watcher.stop());
    for target in [holder, other, launcher] {
        target.kill();
    }
}

/// Launches of each step of the target `eager`.
const LAUNCHES_PER_STEP: f64 = 300.0;

/// A window in which the launches of a process have no probes is not counted for it, so its launches per step stay right.
pub(crate) fn a_refused_window_does_not_count_as_one_without_calls() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let (shared, _library) = share_library(&stage);
    let nccl = "libnccl.so.2";
    fs::copy(stage.library_path(nccl), shared.path().join(nccl)).expect("ours");
    let watcher = ObserverOnThread::start(&ObserverOptions {
        governor: GovernorOptions::with_budget(0.03),
        ..options_that_count_everything(&stage)
    });
    let mut command = stage.target_command("eager", 600_000);
    let mut trainer = Target::start(command.env(LIBRARIES_VARIABLE, shared.path()));
    let pid = trainer.pid();
    trainer.start_part();
    wait_for_interval(&watcher, pid);
    let mut holder = stage.start_target("holds_page_faults", 0);
    holder.run_part();
    watcher.wait_until("a window is refused", |observer| {
        let problems = observer.problems();
        problems.iter().any(|it| it.contains("is not sampled"))
    });
    // Other files have windows meanwhile.
    let before = watcher.with_observer(|observer| observer.probe_cost().sampling_windows);
    watcher.wait_until("there are more windows", |observer| {
        observer.probe_cost().sampling_windows >= before + 6
    });
    watcher.with_observer(|observer| {
        let per_step = find_process(observer, pid).launches_per_step();
        let per_step = per_step.expect("there were windows");
        assert!(
            (0.95..=1.05).contains(&(per_step.mean / LAUNCHES_PER_STEP)),
            "{per_step:?}"
        );
    });
    drop(watcher.stop());
    for target in [holder, trainer] {
        target.kill();
    }
}
