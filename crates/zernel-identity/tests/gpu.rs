//! GPUs and their processes, on the software GPU.
//!
//! The libraries of the software GPU read the environment once, so each role runs in its own
//! process: this program again, with the role in a variable.

use std::env;
use std::ffi::c_int;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

use libloading::Library;
use zernel_identity::gpu::{
    GpuFacts, Gpus, NVML_LIBRARY_VARIABLE, VisibleDevices, ordinal_to_index,
};
use zernel_identity::{Identity, identify};
use zernel_softgpu::config;
use zernel_softgpu::install::{Prologue, install_libraries};
use zernel_testkit::{Need, root, trial};

const ROLE_VARIABLE: &str = "ZERNEL_TEST_ROLE";
/// Pid and device UUIDs of the trainer, for the watcher.
const TRAINER_VARIABLE: &str = "ZERNEL_TEST_TRAINER";
/// Folder of the software GPU's libraries.
const LIBRARIES_FOLDER: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/gpu");
const DEVICE_COUNT: u32 = 3;
const MEMORY_BYTES: u64 = 8 << 30;
const ALLOCATED_BYTES: usize = 123_456;

fn main() -> ExitCode {
    match env::var(ROLE_VARIABLE).as_deref() {
        Ok("describe") => check_described_gpus(),
        Ok("train") => allocate_and_print_uuids(),
        Ok("watch") => check_trainer_on_gpu(),
        Ok(role) => panic!("no role {role}"),
        Err(_) => {
            install_libraries(Path::new(LIBRARIES_FOLDER), Prologue::Push)
                .expect("cargo has built the software GPU");
            return zernel_testkit::main([
                trial("gpu_facts_match_the_driver", &[], || {
                    run_to_success(role_command("describe", &create_node_folder()));
                }),
                trial(
                    "a_process_is_found_on_its_gpu",
                    &[],
                    a_process_is_found_on_its_gpu,
                ),
                trial(
                    "a_container_sees_the_gpus_with_a_device_node",
                    &[root(), mount_namespaces_need()],
                    a_container_sees_the_gpus_with_a_device_node,
                ),
            ]);
        }
    }
    ExitCode::SUCCESS
}

/// Creates the state folder of a simulated machine.
fn create_node_folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn role_command(name: &str, node: &tempfile::TempDir) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .env(ROLE_VARIABLE, name)
        .env(NVML_LIBRARY_VARIABLE, library_path("libnvidia-ml.so.1"))
        .env(config::DIRECTORY_VARIABLE, node.path().join("node"))
        .env(config::DEVICES_VARIABLE, DEVICE_COUNT.to_string())
        .env(config::MEMORY_VARIABLE, MEMORY_BYTES.to_string())
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env_remove("CUDA_DEVICE_ORDER");
    command
}

fn library_path(name: &str) -> PathBuf {
    Path::new(LIBRARIES_FOLDER).join(name)
}

fn run_to_success(mut command: Command) {
    let status = command.status().unwrap();
    assert!(status.success(), "{command:?}: {status}");
}

fn check_described_gpus() {
    let gpus = Gpus::open();
    assert_eq!(gpus.unavailable_reason(), None);
    assert!(gpus.driver_version().is_some());
    assert_eq!(gpus.gpu_count(), DEVICE_COUNT);
    let facts = gpus.read_facts();
    assert_eq!(facts.len(), DEVICE_COUNT as usize);
    for (index, gpu) in facts.iter().enumerate() {
        assert_eq!(gpu.index as usize, index);
        assert_eq!(gpu.minor, Some(gpu.index));
        assert_eq!(gpu.uuid, zernel_softgpu::device::uuid_text(index));
        assert_eq!(gpu.name, zernel_softgpu::device::DEVICE_NAME);
        assert_eq!(
            (gpu.memory_total, gpu.memory_used),
            (Some(MEMORY_BYTES), Some(0))
        );
        assert_eq!(gpu.utilization, Some(0));
        assert!(!gpu.mig_enabled && gpu.mig.is_empty());
    }
    assert_eq!(gpus.process_memory(), []);
}

/// CUDA devices 0 and 1 of the trainer are the machine's GPUs 2 and 0.
fn a_process_is_found_on_its_gpu() {
    let node = create_node_folder();
    let mut command = role_command("train", &node);
    let mut trainer = WaitingProcess::start(command.env("CUDA_VISIBLE_DEVICES", "2,0"));
    let uuids = trainer.read_line();
    let mut watcher = role_command("watch", &node);
    watcher.env(TRAINER_VARIABLE, format!("{} {uuids}", trainer.child.id()));
    run_to_success(watcher);
}

