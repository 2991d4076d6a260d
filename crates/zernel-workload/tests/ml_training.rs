//! The training job and its ground truth.

mod common;

use std::hash::BuildHasher;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use zernel_softgpu::install::{Prologue, install_libraries};
use zernel_softgpu::truth::{LoggedEvent, LoggedEventKind, TruthLog};
use zernel_testkit::{eventually, trial};
use zernel_workload::report::WorkerPhaseInterval;
use zernel_workload::work::{GpuBackend, GpuWait, Inference, MlTraining};
use zernel_workload::{
    CloneMode, WorkType, WorkerReport, WorkloadConfig, WorkloadHandle, WorkloadSpec,
};

/// Where this test puts the software GPU's libraries.
const LIBRARIES_FOLDER: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/ml_training");
const DRIVER_PATH: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/ml_training/libcuda.so.1");

fn main() -> ExitCode {
    if let Some(name) = common::requested_helper() {
        run_as_helper(&name);
        return ExitCode::SUCCESS;
    }
    install_libraries(Path::new(LIBRARIES_FOLDER), Prologue::Push)
        .expect("cargo has built the software GPU");
    zernel_testkit::main([
        trial(
            "phases_of_each_step_are_traced_in_order",
            &[],
            phases_of_each_step_are_traced_in_order,
        ),
        trial(
            "ranks_stay_in_step_and_loaders_within_queue_depth",
            &[],
            ranks_stay_in_step_and_loaders_within_queue_depth,
        ),
        trial(
            "forked_loaders_feed_trainer",
            &[],
            forked_loaders_feed_trainer,
        ),
        trial(
            "forked_loaders_that_cannot_load_are_reported",
            &[],
            forked_loaders_that_cannot_load_are_reported,
        ),
        trial(
            "backward_thread_runs_once_per_step",
            &[],
            backward_thread_runs_once_per_step,
        ),
        trial(
            "request_interval_spans_arrival_to_answer",
            &[],
            request_interval_spans_arrival_to_answer,
        ),
        trial(
            "slow_loader_and_slow_gpu_show_in_traced_phases",
            &[],
            slow_loader_and_slow_gpu_show_in_traced_phases,
        ),
        trial(
            "steps_beyond_trace_capacity_are_lost_intervals",
            &[],
            steps_beyond_trace_capacity_are_lost_intervals,
        ),
        trial(
            "gpu_phase_lasts_gpu_time_in_each_wait_mode",
            &[],
            gpu_phase_lasts_gpu_time_in_each_wait_mode,
        ),
        trial(
            "invalid_cuda_driver_path_is_refused",
            &[],
            invalid_cuda_driver_path_is_refused,
        ),
        trial("trains_on_the_software_gpu", &[], || {
            train_on_software_gpu(CloneMode::Fork);
        }),
        // In a process of its own: a process that has used the driver cannot fork ones that use it.
        trial("threads_train_on_the_software_gpu", &[], || {
            common::run_helper("threads");
        }),
        trial("forked_ranks_reduce_with_nccl", &[], || {
            check_reductions_with_nccl("fork");
        }),
        trial("ranks_that_are_threads_reduce_with_nccl", &[], || {
            check_reductions_with_nccl("thread");
        }),
        trial("forked_ranks_stop_together_at_any_moment", &[], || {
            check_stops_at_any_moment("fork");
        }),
        trial(
            "ranks_that_are_threads_stop_together_at_any_moment",
            &[],
            || {
                check_stops_at_any_moment("thread");
            },
        ),
        trial(
            "invalid_nccl_library_is_named",
            &[],
            invalid_nccl_library_is_named,
        ),
        trial(
            "training_example_runs_on_software_gpu",
            &[],
            training_example_runs_on_software_gpu,
        ),
    ])
}

fn small_job() -> MlTraining {
    MlTraining {
        decode_us: 200,
        gpu_us: 1_000,
        launches: 4,
        all_reduce_us: 100,
        optimizer_us: 100,
        ..MlTraining::default()
    }
}

