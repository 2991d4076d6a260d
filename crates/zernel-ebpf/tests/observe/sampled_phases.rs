//! Processes that use a GPU and whose calls are not probed have sampled phases.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use zernel_ebpf::observer::{ObserverOptions, ObserverThread};
use zernel_ebpf::task_reader::TaskReader;
use zernel_phase::class::{ClassReason, ClassWord, TaskClass};
use zernel_phase::shared::RawTaskState;
use zernel_softgpu::install::Prologue;
use zernel_testkit::eventually;
use zernel_testkit::target::{
    Driver, Stage, Target, TargetRole, call, end_part_and_wait, stage_directory,
};

use crate::bpffs::{MountedBpffs, open_pinned_map, value_of_task};
use crate::harness::start_observer;

pub(crate) const SAMPLED_PHASE_ROLES: &[(&str, TargetRole)] = &[
    ("observes_with_samples", target_observe_with_samples),
    ("observes_without_samples", target_observe_without_samples),
    (
        "blocks_until_the_gpu_is_done",
        target_block_until_the_gpu_is_done,
    ),
];

/// `CU_CTX_SCHED_BLOCKING_SYNC`: a thread blocks until the GPU is done.
const BLOCKING_SYNC: u64 = 4;
const CRITICAL_HINT: u64 = 1001;

fn target_observe_with_samples(_driver: &Driver, _rounds: u64) {
    observe_until_killed(true);
}

fn target_observe_without_samples(_driver: &Driver, _rounds: u64) {
    observe_until_killed(false);
}

/// Observes as the daemon does, with the NVML that the environment names.
fn observe_until_killed(samples_phases: bool) {
    let observer = start_observer(&ObserverOptions {
        pins: stage_directory().join("bpffs/zernel"),
        hints: Some(stage_directory().join("bpffs/hints")),
        samples_phases,
        ..ObserverOptions::default()
    });
    let _observer = ObserverThread::start(observer, Duration::from_millis(500)).expect("it runs");
    end_part_and_wait();
}

/// Opens a device. In the next part the GPU is always busy, and the thread is blocked almost all the time.
fn target_block_until_the_gpu_is_done(driver: &Driver, rounds: u64) {
    call!(driver.cuda(), "cuInit", 0);
    call!(
        driver.cuda(),
        "cuDevicePrimaryCtxSetFlags_v2",
        0,
        BLOCKING_SYNC
    );
    driver.open_first_device();
    let kernel = driver.load_kernel("slow", Duration::from_millis(20));
    end_part_and_wait();
    for _ in 0..rounds {
        driver.launch_kernel(kernel);
        driver.synchronize();
    }
}

/// Makes a library one that programs can load and probes cannot be attached to: the headers that name its symbols for
/// other programs than the loader are beyond its end.
fn make_unreadable_for_probes(library: &Path) {
    const SECTION_HEADERS_FIELD: u64 = 40;
    let content = fs::read(library).expect("it is there");
    fs::remove_file(library).expect("ours");
    fs::write(library, &content).expect("ours");
    let file = fs::OpenOptions::new().write(true).open(library);
    let beyond = (2 * content.len() as u64).to_le_bytes();
    let written = file.expect("ours").write_at(&beyond, SECTION_HEADERS_FIELD);
    assert_eq!(written.expect("ours"), beyond.len());
}

fn start_observing(stage: &Stage, role: &str) -> Target {
    let mut command = stage.target_command(role, 0);
    command.env(
        "ZERNEL_NVML_LIBRARY",
        stage.library_path("libnvidia-ml.so.1"),
    );
    let mut observer = Target::start(&mut command);
    observer.run_part();
    observer
}

fn class_of_state(state: &RawTaskState) -> ClassWord {
    state.class_word_at(TaskReader::now_ns())
}

pub(crate) fn a_process_that_cannot_be_probed_is_sampled() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    make_unreadable_for_probes(&stage.library_path("libcuda.so.1"));
    let bpffs = MountedBpffs::mount(stage.path().join("bpffs"));
    let observer = start_observing(&stage, "observes_with_samples");
    let reader = TaskReader::open(&bpffs.0.join("zernel")).expect("the maps are pinned");
    let mut target = stage.start_target("blocks_until_the_gpu_is_done", 600);
    let pid = target.pid();
    let state_of = || reader.state_of(pid).expect("the map is there");
    target.run_part();
    target.start_part();
    eventually("it waits for its GPU, as the sampled rule sees it", || {
        state_of().is_some_and(|state| {
            let word = class_of_state(&state);
            word.class() == TaskClass::Critical
                && word.reason() == ClassReason::GpuSync
                && word.has_flags(ClassWord::SAMPLED)
                && state.gpu_id == 0
                && state.gpu_utilization > 80
        })
    });
    let hints = open_pinned_map(&bpffs.0.join("hints"));
    let hint = value_of_task(&hints, pid).expect("it has a hint");
    assert_eq!(hint[..8], CRITICAL_HINT.to_ne_bytes());

    observer.kill();
    eventually("without an observer the class expires", || {
        let word = class_of_state(&state_of().expect("its storage stays"));
        word.class() == TaskClass::Other && !word.has_flags(ClassWord::SAMPLED)
    });
    assert!(!reader.is_observed().expect("the map is there"));
}

pub(crate) fn a_probed_call_ends_samples() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let bpffs = MountedBpffs::mount(stage.path().join("bpffs"));
    // The first calls of the target are not observed.
    let mut target = stage.start_target("blocks_until_the_gpu_is_done", 600);
    let pid = target.pid();
    target.run_part();
    let _observer = start_observing(&stage, "observes_with_samples");
    let reader = TaskReader::open(&bpffs.0.join("zernel")).expect("the maps are pinned");
    let state_of = || reader.state_of(pid).expect("the map is there");
    eventually("it is sampled while it makes no calls", || {
        state_of().is_some_and(|state| class_of_state(&state).has_flags(ClassWord::SAMPLED))
    });
    target.start_part();
    eventually("its calls decide", || {
        let word = class_of_state(&state_of().expect("it is observed"));
        word.has_flags(ClassWord::IN_SYNC | ClassWord::BLOCKED | ClassWord::DRIVES_STEPS)
            && !word.has_flags(ClassWord::SAMPLED)
    });
    for _ in 0..50 {
        let word = class_of_state(&state_of().expect("it is observed"));
        assert!(!word.has_flags(ClassWord::SAMPLED), "{word:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

pub(crate) fn samples_are_taken_on_request_only() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    make_unreadable_for_probes(&stage.library_path("libcuda.so.1"));
    let bpffs = MountedBpffs::mount(stage.path().join("bpffs"));
    let _observer = start_observing(&stage, "observes_without_samples");
    let reader = TaskReader::open(&bpffs.0.join("zernel")).expect("the maps are pinned");
    let mut target = stage.start_target("blocks_until_the_gpu_is_done", 150);
    target.run_part();
    target.run_part();
    let state = reader.state_of(target.pid()).expect("the map is there");
    assert_eq!(state, None, "it is not observed");
}