/// Allocates memory on the second device and prints the UUIDs of its devices.
fn allocate_and_print_uuids() {
    // SAFETY: this is our own library, whose initialisers do nothing.
    let cuda = unsafe { Library::new(library_path("libcuda.so.1")) }.unwrap();
    let (mut count, mut context, mut address) = (0, 0_u64, 0_u64);
    // SAFETY: the signatures are those of NVIDIA's headers, and all pointers are to values that
    // outlive the calls.
    unsafe {
        let init: extern "C" fn(u32) -> c_int = *cuda.get(b"cuInit").unwrap();
        let get_count: extern "C" fn(*mut c_int) -> c_int = *cuda.get(b"cuDeviceGetCount").unwrap();
        let retain: extern "C" fn(*mut u64, c_int) -> c_int =
            *cuda.get(b"cuDevicePrimaryCtxRetain").unwrap();
        let set_current: extern "C" fn(u64) -> c_int = *cuda.get(b"cuCtxSetCurrent").unwrap();
        let allocate: extern "C" fn(*mut u64, usize) -> c_int =
            *cuda.get(b"cuMemAlloc_v2").unwrap();
        assert_eq!(init(0), 0);
        assert_eq!(get_count(&raw mut count), 0);
        assert_eq!(retain(&raw mut context, 1), 0);
        assert_eq!(set_current(context), 0);
        assert_eq!(allocate(&raw mut address, ALLOCATED_BYTES), 0);
    }
    let uuids: Vec<_> = (0..count)
        .map(|ordinal| uuid_of_device(&cuda, ordinal))
        .collect();
    println!("{}", uuids.join(" "));
    // Wait until the test closes the pipe.
    let _ = std::io::stdin().lines().count();
}

fn uuid_of_device(cuda: &Library, ordinal: c_int) -> String {
    let mut bytes = [0_u8; 16];
    // SAFETY: the signature is that of NVIDIA's header; the call writes sixteen bytes.
    unsafe {
        let get: extern "C" fn(*mut [u8; 16], c_int) -> c_int =
            *cuda.get(b"cuDeviceGetUuid_v2").unwrap();
        assert_eq!(get(&raw mut bytes, ordinal), 0);
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn check_trainer_on_gpu() {
    let trainer = env::var(TRAINER_VARIABLE).unwrap();
    let (pid, uuids) = trainer.split_once(' ').unwrap();
    let pid: u32 = pid.parse().unwrap();
    let (gpus, identity) = (Gpus::open(), identify(pid).unwrap());
    let mut facts = gpus.read_facts();
    // The machine may have device nodes of real GPUs.
    facts.iter_mut().for_each(|gpu| gpu.minor = None);
    let used = gpus.process_memory();
    assert_eq!(used.len(), 1, "{used:?}");
    assert_eq!((used[0].pid, used[0].index), (pid, 0));
    assert_eq!(used[0].bytes, Some(ALLOCATED_BYTES as u64));
    assert_eq!(used[0].instance, None);
    assert_eq!(facts[0].memory_used, used[0].bytes);
    let visible = VisibleDevices::for_process(&identity, &facts);
    assert_eq!(visible.assumptions, []);
    let translated: Vec<_> = visible
        .devices
        .iter()
        .map(|device| device.uuid.replace("GPU-", "").replace('-', ""))
        .collect();
    assert_eq!(translated.join(" "), uuids);
    let indices = [0, 1, 2].map(|ordinal| ordinal_to_index(&identity, ordinal, &facts));
    assert_eq!(indices, [Some(2), Some(0), None]);
}

const MOUNT_NAMESPACE_COMMAND: [&str; 4] = ["unshare", "--mount", "sh", "-c"];

fn mount_namespaces_need() -> Need {
    Need {
        name: "root",
        check: || {
            let [program, arguments @ ..] = MOUNT_NAMESPACE_COMMAND;
            let status = Command::new(program)
                .args(arguments)
                .arg("mount -t tmpfs tmpfs /dev")
                .stderr(Stdio::null())
                .status();
            match status {
                Ok(status) if status.success() => Ok(()),
                _ => Err("cannot mount in a namespace".into()),
            }
        },
    }
}

fn a_container_sees_the_gpus_with_a_device_node() {
    let facts: Vec<_> = (0..4)
        .map(|index| GpuFacts {
            index,
            uuid: zernel_softgpu::device::uuid_text(index as usize),
            minor: Some(index),
            ..GpuFacts::default()
        })
        .collect();
    // Plain files suffice, because only the names are read.
    let script = "mount -t tmpfs tmpfs /dev \
                  && touch /dev/nvidia1 /dev/nvidia3 /dev/nvidiactl && echo && read line";
    let [program, arguments @ ..] = MOUNT_NAMESPACE_COMMAND;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .arg(script)
        .env("CUDA_VISIBLE_DEVICES", "1,0");
    let mut container = WaitingProcess::start(&mut command);
    container.read_line();
    let identity = identify(container.child.id()).unwrap();
    let indices = |identity: &Identity| {
        let visible = VisibleDevices::for_process(identity, &facts);
        [0, 1, 2].map(|ordinal| visible.index_of_ordinal(ordinal))
    };
    assert_eq!(indices(&identity), [Some(3), Some(1), None]);
    // After the process has exited, only the environment that was read before is known.
    let exited = Identity {
        start_time: identity.start_time - 1,
        ..identity
    };
    assert_eq!(indices(&exited), [Some(1), Some(0), None]);
}

/// A process that prints a line and then waits for the end of its input.
struct WaitingProcess {
    child: Child,
}

impl WaitingProcess {
    fn start(command: &mut Command) -> Self {
        let child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self { child }
    }

    fn read_line(&mut self) -> String {
        let output = self.child.stdout.take().unwrap();
        let line = BufReader::new(output).lines().next();
        line.expect("the process prints a line").unwrap()
    }
}

impl Drop for WaitingProcess {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
