//! Keeps the overhead of the probes within a budget.
//!
//! A probe costs the thread that calls the probed function a few microseconds. The governor measures that cost at the
//! start, on this machine, and multiplies it by the calls of every thread. If the overhead of a thread exceeds the
//! budget, its most frequent functions are *sampled*: their probes are attached only in windows of 50 ms, or of a few
//! steps, as rarely as the budget requires. `estimate` computes calls from the windows. If functions that cannot be
//! sampled cost a thread more than a ceiling, its process is not observed for a while (`process_exclusions`).

mod calibration;
mod sampling_choice;
mod sampling_windows;

use std::collections::{BTreeMap, BTreeSet};
use std::mem::offset_of;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use zernel_model::gpu::GpuFacts;

use self::sampling_choice::{
    BUDGET_SHARE_OF_CHEAP_FUNCTION, BUDGET_SHARE_OF_PERMANENT_PROBES, choose_sampled,
    defines_events, sets_device, with_sampling_groups,
};
use self::sampling_windows::WindowSchedule;
pub(super) use self::sampling_windows::{LONGEST_WINDOW, WindowSpans, set_misses_window};
use super::attached_files;
use super::attachment::LibraryAttachments;
use super::kernel::KernelPrograms;
use super::process_table::{ProcessTable, ReadContext};
use super::{ObservedProcess, monotonic_ns};
use crate::probe_link::{ProbeLink, detach_links};
use crate::probes::{CallKind, SYMBOLS, layout};

/// Budget and ceiling of the overhead.
#[derive(Debug, Clone, Copy)]
pub struct GovernorOptions {
    /// The budget: largest overhead of any observed thread, as a share of the thread's time.
    pub budget: f64,
    /// Overhead above which a process is not observed for a while, if sampling cannot reduce it.
    pub ceiling: f64,
    /// How long a process that exceeds the ceiling is not observed the first time.
    pub first_exclusion: Duration,
}

impl Default for GovernorOptions {
    fn default() -> Self {
        Self {
            budget: 0.005,
            ceiling: 0.05,
            first_exclusion: Duration::from_secs(30),
        }
    }
}

impl GovernorOptions {
    /// Options to count every call, whatever the overhead.
    pub const COUNT_EVERYTHING: Self = Self {
        budget: f64::INFINITY,
        ceiling: f64::INFINITY,
        first_exclusion: Duration::ZERO,
    };

    /// Options of a governor with this budget, and a ceiling of at least ten times the budget.
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

/// Probes on a sampled function are attached permanently again after it was cheap for this many rounds (10 s).
const CHEAP_ROUNDS_UNTIL_PERMANENT: u32 = 20;

/// Rounds in a row in which the overhead, without sampled functions, exceeds the ceiling before a process is excluded:
/// one busy round is not enough.
const ROUNDS_ABOVE_CEILING: u32 = 4;

/// The measured cost of a probed call on this machine, and the number of sampling windows so far.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ProbeCost {
    /// Nanoseconds that a probed call costs its thread while one thread calls.
    pub ns_per_call: f64,
    /// The cost of a probed call while `threads` threads call at once.
    pub ns_per_call_contended: f64,
    /// Number of threads that call at once in the second measurement of the cost: one per CPU, at most 8.
    pub calibration_threads: usize,
    /// Sampling windows so far.
    pub sampling_windows: u64,
}

impl ProbeCost {
    /// Cost of a probed call in nanoseconds: in a process whose threads call one at a time, or at the same time
    /// (contended).
    fn probed_call_ns(&self, is_contended: bool) -> f64 {
        if is_contended {
            self.ns_per_call_contended.max(self.ns_per_call)
        } else {
            self.ns_per_call
        }
    }
}

/// What the governor measures and changes.
pub(super) struct GovernedParts<'a> {
    pub(super) kernel: &'a KernelPrograms,
    pub(super) attachment: &'a mut LibraryAttachments,
    pub(super) processes: &'a mut ProcessTable,
    pub(super) gpus: &'a [GpuFacts],
    /// Whether all probes are detached.
    pub(super) are_probes_off: bool,
}

/// Keeps the overhead within the budget.
#[derive(Debug)]
pub(super) struct Governor {
    options: GovernorOptions,
    pub(super) cost: ProbeCost,
    /// The sampled functions, and for how many rounds each has been cheap enough for permanent probes.
    sampled_functions: BTreeMap<usize, u32>,
    window_schedule: WindowSchedule,
    /// Since when all launches are counted by permanent probes; `None` while launches are sampled.
    launches_permanent_since_ns: Option<u64>,
    last_round: Instant,
}

impl Governor {
    /// A governor with the cost of a probe measured on this machine.
    pub(super) fn with_measured_cost(kernel: &KernelPrograms, options: GovernorOptions) -> Self {
        Self {
            options,
            cost: calibration::measure_call_cost(kernel),
            sampled_functions: BTreeMap::new(),
            window_schedule: WindowSchedule::new(Instant::now()),
            launches_permanent_since_ns: Some(0),
            last_round: Instant::now(),
        }
    }

