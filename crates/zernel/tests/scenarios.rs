//! The lab judges schedulers: EEVDF passes what it should, each broken scheduler is caught, and a run repeats to
//! the last digit.
//!
//! The scenarios are the shipped ones, shortened. Two boots run at once.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::thread;

use zernel_lab::{RunResult, Scenario, ScenarioRun, SchedulerChoice, Verdict};
use zernel_testkit::{trial, vm};

const ZERNEL_PATH: &str = env!("CARGO_BIN_EXE_zernel");

/// Broken schedulers, a scenario in which each is caught, and how the finding begins.
const BROKEN_SCHEDULERS: [(&str, &str, &[&str]); 7] = [
    ("broken-starve", "saturate", &["starvation:"]),
    ("broken-cpusets", "cpusets", &["scheduler:"]),
    // No sched_ext scheduler has the kernel's bandwidth control, so the plain queue ignores it.
    ("fair", "cpu-max", &["cpu limit:"]),
    ("broken-stall", "saturate", &["starvation:"]),
    ("broken-dispatch", "saturate", &["starvation:"]),
    ("broken-leak", "cgroups-equal", &["fairness"]),
    // The kernel finds the task if no worker is the one that is not woken.
    ("broken-wakeup", "wake", &["starvation:", "kernel:"]),
];

/// Sound schedulers and scenarios that they pass.
const SOUND_SCHEDULERS: [(&str, &str); 6] = [
    ("eevdf", "saturate"),
    ("eevdf", "cpusets"),
    ("eevdf", "cpu-max"),
    ("eevdf", "cgroups-equal"),
    ("eevdf", "wake"),
    ("fair", "saturate"),
];

fn main() -> ExitCode {
    let vm = vm::newest_kernel_need();
    zernel_testkit::main([
        trial(
            "broken_schedulers_are_caught",
            &[vm],
            broken_schedulers_are_caught,
        ),
        trial("sound_schedulers_pass", &[vm], sound_schedulers_pass),
        trial(
            "runs_with_one_seed_are_equal",
            &[vm],
            runs_with_one_seed_are_equal,
        ),
        trial(
            "a_bad_scenario_is_wrong_input",
            &[],
            a_bad_scenario_is_wrong_input,
        ),
        trial(
            "an_unknown_scheduler_is_named",
            &[],
            an_unknown_scheduler_is_named,
        ),
    ])
}

/// A shipped scenario, shortened.
fn shortened_scenario(name: &str) -> Scenario {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
    let mut scenario = Scenario::load(&folder.join(name).with_extension("toml")).unwrap();
    scenario.warmup_ms = 300;
    // The scenario is long enough for the broken scheduler that stalls after a second.
    scenario.duration_ms = 1300;
    scenario
}

fn run_scenario(scheduler: &str, name: &str) -> RunResult {
    let scheduler = match scheduler {
        "eevdf" => SchedulerChoice::Eevdf,
        own => SchedulerChoice::LabScheduler(own.to_owned()),
    };
    ScenarioRun::new(shortened_scenario(name), scheduler)
        .guest_program(ZERNEL_PATH)
        .run_twice_if_inconclusive()
}

/// Runs pairs of scheduler and scenario, two at once.
fn run_pairs(pairs: &[(&str, &str)]) -> Vec<RunResult> {
    let results = Mutex::new(vec![None; pairs.len()]);
    let next = Mutex::new(0..pairs.len());
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(index) = { next.lock().unwrap().next() } {
                    let result = run_scenario(pairs[index].0, pairs[index].1);
                    results.lock().unwrap()[index] = Some(result);
                }
            });
        }
    });
    let results = results.into_inner().unwrap();
    results.into_iter().map(Option::unwrap).collect()
}

fn broken_schedulers_are_caught() {
    let pairs = BROKEN_SCHEDULERS.map(|(scheduler, scenario, _)| (scheduler, scenario));
    for (result, (.., expected)) in run_pairs(&pairs).iter().zip(BROKEN_SCHEDULERS) {
        let is_expected = |text: &str| expected.iter().any(|start| text.starts_with(start));
        let failed = result
            .findings
            .iter()
            .filter(|finding| finding.verdict == Verdict::Fail);
        let caught = failed.into_iter().any(|finding| is_expected(&finding.text));
        assert!(caught, "no failure that says {expected:?}:\n{result}");
    }
}

fn sound_schedulers_pass() {
    for result in run_pairs(&SOUND_SCHEDULERS) {
        assert_eq!(result.verdict(), Verdict::Pass, "{result}");
    }
}

fn runs_with_one_seed_are_equal() {
    let once = || {
        let run = ScenarioRun::new(
            shortened_scenario("wake"),
            SchedulerChoice::LabScheduler("fair".to_owned()),
        );
        let result = run.guest_program(ZERNEL_PATH).seed(2).without_cache().run();
        result
            .figures
            .unwrap_or_else(|| panic!("{:?}", result.findings))
    };
    let (first, second) = thread::scope(|scope| {
        let first = scope.spawn(once);
        (once(), first.join().unwrap())
    });
    assert_eq!(first, second);
}

fn a_bad_scenario_is_wrong_input() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bad.toml");
    std::fs::write(&file, "about = 'x'\ncolour = 1\n").unwrap();
    let output = Command::new(ZERNEL_PATH)
        .args(["lab", "scenario"])
        .arg(&file)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr.contains("bad.toml") && stderr.contains("`colour`"),
        "{stderr}"
    );
}

fn an_unknown_scheduler_is_named() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/saturate.toml");
    let output = Command::new(ZERNEL_PATH)
        .args(["lab", "test", "--sched", "no-such-scheduler"])
        .arg(file)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr.contains("`no-such-scheduler`") && stderr.contains("broken-stall"),
        "{stderr}"
    );
}
