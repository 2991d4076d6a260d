//! Scenarios of the lab under `zernel sched`, several in one boot, because a boot takes longer than a scenario.

use std::path::Path;
use std::thread;
use std::time::Duration;

use zernel_lab::assertion::{first_kernel_warning, judge_run};
use zernel_lab::scenario::SOFTWARE_GPU_DRIVER_PATH;
use zernel_lab::scenario::plan::{GUEST_PROGRAM_PATH, GuestPlan};
use zernel_lab::{
    DeterministicSettings, GuestAnswer, Initramfs, RunResult, Scenario, ScenarioRun,
    SchedulerChoice, Verdict, VmSpec,
};
use zernel_softgpu::install::built_libraries;
use zernel_testkit::vm;
use zernel_workload::Affinity;

use super::{ZERNEL_PATH, stripped_copy};

/// Scenarios of a fair scheduler, whose own assertions must hold. The scenarios of each row run in one boot.
const SCENARIOS_BY_BOOT: [&[&str]; 2] = [
    &["saturate", "wake", "cpusets"],
    &[
        "cpu-max",
        "cgroups-equal",
        "weights-unequal-threads",
        "restricted",
    ],
];

/// A trainer with a backward thread and a trainer that waits for its loaders, beside spinners.
const TRAINERS_SCENARIO: &str = r#"
about = "Hand-off and feed."
warmup_ms = 2000
duration_ms = 600
observe = true
training = ["backward", "loading"]
noise = ["noise"]

[[group]]
name = "backward"
workers = 3
pcomm = "trainer"
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, decode_us = 500, backward_us = 2000, gpu_us = 1500 }

[[group]]
name = "loading"
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, decode_us = 4000, forked_loaders = true, gpu_us = 500 }

[[group]]
name = "noise"
workers = 8
work = "spin_wait"
"#;

/// Each of these real-time tasks would make a step 3 ms longer if the trainer waited for it.
const DISPLACED_TRAINER_SCENARIO: &str = r#"
about = "A trainer that spins while it waits for the GPU, beside spinners, and a real-time task on each CPU."
warmup_ms = 2000
duration_ms = 1500
observe = true
training = ["trainer"]
noise = ["noise"]

[[group]]
name = "trainer"
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, ranks = 1, decode_us = 500, forked_loaders = true, gpu_us = 3000, gpu_wait = "spin" }

[[group]]
name = "noise"
workers = 8
work = "spin_wait"

[[group]]
name = "first"
affinity = { exact = [0] }
policy = { fifo = { priority = 1 } }
work.timer_deadline = { period_us = 19000, compute_us = 3000 }

[[group]]
name = "second"
affinity = { exact = [1] }
policy = { fifo = { priority = 1 } }
work.timer_deadline = { period_us = 23000, compute_us = 3000 }

[[group]]
name = "third"
affinity = { exact = [2] }
policy = { fifo = { priority = 1 } }
work.timer_deadline = { period_us = 29000, compute_us = 3000 }

[[group]]
name = "fourth"
affinity = { exact = [3] }
policy = { fifo = { priority = 1 } }
work.timer_deadline = { period_us = 31000, compute_us = 3000 }

[[assert]]
step_time = { group = "trainer", quantile = 0.9, at_most_us = 5500 }
"#;

/// A trainer that may use the first NUMA node only, until its GPU is known. The first trainer makes the library known, so
/// that the second one is observed from its start.
const GPU_NODE_SCENARIO: &str = r#"
about = "A trainer on the wrong NUMA node."
topology = "2x1x2x1"
warmup_ms = 1000
duration_ms = 5000
observe = true
training = ["trainer"]

[[group]]
name = "first"
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, decode_us = 500, forked_loaders = true, gpu_us = 1500 }

[[group]]
name = "trainer"
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, decode_us = 500, forked_loaders = true, gpu_us = 1500 }

[[cgroup]]
name = "trainer"
groups = ["trainer"]
cpus = [0, 1]

[[step]]
at_ms = 100
action = { add = "trainer" }

