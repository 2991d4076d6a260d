//! Tests the software NVML through the crate by which Rust programs use the real one.

mod support;

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use support::libraries::{Cuda, CudaProgram, MILLISECOND_NS, assert_success};
use support::{
    Stage, publish_file, role_of_process, run_in_fresh_process, stage_path, wait_for_file,
};
use zernel_softgpu::config;

fn load_nvml() -> Nvml {
    let path = stage_path().join("lib/libnvidia-ml.so.1");
    Nvml::builder().lib_path(path.as_os_str()).init().unwrap()
}

/// Another user has created a link at the path of the node's state.
#[test]
fn linked_node_directory_makes_cuda_and_nvml_fail() {
    const OPERATING_SYSTEM: i32 = 304;
    run_in_fresh_process("linked_node_directory_makes_cuda_and_nvml_fail", || {
        let elsewhere = stage_path().join("elsewhere");
        std::fs::create_dir(&elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, stage_path().join("node")).unwrap();
        assert_eq!((Cuda::load().cuInit)(0), OPERATING_SYSTEM);
        let library = stage_path().join("lib/libnvidia-ml.so.1");
        let refused = Nvml::builder().lib_path(library.as_os_str()).init();
        assert!(matches!(refused, Err(NvmlError::OperatingSystem)));
        assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0);
    });
}

/// A process uses both libcuda and libnvidia-ml, and shuts neither down; a forked child of it ends first.
#[test]
fn the_last_process_to_end_removes_the_state() {
    const TEST: &str = "the_last_process_to_end_removes_the_state";
    let Some(role) = role_of_process() else {
        let stage = Stage::new(TEST);
        let node = stage.path().join("node/node");
        let killed = stage.start("killed");
        zernel_testkit::eventually("it uses the node", || stage.path().join("using").exists());
        stage.start("ends").expect_success();
        assert!(node.exists(), "a process still uses it");
        killed.kill();
        assert!(node.exists());
        stage.start("ends").expect_success();
        assert!(!node.exists());
        return;
    };
    let _program = CudaProgram::new();
    std::mem::forget(load_nvml());
    if role == "killed" {
        publish_file("using", b"");
        loop {
            std::thread::park();
        }
    }
    // SAFETY: the child only ends, with the handlers of the libraries, which do nothing in a child.
    let child = support::in_forked_child(|| unsafe { libc::exit(0) });
    assert!(child);
    assert!(stage_path().join("node/node").exists());
}

#[test]
fn default_state_directory_is_removed_with_state() {
    const TEST: &str = "default_state_directory_is_removed_with_state";
    if role_of_process().is_some() {
        let _program = CudaProgram::new();
        assert!(stage_path().join("zernel-softgpu/node").exists());
        return;
    }
    let stage = Stage::new(TEST);
    let runtime = stage.path().display().to_string();
    let stage = stage
        .set_variable(config::DIRECTORY_VARIABLE, "")
        .set_variable("XDG_RUNTIME_DIR", runtime.as_str());
    stage.run_roles(1);
    assert!(!stage.path().join("zernel-softgpu").exists());
}

