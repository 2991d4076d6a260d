//! GPU memory by process, device and calling library.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use zernel_ebpf::metrics::{self, TextFormat};
use zernel_ebpf::observer::{GovernorOptions, Observer, ObserverOptions};
use zernel_model::snapshot::Scope;
use zernel_softgpu::config;
use zernel_softgpu::install::Prologue;
use zernel_testkit::target::{
    Driver, Stage, Target, TargetRole, call, end_part_and_wait, out_pointer, try_call,
};

use crate::harness::{
    ObserverOnThread, find_process, observe_stage, options_that_count_everything,
};

pub(crate) const MEMORY_ROLES: &[(&str, TargetRole)] = &[
    ("memory", target_allocates_every_kind),
    ("two_devices", target_allocates_on_two_devices),
    ("nested_contexts", target_allocates_in_nested_contexts),
    ("ending_contexts", target_destroys_contexts_with_memory),
    ("restless", target_switches_devices),
    ("pooled", target_allocates_from_pool),
    ("mapped_memory", target_maps_physical_memory),
    ("reused_address", target_allocates_at_the_same_address),
];

/// The smallest allocation of physical memory.
const PHYSICAL_PAGE_BYTES: u64 = 2 << 20;

/// The first words of `CUmemAllocationProp`: pinned memory of device 0.
#[repr(C)]
struct AllocationProperties([u32; 4], [u64; 2]);

fn target_allocates_every_kind(driver: &Driver, _rounds: u64) {
    let cuda = driver.cuda();
    driver.open_first_device();
    let first = driver.allocate_memory(1000);
    let second = driver.allocate_memory(2000);
    driver.free_memory(first);
    driver.allocate_memory(500);
    let mut of_nccl = 0_u64;
    call!(
        driver.nccl(),
        "ncclMemAlloc",
        out_pointer(&mut of_nccl),
        7000
    );
    end_part_and_wait();
    assert_ne!(
        try_call!(cuda, "cuMemFreeAsync", second, 0xdead_0000_u64),
        0
    );
    end_part_and_wait();
    let mut properties = AllocationProperties([1, 0, 1, 0], [0; 2]);
    let (mut handle, mut again, mut address) = (0_u64, 0_u64, 0_u64);
    call!(
        cuda,
        "cuMemCreate",
        out_pointer(&mut handle),
        PHYSICAL_PAGE_BYTES,
        out_pointer(&mut properties),
        0
    );
    call!(
        cuda,
        "cuMemAddressReserve",
        out_pointer(&mut address),
        PHYSICAL_PAGE_BYTES,
        0,
        0,
        0
    );
    call!(cuda, "cuMemMap", address, PHYSICAL_PAGE_BYTES, 0, handle, 0);
    call!(
        cuda,
        "cuMemRetainAllocationHandle",
        out_pointer(&mut again),
        address
    );
    call!(cuda, "cuMemRelease", again);
    end_part_and_wait();
    call!(cuda, "cuMemUnmap", address, PHYSICAL_PAGE_BYTES);
    call!(cuda, "cuMemRelease", handle);
    driver.free_memory(second);
}

/// The contexts of two devices, the first of which is current.
fn open_both_devices(driver: &Driver) -> [u64; 2] {
    let cuda = driver.cuda();
    let mut contexts = [0_u64; 2];
    call!(cuda, "cuInit", 0);
    for (device, context) in contexts.iter_mut().enumerate() {
        call!(
            cuda,
            "cuDevicePrimaryCtxRetain",
            out_pointer(context),
            device
        );
    }
    call!(cuda, "cuCtxSetCurrent", contexts[0]);
    contexts
}

fn target_allocates_on_two_devices(driver: &Driver, _rounds: u64) {
    let cuda = driver.cuda();
    let contexts = open_both_devices(driver);
    driver.allocate_memory(1000);
    call!(cuda, "cuCtxSetCurrent", contexts[1]);
    driver.allocate_memory(2000);
    call!(cuda, "cuCtxPushCurrent_v2", contexts[0]);
    driver.allocate_memory(300);
    let mut popped = 0_u64;
    call!(cuda, "cuCtxPopCurrent_v2", out_pointer(&mut popped));
    driver.allocate_memory(40);
}

/// Alternates between the devices: at depth `n`, `1 << n` bytes are allocated on device `n % 2` on the
/// way up, and `1000 << n` on the way down.
fn target_allocates_in_nested_contexts(driver: &Driver, depth: u64) {
    let cuda = driver.cuda();
    let contexts = open_both_devices(driver);
    driver.allocate_memory(1);
    for level in 1..=depth {
        call!(cuda, "cuCtxPushCurrent_v2", contexts[level as usize % 2]);
        driver.allocate_memory(1 << level);
    }
    for level in (0..depth).rev() {
        let mut popped = 0_u64;
        call!(cuda, "cuCtxPopCurrent_v2", out_pointer(&mut popped));
        driver.allocate_memory(1000 << level);
    }
}

