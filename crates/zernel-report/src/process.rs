//! Totals of one observed process.

use std::collections::{BTreeMap, BTreeSet};

use rustix::thread::CpuSet;
use serde::{Deserialize, Serialize};
use zernel_model::snapshot::{self, CollectiveTotals, Role};
use zernel_phase::steps::StepMarkClass;

use super::record::RecordSample;
use super::steps::StepReport;
use super::times::ProcessTimes;

/// The name of `PyTorch` among frameworks.
const TORCH_FRAMEWORK_NAME: &str = "PyTorch";
/// Frameworks that announce no steps.
const FRAMEWORKS_WITHOUT_STEPS: [&str; 5] =
    ["JAX", "TensorFlow", "PaddlePaddle", "MXNet", "MindSpore"];
/// Libraries that only run models, without a framework.
const INFERENCE_RUNTIMES: [&str; 3] = ["GGML", "TensorRT", "ONNX Runtime"];
/// Collectives that gather shards, or scatter their sums.
const SHARD_COLLECTIVES: [&str; 2] = ["AllGather", "ReduceScatter"];
/// Shortest start-up that the report shows, in seconds.
const MIN_SHOWN_START_UP_SECONDS: f64 = 0.1;

/// The report on one process of the command.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(default)]
pub struct ProcessReport {
    pub(crate) pid: u32,
    pub(crate) comm: String,
    pub(crate) job: Option<String>,
    pub(crate) rank: Option<u32>,
    /// ML frameworks and libraries that it maps. `None`: unknown.
    pub(crate) frameworks: Option<Vec<String>>,
    /// Calls of layers of models in `PyTorch`. `None`: unknown.
    pub(crate) layer_calls: Option<u64>,
    /// Parts of its loop that it announced by name through `PyTorch`, such as batches. `None`: unknown.
    pub(crate) announcements: Option<u64>,
    /// Whether it maps `PyTorch`, but its training steps, batches and layers could not be observed.
    pub(crate) lacks_torch_probes: bool,
    /// Whether the process loads data for another process.
    pub(crate) is_loader: bool,
    /// Pid of the process that it loads data for.
    pub(crate) loads_for: Option<u32>,
    /// Whether the process was observed from its first CUDA call on. `None`: it made no CUDA call.
    pub complete: Option<bool>,
    pub(crate) still_running: bool,
    /// From its start to its first probed call: mostly imports. `None`: unknown.
    pub(crate) before_first_call_seconds: Option<f64>,
    /// From its first probed call to its end.
    #[serde(flatten)]
    pub(crate) times: ProcessTimes,
    /// From its first step after the warm-up to its last step.
    pub(crate) training: Option<TrainingTime>,
    pub(crate) steps: Option<StepReport>,
    pub(crate) collectives: Vec<CollectiveTotals>,
    pub(crate) launches: u64,
    /// Half width of the 95 % interval of `launches`. `None`: fewer than two sampling windows, so it is unknown.
    pub(crate) launches_error: Option<u64>,
    pub(crate) launches_per_step: Option<f64>,
    /// Half width of the 95 % interval of `launches_per_step`.
    pub(crate) launches_per_step_error: Option<f64>,
    pub(crate) copies: u64,
    /// The same for `copies`.
    pub(crate) copies_error: Option<u64>,
    pub(crate) copied_bytes: u64,
    /// Names of its GPUs by index, as NVML reports them.
    pub(crate) gpus: BTreeMap<String, Option<String>>,
    /// Sum of the peaks of its GPUs.
    pub(crate) gpu_memory_peak_bytes: u64,
    /// Overhead of observing, over all its threads.
    pub(crate) cost_seconds: f64,
    /// Pids of all processes that used its GPUs, as far as they are known.
    #[serde(skip)]
    pub(crate) gpu_users: BTreeSet<u32>,
    /// CPUs in its affinity mask. Empty: unknown.
    #[serde(skip)]
    pub(crate) cpus: CpuSet,
    /// Samples for the charts.
    #[serde(skip)]
    pub(crate) timeline: Vec<RecordSample>,
}

/// The time from a process's first step after the warm-up to its last step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
#[serde(default)]
pub(crate) struct TrainingTime {
    /// When training begins, after the first probed call.
    pub(crate) begin_seconds: f64,
    #[serde(flatten)]
    pub(crate) times: ProcessTimes,
}

