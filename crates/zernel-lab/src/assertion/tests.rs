use super::*;
use crate::scenario::figures::SchedulerFigures;

const SECOND_NS: u64 = 1_000_000_000;

fn scenario_with(assertions: &str) -> Scenario {
    let text = format!("about = 'x'\n[[group]]\nname = 'a'\n[[group]]\nname = 'b'\n{assertions}");
    Scenario::parse(&text, "x.toml").unwrap()
}

fn sample_figures() -> RunFigures {
    let group = |name: &str, cpu_ns| GroupFigures {
        name: name.to_owned(),
        workers: 1,
        cpu_ns,
        rounds: 100,
        cpus_used: [0, 1].into(),
        ..GroupFigures::default()
    };
    RunFigures {
        window_ns: SECOND_NS,
        groups: vec![group("a", SECOND_NS / 4), group("b", SECOND_NS / 2)],
        ..RunFigures::default()
    }
}

fn verdict_of_run(assertions: &str, figures: &RunFigures) -> Verdict {
    worst_verdict(&judge_run(&scenario_with(assertions), figures, None))
}

#[test]
fn valid_run_passes_default_assertions() {
    assert_eq!(verdict_of_run("", &sample_figures()), Verdict::Pass);
}

#[test]
fn sched_idle_group_may_starve() {
    let mut run = sample_figures();
    run.groups[1].longest_wait_ns = SECOND_NS;
    let mut scenario = scenario_with("");
    let judged = |scenario: &Scenario| worst_verdict(&judge_run(scenario, &run, None));
    assert_eq!(judged(&scenario), Verdict::Fail);
    scenario.groups[1].policy = Some(SchedPolicy::Idle);
    assert_eq!(judged(&scenario), Verdict::Pass);
}

#[test]
fn unbalanced_cpu_account_makes_run_inconclusive() {
    let mut run = sample_figures();
    let account = CpuTimeFigures {
        cpus: 4,
        idle: 4.0,
        adds_up: true,
        ..CpuTimeFigures::default()
    };
    run.account = Some(account.clone());
    assert_eq!(verdict_of_run("", &run), Verdict::Pass);
    run.account = Some(CpuTimeFigures {
        adds_up: false,
        ..account.clone()
    });
    assert_eq!(verdict_of_run("", &run), Verdict::Inconclusive);
    run.account = Some(CpuTimeFigures {
        stuck: vec![(2, 1.2)],
        ..account
    });
    assert_eq!(verdict_of_run("", &run), Verdict::Inconclusive);
    run.groups[0].longest_wait_ns = SECOND_NS;
    assert_eq!(
        verdict_of_run("", &run),
        Verdict::Inconclusive,
        "nobody is to blame"
    );
    let findings = judge_run(&scenario_with(""), &run, None);
    let text = "account: 4.000 of 4 CPUs; CPU 2 missed 1.20 s of ticks";
    assert!(findings.iter().any(|finding| finding.text == text));

    let ejected = Some("sched_ext: BPF scheduler \"mine\" disabled (runnable task stall)");
    for (idle, expected) in [(0.1, Verdict::Inconclusive), (2.9, Verdict::Fail)] {
        if let Some(account) = &mut run.account {
            account.idle = idle;
        }
        let judged = worst_verdict(&judge_run(&scenario_with(""), &run, ejected));
        assert_eq!(judged, expected, "{idle} idle CPUs");
    }
}

#[test]
fn each_default_assertion_can_fail() {
    let mut run_with_long_wait = sample_figures();
    run_with_long_wait.groups[0].longest_wait_ns = SECOND_NS;
    let mut run_with_long_gap = sample_figures();
    run_with_long_gap.groups[1].largest_gap_ns = SECOND_NS;
    let mut run_with_idle_worker = sample_figures();
    run_with_idle_worker.groups[1].never_ran = 1;
    let mut run_without_scheduler = sample_figures();
    run_without_scheduler.scheduler = SchedulerFigures {
        expected: true,
        ..SchedulerFigures::default()
    };
    let mut run_with_dead_worker = sample_figures();
    run_with_dead_worker.groups[0]
        .ended_early
        .push("worker 0: killed".to_owned());
    let mut run_with_failed_step = sample_figures();
    run_with_failed_step
        .problems
        .push("step at 5 ms: refused".to_owned());
    for broken_run in [
        &run_with_long_wait,
        &run_with_long_gap,
        &run_with_idle_worker,
        &run_without_scheduler,
        &run_with_dead_worker,
        &run_with_failed_step,
    ] {
        assert_eq!(
            verdict_of_run("", broken_run),
            Verdict::Fail,
            "{broken_run:?}"
        );
    }
    assert_eq!(
        verdict_of_run(
            "[[assert]]\nstarvation = { at_most_ms = 2000 }",
            &run_with_long_wait
        ),
        Verdict::Pass
    );
    let mut run_with_refused_setting = sample_figures();
    run_with_refused_setting.groups[0]
        .refused_settings
        .push("`nice`: no".to_owned());
    assert_eq!(
        verdict_of_run("", &run_with_refused_setting),
        Verdict::Inconclusive
    );
}

