//! The Rust mirrors of the shared structs against the BTF of the compiled object.

use std::mem::offset_of;

use libbpf_rs::HasSize;
use libbpf_rs::btf::types::{MemberAttr, Struct};
use zernel_ebpf::twin::{ClassifyBatch, DetectBatch, PhaseTwin, TrackBatch};
use zernel_phase::shared::{
    RawPhaseConfig, RawPhaseSample, RawTaskState, RawTracker, RawTrackerConfig,
};

/// Compares every field of a mirror with the struct of the same purpose in the BPF object.
macro_rules! assert_layout {
    ($btf:expr, $name:literal, $mirror:ty, [$($field:ident),+ $(,)?]) => {{
        let ours = [$((stringify!($field).to_owned(), offset_of!($mirror, $field))),+];
        let kernel: Struct<'_> = $btf.type_by_name($name).expect($name);
        assert_eq!(kernel.size(), size_of::<$mirror>(), "size of {}", $name);
        assert_eq!(members(&kernel), ours, "fields of {}", $name);
    }};
}

fn members(kernel: &Struct<'_>) -> Vec<(String, usize)> {
    kernel
        .iter()
        .map(|member| {
            let MemberAttr::Normal { offset: bits } = member.attr else {
                panic!("{member:?} is a bit field");
            };
            let name = member.name.expect("every field has a name");
            (name.to_string_lossy().into_owned(), bits as usize / 8)
        })
        .collect()
}

/// Compares every struct that kernel and userspace share.
pub(crate) fn check(twin: &PhaseTwin) {
    let btf = twin
        .object()
        .btf()
        .unwrap()
        .expect("the object carries BTF");
    assert_layout!(
        btf,
        "zernel_task_state",
        RawTaskState,
        [
            phase_word,
            last_gpu_sync_ns,
            cpu_burst_ns,
            phase_ns,
            pid,
            tgid,
            gpu_id,
            futex_waits,
            io_wait_q16,
            streak,
            candidate,
            gpu_utilization,
            flags,
            reserved,
            tracker,
        ]
    );
    assert_layout!(
        btf,
        "zernel_phase_config",
        RawPhaseConfig,
        [
            optimizer_burst_max_ns,
            io_wait_threshold_f32,
            io_wait_half_threshold_f32,
            phase_stability_count,
            gpu_idle_threshold,
            gpu_active_threshold,
            nccl_detection_enabled,
            reserved,
        ]
    );
    assert_layout!(
        btf,
        "zernel_phase_sample",
        RawPhaseSample,
        [
            last_gpu_sync_ns,
            cpu_burst_ns,
            io_wait_f32,
            futex_waits,
            gpu_utilization,
            is_ml,
            nccl_active,
            reserved,
        ]
    );
    assert_layout!(
        btf,
        "classify_batch",
        ClassifyBatch,
        [config, samples, phases]
    );
    assert_layout!(btf, "detect_batch", DetectBatch, [config, now_ns, tasks]);
    assert_layout!(
        btf,
        "track_batch",
        TrackBatch,
        [config, at_ns, events, tasks]
    );
    assert_layout!(
        btf,
        "zernel_tracker",
        RawTracker,
        [
            now_ns,
            deadline_ns,
            activity_until_ns,
            sync_since_ns,
            collective_since_ns,
            call_shown_ns,
            wait_since_ns,
            wait_activity_until_ns,
            undecided_since_ns,
            last_marker_ns,
            lost_leaves,
            lost_enters,
            late,
            expired,
            flags,
            activity,
            wait_activity,
            reserved,
        ]
    );
    assert_layout!(
        btf,
        "zernel_tracker_config",
        RawTrackerConfig,
        [
            sync_max_ns,
            collective_max_ns,
            blocked_max_ns,
            loading_max_ns,
            launching_max_ns,
            optimizer_max_ns,
            optimizer_burst_max_ns,
            optimizer_launch_max_ns,
            short_wait_max_ns,
        ]
    );
}
