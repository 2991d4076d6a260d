//! The overhead stays within its budget, and estimates are within their intervals.

use std::fs;
use std::hint::spin_loop;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::thread;
use std::time::{Duration, Instant};

use zernel_ebpf::observer::{
    CallCount, GovernorOptions, ObservedProcess, Observer, ObserverOptions, ProcessCoverage,
    TraceItem,
};
use zernel_ebpf::probes::{CallKind, SYMBOLS};
use zernel_phase::shared::raw_event;
use zernel_phase::task_state::WorkloadPhase;
use zernel_phase::tracker::ThreadEvent;
use zernel_softgpu::config;
use zernel_softgpu::install::Prologue;
use zernel_testkit::target::{
    Driver, Stage, Target, TargetRole, call, end_part_and_wait, out_pointer,
};

use crate::harness::{
    ObserverOnThread, find_process, functions_in_ledger, logged_calls, observed_calls,
    options_that_count_everything,
};
use crate::torch::{begin_backward_pass, load_library, stage_and_options};

pub(crate) const GOVERNOR_ROLES: &[(&str, TargetRole)] = &[
    ("launches_for", target_launches_for),
    ("paced", target_launches_at_a_fixed_rate),
    ("slow", target_launches_slowly),
    ("eager", target_trains_eagerly),
    ("eager_pooled", target_trains_eagerly_with_pools),
    ("checkpoints", target_reads_tensors_to_checkpoint),
    ("waits", target_waits_for_idle_gpu),
    ("trains_with_torch", target_trains_with_torch),
];

/// Launches as fast as it can for `milliseconds`.
fn target_launches_for(driver: &Driver, milliseconds: u64) {
    driver.open_first_device();
    let function = driver.load_empty_kernel();
    let end = Instant::now() + Duration::from_millis(milliseconds);
    while Instant::now() < end {
        for _ in 0..100 {
            driver.launch_kernel(function);
        }
    }
}

/// Launches about 20,000 times per second for `milliseconds`.
fn target_launches_at_a_fixed_rate(driver: &Driver, milliseconds: u64) {
    driver.open_first_device();
    let function = driver.load_empty_kernel();
    let begin = Instant::now();
    let end = begin + Duration::from_millis(milliseconds);
    let mut next = begin;
    while Instant::now() < end {
        driver.launch_kernel(function);
        next = (next + Duration::from_micros(50)).max(Instant::now());
        while Instant::now() < next {
            spin_loop();
        }
    }
}

/// Trains as eager PyTorch does, for `milliseconds`.
fn target_trains_eagerly(driver: &Driver, milliseconds: u64) {
    driver.open_first_device();
    let function = driver.load_empty_kernel();
    train_for(driver, milliseconds, |_| driver.launch_kernel(function));
}

/// Trains as `target_trains_eagerly` does, with pool memory for each tensor and an occasional launch by another function.
fn target_trains_eagerly_with_pools(driver: &Driver, milliseconds: u64) {
    driver.open_first_device();
    let function = driver.load_empty_kernel();
    train_for(driver, milliseconds, |number| {
        for _ in 0..3 {
            let mut address = 0_u64;
            let cuda = driver.cuda();
            call!(cuda, "cuMemAllocAsync", out_pointer(&mut address), 4096, 0);
            call!(cuda, "cuMemFreeAsync", address, 0);
        }
        match number % 10 {
            0 => driver.launch_cooperatively(function),
            _ => driver.launch_kernel(function),
        }
    });
}

