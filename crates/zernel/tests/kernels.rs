//! `zernel run` on other kernels: a small training job on the software GPU, compared with the records of the
//! job and of the software GPU.
//!
//! This test program is also the job. In a virtual machine it runs the same trial as on this machine.

use std::collections::BTreeMap;
use std::env;
use std::process::{Command, ExitCode};
use std::time::Duration;

use serde_json::Value;
use zernel_ebpf::capability::Capability;
use zernel_lab::{Initramfs, VmSpec};
use zernel_softgpu::config;
use zernel_softgpu::install::{CARGO_AND_REAL_LIBRARY_NAMES, built_libraries};
use zernel_softgpu::truth::TruthLog;
use zernel_testjob::{Bottleneck, Job, JobPart, JobPlan, PartStamp, run_job_process};
use zernel_testkit::needs::bpf;
use zernel_testkit::{root, trial, vm};

const ZERNEL_PATH: &str = env!("CARGO_BIN_EXE_zernel");
const GUEST_TRIAL: &str = "a_job_is_observed_exactly_on_this_kernel";
/// The rung to use. If the variable is not set, any rung that works is used.
const RUNG_VARIABLE: &str = "ZERNEL_TEST_RUNG";

/// Kernels, each with the best rung that it has, and when a thread in the kernel is preempted: as Debian has it
/// (6.1 and 6.12: never, 7.2: when it has run for long), or at any moment.
const KERNELS_AND_RUNGS: [(&str, &str, Option<&str>); 4] = [
    ("6.1", "uprobe (perf event)", None),
    ("6.12", "uprobe.multi", None),
    ("6.18", "uprobe.session", Some("preempt=full")),
    ("7.2", "uprobe.session", None),
];

fn main() -> ExitCode {
    if let Some(code) = run_job_process() {
        return code.into();
    }
    let there = KERNELS_AND_RUNGS
        .into_iter()
        .map(|(version, rung, preemption)| {
            let name = format!("a_job_is_observed_exactly_on_{}", version.replace('.', "_"));
            trial(&name, &[vm::oldest_kernel_need()], move || {
                assert_job_is_observed_exactly_in_vm(version, rung, preemption);
            })
        });
    let here = trial(
        GUEST_TRIAL,
        &[root(), bpf(|| Capability::BtfTracepoint.try_out())],
        assert_job_is_observed_exactly,
    );
    zernel_testkit::main([here].into_iter().chain(there))
}

/// Runs the trial `a_job_is_observed_exactly_on_this_kernel` in a virtual machine with this kernel.
fn assert_job_is_observed_exactly_in_vm(version: &str, rung: &str, preemption: Option<&str>) {
    let kernel = vm::obtain_kernel_of_version(version);
    let mut files = Initramfs::new();
    files.add_at_same_path(ZERNEL_PATH).unwrap();
    let libraries = built_libraries().unwrap();
    let built = CARGO_AND_REAL_LIBRARY_NAMES
        .iter()
        .map(|(library, _)| *library);
    for library in built.chain(["libzernel_softgpu_torch.so"]) {
        files.add_at_same_path(libraries.join(library)).unwrap();
    }
    let mut machine = VmSpec::new(kernel.unwrap());
    if let Some(word) = preemption {
        machine = machine.kernel_argument(word);
    }
    let outcome = machine
        // An attach changes kernel code, and emulated CPUs can see each other's code changes half-way.
        .cpus(1)
        // The files of the virtual machine are in memory: programs with debug information, and a copy of each
        // library.
        .memory_mib(2048)
        .files(files)
        .environment(zernel_testkit::REQUIRE_VARIABLE, "root,bpf")
        .environment(RUNG_VARIABLE, rung)
        .environment("ZERNEL_SOFTGPU_LIBRARIES", libraries)
        .command_timeout(Duration::from_secs(300))
        .run(
            env::current_exe().unwrap(),
            [GUEST_TRIAL, "--exact", "--nocapture"],
        )
        .unwrap_or_else(|error| panic!("{version}: {error}"));
    let output = [&*outcome.stdout, &*outcome.stderr].concat();
    let output = String::from_utf8_lossy(&output);
    eprintln!(
        "{version}: {:?} of {:?}\n{output}",
        outcome.boot_time, outcome.total_time
    );
    assert!(outcome.status.success(), "{version}: {output}");
    assert!(output.contains("1 passed"), "{version}: {output}");
}

/// A job of a few seconds under an emulator.
fn short_job_plan() -> JobPlan {
    JobPlan {
        steps: 30,
        jitter: 0.1,
        loaders: 1,
        load_us: 1000,
        launches: 4,
        launch_us: 20,
        kernel_us: 2000,
        optimizer_launches: 2,
        buckets: 2,
        bucket_bytes: 16 << 10,
        warm_up_us: 20_000,
        ..JobPlan::new(Bottleneck::Gpu, 0)
    }
}