impl ProcessReport {
    pub(crate) fn new(process: &snapshot::ProcessSnapshot) -> Self {
        let identity = process.identity.as_ref();
        let frameworks = identity.and_then(|identity| identity.frameworks.clone());
        let torch = &process.probes.torch;
        let lacks_torch_probes = torch.lacks_probes && contain_torch(frameworks.as_deref());
        Self {
            pid: process.pid,
            comm: process.comm().to_owned(),
            job: process.job().map(str::to_owned),
            rank: process.rank(),
            frameworks,
            layer_calls: layer_calls(process).filter(|_| !lacks_torch_probes),
            announcements: (!lacks_torch_probes).then_some(torch.announcements),
            lacks_torch_probes,
            is_loader: process.role == Role::Loader,
            loads_for: process.loads_for,
            complete: (process.complete || calls_cuda(process)).then_some(process.complete),
            still_running: process.ended_seconds_ago.is_none(),
            before_first_call_seconds: None,
            times: ProcessTimes::new(process),
            training: None,
            steps: None,
            collectives: process.probes.nccl.collectives.clone(),
            launches: process.probes.cuda_trace.launches,
            launches_error: process.probes.cuda_trace.launches_error,
            launches_per_step: process.probes.cuda_trace.launches_per_step,
            launches_per_step_error: process.probes.cuda_trace.launches_per_step_error,
            copies: process.probes.cuda_trace.copies,
            copies_error: process.probes.cuda_trace.copies_error,
            copied_bytes: process.probes.cuda_trace.copied_bytes,
            gpus: (process.probes.gpu_mem.memory.iter())
                .map(|memory| (memory.gpu_label(), memory.gpu.clone()))
                .collect(),
            gpu_memory_peak_bytes: process
                .probes
                .gpu_mem
                .memory
                .iter()
                .map(|m| m.peak_bytes)
                .sum(),
            cost_seconds: process.cost.seconds,
            gpu_users: BTreeSet::new(),
            cpus: CpuSet::new(),
            timeline: Vec::new(),
        }
    }

    /// Subtracts the totals of `before`, which were counted before the process was attached to.
    pub(crate) fn subtract_baseline(mut self, before: &Self) -> Self {
        let difference = |now: f64, before: f64| (now - before).max(0.0);
        self.complete = Some(false);
        self.times = self.times.combine_with(&before.times, difference);
        self.launches = self.launches.saturating_sub(before.launches);
        self.copies = self.copies.saturating_sub(before.copies);
        self.launches_error = later_error(self.launches_error, before.launches_error);
        self.copies_error = later_error(self.copies_error, before.copies_error);
        self.copied_bytes = self.copied_bytes.saturating_sub(before.copied_bytes);
        self.cost_seconds = difference(self.cost_seconds, before.cost_seconds);
        for collective in &mut self.collectives {
            let mut known = before.collectives.iter();
            if let Some(before) = known.find(|known| known.op == collective.op) {
                collective.calls = collective.calls.saturating_sub(before.calls);
                collective.bytes = collective.bytes.saturating_sub(before.bytes);
                // They are of all calls so far.
                if before.calls > 0 {
                    collective.until_sync_mean_seconds = None;
                    collective.until_sync_median_seconds = None;
                }
            }
        }
        self.collectives.retain(|collective| collective.calls > 0);
        self
    }

    /// Forgets how busy its GPUs were if other processes than these used them too: NVML does not show for which process
    /// a GPU is busy. Returns one of those others.
    pub(crate) fn forget_busy_time_of_shared_gpus(
        &mut self,
        own_pids: &BTreeSet<u32>,
    ) -> Option<u32> {
        let other = *self.gpu_users.difference(own_pids).next()?;
        self.times.gpu_busy_seconds = None;
        if let Some(training) = &mut self.training {
            training.times.gpu_busy_seconds = None;
        }
        Some(other)
    }

    /// The times that the verdict uses: those of the training, or of the whole process if it has no steps.
    pub(crate) fn training_times(&self) -> &ProcessTimes {
        self.training
            .as_ref()
            .map_or(&self.times, |training| &training.times)
    }

    /// Whether the process launched kernels, called collectives, made steps or had a phase.
    fn has_trained_or_launched(&self) -> bool {
        let phases = &self.times.phases;
        let stepped = self.steps.is_some() || phases.total_seconds() > phases.unknown;
        self.launches > 0 || !self.collectives.is_empty() || stepped
    }

    /// Whether the process waited for data or for peers.
    fn has_waited_for_data_or_peers(&self) -> bool {
        self.times.data_waits.total_seconds() + self.times.peer_wait_seconds > 0.0
    }