[[step]]
at_ms = 4000
action = { set = { name = "trainer", cpus = [0, 1, 2, 3] } }
"#;
/// The CPUs of the second NUMA node in that scenario.
const CPUS_OF_SECOND_NODE: [usize; 2] = [2, 3];

/// A shell script for the guest: runs every plan and removes the plan's cgroups.
const RUN_PLANS_SCRIPT: &str = r#"
for plan in /lab/plan-*.json; do
    /lab/zernel lab guest $plan
    echo
    /bin/busybox find /sys/fs/cgroup -mindepth 1 -depth -type d -exec /bin/busybox rmdir {} \;
done
"#;
/// Runs the only plan, and kills its observer three seconds after the scheduler is loaded.
const KILL_OBSERVER_SCRIPT: &str = r#"
/lab/zernel lab guest /lab/plan-0.json &
until [ "$(/bin/busybox cat /sys/kernel/sched_ext/state)" = enabled ]; do
    /bin/busybox sleep 0.1
done
/bin/busybox sleep 3
echo 1 >/sys/fs/cgroup/group-observer/cgroup.kill
wait
"#;
const SCENARIO_SEED: u64 = 1;
/// What the guarantee leaves to the noise of the trainers: half of the share of one cgroup in four, the observer's included,
/// of four CPUs.
const GUARANTEED_NOISE_CPUS: f64 = 0.5;
/// The group of `fakers` with the privileged thread that only pretends to train.
const FAKER_GROUP_NAME: &str = "first-faker";
/// What a tenant may get beyond its share by a thread that only pretends to train.
const MAX_GAIN_BY_FAKER: f64 = 0.02;

/// A scenario and the scheduler that it runs under.
type PlannedRun = (Scenario, SchedulerChoice);

/// A shipped scenario, shortened.
fn shipped_scenario(name: &str) -> PlannedRun {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
    let mut scenario = Scenario::load(&folder.join(name).with_extension("toml")).unwrap();
    scenario.warmup_ms = 300;
    scenario.duration_ms = 1300;
    (scenario, SchedulerChoice::Zernel(Vec::new()))
}

/// Boots once and runs all. A run that the emulator disturbed is repeated in a boot of its own.
fn run_in_one_boot(runs: &[PlannedRun]) -> Vec<RunResult> {
    let Some(results) = boot_and_run(runs, RUN_PLANS_SCRIPT, SCENARIO_SEED) else {
        return runs.iter().map(run_in_own_boot).collect();
    };
    let results = runs
        .iter()
        .zip(results)
        .map(|(run, result)| match result.verdict() {
            Verdict::Inconclusive => run_in_own_boot(run),
            _ => result,
        });
    results.collect()
}

fn run_in_own_boot((scenario, scheduler): &PlannedRun) -> RunResult {
    ScenarioRun::new(scenario.clone(), scheduler.clone())
        .guest_program(ZERNEL_PATH)
        .seed(SCENARIO_SEED + 1)
        .run_twice_if_inconclusive()
}