/// Trains until each trainer has done `steps` steps.
fn train_steps(mode: CloneMode, job: &MlTraining, steps: u64) -> Vec<WorkerReport> {
    let workers_per_rank = match job.forked_loaders {
        true => 1,
        false => 1 + job.loaders,
    };
    let workers = job.ranks * workers_per_rank;
    let work = WorkType::MlTraining(job.clone());
    let config = WorkloadConfig::default()
        .workers(workers)
        .work_type(work)
        .clone_mode(mode);
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    handle.start();
    eventually("every rank has done its steps", || {
        let iterations = handle.snapshot_iterations();
        let mut trainers = iterations.iter().step_by(workers_per_rank);
        trainers.all(|count| *count >= steps)
    });
    let reports = handle.stop_and_collect();
    assert!(
        reports.iter().all(|report| report.completed),
        "{reports:#?}"
    );
    reports
}

fn total_ns(intervals: &[WorkerPhaseInterval], phase: &str) -> u64 {
    let of_phase = intervals.iter().filter(|interval| interval.phase == phase);
    of_phase
        .map(|interval| interval.end_ns - interval.start_ns)
        .sum()
}

fn phases_of_each_step_are_traced_in_order() {
    for mode in [CloneMode::Fork, CloneMode::Thread] {
        let reports = train_steps(
            mode,
            &MlTraining {
                ranks: 2,
                ..small_job()
            },
            5,
        );
        for trainer in [&reports[0], &reports[2]] {
            let order = [
                "DataLoading",
                "GpuCompute",
                "NcclCollective",
                "OptimizerStep",
            ];
            for (number, interval) in trainer.phase_intervals.iter().enumerate() {
                assert_eq!(interval.phase, order[number % 4]);
                assert_eq!(interval.step as usize, number / 4);
                assert!(interval.start_ns <= interval.end_ns);
            }
            let mut neighbours = trainer.phase_intervals.windows(2);
            assert!(neighbours.all(|pair| pair[0].end_ns <= pair[1].start_ns));
            assert!(trainer.phase_intervals.len() >= 20 && trainer.lost_intervals == 0);
        }
        for loader in [&reports[1], &reports[3]] {
            assert!(
                loader
                    .phase_intervals
                    .iter()
                    .all(|interval| interval.phase == "DataLoading")
            );
            assert!(loader.phase_intervals.len() as u64 >= loader.work_units);
        }
    }
}

fn ranks_stay_in_step_and_loaders_within_queue_depth() {
    let job = MlTraining {
        ranks: 3,
        loaders: 2,
        queue_depth: 2,
        ..small_job()
    };
    let reports = train_steps(CloneMode::Fork, &job, 10);
    let steps: Vec<u64> = reports
        .iter()
        .step_by(3)
        .map(|report| report.work_units)
        .collect();
    assert!(
        steps.iter().max().unwrap() - steps.iter().min().unwrap() <= 1,
        "{steps:?}"
    );
    for rank in reports.chunks(3) {
        let batches = rank[1].work_units + rank[2].work_units;
        assert!(batches >= rank[0].work_units);
        // Batches in the queue, and the batch that the trainer has taken but not finished.
        assert!(
            batches <= rank[0].work_units + u64::from(job.queue_depth) + 2,
            "{batches} batches"
        );
    }
}

fn slow_loader_and_slow_gpu_show_in_traced_phases() {
    let slow_loader = MlTraining {
        decode_us: 8_000,
        gpu_us: 500,
        ..small_job()
    };
    let trainer = &train_steps(CloneMode::Fork, &slow_loader, 8)[0];
    let loading = total_ns(&trainer.phase_intervals, "DataLoading");
    assert!(loading > total_ns(&trainer.phase_intervals, "GpuCompute"));

    let slow_gpu = MlTraining {
        decode_us: 100,
        gpu_us: 20_000,
        loaders: 2,
        queue_depth: 4,
        ..small_job()
    };
    let trainer = &train_steps(CloneMode::Fork, &slow_gpu, 8)[0];
    let computing = total_ns(&trainer.phase_intervals, "GpuCompute");
    assert!(computing > total_ns(&trainer.phase_intervals, "DataLoading"));
}

fn steps_beyond_trace_capacity_are_lost_intervals() {
    let trainer = &train_steps(
        CloneMode::Fork,
        &MlTraining {
            traced_steps: 2,
            ..small_job()
        },
        5,
    )[0];
    assert_eq!(trainer.phase_intervals.len(), 8);
    assert!(trainer.lost_intervals > 0);
}