/// Copies a batch and waits for it, does a forward pass of 150 operations, leaves the backward pass to another
/// thread, and reads the loss.
fn train_for(driver: &Driver, milliseconds: u64, operate: impl Fn(u32) + Sync) {
    let device = driver.allocate_memory(4096);
    let mut batch = vec![0; 4096];
    let pass = || {
        for number in 0..150 {
            operate(number);
            let next = Instant::now() + Duration::from_micros(20);
            while Instant::now() < next {
                spin_loop();
            }
        }
    };
    let end = Instant::now() + Duration::from_millis(milliseconds);
    while Instant::now() < end {
        call!(
            driver.cuda(),
            "cuMemcpyHtoDAsync_v2",
            device,
            batch.as_mut_ptr(),
            4096,
            0
        );
        driver.synchronize();
        pass();
        thread::scope(|scope| {
            scope.spawn(|| {
                driver.open_first_device();
                pass();
            });
        });
        driver.synchronize();
    }
}

/// Steps in which the thread launches all the time, runs a backward pass and waits for the GPU. Each step begins with a
/// copy of its batch in the first part, and has its batch on the GPU in the second part.
fn target_trains_with_torch(driver: &Driver, _rounds: u64) {
    const PART_TIME: Duration = Duration::from_secs(3);
    let torch = load_library("libtorch_cpu.so");
    driver.open_first_device();
    let function = driver.load_empty_kernel();
    let device = driver.allocate_memory(4096);
    let mut batch = vec![0; 4096];
    let launch = || {
        for _ in 0..150 {
            driver.launch_kernel(function);
            let next = Instant::now() + Duration::from_micros(20);
            while Instant::now() < next {
                spin_loop();
            }
        }
    };
    for copies in [true, false] {
        let end = Instant::now() + PART_TIME;
        while Instant::now() < end {
            if copies {
                driver.copy_to_device(device, &mut batch);
            }
            launch();
            begin_backward_pass(&torch);
            launch();
            driver.synchronize();
        }
        end_part_and_wait();
    }
}

/// Reads many small tensors and a large one, which takes a while, again and again.
fn target_reads_tensors_to_checkpoint(driver: &Driver, rounds: u64) {
    const LARGE_TENSOR_BYTES: usize = 128 << 20;
    driver.open_first_device();
    let device = driver.allocate_memory(LARGE_TENSOR_BYTES as u64);
    let mut host = vec![0_u8; LARGE_TENSOR_BYTES];
    let mut read = |bytes: usize| {
        call!(
            driver.cuda(),
            "cuMemcpyDtoHAsync_v2",
            host.as_mut_ptr(),
            device,
            bytes,
            0
        );
    };
    for _ in 0..rounds {
        (0..2000).for_each(|_| read(64));
        read(LARGE_TENSOR_BYTES);
    }
}

/// Synchronizes an idle GPU as often as it can for `milliseconds`.
fn target_waits_for_idle_gpu(driver: &Driver, milliseconds: u64) {
    driver.open_first_device();
    let end = Instant::now() + Duration::from_millis(milliseconds);
    while Instant::now() < end {
        driver.synchronize();
    }
}

/// Launches 100 times a second.
fn target_launches_slowly(driver: &Driver, rounds: u64) {
    driver.open_first_device();
    let function = driver.load_empty_kernel();
    for _ in 0..rounds {
        driver.launch_kernel(function);
        thread::sleep(Duration::from_millis(10));
    }
}

/// Options with the default budget.
fn options_with_default_budget(stage: &Stage) -> ObserverOptions {
    ObserverOptions {
        governor: GovernorOptions::default(),
        ..options_that_count_everything(stage)
    }
}

/// Options with a larger budget, for more windows in less time.
fn options_with_large_budget(stage: &Stage) -> ObserverOptions {
    ObserverOptions {
        governor: GovernorOptions::with_budget(0.03),
        ..options_that_count_everything(stage)
    }
}

fn is_launch_sampled(observer: &Observer) -> bool {
    observer
        .sampled_function_names()
        .any(|name| name == "cuLaunchKernel")
}

