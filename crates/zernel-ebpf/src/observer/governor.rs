//! Keeps the overhead of the probes within a budget.
//!
//! A probe costs the thread that runs into it a few microseconds. The governor measures that cost at the start, on this
//! machine, and multiplies it by the calls of every thread. If the overhead of a thread exceeds the budget, its most
//! frequent functions are *sampled*: their probes are attached only in windows of 50 ms, or of a few steps, as rarely
//! as the budget requires. `estimate` computes calls from the windows. If functions that cannot be sampled cost a
//! thread more than a ceiling, all probes are detached for a while.

mod calibration;
mod windows;

use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libbpf_rs::Link;

pub(super) use self::windows::LaunchSpans;
use super::files::detach;
use super::kernel::Kernel;
use super::{ObservedProcess, Observer, monotonic_ns};
use crate::probes::{CallKind, Probe, SYMBOLS, SamplingGroup, cuda_trace, layout};

/// Budget and ceiling of the overhead.
#[derive(Debug, Clone, Copy)]
pub struct GovernorOptions {
    /// Largest overhead of any observed thread, as a share of its time.
    pub budget: f64,
    /// Overhead above which all probes are detached, if sampling cannot reduce it.
    pub ceiling: f64,
    /// How long they stay detached the first time.
    pub first_suspension: Duration,
}

impl Default for GovernorOptions {
    fn default() -> Self {
        Self {
            budget: 0.005,
            ceiling: 0.05,
            first_suspension: Duration::from_secs(30),
        }
    }
}

impl GovernorOptions {
    /// Everything is counted, whatever it costs.
    pub const EXACT: Self = Self {
        budget: f64::INFINITY,
        ceiling: f64::INFINITY,
        first_suspension: Duration::ZERO,
    };

    /// This budget, with a ceiling of at least ten times the budget.
    #[must_use]
    pub fn with_budget(budget: f64) -> Self {
        let usual = Self::default();
        Self {
            budget,
            ceiling: usual.ceiling.max(10.0 * budget),
            ..usual
        }
    }
}

/// The shortest window: attaching and detaching takes milliseconds, so shorter ones would do little else.
const SHORTEST_WINDOW: Duration = Duration::from_millis(50);
/// The longest window: it shows two whole steps of a training loop with two steps per second or more.
pub(super) const LONGEST_WINDOW: Duration = Duration::from_millis(500);
/// The largest share of the time that windows take: two of the shortest ones per second.
const MAX_DUTY: f64 = 0.1;
/// The smallest share: a window of the shortest length about every eight minutes.
const MIN_DUTY: f64 = 1e-4;
/// The share of the budget that functions with permanently attached probes may use. The rest pays for windows.
const PERMANENT_SHARE: f64 = 0.8;
/// Windows may be opened this much before the budget has paid for them. The budget holds over a minute or more.
const CREDIT: Duration = Duration::from_secs(5);
/// The same as long as a function has no interval: that takes two windows, and the budget still holds over a minute.
const CREDIT_FOR_INTERVAL: Duration = Duration::from_secs(60);
/// Factor by which pauses between windows grow once the estimates of every process are precise.
const PRECISE_PAUSE_FACTOR: f64 = 5.0;
/// A function that costs less than this share of the budget is sampled only if the budget cannot be kept otherwise:
/// sampling it would save little and lose much, such as the boundaries of steps.
const CHEAP_SHARE: f64 = 0.2;
/// Probes on a sampled function are attached permanently again after it was cheap for this many rounds (10 s).
const CHEAP_ROUNDS: u32 = 20;

/// Rounds above the ceiling before probes are detached. It takes some rounds until sampling shows in the overhead.
const ROUNDS_ABOVE_CEILING: u32 = 4;

/// Chooses which functions to sample, and returns the overhead that remains.
///
/// `costs` has the overhead of each function on a thread, as a share of its time; `share` is their sum.
fn choose_sampled(
    mut costs: Vec<(usize, f64)>,
    share: f64,
    budget: f64,
    may_be_sampled: impl Fn(usize) -> bool,
) -> (Vec<usize>, f64) {
    let mut sampled = Vec::new();
    let mut left = share;
    costs.retain(|(symbol, _)| may_be_sampled(*symbol));
    // Most expensive first. Among cheap functions, those that mark steps come last.
    let is_dear = |cost: f64| cost >= budget * CHEAP_SHARE;
    costs.sort_by(|(a, cost_a), (b, cost_b)| {
        let marks = |symbol: &usize| SYMBOLS[*symbol].mark.is_some();
        let dearer = cost_b.total_cmp(cost_a);
        match is_dear(*cost_a) || is_dear(*cost_b) {
            true => dearer,
            false => marks(a).cmp(&marks(b)).then(dearer),
        }
    });
    // If functions that cannot be sampled exceed the budget alone, sampling cheap ones does not help.
    let can_hold = share - costs.iter().map(|(_, cost)| cost).sum::<f64>() <= budget;
    for (symbol, cost) in costs {
        if (left > budget && can_hold) || (left > budget * PERMANENT_SHARE && is_dear(cost)) {
            left -= cost;
            sampled.push(symbol);
        }
    }
    (sampled, left)
}