/// Keeps memory from a pool and other memory. For `milliseconds` the target allocates from the pool and frees at once,
/// as often as it can.
fn target_allocates_from_pool(driver: &Driver, milliseconds: u64) {
    let cuda = driver.cuda();
    driver.open_first_device();
    driver.allocate_memory(1000);
    let take = |bytes: u64| {
        let mut address = 0_u64;
        call!(cuda, "cuMemAllocAsync", out_pointer(&mut address), bytes, 0);
        address
    };
    take(500);
    end_part_and_wait();
    let end = Instant::now() + Duration::from_millis(milliseconds);
    while Instant::now() < end {
        call!(cuda, "cuMemFreeAsync", take(64), 0);
    }
}

/// Switches to the other device and back about 2,000 times per second for `milliseconds`, then allocates on both.
fn target_switches_devices(driver: &Driver, milliseconds: u64) {
    let cuda = driver.cuda();
    let contexts = open_both_devices(driver);
    let switch_and_allocate = |bytes| {
        let mut popped = 0_u64;
        call!(cuda, "cuCtxPushCurrent_v2", contexts[1]);
        if bytes > 0 {
            driver.allocate_memory(bytes);
        }
        call!(cuda, "cuCtxPopCurrent_v2", out_pointer(&mut popped));
    };
    let end = Instant::now() + Duration::from_millis(milliseconds);
    while Instant::now() < end {
        switch_and_allocate(0);
        thread::sleep(Duration::from_micros(400));
    }
    driver.allocate_memory(1000);
    switch_and_allocate(300);
}

/// Memory in the device's own context and in another: each is freed with its context.
fn target_destroys_contexts_with_memory(driver: &Driver, _rounds: u64) {
    let cuda = driver.cuda();
    driver.open_first_device();
    driver.allocate_memory(1000);
    let mut context = 0_u64;
    call!(cuda, "cuCtxCreate_v2", out_pointer(&mut context), 0, 0);
    driver.allocate_memory(300);
    end_part_and_wait();
    call!(cuda, "cuCtxDestroy_v2", context);
    end_part_and_wait();
    call!(cuda, "cuDevicePrimaryCtxReset_v2", 0);
    end_part_and_wait();
    driver.open_first_device();
    driver.allocate_memory(500);
}

fn create_physical_memory(driver: &Driver) -> u64 {
    let (mut handle, mut properties) = (0_u64, AllocationProperties([1, 0, 1, 0], [0; 2]));
    let properties = out_pointer(&mut properties);
    call!(
        driver.cuda(),
        "cuMemCreate",
        out_pointer(&mut handle),
        PHYSICAL_PAGE_BYTES,
        properties,
        0
    );
    handle
}

/// Three pages: one is released before it is unmapped, one after, one is mapped twice.
fn target_maps_physical_memory(driver: &Driver, _rounds: u64) {
    let cuda = driver.cuda();
    driver.open_first_device();
    let handles = [
        create_physical_memory(driver),
        create_physical_memory(driver),
        create_physical_memory(driver),
    ];
    let mut address = 0_u64;
    call!(
        cuda,
        "cuMemAddressReserve",
        out_pointer(&mut address),
        4 * PHYSICAL_PAGE_BYTES,
        0,
        0,
        0
    );
    for (page, handle) in [0, 1, 2, 2]
        .map(|page| handles[page])
        .into_iter()
        .enumerate()
    {
        call!(
            cuda,
            "cuMemMap",
            address + page as u64 * PHYSICAL_PAGE_BYTES,
            PHYSICAL_PAGE_BYTES,
            0,
            handle,
            0
        );
    }
    assert_ne!(
        try_call!(
            cuda,
            "cuMemMap",
            address,
            PHYSICAL_PAGE_BYTES,
            0,
            handles[0],
            0
        ),
        0
    );
    assert_ne!(
        try_call!(cuda, "cuMemUnmap", address, PHYSICAL_PAGE_BYTES / 2),
        0
    );
    call!(cuda, "cuMemRelease", handles[0]);
    call!(cuda, "cuMemRelease", handles[2]);
    end_part_and_wait();
    call!(cuda, "cuMemUnmap", address, 3 * PHYSICAL_PAGE_BYTES);
    end_part_and_wait();
    call!(cuda, "cuMemRelease", handles[1]);
    end_part_and_wait();
    call!(
        cuda,
        "cuMemUnmap",
        address + 3 * PHYSICAL_PAGE_BYTES,
        PHYSICAL_PAGE_BYTES
    );
}

/// Size of an allocation whose address the driver gives out again at once.
const LARGE_ALLOCATION_BYTES: u64 = 64 << 20;

