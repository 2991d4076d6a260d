//! Programs that are no training jobs.

use std::fs;
use std::process::Command;

use libtest_mimic::Trial;
use zernel_softgpu::install::{Prologue, install_libraries};
use zernel_testkit::{Need, trial};

use crate::report_on;

const PYTHON_PROGRAM: &str = "python3";
const COMPILER_PROGRAM: &str = "cc";

pub(crate) fn trials_without_training(observing: &[Need]) -> [Trial; 4] {
    let python = Need {
        name: "python",
        check: || program_runs(PYTHON_PROGRAM),
    };
    let compiler = Need {
        name: "cc",
        check: || program_runs(COMPILER_PROGRAM),
    };
    let and = |need: Need| [observing, &[need]].concat();
    [
        trial(
            "an_idle_python_has_no_verdict",
            &and(python),
            idle_python_has_no_verdict,
        ),
        trial(
            "an_idle_python_with_cuda_has_no_verdict",
            &and(python),
            idle_python_with_cuda_has_no_verdict,
        ),
        trial(
            "a_compiler_has_no_verdict",
            &and(compiler),
            a_compiler_has_no_verdict,
        ),
        trial(
            "a_simulation_on_a_gpu_has_no_verdict",
            observing,
            a_simulation_on_a_gpu_has_no_verdict,
        ),
    ]
}

fn program_runs(program: &str) -> Result<(), String> {
    let output = Command::new(program).arg("--version").output();
    match output.is_ok_and(|output| output.status.success()) {
        true => Ok(()),
        false => Err(format!("{program} does not run here")),
    }
}

fn assert_verdict_is_cannot_tell(command: &[&str]) {
    let (report, output) = report_on(|_| {}, command);
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    assert_eq!(report["verdict"]["bound"], "cannot-tell", "{printed}");
}

fn idle_python_has_no_verdict() {
    assert_verdict_is_cannot_tell(&[PYTHON_PROGRAM, "-c", "import time; time.sleep(2)"]);
}

/// A notebook that waits for its user has opened the GPU and does nothing with it.
fn idle_python_with_cuda_has_no_verdict() {
    let directory = tempfile::tempdir().unwrap();
    install_libraries(directory.path(), Prologue::Push).unwrap();
    let library = directory.path().join("libcuda.so.1");
    let script = format!(
        "import ctypes, time
cuda = ctypes.CDLL('{}')
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
memory = ctypes.c_uint64()
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)) == 0
batch = bytes(1 << 20)
assert cuda.cuMemcpyHtoD_v2(memory, batch, ctypes.c_size_t(1 << 20)) == 0
time.sleep(3)",
        library.display()
    );
    assert_verdict_is_cannot_tell(&[PYTHON_PROGRAM, "-c", &script]);
}

fn a_compiler_has_no_verdict() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source.c");
    let function = |number| {
        format!(
            "double f{number}(double *a, int n) {{ double s = {number}; \
             for (int i = 0; i < n; i++) for (int j = 0; j < n; j++) s += a[i] * a[j] / (1 + s * a[i ^ j]); \
             return s; }}\n"
        )
    };
    fs::write(&source, (0..100).map(function).collect::<String>()).unwrap();
    let object = directory.path().join("object.o");
    let [source, object] = [&source, &object].map(|path| path.to_str().unwrap());
    assert_verdict_is_cannot_tell(&[COMPILER_PROGRAM, "-O3", "-c", source, "-o", object]);
}

/// One worker launches kernels and waits for them. A simulation maps the driver and no ML library, and has neither loaders
/// nor peers.
fn a_simulation_on_a_gpu_has_no_verdict() {
    let directory = tempfile::tempdir().unwrap();
    install_libraries(directory.path(), Prologue::Push).unwrap();
    let spec = directory.path().join("simulation.toml");
    let text = format!(
        "duration_ms = 3000
[[group]]
name = \"simulation\"
workers = 1
work.inference = {{ period_us = 5000, launches = 20, launch_us = 20, gpu_us = 4400, gpu = {{ driver = \"{}\" }} }}
",
        directory.path().join("libcuda.so.1").display()
    );
    fs::write(&spec, text).unwrap();
    let program = env!("CARGO_BIN_EXE_zernel");
    let quiet = format!("{program} workload run {} >/dev/null", spec.display());
    let (report, output) = report_on(|_| {}, &["sh", "-c", &quiet]);
    let printed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(report["verdict"]["bound"], "cannot-tell", "{printed}");
    let evidence = report["verdict"]["evidence"].as_str().unwrap();
    assert!(
        evidence.contains("nothing shows machine learning"),
        "{printed}"
    );
}
