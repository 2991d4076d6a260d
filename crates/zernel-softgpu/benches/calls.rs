//! Calls per second of the software CUDA driver, without and with its truth log.
//!
//! `cargo bench -p zernel-softgpu`

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use std::{env, ptr};

use zernel_softgpu::config;
use zernel_softgpu::install::{Prologue, install_libraries};

const DIRECTORY_VARIABLE: &str = "SOFTGPU_BENCH_DIRECTORY";
const CALL_COUNT: u32 = 1_000_000;

type PlainFunction = extern "C" fn(u32) -> i32;
type StoreFunction = extern "C" fn(*mut u64, i32) -> i32;
type HandleFunction = extern "C" fn(u64) -> i32;
type AllocateFunction = extern "C" fn(*mut u64, usize) -> i32;
type LaunchFunction =
    extern "C" fn(u64, u32, u32, u32, u32, u32, u32, u32, u64, *const *const u64, *const u8) -> i32;
type LoadFunction = extern "C" fn(*mut u64, *const i8) -> i32;
type FindFunction = extern "C" fn(*mut u64, u64, *const i8) -> i32;

fn main() {
    match env::var_os(DIRECTORY_VARIABLE) {
        Some(directory) => measure_calls(Path::new(&directory)),
        None => compare_log_modes(),
    }
}

/// Runs the measurement three times in fresh processes: without a truth log, with a log of counts, with a log of counts
/// and events.
fn compare_log_modes() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench-calls");
    install_libraries(&directory, Prologue::Push)
        .expect("the libraries are built with the benchmark");
    println!(
        "{:>10} {:>10} {:>12} {:>12} {:>16}",
        "log", "threads", "launch/s", "get/s", "alloc+free/s"
    );
    for (name, log, events) in [
        ("none", false, "0"),
        ("counts", true, "0"),
        ("events", true, "1"),
    ] {
        let truth = directory.join("truth");
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .env(DIRECTORY_VARIABLE, &directory)
            .env(config::DIRECTORY_VARIABLE, directory.join("node"));
        command
            .env(config::LOG_EVENTS_VARIABLE, events)
            .env("SOFTGPU_BENCH_NAME", name);
        if log {
            command.env(config::LOG_VARIABLE, &truth);
        }
        assert!(command.status().unwrap().success());
        let _ = std::fs::remove_dir_all(truth);
    }
    let _ = std::fs::remove_dir_all(directory);
}

struct LoadedProgram {
    launch: LaunchFunction,
    kernel: u64,
    get_current_context: extern "C" fn(*mut u64) -> i32,
    set_current_context: HandleFunction,
    allocate: AllocateFunction,
    free: HandleFunction,
    context: u64,
}

fn load_program(directory: &Path) -> LoadedProgram {
    let path: PathBuf = directory.join("libcuda.so.1");
    // SAFETY: loads the software GPU's library; the signatures are those of `cuda.h`.
    unsafe {
        let library: &libloading::Library =
            Box::leak(Box::new(libloading::Library::new(path).unwrap()));
        let (mut context, mut module, mut kernel) = (0, 0, 0);
        assert_eq!(library.get::<PlainFunction>(b"cuInit").unwrap()(0), 0);
        assert_eq!(
            library
                .get::<StoreFunction>(b"cuDevicePrimaryCtxRetain")
                .unwrap()(&mut context, 0),
            0
        );
        let set_current_context = *library.get::<HandleFunction>(b"cuCtxSetCurrent").unwrap();
        assert_eq!(set_current_context(context), 0);
        let image = c"softgpu kernel step 1\n".as_ptr();
        assert_eq!(
            library.get::<LoadFunction>(b"cuModuleLoadData").unwrap()(&mut module, image),
            0
        );
        let name = c"step".as_ptr();
        assert_eq!(
            library.get::<FindFunction>(b"cuModuleGetFunction").unwrap()(&mut kernel, module, name),
            0
        );
        LoadedProgram {
            launch: *library.get(b"cuLaunchKernel").unwrap(),
            kernel,
            get_current_context: *library.get(b"cuCtxGetCurrent").unwrap(),
            set_current_context,
            allocate: *library.get(b"cuMemAlloc_v2").unwrap(),
            free: *library.get(b"cuMemFree_v2").unwrap(),
            context,
        }
    }
}

fn measure_calls(directory: &Path) {
    let program = &load_program(directory);
    let launch = || {
        let code = (program.launch)(
            program.kernel,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            0,
            ptr::null(),
            ptr::null(),
        );
        assert_eq!(code, 0);
    };
    let get = || assert_eq!((program.get_current_context)(&mut 0), 0);
    let allocate = || {
        let mut address = 0;
        assert_eq!((program.allocate)(&mut address, 4096), 0);
        assert_eq!((program.free)(address), 0);
    };
    for threads in [1, 4] {
        let rates = [
            calls_per_second(program, threads, CALL_COUNT, &launch),
            calls_per_second(program, threads, CALL_COUNT, &get),
            calls_per_second(program, threads, CALL_COUNT / 10, &allocate) * 2.0,
        ];
        let name = env::var("SOFTGPU_BENCH_NAME").unwrap_or_default();
        println!(
            "{name:>10} {threads:>10} {:>12.0} {:>12.0} {:>16.0}",
            rates[0], rates[1], rates[2]
        );
    }
}

/// Calls per second of all threads together.
fn calls_per_second(
    program: &LoadedProgram,
    threads: u32,
    calls: u32,
    call: &(impl Fn() + Sync),
) -> f64 {
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                assert_eq!((program.set_current_context)(program.context), 0);
                (0..calls).for_each(|_| call());
            });
        }
    });
    f64::from(threads * calls) / begin.elapsed().as_secs_f64()
}