/// Whether a function sets the device that a thread uses.
fn sets_device(symbol: usize) -> bool {
    SYMBOLS[symbol].probe == Probe::CudaContext
}

/// Whether CUDA events cannot be followed while a function is not probed.
fn defines_events(symbol: usize) -> bool {
    cuda_trace::orders_events(&SYMBOLS[symbol])
}

/// These functions and all that are sampled together with one of them.
fn with_groups(symbols: &BTreeSet<usize>) -> BTreeSet<usize> {
    let group = |symbol: &usize| SYMBOLS[*symbol].sampling_group;
    let groups: BTreeSet<SamplingGroup> = symbols.iter().filter_map(group).collect();
    let joins = |symbol: &usize| group(symbol).is_some_and(|it| groups.contains(&it));
    let all = (0..SYMBOLS.len()).filter(joins);
    all.chain(symbols.iter().copied()).collect()
}

/// The share of the time for which windows may be open. `cost` is the overhead of a thread in a window, `left` what
/// remains of its budget.
fn duty(cost: f64, left: f64) -> f64 {
    (left / cost).clamp(MIN_DUTY, MAX_DUTY)
}

/// The measured cost of a probed call on this machine, and the number of sampling windows so far.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    /// Nanoseconds that a probed call costs its thread while one thread calls.
    pub ns_per_call: f64,
    /// The same while `threads` threads call at once.
    pub ns_per_call_contended: f64,
    /// Threads of the contended measurement: one per CPU, at most 8.
    pub threads: usize,
    /// Sampling windows so far.
    pub windows: u64,
}

impl Cost {
    /// Nanoseconds per probed call in a process whose threads call one at a time, or at once (contended).
    pub(super) fn call_ns(&self, is_contended: bool) -> f64 {
        if is_contended {
            self.ns_per_call_contended.max(self.ns_per_call)
        } else {
            self.ns_per_call
        }
    }
}

/// Keeps the overhead within the budget.
#[derive(Debug)]
pub(super) struct Governor {
    pub(super) options: GovernorOptions,
    pub(super) cost: Cost,
    /// The sampled functions, and for how many rounds each has been cheap enough for permanent probes.
    pub(super) sampled: BTreeMap<usize, u32>,
    last_round: Instant,
    next_window: Option<Instant>,
    /// Earliest start of the next window, whatever credit there is.
    earliest_window: Instant,
    /// When the budget will have paid for all windows so far.
    paid_at: Instant,
    /// When the open window closes.
    window: Option<Instant>,
    window_from_ns: u64,
    pub(super) launch_spans: LaunchSpans,
    /// Consecutive rounds in which a process was above the ceiling.
    rounds_over_ceiling: u32,
}

impl Governor {
    /// A governor with the cost of a probe measured on this machine.
    pub(super) fn calibrated(kernel: &Kernel, options: GovernorOptions) -> Self {
        Self {
            options,
            cost: calibration::measure(kernel),
            sampled: BTreeMap::new(),
            last_round: Instant::now(),
            next_window: None,
            earliest_window: Instant::now(),
            paid_at: Instant::now(),
            window: None,
            window_from_ns: 0,
            launch_spans: LaunchSpans::default(),
            rounds_over_ceiling: 0,
        }
    }

    pub(super) fn is_sampled(&self, symbol: usize) -> bool {
        self.sampled.contains_key(&symbol)
    }

    /// The sampled functions.
    pub(super) fn symbols(&self) -> Vec<usize> {
        self.sampled.keys().copied().collect()
    }

    /// Whether a function that launches is sampled.
    pub(super) fn samples_launches(&self) -> bool {
        let mut sampled = self.sampled.keys();
        sampled.any(|symbol| SYMBOLS[*symbol].kind == CallKind::Launch)
    }

    /// Whether a function that CUDA events depend on is sampled.
    fn samples_events(&self) -> bool {
        self.sampled.keys().any(|symbol| defines_events(*symbol))
    }

    pub(super) fn is_window_open(&self) -> bool {
        self.window.is_some()
    }

