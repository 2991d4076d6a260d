//! The phase rule in the kernel against the phase rule in userspace: on the same states they must
//! say the same, bit for bit, and a change to either must be noticed here.

mod bpf;

use std::mem::offset_of;
use std::path::Path;
use std::process::ExitCode;
use std::{env, fs};

use fastrand::Rng;
use libbpf_cargo::SkeletonBuilder;
use libbpf_rs::HasSize;
use libbpf_rs::btf::types::{MemberAttr, Struct};
use zernel_ebpf::twin::{BATCH, ClassifyBatch, DetectBatch, PhaseTwin};
use zernel_phase::shared::{
    NO_GPU, RawPhaseConfig, RawPhaseSample, RawTaskState, TASK_IS_ML, TASK_NCCL_ACTIVE,
};
use zernel_phase::{PhaseDetector, PhaseDetectorConfig, WorkloadPhase, ZernelTaskState, classify};
use zernel_testkit::{root, trial};
use zerocopy::FromZeros;

/// 256 batches of 4096: a little over a million states.
const CLASSIFY_BATCHES: usize = 256;
/// Samples of each of 4096 tasks in a row.
const DETECT_ROUNDS: usize = 64;

fn main() -> ExitCode {
    let needs = [root(), bpf::need()];
    zernel_testkit::main([
        trial("the_mirror_has_the_layout_of_the_btf", &needs, layout),
        trial("a_million_states_classify_alike", &needs, || {
            let coverage = classify_alike(&twin(), CLASSIFY_BATCHES).unwrap();
            let total: usize = coverage.iter().sum();
            assert!(total >= 1_000_000);
            for (phase, hits) in WorkloadPhase::ALL.into_iter().zip(coverage) {
                assert!(hits > total / 100, "{phase} came up only {hits} times");
            }
        }),
        trial("tasks_sampled_in_a_row_move_alike", &needs, || {
            let transitions = detect_alike(&twin(), DETECT_ROUNDS).unwrap();
            assert!(transitions > BATCH as u64, "only {transitions} transitions");
        }),
        trial("every_change_to_the_c_rule_is_noticed", &needs, mutants),
    ])
}

fn twin() -> PhaseTwin {
    PhaseTwin::load().unwrap()
}

