//! Discovery on the machine that runs the tests, with a helper process.

mod helper;
mod other_kernels;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;
use std::{env, fs, thread};

use rustix::thread::{CapabilitySet, CapabilitySets};
use tempfile::TempDir;
use zernel_ebpf::capability::Capability;
use zernel_ebpf::discovery::{Discovery, MappedFile, ProcessEvent, ProcessKey};
use zernel_elf::LibraryKind;
use zernel_softgpu::install::{Prologue, install_libraries};
use zernel_testkit::needs::bpf;
use zernel_testkit::{Need, eventually, eventually_ok, root, trial, vm};

use helper::Helper;

fn main() -> ExitCode {
    if env::args().nth(1).as_deref() == Some(helper::HELPER_ARGUMENT) {
        return helper::main();
    }
    let needs = [root(), bpf(|| Capability::BtfTracepoint.try_out())];
    let oldest = [vm::oldest_kernel_need()];
    let newest = [Need {
        name: "vm",
        check: || vm::obtain_kernel_of_version("7.2").map(drop),
    }];
    zernel_testkit::main([
        trial(
            "running_processes_are_found",
            &needs,
            running_processes_are_found,
        ),
        trial(
            "a_late_dlopen_is_reported",
            &needs,
            a_late_dlopen_is_reported,
        ),
        trial(
            "a_preloaded_library_is_reported",
            &needs,
            a_preloaded_library_is_reported,
        ),
        trial(
            "forks_and_exits_are_reported",
            &needs,
            forks_and_exits_are_reported,
        ),
        trial("an_exec_is_reported", &needs, an_exec_is_reported),
        trial(
            "a_thread_is_not_reported_as_a_process",
            &needs,
            a_thread_is_not_reported_as_a_process,
        ),
        trial(
            "a_replaced_library_is_reported_again",
            &needs,
            a_replaced_library_is_reported_again,
        ),
        trial(
            "files_in_a_mount_namespace_are_found",
            &needs,
            files_in_a_mount_namespace_are_found,
        ),
        trial(
            "the_file_under_overlayfs_is_reported",
            &[needs[0], needs[1], overlayfs()],
            the_file_under_overlayfs_is_reported,
        ),
        trial(
            "a_copied_dynamic_loader_is_probed",
            &needs,
            a_copied_dynamic_loader_is_probed,
        ),
        trial(
            "a_process_whose_first_thread_exited_is_found",
            &needs,
            a_process_whose_first_thread_exited_is_found,
        ),
        trial(
            "procfs_and_iterator_agree",
            &needs,
            procfs_and_iterator_agree,
        ),
        trial(
            "a_thousand_short_processes_leave_no_entries",
            &needs,
            a_thousand_short_processes_leave_no_entries,
        ),
        trial(
            "a_full_event_buffer_causes_a_scan",
            &needs,
            a_full_event_buffer_causes_a_scan,
        ),
        trial(
            "loading_in_a_loop_loses_nothing",
            &needs,
            loading_in_a_loop_loses_nothing,
        ),
        trial(
            "missing_privilege_is_reported",
            &needs,
            missing_privilege_is_reported,
        ),
        trial("the_trials_pass_on_an_old_kernel", &oldest, || {
            other_kernels::run("6.1");
        }),
        trial("the_trials_pass_on_a_new_kernel", &newest, || {
            other_kernels::run("7.2");
        }),
    ])
}

/// The software GPU's libraries in a directory of their own.
struct Libraries(TempDir);

impl Libraries {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        install_libraries(directory.path(), Prologue::Push).unwrap();
        Self(directory)
    }

    fn cuda_path(&self) -> PathBuf {
        self.path_of("libcuda.so.1")
    }

    fn nccl_path(&self) -> PathBuf {
        self.path_of("libnccl.so.2")
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.0.path().canonicalize().unwrap().join(name)
    }
}

/// A library that a process was reported to map.
fn find_library(
    events: &[ProcessEvent],
    pid: u32,
    wanted: LibraryKind,
) -> Option<(ProcessKey, MappedFile)> {
    events.iter().find_map(|event| match event {
        ProcessEvent::Mapped {
            process,
            kind,
            file,
        } if process.pid == pid && *kind == wanted => Some((*process, file.clone())),
        _ => None,
    })
}

fn find_cuda_of(events: &[ProcessEvent], pid: u32) -> Option<(ProcessKey, MappedFile)> {
    find_library(events, pid, LibraryKind::Cuda)
}

/// Polls until `wanted` finds something among all events so far.
fn poll_until<T>(discovery: &mut Discovery, wanted: impl Fn(&[ProcessEvent]) -> Option<T>) -> T {
    let mut events = Vec::new();
    eventually_ok("the event comes", || {
        events.extend(discovery.poll(Duration::from_millis(100)).unwrap());
        wanted(&events).ok_or_else(|| format!("{events:#?}"))
    })
}

