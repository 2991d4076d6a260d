//! PyTorch without a GPU: real loaders, real collectives, real exceptions.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use zernel_ebpf::observer::{Observer, ObserverOptions, UprobeKind};
use zernel_ebpf::probes::{DataWaitCauses, DurationKind};
use zernel_softgpu::install::{Prologue, install_libraries};
use zernel_testkit::Need;

use crate::{assert_within_a_tenth, find_process};

const PYTHON_PATH: &str = "/usr/bin/python3";

/// The need for a PyTorch.
pub(crate) fn torch_need() -> Need {
    Need {
        name: "torch",
        check: || {
            torch_library()
                .map(|_| ())
                .ok_or_else(|| format!("{PYTHON_PATH} has no torch; install python3-torch"))
        },
    }
}

/// The library that a Python process would map.
fn torch_library() -> Option<&'static Path> {
    static TORCH_LIBRARY: OnceLock<Option<PathBuf>> = OnceLock::new();
    let ask = || {
        let script = "import torch, os; \
            print(os.path.realpath(os.path.dirname(torch.__file__) + '/lib/libtorch_cpu.so'))";
        let output = Command::new(PYTHON_PATH)
            .args(["-c", script])
            .output()
            .ok()?;
        let path = String::from_utf8(output.stdout).ok()?;
        let path = PathBuf::from(path.trim());
        path.is_file().then_some(path)
    };
    TORCH_LIBRARY.get_or_init(ask).as_deref()
}

fn observe_torch() -> Observer {
    observe_torch_and_driver(&UprobeKind::BEST_FIRST, None)
}

/// An observer of torch, and of a driver if there is one.
fn observe_torch_and_driver(rungs: &[UprobeKind], driver: Option<&Path>) -> Observer {
    let torch = torch_library().expect("checked");
    let options = ObserverOptions {
        rungs: rungs.to_vec(),
        ..ObserverOptions::counting_everything(
            [torch].into_iter().chain(driver).map(Path::to_owned),
        )
    };
    Observer::start(&options).expect("this machine can observe")
}

/// A script that writes to stdout and reads orders from stdin.
struct RunningScript {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl RunningScript {
    fn start(text: &str, arguments: &[&str]) -> Self {
        let mut child = Command::new(PYTHON_PATH)
            .args(["-c", text])
            .args(arguments)
            .env("OMP_NUM_THREADS", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python runs");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, output }
    }

    /// The script's next line of output.
    fn next_line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("it speaks");
        line.trim().to_owned()
    }

    fn start_order(&mut self) {
        let input = self.child.stdin.as_mut().expect("piped");
        input.write_all(b"go\n").expect("it listens");
    }