pub(crate) fn a_function_is_sampled_while_it_is_called_often() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let watcher = ObserverOnThread::start(&options_with_default_budget(&stage));
    let mut target = stage.start_target("launches_for", 600_000);
    let pid = target.pid();
    target.start_part();
    watcher.wait_until("launches are sampled", is_launch_sampled);
    watcher.wait_until("there are windows", |observer| {
        observer.probe_cost().sampling_windows > 0
    });
    let ceiling = GovernorOptions::default().ceiling;
    watcher.wait_until("the cost is below the ceiling", |observer| {
        find_process(observer, pid)
            .overhead_cost()
            .busiest_thread_overhead
            < ceiling
    });
    target.kill();
    let mut observer = watcher.stop();
    observer.read_counts().expect("maps can be read");
    let mut rounds = 0;
    while is_launch_sampled(&observer) {
        rounds += 1;
        assert!(rounds < 100, "launches are still sampled");
        observer.govern();
    }
    assert!(rounds > 1, "one calm round proves nothing");
    let mut target = stage.start_target("launches", 1000);
    target.run_part();
    observer.read_counts().expect("maps can be read");
    let launches = observed_calls(find_process(&observer, target.pid()))["cuLaunchKernel"];
    assert_eq!((launches.calls, launches.error), (1000, Some(0)));
}

/// A call that is open when its probe is detached is not counted, and is not a loss.
pub(crate) fn an_open_call_is_not_lost_when_its_probe_is_detached() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let watcher = ObserverOnThread::start(&options_with_large_budget(&stage));
    let mut target = stage.start_target("checkpoints", 100_000);
    target.start_part();
    watcher.wait_until("there are windows", |observer| {
        observer.probe_cost().sampling_windows > 3
    });
    let observer = watcher.stop();
    let mut sampled = observer.sampled_function_names();
    assert!(sampled.any(|name| name == "cuMemcpyDtoHAsync_v2"));
    assert_eq!(observer.losses(), Default::default());
}

const NOBODY_UID: u32 = 65534;

fn wait_until_excluded(watcher: &ObserverOnThread, what: &str, pid: u32, is_excluded: bool) {
    watcher.wait_until(what, |observer| {
        observer.excluded_pids().any(|excluded| excluded == pid) == is_excluded
    });
}

fn options_with_low_ceiling(stage: &Stage) -> ObserverOptions {
    ObserverOptions {
        governor: GovernorOptions {
            first_exclusion: Duration::from_secs(2),
            ..GovernorOptions::default()
        },
        ..options_that_count_everything(stage)
    }
}

/// Functions that determine phases are never sampled. A process that calls functions that cannot be sampled far too often
/// is not observed for a while, and no probe is left on a library that only its user maps.
pub(crate) fn a_process_over_the_ceiling_is_excluded() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let watcher = ObserverOnThread::start(&options_with_low_ceiling(&stage));
    let mut target = stage.start_target("waits", 600_000);
    let pid = target.pid();
    let culprit = format!("process {pid} ");
    target.start_part();
    let blames = |observer: &Observer| observer.problems().concat().contains(&culprit);
    let library = stage.library_path("libcuda.so.1");
    let state = |observer: &Observer| {
        let functions = functions_in_ledger(observer, &library.to_string_lossy());
        functions["cuStreamSynchronize"]["state"].clone()
    };
    wait_until_excluded(&watcher, "it is excluded", pid, true);
    watcher.with_observer(|observer| {
        assert!(blames(observer) && !observer.is_paused());
        assert_eq!(state(observer), "not attached");
        assert_ne!(
            find_process(observer, pid).coverage,
            ProcessCoverage::Complete
        );
    });
    wait_until_excluded(&watcher, "it is tried again", pid, false);
    wait_until_excluded(&watcher, "to no avail", pid, true);
    target.kill();
    watcher.wait_until("probes are attached again", |observer| {
        state(observer) == "attached"
    });
    let mut observer = watcher.stop();
    assert!(blames(&observer));
    let mut target = stage.start_target("launches", 1);
    target.run_part();
    observer.read_counts().expect("maps can be read");
    let process = find_process(&observer, target.pid());
    assert_eq!(observed_calls(process)["cuCtxSynchronize"].calls, 1);
}

