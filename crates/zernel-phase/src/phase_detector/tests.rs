use super::*;
use WorkloadPhase::*;
use proptest::prelude::*;

/// An ML task that the default rule classifies as `GpuCompute`.
fn computing(pid: u32) -> ZernelTaskState {
    ZernelTaskState {
        is_ml_process: true,
        gpu_utilization: 95,
        ..ZernelTaskState::new(pid)
    }
}

fn undebounced() -> PhaseDetectorConfig {
    PhaseDetectorConfig {
        phase_stability_count: 0,
        nccl_detection_enabled: true,
        ..Default::default()
    }
}

#[test]
fn each_row_of_the_rule_gives_its_phase() {
    type Case = (fn(&mut ZernelTaskState), WorkloadPhase);
    #[rustfmt::skip] // a table
    let cases: [Case; 15] = [
        (|s| (s.is_ml_process, s.gpu_utilization) = (false, 95), Unknown),
        (|s| (s.nccl_active, s.futex_wait_count, s.gpu_utilization) = (true, 1, 95), NcclCollective),
        (|s| (s.nccl_active, s.gpu_utilization) = (true, 95), GpuCompute),
        (|s| (s.io_wait_fraction, s.gpu_utilization) = (0.31, 9), DataLoading),
        (|s| (s.io_wait_fraction, s.gpu_utilization) = (0.3, 9), Unknown),
        (|s| (s.io_wait_fraction, s.gpu_utilization) = (0.31, 10), Unknown),
        (|s| s.gpu_utilization = 81, GpuCompute),
        (|s| s.gpu_utilization = 80, Unknown),
        (|s| (s.cpu_burst_duration_ns, s.gpu_utilization) = (1, 95), Unknown),
        (|s| (s.cpu_burst_duration_ns, s.last_gpu_sync_ns) = (4_999_999, 1), OptimizerStep),
        (|s| (s.cpu_burst_duration_ns, s.last_gpu_sync_ns) = (5_000_000, 1), Unknown),
        (|s| s.cpu_burst_duration_ns = 1, Unknown),
        (|s| (s.io_wait_fraction, s.gpu_utilization) = (0.16, 11), DataLoading),
        (|s| (s.io_wait_fraction, s.gpu_utilization) = (0.16, 80), Unknown),
        (|s| (s.io_wait_fraction, s.gpu_utilization) = (0.15, 11), Unknown),
    ];
    for (set, expected) in cases {
        let mut state = ZernelTaskState {
            is_ml_process: true,
            ..ZernelTaskState::new(1)
        };
        set(&mut state);
        assert_eq!(classify(&undebounced(), &state), expected, "{state:?}");
    }
}

#[test]
fn collectives_are_detected_only_on_request() {
    let state = ZernelTaskState {
        nccl_active: true,
        futex_wait_count: 9,
        ..computing(1)
    };
    assert_eq!(
        classify(&PhaseDetectorConfig::default(), &state),
        GpuCompute
    );
}

#[test]
fn a_phase_is_reported_after_three_equal_results() {
    let mut detector = PhaseDetector::new(PhaseDetectorConfig::default());
    let state = computing(1);
    assert_eq!(detector.detect(&state), Unknown);
    assert_eq!(detector.detect(&state), Unknown);
    assert_eq!(detector.transition_count, 0);
    assert_eq!(detector.detect(&state), GpuCompute);
    assert_eq!(detector.transition_count, 1);
}

#[test]
fn a_different_result_restarts_the_streak_of_its_pid_only() {
    let mut detector = PhaseDetector::new(PhaseDetectorConfig::default());
    let (state, other) = (computing(1), computing(2));
    let idle = ZernelTaskState {
        gpu_utilization: 50,
        ..computing(1)
    };
    for sample in [&state, &state, &other, &idle, &state, &state, &other] {
        assert_eq!(detector.detect(sample), Unknown);
    }
    assert_eq!(detector.detect(&state), GpuCompute);
    assert_eq!(detector.detect(&other), GpuCompute);
}

#[test]
fn removing_a_task_resets_its_streak() {
    let mut detector = PhaseDetector::new(PhaseDetectorConfig::default());
    let state = computing(1);
    detector.detect(&state);
    detector.detect(&state);
    detector.remove_task(1);
    assert_eq!(detector.task_count(), 0);
    assert_eq!(detector.detect(&state), Unknown);
}

#[test]
fn a_stability_count_of_zero_or_one_turns_debouncing_off() {
    for phase_stability_count in [0, 1] {
        let mut detector = PhaseDetector::new(PhaseDetectorConfig {
            phase_stability_count,
            ..Default::default()
        });
        assert_eq!(detector.detect(&computing(1)), GpuCompute);
        assert_eq!(detector.task_count(), 0);
    }
}