fn gpu_phase_lasts_gpu_time_in_each_wait_mode() {
    for gpu_wait in [GpuWait::Block, GpuWait::Spin, GpuWait::Yield] {
        let job = MlTraining {
            gpu_wait,
            ..small_job()
        };
        let trainer = &train_steps(CloneMode::Fork, &job, 5)[0];
        let mut computing = trainer
            .phase_intervals
            .iter()
            .filter(|interval| interval.phase == "GpuCompute");
        // The last one may have been cut short by the stop.
        assert!(
            computing
                .by_ref()
                .take(4)
                .all(|interval| interval.end_ns - interval.start_ns >= 1_000_000)
        );
    }
}

fn invalid_cuda_driver_path_is_refused() {
    let with_driver = |path: &str| {
        let job = MlTraining {
            gpu: GpuBackend::Driver(path.into()),
            ..small_job()
        };
        WorkloadConfig::default()
            .workers(2)
            .work_type(WorkType::MlTraining(job))
    };
    let error = WorkloadHandle::spawn(&with_driver("/nowhere/libcuda.so.1"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("`work.gpu`") && error.contains("/nowhere"),
        "{error}"
    );

    let reports = WorkloadHandle::spawn(&with_driver("/etc/passwd"))
        .unwrap()
        .stop_and_collect();
    let ended = reports[0].exit_info.as_ref().unwrap().to_string();
    assert!(
        ended.starts_with("could not load the GPU driver"),
        "{ended}"
    );
}

fn train_on_software_gpu(mode: CloneMode) {
    let gpu = GpuBackend::Driver(DRIVER_PATH.into());
    let reports = train_steps(
        mode,
        &MlTraining {
            ranks: 2,
            gpu,
            ..small_job()
        },
        5,
    );
    let computing = total_ns(&reports[0].phase_intervals[..16], "GpuCompute");
    assert!(
        computing >= 4 * 1_000_000,
        "{computing} ns for four steps of a millisecond each"
    );
}

/// How often ranks are stopped at a random moment.
const RANDOM_STOPS: usize = 50;

/// The trainer waits for its backward thread in every step, so their counts differ by at most one.
fn backward_thread_runs_once_per_step() {
    let work = MlTraining {
        backward_us: 500,
        gpu_us: 500,
        ..MlTraining::default()
    };
    let config = WorkloadConfig::default()
        .workers(3)
        .work_type(WorkType::MlTraining(work))
        .change_first_group(|spec| spec.pcomm("job"));
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    handle.start();
    eventually("ten steps", || handle.snapshot_iterations()[0] >= 10);
    let reports = handle.stop_and_collect();
    assert!(reports.iter().all(|report| report.completed), "{reports:?}");
    let (trainer, backward) = (&reports[0], &reports[2]);
    assert!(
        backward.work_units.abs_diff(trainer.work_units) <= 1,
        "{} steps, {} backward passes",
        trainer.work_units,
        backward.work_units
    );
    // The stop may have cut the last pass short.
    assert!(
        backward.cpu_ns >= 500_000 * (trainer.work_units - 1),
        "{} ns for {} backward passes",
        backward.cpu_ns,
        trainer.work_units
    );
    assert_eq!(trainer.pid, backward.pid);
}

fn request_interval_spans_arrival_to_answer() {
    let work = Inference {
        period_us: 3_000,
        launches: 4,
        launch_us: 50,
        gpu_us: 1_000,
        ..Inference::default()
    };
    let config = WorkloadConfig::default().work_type(WorkType::Inference(work));
    let mut handle = WorkloadHandle::spawn(&config).unwrap();
    handle.start();
    eventually("ten requests", || handle.snapshot_iterations()[0] >= 10);
    let reports = handle.stop_and_collect();
    let intervals = &reports[0].phase_intervals;
    assert_eq!(intervals.len() as u64, reports[0].work_units);
    for pair in intervals.windows(2) {
        assert_eq!(pair[1].start_ns - pair[0].start_ns, 3_000_000);
    }
    // The stop may have cut the last one short.
    for interval in &intervals[..intervals.len() - 1] {
        let duration_ns = interval.end_ns - interval.start_ns;
        assert!(duration_ns >= 1_000_000, "{interval:?}");
    }
}

fn run_as_helper(name: &str) {
    let mode = match name.ends_with("fork") {
        true => CloneMode::Fork,
        false => CloneMode::Thread,
    };
    let job = MlTraining {
        ranks: 2,
        loaders: 2,
        gradient_kib: 256,
        gpu: GpuBackend::Driver(DRIVER_PATH.into()),
        ..small_job()
    };
    let reports = match name.split_once(' ') {
        None => return train_on_software_gpu(mode),
        Some(("train", _)) => vec![train_steps(mode, &job, 20)],
        Some(_) => stop_at_random_moments(mode, &job),
    };
    println!("{}", serde_json::to_string(&reports).unwrap());
}

fn stop_at_random_moments(mode: CloneMode, job: &MlTraining) -> Vec<Vec<WorkerReport>> {
    let config = WorkloadConfig::default()
        .workers(job.ranks * (1 + job.loaders))
        .work_type(WorkType::MlTraining(job.clone()))
        .clone_mode(mode);
    let mut random = std::collections::hash_map::RandomState::new().hash_one(mode as u8);
    let mut once = || {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let mut handle = WorkloadHandle::spawn(&config).unwrap();
        handle.start();
        std::thread::sleep(Duration::from_micros((random >> 33) % 40_000));
        handle.stop_and_collect()
    };
    (0..RANDOM_STOPS).map(|_| once()).collect()
}

/// The reports of a helper's workers, one list per handle, and the truth log of their calls.
fn reports_and_log_of_helper(name: &str) -> (Vec<Vec<WorkerReport>>, TruthLog) {
    let log = tempfile::tempdir().unwrap();
    let output = common::helper_command(name)
        .env(zernel_softgpu::config::LOG_VARIABLE, log.path())
        .env(zernel_softgpu::config::LOG_EVENTS_VARIABLE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {}\n{text}", output.status);
    let reports = serde_json::from_slice(&output.stdout).unwrap();
    (reports, TruthLog::read(log.path()).unwrap())
}

/// The calls of a thread to a function that succeeded.
fn successful_calls<'a>(truth: &'a TruthLog, thread: i32, symbol: &str) -> Vec<&'a LoggedEvent> {
    let events = truth.processes.iter().flat_map(|process| &process.events);
    let is_meant = |event: &&LoggedEvent| {
        event.kind == LoggedEventKind::Call
            && event.tid == thread.cast_unsigned()
            && event.symbol == symbol
            && event.result == 0
    };
    let mut calls: Vec<&LoggedEvent> = events.filter(is_meant).collect();
    calls.sort_by_key(|event| event.enter);
    calls
}

