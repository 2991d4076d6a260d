use super::*;
use crate::scenario::figures::SchedulerFigures;

const SECOND: u64 = 1_000_000_000;

fn scenario(assertions: &str) -> Scenario {
    let text = format!("about = 'x'\n[[group]]\nname = 'a'\n[[group]]\nname = 'b'\n{assertions}");
    Scenario::parse(&text, "x.toml").unwrap()
}

fn figures() -> RunFigures {
    let group = |name: &str, cpu_ns| GroupFigures {
        name: name.to_owned(),
        workers: 1,
        cpu_ns,
        rounds: 100,
        cpus_used: [0, 1].into(),
        ..GroupFigures::default()
    };
    RunFigures {
        window_ns: SECOND,
        groups: vec![group("a", SECOND / 4), group("b", SECOND / 2)],
        ..RunFigures::default()
    }
}

fn verdict(assertions: &str, figures: &RunFigures) -> Verdict {
    worst(&judge(&scenario(assertions), figures, None))
}

#[test]
fn a_sound_run_passes_the_defaults() {
    assert_eq!(verdict("", &figures()), Verdict::Pass);
}

#[test]
fn an_idle_group_may_starve() {
    let mut run = figures();
    run.groups[1].longest_wait_ns = SECOND;
    let mut scenario = scenario("");
    let judged = |scenario: &Scenario| worst(&judge(scenario, &run, None));
    assert_eq!(judged(&scenario), Verdict::Fail);
    scenario.groups[1].policy = Some(SchedPolicy::Idle);
    assert_eq!(judged(&scenario), Verdict::Pass);
}

#[test]
fn a_run_whose_account_does_not_add_up_shows_nothing() {
    let mut run = figures();
    let account = AccountFigures {
        cpus: 4,
        idle: 4.0,
        adds_up: true,
        ..AccountFigures::default()
    };
    run.account = Some(account.clone());
    assert_eq!(verdict("", &run), Verdict::Pass);
    run.account = Some(AccountFigures {
        adds_up: false,
        ..account.clone()
    });
    assert_eq!(verdict("", &run), Verdict::Inconclusive);
    run.account = Some(AccountFigures {
        stuck: vec![(2, 1.2)],
        ..account
    });
    assert_eq!(verdict("", &run), Verdict::Inconclusive);
    run.groups[0].longest_wait_ns = SECOND;
    assert_eq!(
        verdict("", &run),
        Verdict::Inconclusive,
        "nobody is to blame"
    );
    let findings = judge(&scenario(""), &run, None);
    let text = "account: 4.000 of 4 CPUs; CPU 2 missed 1.20 s of ticks";
    assert!(findings.iter().any(|finding| finding.text == text));

    let ejected = Some("sched_ext: BPF scheduler \"mine\" disabled (runnable task stall)");
    for (idle, expected) in [(0.1, Verdict::Inconclusive), (2.9, Verdict::Fail)] {
        if let Some(account) = &mut run.account {
            account.idle = idle;
        }
        let judged = worst(&judge(&scenario(""), &run, ejected));
        assert_eq!(judged, expected, "{idle} idle CPUs");
    }
}

#[test]
fn each_default_can_fail() {
    let mut waits = figures();
    waits.groups[0].longest_wait_ns = SECOND;
    let mut gap = figures();
    gap.groups[1].largest_gap_ns = SECOND;
    let mut never = figures();
    never.groups[1].never_ran = 1;
    let mut ejected = figures();
    ejected.scheduler = SchedulerFigures {
        expected: true,
        ..SchedulerFigures::default()
    };
    let mut died = figures();
    died.groups[0]
        .ended_early
        .push("worker 0: killed".to_owned());
    let mut step = figures();
    step.problems.push("step at 5 ms: refused".to_owned());
    for broken in [&waits, &gap, &never, &ejected, &died, &step] {
        assert_eq!(verdict("", broken), Verdict::Fail, "{broken:?}");
    }
    assert_eq!(
        verdict("[[assert]]\nstarvation = { at_most_ms = 2000 }", &waits),
        Verdict::Pass
    );
    let mut refused = figures();
    refused.groups[0]
        .refused_settings
        .push("`nice`: no".to_owned());
    assert_eq!(verdict("", &refused), Verdict::Inconclusive);
}

