use zernel_phase::steps::{Launches, Mark};

use super::*;

const MS: u64 = 1_000_000;

fn symbol(name: &str) -> usize {
    let place = SYMBOLS.iter().position(|symbol| symbol.name() == name);
    place.expect("in the table")
}

/// Makes steps of 10 ms with 100 launches, the last of which ends now.
fn makes(process: &mut ObservedProcess, steps: u64, launches: Launches) {
    let now_ns = monotonic_ns();
    for step in 0..steps {
        let at_ns = now_ns - 10 * MS * (steps - 1 - step);
        process.steps.mark(Mark::Backward, at_ns, launches);
    }
}

#[test]
fn who_sleeps_is_not_busy() {
    let mut on_cpu = OnCpu::default();
    assert_eq!(on_cpu.busy_ns(5, 10), None);
    for (read_ns, on_cpu_ns) in [(1000, 300), (1500, 500)] {
        on_cpu.read_ns = read_ns;
        on_cpu.note(on_cpu_ns);
    }
    // At 0.4 of a CPU, 200 are the work of 500; and the last 70 nobody knows of.
    on_cpu.read_ns = 9000;
    assert_eq!(on_cpu.busy_ns(700, 9070), Some(570));
}

/// A thread that has not left its CPU for long does so in a round that is short.
#[test]
fn one_round_does_not_tell_how_busy_steps_are() {
    let mut on_cpu = OnCpu::default();
    let (mut read_ns, mut on_cpu_ns) = (0, 0);
    for (round_ns, more_ns) in [(1000, 400), (1000, 400), (1000, 0), (5, 400)] {
        (read_ns, on_cpu_ns) = (read_ns + round_ns * MS, on_cpu_ns + more_ns * MS);
        on_cpu.read_ns = read_ns;
        on_cpu.note(on_cpu_ns);
    }
    on_cpu.read_ns += 4000 * MS;
    let busy_ns = on_cpu.busy_ns(on_cpu_ns + 1600 * MS, on_cpu.read_ns);
    assert!(
        busy_ns.is_some_and(|ns| (3000 * MS..5000 * MS).contains(&ns)),
        "{busy_ns:?}"
    );
}

/// What was presumed too high is told for good, and so is that it is.
#[test]
fn what_was_told_too_high_is_within_its_error() {
    let mut process = ObservedProcess::new(&layout::Process::new_zeroed());
    let (launch, allocate) = (symbol("cuLaunchKernel"), symbol("cuMemAllocAsync"));
    let mut counters = layout::Counters::new_zeroed();
    // It filled a pool before its first steps.
    counters.of[allocate].calls = 50_000;
    counters.of[launch].calls = 1000;
    process.set_counters(&counters);
    process.note_cost(0.0, 0.0, 0.5);
    makes(&mut process, 20, Launches::Counted(100));
    process.begin_sampling(launch, &counters);
    process.begin_sampling(allocate, &counters);
    makes(&mut process, 20, Launches::Unknown);
    process.tell_sampled(monotonic_ns());
    let from_ns = monotonic_ns();
    process.expect_window(&[launch, allocate], &counters, from_ns);
    makes(&mut process, 5, Launches::Glimpsed(100));
    counters.of[allocate].calls += 5 * 10;
    counters.of[launch].calls += 5 * 100;
    let to_ns = from_ns + 50 * MS;
    process.take_window(&[launch, allocate], &counters, from_ns, to_ns, 0.0);
    let truth = 50_000 + 25 * 10;
    let (_, told) = process
        .calls()
        .find(|(name, _)| *name == "cuMemAllocAsync")
        .expect("it was called");
    assert!(
        told.calls.abs_diff(truth) <= told.error,
        "{told:?}, {truth}"
    );
}