    /// The processes that train: those that have worked. If none has, those that waited may have trained unobserved.
    /// Otherwise a process that only waited serves the job: it compiles, for example.
    pub(crate) fn find_ranks(processes: &[Self]) -> Vec<&Self> {
        let trainers = processes.iter().filter(|process| !process.is_loader);
        let (worked, idle): (Vec<_>, Vec<_>) =
            trainers.partition(|process| process.has_trained_or_launched());
        match worked.is_empty() {
            true => idle
                .into_iter()
                .filter(|it| it.has_waited_for_data_or_peers())
                .collect(),
            false => worked,
        }
    }

    /// Whether the process uses a GPU, and nothing shows that it trains: no backward pass, no optimizer step, no
    /// reduction of gradients. If these could not be observed, or its framework does not announce them, it may train.
    pub(crate) fn only_infers(&self) -> bool {
        let separated_by = self.steps.as_ref().and_then(|steps| steps.separated_by);
        let trains = separated_by.is_some_and(|mark| mark.class() == StepMarkClass::Training);
        let shows_none = !trains && self.times.phases.optimizer_step == 0.0;
        let announces = !self.lacks_torch_probes && !self.uses_framework_without_steps();
        self.launches > 0 && shows_none && announces
    }

    /// Whether the process uses a GPU, and nothing shows machine learning: no training, no collective, no framework. `PyTorch`
    /// also computes with tensors for other purposes. It counts as a framework if a layer of a model was called or compiled.
    pub(crate) fn uses_gpu_without_ml(&self) -> bool {
        let uses_model = self.layer_calls > Some(0) || self.times.compile_seconds > 0.0;
        let has_no_framework = self.frameworks.as_ref().is_some_and(|names| {
            names.is_empty() || (self.layer_calls.is_some() && maps_only_torch(names))
        });
        self.only_infers() && !uses_model && has_no_framework && self.collectives.is_empty()
    }

    /// Whether the process maps `PyTorch`.
    pub(crate) fn maps_torch(&self) -> bool {
        contain_torch(self.frameworks.as_deref())
    }

    /// Whether the process maps one of these frameworks or libraries.
    fn maps_any(&self, wanted: &[&str]) -> bool {
        let mut names = self.frameworks.iter().flatten();
        names.any(|name| wanted.contains(&name.as_str()))
    }

    /// Whether the process uses a framework that announces no steps.
    fn uses_framework_without_steps(&self) -> bool {
        self.maps_any(&FRAMEWORKS_WITHOUT_STEPS)
    }

    /// Whether the process is known to use another framework than `PyTorch`, or to run models without one.
    pub(crate) fn uses_framework_other_than_torch(&self) -> bool {
        let uses_other = self.uses_framework_without_steps() || self.maps_any(&INFERENCE_RUNTIMES);
        uses_other && !self.maps_torch()
    }

    /// Whether most bytes of its collectives gather shards of a model, or scatter sums to them.
    pub(crate) fn mostly_moves_shards(&self) -> bool {
        let collectives = self.collectives.iter();
        let (shards, others): (Vec<_>, Vec<_>) =
            collectives.partition(|it| SHARD_COLLECTIVES.contains(&it.op.as_ref()));
        let bytes = |of: Vec<&CollectiveTotals>| of.iter().map(|it| it.bytes).sum::<u64>();
        bytes(shards) > bytes(others)
    }

    /// Whether other processes may send it requests: it does not train, and announces no batches, as a loop with a
    /// `DataLoader` does.
    pub(crate) fn may_serve_requests(&self) -> bool {
        let announces = self.announcements != Some(0);
        self.only_infers() && self.maps_torch() && !announces
    }

    /// Time in which it worked as a loader: on CPUs, fetching, or runnable without a CPU.
    pub(crate) fn loader_work_seconds(&self) -> f64 {
        self.times.cpu_seconds + self.times.fetch_seconds + self.times.run_delay_seconds
    }

    /// Time from its start to its first probed call, if that is not negligible.
    pub(crate) fn start_up_seconds(&self) -> Option<f64> {
        self.before_first_call_seconds
            .filter(|seconds| *seconds >= MIN_SHOWN_START_UP_SECONDS)
    }

    /// Overhead of observing as a share of its wall time.
    pub(crate) fn cost_share(&self) -> f64 {
        match self.times.wall_seconds > 0.0 {
            true => self.cost_seconds / self.times.wall_seconds,
            false => 0.0,
        }
    }
}

/// The error of a count since `before`, of errors that add up in squares, as those of independent windows do.
fn later_error(now: Option<u64>, before: Option<u64>) -> Option<u64> {
    let (now, before) = (now? as f64, before.unwrap_or(0) as f64);
    Some((now * now - before * before).max(0.0).sqrt().ceil() as u64)
}