#[test]
fn kernel_messages_are_found_and_a_clean_end_is_none() {
    let judged = |console: &str| no_warning(first_warning(console).as_deref()).verdict;
    assert_eq!(judged("[    1.0] hello\n"), Verdict::Pass);
    assert_eq!(judged("[    1.0] WARNING: CPU: 0 PID: 1\n"), Verdict::Fail);
    let clean = "[ 3.1] sched_ext: BPF scheduler \"x\" disabled (unregistered from user space)";
    assert_eq!(judged(clean), Verdict::Pass);
    let hotplug =
        "[ 3.1] sched_ext: BPF scheduler \"x\" disabled (unregistered from the main kernel)";
    assert_eq!(judged(hotplug), Verdict::Pass);
    let ejected = "[ 3.1] sched_ext: BPF scheduler \"x\" disabled (runnable task stall)";
    assert_eq!(judged(ejected), Verdict::Fail);
}

#[test]
fn shares_are_compared_with_their_ideal() {
    let fair = |shares: &str| {
        format!("[[assert]]\nfairness = {{ shares = {{ {shares} }}, within_percent = 5 }}")
    };
    assert_eq!(verdict(&fair("a = 1, b = 2"), &figures()), Verdict::Pass);
    assert_eq!(verdict(&fair("a = 1, b = 1"), &figures()), Verdict::Fail);
    let limit =
        |cpus: f64| format!("[[assert]]\ncpu_limit = {{ group = 'b', at_most_cpus = {cpus} }}");
    assert_eq!(verdict(&limit(0.51), &figures()), Verdict::Pass);
    assert_eq!(verdict(&limit(0.49), &figures()), Verdict::Fail);
    let cpu = |cpus: f64| {
        format!("[[assert]]\ncpu_time = {{ group = 'a', cpus = {cpus}, within_percent = 10 }}")
    };
    assert_eq!(verdict(&cpu(0.26), &figures()), Verdict::Pass);
    assert_eq!(verdict(&cpu(0.30), &figures()), Verdict::Fail);
}

#[test]
fn isolation_and_throughput_are_judged() {
    let on = |cpus: &str| format!("[[assert]]\nisolation = {{ group = 'a', cpus = [{cpus}] }}");
    assert_eq!(verdict(&on("0, 1, 2"), &figures()), Verdict::Pass);
    assert_eq!(verdict(&on("0"), &figures()), Verdict::Fail);
    let rate =
        |rate: u32| format!("[[assert]]\nthroughput = {{ group = 'a', at_least_per_s = {rate} }}");
    assert_eq!(verdict(&rate(100), &figures()), Verdict::Pass);
    assert_eq!(verdict(&rate(101), &figures()), Verdict::Fail);
}

#[test]
fn a_quantile_of_too_few_samples_is_inconclusive() {
    let step = |quantile: f64, us: u32| {
        format!(
            "[[assert]]\nstep_time = {{ group = 'a', quantile = {quantile}, at_most_us = {us} }}"
        )
    };
    let mut run = figures();
    assert_eq!(verdict(&step(0.5, 10), &run), Verdict::Inconclusive);
    run.groups[0].steps_ns = vec![5000; 50];
    assert_eq!(verdict(&step(0.5, 10), &run), Verdict::Pass);
    assert_eq!(verdict(&step(0.99, 10), &run), Verdict::Inconclusive);
    assert_eq!(verdict(&step(0.99, 4), &run), Verdict::Fail);
    assert_eq!(verdict(&step(1.0, 10), &run), Verdict::Pass);
}

#[test]
fn exit_codes_differ() {
    let codes = [
        Verdict::Pass,
        Verdict::Fail,
        Verdict::Inconclusive,
        Verdict::Skip,
    ]
    .map(Verdict::exit_code);
    assert_eq!(codes, [0, 1, 3, 4]);
}