    /// Closes the window of one process, and adds its counts to the estimates.
    pub(super) fn close_window_of(
        &self,
        process: &mut ObservedProcess,
        counters: &layout::Counters,
        to_ns: u64,
    ) {
        if to_ns <= self.window_from_ns {
            return;
        }
        let cost_ns = self.cost.call_ns(process.is_contended());
        process.close_window(counters, (self.window_from_ns, to_ns), cost_ns);
    }

    /// When the next window opens, or the one that is open closes.
    pub(super) fn next_window_change(&self) -> Option<Instant> {
        let next = self.next_window.filter(|_| !self.sampled.is_empty());
        self.window.or(next)
    }

    /// Opens the next window as soon as the budget allows with this credit, if that is earlier than planned.
    fn bring_window_forward(&mut self, credit: Duration) {
        let on_credit = self.paid_at.checked_sub(credit);
        let earliest = on_credit.map_or(self.earliest_window, |on| on.max(self.earliest_window));
        self.next_window = self.next_window.map(|next| next.min(earliest));
    }
}

/// The cost of the probes to one process.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ProcessCost {
    /// Probed calls per second of its busiest thread.
    pub busiest_calls_per_second: f64,
    /// Overhead of its busiest thread, as a share of its time.
    pub busiest_thread: f64,
    /// Overhead of all its threads so far, in CPU seconds.
    pub seconds: f64,
}

impl Observer {
    /// The measured cost of a probed call, and the number of sampling windows so far.
    #[must_use]
    pub fn cost(&self) -> Cost {
        self.governor.cost
    }

    /// Measures the overhead of every process, and changes which functions are sampled.
    pub fn govern(&mut self) {
        let elapsed = self.governor.last_round.elapsed().as_secs_f64();
        self.governor.last_round = Instant::now();
        let several_devices = self.are_several_devices_used();
        if several_devices && !self.is_off() {
            self.attach_device_functions();
        }
        let (expensive, over_ceiling) = self.measure_overhead(elapsed, several_devices);
        let mut expensive = with_groups(&expensive);
        expensive.retain(|symbol| !self.governor.is_sampled(*symbol));
        if !expensive.is_empty() {
            let mut links = self.close_window();
            for symbol in expensive {
                links.extend(self.begin_sampling(symbol));
            }
            // Detaching may take long on a busy machine.
            detach(links);
        }
        self.attach_cheap_functions();
        self.suspend_if_over_ceiling(over_ceiling);
        self.end_expired_suspension();
        self.bring_window_forward();
    }

    /// Measures the overhead of every process in the last `elapsed` seconds. Returns the functions that must be sampled
    /// to keep the budget, and a process that stays above the ceiling even then.
    fn measure_overhead(
        &mut self,
        elapsed: f64,
        several_devices: bool,
    ) -> (BTreeSet<usize>, Option<u32>) {
        let budget = self.governor.options.budget;
        let mut expensive = BTreeSet::new();
        let mut over_ceiling = None;
        for (index, process) in &mut self.processes.running {
            let word = self
                .kernel
                .processes
                .word(*index as usize, offset_of!(layout::Process, busiest_hits));
            let busiest = word.swap(0, Ordering::Relaxed) as f64;
            let ns = self.governor.cost.call_ns(process.is_contended());
            process.note_cost(busiest, ns, elapsed);
            // Only permanent probes: windows are planned to fit into the rest of the budget.
            let rates = process.rates(|symbol| !self.governor.is_sampled(symbol));
            let permanent: f64 = rates.iter().map(|(_, rate)| rate).sum();
            let share = permanent.min(busiest) * ns / 1e9;
            process.permanent_cost = share;
            if share <= budget {
                continue;
            }
            if self.suspension.is_some() {
                continue;
            }
            let costs = rates
                .iter()
                .map(|(symbol, rate)| (*symbol, share * rate / permanent));
            let may_be_sampled = |symbol: usize| {
                SYMBOLS[symbol].frequent && !(several_devices && sets_device(symbol))
            };
            let (sampled, left) = choose_sampled(costs.collect(), share, budget, may_be_sampled);
            expensive.extend(sampled);
            process.permanent_cost = left;
            if left > self.governor.options.ceiling {
                over_ceiling = Some(process.pid);
            }
        }
        (expensive, over_ceiling)
    }

    /// Opens the next window soon if the estimates of some process are not precise yet.
    pub(super) fn bring_window_forward(&mut self) {
        if self.are_all_estimates_precise() {
            return;
        }
        let mut watched = self
            .processes
            .running
            .values()
            .filter(|one| one.needs_windows());
        let credit = match watched.any(ObservedProcess::lacks_interval) {
            true => CREDIT_FOR_INTERVAL,
            false => CREDIT,
        };
        self.governor.bring_window_forward(credit);
    }