/// Whether these frameworks are known, and `PyTorch` is among them.
fn contain_torch(frameworks: Option<&[String]>) -> bool {
    frameworks.is_some_and(|names| names.iter().any(|name| name == TORCH_FRAMEWORK_NAME))
}

/// Whether a process maps `PyTorch`, and otherwise only libraries that `PyTorch` maps itself.
fn maps_only_torch(frameworks: &[String]) -> bool {
    let own =
        |name: &String| [TORCH_FRAMEWORK_NAME, "cuDNN", "NCCL", "cuBLAS"].contains(&name.as_str());
    contain_torch(Some(frameworks)) && frameworks.iter().all(own)
}

/// Calls of layers. None are seen of a model that was compiled, or captured in a graph, before it was observed.
fn layer_calls(process: &snapshot::ProcessSnapshot) -> Option<u64> {
    let calls = process.probes.torch.layer_calls;
    (calls > 0 || process.complete).then_some(calls)
}

fn calls_cuda(process: &snapshot::ProcessSnapshot) -> bool {
    process.calls.keys().any(|name| name.starts_with("cu"))
}

#[cfg(test)]
mod tests {
    use zernel_model::identity::Identity;

    use super::*;
    use crate::phases::PhaseSeconds;

    /// A process that launches and waits, and maps these libraries.
    fn process_that_launches(frameworks: &[&str]) -> ProcessReport {
        ProcessReport {
            frameworks: Some(frameworks.iter().map(|&name| name.to_owned()).collect()),
            layer_calls: Some(0),
            announcements: Some(0),
            launches: 1000,
            ..ProcessReport::default()
        }
    }

    /// A simulation may use tensors of `PyTorch`, which maps cuDNN, NCCL and cuBLAS itself.
    #[test]
    fn torch_without_layers_is_no_machine_learning() {
        let tensors = process_that_launches(&["PyTorch", "NCCL", "cuDNN", "cuBLAS"]);
        assert!(tensors.uses_gpu_without_ml());
        let infers = ProcessReport {
            layer_calls: Some(1),
            ..tensors.clone()
        };
        assert!(!infers.uses_gpu_without_ml());
        let unknown = ProcessReport {
            layer_calls: None,
            ..tensors.clone()
        };
        assert!(!unknown.uses_gpu_without_ml());
        let mut compiled = tensors;
        compiled.times.compile_seconds = 0.1;
        assert!(!compiled.uses_gpu_without_ml());
        for other in [&["PyTorch", "TensorRT"][..], &["cuBLAS"]] {
            assert!(!process_that_launches(other).uses_gpu_without_ml());
        }
        assert!(process_that_launches(&[]).uses_gpu_without_ml());
    }

    /// Without probes on `PyTorch` nothing shows whether a process trains, loads or calls layers.
    #[test]
    fn calls_of_torch_without_probes_are_unknown() {
        let report = |framework: &str| {
            let mut process = snapshot::ProcessSnapshot {
                complete: true,
                identity: Some(Identity {
                    frameworks: Some(vec![framework.to_owned()]),
                    ..Identity::default()
                }),
                ..snapshot::ProcessSnapshot::default()
            };
            process.probes.cuda_trace.launches = 1000;
            process.probes.torch.lacks_probes = true;
            ProcessReport::new(&process)
        };
        let torch = report("PyTorch");
        assert_eq!((torch.layer_calls, torch.announcements), (None, None));
        assert!(!torch.only_infers() && !torch.uses_gpu_without_ml());
        assert!(!torch.may_serve_requests());
        // Other programs have no such functions.
        let other = report("cuDNN");
        assert_eq!((other.layer_calls, other.announcements), (Some(0), Some(0)));
        assert!(other.only_infers());
    }

    /// A model that was compiled earlier calls no layers.
    #[test]
    fn layers_of_models_that_were_compiled_earlier_are_unknown() {
        let calls = |complete, layer_calls| {
            let mut process = snapshot::ProcessSnapshot {
                complete,
                ..snapshot::ProcessSnapshot::default()
            };
            process.probes.torch.layer_calls = layer_calls;
            ProcessReport::new(&process).layer_calls
        };
        assert_eq!(calls(false, 0), None);
        assert_eq!(calls(false, 7), Some(7));
        assert_eq!(calls(true, 0), Some(0));
    }