fn poll_for_cuda(discovery: &mut Discovery, pid: u32) -> (ProcessKey, MappedFile) {
    poll_until(discovery, |events| find_cuda_of(events, pid))
}

fn poll_for(discovery: &mut Discovery, wanted: &ProcessEvent) {
    poll_until(discovery, |events| events.contains(wanted).then_some(()));
}

fn assert_same_file(file: &MappedFile, library: &Path) {
    assert_eq!(file.path, library);
    assert!(fs::read(&file.map_files).unwrap() == fs::read(library).unwrap());
}

fn running_processes_are_found() {
    let libraries = Libraries::new();
    let mut helper = Helper::spawn();
    helper.load(&libraries.cuda_path());
    let mut discovery = Discovery::start().unwrap();
    let (process, file) = find_cuda_of(&discovery.scan().unwrap(), helper.pid()).unwrap();
    assert_same_file(&file, &libraries.cuda_path());
    assert!(process.is_alive());
    assert_eq!(find_cuda_of(&discovery.scan().unwrap(), helper.pid()), None);
    helper.kill();
    assert!(!process.is_alive());
    let events = discovery.scan().unwrap();
    assert!(
        events.contains(&ProcessEvent::Exited { process }),
        "{events:#?}"
    );
}

fn a_late_dlopen_is_reported() {
    let libraries = Libraries::new();
    let mut discovery = Discovery::start().unwrap();
    let mut helper = Helper::spawn();
    assert_eq!(find_cuda_of(&discovery.scan().unwrap(), helper.pid()), None);
    helper.load(&libraries.cuda_path());
    let (_, file) = poll_for_cuda(&mut discovery, helper.pid());
    assert_same_file(&file, &libraries.cuda_path());
    assert_eq!(find_cuda_of(&discovery.scan().unwrap(), helper.pid()), None);
    assert_eq!(discovery.missed_by_events(), 0);
}

fn a_preloaded_library_is_reported() {
    let libraries = Libraries::new();
    let mut discovery = Discovery::start().unwrap();
    let helper = Helper::spawn_with(Helper::command().env("LD_PRELOAD", libraries.cuda_path()));
    let (_, file) = poll_for_cuda(&mut discovery, helper.pid());
    assert_same_file(&file, &libraries.cuda_path());
}

fn forks_and_exits_are_reported() {
    let libraries = Libraries::new();
    let mut discovery = Discovery::start().unwrap();
    let mut helper = Helper::spawn();
    helper.load(&libraries.cuda_path());
    let (parent, _) = poll_for_cuda(&mut discovery, helper.pid());
    helper.run("fork");
    let child = poll_until(&mut discovery, |events| {
        let child = events.iter().find_map(|event| match event {
            ProcessEvent::Forked { parent: p, child } if *p == parent => Some(*child),
            _ => None,
        })?;
        find_cuda_of(events, child.pid)
    });
    assert_same_file(&child.1, &libraries.cuda_path());
    helper.kill();
    poll_until(&mut discovery, |events| {
        let exited = |process| events.contains(&ProcessEvent::Exited { process });
        (exited(parent) && exited(child.0)).then_some(())
    });
}

fn an_exec_is_reported() {
    let libraries = Libraries::new();
    for order in ["execute", "execute-in-a-thread"] {
        let mut discovery = Discovery::start().unwrap();
        let mut helper = Helper::spawn();
        helper.load(&libraries.cuda_path());
        let (process, _) = poll_for_cuda(&mut discovery, helper.pid());
        helper.send_order(order);
        poll_for(&mut discovery, &ProcessEvent::Executed { process });
        assert!(process.is_alive());
        let events = discovery.scan().unwrap();
        assert_eq!(find_cuda_of(&events, process.pid), None);
    }
}

fn a_thread_is_not_reported_as_a_process() {
    let libraries = Libraries::new();
    let mut discovery = Discovery::start().unwrap();
    let mut helper = Helper::spawn();
    helper.load(&libraries.cuda_path());
    let (process, _) = poll_for_cuda(&mut discovery, helper.pid());
    helper.run("end-a-thread");
    helper.load(&libraries.nccl_path());
    poll_until(&mut discovery, |events| {
        let of_thread = |event: &&ProcessEvent| match event {
            ProcessEvent::Forked { parent, .. } => *parent == process,
            event => **event == ProcessEvent::Exited { process },
        };
        assert_eq!(events.iter().find(of_thread), None);
        find_library(events, process.pid, LibraryKind::Nccl)
    });
}