fn collective_intervals(trainer: &WorkerReport) -> Vec<&WorkerPhaseInterval> {
    let intervals = trainer.phase_intervals.iter();
    intervals
        .filter(|interval| interval.phase == "NcclCollective")
        .collect()
}

/// Each collective of the ground truth is a call of NCCL and the wait for it, and nothing else.
fn assert_matches_truth(trainer: &WorkerReport, truth: &TruthLog) {
    let reduced = successful_calls(truth, trainer.tid, "ncclAllReduce");
    let waited = successful_calls(truth, trainer.tid, "cuStreamSynchronize");
    let intervals = collective_intervals(trainer);
    assert_eq!(reduced.len(), intervals.len());
    for (call, interval) in reduced.into_iter().zip(intervals) {
        let wait = waited.iter().find(|wait| wait.enter >= call.leave).unwrap();
        assert!(interval.start_ns <= call.enter && wait.leave <= interval.end_ns);
        assert!(
            !waited
                .iter()
                .any(|other| interval.start_ns <= other.enter && other.enter < call.enter)
        );
    }
    let mut neighbours = trainer.phase_intervals.windows(2);
    assert!(neighbours.all(|pair| pair[0].end_ns <= pair[1].start_ns));
}

fn check_reductions_with_nccl(mode: &str) {
    let (reports, truth) = reports_and_log_of_helper(&format!("train {mode}"));
    let trainers = [&reports[0][0], &reports[0][3]];
    for trainer in trainers {
        assert_eq!(
            successful_calls(&truth, trainer.tid, "ncclCommInitRank").len(),
            1
        );
        assert_eq!(
            successful_calls(&truth, trainer.tid, "ncclCommDestroy").len(),
            1
        );
        assert_matches_truth(trainer, &truth);
        assert!(collective_intervals(trainer).len() as u64 >= trainer.work_units);
    }
    let [first, second] = trainers.map(|trainer| collective_intervals(trainer).len());
    assert!(first == second && first >= 20, "{first} and {second}");
    // No rank leaves a collective before all ranks have entered it.
    for (first, second) in collective_intervals(trainers[0])
        .iter()
        .zip(collective_intervals(trainers[1]))
    {
        assert!(first.start_ns < second.end_ns && second.start_ns < first.end_ns);
    }
    let loaders = [1, 2, 4, 5].map(|worker: usize| &reports[0][worker]);
    assert!(
        loaders
            .iter()
            .all(|loader| collective_intervals(loader).is_empty())
    );
}