    /// Whether a process uses several devices. Then functions that set the device of a thread are not sampled.
    fn are_several_devices_used(&self) -> bool {
        let mut processes = self.processes.running.values();
        processes.any(|process| process.uses_several_devices)
    }

    /// Attaches permanent probes to sampled functions that set the device of a thread.
    fn attach_device_functions(&mut self) {
        let sampled = self.governor.symbols().into_iter();
        for symbol in sampled.filter(|symbol| sets_device(*symbol)) {
            detach(self.close_window());
            self.attach_permanently(symbol);
        }
    }

    /// Whether the estimates of every process that needs windows are precise.
    fn are_all_estimates_precise(&self) -> bool {
        let processes = self.processes.running.values();
        let mut watched = processes.filter(|process| process.needs_windows());
        watched.all(ObservedProcess::has_precise_estimates)
    }

    /// CUDA events were not followed for a while. Only events recorded from now on count.
    pub(super) fn restart_event_tracking(&self) {
        self.kernel
            .restart_event_tracking(self.governor.samples_events());
    }

    /// Samples a function from now on. Returns its permanent links, to be dropped.
    fn begin_sampling(&mut self, symbol: usize) -> Vec<Link> {
        // Marks up to here have exact launches. The next `read` reports the error if they cannot be read.
        let _ = self.read_step_marks();
        if self.kernel.set_sampled(symbol, true).is_err() {
            return Vec::new();
        }
        self.kernel.note_detached();
        // The function does not count any more, so its count up to here is exact.
        for (index, process) in &mut self.processes.running {
            process.begin_sampling(symbol, &self.kernel.counters.read(*index as usize));
        }
        self.governor.sampled.insert(symbol, 0);
        if defines_events(symbol) {
            self.restart_event_tracking();
        }
        self.bring_window_forward();
        if SYMBOLS[symbol].kind == CallKind::Launch {
            self.governor.launch_spans.permanent_since_ns = None;
        }
        self.update_launch_assumption();
        let next_window = &mut self.governor.next_window;
        next_window.get_or_insert_with(Instant::now);
        let files = self.attachment.files.iter_mut();
        files
            .flat_map(|file| file.switch_to_sampling(symbol))
            .collect()
    }

    /// Attaches permanent probes to a function that was sampled.
    fn attach_permanently(&mut self, symbol: usize) {
        let _ = self.read_step_marks();
        for file in &mut self.attachment.files {
            file.attach_permanently(&self.kernel, symbol);
        }
        for process in self.processes.running.values_mut() {
            process.end_sampling(symbol, monotonic_ns());
        }
        let _ = self.kernel.set_sampled(symbol, false);
        // Marks that came while probes were being attached.
        let _ = self.read_step_marks();
        self.governor.sampled.remove(&symbol);
        if defines_events(symbol) {
            self.restart_event_tracking();
        }
        if !self.governor.samples_launches() {
            let since_ns = &mut self.governor.launch_spans.permanent_since_ns;
            since_ns.get_or_insert_with(monotonic_ns);
        }
        self.update_launch_assumption();
    }

    /// While launches are sampled, the kernel assumes that a thread launches after it copies its batch to the GPU.
    /// Otherwise the thread would seem to load data until its next wait.
    fn update_launch_assumption(&self) {
        let assumes = self.governor.samples_launches();
        if assumes != self.kernel.assumes_launches() {
            let is_sampled = |symbol| self.governor.is_sampled(symbol);
            let _ = self.kernel.assume_launches(assumes, is_sampled);
        }
    }

    /// Attaches permanent probes to sampled functions that have become cheap.
    fn attach_cheap_functions(&mut self) {
        if self.governor.is_window_open() || self.is_off() {
            return;
        }
        let budget = self.governor.options.budget;
        for (symbol, rounds) in &mut self.governor.sampled {
            let busy = self.processes.running.values().any(|process| {
                let ns = self.governor.cost.call_ns(process.is_contended());
                let cost = process.sampled_rate(*symbol) * ns / 1e9;
                cost > 0.0
                    && (cost > budget * CHEAP_SHARE
                        || process.permanent_cost + cost > budget * PERMANENT_SHARE)
            });
            *rounds = if busy { 0 } else { *rounds + 1 };
        }
        let sampled = self.governor.sampled.iter();
        let (calm, busy): (Vec<_>, Vec<_>) =
            sampled.partition(|(_, rounds)| **rounds >= CHEAP_ROUNDS);
        let symbols = |of: Vec<(&usize, _)>| of.into_iter().map(|(symbol, _)| *symbol).collect();
        let calm: BTreeSet<usize> = symbols(calm);
        for symbol in calm.difference(&with_groups(&symbols(busy))) {
            self.attach_permanently(*symbol);
        }
    }