/// Allocates, frees the memory while the probes are detached, and gets memory at the same address.
fn target_allocates_at_the_same_address(driver: &Driver, _rounds: u64) {
    driver.open_first_device();
    let address = driver.allocate_memory(LARGE_ALLOCATION_BYTES);
    end_part_and_wait();
    driver.free_memory(address);
    end_part_and_wait();
    assert_eq!(driver.allocate_memory(LARGE_ALLOCATION_BYTES), address);
}

/// Bytes by calling library, from the metrics.
fn bytes_by_caller(observer: &Observer, pid: u32) -> BTreeMap<String, u64> {
    let text = metrics::metrics_text(&observer.snapshot(), Scope::All, TextFormat::Prometheus);
    let begin = format!("zernel_gpu_memory_caller_bytes{{pid=\"{pid}\",gpu_id=\"0\",caller=\"");
    let lines = text.lines().filter_map(|line| line.strip_prefix(&*begin));
    lines
        .map(|line| {
            let (caller, bytes) = line.split_once("\"} ").expect("a sample");
            (caller.to_owned(), bytes.parse().expect("a number"))
        })
        .collect()
}

/// The memory of the target's only device: bytes in use, and the peak.
fn memory_in_use_and_peak(observer: &mut Observer, target: &Target) -> (u64, u64) {
    observer.read_counts().expect("maps can be read");
    let total = &find_process(observer, target.pid())
        .probes
        .gpu_mem
        .by_device[&0]
        .total;
    (total.current_bytes, total.peak_bytes)
}

pub(crate) fn memory_is_accounted_to_its_caller() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("memory", 0);
    let pid = target.pid();
    target.run_part();
    assert_eq!(memory_in_use_and_peak(&mut observer, &target), (9500, 9500));
    observer.read_counts().expect("maps can be read");
    let expected = [("libnccl".to_owned(), 7000), ("observe".to_owned(), 2500)];
    assert_eq!(bytes_by_caller(&observer, pid), BTreeMap::from(expected));
    // A free that failed changes nothing.
    target.run_part();
    assert_eq!(memory_in_use_and_peak(&mut observer, &target), (9500, 9500));
    assert_eq!(
        find_process(&observer, pid).probes.gpu_mem.by_device[&0]
            .total
            .free_count,
        1
    );
    // The target releases one of two references to a handle.
    target.run_part();
    assert_eq!(
        memory_in_use_and_peak(&mut observer, &target),
        (9500 + PHYSICAL_PAGE_BYTES, 9500 + PHYSICAL_PAGE_BYTES)
    );
    target.run_part();
    assert_eq!(
        memory_in_use_and_peak(&mut observer, &target),
        (7500, 9500 + PHYSICAL_PAGE_BYTES)
    );
    target.let_exit();
    observer.read_counts().expect("maps can be read");
    let memory = &find_process(&observer, pid).probes.gpu_mem.by_device[&0];
    assert_eq!(memory.total.current_bytes, 0);
    assert_eq!(memory.total.peak_bytes, 9500 + PHYSICAL_PAGE_BYTES);
    assert!(
        bytes_by_caller(&observer, pid)
            .values()
            .all(|bytes| *bytes == 0)
    );
    assert_eq!(observer.losses(), Default::default());
}

pub(crate) fn memory_belongs_to_the_current_device() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut command = stage.target_command("two_devices", 0);
    let mut target = Target::start(command.env(config::DEVICES_VARIABLE, "2"));
    target.run_part();
    observer.read_counts().expect("maps can be read");
    let in_use = memory_in_use_by_device(&observer, &target);
    assert_eq!(in_use, BTreeMap::from([(0, 1300), (1, 2040)]));
}

/// Functions that determine the current device are not sampled.
pub(crate) fn memory_belongs_to_its_device_while_others_are_sampled() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let watcher = ObserverOnThread::start(&ObserverOptions {
        governor: GovernorOptions {
            budget: 0.0001,
            ..GovernorOptions::default()
        },
        ..options_that_count_everything(&stage)
    });
    let mut command = stage.target_command("restless", 3000);
    let mut target = Target::start(command.env(config::DEVICES_VARIABLE, "2"));
    target.start_part();
    target.wait_until_done();
    let mut observer = watcher.stop();
    observer.read_counts().expect("maps can be read");
    let in_use = memory_in_use_by_device(&observer, &target);
    assert_eq!(in_use, BTreeMap::from([(0, 1000), (1, 300)]));
}

