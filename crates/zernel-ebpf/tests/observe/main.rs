//! Probes on the software GPU, held against its own log of what really happened.

#[path = "../bpf/mod.rs"]
mod bpf;
mod counts;
mod governor;
mod harness;
mod memory;
mod nccl;
mod prologues;
mod target;

use std::process::ExitCode;

use zernel_testkit::{root, trial};

fn main() -> ExitCode {
    let roles = [counts::ROLES, governor::ROLES, memory::ROLES, nccl::ROLES].concat();
    if let Some(code) = target::act(&roles) {
        return code;
    }
    let needs = [root(), bpf::need()];
    let trials: &[(&str, fn())] = &[
        ("every_call_is_counted_on_every_rung", counts::every_rung),
        ("a_million_calls_of_four_processes_are_counted", counts::a_million_calls),
        ("nothing_is_lost_at_full_speed", counts::full_speed),
        ("a_busy_function_is_sampled_until_it_calms", governor::busy),
        ("an_estimate_is_as_good_as_it_says", governor::estimate),
        ("a_slow_program_is_counted_exactly", governor::slow),
        ("functions_that_begin_otherwise_are_counted", prologues::displaced),
        ("what_would_be_stepped_often_is_refused", prologues::refused),
        ("ranks_and_their_collectives_are_seen", nccl::ranks),
        ("memory_is_accounted_to_whoever_asked", memory::accounts),
        ("memory_belongs_to_the_current_device", memory::devices),
    ];
    zernel_testkit::main(trials.iter().map(|(name, test)| trial(name, &needs, test)))
}