    /// Detaches all probes if a process stays above the ceiling although every frequent function is sampled.
    fn suspend_if_over_ceiling(&mut self, over_ceiling: Option<u32>) {
        let Some(pid) = over_ceiling else {
            self.governor.rounds_over_ceiling = 0;
            return;
        };
        self.governor.rounds_over_ceiling += 1;
        if self.governor.rounds_over_ceiling >= ROUNDS_ABOVE_CEILING {
            self.governor.rounds_over_ceiling = 0;
            self.suspend_over_ceiling(pid);
        }
    }

    /// Names of the functions that are sampled now.
    pub fn sampled(&self) -> impl Iterator<Item = &'static str> {
        let sampled = self.governor.sampled.keys();
        sampled.map(|symbol| SYMBOLS[*symbol].name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: f64 = 0.005;

    fn symbol(name: &str) -> usize {
        let place = SYMBOLS.iter().position(|symbol| symbol.name() == name);
        place.expect("in the table")
    }

    /// Functions and their costs as shares of the budget.
    fn sampled(costs: &[(&str, f64)]) -> Vec<&'static str> {
        let costs: Vec<(usize, f64)> = costs
            .iter()
            .map(|(name, share)| (symbol(name), share * BUDGET))
            .collect();
        let share = costs.iter().map(|(_, cost)| cost).sum();
        let (sampled, _) = choose_sampled(costs, share, BUDGET, |symbol| SYMBOLS[symbol].frequent);
        sampled
            .iter()
            .map(|symbol| SYMBOLS[*symbol].name())
            .collect()
    }

    #[test]
    fn a_group_is_sampled_together() {
        let together = |names: &[&str]| -> Vec<&str> {
            let symbols = names.iter().map(|name| symbol(name)).collect();
            let all = with_groups(&symbols).into_iter();
            all.map(|symbol| SYMBOLS[symbol].name()).collect()
        };
        let pools = [
            "cuMemAllocAsync",
            "cuMemAllocFromPoolAsync",
            "cuMemFreeAsync",
        ];
        assert_eq!(together(&pools[1..2]), pools);
        let kernels = [
            "cuLaunchKernel",
            "cuLaunchKernelEx",
            "cuLaunchCooperativeKernel",
        ];
        assert_eq!(together(&kernels[..1]), kernels);
        // It marks steps, so it is not in their group.
        assert_eq!(together(&["cuGraphLaunch"]), ["cuGraphLaunch"]);
    }

    #[test]
    fn expensive_functions_are_sampled_and_cheap_ones_are_not() {
        let adds_up = sampled(&[
            ("cuLaunchKernel", 19.0),
            ("cuMemcpyDtoDAsync_v2", 7.0),
            ("at::_ops::_foreach_addcdiv_::call", 0.1),
            ("cuMemcpyDtoHAsync_v2", 0.1),
            ("ncclAllReduce", 0.7),
        ]);
        assert_eq!(adds_up, ["cuLaunchKernel", "cuMemcpyDtoDAsync_v2"]);
    }

    #[test]
    fn cheap_functions_are_sampled_if_that_keeps_the_budget() {
        let sampled = sampled(&[
            ("at::_ops::_foreach_addcdiv_::call", 0.15),
            ("cuEventRecord", 0.12),
            ("cuMemcpyDtoHAsync_v2", 0.11),
            ("ncclAllReduce", 0.7),
        ]);
        assert_eq!(sampled, ["cuEventRecord"], "the others mark steps");
    }

    #[test]
    fn cheap_functions_are_not_sampled_if_the_budget_is_exceeded_anyway() {
        let sampled = sampled(&[
            ("cuLaunchKernel", 5.0),
            ("cuEventRecord", 0.1),
            ("ncclAllReduce", 1.7),
        ]);
        assert_eq!(sampled, ["cuLaunchKernel"]);
    }

    #[test]
    fn windows_use_the_rest_of_the_budget() {
        let near = |a: f64, b: f64| (a - b).abs() < 1e-12;
        assert!(near(duty(0.1, 0.002), 0.02));
        assert!(near(duty(0.0, 0.002), MAX_DUTY));
        assert!(near(duty(1e6, 0.002), MIN_DUTY));
    }
}
