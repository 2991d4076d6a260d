use fastrand::Rng;

use super::*;

const MS: u64 = 1_000_000;
const SIMULATED_RUNS: usize = 200;

/// One simulated run: duration, launches and copies of each step.
struct SimulatedRun {
    steps: Vec<WindowStep>,
    copies: Vec<u32>,
}

impl SimulatedRun {
    fn total_launches(&self) -> f64 {
        self.steps.iter().map(|step| f64::from(step.launches)).sum()
    }

    fn total_copies(&self) -> f64 {
        self.copies.iter().map(|copies| f64::from(*copies)).sum()
    }

    /// Opens windows at random moments, and estimates launches and copies.
    fn estimate_from_windows(
        &self,
        windows: usize,
        length: Duration,
        random: &mut Rng,
    ) -> [CallEstimate; 3] {
        let length_ns = length.as_nanos() as u64;
        let all_ns: u64 = self.steps.iter().map(|step| step.duration_ns).sum();
        let mut per_step = LaunchesPerStep::default();
        let mut launches = CallEstimator::new(true);
        let mut copies = CallEstimator::new(false);
        let mut timed = CallEstimator::new(false);
        for _ in 0..windows {
            let opens = random.u64(0..all_ns - length_ns);
            let (mut begin, mut whole, mut seen, mut seen_copies) = (0, Vec::new(), 0.0, 0.0);
            for (step, copies) in self.steps.iter().zip(&self.copies) {
                let end = begin + step.duration_ns;
                if begin >= opens && end <= opens + length_ns {
                    whole.push(*step);
                }
                let inside = end.min(opens + length_ns).saturating_sub(begin.max(opens));
                let share = inside as f64 / step.duration_ns as f64;
                seen += share * f64::from(step.launches);
                seen_copies += share * f64::from(*copies);
                begin = end;
            }
            per_step.add_window(&whole, length);
            let window = WindowTotals {
                window_seconds: length.as_secs_f64(),
                launches: seen.round() as u64,
                probe_seconds: 0.0,
            };
            launches.add_window(window.launches, &window);
            copies.add_window(seen_copies.round() as u64, &window);
            timed.add_window(seen_copies.round() as u64, &window);
        }
        for calls in [&mut launches, &mut copies, &mut timed] {
            calls.begin_sampling(0.0);
            calls.add_elapsed_work(all_ns as f64 / 1e9, self.steps.len() as f64);
        }
        let per_step = per_step.launches_interval();
        [
            launches.estimate_calls(per_step),
            copies.estimate_calls(per_step),
            timed.estimate_calls(None),
        ]
    }
}

/// Quality of the estimates of many runs.
#[derive(Default)]
struct EstimateQuality {
    covered_runs: usize,
    within_5_percent: usize,
    half_widths: Vec<f64>,
}

impl EstimateQuality {
    fn add_estimate(&mut self, estimate: CallEstimate, truth: f64) {
        let off = (estimate.calls - truth).abs();
        let half_width = estimate.half_width.expect("several windows");
        self.covered_runs += usize::from(off <= half_width);
        self.within_5_percent += usize::from(off <= 0.05 * truth);
        self.half_widths.push(half_width / truth);
    }

    /// The median half width as a share of the truth.
    fn median_half_width(&mut self) -> f64 {
        self.half_widths.sort_by(f64::total_cmp);
        self.half_widths[self.half_widths.len() / 2]
    }

    fn assert_within_bounds(mut self, name: &str, close: usize, width: f64) {
        let found = self.median_half_width();
        let (covered, within) = (self.covered_runs, self.within_5_percent);
        eprintln!(
            "{name}: {covered} covered, {within} within 5 % of {SIMULATED_RUNS}, ± {found:.4}"
        );
        assert!(
            10 * covered >= 9 * SIMULATED_RUNS,
            "{name}: {covered} covered"
        );
        assert!(
            100 * within >= close * SIMULATED_RUNS,
            "{name}: {within} within 5 %"
        );
        assert!(found <= width, "{name}: ± {found}");
    }
}

type MakeStep = fn(&mut Rng, usize, &mut f64) -> (f64, f64);

fn normal_deviate(random: &mut Rng) -> f64 {
    (0..12).map(|_| random.f64()).sum::<f64>() - 6.0
}

/// Step time in milliseconds and launches.
fn steady_step(random: &mut Rng, _: usize, _: &mut f64) -> (f64, f64) {
    (10.0 + 0.5 * normal_deviate(random), 260.0)
}

fn alternating_step(random: &mut Rng, number: usize, _: &mut f64) -> (f64, f64) {
    match number % 2 {
        0 => (10.0 + 0.5 * normal_deviate(random), 200.0),
        _ => (20.0 + 0.5 * normal_deviate(random), 400.0),
    }
}

/// Neighbouring steps are alike: launches per step drift around 300.
fn drifting_step(random: &mut Rng, _: usize, state: &mut f64) -> (f64, f64) {
    *state = 0.9 * *state + 0.436 * normal_deviate(random);
    let launches = 300.0 + 6.0 * *state;
    (launches / 30.0, launches)
}