/// A process that costs too much does not take the probes from another user of the same library.
pub(crate) fn a_process_above_the_ceiling_takes_no_probes_from_others() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    fs::set_permissions(stage.path(), fs::Permissions::from_mode(0o755)).expect("ours");
    let watcher = ObserverOnThread::start(&options_with_low_ceiling(&stage));
    let mut victim = stage.start_target("slow", 400);
    victim.start_part();
    let pid = victim.pid();
    watcher.wait_until("it is observed", |observer| {
        observer.processes().any(|process| process.pid == pid)
    });
    let mut command = stage.target_command("waits", 600_000);
    for (variable, name) in [
        (config::DIRECTORY_VARIABLE, "other_node"),
        (config::LOG_VARIABLE, "other_log"),
    ] {
        let folder = stage.path().join(name);
        fs::create_dir(&folder).expect("ours");
        chown(&folder, Some(NOBODY_UID), None).expect("root may");
        command.env(variable, folder);
    }
    let mut greedy = Target::start(command.uid(NOBODY_UID));
    greedy.start_part();
    wait_until_excluded(&watcher, "the greedy one is excluded", greedy.pid(), true);
    victim.wait_until_done();
    watcher.with_observer(|observer| {
        observer.read_counts().expect("maps can be read");
        let observed = find_process(observer, pid);
        assert_eq!(observed.coverage, ProcessCoverage::Complete);
        assert_eq!(observed_calls(observed), logged_calls(&stage, pid));
    });
    greedy.kill();
    drop(watcher.stop());
}

/// A process far over the budget raises an alarm before the next check of the overhead.
pub(crate) fn a_process_far_over_budget_raises_an_alarm() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let mut observer =
        Observer::start(&options_with_default_budget(&stage)).expect("this machine can observe");
    let mut slow = stage.start_target("slow", 20);
    slow.run_part();
    observer.discover().expect("events can be read");
    assert!(!observer.had_alarm_since_last_call());
    observer.govern();
    let mut target = stage.start_target("launches", 20_000);
    target.run_part();
    observer.discover().expect("events can be read");
    assert!(observer.had_alarm_since_last_call());
    assert!(!observer.had_alarm_since_last_call(), "it is over");
    observer.read_counts().expect("maps can be read");
    observer.govern();
    assert!(is_launch_sampled(&observer));
}

/// Without steps, the rate in windows is extrapolated to the whole run time. The 95 % interval contains the truth in
/// 19 of 20 runs. An interval twice as wide contains the truth in 999 of 1000 runs.
pub(crate) fn the_interval_of_an_estimate_contains_the_truth() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let watcher = ObserverOnThread::start(&options_with_large_budget(&stage));
    let mut target = stage.start_target("paced", 600_000);
    let pid = target.pid();
    target.start_part();
    watcher.wait_until("there are enough windows", |observer| {
        observer.probe_cost().sampling_windows >= 24
    });
    target.kill();
    let (launches, truth) = estimated_and_true(watcher, &stage, pid);
    assert!(
        half_width(launches) > 0 && half_width(launches) < launches.calls / 3,
        "{launches:?}"
    );
    assert!(
        launches.calls.abs_diff(truth) <= 2 * half_width(launches),
        "{launches:?} for {truth}"
    );
}

/// Where a process makes steps, the estimate is within 5 % of the truth.
fn assert_near(launches: CallCount, truth: u64) {
    assert!(
        20 * launches.calls.abs_diff(truth) <= truth,
        "{launches:?} for {truth}"
    );
}

