//! Compares the probes with the truth log of the software GPU.

mod bpffs;
mod churn;
mod classes;
mod counts;
mod dead_files;
mod files;
mod filled_tables;
mod governor;
mod harm;
mod harness;
mod many_files;
mod memory;
mod nccl;
mod processes;
mod prologues;
mod refusing_process;
mod series;
mod shared;
mod shares;
mod tenants;
mod torch;

use std::process::ExitCode;

use zernel_ebpf::capability::Capability;
use zernel_testkit::needs::bpf;
use zernel_testkit::{NO_KUBELET, Need, root, target, trial};

fn main() -> ExitCode {
    let roles = [
        churn::ROLES,
        classes::ROLES,
        counts::ROLES,
        dead_files::ROLES,
        files::ROLES,
        filled_tables::ROLES,
        governor::ROLES,
        many_files::ROLES,
        memory::ROLES,
        nccl::ROLES,
        processes::ROLES,
        refusing_process::ROLES,
        series::ROLES,
        shared::ROLES,
        shares::ROLES,
        tenants::ROLES,
        torch::ROLES,
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
            "a_process_over_the_ceiling_is_rested",
            governor::above_the_ceiling,
        ),
        (
            "a_process_above_the_ceiling_takes_no_probes_from_others",
            governor::above_the_ceiling_beside_others,
        ),
        (
            "an_open_call_is_not_lost_when_its_probe_is_detached",
            governor::detached_under_way,
        ),
        ("an_estimate_is_within_its_interval", governor::estimate),
        (
            "launches_are_estimated_from_steps",
            governor::estimate_by_steps,
        ),
        (
            "launches_are_estimated_from_few_windows",
            governor::estimate_by_few_windows,
        ),
        (
            "a_process_that_starts_during_sampling_is_estimated",
            governor::estimate_of_newcomer,
        ),
        ("a_slow_program_is_counted_exactly", governor::slow),
        (
            "phases_are_right_while_launches_are_sampled",
            governor::phases_while_sampled,
        ),
        (
            "functions_with_other_prologues_are_counted",
            prologues::displaced,
        ),
        ("frequent_single_stepping_is_refused", prologues::refused),
        ("ranks_and_their_collectives_are_seen", nccl::ranks),
        ("many_communicators_are_all_seen", nccl::many),
        (
            "communicators_that_are_stored_late_are_seen",
            nccl::parts_that_are_stored_late,
        ),
        ("a_broadcast_by_either_name_is_one", nccl::once),
        ("lost_collectives_are_counted", nccl::too_many),
        (
            "collectives_are_not_timed_across_sampling_gaps",
            nccl::sampled_events,
        ),
        (
            "a_wait_ends_only_the_collectives_it_covers",
            nccl::side_by_side,
        ),
        (
            "collectives_stay_counted_when_ranks_are_forgotten",
            nccl::forgotten,
        ),
        ("memory_is_accounted_to_its_caller", memory::accounts),
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
        ("sampled_pool_memory_is_left_out", memory::of_pools),
        (
            "memory_belongs_to_its_device_while_others_are_sampled",
            memory::of_restless_ones,
        ),
        ("exec_starts_a_new_process", processes::execution),
        (
            "a_child_without_cuda_is_no_trainer",
            processes::child_without_cuda,
        ),
        (
            "a_killed_process_is_exported_for_a_while",
            processes::killed,
        ),
        ("a_pause_of_observing_is_no_step", processes::paused),
        ("a_process_found_late_is_not_complete", processes::late),
        (
            "thousands_of_short_processes_are_counted",
            processes::thousands_of_short_ones,
        ),
        (
            "a_slow_exit_is_not_booked_to_another_process",
            churn::late_writer,
        ),
        ("many_exits_are_cleaned_up_in_one_pass", churn::cleanup),
        (
            "destroying_a_context_is_quick_among_many_allocations",
            churn::destroyed_among_many,
        ),
        (
            "memory_is_freed_with_a_context_from_before_observing",
            churn::early_contexts,
        ),
        (
            "a_short_process_has_a_name_and_an_owner",
            churn::short_lived,
        ),
        (
            "an_exit_during_attaching_is_no_error",
            processes::exits_during_attach,
        ),
        ("a_whole_node_has_few_series", series::whole_node),
        ("a_replaced_library_is_attached_to_anew", files::replaced),
        ("a_written_library_is_detached", files::written_to),
        (
            "a_process_with_a_detached_library_is_not_complete",
            files::written_to_in_use,
        ),
        (
            "a_library_is_detached_as_soon_as_it_is_written",
            files::written_to_at_once,
        ),
        ("garbage_is_refused_and_disturbs_nothing", files::garbage),
        (
            "a_remapped_library_is_taken_for_what_it_is",
            files::remapped,
        ),
        ("a_mount_namespace_hides_nothing", files::hidden),
        (
            "one_tenant_has_a_share_of_the_probed_files",
            many_files::one_tenant_has_a_share,
        ),
        ("one_tenant_has_a_share_of_the_processes", shares::processes),
        (
            "one_tenant_has_a_share_of_the_allocations",
            shares::allocations,
        ),
        (
            "one_tenant_has_a_share_of_the_histograms",
            filled_tables::histograms,
        ),
        (
            "one_tenant_has_a_share_of_the_communicators",
            filled_tables::communicators,
        ),
        (
            "one_tenant_has_a_share_of_the_memory_accounts",
            filled_tables::memory_accounts,
        ),
        (
            "one_tenant_has_a_share_of_the_step_marks",
            filled_tables::step_marks,
        ),
        (
            "a_full_table_refuses_the_largest_tenant_first",
            filled_tables::three_tenants,
        ),
        (
            "many_uids_in_a_namespace_are_one_tenant",
            tenants::many_uids_in_a_namespace,
        ),
        ("indices_of_tenants_are_reused", tenants::indices_are_reused),
        ("states_are_pinned_for_a_scheduler", shared::pinned),
        ("the_first_event_of_a_process_counts", shared::first_event),
        (
            "pins_of_another_version_are_replaced",
            shared::pinned_by_another_version,
        ),
        ("readers_see_a_killed_observer_and_the_next", shared::killed),
        ("pins_outlive_a_restart", shared::restarted),
        ("no_bpffs_is_no_error", shared::without_bpffs),
        ("classes_are_published", classes::published),
        ("a_compiling_thread_has_no_phase", torch::compilation),
        ("forking_loaders_is_data_loading", torch::forked_loaders),
        ("classes_are_written_as_hints", classes::hints),
        ("unusable_hints_are_refused", classes::unusable_hints),
        ("decisions_are_counted", classes::decisions),
    ];
    let more: [(&str, Need, fn()); 10] = [
        ("one_tenant_is_a_pod", NO_KUBELET, tenants::pods),
        (
            "a_dead_environment_holds_up_nobody",
            dead_files::FUSE,
            dead_files::dead_environment,
        ),
        (
            "a_dead_file_system_holds_up_nobody",
            dead_files::FUSE,
            dead_files::observing_goes_on,
        ),
        (
            "a_library_on_fuse_gets_no_probes",
            dead_files::FUSE,
            dead_files::on_fuse,
        ),
        (
            "a_library_on_an_overlay_of_fuse_gets_no_probes",
            dead_files::FUSE,
            dead_files::on_overlay,
        ),
        (
            "a_library_that_one_process_had_refused_gets_probes_later",
            refusing_process::PAGE_FAULTS_ON_TMPFS,
            refusing_process::held_page_faults,
        ),
        (
            "a_reused_pid_is_another_process",
            processes::next_pid(),
            processes::a_reused_pid,
        ),
        (
            "a_stripped_library_is_counted",
            files::strip(),
            files::stripped,
        ),
        (
            "a_library_in_a_layer_is_detached_as_soon_as_it_is_written",
            files::overlayfs(),
            files::written_to_in_a_layer,
        ),
        ("programs_are_not_harmed", harm::compiler(), harm::unruly),
    ];
    let more = more.map(|(name, need, test)| trial(name, &[needs[0], needs[1], need], test));
    let trials = trials.iter().map(|(name, test)| trial(name, &needs, test));
    zernel_testkit::main(trials.chain(more))
}
