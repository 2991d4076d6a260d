//! Compares the probes with the truth log of the software GPU.

mod bpffs;
mod churn;
mod classes;
mod counts;
mod dead_files;
mod files;
mod filled_tables;
mod governor;
mod hand_overs;
mod harm;
mod harness;
mod many_files;
mod memory;
mod nccl;
mod processes;
mod prologues;
mod refusing_process;
mod sampled_phases;
mod series;
mod shared;
mod shares;
mod tenants;
mod torch;

use std::process::ExitCode;

use zernel_ebpf::capability::Capability;
use zernel_testkit::needs::bpf;
use zernel_testkit::{NO_KUBELET_NEED, Need, root, target, trial};

fn main() -> ExitCode {
    let roles = [
        churn::CHURN_ROLES,
        classes::CLASS_ROLES,
        counts::CALL_COUNT_TARGETS,
        dead_files::DEAD_FILE_ROLES,
        files::FILE_ROLES,
        filled_tables::TABLE_FILLING_ROLES,
        governor::GOVERNOR_ROLES,
        hand_overs::HAND_OVER_ROLES,
        many_files::MANY_FILES_ROLES,
        memory::MEMORY_ROLES,
        nccl::NCCL_ROLES,
        processes::PROCESS_ROLES,
        refusing_process::REFUSING_ROLES,
        series::SERIES_ROLES,
        sampled_phases::SAMPLED_PHASE_ROLES,
        shared::SHARED_STATE_ROLES,
        shares::SHARE_ROLES,
        tenants::TENANT_ROLES,
        torch::TORCH_ROLES,
    ]
    .concat();
    if let Some(code) = target::run_role(&roles) {
        return code;
    }
    let needs = [root(), bpf(|| Capability::BtfTracepoint.try_out())];
    let trials: &[(&str, fn())] = &[
        (
            "every_call_is_counted_on_every_rung",
            counts::every_call_is_counted_on_every_rung,
        ),
        (
            "a_million_calls_of_four_processes_are_counted",
            counts::a_million_calls_of_four_processes_are_counted,
        ),
        (
            "nothing_is_lost_at_full_speed",
            counts::nothing_is_lost_at_full_speed,
        ),
        (
            "a_busy_function_is_sampled_until_it_calms",
            governor::a_busy_function_is_sampled_until_it_calms,
        ),
        (
            "a_hot_function_raises_an_alarm",
            governor::a_hot_function_raises_an_alarm,
        ),
        (
            "a_process_over_the_ceiling_is_rested",
            governor::a_process_over_the_ceiling_is_rested,
        ),
        (
            "a_process_above_the_ceiling_takes_no_probes_from_others",
            governor::a_process_above_the_ceiling_takes_no_probes_from_others,
        ),
        (
            "an_open_call_is_not_lost_when_its_probe_is_detached",
            governor::an_open_call_is_not_lost_when_its_probe_is_detached,
        ),
        (
            "an_estimate_is_within_its_interval",
            governor::an_estimate_is_within_its_interval,
        ),
        (
            "launches_are_estimated_from_steps",
            governor::launches_are_estimated_from_steps,
        ),
        (
            "launches_are_estimated_from_few_windows",
            governor::launches_are_estimated_from_few_windows,
        ),
        (
            "a_process_that_starts_during_sampling_is_estimated",
            governor::a_process_that_starts_during_sampling_is_estimated,
        ),
        (
            "a_slow_program_is_counted_exactly",
            governor::a_slow_program_is_counted_exactly,
        ),
        (
            "phases_are_right_while_launches_are_sampled",
            governor::phases_are_right_while_launches_are_sampled,
        ),
        (
            "functions_with_other_prologues_are_counted",
            prologues::functions_with_other_prologues_are_counted,
        ),
        (
            "frequent_single_stepping_is_refused",
            prologues::frequent_single_stepping_is_refused,
        ),
        (
            "ranks_and_their_collectives_are_seen",
            nccl::ranks_and_their_collectives_are_seen,
        ),
        (
            "many_communicators_are_all_seen",
            nccl::many_communicators_are_all_seen,
        ),
        (
            "communicators_that_are_stored_late_are_seen",
            nccl::communicators_that_are_stored_late_are_seen,
        ),
        (
            "a_broadcast_by_either_name_is_one",
            nccl::a_broadcast_by_either_name_is_one,
        ),
        (
            "lost_collectives_are_counted",
            nccl::lost_collectives_are_counted,
        ),
        (
            "collectives_are_not_timed_across_sampling_gaps",
            nccl::collectives_are_not_timed_across_sampling_gaps,
        ),
        (
            "a_wait_ends_only_the_collectives_it_covers",
            nccl::a_wait_ends_only_the_collectives_it_covers,
        ),
        (
            "collectives_stay_counted_when_ranks_are_forgotten",
            nccl::collectives_stay_counted_when_ranks_are_forgotten,
        ),
        (
            "memory_is_accounted_to_its_caller",
            memory::memory_is_accounted_to_its_caller,
        ),
        (
            "memory_belongs_to_the_current_device",
            memory::memory_belongs_to_the_current_device,
        ),
        (
            "memory_belongs_to_the_device_that_is_current_again",
            memory::memory_belongs_to_the_device_that_is_current_again,
        ),
        (
            "memory_that_is_mapped_lives_without_its_handle",
            memory::memory_that_is_mapped_lives_without_its_handle,
        ),
        (
            "memory_is_freed_with_its_context",
            memory::memory_is_freed_with_its_context,
        ),
        (
            "sampled_pool_memory_is_left_out",
            memory::sampled_pool_memory_is_left_out,
        ),
        (
            "memory_belongs_to_its_device_while_others_are_sampled",
            memory::memory_belongs_to_its_device_while_others_are_sampled,
        ),
        (
            "exec_starts_a_new_process",
            processes::exec_starts_a_new_process,
        ),
        (
            "a_child_without_cuda_is_no_trainer",
            processes::a_child_without_cuda_is_no_trainer,
        ),
        (
            "a_killed_process_is_exported_for_a_while",
            processes::a_killed_process_is_exported_for_a_while,
        ),
        (
            "a_pause_of_observing_is_no_step",
            processes::a_pause_of_observing_is_no_step,
        ),
        (
            "a_process_found_late_is_not_complete",
            processes::a_process_found_late_is_not_complete,
        ),
        (
            "thousands_of_short_processes_are_counted",
            processes::thousands_of_short_processes_are_counted,
        ),
        (
            "a_slow_exit_is_not_booked_to_another_process",
            churn::a_slow_exit_is_not_booked_to_another_process,
        ),
        (
            "many_exits_are_cleaned_up_in_one_pass",
            churn::many_exits_are_cleaned_up_in_one_pass,
        ),
        (
            "destroying_a_context_is_quick_among_many_allocations",
            churn::destroying_a_context_is_quick_among_many_allocations,
        ),
        (
            "memory_is_freed_with_a_context_from_before_observing",
            churn::memory_is_freed_with_a_context_from_before_observing,
        ),
        (
            "a_short_process_has_a_name_and_an_owner",
            churn::a_short_process_has_a_name_and_an_owner,
        ),
        (
            "an_exit_during_attaching_is_no_error",
            processes::an_exit_during_attaching_is_no_error,
        ),
        (
            "a_whole_node_has_few_series",
            series::a_whole_node_has_few_series,
        ),
        (
            "a_replaced_library_is_attached_to_anew",
            files::a_replaced_library_is_attached_to_anew,
        ),
        (
            "a_written_library_is_detached",
            files::a_written_library_is_detached,
        ),
        (
            "a_process_with_a_detached_library_is_not_complete",
            files::a_process_with_a_detached_library_is_not_complete,
        ),
        (
            "a_library_is_detached_as_soon_as_it_is_written",
            files::a_library_is_detached_as_soon_as_it_is_written,
        ),
        (
            "garbage_is_refused_and_disturbs_nothing",
            files::garbage_is_refused_and_disturbs_nothing,
        ),
        (
            "a_remapped_library_is_taken_for_what_it_is",
            files::a_remapped_library_is_taken_for_what_it_is,
        ),
        (
            "a_mount_namespace_hides_nothing",
            files::a_mount_namespace_hides_nothing,
        ),
        (
            "one_tenant_has_a_share_of_the_probed_files",
            many_files::one_tenant_has_a_share_of_the_probed_files,
        ),
        (
            "one_tenant_has_a_share_of_the_processes",
            shares::one_tenant_has_a_share_of_the_processes,
        ),
        (
            "one_tenant_has_a_share_of_the_allocations",
            shares::one_tenant_has_a_share_of_the_allocations,
        ),
        (
            "one_tenant_has_a_share_of_the_histograms",
            filled_tables::one_tenant_has_a_share_of_the_histograms,
        ),
        (
            "one_tenant_has_a_share_of_the_communicators",
            filled_tables::one_tenant_has_a_share_of_the_communicators,
        ),
        (
            "one_tenant_has_a_share_of_the_memory_accounts",
            filled_tables::one_tenant_has_a_share_of_the_memory_accounts,
        ),
        (
            "one_tenant_has_a_share_of_the_step_marks",
            filled_tables::one_tenant_has_a_share_of_the_step_marks,
        ),
        (
            "a_full_table_refuses_the_largest_tenant_first",
            filled_tables::a_full_table_refuses_the_largest_tenant_first,
        ),
        (
            "many_uids_in_a_namespace_are_one_tenant",
            tenants::many_uids_in_a_namespace_are_one_tenant,
        ),
        (
            "indices_of_tenants_are_reused",
            tenants::indices_of_tenants_are_reused,
        ),
        (
            "states_are_pinned_for_a_scheduler",
            shared::states_are_pinned_for_a_scheduler,
        ),
        (
            "the_first_event_of_a_process_counts",
            shared::the_first_event_of_a_process_counts,
        ),
        (
            "pins_of_another_version_are_replaced",
            shared::pins_of_another_version_are_replaced,
        ),
        (
            "forking_loaders_is_data_loading",
            torch::forking_loaders_is_data_loading,
        ),
        (
            "a_wait_is_for_peers_as_long_as_collectives_last",
            hand_overs::a_wait_is_for_peers_as_long_as_collectives_last,
        ),
        (
            "a_thread_that_ends_short_waits_is_no_loader",
            hand_overs::a_thread_that_ends_short_waits_is_no_loader,
        ),
        (
            "a_thread_that_calls_layers_may_load",
            hand_overs::a_thread_that_calls_layers_may_load,
        ),
        (
            "a_wait_for_a_thread_that_loads_is_one_for_data",
            hand_overs::a_wait_for_a_thread_that_loads_is_one_for_data,
        ),
        (
            "a_compiling_thread_has_no_phase",
            torch::a_compiling_thread_has_no_phase,
        ),
        (
            "waiting_for_a_compilation_has_no_phase",
            torch::waiting_for_a_compilation_has_no_phase,
        ),
        (
            "a_server_waits_for_requests_of_its_children",
            torch::a_server_waits_for_requests_of_its_children,
        ),
        (
            "readers_see_a_killed_observer_and_the_next",
            shared::readers_see_a_killed_observer_and_the_next,
        ),
        ("pins_outlive_a_restart", shared::pins_outlive_a_restart),
        ("no_bpffs_is_no_error", shared::no_bpffs_is_no_error),
        ("classes_are_published", classes::classes_are_published),
        (
            "the_gpu_of_a_thread_is_published",
            classes::the_gpu_of_a_thread_is_published,
        ),
        (
            "classes_are_written_as_hints",
            classes::classes_are_written_as_hints,
        ),
        (
            "unusable_hints_are_refused",
            classes::unusable_hints_are_refused,
        ),
        ("decisions_are_counted", classes::decisions_are_counted),
        (
            "reading_the_loss_is_a_gpu_wait",
            classes::reading_the_loss_is_a_gpu_wait,
        ),
        (
            "a_process_that_cannot_be_probed_is_sampled",
            sampled_phases::a_process_that_cannot_be_probed_is_sampled,
        ),
        (
            "a_probed_call_ends_samples",
            sampled_phases::a_probed_call_ends_samples,
        ),
        (
            "samples_are_taken_on_request_only",
            sampled_phases::samples_are_taken_on_request_only,
        ),
    ];
    let more: [(&str, Need, fn()); 12] = [
        (
            "one_tenant_is_a_pod",
            NO_KUBELET_NEED,
            tenants::one_tenant_is_a_pod,
        ),
        (
            "a_dead_environment_holds_up_nobody",
            dead_files::FUSE_NEED,
            dead_files::a_dead_environment_holds_up_nobody,
        ),
        (
            "a_dead_file_system_holds_up_nobody",
            dead_files::FUSE_NEED,
            dead_files::a_dead_file_system_holds_up_nobody,
        ),
        (
            "a_library_on_fuse_gets_no_probes",
            dead_files::FUSE_NEED,
            dead_files::a_library_on_fuse_gets_no_probes,
        ),
        (
            "a_library_on_an_overlay_of_fuse_gets_no_probes",
            dead_files::FUSE_NEED,
            dead_files::a_library_on_an_overlay_of_fuse_gets_no_probes,
        ),
        (
            "a_library_that_one_process_had_refused_gets_probes_later",
            refusing_process::PAGE_FAULTS_ON_TMPFS_NEED,
            refusing_process::a_library_that_one_process_had_refused_gets_probes_later,
        ),
        (
            "a_library_whose_windows_are_refused_keeps_its_other_probes",
            refusing_process::PAGE_FAULTS_ON_TMPFS_NEED,
            refusing_process::a_library_whose_windows_are_refused_keeps_its_other_probes,
        ),
        (
            "a_refused_window_does_not_count_as_one_without_calls",
            refusing_process::PAGE_FAULTS_ON_TMPFS_NEED,
            refusing_process::a_refused_window_does_not_count_as_one_without_calls,
        ),
        (
            "a_reused_pid_is_another_process",
            processes::next_pid_need(),
            processes::a_reused_pid,
        ),
        (
            "a_stripped_library_is_counted",
            files::strip_need(),
            files::a_stripped_library_is_counted,
        ),
        (
            "a_library_in_a_layer_is_detached_as_soon_as_it_is_written",
            files::overlayfs_need(),
            files::written_to_in_a_layer,
        ),
        (
            "programs_are_not_harmed",
            harm::compiler_need(),
            harm::programs_are_not_harmed,
        ),
    ];
    let more = more.map(|(name, need, test)| trial(name, &[needs[0], needs[1], need], test));
    let trials = trials.iter().map(|(name, test)| trial(name, &needs, test));
    zernel_testkit::main(trials.chain(more))
}