fn a_replaced_library_is_reported_again() {
    let libraries = Libraries::new();
    let library = libraries.cuda_path();
    let mut old = Helper::spawn();
    old.load(&library);
    let old_content = fs::read(&library).unwrap();
    install_libraries(libraries.0.path(), Prologue::Sub).unwrap();
    let mut new = Helper::spawn();
    new.load(&library);
    let events = Discovery::start().unwrap().scan().unwrap();
    let (_, old_file) = find_cuda_of(&events, old.pid()).unwrap();
    let (_, new_file) = find_cuda_of(&events, new.pid()).unwrap();
    assert_eq!(old_file.device, new_file.device);
    assert_ne!(old_file.inode, new_file.inode);
    assert_eq!(
        old_file.path,
        PathBuf::from(format!("{} (deleted)", library.display()))
    );
    assert!(fs::read(&old_file.map_files).unwrap() == old_content);
    assert_same_file(&new_file, &library);
}

/// Runs a shell script in a mount namespace of its own, and then a helper there.
fn helper_in_namespace(script: &str) -> Helper {
    let program = env::current_exe().unwrap();
    let script = format!(
        "set -e; {script}; exec {} {}",
        program.display(),
        helper::HELPER_ARGUMENT
    );
    Helper::spawn_with(Command::new("unshare").args(["--mount", "sh", "-c", &script]))
}

fn files_in_a_mount_namespace_are_found() {
    let libraries = Libraries::new();
    let outside = libraries.cuda_path();
    let place = tempfile::tempdir().unwrap();
    let place = place.path().display();
    let mut discovery = Discovery::start().unwrap();
    let mut helper = helper_in_namespace(&format!(
        "mount -t tmpfs tmpfs {place}; cp {} {place}/libcuda.so.1",
        outside.display()
    ));
    let inside = PathBuf::from(format!("{place}/libcuda.so.1"));
    helper.load(&inside);
    let (_, file) = poll_for_cuda(&mut discovery, helper.pid());
    assert_eq!(file.path, inside);
    assert!(!inside.exists());
    assert!(fs::read(&file.map_files).unwrap() == fs::read(outside).unwrap());
}

/// Container images are layers of an overlayfs: a probe is attached to the file in its layer.
fn the_file_under_overlayfs_is_reported() {
    let libraries = Libraries::new();
    let lower = libraries.cuda_path();
    let place = tempfile::tempdir().unwrap();
    let place = place.path().display();
    let mut discovery = Discovery::start().unwrap();
    let mut helper = helper_in_namespace(&format!(
        "mount -t tmpfs tmpfs {place}; mkdir {place}/upper {place}/work {place}/merged; \
         mount -t overlay -o lowerdir={},upperdir={place}/upper,workdir={place}/work overlay \
         {place}/merged",
        libraries.0.path().display(),
    ));
    let merged = PathBuf::from(format!("{place}/merged/libcuda.so.1"));
    helper.load(&merged);
    let (_, file) = poll_for_cuda(&mut discovery, helper.pid());
    let real = fs::metadata(&lower).unwrap();
    assert_eq!((file.device, file.inode), (real.dev(), real.ino()));
    assert_eq!(file.path, merged);
    assert!(fs::read(&file.map_files).unwrap() == fs::read(lower).unwrap());
}

fn overlayfs() -> Need {
    let check = || match fs::read_to_string("/proc/filesystems") {
        Ok(list) if list.contains("\toverlay\n") => Ok(()),
        _ => Err("this kernel has no overlayfs".to_owned()),
    };
    Need {
        name: "overlayfs",
        check,
    }
}

fn a_copied_dynamic_loader_is_probed() {
    let libraries = Libraries::new();
    let loader = interpreter();
    let place = tempfile::tempdir().unwrap();
    let copy = place.path().join(loader.file_name().unwrap());
    fs::copy(&loader, &copy).unwrap();
    let mut discovery = Discovery::start().unwrap();
    let inode = fs::metadata(&copy).unwrap().ino();
    let is_watched = |discovery: &Discovery| {
        let mut loaders = discovery.loaders();
        loaders.any(|loader| loader.inode == inode && loader.refusal.is_none())
    };
    let mount = format!(
        "mount --bind {} {}; sleep 0.2",
        copy.display(),
        loader.display()
    );
    // The second helper gets the number of the first one's mount namespace, unless other tests create
    // namespaces meanwhile.
    for _ in 0..2 {
        let starting = {
            let mount = mount.clone();
            thread::spawn(move || helper_in_namespace(&mount))
        };
        // Events of the shell are handled before the shell execs the helper.
        while !starting.is_finished() {
            discovery.poll(Duration::from_millis(10)).unwrap();
        }
        let mut helper = starting.join().unwrap();
        // The start of the helper is the only sign of the new loader.
        poll_while(&mut discovery, |discovery| !is_watched(discovery));
        helper.load(&libraries.cuda_path());
        let (_, file) = poll_for_cuda(&mut discovery, helper.pid());
        assert_same_file(&file, &libraries.cuda_path());
        helper.kill();
        discovery.scan().unwrap();
        assert!(!is_watched(&discovery));
    }
}