#[test]
fn nvml_describes_devices_as_cuda_does() {
    const TEST: &str = "nvml_describes_devices_as_cuda_does";
    if role_of_process().is_none() {
        return Stage::new(TEST)
            .set_variable(config::DEVICES_VARIABLE, 3)
            .set_variable(config::MEMORY_VARIABLE, 8u64 << 30)
            .run_roles(1);
    }
    let program = CudaProgram::on_device(1);
    let nvml = load_nvml();
    assert_eq!(nvml.device_count().unwrap(), 3);
    assert_eq!(nvml.sys_cuda_driver_version().unwrap(), 12090);
    assert!(!nvml.sys_driver_version().unwrap().is_empty());
    assert!(!nvml.sys_nvml_version().unwrap().is_empty());
    let device = nvml.device_by_index(1).unwrap();
    assert_eq!(device.name().unwrap(), "Zernel Software GPU");
    assert_eq!(
        (device.index().unwrap(), device.minor_number().unwrap()),
        (1, 1)
    );
    let uuid = device.uuid().unwrap();
    assert_eq!(
        nvml.device_by_uuid(uuid.as_str()).unwrap().index().unwrap(),
        1
    );
    let mut cuda_uuid = [0; 16];
    assert_success((program.cuda.cuDeviceGetUuid_v2)(&mut cuda_uuid, 1));
    let digits: String = cuda_uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(uuid.replace("GPU-", "").replace('-', ""), digits);
    let pci = device.pci_info().unwrap();
    assert_eq!(pci.bus_id, "00000000:02:00.0");
    assert_eq!(
        nvml.device_by_pci_bus_id(pci.bus_id.as_str())
            .unwrap()
            .index()
            .unwrap(),
        1
    );
    assert_eq!(device.memory_info().unwrap().total, 8 << 30);
    assert_eq!(device.cuda_compute_capability().unwrap().major, 9);
    assert_eq!(device.clock_info(Clock::SM).unwrap(), 1500);
    assert!(matches!(device.mig_mode(), Err(NvmlError::NotSupported)));
    assert!(matches!(
        nvml.device_by_index(3),
        Err(NvmlError::InvalidArg)
    ));
    // A function that a library lacks is an error of that call, not of the library.
    assert!(matches!(
        device.fan_speed(0),
        Err(NvmlError::FailedToLoadSymbol(_))
    ));
}

#[test]
fn nvml_shows_memory_and_load_of_living_processes() {
    const TEST: &str = "nvml_shows_memory_and_load_of_living_processes";
    match role_of_process().as_deref() {
        None => {
            let stage = Stage::new(TEST).set_variable(config::DEVICES_VARIABLE, 2);
            let worker = stage.start("worker");
            std::fs::write(stage.path().join("pid"), worker.pid().to_string()).unwrap();
            stage.start("watcher").expect_success();
            worker.kill();
            stage.start("widow").expect_success();
        }
        Some("worker") => {
            let program = CudaProgram::on_device(1);
            program.allocate_memory(123_456);
            let stream = program.create_stream();
            publish_file("ready", b"");
            // Keeps the device busy half of the time, for ever.
            loop {
                program.launch(stream, 20 * MILLISECOND_NS);
                assert_success((program.cuda.cuStreamSynchronize)(stream));
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        }
        Some("watcher") => watch_other_processes(),
        _ => {
            let nvml = load_nvml();
            let device = nvml.device_by_index(1).unwrap();
            assert_eq!(device.memory_info().unwrap().used, 0);
            assert!(device.running_compute_processes().unwrap().is_empty());
            assert_eq!(device.utilization_rates().unwrap().gpu, 0);
        }
    }
}

fn watch_other_processes() {
    let pid: u32 = String::from_utf8(wait_for_file("pid"))
        .unwrap()
        .parse()
        .unwrap();
    wait_for_file("ready");
    let nvml = load_nvml();
    let (idle, busy) = (
        nvml.device_by_index(0).unwrap(),
        nvml.device_by_index(1).unwrap(),
    );
    assert_eq!(busy.memory_info().unwrap().used, 123_456);
    assert_eq!(idle.memory_info().unwrap().used, 0);
    let processes = busy.running_compute_processes().unwrap();
    assert_eq!(processes.len(), 1);
    assert_eq!(processes[0].pid, pid);
    assert!(matches!(
        processes[0].used_gpu_memory,
        UsedGpuMemory::Used(123_456)
    ));
    assert!(idle.running_compute_processes().unwrap().is_empty());
    // On a slow machine the pauses between kernels get longer, but never shorter.
    zernel_testkit::eventually("the device is seen to be busy", || {
        let percent = busy.utilization_rates().unwrap().gpu;
        assert!(percent <= 60, "busy half of the time shows as {percent} %");
        percent >= 5
    });
    assert_eq!(idle.utilization_rates().unwrap().gpu, 0);
    let samples = busy.process_utilization_stats(None).unwrap();
    assert_eq!(samples[0].pid, pid);
    assert!((1..=60).contains(&samples[0].sm_util));
    assert!(busy.power_usage().unwrap() > idle.power_usage().unwrap());
    assert!(
        busy.temperature(TemperatureSensor::Gpu).unwrap()
            >= idle.temperature(TemperatureSensor::Gpu).unwrap()
    );
}
