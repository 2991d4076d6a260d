//! Attaching and detaching probes does not harm programs.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;

use zernel_ebpf::observer::ObserverOptions;
use zernel_softgpu::config;
use zernel_softgpu::install::{Prologue, install_libraries};
use zernel_testkit::target::Stage;
use zernel_testkit::{Need, eventually};

use crate::harness::{attach_rest, options_that_count_everything, start_attached};

/// Rounds of attaching and detaching, unless `ZERNEL_TEST_ROUNDS` is set. Each round waits for all CPUs, so
/// rounds run in parallel, each with its own program and files.
const DEFAULT_ROUNDS: usize = 40;
const PARALLEL_LANES: usize = 4;

fn requested_rounds() -> usize {
    let rounds = env::var("ZERNEL_TEST_ROUNDS").ok();
    rounds.map_or(DEFAULT_ROUNDS, |rounds| rounds.parse().expect("a number"))
}

pub(crate) fn compiler_need() -> Need {
    Need {
        name: "c++",
        check: || match Command::new("c++").arg("--version").output() {
            Ok(_) => Ok(()),
            Err(error) => Err(format!("c++ does not run: {error}")),
        },
    }
}

/// Builds the C++ program. The program throws C++ exceptions, which unwind the stack and are hard to probe.
fn build_cpp_program(stage: &Stage) -> PathBuf {
    let program = stage.path().join("unruly");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/observe/unruly.cpp");
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-O1", "-pthread", "-o"]);
    let status = compiler.arg(&program).arg(source).arg("-ldl").status();
    assert!(status.expect("c++ runs").success());
    program
}

/// Runs until its standard input is closed, and exits with success if all went well.
fn spawn_program(stage: &Stage, program: &Path, libraries: &Path) -> Child {
    let mut command = Command::new(program);
    command
        .arg(libraries.join("libcuda.so.1"))
        .env(config::DIRECTORY_VARIABLE, stage.path().join("node"))
        .stdin(Stdio::piped());
    command.spawn().expect("it runs")
}

/// Attaches to a program and detaches from it, over and over.
fn attach_and_detach_repeatedly(stage: &Stage, program: &Path, libraries: &Path) {
    let mut observer = start_attached(&ObserverOptions {
        libraries: vec![libraries.join("libcuda.so.1")],
        ..options_that_count_everything(stage)
    });
    let mut target = spawn_program(stage, program, libraries);
    for _ in 0..requested_rounds() / PARALLEL_LANES {
        observer.pause();
        observer.resume();
        attach_rest(&mut observer);
    }
    // On a busy machine all rounds may end before the program has started.
    let pid = target.id();
    eventually("the probes are hit", || {
        observer.read_counts().expect("maps can be read");
        let mut processes = observer.processes();
        processes.any(|process| process.pid == pid && process.calls_by_function().count() > 0)
    });
    drop(target.stdin.take());
    let status = target.wait().expect("our child");
    assert!(status.success(), "{status}");
}

pub(crate) fn probed_programs_survive_attaching_and_detaching() {
    let stage = Stage::with_machine_alone(Prologue::Push);
    let program = build_cpp_program(&stage);
    let lanes = (0..PARALLEL_LANES).map(|lane| stage.path().join(format!("lane-{lane}")));
    let lanes: Vec<PathBuf> = lanes.collect();
    for lane in &lanes {
        install_libraries(lane, Prologue::Push).expect("the libraries are built");
    }
    thread::scope(|scope| {
        for lane in &lanes {
            scope.spawn(|| attach_and_detach_repeatedly(&stage, &program, lane));
        }
    });
}
