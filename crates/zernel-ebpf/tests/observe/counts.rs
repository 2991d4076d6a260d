//! Every probed call is counted, however many calls a program makes.

use std::thread;
use std::time::Instant;

use zernel_ebpf::observer::{ProcessCoverage, UprobeKind};
use zernel_softgpu::install::Prologue;
use zernel_testkit::target::{Driver, Stage, TargetRole, call, out_pointer, try_call};

use crate::harness::{
    assert_exact, find_process, observe_stage, observe_stage_with_uprobe_kind, observed_calls,
    run_next_parts,
};

pub(crate) const CALL_COUNT_TARGETS: &[(&str, TargetRole)] = &[
    ("everything", target_make_every_kind_of_call),
    ("launches", target_launch_only),
    ("launches_of_two_threads", target_launches_of_two_threads),
];

/// Uses every kind of call once a round, some of them so that they fail.
pub(crate) fn target_make_every_kind_of_call(driver: &Driver, rounds: u64) {
    driver.open_first_device();
    let function = driver.load_empty_kernel();
    let cuda = driver.cuda();
    let mut host = vec![0_u8; 1 << 16];
    let mut random = fastrand::Rng::with_seed(u64::from(std::process::id()));
    for _ in 0..rounds {
        let bytes = random.u64(64..1 << 16);
        let (mut first, mut second, mut third, mut pitch) = (0_u64, 0_u64, 0_u64, 0_u64);
        let device = driver.allocate_memory(bytes);
        call!(cuda, "cuMemAllocAsync", out_pointer(&mut first), bytes, 0);
        call!(
            cuda,
            "cuMemAllocManaged",
            out_pointer(&mut second),
            bytes,
            1
        );
        call!(
            cuda,
            "cuMemAllocPitch_v2",
            out_pointer(&mut third),
            out_pointer(&mut pitch),
            100,
            7,
            4
        );
        try_call!(cuda, "cuMemAlloc_v2", out_pointer(&mut pitch), 1_u64 << 60);
        try_call!(cuda, "cuMemFree_v2", 12345);
        call!(cuda, "cuMemcpyHtoD_v2", device, host.as_mut_ptr(), bytes);
        call!(cuda, "cuMemcpyDtoH_v2", host.as_mut_ptr(), device, bytes);
        call!(
            cuda,
            "cuMemcpyHtoDAsync_v2",
            device,
            host.as_mut_ptr(),
            bytes / 2,
            0
        );
        call!(cuda, "cuMemcpyDtoDAsync_v2", device, second, bytes / 3, 0);
        call!(cuda, "cuMemcpyAsync", second, device, bytes / 4, 0);
        let (mut plane, mut block) = (memcpy_2d(device, second), memcpy_3d(device, second));
        call!(cuda, "cuMemcpy2D_v2", plane.as_mut_ptr());
        call!(cuda, "cuMemcpy2DAsync_v2", plane.as_mut_ptr(), 0);
        call!(cuda, "cuMemcpy3D_v2", block.as_mut_ptr());
        call!(cuda, "cuMemcpy3DAsync_v2", block.as_mut_ptr(), 0);
        driver.launch_kernel(function);
        driver.launch_kernel(function);
        call!(cuda, "cuStreamSynchronize", 0);
        call!(cuda, "cuCtxSynchronize");
        driver.free_memory(device);
        call!(cuda, "cuMemFreeAsync", first, 0);
        driver.free_memory(second);
        driver.free_memory(third);
    }
    driver.allocate_memory(4096);
}

/// A `CUDA_MEMCPY2D` of two rows of 7 bytes each, from device memory to device memory.
fn memcpy_2d(from: u64, to: u64) -> [u64; 16] {
    const DEVICE_MEMORY_TYPE: u64 = 2;
    let mut words = [0; 16];
    [words[2], words[4], words[6]] = [DEVICE_MEMORY_TYPE, from, 8];
    [words[9], words[11], words[13]] = [DEVICE_MEMORY_TYPE, to, 8];
    [words[14], words[15]] = [7, 2];
    words
}

/// A `CUDA_MEMCPY3D` of three layers, each of two rows of 7 bytes.
fn memcpy_3d(from: u64, to: u64) -> [u64; 25] {
    const DEVICE_MEMORY_TYPE: u64 = 2;
    let mut words = [0; 25];
    [words[4], words[6], words[9], words[10]] = [DEVICE_MEMORY_TYPE, from, 8, 2];
    [words[15], words[17], words[20], words[21]] = [DEVICE_MEMORY_TYPE, to, 8, 2];
    [words[22], words[23], words[24]] = [7, 2, 3];
    words
}

/// Only launches.
pub(crate) fn target_launch_only(driver: &Driver, rounds: u64) {
    driver.open_first_device();
    let function = driver.load_empty_kernel();
    for _ in 0..rounds {
        driver.launch_kernel(function);
    }
    call!(driver.cuda(), "cuCtxSynchronize");
}

fn target_launches_of_two_threads(driver: &Driver, rounds: u64) {
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| target_launch_only(driver, rounds / 2));
        }
    });
}

pub(crate) fn every_call_is_counted_with_every_uprobe_kind() {
    for rung in UprobeKind::BEST_FIRST {
        let stage = Stage::new(Prologue::Push);
        let mut observer = observe_stage_with_uprobe_kind(&stage, rung);
        let mut targets: Vec<_> = (0..4)
            .map(|_| stage.start_target("everything", 200))
            .collect();
        run_next_parts(&mut targets);
        assert_exact(&mut observer, &stage, &targets);
        for target in &targets {
            let process = find_process(&observer, target.pid());
            assert_eq!(
                process.coverage,
                ProcessCoverage::Complete,
                "{}",
                rung.name()
            );
            assert_eq!(
                process.probes.gpu_mem.by_device[&0].total.current_bytes,
                4096
            );
        }
    }
}

pub(crate) fn a_million_calls_of_four_processes_are_counted() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut targets: Vec<_> = (0..4)
        .map(|_| stage.start_target("everything", 14_000))
        .collect();
    run_next_parts(&mut targets);
    assert_exact(&mut observer, &stage, &targets);
    let calls = targets.iter().flat_map(|target| {
        let seen = observed_calls(find_process(&observer, target.pid()));
        seen.into_values().map(|count| count.calls)
    });
    let calls: u64 = calls.sum();
    assert!(calls >= 1_000_000, "{calls}");
}

/// Calls as fast as this machine can. The rate is printed, not asserted.
pub(crate) fn no_call_is_lost_at_full_speed() {
    const PROCESS_COUNT: u64 = 4;
    const LAUNCHES_PER_PROCESS: u64 = 400_000;
    let stage = Stage::with_machine_alone(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut targets: Vec<_> = (0..PROCESS_COUNT)
        .map(|_| stage.start_target("launches_of_two_threads", LAUNCHES_PER_PROCESS))
        .collect();
    let begin = Instant::now();
    run_next_parts(&mut targets);
    let elapsed = begin.elapsed().as_secs_f64();
    assert_exact(&mut observer, &stage, &targets);
    for target in &targets {
        let seen = observed_calls(find_process(&observer, target.pid()));
        assert_eq!(seen["cuLaunchKernel"].calls, LAUNCHES_PER_PROCESS);
    }
    let rate = (PROCESS_COUNT * LAUNCHES_PER_PROCESS) as f64 / elapsed;
    eprintln!("every launch counted at {rate:.0} launches a second");
}
