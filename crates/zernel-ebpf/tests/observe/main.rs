//! Probes on the software GPU, held against its own log of what really happened.

mod counts;
mod files;
mod governor;
mod harm;
mod harness;
mod memory;
mod nccl;
mod processes;
mod prologues;
mod series;
mod shared;

use std::process::ExitCode;

use zernel_ebpf::capability::Capability;
use zernel_testkit::needs::bpf;
use zernel_testkit::{Need, root, target, trial};

fn main() -> ExitCode {
    let roles = [
        counts::ROLES,
        files::ROLES,
        governor::ROLES,
        memory::ROLES,
        nccl::ROLES,
        processes::ROLES,
        series::ROLES,
    ]
    .concat();
    if let Some(code) = target::act(&roles) {
        return code;
    }
    let needs = [root(), bpf(|| Capability::BtfTracepoint.try_out())];
    let trials: &[(&str, fn())] = &[
        ("every_call_is_counted_on_every_rung", counts::every_rung),
        (
            "a_million_calls_of_four_processes_are_counted",
            counts::a_million_calls,
        ),
        ("nothing_is_lost_at_full_speed", counts::full_speed),
        ("a_busy_function_is_sampled_until_it_calms", governor::busy),
        ("a_hot_function_raises_an_alarm", governor::alarm),
        (
            "probes_that_cost_too_much_are_off_for_a_while",
            governor::above_the_ceiling,
        ),
        (
            "a_call_under_way_is_not_lost_when_its_function_is_taken_off",
            governor::detached_under_way,
        ),
        ("an_estimate_is_as_good_as_it_says", governor::estimate),
        (
            "steps_tell_how_often_a_sampled_function_was_called",
            governor::estimate_by_steps,
        ),
        (
            "launches_are_told_by_few_windows",
            governor::estimate_by_few_windows,
        ),
        (
            "who_begins_while_functions_are_sampled_is_estimated",
            governor::estimate_of_newcomer,
        ),
        ("a_slow_program_is_counted_exactly", governor::slow),
        (
            "phases_are_right_while_launches_are_sampled",
            governor::phases_while_sampled,
        ),
        (
            "functions_that_begin_otherwise_are_counted",
            prologues::displaced,
        ),
        ("what_would_be_stepped_often_is_refused", prologues::refused),
        ("ranks_and_their_collectives_are_seen", nccl::ranks),
        ("many_communicators_are_all_seen", nccl::many),
        (
            "communicators_that_are_stored_late_are_seen",
            nccl::parts_that_are_stored_late,
        ),
        ("a_broadcast_by_either_name_is_one", nccl::once),
        ("collectives_beyond_memory_are_lost_aloud", nccl::too_many),
        (
            "collectives_do_not_last_until_events_are_seen_again",
            nccl::sampled_events,
        ),
        (
            "a_wait_shows_what_it_covers_and_nothing_else",
            nccl::side_by_side,
        ),
        (
            "collectives_stay_counted_when_ranks_are_forgotten",
            nccl::forgotten,
        ),
        ("memory_is_accounted_to_whoever_asked", memory::accounts),
        ("memory_belongs_to_the_current_device", memory::devices),
        (
            "memory_belongs_to_the_device_that_is_current_again",
            memory::nested_devices,
        ),
        (
            "memory_that_is_mapped_lives_without_its_handle",
            memory::mapped,
        ),
        ("memory_is_freed_with_its_context", memory::with_contexts),
        (
            "memory_from_pools_is_left_out_when_it_is_sampled",
            memory::of_pools,
        ),
        (
            "memory_belongs_to_its_device_while_others_are_sampled",
            memory::of_restless_ones,
        ),
        ("an_executed_program_is_a_new_process", processes::execution),
        (
            "a_child_without_cuda_is_no_trainer",
            processes::child_without_cuda,
        ),
        ("a_killed_process_is_told_of_for_a_while", processes::killed),
        ("what_a_pause_hides_is_no_step", processes::paused),
        ("who_was_found_late_is_not_complete", processes::late),
        (
            "thousands_of_short_processes_are_counted",
            processes::thousands_of_short_ones,
        ),
        (
            "ending_while_being_attached_to_is_no_error",
            processes::gone_meanwhile,
        ),
        ("a_whole_node_is_told_in_few_series", series::whole_node),
        ("a_replaced_library_is_attached_to_anew", files::replaced),
        ("a_library_that_was_written_to_is_let_go", files::written_to),
        (
            "who_uses_a_library_that_is_let_go_is_not_complete",
            files::written_to_in_use,
        ),
        (
            "a_library_that_is_being_written_to_is_let_go_at_once",
            files::written_to_at_once,
        ),
        ("garbage_is_refused_and_disturbs_nothing", files::garbage),
        ("a_mount_namespace_hides_nothing", files::hidden),
        ("states_are_pinned_for_a_scheduler", shared::pinned),
        ("no_bpffs_is_no_error", shared::without_bpffs),
    ];
    let more: [(&str, Need, fn()); 4] = [
        (
            "a_pid_used_again_is_another_process",
            processes::next_pid(),
            processes::a_pid_used_again,
        ),
        (
            "a_stripped_library_is_counted",
            files::strip(),
            files::stripped,
        ),
        (
            "a_library_in_a_layer_that_is_written_to_is_let_go_at_once",
            files::overlayfs(),
            files::written_to_in_a_layer,
        ),
        ("programs_are_not_harmed", harm::compiler(), harm::unruly),
    ];
    let more = more.map(|(name, need, test)| trial(name, &[needs[0], needs[1], need], test));
    let trials = trials.iter().map(|(name, test)| trial(name, &needs, test));
    zernel_testkit::main(trials.chain(more))
}