/// The judged answers of one boot. `None`: the machine did not complete the script, and stderr has the reason.
fn boot_and_run(runs: &[PlannedRun], script: &str, seed: u64) -> Option<Vec<RunResult>> {
    let mut files = Initramfs::new();
    files
        .add_program_at(stripped_copy(ZERNEL_PATH.as_ref()), GUEST_PROGRAM_PATH)
        .unwrap();
    for (index, (scenario, scheduler)) in runs.iter().enumerate() {
        let plan = GuestPlan::new(scenario, scheduler, seed).unwrap();
        let plan = serde_json::to_vec(&plan).unwrap();
        files
            .add_file_with_content(format!("/lab/plan-{index}.json"), plan, 0o644)
            .unwrap();
    }
    add_software_gpu(&mut files);
    let outcome = VmSpec::new(vm::obtain_kernel_of_version(&runs[0].0.kernel).unwrap())
        .cpus(4)
        .memory_mib(1024)
        .files(files)
        .command_timeout(Duration::from_secs(900))
        .boot_timeout(Duration::from_secs(900))
        .deterministic(
            DeterministicSettings::new(seed).virtual_time_limit(Duration::from_secs(100)),
        )
        .run("/bin/busybox", ["sh", "-c", script]);
    let outcome = outcome
        .inspect_err(|problem| eprintln!("seed {seed}: {problem}"))
        .ok()?;
    let output = String::from_utf8_lossy(&outcome.stdout);
    let warning = first_kernel_warning(&outcome.console_log);
    let answers = output
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    let answers: Vec<GuestAnswer> = answers.collect();
    if answers.len() != runs.len() {
        let problems = String::from_utf8_lossy(&outcome.stderr);
        eprintln!("seed {seed}: {output}\n{problems}\n{}", outcome.console_log);
        return None;
    }
    let judged = runs
        .iter()
        .zip(answers)
        .map(|((scenario, scheduler), answer)| {
            let (figures, findings) = match answer {
                GuestAnswer::Figures(figures) => {
                    let findings = judge_run(scenario, &figures, warning.as_deref());
                    (Some(figures), findings)
                }
                GuestAnswer::Error(problem) => panic!("{}: {problem}", scenario.name),
            };
            RunResult {
                scenario: scenario.name.clone(),
                scheduler: scheduler.name(),
                seed,
                figures,
                findings,
                kernel_warning: warning.clone(),
                console: outcome.console_log.clone(),
                host_seconds: 0.0,
            }
        });
    Some(judged.collect())
}

/// Adds the libraries that training needs.
pub(super) fn add_software_gpu(files: &mut Initramfs) {
    let built = built_libraries().unwrap();
    let folder = Path::new(SOFTWARE_GPU_DRIVER_PATH).parent().unwrap();
    for (library, name) in [
        ("libzernel_softgpu_cuda.so", "libcuda.so.1"),
        ("libzernel_softgpu_nccl.so", "libnccl.so.2"),
    ] {
        let library = stripped_copy(&built.join(library));
        files.add_host_file(library, folder.join(name)).unwrap();
    }
}

/// The boots run at once. In the first one, training follows: with privilege, threads that a trainer wakes and waits for
/// become critical, and loaders preempt others or are kept on their CPU. Spinners keep the guarantee. In the second one,
/// a trainer that loses its CPU to a real-time task takes another one. In no scenario a task starves.
pub(super) fn scenarios_pass() {
    let trainers = Scenario::parse(TRAINERS_SCENARIO, "trainers.toml").unwrap();
    // All tasks of the guest are tasks of root.
    let privileged = SchedulerChoice::Zernel(["--privilege", "user=0"].map(str::to_owned).to_vec());
    let mut boots = SCENARIOS_BY_BOOT.map(|names| {
        names
            .iter()
            .map(|name| shipped_scenario(name))
            .collect::<Vec<_>>()
    });
    let trainers = (trainers, privileged.clone());
    boots[0].push(trainers.clone());
    let displaced = Scenario::parse(DISPLACED_TRAINER_SCENARIO, "displaced.toml").unwrap();
    boots[1].push((displaced, privileged));
    let results: Vec<RunResult> = thread::scope(|scope| {
        let boots = boots
            .each_ref()
            .map(|runs| scope.spawn(|| run_in_one_boot(runs)));
        boots
            .into_iter()
            .flat_map(|boot| boot.join().unwrap())
            .collect()
    });
    for result in &results {
        assert_eq!(result.verdict(), Verdict::Pass, "{result}");
    }
    let trained = results.iter().find(|result| result.scenario == "trainers");
    let trained = trained.expect("all scenarios ran");
    for label in ["handed on", "loaders:"] {
        assert!(sum_printed_after(trained, label) > 10, "{label}: {trained}");
    }
    // A trainer blocks while threads of its process wait for a CPU: its backward thread, for example. That is rare, because
    // a thread that a critical one wakes hardly ever waits, and some runs have no such moment.
    let any_thread_rose = sum_printed_after(trained, "raised ") > 0
        || (SCENARIO_SEED + 1..SCENARIO_SEED + 6).any(|seed| {
            let run = ScenarioRun::new(trainers.0.clone(), trainers.1.clone());
            let result = run.guest_program(ZERNEL_PATH).seed(seed).run();
            sum_printed_after(&result, "raised ") > 0
        });
    assert!(any_thread_rose, "{trained}");
    let noise = cpus_used_by_group(trained, "noise");
    assert!(noise >= GUARANTEED_NOISE_CPUS, "{noise:.3} CPUs: {trained}");
}