/// The dynamic loader that this program was started by.
fn interpreter() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5));
    let mut loaders = path.filter(|path| path.contains("/ld-"));
    loaders.next().expect("a dynamic program").into()
}

fn poll_while(discovery: &mut Discovery, condition: impl Fn(&Discovery) -> bool) {
    eventually("the condition ends", || {
        if condition(discovery) {
            discovery.poll(Duration::from_millis(100)).unwrap();
        }
        !condition(discovery)
    });
}

fn a_process_whose_first_thread_exited_is_found() {
    let libraries = Libraries::new();
    let mut helper = Helper::spawn();
    helper.load(&libraries.cuda_path());
    helper.run("lose-the-leader");
    let stat = format!("/proc/{}/stat", helper.pid());
    eventually("the leader is a zombie", || {
        fs::read_to_string(&stat).unwrap().contains(") Z ")
    });
    for start in [Discovery::start, Discovery::start_without_iterator] {
        let mut discovery = start().unwrap();
        let (process, file) = find_cuda_of(&discovery.scan().unwrap(), helper.pid()).unwrap();
        assert_same_file(&file, &libraries.cuda_path());
        assert!(process.is_alive());
    }
}

fn procfs_and_iterator_agree() {
    let libraries = Libraries::new();
    let mut helper = Helper::spawn();
    let mut iterator = Discovery::start().unwrap();
    let mut procfs = Discovery::start_without_iterator().unwrap();
    assert!(iterator.uses_iterator() && !procfs.uses_iterator());
    helper.load(&libraries.cuda_path());
    let found_by_iterator = poll_for_cuda(&mut iterator, helper.pid());
    let found_by_procfs = poll_for_cuda(&mut procfs, helper.pid());
    assert_eq!(found_by_iterator, found_by_procfs);
    let mut procfs = Discovery::start_without_iterator().unwrap();
    let scanned = find_cuda_of(&procfs.scan().unwrap(), helper.pid());
    assert_eq!(scanned, Some(found_by_iterator));
}

/// Runs a program that does nothing.
fn run_short_process() {
    let status = Command::new("true").stdin(Stdio::null()).status().unwrap();
    assert!(status.success());
}

fn a_thousand_short_processes_leave_no_entries() {
    let libraries = Libraries::new();
    let mut discovery = Discovery::start().unwrap();
    let storm = thread::spawn(|| (0..1000).for_each(|_| run_short_process()));
    while !storm.is_finished() {
        let _ = discovery.poll(Duration::from_millis(10)).unwrap();
    }
    storm.join().unwrap();
    let mut helper = Helper::spawn();
    helper.load(&libraries.cuda_path());
    let (process, _) = poll_for_cuda(&mut discovery, helper.pid());
    helper.kill();
    poll_for(&mut discovery, &ProcessEvent::Exited { process });
}

fn a_full_event_buffer_causes_a_scan() {
    let libraries = Libraries::new();
    let mut discovery = Discovery::start().unwrap();
    let mut helper = Helper::spawn();
    let mut left = 20_000;
    while discovery.lost_event_count() == 0 {
        assert!(left > 0, "nothing was lost");
        run_short_process();
        left -= 1;
    }
    // The event of this load is lost, because the ring buffer is full.
    helper.load(&libraries.cuda_path());
    let events = discovery.poll(Duration::ZERO).unwrap();
    let (process, _) = find_cuda_of(&events, helper.pid()).unwrap();
    // From now on the ring buffer has room, and events arrive again.
    helper.load(&libraries.nccl_path());
    poll_until(&mut discovery, |events| {
        find_library(events, helper.pid(), LibraryKind::Nccl)
    });
    helper.kill();
    poll_for(&mut discovery, &ProcessEvent::Exited { process });
}

/// Until userspace handles an event of a process, further ones of that process are not needed.
fn loading_in_a_loop_loses_nothing() {
    let libraries = Libraries::new();
    let mut discovery = Discovery::start().unwrap();
    let mut helper = Helper::spawn();
    helper.run("load-and-unload libutil.so.1");
    helper.load(&libraries.cuda_path());
    assert_eq!(discovery.lost_event_count(), 0);
    poll_for_cuda(&mut discovery, helper.pid());
}

fn missing_privilege_is_reported() {
    let start = || {
        let none = CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        };
        rustix::thread::set_capabilities(None, none).unwrap();
        Discovery::start().err().map(|error| error.to_string())
    };
    // Capabilities belong to a thread.
    let refusal = thread::spawn(start).join().unwrap().unwrap();
    assert!(refusal.contains("run as root"), "{refusal}");
}
