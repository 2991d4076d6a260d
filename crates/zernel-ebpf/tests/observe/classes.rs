//! Schedulers can read the classes of threads, from task states and from hints.

use std::time::{Duration, Instant};
use std::{fs, thread};

use libbpf_rs::{MapCore as _, MapHandle};
use zernel_ebpf::observer::{Observer, ObserverOptions};
use zernel_phase::ZernelTaskState;
use zernel_phase::class::{ClassReason, ClassWord, TaskClass, TaskRole};
use zernel_phase::shared::RawTaskState;
use zernel_softgpu::install::Prologue;
use zernel_testkit::eventually;
use zernel_testkit::target::{
    Driver, Stage, Target, TargetRole, call, end_part_and_wait, out_pointer, stage_directory,
};

use crate::bpffs::{MountedBpffs, open_pinned_map, set_value_of_task, value_of_task};
use crate::harness::{options_that_count_everything, start_observer};

pub(crate) const CLASS_ROLES: &[(&str, TargetRole)] = &[
    ("trains_with_a_loader", target_train_with_a_loader),
    ("reads_its_loss", target_read_loss),
];

/// How long each part of the target's work takes.
const PART_TIME: Duration = Duration::from_millis(1_500);
const LOADER_PID_FILE: &str = "loader";

/// Forks a loader, then waits for the GPU, then launches: three parts.
fn target_train_with_a_loader(driver: &Driver, _rounds: u64) {
    driver.open_first_device();
    let device = driver.allocate_memory(4096);
    driver.copy_to_device(device, &mut [0; 4096]);
    fork_loader();
    end_part_and_wait();
    driver.launch_kernel(driver.load_kernel("slow", PART_TIME));
    driver.synchronize();
    end_part_and_wait();
    let kernel = driver.load_empty_kernel();
    let end = Instant::now() + PART_TIME;
    while Instant::now() < end {
        driver.launch_kernel(kernel);
        let next = Instant::now() + Duration::from_millis(1);
        while Instant::now() < next {
            std::hint::spin_loop();
        }
    }
}

/// Time of the kernels of a step that ends with reading its loss.
const STEP_TIME: Duration = Duration::from_millis(5);

/// Steps whose loss is read into pageable memory, as `item()` does: the copy returns when the GPU is done.
fn target_read_loss(driver: &Driver, steps: u64) {
    driver.open_first_device();
    let device = driver.allocate_memory(4096);
    let kernel = driver.load_kernel("step", STEP_TIME);
    let mut loss = 0_u32;
    end_part_and_wait();
    for _ in 0..steps {
        driver.launch_kernel(kernel);
        let copied = out_pointer(&mut loss);
        let bytes = size_of_val(&loss);
        call!(
            driver.cuda(),
            "cuMemcpyDtoHAsync_v2",
            copied,
            device,
            bytes,
            0
        );
        driver.synchronize();
    }
}

/// A process that works a little, ten times a second, until its parent dies.
fn fork_loader() {
    // SAFETY: this program has one thread, so its child may do whatever it could.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let signal = Some(rustix::process::Signal::KILL);
        let _ = rustix::process::set_parent_process_death_signal(signal);
        loop {
            thread::sleep(Duration::from_millis(100));
        }
    }
    fs::write(stage_directory().join(LOADER_PID_FILE), pid.to_string()).expect("our directory");
}

fn loader_pid(stage: &Stage) -> u32 {
    let pid = fs::read_to_string(stage.path().join(LOADER_PID_FILE)).expect("it has forked");
    pid.parse().expect("a pid")
}

fn class_of(observer: &Observer, pid: u32) -> (TaskClass, ClassReason, RawTaskState) {
    let state = observer.task_state(pid).expect("the map is there");
    let state = state.expect("it is observed");
    let word = state.class_word_at(now_ns());
    (word.class(), word.reason(), state)
}

fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Starts one part of the target's work, and waits until a condition holds while the part runs.
fn run_part_until(target: &mut Target, what: &str, condition: impl FnMut() -> bool) {
    target.start_part();
    eventually(what, condition);
    target.wait_until_done();
}

pub(crate) fn classes_are_published() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let observer = start_observer(&options_that_count_everything(&stage));
    let mut target = stage.start_target("trains_with_a_loader", 1);
    let pid = target.pid();
    target.run_part();

    let loader = class_of(&observer, loader_pid(&stage));
    assert_eq!((loader.0, loader.1), (TaskClass::Feed, ClassReason::Loads));
    assert_eq!(loader.2.role(), TaskRole::Loader);
    assert_eq!(loader.2.trainer, pid);

    run_part_until(&mut target, "it spins until the GPU is done", || {
        let (class, reason, state) = class_of(&observer, pid);
        let word = state.class_word_at(now_ns());
        class == TaskClass::GpuWait
            && reason == ClassReason::GpuSync
            && word.has_flags(ClassWord::IN_SYNC | ClassWord::DRIVES_STEPS)
    });
    run_part_until(&mut target, "it launches", || {
        let (class, reason, state) = class_of(&observer, pid);
        assert_eq!(state.trainer, pid);
        (class, reason) == (TaskClass::Critical, ClassReason::Computes)
            && !state.class_word.has_flags(ClassWord::IN_SYNC)
            && state.role() == TaskRole::Trainer
    });
}

pub(crate) fn the_gpu_of_a_thread_is_published() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let mut observer = start_observer(&options_that_count_everything(&stage));
    let mut target = stage.start_target("trains_with_a_loader", 1);
    let pid = target.pid();
    target.run_part();
    let gpu_of = |observer: &Observer, pid| {
        let state = observer.task_state(pid).expect("the map is there");
        ZernelTaskState::from(&state.expect("it is observed")).gpu_id
    };
    assert_eq!(gpu_of(&observer, loader_pid(&stage)), None);
    // The kernel passes the GPU to the loader's state once per second, when a thread of the loader gets a CPU.
    eventually("the loader has the GPU of its trainer", || {
        observer.read_counts().expect("maps can be read");
        observer.refresh_gpus();
        gpu_of(&observer, loader_pid(&stage)) == Some(0)
    });
    run_part_until(&mut target, "the trainer has a GPU", || {
        gpu_of(&observer, pid) == Some(0)
    });
}

fn hint_of(map: &MapHandle, pid: u32) -> Option<u64> {
    let value = value_of_task(map, pid)?;
    assert_eq!(value.len(), 32, "the size that scx_layered expects");
    Some(u64::from_ne_bytes(
        value[..8].try_into().expect("eight bytes"),
    ))
}

/// The values are documented, and in the configurations of users.
const NO_HINT: u64 = 0;
const CRITICAL_HINT: u64 = 1001;
const FEED_HINT: u64 = 1002;
const GPU_WAIT_HINT: u64 = 1003;

pub(crate) fn classes_are_written_as_hints() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let bpffs = MountedBpffs::mount(stage.path().join("bpffs"));
    let options = ObserverOptions {
        hints: Some(bpffs.0.join("hints")),
        pins: bpffs.0.join("zernel"),
        ..options_that_count_everything(&stage)
    };
    let observer = start_observer(&options);
    let map = open_pinned_map(&bpffs.0.join("hints"));
    // The kernel's name of scx_layered's own map. If the map had another name, scx_layered would not start.
    assert_eq!(map.name(), "scx_layered_tas");
    let mut target = stage.start_target("trains_with_a_loader", 1);
    let pid = target.pid();
    target.run_part();
    let loader = loader_pid(&stage);
    assert_eq!(hint_of(&map, loader), Some(FEED_HINT));
    assert_eq!(hint_of(&map, std::process::id()), None);
    run_part_until(&mut target, "a hint for a GPU wait", || {
        hint_of(&map, pid) == Some(GPU_WAIT_HINT)
    });
    run_part_until(&mut target, "a hint for a launching thread", || {
        hint_of(&map, pid) == Some(CRITICAL_HINT)
    });
    drop(observer);
    for pid in [pid, loader] {
        assert_eq!(
            hint_of(&map, pid),
            Some(NO_HINT),
            "an exit clears all hints"
        );
    }

    // A killed observer leaves its hints behind. The next observer clears these hints, and hints of other programs
    // must stay.
    let foreign = 7;
    for (pid, value) in [(pid, CRITICAL_HINT), (loader, foreign)] {
        let mut hint = vec![0; 32];
        hint[..8].copy_from_slice(&value.to_ne_bytes());
        set_value_of_task(&map, pid, &hint);
    }
    let _next = start_observer(&options);
    assert_eq!(
        hint_of(&map, pid),
        Some(NO_HINT),
        "the next start clears them"
    );
    assert_eq!(hint_of(&map, loader), Some(foreign));
}