    pub(super) fn is_sampled(&self, symbol: usize) -> bool {
        self.sampled_functions.contains_key(&symbol)
    }

    /// The sampled functions.
    pub(super) fn sampled_symbols(&self) -> Vec<usize> {
        self.sampled_functions.keys().copied().collect()
    }

    /// Whether a function that launches is sampled.
    fn samples_launches(&self) -> bool {
        let mut sampled = self.sampled_functions.keys();
        sampled.any(|symbol| SYMBOLS[*symbol].kind == CallKind::Launch)
    }

    /// Whether a function that CUDA events depend on is sampled.
    fn samples_events(&self) -> bool {
        self.sampled_functions
            .keys()
            .any(|symbol| defines_events(*symbol))
    }

    /// Whether launches have been counted by permanent probes all the time since `from_ns`.
    pub(super) fn counts_launches_since(&self, from_ns: u64) -> bool {
        self.launches_permanent_since_ns
            .is_some_and(|since| since <= from_ns)
    }

    /// Nanoseconds that a probed call costs a thread of this process.
    pub(super) fn probed_call_ns(&self, process: &ObservedProcess) -> f64 {
        self.cost.probed_call_ns(process.overhead.is_contended())
    }

    /// Measures the overhead of every process, and changes which functions are sampled. Returns the processes that have
    /// been above the ceiling for some rounds although their frequent functions are sampled.
    pub(super) fn govern(&mut self, governed: &mut GovernedParts<'_>) -> Vec<u32> {
        let elapsed = self.last_round.elapsed().as_secs_f64();
        self.last_round = Instant::now();
        let mut running = governed.processes.running_processes.values();
        let several_devices = running.any(|process| process.uses_several_devices);
        if several_devices && !governed.are_probes_off {
            self.attach_device_functions(governed);
        }
        let expensive = self.measure_overhead(governed, elapsed, several_devices);
        let mut expensive = with_sampling_groups(&expensive);
        expensive.retain(|symbol| !self.is_sampled(*symbol));
        if !expensive.is_empty() {
            let mut links = self.close_window(governed);
            for symbol in expensive {
                links.extend(self.begin_sampling(governed, symbol));
            }
            // Detaching may take long on a busy machine.
            detach_links(links);
        }
        self.attach_cheap_functions(governed);
        self.bring_window_forward(governed.processes);
        let running = governed.processes.running_processes.iter();
        let over_ceiling = running
            .filter(|(_, it)| it.overhead.rounds_over_ceiling >= ROUNDS_ABOVE_CEILING)
            .map(|(handle, _)| *handle);
        over_ceiling.collect()
    }

    /// Measures the overhead of every process in the last `elapsed` seconds. Returns the functions that must be sampled
    /// to keep the budget.
    fn measure_overhead(
        &self,
        governed: &mut GovernedParts<'_>,
        elapsed: f64,
        several_devices: bool,
    ) -> BTreeSet<usize> {
        let budget = self.options.budget;
        let mut expensive = BTreeSet::new();
        for (handle, process) in &mut governed.processes.running_processes {
            let word = governed.kernel.processes.word(
                layout::index_of_handle(*handle),
                offset_of!(layout::Process, busiest_hits_per_second),
            );
            let busiest = word.swap(0, Ordering::Relaxed) as f64;
            let ns = self.probed_call_ns(process);
            process.measure_overhead(busiest, ns, elapsed);
            // Only the cost of permanent probes counts: sampling windows are planned to fit into the rest of the
            // budget.
            let rates = process
                .overhead
                .call_rates(|symbol| !self.is_sampled(symbol));
            let permanent: f64 = rates.iter().map(|(_, rate)| rate).sum();
            let share = permanent.min(busiest) * ns / 1e9;
            process.overhead.permanent_cost = share;
            let rounds = std::mem::take(&mut process.overhead.rounds_over_ceiling);
            if share <= budget || governed.are_probes_off || process.is_uncounted() {
                continue;
            }
            let costs = rates
                .iter()
                .map(|(symbol, rate)| (*symbol, share * rate / permanent));
            let may_be_sampled = |symbol: usize| {
                SYMBOLS[symbol].is_frequent && !(several_devices && sets_device(symbol))
            };
            let (sampled, left) = choose_sampled(costs.collect(), share, budget, may_be_sampled);
            expensive.extend(sampled);
            process.overhead.permanent_cost = left;
            if left > self.options.ceiling {
                process.overhead.rounds_over_ceiling = rounds + 1;
            }
        }
        expensive
    }

    /// Reads step marks. The next read of all counts reports the error if they cannot be read.
    fn read_step_marks(&self, governed: &mut GovernedParts<'_>) {
        let _ = governed.processes.read_step_marks(ReadContext {
            kernel: governed.kernel,
            governor: self,
            attachment: governed.attachment,
            gpus: governed.gpus,
        });
    }