fn assert_job_is_observed_exactly() {
    let job = Job::new(short_job_plan()).unwrap();
    let log = tempfile::tempdir().unwrap();
    let mut run = Command::new(ZERNEL_PATH);
    run.args(["run", "--json", "-", "--budget", "none"]);
    for library in ["libcuda.so.1", "libnccl.so.2"] {
        run.arg("--library").arg(job.library_path(library));
    }
    job.set_job_environment(run.env(config::LOG_VARIABLE, log.path()));
    let output = run.arg("--").arg(env::current_exe().unwrap()).output();
    let output = output.unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    eprintln!("{printed}");
    assert!(output.status.success(), "{}: {printed}", output.status);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    if let Ok(rung) = env::var(RUNG_VARIABLE) {
        assert_eq!(report["observing"]["rung"], *rung, "{printed}");
    }
    let none = Value::Array(Vec::new());
    assert_eq!(report["observing"]["sampled"], none);
    assert_eq!(report["problems"], none, "{report:#}");
    assert_eq!(report["loaders"], job.plan().ranks, "one for each rank");
    let truth = TruthLog::read(log.path()).unwrap();
    let ranks = report["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), job.plan().ranks as usize, "{report:#}");
    for (number, rank) in ranks.iter().enumerate() {
        assert_eq!(rank["rank"], number, "{rank:#}");
        assert_eq!(rank["complete"], true, "{rank:#}");
        assert_all_calls_are_counted(rank, &truth);
        assert_steps(rank, &job, number as u32);
        assert_phases(rank);
    }
}

/// Nothing was sampled, so every call was seen.
fn assert_all_calls_are_counted(rank: &Value, truth: &TruthLog) {
    let mut calls: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    let own = |process: &&zernel_softgpu::truth::ProcessTruth| rank["pid"] == process.pid;
    let returned = truth.processes.iter().filter(own);
    for ((_, symbol, result), count) in returned.flat_map(|process| &process.returned) {
        assert_eq!(*result, 0, "{symbol}");
        let total = calls.entry(symbol).or_default();
        *total = (total.0 + count.calls, total.1 + count.bytes);
    }
    let plan = short_job_plan();
    let steps = u64::from(plan.steps);
    let of_step = 3 * plan.launches + plan.optimizer_launches;
    let own = steps * u64::from(of_step);
    assert_eq!(calls["cuLaunchKernel"].0, own, "the job is another one");
    // NCCL launches too.
    let launches = own + calls["cuLaunchKernelEx"].0;
    assert_eq!(rank["launches"], launches, "{rank:#}");
    assert_eq!(rank["launches_error"], 0);
    let (reduced, bytes) = calls["ncclAllReduce"];
    assert_eq!(reduced, steps * u64::from(plan.buckets));
    let collectives = rank["collectives"].as_array().unwrap();
    assert_eq!(collectives.len(), 1, "{rank:#}");
    assert_eq!(collectives[0]["op"], "AllReduce");
    assert_eq!(collectives[0]["calls"], reduced);
    assert_eq!(collectives[0]["bytes"], bytes);
    let copies = ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"].map(|name| calls[name]);
    assert_eq!(rank["copies"], copies[0].0 + copies[1].0, "{rank:#}");
    assert_eq!(rank["copied_bytes"], copies[0].1 + copies[1].1);
    let waits = calls["cuStreamSynchronize"].0 as f64;
    assert_eq!(rank["gpu_waits"], waits, "{rank:#}");
}

fn assert_steps(rank: &Value, job: &Job, number: u32) {
    let stamps = job.read_stamps(number).unwrap();
    let is_step = |stamp: &&PartStamp| matches!(stamp.part, JobPart::Step | JobPart::WarmUp);
    let steps = stamps.iter().filter(is_step).count();
    assert_eq!(rank["steps"]["count"], steps, "{rank:#}");
}

fn assert_phases(rank: &Value) {
    let seconds = |value: &Value| value.as_f64().unwrap();
    let phases = rank["phases"].as_object().unwrap();
    let wall = seconds(&rank["wall_seconds"]);
    let parts = phases.iter().filter(|(name, _)| *name != "more_than_wall");
    let sum: f64 = parts.map(|(_, part)| seconds(part)).sum();
    assert!(
        (sum - wall).abs() <= 0.01 * wall,
        "{sum} of {wall}: {rank:#}"
    );
    for phase in ["gpu_compute", "nccl_collective"] {
        assert!(seconds(&phases[phase]) > 0.0, "{phase}: {rank:#}");
    }
}