/// The same states every time, unless `ZERNEL_SEED` says otherwise.
fn rng() -> Rng {
    let seed = env::var("ZERNEL_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    Rng::with_seed(seed.unwrap_or(42))
}

/// Classifies random states on both sides; gives how often each phase came up.
fn classify_alike(twin: &PhaseTwin, batches: usize) -> Result<[usize; 5], String> {
    let mut rng = rng();
    let mut coverage = [0; 5];
    let mut batch = ClassifyBatch::new_box_zeroed().unwrap();
    for _ in 0..batches {
        let config = any_config(&mut rng);
        let states: Vec<_> = (0..BATCH).map(|_| any_state(&mut rng, &config)).collect();
        batch.config = RawPhaseConfig::from(&config);
        for (sample, state) in batch.samples.iter_mut().zip(&states) {
            *sample = RawPhaseSample::from(state);
        }
        twin.classify(&mut batch).map_err(|e| e.to_string())?;
        for (state, kernel) in states.iter().zip(batch.phases) {
            let ours = classify(&config, state);
            if ours as u8 != kernel {
                return Err(format!(
                    "{config:?}\n{state:?}\nkernel: {kernel}, ours: {ours}"
                ));
            }
            coverage[usize::from(kernel)] += 1;
        }
    }
    Ok(coverage)
}

/// Samples the same tasks round after round on both sides; gives the number of transitions.
fn detect_alike(twin: &PhaseTwin, rounds: usize) -> Result<u64, String> {
    let mut rng = rng();
    // The kernel's fractions have 16 bits; a threshold that has no more can be met exactly.
    let q16_threshold = rng.u32(1..65536);
    let config = PhaseDetectorConfig {
        io_wait_threshold: q16_threshold as f32 / 65536.0,
        nccl_detection_enabled: true,
        ..Default::default()
    };
    let mut detector = PhaseDetector::new(config.clone());
    let mut batch = DetectBatch::new_box_zeroed().unwrap();
    batch.config = RawPhaseConfig::from(&config);
    for (pid, task) in batch.tasks.iter_mut().enumerate() {
        task.pid = pid as u32;
        task.phase_ns = [rng.u64(..), 0, u64::MAX - rng.u64(0..1 << 20), 0, 1];
    }
    for round in 1..=rounds as u64 {
        let mut expected = Vec::with_capacity(BATCH);
        for (task, now_ns) in batch.tasks.iter_mut().zip(&mut batch.now_ns) {
            *now_ns = any_time(&mut rng, round);
            if rng.u8(0..4) == 0 {
                change_inputs(&mut rng, task, &config, q16_threshold);
            }
            expected.push((task.phase_word.sequence(), ZernelTaskState::from(&*task)));
        }
        twin.detect(&mut batch).map_err(|e| e.to_string())?;
        for ((task, now_ns), (sequence, mut state)) in
            batch.tasks.iter().zip(&batch.now_ns).zip(expected)
        {
            let reported = detector.detect(&state);
            let moved = reported != state.current_phase;
            if moved {
                state.transition_phase(reported, now_ns & !1023);
            }
            let kernel = ZernelTaskState::from(task);
            let sequence = (sequence + u16::from(moved)) % 4096;
            if kernel != state || task.phase_word.sequence() != sequence {
                return Err(format!(
                    "round {round}\nkernel: {kernel:?}\nours:   {state:?}"
                ));
            }
        }
    }
    Ok(detector.transition_count)
}

/// Mostly forward, now and then back, once in a while far ahead.
fn any_time(rng: &mut Rng, round: u64) -> u64 {
    match rng.u8(0..20) {
        0 => rng.u64(0..round * 1_000_000),
        1 => rng.u64(0..1 << 58),
        _ => round * 1_000_000 + rng.u64(0..1_000_000),
    }
}

fn change_inputs(
    rng: &mut Rng,
    task: &mut RawTaskState,
    config: &PhaseDetectorConfig,
    q16_threshold: u32,
) {
    let state = any_state(rng, config);
    task.last_gpu_sync_ns = state.last_gpu_sync_ns;
    task.cpu_burst_ns = state.cpu_burst_duration_ns;
    task.futex_waits = state.futex_wait_count;
    task.gpu_utilization = state.gpu_utilization;
    task.gpu_id = rng.choice([0, 1, NO_GPU]).unwrap();
    task.flags = if state.is_ml_process { TASK_IS_ML } else { 0 };
    task.flags |= if state.nccl_active {
        TASK_NCCL_ACTIVE
    } else {
        0
    };
    task.io_wait_q16 = match rng.u8(0..4) {
        0 => q16_threshold - 1 + rng.u32(0..3),
        1 => q16_threshold / 2 + rng.u32(0..2),
        2 => rng.choice([0, 1, 65535, 65536, 65537, u32::MAX]).unwrap(),
        _ => rng.u32(0..=65536),
    };
}

/// The default, at the ends of what is allowed, a sensible one, or nonsense.
fn any_config(rng: &mut Rng) -> PhaseDetectorConfig {
    let nonsense = PhaseDetectorConfig {
        io_wait_threshold: any_f32(rng, 0.3),
        optimizer_burst_max_ns: any_u64(rng, 5_000_000),
        gpu_idle_threshold: rng.u8(..),
        gpu_active_threshold: rng.u8(..),
        phase_stability_count: rng.u32(..),
        nccl_detection_enabled: rng.bool(),
    };
    match rng.u8(0..5) {
        0 => nonsense,
        1 => PhaseDetectorConfig {
            io_wait_threshold: rng.choice([0.0, -0.0, 1.0]).unwrap(),
            ..Default::default()
        },
        2 => PhaseDetectorConfig {
            io_wait_threshold: rng.f32(),
            gpu_idle_threshold: rng.u8(0..50),
            gpu_active_threshold: rng.u8(51..=100),
            ..nonsense
        },
        _ => PhaseDetectorConfig {
            nccl_detection_enabled: rng.bool(),
            ..Default::default()
        },
    }
}

fn any_state(rng: &mut Rng, config: &PhaseDetectorConfig) -> ZernelTaskState {
    ZernelTaskState {
        is_ml_process: rng.u8(0..16) > 0,
        gpu_utilization: any_utilization(rng, config),
        last_gpu_sync_ns: any_u64(rng, 1),
        cpu_burst_duration_ns: any_u64(rng, config.optimizer_burst_max_ns),
        io_wait_fraction: any_f32(rng, config.io_wait_threshold),
        nccl_active: rng.bool(),
        futex_wait_count: rng.choice([0, 0, 0, 1, 2, u32::MAX]).unwrap(),
        ..ZernelTaskState::new(rng.u32(..))
    }
}

/// Around one of the thresholds, at an end, or anywhere.
fn any_utilization(rng: &mut Rng, config: &PhaseDetectorConfig) -> u8 {
    let edges = [config.gpu_idle_threshold, config.gpu_active_threshold];
    let edge = rng.choice(edges).unwrap();
    match rng.u8(0..4) {
        0 => edge.wrapping_sub(1).wrapping_add(rng.u8(0..3)),
        1 => rng.choice([0, 100, 255]).unwrap(),
        _ => rng.u8(0..=100),
    }
}

fn any_u64(rng: &mut Rng, edge: u64) -> u64 {
    match rng.u8(0..4) {
        0 => edge.wrapping_sub(1).wrapping_add(rng.u64(0..3)),
        1 => rng.choice([0, 0, 1, u64::MAX]).unwrap(),
        2 => rng.u64(0..=edge),
        _ => rng.u64(..),
    }
}

/// Around the threshold and its half, special values, the unit range, or any bit pattern.
fn any_f32(rng: &mut Rng, edge: f32) -> f32 {
    let neighbours = |value: f32| {
        let bits = value.to_bits();
        [
            bits.wrapping_sub(1),
            bits,
            bits.wrapping_add(1),
            bits ^ 1 << 31,
        ]
        .map(f32::from_bits)
    };
    match rng.u8(0..5) {
        0 => rng.choice(neighbours(edge)).unwrap(),
        1 => rng.choice(neighbours(edge / 2.0)).unwrap(),
        2 => rng
            .choice([
                0.0,
                -0.0,
                f32::NAN,
                -f32::NAN,
                f32::INFINITY,
                f32::NEG_INFINITY,
                f32::from_bits(1),
            ])
            .unwrap(),
        3 => rng.f32(),
        _ => f32::from_bits(rng.u32(..)),
    }
}

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

fn layout() {
    let twin = twin();
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
}

/// Small mistakes in the C headers: header, what it says, what it would say instead.
const MUTANTS: [(&str, &str, &str); 19] = [
    ("phase_rule.h", "gpu_idle = gpu <", "gpu_idle = gpu <="),
    ("phase_rule.h", "gpu_active = gpu >", "gpu_active = gpu >="),
    (
        "phase_rule.h",
        "gpu > config->gpu_idle_threshold &&",
        "gpu >= config->gpu_idle_threshold &&",
    ),
    (
        "phase_rule.h",
        "&& gpu < config->gpu_active_threshold",
        "&& gpu <= config->gpu_active_threshold",
    ),
    ("phase_rule.h", "if (!sample->is_ml)", "if (0)"),
    ("phase_rule.h", "config->nccl_detection_enabled && ", ""),
    (
        "phase_rule.h",
        "sample->futex_waits > 0",
        "sample->futex_waits > 1",
    ),
    (
        "phase_rule.h",
        "config->io_wait_threshold_f32) && gpu_idle",
        "config->io_wait_half_threshold_f32) && gpu_idle",
    ),
    (
        "phase_rule.h",
        "sample->cpu_burst_ns == 0",
        "sample->cpu_burst_ns <= 1",
    ),
    (
        "phase_rule.h",
        "sample->cpu_burst_ns < config",
        "sample->cpu_burst_ns <= config",
    ),
    (
        "phase_rule.h",
        "sample->last_gpu_sync_ns > 0",
        "sample->last_gpu_sync_ns > 1",
    ),
    (
        "phase_rule.h",
        "config->io_wait_half_threshold_f32)",
        "config->io_wait_threshold_f32)",
    ),
    ("phase_rule.h", "> 0x7f800000", ">= 0x7f800000"),
    (
        "phase_rule.h",
        "bits >> 31 ? -magnitude : magnitude",
        "bits >> 31 ? ~magnitude : magnitude",
    ),
    (
        "phase_rule.h",
        "task->streak >= config",
        "task->streak > config",
    ),
    ("phase_rule.h", "127 - 16 + highest", "127 - 15 + highest"),
    (
        "task_state.h",
        "zernel_word_sequence(word) + 1",
        "zernel_word_sequence(word) + 2",
    ),
    ("task_state.h", "? ~0ULL : sum", "? sum : sum"),
    ("task_state.h", "WORD_UNIT_SHIFT 10", "WORD_UNIT_SHIFT 9"),
];

fn mutants() {
    for (header, from, to) in MUTANTS {
        let object = build_mutant(header, from, to);
        let mutant = PhaseTwin::load_object(&object).unwrap();
        let survived = classify_alike(&mutant, 32).is_ok() && detect_alike(&mutant, 16).is_ok();
        assert!(
            !survived,
            "nobody noticed that {header} says {to:?} instead of {from:?}"
        );
    }
}

/// Compiles the twin with one text of one header replaced.
fn build_mutant(header: &str, from: &str, to: &str) -> Vec<u8> {
    let project = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    for name in ["kernel.h", "phase_rule.h", "task_state.h"] {
        let mut text = fs::read_to_string(project.join("../../bpf").join(name)).unwrap();
        if name == header {
            assert_eq!(text.matches(from).count(), 1, "{header} says {from:?} once");
            text = text.replace(from, to);
        }
        fs::write(folder.path().join(name), text).unwrap();
    }
    let object = folder.path().join("mutant.bpf.o");
    SkeletonBuilder::new()
        .source(project.join("src/twin/phase_twin.bpf.c"))
        .obj(&object)
        .clang(env::var("BPF_CLANG").unwrap_or_else(|_| "clang".into()))
        .clang_args(["-I".as_ref(), folder.path().as_os_str()])
        .build()
        .unwrap();
    fs::read(object).unwrap()
}