/// The CPUs that a group used.
fn cpus_used_by_group(result: &RunResult, name: &str) -> f64 {
    let figures = result.figures.as_ref().expect("the machine ran");
    let group = figures.groups.iter().find(|group| group.name == name);
    let group = group.expect("the scenario has this group");
    group.cpu_ns as f64 / figures.window_ns as f64
}

/// The threads of a trainer move to the NUMA node of its GPU, and stay there.
pub(super) fn threads_run_on_the_node_of_their_gpu() {
    let scenario = Scenario::parse(GPU_NODE_SCENARIO, "gpu-node.toml").unwrap();
    let scheduler = SchedulerChoice::Zernel(["--gpu-nodes", "1"].map(str::to_owned).to_vec());
    let result = run_in_own_boot(&(scenario, scheduler));
    assert_eq!(result.verdict(), Verdict::Pass, "{result}");
    let figures = result.figures.as_ref().expect("the machine ran");
    let trainer = figures
        .find_group("trainer")
        .expect("it is in the scenario");
    let cpus = &trainer.cpus_used;
    assert!(
        CPUS_OF_SECOND_NODE.iter().any(|cpu| cpus.contains(cpu)),
        "{cpus:?}"
    );
    let moves = sum_printed_after(&result, "NUMA node of their GPU");
    assert!(moves * 10 < trainer.rounds, "{moves} moves: {result}");
}

/// A thread that only launches is critical all the time. The tenant of that thread gets no more than its share as a
/// whole: the tenant's spinners pay for what the thread takes.
pub(super) fn a_tenant_pays_for_its_faker() {
    let (scenario, _) = shipped_scenario("fakers");
    assert_tenant_pays_for_faker(scenario);
}

/// A tenant also pays for a faking thread that may use one CPU only.
pub(super) fn a_tenant_pays_for_a_pinned_faker() {
    let (mut scenario, _) = shipped_scenario("fakers");
    for group in &mut scenario.groups {
        if group.name == FAKER_GROUP_NAME {
            group.affinity = Affinity::Exact([0].into());
        }
    }
    assert_tenant_pays_for_faker(scenario);
}

/// Runs `fakers` with its first cgroup privileged. The faker has a CPU to itself, and its tenant no more than its share.
fn assert_tenant_pays_for_faker(scenario: Scenario) {
    let arguments = ["--privilege", "cgroup=/sys/fs/cgroup/first"];
    let privileged = SchedulerChoice::Zernel(arguments.map(str::to_owned).to_vec());
    let result = run_in_own_boot(&(scenario, privileged));
    let figures = result.figures.as_ref().expect("the machine ran");
    let groups = || figures.groups.iter();
    let tenant = groups().filter(|group| group.name.starts_with("first-"));
    let got: u64 = tenant.map(|group| group.cpu_ns).sum();
    let all: u64 = groups().map(|group| group.cpu_ns).sum();
    // The weights of the three cgroups are 200, 100 and 100.
    let gain = got as f64 / (all as f64 / 2.0) - 1.0;
    assert!(gain <= MAX_GAIN_BY_FAKER, "gain {gain:.4}: {result}");
    let cpus = cpus_used_by_group(&result, FAKER_GROUP_NAME);
    assert!(cpus > 0.9, "critical threads go first: {cpus:.3} CPUs");
}

/// Beside a task of great weight the virtual clock slows down. Tasks of tiny weight that wait for it still run before the
/// kernel's watchdog ejects the scheduler.
const WEIGHTS_SCENARIO: &str = r#"
about = "Tiny weights beside a great one."
topology = "1"
warmup_ms = 100
duration_ms = 3000

[[group]]
name = "light"
workers = 2
nice = 19
work = "spin_wait"