    /// The numbers in the script's next line of output.
    fn numbers_in_next_line(&mut self) -> Vec<u64> {
        let line = self.next_line();
        let numbers = line.split_whitespace().map(|number| number.parse().ok());
        let numbers: Option<Vec<u64>> = numbers.collect();
        numbers.unwrap_or_else(|| panic!("the script said {line:?}"))
    }
}

impl Drop for RunningScript {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Trains with a loader, and prints how long it waited for batches after the start signal.
const LOADERS_SCRIPT: &str = r#"
import mmap, os, sys, tempfile, time, torch
from torch.utils.data import DataLoader, Dataset

class Computed(Dataset):
    def __len__(self):
        return 100000
    def __getitem__(self, index):
        end = time.thread_time() + 0.004
        while time.thread_time() < end:
            pass
        return torch.full((1000,), float(index))

class Read(Dataset):
    def __init__(self):
        file = tempfile.NamedTemporaryFile(dir=sys.argv[3])
        file.write(bytes(16 << 20))
        file.flush()
        self.file = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        self.memory = mmap.mmap(-1, 1 << 20)
    def __len__(self):
        return 100000
    def __getitem__(self, index):
        for _ in range(4):
            os.preadv(self.file, [self.memory], (index % 16) << 20)
        return torch.full((1000,), float(index))

items = Computed() if sys.argv[1] != "0" else Read()

torch.set_num_threads(1)
model = torch.nn.Linear(1000, 1)
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
batches = iter(DataLoader(items, batch_size=8, num_workers=int(sys.argv[1])))
waited, waits = 0, 0

def step():
    global waited, waits
    before = time.monotonic_ns()
    batch = next(batches)
    waited += time.monotonic_ns() - before
    waits += 1
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()

for _ in range(3):
    step()
# So that what the clock shows is what it does, and not that others run.
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
print("ready", flush=True)
sys.stdin.readline()
waited, waits = 0, 0
for _ in range(int(sys.argv[2])):
    step()
print(waited, waits, flush=True)
sys.stdin.readline()
"#;

fn wait_sum(observer: &mut Observer, pid: u32, family: DurationKind) -> (u64, u64) {
    observer.read_counts().expect("maps can be read");
    let waits = find_process(observer, pid).duration_histogram(family);
    waits.map_or((0, 0), |waits| (waits.sum_ns, waits.count))
}

/// Observed and true waits of a script that loads data, from its start order on.
struct ObservedAndTrueWaits {
    observer: Observer,
    script: RunningScript,
    observed_before: DataWaitCauses,
    seen_ns: u64,
    truth_ns: u64,
}

fn run_loading_script(workers: &str) -> ObservedAndTrueWaits {
    let mut observer = observe_torch();
    let folder = env!("CARGO_TARGET_TMPDIR");
    let mut script = RunningScript::start(LOADERS_SCRIPT, &[workers, "40", folder]);
    assert_eq!(script.next_line(), "ready");
    observer.adopt_existing_tasks().expect("the iterator runs");
    let pid = script.child.id();
    let (sum_before, count_before) = wait_sum(&mut observer, pid, DurationKind::Dataload);
    let before = find_process(&observer, pid).probes.dataload;
    script.start_order();
    let numbers = script.numbers_in_next_line();
    let (sum, count) = wait_sum(&mut observer, pid, DurationKind::Dataload);
    eprintln!("{} waits seen of {}", count - count_before, numbers[1]);
    ObservedAndTrueWaits {
        observer,
        script,
        observed_before: before,
        seen_ns: sum - sum_before,
        truth_ns: numbers[0],
    }
}

pub(crate) fn torch_loaders_are_waited_for() {
    let loaded = run_loading_script("2");
    let process = find_process(&loaded.observer, loaded.script.child.id());
    let others = loaded.observer.processes();
    let loaders = others.filter(|other| other.loads_for == Some(process.pid));
    assert_eq!(loaders.count(), 2);
    // Two parameters, three steps before the start signal.
    let mut calls = process.calls_by_function();
    let optimizer = calls.find(|(name, _)| name.contains("addcdiv_"));
    assert_eq!(optimizer.map(|(_, count)| count.calls), Some(2 * (3 + 40)));
    assert_within_a_tenth("waits for torch's loaders", loaded.seen_ns, loaded.truth_ns);
    let (before, after) = (loaded.observed_before, process.probes.dataload);
    eprintln!("{before:?} {after:?}");
    // The loaders of the script compute: they were on CPUs, or could have been.
    let computed = |causes: DataWaitCauses| causes.prepare_ns() + causes.sched_ns();
    assert!(computed(after) - computed(before) > loaded.seen_ns / 2);
}

/// Without loaders and without a GPU, only a thread's own blocks show that it loads data.
pub(crate) fn torch_loading_alone() {
    let loaded = run_loading_script("0");
    assert_within_a_tenth("torch reading by itself", loaded.seen_ns, loaded.truth_ns);
}

/// Two ranks, one of them slow. Each prints how long it waited in its own collectives or in those of a model
/// that reduces its gradients.
const RANKS_SCRIPT: &str = r#"
import ctypes, os, sys, time, torch
import torch.distributed as dist
rank = int(sys.argv[1])
if len(sys.argv) > 4:
    driver = ctypes.CDLL(sys.argv[4])
    driver.cuInit(0)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.set_num_threads(1)
if sys.argv[3] == "model":
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
    data = torch.ones(1, 10)
    begin, meet = lambda: model(data).sum(), lambda loss: loss.backward()
else:
    tensor = torch.ones(1000)
    begin, meet = lambda: tensor, dist.all_reduce
for _ in range(3):
    meet(begin())
# So that what the clock shows is what it does, and not that others run.
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
print("ready", flush=True)
sys.stdin.readline()
waited = 0
for _ in range(40):
    if rank == 0:
        time.sleep(0.02)
    begun = begin()
    before = time.monotonic_ns()
    meet(begun)
    waited += time.monotonic_ns() - before
    end = time.thread_time() + 0.002
    while time.thread_time() < end:
        pass
meet(begin()) # shows that the last wait is over
print(waited, flush=True)
sys.stdin.readline()
"#;

/// The observed and the true time that the fast rank waited for the slow one.
fn await_peer(how: &str, driver: Option<&Path>) -> (u64, u64) {
    let mut observer = observe_torch_and_driver(&UprobeKind::BEST_FIRST, driver);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let meeting = folder.path().join("meeting");
    let meeting = meeting.to_str().expect("a plain name");
    let driver = driver.map(|path| path.to_str().expect("a plain name"));
    let mut ranks = ["0", "1"].map(|rank| {
        let arguments = [rank, meeting, how].into_iter().chain(driver);
        RunningScript::start(RANKS_SCRIPT, &arguments.collect::<Vec<_>>())
    });
    for rank in &mut ranks {
        assert_eq!(rank.next_line(), "ready");
    }
    let fast = ranks[1].child.id();
    let (before, count_before) = wait_sum(&mut observer, fast, DurationKind::DistSync);
    ranks.iter_mut().for_each(RunningScript::start_order);
    let truths: Vec<u64> = ranks
        .iter_mut()
        .map(|rank| rank.numbers_in_next_line()[0])
        .collect();
    let (after, count) = wait_sum(&mut observer, fast, DurationKind::DistSync);
    eprintln!("{} waits seen, truths {truths:?}", count - count_before);
    (after - before, truths[1])
}

pub(crate) fn torch_ranks_wait_for_the_slowest() {
    let (seen, truth) = await_peer("collective", None);
    assert_within_a_tenth("waits for a peer", seen, truth);
}

pub(crate) fn torch_models_are_waited_for() {
    let (seen, truth) = await_peer("model", None);
    assert_within_a_tenth("waits for a peer's gradients", seen, truth);
}

/// A process with a GPU may reduce its gradients through the CPU, too.
pub(crate) fn reductions_through_the_cpu_beside_a_gpu_are_waited_for() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    install_libraries(folder.path(), Prologue::Push).expect("the software GPU is built");
    let (seen, truth) = await_peer("model", Some(&folder.path().join("libcuda.so.1")));
    assert_within_a_tenth("waits for gradients with a GPU", seen, truth);
}

/// Raises in the middle of a probed function of C++.
const EXCEPTIONS_SCRIPT: &str = r#"
import sys, torch

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("on purpose")

caught = 0
for _ in range(100):
    x = torch.ones(1, requires_grad=True)
    try:
        Fails.apply(x).backward()
    except ValueError:
        caught += 1
print(caught, flush=True)
sys.stdin.readline()
"#;

pub(crate) fn torch_survives_exceptions() {
    for rung in UprobeKind::BEST_FIRST {
        let mut observer = observe_torch_and_driver(&[rung], None);
        let mut script = RunningScript::start(EXCEPTIONS_SCRIPT, &[]);
        assert_eq!(script.numbers_in_next_line(), [100], "{}", rung.name());
        observer.read_counts().expect("maps can be read");
        let process = find_process(&observer, script.child.id());
        let mut calls = process.calls_by_function();
        let backward = calls.find(|(name, _)| name.contains("Engine::execute"));
        assert_eq!(backward.map(|(_, count)| count.calls), Some(100));
    }
}