fn simulate_run(make: MakeStep, random: &mut Rng) -> SimulatedRun {
    let mut state = 0.0;
    let (mut steps, mut copies) = (Vec::new(), Vec::new());
    for number in 0..1500 {
        let (milliseconds, launches) = make(random, number, &mut state);
        steps.push(WindowStep {
            duration_ns: (milliseconds * MS as f64) as u64,
            launches: launches.round() as u32,
        });
        copies.push((launches / 10.0).round() as u32 + random.u32(0..10));
    }
    SimulatedRun { steps, copies }
}

/// Number of windows, and bounds for estimates from them: runs per 100 within 5 % of the truth, and the largest median
/// half width.
type WindowsHitsAndWidth = (usize, usize, f64);

fn assert_regime(name: &str, make: MakeStep, milliseconds: u64, bounds: [WindowsHitsAndWidth; 3]) {
    for (windows, close, width) in bounds {
        let mut random = Rng::with_seed(7);
        let [mut of_launches, mut of_copies] =
            [EstimateQuality::default(), EstimateQuality::default()];
        for _ in 0..SIMULATED_RUNS {
            let run = simulate_run(make, &mut random);
            let length = Duration::from_millis(milliseconds);
            let [launches, copies, _] = run.estimate_from_windows(windows, length, &mut random);
            of_launches.add_estimate(launches, run.total_launches());
            of_copies.add_estimate(copies, run.total_copies());
        }
        let name = format!("{name}, {windows} windows");
        of_launches.assert_within_bounds(&name, close, width);
        of_copies.assert_within_bounds(&format!("{name}, copies"), close.min(85), width + 0.1);
    }
}

#[test]
fn steady_steps_are_known_from_few_windows() {
    let bounds = [(3, 100, 0.002), (5, 100, 0.002), (40, 100, 0.002)];
    assert_regime("steady", steady_step, 50, bounds);
}

#[test]
fn long_steps_count_as_often_as_they_come() {
    let bounds = [(3, 95, 0.25), (5, 95, 0.16), (40, 100, 0.02)];
    assert_regime("alternating", alternating_step, 84, bounds);
}

#[test]
fn steps_of_one_window_may_be_alike() {
    let bounds = [(3, 100, 0.04), (5, 100, 0.03), (40, 100, 0.01)];
    assert_regime("drifting", drifting_step, 50, bounds);
}

/// Calls come independently of each other, 2000 per second.
#[test]
fn without_steps_calls_are_estimated_by_time() {
    for (windows, close, width) in [(3, 50, 0.25), (5, 70, 0.15), (40, 100, 0.04)] {
        let mut random = Rng::with_seed(7);
        let mut quality = EstimateQuality::default();
        for _ in 0..SIMULATED_RUNS {
            // Steps stand for spans of 5 ms here.
            let copies =
                (0..4000).map(|_| (10.0 + 3.162 * normal_deviate(&mut random)).round() as u32);
            let run = SimulatedRun {
                copies: copies.collect(),
                steps: vec![
                    WindowStep {
                        duration_ns: 5 * MS,
                        launches: 0
                    };
                    4000
                ],
            };
            let length = Duration::from_millis(50);
            let [_, by_launches, timed] = run.estimate_from_windows(windows, length, &mut random);
            assert_eq!(by_launches, timed, "nothing was launched");
            quality.add_estimate(timed, run.total_copies());
        }
        quality.assert_within_bounds(&format!("{windows} windows by time"), close, width);
    }
}

#[test]
fn one_window_gives_no_interval() {
    let mut per_step = LaunchesPerStep::default();
    let step = WindowStep {
        duration_ns: 10 * MS,
        launches: 300,
    };
    per_step.add_window(&[step; 4], Duration::from_millis(50));
    let interval = per_step.launches_interval().expect("there were steps");
    assert!((interval.mean - 300.0).abs() < 1e-9 && interval.half_width.is_none());
    let mut launches = CallEstimator::new(true);
    launches.begin_sampling(0.0);
    launches.add_elapsed_work(1.0, 100.0);
    let estimate = launches.estimate_calls(Some(interval));
    assert!(
        (estimate.half_width_or_all() - 30_000.0).abs() < 1e-6,
        "{estimate:?}"
    );
    assert_eq!(LaunchesPerStep::default().launches_interval(), None);
}

/// A program that calls as fast as it can is slower in windows.
#[test]
fn the_overhead_of_probes_is_part_of_the_error() {
    let mut calls = CallEstimator::new(false);
    let window = WindowTotals {
        window_seconds: 0.05,
        launches: 0,
        probe_seconds: 0.01,
    };
    (0..10).for_each(|_| calls.add_window(400, &window));
    calls.begin_sampling(0.0);
    calls.add_elapsed_work(10.0, 0.0);
    let estimate = calls.estimate_calls(None);
    assert!((estimate.calls - 80_000.0).abs() < 1e-6);
    assert!((estimate.half_width_or_all() - 20_000.0).abs() < 1.0);
}