[[group]]
name = "heavy"
nice = -20
work = "spin_wait"

[[step]]
at_ms = 300
action = { add = "heavy" }

[[assert]]
starvation = { at_most_ms = 800 }
"#;

/// The weights scenario for tasks in the queue of a cache: it needs two CPUs, because on one CPU all tasks count as
/// pinned.
const UNPINNED_WEIGHTS_SCENARIO: &str = r#"
about = "Tiny weights beside great ones on two CPUs."
topology = "2"
warmup_ms = 100
duration_ms = 3000

[[group]]
name = "light"
workers = 4
nice = 19
work = "spin_wait"

[[group]]
name = "heavy"
workers = 2
nice = -20
work = "spin_wait"

[[step]]
at_ms = 300
action = { add = "heavy" }

[[assert]]
starvation = { at_most_ms = 800 }
"#;

/// The CPU compares the pinned task with the others by the shared clock, which hardly advances.
const PINNED_WEIGHT_SCENARIO: &str = r#"
about = "A pinned task of tiny weight beside great ones that may use both CPUs."
topology = "2"
warmup_ms = 100
duration_ms = 3000

[[group]]
name = "light"
nice = 19
affinity = { exact = [0] }
work = "spin_wait"

[[group]]
name = "heavy"
workers = 3
nice = -20
work = "spin_wait"

[[step]]
at_ms = 300
action = { add = "heavy" }

[[assert]]
starvation = { at_most_ms = 800 }
"#;

/// Every CPU has critical threads of its own at any time.
const CRITICAL_THREADS_SCENARIO: &str = r#"
about = "Two pinned critical threads per CPU beside one that may use both CPUs."
topology = "2"
warmup_ms = 2500
duration_ms = 2500
observe = true
training = ["pinned", "free"]

[[group]]
name = "pinned"
workers = 4
affinity = { per_worker = [[0], [0], [1], [1]] }
work.inference = { gpu = { driver = "/softgpu/libcuda.so.1" }, period_us = 1, copy_kib = 1, launches = 50, launch_us = 20, gpu_us = 1, gpu_wait = "spin" }

[[group]]
name = "free"
work.inference = { gpu = { driver = "/softgpu/libcuda.so.1" }, period_us = 1, copy_kib = 1, launches = 50, launch_us = 20, gpu_us = 1, gpu_wait = "spin" }

[[assert]]
starvation = { at_most_ms = 100 }
"#;

/// All scenarios pass, and in each of them tasks had to be moved to the front of their queue.
pub(super) fn tiny_weights_do_not_wait_for_ever() {
    let scenarios = [
        (WEIGHTS_SCENARIO, "weights.toml"),
        (UNPINNED_WEIGHTS_SCENARIO, "unpinned-weights.toml"),
        (PINNED_WEIGHT_SCENARIO, "pinned-weight.toml"),
    ];
    thread::scope(|scope| {
        for (text, name) in scenarios {
            scope.spawn(move || {
                let scenario = Scenario::parse(text, name).unwrap();
                let arguments = ["--watchdog-ms", "1000"].map(str::to_owned).to_vec();
                let result = run_in_own_boot(&(scenario, SchedulerChoice::Zernel(arguments)));
                assert_eq!(result.verdict(), Verdict::Pass, "{result}");
                assert!(sum_printed_after(&result, "aged ") > 0, "{result}");
            });
        }
    });
}

pub(super) fn critical_threads_take_turns() {
    let scenario = Scenario::parse(CRITICAL_THREADS_SCENARIO, "critical.toml").unwrap();
    let arguments = ["--privilege", "all"].map(str::to_owned).to_vec();
    let result = run_in_own_boot(&(scenario, SchedulerChoice::Zernel(arguments)));
    assert_eq!(result.verdict(), Verdict::Pass, "{result}");
    // Five threads share two CPUs.
    let cpus = cpus_used_by_group(&result, "free");
    assert!(cpus > 0.3, "{cpus:.3} CPUs: {result}");
}