/// Waits until a process exits. Returns the estimated and the true number of launches of the process.
fn estimated_and_true(watcher: ObserverOnThread, stage: &Stage, pid: u32) -> (CallCount, u64) {
    watcher.wait_until("its end is known", |observer| {
        find_process(observer, pid).ended_ns.is_some()
    });
    let observer = watcher.stop();
    let process = find_process(&observer, pid);
    assert!(process.is_sampled());
    let launches = observed_calls(process)["cuLaunchKernel"];
    let truth = logged_calls(stage, pid)["cuLaunchKernel"].calls;
    eprintln!(
        "{} launches taken for {} ± {} in {} windows",
        truth,
        launches.calls,
        half_width(launches),
        observer.probe_cost().sampling_windows
    );
    (launches, truth)
}

fn half_width(count: CallCount) -> u64 {
    count.error.expect("two windows or more")
}

/// All steps of a training loop are known. So the launches of a training loop can be estimated from few windows.
pub(crate) fn launches_are_estimated_from_steps() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let watcher = ObserverOnThread::start(&options_with_default_budget(&stage));
    let mut target = stage.start_target("eager", 600_000);
    let pid = target.pid();
    target.start_part();
    watcher.wait_until("launches are sampled", is_launch_sampled);
    watcher.wait_until("they are reported before the next window", |observer| {
        let process = find_process(observer, pid);
        let steps = process.steps.step_count();
        steps > 50 && observed_calls(process)["cuLaunchKernel"].calls > 290 * steps
    });
    wait_for_interval(&watcher, pid);
    target.kill();
    let (launches, truth) = estimated_and_true(watcher, &stage, pid);
    assert!(
        half_width(launches) > 0 && half_width(launches) < launches.calls / 8,
        "{launches:?}"
    );
    assert!(
        launches.calls.abs_diff(truth) <= 2 * half_width(launches),
        "{launches:?} for {truth}"
    );
    assert_near(launches, truth);
}

/// Waits until two windows have shown whole steps of a process, and it has made 100 steps: one step more or less is
/// then 1 % of its launches.
pub(crate) fn wait_for_interval(watcher: &ObserverOnThread, pid: u32) {
    watcher.wait_until("launches per step have an interval", |observer| {
        let mut processes = observer.processes();
        let process = processes.find(|process| process.pid == pid);
        let is_long = |process: &&ObservedProcess| process.steps.step_count() >= 100;
        let process = process
            .filter(|process| is_long(process) && observer.probe_cost().sampling_windows >= 2);
        let per_step = process.and_then(ObservedProcess::launches_per_step);
        per_step.is_some_and(|per_step| per_step.half_width.is_some())
    });
}

/// Two windows are enough for an estimate. Two windows open within a minute even if one window uses the budget of
/// many seconds. Launches by all functions are estimated together.
pub(crate) fn launches_are_estimated_from_few_windows() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let watcher = ObserverOnThread::start(&options_with_default_budget(&stage));
    let mut target = stage.start_target("eager_pooled", 600_000);
    let pid = target.pid();
    target.start_part();
    watcher.wait_until("launches are sampled", is_launch_sampled);
    wait_for_interval(&watcher, pid);
    target.kill();
    watcher.wait_until("its end is known", |observer| {
        find_process(observer, pid).ended_ns.is_some()
    });
    let observer = watcher.stop();
    let launches = find_process(&observer, pid).count_calls(|what| what == CallKind::Launch);
    let truth = logged_calls(&stage, pid);
    let truth = truth["cuLaunchKernel"].calls + truth["cuLaunchCooperativeKernel"].calls;
    eprintln!(
        "{truth} launches taken for {} ± {}",
        launches.calls,
        half_width(launches)
    );
    assert!(half_width(launches) > 0 && half_width(launches) < launches.calls / 2);
    assert!(launches.calls.abs_diff(truth) <= half_width(launches));
    assert_near(launches, truth);
}