    #[test]
    fn a_process_that_announces_batches_serves_no_requests() {
        let serves = process_that_launches(&["PyTorch"]);
        assert!(serves.may_serve_requests());
        let loads = ProcessReport {
            announcements: Some(9),
            ..serves
        };
        assert!(!loads.may_serve_requests());
        // The steps of other frameworks are not seen, so such a process may train.
        assert!(!process_that_launches(&["JAX"]).may_serve_requests());
        assert!(!process_that_launches(&["JAX", "PyTorch"]).may_serve_requests());
    }

    /// Libraries that several frameworks use show none of them.
    #[test]
    fn a_process_lacks_torch_if_it_uses_another_framework() {
        for names in [&["JAX", "NCCL"][..], &["GGML", "cuBLAS"], &["TensorRT"]] {
            assert!(
                process_that_launches(names).uses_framework_other_than_torch(),
                "{names:?}"
            );
        }
        for names in [
            &["TensorRT", "PyTorch"][..],
            &["JAX", "PyTorch"][..],
            &["NCCL"],
            &[],
        ] {
            assert!(
                !process_that_launches(names).uses_framework_other_than_torch(),
                "{names:?}"
            );
        }
    }

    /// A process of `torch.compile` forks workers and waits for them. It is no rank beside the one that trains.
    #[test]
    fn a_process_that_only_waits_is_no_rank_beside_one_that_works() {
        let mut waits = ProcessReport::default();
        waits.times.data_waits.prepare = 12.0;
        waits.times.phases = PhaseSeconds {
            unknown: 12.0,
            ..PhaseSeconds::default()
        };
        let works = ProcessReport {
            launches: 1,
            ..ProcessReport::default()
        };
        let alone = [waits.clone()];
        assert_eq!(ProcessReport::find_ranks(&alone).len(), 1);
        let both = [waits, works];
        let ranks = ProcessReport::find_ranks(&both);
        assert_eq!(ranks.len(), 1);
        assert_eq!(ranks[0].launches, 1);
    }

    #[test]
    fn figures_from_before_attaching_do_not_count() {
        let collective = |calls| CollectiveTotals {
            op: "AllReduce".into(),
            calls,
            until_sync_mean_seconds: Some(0.5),
            until_sync_median_seconds: Some(0.4),
            ..CollectiveTotals::default()
        };
        let report = |launches, launches_error, calls| ProcessReport {
            launches,
            launches_error: Some(launches_error),
            collectives: vec![collective(calls)],
            ..ProcessReport::default()
        };
        let since = report(1_100, 50, 90).subtract_baseline(&report(1_000, 40, 60));
        assert_eq!((since.launches, since.launches_error), (100, Some(30)));
        assert_eq!(since.collectives[0].calls, 30);
        assert_eq!(since.collectives[0].until_sync_mean_seconds, None);
        let first = report(100, 30, 30).subtract_baseline(&report(0, 0, 0));
        assert_eq!(first.launches_error, Some(30));
        assert_eq!(first.collectives[0].until_sync_mean_seconds, Some(0.5));
    }

    #[test]
    fn ranks_that_gather_more_than_they_reduce_shard_a_model() {
        let shards = |bytes: [(&'static str, u64); 2]| {
            let collectives = bytes.map(|(op, bytes)| CollectiveTotals {
                op: op.into(),
                bytes,
                ..CollectiveTotals::default()
            });
            ProcessReport {
                collectives: collectives.to_vec(),
                ..ProcessReport::default()
            }
            .mostly_moves_shards()
        };
        assert!(shards([("AllGather", 9), ("ReduceScatter", 9)]));
        assert!(!shards([("AllReduce", 9), ("AllGather", 8)]));
        assert!(!ProcessReport::default().mostly_moves_shards());
    }

    #[test]
    fn completeness_is_unknown_without_cuda_calls() {
        let process = |complete, call: &str| {
            let calls =
                BTreeMap::from([(call.to_owned().into(), snapshot::FunctionCalls::default())]);
            ProcessReport::new(&snapshot::ProcessSnapshot {
                complete,
                calls,
                ..snapshot::ProcessSnapshot::default()
            })
        };
        assert_eq!(process(true, "cuInit").complete, Some(true));
        assert_eq!(process(false, "cuMemAlloc_v2").complete, Some(false));
        assert_eq!(process(false, "ncclAllReduce").complete, None);
        // The first calls of the process are subtracted, so the rest is incomplete.
        for before in [process(true, "cuInit"), process(false, "ncclAllReduce")] {
            assert_eq!(
                before.clone().subtract_baseline(&before).complete,
                Some(false)
            );
        }
    }
}