fn check_stops_at_any_moment(mode: &str) {
    let (reports, truth) = reports_and_log_of_helper(&format!("stop {mode}"));
    assert_eq!(reports.len(), RANDOM_STOPS);
    for reports in &reports {
        assert!(
            reports.iter().all(|report| report.completed),
            "{reports:#?}"
        );
        assert_eq!(
            collective_intervals(&reports[0]).len(),
            collective_intervals(&reports[3]).len()
        );
    }
    let is_reduction = |event: &&LoggedEvent| {
        event.symbol == "ncclAllReduce" && event.kind == LoggedEventKind::Call
    };
    let called = truth.processes.iter().flat_map(|process| &process.events);
    let noted = reports
        .iter()
        .flatten()
        .map(|report| collective_intervals(report).len());
    assert_eq!(called.filter(is_reduction).count(), noted.sum::<usize>());
}

fn forked_loaders_feed_trainer() {
    for mode in [CloneMode::Fork, CloneMode::Thread] {
        let job = MlTraining {
            ranks: 2,
            loaders: 2,
            forked_loaders: true,
            ..small_job()
        };
        let reports = train_steps(mode, &job, 5);
        assert_eq!(reports.len(), 2, "loaders are no workers");
        for report in &reports {
            assert!(total_ns(&report.phase_intervals, "GpuCompute") > 0);
        }
    }
}

fn forked_loaders_that_cannot_load_are_reported() {
    let job = MlTraining {
        forked_loaders: true,
        // A folder in which no file can be made.
        folder: "/proc".into(),
        ..small_job()
    };
    let config = WorkloadConfig::default()
        .workers(1)
        .work_type(WorkType::MlTraining(job));
    let reports = WorkloadHandle::spawn(&config).unwrap().stop_and_collect();
    let ended = reports[0].exit_info.as_ref().unwrap().to_string();
    assert!(ended.starts_with("could not run a loader"), "{ended}");
}

fn invalid_nccl_library_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let driver = folder.path().join("libcuda.so.1");
    std::fs::copy(DRIVER_PATH, &driver).unwrap();
    std::fs::write(folder.path().join("libnccl.so.2"), "no library").unwrap();
    let job = MlTraining {
        ranks: 2,
        gpu: GpuBackend::Driver(driver),
        ..small_job()
    };
    let config = WorkloadConfig::default()
        .workers(4)
        .work_type(WorkType::MlTraining(job));
    let reports = WorkloadHandle::spawn(&config).unwrap().stop_and_collect();
    for trainer in [&reports[0], &reports[2]] {
        let ended = trainer.exit_info.as_ref().unwrap().to_string();
        assert!(ended.starts_with("could not load libnccl.so.2"), "{ended}");
    }
}

/// The example of the repository, with the driver that the tests build.
fn training_example_runs_on_software_gpu() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/training.toml");
    let text = std::fs::read_to_string(file).unwrap();
    let text = text.replace("../target/softgpu/libcuda.so.1", DRIVER_PATH);
    let spec = WorkloadSpec::parse(&text, file).unwrap();
    let outcome =
        spec.run(
            |progress| match progress.rounds.iter().all(|(_, rounds)| *rounds > 20) {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            },
        );
    let outcome = outcome.unwrap();
    assert!(
        outcome.reports.iter().all(|report| report.completed),
        "{outcome:#?}"
    );
    assert!(total_ns(&outcome.reports[0].phase_intervals, "GpuCompute") > 0);
}