#[test]
fn kernel_warnings_fail_and_clean_unload_passes() {
    let judged =
        |console: &str| judge_kernel_warning(first_kernel_warning(console).as_deref()).verdict;
    assert_eq!(judged("[    1.0] hello\n"), Verdict::Pass);
    assert_eq!(judged("[    1.0] WARNING: CPU: 0 PID: 1\n"), Verdict::Fail);
    let clean = "[ 3.1] sched_ext: BPF scheduler \"x\" disabled (unregistered from user space)";
    assert_eq!(judged(clean), Verdict::Pass);
    let hotplug =
        "[ 3.1] sched_ext: BPF scheduler \"x\" disabled (unregistered from the main kernel)";
    assert_eq!(judged(hotplug), Verdict::Pass);
    let ejected = "[ 3.1] sched_ext: BPF scheduler \"x\" disabled (runnable task stall)";
    assert_eq!(judged(ejected), Verdict::Fail);
    let emulator =
        "[ 2.1] WARNING: CPU: 2 PID: 0 at arch/x86/kernel/traps.c:1273 exc_debug_kernel+0x1a/0x1d";
    assert_eq!(judged(emulator), Verdict::Inconclusive);
    assert_eq!(
        judged(&format!("{emulator}\n{ejected}\n")),
        Verdict::Fail,
        "another warning counts more"
    );
}

#[test]
fn cpu_shares_are_judged_against_ideal_shares() {
    let fairness_assertion = |shares: &str| {
        format!("[[assert]]\nfairness = {{ shares = {{ {shares} }}, within_percent = 5 }}")
    };
    assert_eq!(
        verdict_of_run(&fairness_assertion("a = 1, b = 2"), &sample_figures()),
        Verdict::Pass
    );
    assert_eq!(
        verdict_of_run(&fairness_assertion("a = 1, b = 1"), &sample_figures()),
        Verdict::Fail
    );
    let cpu_limit_assertion =
        |cpus: f64| format!("[[assert]]\ncpu_limit = {{ group = 'b', at_most_cpus = {cpus} }}");
    assert_eq!(
        verdict_of_run(&cpu_limit_assertion(0.51), &sample_figures()),
        Verdict::Pass
    );
    assert_eq!(
        verdict_of_run(&cpu_limit_assertion(0.49), &sample_figures()),
        Verdict::Fail
    );
    let cpu_time_assertion = |cpus: f64| {
        format!("[[assert]]\ncpu_time = {{ group = 'a', cpus = {cpus}, within_percent = 10 }}")
    };
    assert_eq!(
        verdict_of_run(&cpu_time_assertion(0.26), &sample_figures()),
        Verdict::Pass
    );
    assert_eq!(
        verdict_of_run(&cpu_time_assertion(0.30), &sample_figures()),
        Verdict::Fail
    );
}

#[test]
fn isolation_and_throughput_assertions_are_judged() {
    let isolation_assertion =
        |cpus: &str| format!("[[assert]]\nisolation = {{ group = 'a', cpus = [{cpus}] }}");
    assert_eq!(
        verdict_of_run(&isolation_assertion("0, 1, 2"), &sample_figures()),
        Verdict::Pass
    );
    assert_eq!(
        verdict_of_run(&isolation_assertion("0"), &sample_figures()),
        Verdict::Fail
    );
    let throughput_assertion =
        |rate: u32| format!("[[assert]]\nthroughput = {{ group = 'a', at_least_per_s = {rate} }}");
    assert_eq!(
        verdict_of_run(&throughput_assertion(100), &sample_figures()),
        Verdict::Pass
    );
    assert_eq!(
        verdict_of_run(&throughput_assertion(101), &sample_figures()),
        Verdict::Fail
    );
}

#[test]
fn a_quantile_of_too_few_samples_is_inconclusive() {
    let step_time_assertion = |quantile: f64, us: u32| {
        format!(
            "[[assert]]\nstep_time = {{ group = 'a', quantile = {quantile}, at_most_us = {us} }}"
        )
    };
    let mut run = sample_figures();
    assert_eq!(
        verdict_of_run(&step_time_assertion(0.5, 10), &run),
        Verdict::Inconclusive
    );
    run.groups[0].steps_ns = vec![5000; 50];
    assert_eq!(
        verdict_of_run(&step_time_assertion(0.5, 10), &run),
        Verdict::Pass
    );
    assert_eq!(
        verdict_of_run(&step_time_assertion(0.99, 10), &run),
        Verdict::Inconclusive
    );
    assert_eq!(
        verdict_of_run(&step_time_assertion(0.99, 4), &run),
        Verdict::Fail
    );
    assert_eq!(
        verdict_of_run(&step_time_assertion(1.0, 10), &run),
        Verdict::Pass
    );
}

#[test]
fn verdicts_have_distinct_exit_codes() {
    let codes = [
        Verdict::Pass,
        Verdict::Fail,
        Verdict::Inconclusive,
        Verdict::Skip,
    ]
    .map(Verdict::exit_code);
    assert_eq!(codes, [0, 1, 3, 4]);
}