/// Makes 250 steps of 10 ms with 10 allocations, and has windows that show some of them; returns when it has.
fn trains(process: &mut ObservedProcess, counters: &mut layout::Counters) -> u64 {
    let symbols @ [launch, allocate] = LAUNCHES_AND_ALLOCATES.map(symbol);
    let mut at_ns = monotonic_ns() - 200 * MS;
    go(process, &mut at_ns, 20, Launches::Counted(100));
    for symbol in symbols {
        process.begin_sampling(symbol, counters);
    }
    for _ in 0..10 {
        go(process, &mut at_ns, 20, Launches::Unknown);
        let from_ns = at_ns;
        process.expect_window(&symbols, counters, from_ns);
        go(process, &mut at_ns, 5, Launches::Glimpsed(100));
        counters.of[launch].calls += 5 * 100;
        counters.of[allocate].calls += 5 * 10;
        process.take_window(&symbols, counters, from_ns, at_ns, 0.0);
    }
    at_ns
}

const LAUNCHES_AND_ALLOCATES: [&str; 2] = ["cuLaunchKernel", "cuMemAllocAsync"];

fn go(process: &mut ObservedProcess, at_ns: &mut u64, steps: u64, launches: Launches) {
    for _ in 0..steps {
        *at_ns += 10 * MS;
        process.steps.mark(Mark::Backward, *at_ns, launches);
    }
}

/// What an evaluation launches stands for no steps: those before it were not seen.
#[test]
fn a_window_in_an_evaluation_takes_no_steps_for_seen() {
    let mut process = ObservedProcess::new(&layout::Process::new_zeroed());
    let mut counters = layout::Counters::new_zeroed();
    let mut at_ns = trains(&mut process, &mut counters);
    let symbols @ [launch, allocate] = LAUNCHES_AND_ALLOCATES.map(symbol);
    go(&mut process, &mut at_ns, 50, Launches::Unknown);
    at_ns += 150 * MS;
    process.expect_window(&symbols, &counters, at_ns);
    // It launches more densely, and allocates nothing.
    counters.of[launch].calls += 4000;
    process.take_window(&symbols, &counters, at_ns, at_ns + 50 * MS, 0.0);
    let truth = 300 * 10;
    let told = process.sampling[&allocate].told;
    assert!(
        told.calls.abs_diff(truth) <= told.error,
        "{told:?}, {truth}"
    );
}

#[test]
fn the_end_of_an_evaluation_does_not_tell_what_a_step_calls() {
    let mut process = ObservedProcess::new(&layout::Process::new_zeroed());
    let mut counters = layout::Counters::new_zeroed();
    let mut at_ns = trains(&mut process, &mut counters);
    let symbols @ [launch, allocate] = LAUNCHES_AND_ALLOCATES.map(symbol);
    at_ns += 150 * MS;
    let from_ns = at_ns;
    process.expect_window(&symbols, &counters, from_ns);
    at_ns += 50 * MS;
    go(&mut process, &mut at_ns, 1, Launches::Unknown);
    counters.of[launch].calls += 4000;
    counters.of[allocate].calls += 4000;
    process.take_window(&symbols, &counters, from_ns, at_ns, 0.0);
    let before = process.sampling[&allocate].told.calls;
    go(&mut process, &mut at_ns, 1000, Launches::Unknown);
    process.tell_sampled(at_ns);
    let more = process.sampling[&allocate].told.calls - before;
    assert!((9_900..=10_100).contains(&more), "{more}");
}

/// Evaluations that no window can hold, after so few steps that they are nothing out of the ordinary.
#[test]
fn long_steps_that_no_window_shows_are_not_passed_over() {
    for seed in 0..10 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut process = ObservedProcess::new(&layout::Process::new_zeroed());
        let mut counters = layout::Counters::new_zeroed();
        let mut at_ns = trains(&mut process, &mut counters);
        let symbols @ [launch, _] = LAUNCHES_AND_ALLOCATES.map(symbol);
        let mut truth = 250 * 100;
        let (mut opens_ns, mut opened_ns) = (at_ns, None);
        for turn in 0..4000 {
            // Seven steps in 70 ms, and 600 ms in which it launches as densely.
            let is_evaluation = turn % 8 == 7;
            for _ in 0..if is_evaluation { 60 } else { 1 } {
                at_ns += 10 * MS;
                truth += 100;
                counters.of[launch].calls += if opened_ns.is_some() { 100 } else { 0 };
                if let Some(from_ns) = opened_ns.filter(|from| at_ns >= from + 50 * MS) {
                    process.take_window(&symbols, &counters, from_ns, at_ns, 0.0);
                    opened_ns = None;
                    opens_ns = at_ns + random.u64(1000..10_000) * MS;
                } else if opened_ns.is_none() && at_ns >= opens_ns {
                    process.expect_window(&symbols, &counters, at_ns);
                    opened_ns = Some(at_ns);
                }
            }
            process.steps.mark(Mark::Backward, at_ns, Launches::Unknown);
        }
        process.end_sampling(launch, at_ns);
        let told = process.sampling[&launch].told;
        assert!(
            told.calls.abs_diff(truth) <= told.error + truth / 20,
            "{told:?}, {truth}"
        );
    }
}