/// A process that starts while launches are sampled does not count as one without launches.
pub(crate) fn a_process_that_starts_during_sampling_is_estimated() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let watcher = ObserverOnThread::start(&options_with_default_budget(&stage));
    let mut first = stage.start_target("eager", 600_000);
    first.start_part();
    watcher.wait_until("launches are sampled", is_launch_sampled);
    let mut target = stage.start_target("eager", 600_000);
    let pid = target.pid();
    target.start_part();
    wait_for_interval(&watcher, pid);
    target.kill();
    let (launches, truth) = estimated_and_true(watcher, &stage, pid);
    assert!(launches.calls.abs_diff(truth) <= 2 * half_width(launches));
    assert!(
        half_width(launches) > 0 && half_width(launches) < launches.calls / 4,
        "{launches:?}"
    );
    assert_near(launches, truth);
}

/// The phases of a training loop must be the same with sampled launches as with all launches: it computes
/// nearly all the time, and hardly ever loads.
pub(crate) fn phases_are_right_while_launches_are_sampled() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let watcher = ObserverOnThread::start(&options_with_default_budget(&stage));
    let mut target = stage.start_target("eager", 6_000);
    let pid = target.pid();
    target.start_part();
    watcher.wait_until("launches are sampled", is_launch_sampled);
    let times = |observer: &Observer| {
        let phases = find_process(observer, pid).phases.as_ref();
        phases.expect("it drives steps").phase_times.clone()
    };
    let before = watcher.with_observer(|observer| times(observer));
    target.wait_until_done();
    let mut observer = watcher.stop();
    observer.read_counts().expect("maps can be read");
    let after = times(&observer);
    let spent = |phase| after.phase_ns(phase) - before.phase_ns(phase);
    let computing = spent(WorkloadPhase::GpuCompute);
    let loading = spent(WorkloadPhase::DataLoading);
    assert!(computing > 8 * loading, "{before:?} to {after:?}");
}

/// A thread is presumed to launch after a sync if it has its batch on the GPU, and not if it has copied its batch. A
/// backward pass calls two functions that begin it, without a copy between them.
pub(crate) fn launches_are_presumed_after_a_sync_without_copies_only() {
    let (stage, options) = stage_and_options();
    let watcher = ObserverOnThread::start(&ObserverOptions {
        governor: GovernorOptions::default(),
        traces_events: true,
        ..options
    });
    let mut target = stage.start_target("trains_with_torch", 1);
    let tid = target.pid();
    let [copying, resident] = [(); 2].map(|()| {
        target.run_part();
        let trace = watcher.with_observer(Observer::take_trace);
        presumed_share_of_syncs(&trace.expect("the trace is read"), tid)
    });
    let observer = watcher.stop();
    assert!(is_launch_sampled(&observer));
    assert!(copying < 0.1, "{copying:.2} of the syncs after a copy");
    assert!(resident > 0.5, "{resident:.2} of the syncs without copies");
}

/// The share of a thread's syncs after which it was presumed to launch.
fn presumed_share_of_syncs(trace: &[TraceItem], tid: u32) -> f64 {
    let sync = SYMBOLS
        .iter()
        .position(|row| row.name() == "cuStreamSynchronize");
    let count = |event: ThreadEvent| {
        let is_counted = |item: &&TraceItem| {
            matches!(item, TraceItem::Event(traced) if traced.tid == tid
                && traced.symbol.map(usize::from) == sync
                && traced.event == raw_event(event))
        };
        trace.iter().filter(is_counted).count() as f64
    };
    count(ThreadEvent::Launch) / count(ThreadEvent::GpuSyncLeave)
}

pub(crate) fn a_program_within_the_budget_is_not_sampled() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let watcher = ObserverOnThread::start(&options_with_default_budget(&stage));
    let mut target = stage.start_target("slow", 150);
    target.run_part();
    let mut observer = watcher.stop();
    observer.read_counts().expect("maps can be read");
    assert!(!is_launch_sampled(&observer));
    let process = find_process(&observer, target.pid());
    assert!(!process.is_sampled());
    assert_eq!(observed_calls(process), logged_calls(&stage, target.pid()));
}
