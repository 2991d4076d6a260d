//! Which functions are sampled, and for which share of the time windows are open.

use std::collections::BTreeSet;

use crate::probes::{Probe, SYMBOLS, SamplingGroup, cuda_trace};

/// Largest share of the time in which a sampling window is open: two windows of the shortest length per second.
pub(super) const MAX_WINDOW_SHARE: f64 = 0.1;
/// The smallest share: a window of the shortest length about every eight minutes.
pub(super) const MIN_WINDOW_SHARE: f64 = 1e-4;
/// The share of the budget that functions with permanently attached probes may use. The rest of the budget pays for
/// sampling windows.
pub(super) const BUDGET_SHARE_OF_PERMANENT_PROBES: f64 = 0.8;
/// A function that costs less than this share of the budget is sampled only if the budget cannot be kept otherwise:
/// sampling it would save little and lose much, such as the boundaries of steps.
pub(super) const BUDGET_SHARE_OF_CHEAP_FUNCTION: f64 = 0.2;

/// Chooses which functions to sample, and returns the overhead that remains.
///
/// `costs` has the overhead of each function on a thread, as a share of its time; `share` is their sum.
pub(super) fn choose_sampled(
    mut costs: Vec<(usize, f64)>,
    share: f64,
    budget: f64,
    may_be_sampled: impl Fn(usize) -> bool,
) -> (Vec<usize>, f64) {
    let mut sampled = Vec::new();
    let mut left = share;
    costs.retain(|(symbol, _)| may_be_sampled(*symbol));
    // The most expensive functions are sampled first. Among cheap functions, those that mark steps come last.
    let is_dear = |cost: f64| cost >= budget * BUDGET_SHARE_OF_CHEAP_FUNCTION;
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
        if (left > budget && can_hold)
            || (left > budget * BUDGET_SHARE_OF_PERMANENT_PROBES && is_dear(cost))
        {
            left -= cost;
            sampled.push(symbol);
        }
    }
    (sampled, left)
}

/// Whether a function sets the device that a thread uses.
pub(super) fn sets_device(symbol: usize) -> bool {
    SYMBOLS[symbol].probe == Probe::CudaContext
}

/// Whether CUDA events cannot be followed while a function is not probed.
pub(super) fn defines_events(symbol: usize) -> bool {
    cuda_trace::orders_events(&SYMBOLS[symbol])
}

/// Adds to these functions all functions that are sampled together with one of them.
pub(super) fn with_sampling_groups(symbols: &BTreeSet<usize>) -> BTreeSet<usize> {
    let group = |symbol: &usize| SYMBOLS[*symbol].sampling_group;
    let groups: BTreeSet<SamplingGroup> = symbols.iter().filter_map(group).collect();
    let joins = |symbol: &usize| group(symbol).is_some_and(|it| groups.contains(&it));
    let all = (0..SYMBOLS.len()).filter(joins);
    all.chain(symbols.iter().copied()).collect()
}

/// The share of the time for which windows may be open. `cost` is the overhead of a thread in a window, `left` what
/// remains of its budget.
pub(super) fn window_share(cost: f64, left: f64) -> f64 {
    (left / cost).clamp(MIN_WINDOW_SHARE, MAX_WINDOW_SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST_BUDGET: f64 = 0.005;

    fn symbol_index(name: &str) -> usize {
        let place = SYMBOLS.iter().position(|symbol| symbol.name() == name);
        place.expect("in the table")
    }

    /// The names of the functions that are sampled, for functions with these costs as shares of the budget.
    fn names_of_sampled(costs: &[(&str, f64)]) -> Vec<&'static str> {
        let costs: Vec<(usize, f64)> = costs
            .iter()
            .map(|(name, share)| (symbol_index(name), share * TEST_BUDGET))
            .collect();
        let share = costs.iter().map(|(_, cost)| cost).sum();
        let (sampled, _) = choose_sampled(costs, share, TEST_BUDGET, |symbol| {
            SYMBOLS[symbol].is_frequent
        });
        sampled
            .iter()
            .map(|symbol| SYMBOLS[*symbol].name())
            .collect()
    }

    #[test]
    fn a_group_is_sampled_together() {
        let together = |names: &[&str]| -> Vec<&str> {
            let symbols = names.iter().map(|name| symbol_index(name)).collect();
            let all = with_sampling_groups(&symbols).into_iter();
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
        // `cuGraphLaunch` marks steps, so it is not sampled together with the other launch functions.
        assert_eq!(together(&["cuGraphLaunch"]), ["cuGraphLaunch"]);
    }

    #[test]
    fn expensive_functions_are_sampled_and_cheap_ones_are_not() {
        let adds_up = names_of_sampled(&[
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
        let sampled = names_of_sampled(&[
            ("at::_ops::_foreach_addcdiv_::call", 0.15),
            ("cuEventRecord", 0.12),
            ("cuMemcpyDtoHAsync_v2", 0.11),
            ("ncclAllReduce", 0.7),
        ]);
        assert_eq!(sampled, ["cuEventRecord"], "the others mark steps");
    }

    #[test]
    fn cheap_functions_are_not_sampled_if_the_budget_is_exceeded_anyway() {
        let sampled = names_of_sampled(&[
            ("cuLaunchKernel", 5.0),
            ("cuEventRecord", 0.1),
            ("ncclAllReduce", 1.7),
        ]);
        assert_eq!(sampled, ["cuLaunchKernel"]);
    }

    #[test]
    fn windows_use_the_rest_of_the_budget() {
        let near = |a: f64, b: f64| (a - b).abs() < 1e-12;
        assert!(near(window_share(0.1, 0.002), 0.02));
        assert!(near(window_share(0.0, 0.002), MAX_WINDOW_SHARE));
        assert!(near(window_share(1e6, 0.002), MIN_WINDOW_SHARE));
    }
}