/// What was copied before has no part in what is copied now.
#[test]
fn bytes_are_presumed_to_be_as_they_were_of_late() {
    let mut process = ObservedProcess::new(&layout::Process::new_zeroed());
    let (launch, copy) = (symbol("cuLaunchKernel"), symbol("cuMemcpyDtoHAsync_v2"));
    let mut counters = layout::Counters::new_zeroed();
    let gigabyte = 1_000_000_000;
    counters.of[copy].calls = 1000;
    counters.of[copy].bytes = gigabyte;
    process.set_counters(&counters);
    process.note_cost(0.0, 0.0, 0.5);
    counters.of[copy].calls += 1000;
    counters.of[copy].bytes += 4 * 1000;
    counters.of[launch].calls = 10_000;
    process.set_counters(&counters);
    process.note_cost(0.0, 0.0, 0.5);
    makes(&mut process, 20, Launches::Counted(100));
    process.begin_sampling(launch, &counters);
    process.begin_sampling(copy, &counters);
    makes(&mut process, 20, Launches::Unknown);
    process.tell_sampled(monotonic_ns());
    // 20 steps with 10 copies of 4 bytes each.
    let told = process.sampling[&copy].told;
    assert!((150..=250).contains(&told.calls), "{told:?}");
    assert_eq!(told.bytes, 4 * told.calls);
}

/// All its launches are counted, so that no window is kept open for them.
#[test]
fn who_launches_by_what_is_not_sampled_lacks_no_steps() {
    let mut process = ObservedProcess::new(&layout::Process::new_zeroed());
    let (launch, graph) = (symbol("cuLaunchKernel"), symbol("cuGraphLaunch"));
    process.join_sampling(&[launch]);
    let mut counters = layout::Counters::new_zeroed();
    let from_ns = monotonic_ns();
    process.expect_window(&[launch], &counters, from_ns);
    counters.of[graph].calls = 20;
    process.take_window(&[launch], &counters, from_ns, from_ns + 50 * MS, 0.0);
    assert!(process.launches_otherwise());
    makes(&mut process, 20, Launches::Counted(1));
    assert!(process.few_steps().is_some() && process.makes_steps(monotonic_ns()));
    assert!(!process.lacks_steps());
}

/// A counter that falls looks to Prometheus as if it had begun anew.
#[test]
fn what_an_open_window_counts_is_not_told_twice() {
    let mut process = ObservedProcess::new(&layout::Process::new_zeroed());
    let symbol = (0..SYMBOLS.len()).find(is_launch);
    let symbol = symbol.expect("something launches");
    let mut counters = layout::Counters::new_zeroed();
    let told = |process: &ObservedProcess| process.count(|what| what == Counts::Launch).calls;
    counters.of[symbol].calls = 100;
    process.begin_sampling(symbol, &counters);
    let from_ns = monotonic_ns();
    let to_ns = from_ns + 50_000_000;
    process.expect_window(&[symbol], &counters, from_ns);
    counters.of[symbol].calls = 150;
    process.set_counters(&counters);
    assert_eq!(told(&process), 100);
    process.take_window(&[symbol], &counters, from_ns, to_ns, 0.0);
    assert!(told(&process) >= 150);
    process.end_sampling(symbol, to_ns);
    counters.of[symbol].calls = 160;
    process.set_counters(&counters);
    assert!(told(&process) >= 160);
}
