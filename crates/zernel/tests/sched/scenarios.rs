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

use super::scenario_texts::{
    BUSY_OBSERVER_SCENARIO, CRITICAL_THREADS_SCENARIO, DISPLACED_TRAINER_SCENARIO,
    DISTURBED_RANKS_SCENARIO, DISTURBED_TURNS_SCENARIO, GPU_NODE_SCENARIO, PINNED_WEIGHT_SCENARIO,
    SPINNING_RANKS_SCENARIO, TRAINERS_SCENARIO, UNPINNED_WEIGHTS_SCENARIO, WEIGHTS_SCENARIO,
};
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
