//! Arbitrary content of `/proc`.

use procfs::FromRead;
use procfs::process::Stat;
use zernel_model::gpu::GpuFacts;
use zernel_testkit::allocation::CountingAllocator;
use zernel_testkit::fuzz::FuzzTarget;

use crate::cgroup::Cgroup;
use crate::environment::Environment;
use crate::gpu::VisibleDevices;
use crate::{Identity, gpu, identity_from_proc};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// A limit on memory: more than any identity with all its names takes.
const MAX_IDENTITY_BYTES: usize = 64 << 10;

fn check_identity_is_bounded(identity: &Identity) {
    let text = format!("{identity:?}");
    assert!(text.len() < MAX_IDENTITY_BYTES, "{} bytes", text.len());
    let label = |text: &Option<String>| {
        text.as_ref()
            .is_none_or(|it| !it.contains(char::is_control))
    };
    assert!(
        label(&identity.job) && label(&identity.pod) && label(&identity.unit),
        "{text}"
    );
    assert!(!identity.comm.contains(char::is_control), "{text}");
}

#[test]
fn fuzz_environment() {
    let corpus = [
        "RANK=3\0LOCAL_RANK=1\0WORLD_SIZE=8\0MASTER_ADDR=node1\0MASTER_PORT=29500\0",
        "SLURM_JOB_ID=9\0SLURM_STEP_ID=0\0SLURM_PROCID=2\0SLURM_NTASKS=4\0SLURM_STEP_GPUS=0,1\0",
        "POD_NAME=a\0HOSTNAME=b\0CUDA_VISIBLE_DEVICES=GPU-713a8001-4129-af46-2093-26173f053ec1,1\0",
        "OMPI_COMM_WORLD_RANK=5\0PMI_RANK=5\0PMI_SIZE=16\0NVIDIA_VISIBLE_DEVICES=all\0",
    ];
    let words = [
        "RANK=",
        "\0",
        "CUDA_VISIBLE_DEVICES=",
        "MIG-GPU-",
        "/",
        ",",
        "4294967295",
        "-1",
        "\u{1b}[2J",
    ];
    let stat = stat_with_name(b"python3");
    let gpus = [GpuFacts::default(), GpuFacts::default()];
    let mut ranks = 0_u64;
    let target = corpus
        .into_iter()
        .fold(FuzzTarget::new("environment", 50_000), FuzzTarget::input);
    let outcome = target.words(words).run(|bytes| {
        let environment = Environment::parse(bytes);
        let identity = identity_from_proc(&stat, 0, Cgroup::default(), Some(&environment), "host");
        check_identity_is_bounded(&identity);
        ranks += u64::from(identity.rank.is_some());
        let devices = VisibleDevices::for_process(&identity, &gpus);
        let index = gpu::ordinal_to_index(&identity, 1, &gpus);
        assert_eq!(devices.index_of_ordinal(1), index);
    });
    assert!(ranks > outcome.inputs / 10, "{ranks} ranks: {outcome:?}");
}

#[test]
fn fuzz_cgroup() {
    const CONTAINER_ID: &str = "3f1b7a90c2d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e";
    const POD_UID: &str = "0e4f3c5a_1b2c_4d3e_9f80_a1b2c3d4e5f6";
    let corpus = [
        format!(
            "/kubepods.slice/kubepods-burstable-pod{POD_UID}.slice/cri-containerd-{CONTAINER_ID}.scope"
        ),
        format!("/system.slice/docker-{CONTAINER_ID}.scope/init"),
        "/slurm/uid_1000/job_42/step_0/task_0".to_owned(),
        "/user.slice/user-1000.slice/session-4.scope (deleted)".to_owned(),
        format!("/lxc.payload.build/kubepods-besteffort-pod{POD_UID}.slice:crio:{CONTAINER_ID}"),
    ];
    let words = [
        "/",
        ":",
        "pod",
        "-pod",
        ".slice",
        ".scope",
        ".service",
        "job_",
        "slurm",
        "lxc.payload.",
        CONTAINER_ID,
    ];
    let stat = stat_with_name(b"python3");
    let mut containers = 0_u64;
    let target = corpus
        .into_iter()
        .fold(FuzzTarget::new("cgroup", 50_000), FuzzTarget::input);
    let outcome = target.words(words).run(|bytes| {
        let text = String::from_utf8_lossy(bytes);
        let cgroup = Cgroup::most_specific(text.lines()).unwrap_or_default();
        containers += u64::from(cgroup.container.is_some());
        check_identity_is_bounded(&identity_from_proc(&stat, 0, cgroup, None, "host"));
    });
    assert!(
        containers > outcome.inputs / 20,
        "{containers}: {outcome:?}"
    );
}

/// Returns the `/proc/PID/stat` of a process with this name. No process has the pid in this text.
fn stat_with_name(name: &[u8]) -> Stat {
    let numbers =
        " S 1 7 7 0 -1 4194560 1 0 0 0 1 1 0 0 20 0 1 0 4242 1 1 1".to_owned() + &" 0".repeat(28);
    let line = [b"4194305 (", name, b")", numbers.as_bytes(), b"\n"].concat();
    Stat::from_read(&*line).expect("as the kernel writes it")
}

/// A process chooses its own name, of which the kernel keeps 15 bytes.
#[test]
fn fuzz_process_name() {
    let target = ["python3", "a) S 1 (b", "pt_main_thread"];
    let target = target
        .into_iter()
        .fold(FuzzTarget::new("process-name", 50_000), FuzzTarget::input);
    target
        .words([")", "(", ") R 1 ", "\n", "\u{85}"])
        .run(|bytes| {
            let mut name = bytes[..bytes.len().min(15)].to_vec();
            name.retain(|byte| *byte != 0);
            let stat = stat_with_name(&name);
            assert_eq!(stat.starttime, 4242);
            check_identity_is_bounded(&identity_from_proc(
                &stat,
                0,
                Cgroup::default(),
                None,
                "host",
            ));
        });
}