/// Critical threads that never sleep leave a tenth of the CPUs to all others, and the observer is one of them.
const BUSY_OBSERVER_SCENARIO: &str = r#"
about = "A critical thread per CPU that never sleeps, spinners and the observer."
topology = "2"
warmup_ms = 2500
duration_ms = 2500
observe = true
training = ["critical"]
noise = ["noise"]

[[group]]
name = "critical"
workers = 2
work.inference = { gpu = { driver = "/softgpu/libcuda.so.1" }, period_us = 1, copy_kib = 1, launches = 50, launch_us = 20, gpu_us = 1, gpu_wait = "spin" }

[[group]]
name = "noise"
workers = 6
work = "spin_wait"

[[assert]]
starvation = { at_most_ms = 1000 }
"#;
/// The time between two beats of the observer's heart. Without a beat for five times as long it counts as dead.
const LONGEST_OBSERVER_WAIT_NS: u64 = 200_000_000;

/// The observer runs often enough for its heart to beat in time, and critical threads keep their CPUs.
pub(super) fn the_observer_does_not_starve() {
    let scenario = Scenario::parse(BUSY_OBSERVER_SCENARIO, "busy-observer.toml").unwrap();
    let arguments = ["--privilege", "all", "--guarantee", "0.1"].map(str::to_owned);
    let result = run_in_own_boot(&(scenario, SchedulerChoice::Zernel(arguments.to_vec())));
    assert_eq!(result.verdict(), Verdict::Pass, "{result}");
    let figures = result.figures.as_ref().expect("the machine ran");
    let wait_ns = figures.observer_longest_wait_ns.expect("an observer ran");
    assert!(
        wait_ns <= LONGEST_OBSERVER_WAIT_NS,
        "{wait_ns} ns: {result}"
    );
    let output = &figures.scheduler.output;
    assert!(!output.contains("no observer runs"), "{output}");
    let cpus = cpus_used_by_group(&result, "critical");
    assert!(cpus > 1.7, "{cpus:.3} CPUs: {result}");
}

/// Ranks that spin until the GPU is done, and loaders that lack CPUs.
const SPINNING_RANKS_SCENARIO: &str = r#"
about = "Two ranks that spin while they wait for the GPU, and eight loaders."
warmup_ms = 3000
duration_ms = 2000
observe = true
training = ["training"]

[[group]]
name = "training"
workers = 2
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, ranks = 2, loaders = 4, forked_loaders = true, decode_us = 8000, gpu_us = 4000, gpu_wait = "spin" }
"#;

/// The same ranks beside spinners, while a CPU goes and comes back, and while the CPUs and the limit of their cgroup change.
const DISTURBED_RANKS_SCENARIO: &str = r#"
about = "Two ranks that spin while they wait for the GPU, and eight loaders beside spinners, with changes of their CPUs."
warmup_ms = 2000
duration_ms = 1600
observe = true
training = ["training"]
noise = ["noise"]

[[group]]
name = "training"
workers = 2
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, ranks = 2, loaders = 4, forked_loaders = true, decode_us = 8000, gpu_us = 4000, gpu_wait = "spin" }

[[group]]
name = "noise"
workers = 4
work = "spin_wait"

[[cgroup]]
name = "training"
groups = ["training"]

[[step]]
at_ms = 2200
action = { set = { name = "training", cpus = [0, 1] } }

[[step]]
at_ms = 2400
action = { set = { name = "training", cpus = [2, 3] } }

[[step]]
at_ms = 2600
action = { set = { name = "training", cpus = [0, 1, 2, 3] } }

[[step]]
at_ms = 2700
action = { offline = 3 }

[[step]]
at_ms = 3000
action = { online = 3 }

[[step]]
at_ms = 3200
action = { set = { name = "training", max_ms_per_100ms = 150 } }
"#;