#[test]
fn a_process_that_is_no_longer_ml_is_unknown_at_once() {
    let mut detector = PhaseDetector::new(PhaseDetectorConfig::default());
    let state = ZernelTaskState {
        is_ml_process: false,
        current_phase: GpuCompute,
        ..computing(1)
    };
    assert_eq!(detector.detect(&state), Unknown);
    assert_eq!((detector.transition_count, detector.task_count()), (1, 0));
}

#[test]
fn memory_is_bounded_for_any_number_of_pids() {
    let mut detector = PhaseDetector::with_max_tasks(PhaseDetectorConfig::default(), 100);
    for pid in 0..10_000 {
        detector.detect(&computing(pid));
        assert!(detector.task_count() <= 200);
    }
    assert_eq!(
        detector.eviction_count() + detector.task_count() as u64,
        10_000
    );
    for pid in 0..10_000 {
        detector.remove_task(pid);
    }
    assert_eq!(detector.task_count(), 0);
}

#[test]
fn validation_errors_name_the_setting() {
    let default = PhaseDetectorConfig::default;
    assert_eq!(default().validate(), Ok(()));
    for (config, message) in [
        (
            PhaseDetectorConfig {
                io_wait_threshold: f32::NAN,
                ..default()
            },
            "io_wait_threshold is NaN, but must be a number from 0 to 1",
        ),
        (
            PhaseDetectorConfig {
                io_wait_threshold: 1.5,
                ..default()
            },
            "io_wait_threshold is 1.5, but must be a number from 0 to 1",
        ),
        (
            PhaseDetectorConfig {
                io_wait_threshold: -0.1,
                ..default()
            },
            "io_wait_threshold is -0.1, but must be a number from 0 to 1",
        ),
        (
            PhaseDetectorConfig {
                gpu_active_threshold: 101,
                ..default()
            },
            "gpu_active_threshold is 101, but must be from 0 to 100",
        ),
        (
            PhaseDetectorConfig {
                gpu_idle_threshold: 200,
                ..default()
            },
            "gpu_idle_threshold is 200, but must be from 0 to 100",
        ),
        (
            PhaseDetectorConfig {
                gpu_idle_threshold: 80,
                ..default()
            },
            "gpu_idle_threshold is 80, but must be below gpu_active_threshold, which is 80",
        ),
    ] {
        assert_eq!(config.validate().unwrap_err().to_string(), message);
    }
}

#[test]
fn missing_keys_get_defaults_and_unknown_keys_are_refused() {
    let config: PhaseDetectorConfig =
        serde_json::from_str(r#"{"nccl_detection_enabled": true}"#).unwrap();
    assert_eq!(config.gpu_active_threshold, 80);
    assert!(config.nccl_detection_enabled);
    let error = serde_json::from_str::<PhaseDetectorConfig>(r#"{"gpu_ative": 1}"#).unwrap_err();
    assert!(error.to_string().contains("gpu_ative"), "{error}");
}

fn any_state() -> impl Strategy<Value = ZernelTaskState> {
    (
        (0_u32..4, any::<bool>(), 0_u8..5, any::<u8>(), any::<u64>()),
        (0_u64..10_000_000, any::<f32>(), any::<bool>(), 0_u32..3),
    )
        .prop_map(
            |((pid, ml, phase, gpu, sync), (burst, io, nccl, futex))| ZernelTaskState {
                is_ml_process: ml,
                current_phase: WorkloadPhase::from_raw(phase),
                gpu_utilization: gpu,
                last_gpu_sync_ns: sync,
                cpu_burst_duration_ns: burst,
                io_wait_fraction: io,
                nccl_active: nccl,
                futex_wait_count: futex,
                ..ZernelTaskState::new(pid)
            },
        )
}

proptest! {
    /// Compares the detector with its definition, applied to the whole history.
    #[test]
    fn a_result_is_reported_when_the_last_n_raw_results_agree(
        stability in 0_u32..5,
        states in prop::collection::vec(any_state(), 0..60),
    ) {
        let config = PhaseDetectorConfig {
            phase_stability_count: stability,
            nccl_detection_enabled: true,
            ..Default::default()
        };
        let mut detector = PhaseDetector::new(config.clone());
        let mut history: Vec<(u32, bool, WorkloadPhase)> = Vec::new();
        let mut transitions = 0;
        for state in &states {
            let raw = classify(&config, state);
            history.push((state.pid, state.is_ml_process, raw));
            let row = history.iter().rev().filter(|h| h.0 == state.pid)
                .take_while(|h| h.1 == state.is_ml_process && h.2 == raw).count();
            let expected = if !state.is_ml_process {
                Unknown
            } else if row >= stability as usize {
                raw
            } else {
                state.current_phase
            };
            transitions += u64::from(expected != state.current_phase);
            prop_assert_eq!(detector.detect(state), expected);
        }
        prop_assert_eq!(detector.transition_count, transitions);
    }
}