    /// Attaches permanent probes to sampled functions that set the device of a thread.
    fn attach_device_functions(&mut self, governed: &mut GovernedParts<'_>) {
        let sampled = self.sampled_symbols().into_iter();
        for symbol in sampled.filter(|symbol| sets_device(*symbol)) {
            detach_links(self.close_window(governed));
            self.attach_permanently(governed, symbol);
        }
    }

    /// No longer times collectives that were called before now: a wait that covered such a collective may have been missed
    /// while CUDA events were not followed.
    pub(super) fn restart_event_tracking(&self, kernel: &KernelPrograms) {
        kernel.restart_event_tracking(self.samples_events());
    }

    /// Samples a function from now on. Returns the function's permanent links, which the caller drops to detach the
    /// probes.
    fn begin_sampling(
        &mut self,
        governed: &mut GovernedParts<'_>,
        symbol: usize,
    ) -> Vec<ProbeLink> {
        // Step marks up to now have exact launches, so they are read before sampling begins.
        self.read_step_marks(governed);
        let kernel = governed.kernel;
        if kernel.set_symbol_sampled(symbol, true).is_err() {
            return Vec::new();
        }
        kernel.record_detach_time();
        // Probes of the function no longer count, so its calls up to now are exact.
        for (handle, process) in &mut governed.processes.running_processes {
            let counters = kernel.call_counters(*handle);
            let steps = &process.steps;
            process
                .call_counts
                .begin_sampling(symbol, &counters, monotonic_ns(), steps);
        }
        self.sampled_functions.insert(symbol, 0);
        if defines_events(symbol) {
            self.restart_event_tracking(kernel);
        }
        self.bring_window_forward(governed.processes);
        if SYMBOLS[symbol].kind == CallKind::Launch {
            self.launches_permanent_since_ns = None;
        }
        self.update_launch_assumption(kernel);
        self.window_schedule.open_first();
        let files = governed.attachment.files.iter_mut();
        files
            .flat_map(|file| file.switch_to_sampling(symbol))
            .collect()
    }

    /// Attaches permanent probes to a function that was sampled.
    fn attach_permanently(&mut self, governed: &mut GovernedParts<'_>, symbol: usize) {
        self.read_step_marks(governed);
        let kernel = governed.kernel;
        attached_files::attach_each_file(governed.attachment.files.iter_mut(), |file| {
            file.attach_permanently(kernel, symbol);
        });
        for process in governed.processes.running_processes.values_mut() {
            let steps = &process.steps;
            process
                .call_counts
                .end_sampling(symbol, monotonic_ns(), steps);
        }
        let _ = kernel.set_symbol_sampled(symbol, false);
        // Reads step marks that the kernel recorded while probes were being attached.
        self.read_step_marks(governed);
        self.sampled_functions.remove(&symbol);
        if defines_events(symbol) {
            self.restart_event_tracking(kernel);
        }
        if !self.samples_launches() {
            self.launches_permanent_since_ns
                .get_or_insert_with(monotonic_ns);
        }
        self.update_launch_assumption(kernel);
    }

    /// While launches are sampled, the kernel assumes that a thread launches after it copies its batch to the GPU.
    /// Without this assumption the thread would seem to load data until its next wait.
    fn update_launch_assumption(&self, kernel: &KernelPrograms) {
        let assumes = self.samples_launches();
        if assumes != kernel.assumes_launches() {
            let _ = kernel.assume_launches(assumes, |symbol| self.is_sampled(symbol));
        }
    }

    /// Attaches permanent probes to sampled functions that have become cheap.
    fn attach_cheap_functions(&mut self, governed: &mut GovernedParts<'_>) {
        if self.is_window_open() || governed.are_probes_off {
            return;
        }
        let budget = self.options.budget;
        for (symbol, rounds) in &mut self.sampled_functions {
            let busy = governed
                .processes
                .running_processes
                .values()
                .any(|process| {
                    let ns = self.cost.probed_call_ns(process.overhead.is_contended());
                    let cost = process.call_counts.sampled_rate(*symbol) * ns / 1e9;
                    // Nothing shows how often a process without a window calls.
                    let is_unknown = process.misses_window && !process.is_uncounted();
                    is_unknown
                        || cost > 0.0
                            && (cost > budget * BUDGET_SHARE_OF_CHEAP_FUNCTION
                                || process.overhead.permanent_cost + cost
                                    > budget * BUDGET_SHARE_OF_PERMANENT_PROBES)
                });
            *rounds = if busy { 0 } else { *rounds + 1 };
        }
        let sampled = self.sampled_functions.iter();
        let (calm, busy): (Vec<_>, Vec<_>) =
            sampled.partition(|(_, rounds)| **rounds >= CHEAP_ROUNDS_UNTIL_PERMANENT);
        let symbols = |of: Vec<(&usize, _)>| of.into_iter().map(|(symbol, _)| *symbol).collect();
        let calm: BTreeSet<usize> = symbols(calm);
        for symbol in calm.difference(&with_sampling_groups(&symbols(busy))) {
            self.attach_permanently(governed, *symbol);
        }
    }
}