/// With `--lend`, ranks that spin until the GPU is done lend their CPUs. Nothing is lent without the flag, nor without privilege.
/// Lending goes on while the CPUs of the ranks change. How many more steps it brings depends on the build of the guest's programs;
/// the lab measures that.
pub(super) fn spinning_ranks_lend_their_cpus() {
    let scenario = Scenario::parse(SPINNING_RANKS_SCENARIO, "spinning-ranks.toml").unwrap();
    let runs = [
        &["--privilege", "all"][..],
        &["--privilege", "all", "--lend"],
        &["--lend"],
    ];
    let choice = |arguments: &[&str]| {
        SchedulerChoice::Zernel(arguments.iter().map(ToString::to_string).collect())
    };
    let mut runs = runs
        .map(|arguments| (scenario.clone(), choice(arguments)))
        .to_vec();
    let disturbed = Scenario::parse(DISTURBED_RANKS_SCENARIO, "disturbed-ranks.toml").unwrap();
    runs.push((disturbed, choice(&["--privilege", "all", "--lend"])));
    let results = run_in_one_boot(&runs);
    for result in &results {
        assert_eq!(result.verdict(), Verdict::Pass, "{result}");
    }
    let [without, lending, unprivileged, disturbed] = &results[..] else {
        panic!("four runs were planned");
    };
    for result in [lending, disturbed] {
        assert!(sum_printed_after(result, "lent ") > 0, "{result}");
    }
    for result in [without, unprivileged] {
        let output = &result
            .figures
            .as_ref()
            .expect("the machine ran")
            .scheduler
            .output;
        assert!(!output.contains("lent "), "{output}");
    }
}

/// The same ranks while their turns are disturbed: by real-time tasks, by spinners that can run on one CPU only, and by
/// the end of the observer.
const DISTURBED_TURNS_SCENARIO: &str = r#"
about = "Two ranks that spin while they wait for the GPU, and eight loaders, beside real-time tasks and pinned spinners."
warmup_ms = 1000
duration_ms = 4000
observe = true
training = ["training"]
noise = ["pinned"]

[[group]]
name = "training"
workers = 2
work.ml_training = { gpu = { driver = "/softgpu/libcuda.so.1" }, ranks = 2, loaders = 4, forked_loaders = true, decode_us = 8000, gpu_us = 4000, gpu_wait = "spin" }

[[group]]
name = "pinned"
workers = 4
affinity = { per_worker = [[0], [1], [2], [3]] }
work = "spin_wait"

[[group]]
name = "realtime"
workers = 4
affinity = { per_worker = [[0], [1], [2], [3]] }
policy = { fifo = { priority = 1 } }
work.timer_deadline = { period_us = 3700, compute_us = 400 }
"#;

/// Whatever ends a turn on a lent CPU, the thread that lends it runs again, and no task starves.
pub(super) fn lent_turns_may_be_disturbed() {
    let scenario = Scenario::parse(DISTURBED_TURNS_SCENARIO, "disturbed-turns.toml").unwrap();
    let arguments = ["--privilege", "all", "--lend"].map(str::to_owned).to_vec();
    let run = [(scenario, SchedulerChoice::Zernel(arguments))];
    let boot = |seed| {
        let results = boot_and_run(&run, KILL_OBSERVER_SCRIPT, seed)?;
        results.into_iter().next()
    };
    let result = boot(SCENARIO_SEED).filter(|first| first.verdict() != Verdict::Inconclusive);
    let result = result.or_else(|| boot(SCENARIO_SEED + 1));
    let result = result.expect("the machine ran");
    assert_eq!(result.verdict(), Verdict::Pass, "{result}");
    assert!(sum_printed_after(&result, "lent ") > 0, "{result}");
    let figures = result.figures.as_ref().expect("the machine ran");
    let output = &figures.scheduler.output;
    assert!(output.contains("no observer runs"), "{output}");
}

/// The sum of the numbers that the scheduler printed after a label when it ended.
fn sum_printed_after(result: &RunResult, label: &str) -> u64 {
    let figures = result.figures.as_ref().expect("the machine ran");
    let output = &figures.scheduler.output;
    let (_, rest) = output
        .split_once(label)
        .unwrap_or_else(|| panic!("no `{label}` in:\n{output}"));
    let item = rest.split([';', '\n']).next().unwrap_or_default();
    let numbers = item.split(|letter: char| !letter.is_ascii_digit());
    numbers
        .filter_map(|digits| digits.parse::<u64>().ok())
        .sum()
}
