//! Measures the cost of a probed call on this machine.

use std::hint::black_box;
use std::path::Path;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use super::ProbeCost;
use crate::capability::{offset_in_own_executable, without_libbpf_messages};
use crate::observer::kernel::{KernelPrograms, ProbeTarget};
use crate::probes::SYMBOLS;

/// The function that calibration probes and calls. Its first instruction is that of a function of the CUDA driver.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
extern "C" fn calibration_target() {
    std::arch::naked_asm!("push rbp", "pop rbp", "ret");
}

/// Calls per thread in one measurement.
const CALIBRATION_CALLS: usize = 1500;
/// Memory touched between two calls, so that the kernel's memory is as cold in the caches as under a real program.
const FOOTPRINT_BYTES: usize = 512 * 1024;
/// Cache lines touched between two calls.
const FOOTPRINT_LINES: usize = 1500;
/// Total cost of a trap as a multiple of its own time: the program has to warm up caches and branch predictors again.
/// Steps of an eager training loop grew by 3.8 µs per probed call, while the calls themselves took 1.4 to 1.9 µs
/// longer.
const TOTAL_COST_FACTOR: f64 = 2.2;

/// Assumed cost of a probed call in nanoseconds, if the cost cannot be measured.
const FALLBACK_CALL_COST_NS: f64 = 4000.0;
/// Lower bound of the measured cost.
const MIN_CALL_COST_NS: f64 = 400.0;

/// The cost of a probed call: how much longer it takes than a call without a probe.
pub(super) fn measure_call_cost(kernel: &KernelPrograms) -> ProbeCost {
    try_measure_call_cost(kernel).unwrap_or(ProbeCost {
        ns_per_call: FALLBACK_CALL_COST_NS,
        ns_per_call_contended: FALLBACK_CALL_COST_NS,
        calibration_threads: 1,
        sampling_windows: 0,
    })
}

fn try_measure_call_cost(kernel: &KernelPrograms) -> Option<ProbeCost> {
    let symbol = SYMBOLS
        .iter()
        .position(|row| row.name() == "cuLaunchKernel")?;
    let offset = offset_in_own_executable(calibration_target as *const ()).ok()? as u64;
    let threads = thread::available_parallelism()
        .map_or(1, usize::from)
        .min(8);
    let plain = ns_per_call(1);
    let plain_contended = ns_per_call(threads);
    let own = Path::new("/proc/self/exe");
    let links =
        without_libbpf_messages(|| kernel.attach_probes(own, &[ProbeTarget { offset, symbol }]))
            .ok()?;
    let cost = ProbeCost {
        ns_per_call: (TOTAL_COST_FACTOR * (ns_per_call(1) - plain)).max(MIN_CALL_COST_NS),
        ns_per_call_contended: (TOTAL_COST_FACTOR * (ns_per_call(threads) - plain_contended))
            .max(MIN_CALL_COST_NS),
        calibration_threads: threads,
        sampling_windows: 0,
    };
    drop(links);
    Some(cost)
}

/// The median time of a call while `threads` threads call at once.
fn ns_per_call(threads: usize) -> f64 {
    let barrier = Barrier::new(threads);
    let mut times: Vec<u64> = thread::scope(|scope| {
        let time = || {
            let mut work = CalibrationWork::new();
            barrier.wait();
            (0..CALIBRATION_CALLS)
                .map(|_| work.time_one_call())
                .collect::<Vec<_>>()
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(time)).collect();
        let results = workers.into_iter().filter_map(|worker| worker.join().ok());
        results.flatten().collect()
    });
    times.sort_unstable();
    times
        .get(times.len() / 2)
        .map_or(0.0, |median| *median as f64)
}

/// The work of a program between two calls.
struct CalibrationWork {
    memory: Vec<u64>,
    next_line: usize,
}

impl CalibrationWork {
    fn new() -> Self {
        Self {
            memory: vec![1; FOOTPRINT_BYTES / 8],
            next_line: 0,
        }
    }

    /// Measures the time of one call of the probed function, made after some work in memory.
    fn time_one_call(&mut self) -> u64 {
        for _ in 0..FOOTPRINT_LINES {
            // Each address depends on the one before and is far from it, so the CPU cannot prefetch.
            let step = 8 * 1021 * self.memory[self.next_line] as usize;
            self.next_line = (self.next_line + step) % self.memory.len();
        }
        black_box(self.next_line);
        let start = Instant::now();
        black_box(calibration_target)();
        start.elapsed().as_nanos() as u64
    }
}