/// A process that allocates from a pool all the time is still observed. Only the pool memory of the process is no
/// longer exported.
pub(crate) fn sampled_pool_memory_is_not_exported() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let watcher = ObserverOnThread::start(&ObserverOptions {
        governor: GovernorOptions::default(),
        ..options_that_count_everything(&stage)
    });
    let mut target = stage.start_target("pooled", 4000);
    let pid = target.pid();
    target.run_part();
    let in_use = |observer: &Observer| {
        find_process(observer, pid).probes.gpu_mem.by_device[&0]
            .total
            .current_bytes
    };
    watcher.wait_until("all memory is exported", |observer| {
        let mut processes = observer.processes();
        processes.any(|process| process.pid == pid) && in_use(observer) == 1500
    });
    target.start_part();
    watcher.wait_until("they are sampled", |observer| {
        let sampled: Vec<&str> = observer.sampled_function_names().collect();
        let pools = ["cuMemAllocAsync", "cuMemFreeAsync"];
        pools.iter().all(|name| sampled.contains(name)) && in_use(observer) == 1000
    });
    target.wait_until_done();
    let mut observer = watcher.stop();
    observer.read_counts().expect("maps can be read");
    assert_eq!(in_use(&observer), 1000);
    assert!(!observer.is_paused());
    assert_eq!(observer.losses(), Default::default());
}

/// Resetting a device or destroying a context frees the memory in it.
pub(crate) fn memory_is_freed_with_its_context() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("ending_contexts", 0);
    for bytes in [1300, 1000, 0, 500] {
        target.run_part();
        assert_eq!(
            memory_in_use_and_peak(&mut observer, &target),
            (bytes, 1300)
        );
    }
    assert_eq!(
        find_process(&observer, target.pid())
            .probes
            .gpu_mem
            .by_device[&0]
            .total
            .free_count,
        2
    );
}

fn memory_in_use_by_device(observer: &Observer, target: &Target) -> BTreeMap<u32, u64> {
    let memory = find_process(observer, target.pid())
        .probes
        .gpu_mem
        .by_device
        .iter();
    memory
        .map(|(device, memory)| (*device, memory.total.current_bytes))
        .collect()
}

/// Memory in use on each device after [`target_allocates_in_nested_contexts`].
fn memory_of_nested_contexts(
    observer: &mut Observer,
    stage: &Stage,
    depth: u64,
) -> BTreeMap<u32, u64> {
    let mut target = stage.start_target("nested_contexts", depth);
    target.run_part();
    observer.read_counts().expect("maps can be read");
    memory_in_use_by_device(observer, &target)
}

pub(crate) fn memory_belongs_to_the_device_that_is_current_again() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let bytes_on = |device, depth| {
        let levels = (0..=depth).filter(|level| level % 2 == device);
        let bytes =
            levels.map(|level| (1_u64 << level) + if level < depth { 1000 << level } else { 0 });
        bytes.sum::<u64>()
    };
    for depth in [2, 8] {
        let expected = BTreeMap::from([(0, bytes_on(0, depth)), (1, bytes_on(1, depth))]);
        assert_eq!(
            memory_of_nested_contexts(&mut observer, &stage, depth),
            expected
        );
    }
    assert_eq!(observer.losses(), Default::default());
    // Two contexts are too deep for the probe, and count for the first device. Only one of these two contexts is on
    // the second device.
    let too_deep = 1000 << 9;
    let expected = BTreeMap::from([
        (0, bytes_on(0, 10) + too_deep),
        (1, bytes_on(1, 10) - too_deep),
    ]);
    assert_eq!(
        memory_of_nested_contexts(&mut observer, &stage, 10),
        expected
    );
    assert_eq!(observer.losses().contexts, 2);
}

/// Memory whose handle was released stays in use while it is mapped.
pub(crate) fn mapped_memory_is_in_use_after_release_of_its_handle() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("mapped_memory", 0);
    for pages in [3, 2, 1, 0] {
        target.run_part();
        assert_eq!(
            memory_in_use_and_peak(&mut observer, &target),
            (pages * PHYSICAL_PAGE_BYTES, 3 * PHYSICAL_PAGE_BYTES)
        );
    }
    assert_eq!(
        find_process(&observer, target.pid())
            .probes
            .gpu_mem
            .by_device[&0]
            .total
            .free_count,
        3
    );
    assert_eq!(observer.losses(), Default::default());
}

/// An address that is given out again was freed before, although the call that freed it was not observed.
pub(crate) fn memory_at_a_reused_address_counts_once() {
    let stage = Stage::new(Prologue::Push);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("reused_address", 0);
    target.run_part();
    observer.pause();
    target.run_part();
    observer.resume();
    target.run_part();
    assert_eq!(
        memory_in_use_and_peak(&mut observer, &target),
        (LARGE_ALLOCATION_BYTES, LARGE_ALLOCATION_BYTES)
    );
    let by_caller = bytes_by_caller(&observer, target.pid());
    assert_eq!(by_caller.values().sum::<u64>(), LARGE_ALLOCATION_BYTES);
    assert_eq!(observer.losses(), Default::default());
}