/// An unusable path is an error that names the path.
pub(crate) fn unusable_hints_are_refused() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let bpffs = MountedBpffs::mount(stage.path().join("bpffs"));
    let path = bpffs.0.join("other");
    let _other = crate::shared::pin_array(&path, &[0; 8]);
    for path in [path, stage.path().join("no-bpffs")] {
        let refused = Observer::start(&ObserverOptions {
            hints: Some(path.clone()),
            pins: bpffs.0.join("zernel"),
            ..options_that_count_everything(&stage)
        });
        let error = refused.err().expect("no hints there").to_string();
        assert!(error.contains(path.to_str().expect("text")), "{error}");
    }
}

/// The target spins in one part of its work and launches in another. The target's thread is always runnable, so the
/// times of both classes add up to the length of a part.
pub(crate) fn decisions_are_counted() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let mut observer = start_observer(&ObserverOptions {
        counts_decisions: true,
        ..options_that_count_everything(&stage)
    });
    let mut target = stage.start_target("trains_with_a_loader", 1);
    for _ in 0..3 {
        target.run_part();
    }
    observer.read_counts().expect("maps can be read");
    let read = observer.decisions();
    let decisions_of = |pid: u32| {
        let found = read.iter().find(|process| process.pid == pid);
        found.expect("it was observed")
    };
    let trainer = decisions_of(target.pid());
    for class in [TaskClass::GpuWait, TaskClass::Critical] {
        let decisions = trainer.classes[&class];
        let seconds = Duration::from_nanos(decisions.run_ns + decisions.delay_ns).as_secs_f64();
        let ratio = seconds / PART_TIME.as_secs_f64();
        assert!((0.9..1.1).contains(&ratio), "{class}: {decisions:?}");
        assert_eq!(decisions.would_lend > 0, class == TaskClass::GpuWait);
        assert!(decisions.saved_ns <= decisions.delay_ns, "{decisions:?}");
    }
    let loader = decisions_of(loader_pid(&stage));
    assert_eq!(loader.trainer, target.pid());
    // The loader wakes up ten times a second.
    assert!(loader.classes[&TaskClass::Feed].wakeups >= 10, "{loader:?}");
}

pub(crate) fn reading_the_loss_is_a_gpu_wait() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let mut observer = start_observer(&ObserverOptions {
        counts_decisions: true,
        ..options_that_count_everything(&stage)
    });
    let steps = 200;
    let mut target = stage.start_target("reads_its_loss", steps);
    target.run_part();
    target.run_part();
    observer.read_counts().expect("maps can be read");
    let read = observer.decisions();
    let process = read.iter().find(|process| process.pid == target.pid());
    let waits = process.expect("it was observed").classes[&TaskClass::GpuWait];
    let seconds = Duration::from_nanos(waits.run_ns + waits.delay_ns).as_secs_f64();
    // On a busy machine the thread waits longer, for a CPU.
    assert!(
        seconds > 0.9 * steps as f64 * STEP_TIME.as_secs_f64(),
        "{waits:?}"
    );
}
