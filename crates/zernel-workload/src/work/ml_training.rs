//! A training job: loaders that read and decode, a bounded queue of batches, and one trainer per
//! rank that copies, launches, waits for the GPU, joins an all-reduce and runs the optimizer.
//!
//! Each worker records its phases with their start and end. Tests compare the result of a phase detector with this
//! record.

use std::path::PathBuf;

use super::{Work, WorkTypeInfo, files};
use crate::affinity::SplitMix64;
use crate::clock::{self, us_to_ns};
use crate::shared_state::FutexSlot;
use crate::spec_keys::spec_table;
use crate::worker::{FailingStep, WorkFailure, Worker};

mod collective;
mod gpu;
mod inference;
mod loaders;

use collective::{
    Collective, CollectiveInterval, CollectiveResult, CollectiveSlots, FUTEX_SLOTS_PER_JOB,
};
use gpu::TrainerGpu;
pub use gpu::{GpuBackend, GpuWait};
pub use inference::Inference;
use loaders::ForkedLoaders;

/// The phases of a training job, by the number that stands for each in shared memory. Names and numbers are those that
/// the phase detector uses.
pub(crate) const PHASE_NAMES: [&str; 5] = [
    "Unknown",
    "DataLoading",
    "GpuCompute",
    "NcclCollective",
    "OptimizerStep",
];
const DATA_LOADING_PHASE: u32 = 1;
const GPU_COMPUTE_PHASE: u32 = 2;
const COLLECTIVE_PHASE: u32 = 3;
const OPTIMIZER_PHASE: u32 = 4;

/// Size of one read by which a loader reads a batch.
const LOADER_READ_BYTES: usize = 64 << 10;
/// Limit of `traced_steps`: shared memory holds all phases, about 100 MB per trainer.
const MAX_TRACED_STEPS: usize = 1_000_000;
/// Number of phases in a trainer's step.
const PHASES_PER_STEP: usize = 4;

spec_table! {
    /// See [`WorkType::MlTraining`](super::WorkType::MlTraining).
    ///
    /// A job has `ranks * (1 + loaders)` workers: for each rank its trainer, then its loaders. With `forked_loaders` a
    /// job has `ranks` workers, the trainers. With `backward_us` each rank has one more worker, which comes last. A
    /// group may hold several jobs.
    #[derive(Eq)]
    pub struct MlTraining {
        /// Trainers that step together, at least 1.
        pub ranks: usize = 1,
        /// Loaders per rank, at least 1.
        pub loaders: usize = 1,
        /// Each trainer forks its loaders itself, as PyTorch does. Such loaders are not workers and have no
        /// reports. Not with `pcomm`.
        pub forked_loaders: bool = false,
        /// Batches that may wait for a trainer, at least 1.
        pub queue_depth: u32 = 2,
        /// Folder in which each loader creates its temporary file.
        pub folder: PathBuf = files::default_folder(),
        shown as "$TMPDIR, else /tmp",
        /// Size of a loader's temporary file, 1 KiB to 1 TiB.
        pub file_kib: usize = 1024,
        /// Size of a batch that a loader reads, 1 KiB to 1 TiB.
        pub batch_kib: usize = 256,
        /// CPU time to decode a batch.
        pub decode_us: u64 = 2_000,
        /// Size of the copy to the GPU per step, 1 KiB to 1 TiB.
        pub copy_kib: usize = 256,
        /// Kernel launches per step.
        pub launches: u32 = 20,
        /// CPU time that the trainer uses before each launch.
        pub launch_us: u64 = 5,
        /// GPU time of all kernels of a step together.
        pub gpu_us: u64 = 4_000,
        /// How the trainer waits for the GPU.
        pub gpu_wait: GpuWait = GpuWait::Block,
        /// The GPU that a trainer uses.
        pub gpu: GpuBackend = GpuBackend::CpuTime,
        /// CPU time per rank for an all-reduce, with `gpu = "cpu_time"`.
        pub all_reduce_us: u64 = 400,
        /// Size of the gradients in an all-reduce, with a driver, 1 KiB to 1 TiB.
        pub gradient_kib: usize = 1024,
        /// CPU time of the backward pass. If it is not 0, each rank has one more worker for backward passes. The
        /// trainer wakes this worker after the launches and waits until it is done, as a trainer in PyTorch does with
        /// its autograd thread. With `pcomm` both are threads of one process.
        pub backward_us: u64 = 0,
        /// CPU time of the optimizer per step.
        pub optimizer_us: u64 = 500,
        /// Steps whose phases are recorded, at most 1000000. Of later steps only the number is counted.
        pub traced_steps: usize = 1_000,
    }
}

/// The futex slots by which the trainer, the loaders and the backward thread of a rank wake each other.
struct RankSlots<'a> {
    free_batches: &'a FutexSlot,
    filled_batches: &'a FutexSlot,
    collective: CollectiveSlots<'a>,
    backward: BackwardSlots<'a>,
}

/// The futex slots by which the trainer and its backward thread wake each other.
#[derive(Clone, Copy)]
struct BackwardSlots<'a> {
    requested_backward_passes: &'a FutexSlot,
    finished_backward_passes: &'a FutexSlot,
}

const FUTEX_SLOTS_PER_RANK: usize = 5;

impl Work for MlTraining {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "ml_training",
            does: "loaders read and decode batches; trainers copy, launch, wait for the GPU, all-reduce and optimize; \
                   a loader counts a unit for each batch, a trainer for each step",
            exercises: "what decides the speed of a training step: loaders against trainers for the CPU, the wake-up after \
                        the GPU, ranks that wait for the slowest",
        }
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        let at_least_one = [
            ("work.ranks", self.ranks),
            ("work.loaders", self.loaders),
            ("work.queue_depth", self.queue_depth as usize),
        ];
        if let Some((field, _)) = at_least_one.into_iter().find(|(_, value)| *value == 0) {
            return Err((field, "0 does not work; use at least 1".to_owned()));
        }
        if self.traced_steps > MAX_TRACED_STEPS {
            let problem = format!(
                "{} is too many; use 0 to {MAX_TRACED_STEPS}",
                self.traced_steps
            );
            return Err(("work.traced_steps", problem));
        }
        super::check_kib("work.file_kib", self.file_kib)?;
        super::check_kib("work.batch_kib", self.batch_kib)?;
        super::check_kib("work.copy_kib", self.copy_kib)?;
        super::check_kib("work.gradient_kib", self.gradient_kib)?;
        self.gpu.check()?;
        files::check_folder("work.folder", &self.folder)
    }

    fn team_size(&self, _workers: usize) -> usize {
        self.ranks.saturating_mul(self.workers_per_rank())
    }

    fn worker_rule(&self) -> String {
        "a multiple of ranks * (1 + loaders); of ranks with forked_loaders; one more per rank with backward_us"
            .to_owned()
    }

    fn futex_slot_count(&self, _team_size: usize) -> usize {
        self.ranks * FUTEX_SLOTS_PER_RANK + FUTEX_SLOTS_PER_JOB
    }

    fn trace_capacity(&self, team_index: usize) -> usize {
        let is_trainer = team_index.is_multiple_of(self.workers_per_rank());
        if is_trainer {
            self.traced_steps * PHASES_PER_STEP
        } else {
            self.traced_steps
        }
    }

    fn reason_refused_in_container(&self) -> Option<&'static str> {
        let why = "a fork copies the locks that sibling threads hold at that moment; leave out forked_loaders";
        self.forked_loaders.then_some(why)
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let team = worker.team();
        let number = team.index / self.workers_per_rank();
        let slot = |rank: usize, slot: usize| {
            &team.slots[(rank % self.ranks) * FUTEX_SLOTS_PER_RANK + slot]
        };
        let rank = RankSlots {
            free_batches: slot(number, 0),
            filled_batches: slot(number, 1),
            collective: CollectiveSlots {
                turn_of_this_rank: slot(number, 2),
                turn_of_next_rank: slot(number + 1, 2),
                job: &team.slots[self.ranks * FUTEX_SLOTS_PER_RANK..],
            },
            backward: BackwardSlots {
                requested_backward_passes: slot(number, 3),
                finished_backward_passes: slot(number, 4),
            },
        };
        let seed = |loader: usize| (number * self.loaders + loader) as u64;
        match team.index % self.workers_per_rank() {
            0 if self.forked_loaders => {
                // Loaders are forked before the GPU is opened, because an open GPU does not survive a fork.
                let load = |loader, worker: &mut Worker<'_>| {
                    self.load_batches(worker, &rank, seed(loader))
                };
                let loaders = ForkedLoaders::fork(self.loaders, load)?;
                self.train(worker, &rank, number)?;
                loaders.end_loaders()
            }
            0 => self.train(worker, &rank, number),
            last if self.backward_us > 0 && last + 1 == self.workers_per_rank() => {
                self.run_backward(worker, rank.backward);
                Ok(())
            }
            loader => self.load_batches(worker, &rank, seed(loader)),
        }
    }
}

impl MlTraining {
    fn workers_per_rank(&self) -> usize {
        let loaders = match self.forked_loaders {
            true => 0,
            false => self.loaders,
        };
        loaders
            .saturating_add(1)
            .saturating_add(usize::from(self.backward_us > 0))
    }

    fn run_backward(&self, worker: &mut Worker<'_>, backward: BackwardSlots<'_>) {
        let _ = rustix::thread::set_name(c"backward");
        while worker.should_do_another_round()
            && worker.take_from_slot(backward.requested_backward_passes)
        {
            worker.burn_cpu_ns(us_to_ns(self.backward_us));
            worker.count_round(1);
            worker.post_to_slot(backward.finished_backward_passes, 1);
        }
    }

    fn load_batches(
        &self,
        worker: &mut Worker<'_>,
        rank: &RankSlots<'_>,
        seed: u64,
    ) -> Result<(), WorkFailure> {
        let _ = rustix::thread::set_name(c"loader");
        let file_bytes = (self.file_kib as u64) << 10;
        let file = files::create_filled_file(&self.folder, file_bytes, worker)?;
        let mut random = SplitMix64(seed);
        let mut batch = 0;
        while worker.should_do_another_round() && worker.take_from_slot(rank.free_batches) {
            let mut laps = StepPhases::new(batch);
            self.read_batch(worker, &file, &mut random)?;
            worker.burn_cpu_ns(us_to_ns(self.decode_us));
            laps.record_phase_until_now(worker, DATA_LOADING_PHASE);
            worker.post_to_slot(rank.filled_batches, 1);
            worker.count_round(1);
            batch += 1;
        }
        Ok(())
    }

    fn read_batch(
        &self,
        worker: &mut Worker<'_>,
        file: &std::os::fd::OwnedFd,
        random: &mut SplitMix64,
    ) -> Result<(), WorkFailure> {
        let mut buffer = [0; LOADER_READ_BYTES];
        let mut left = self.batch_kib << 10;
        while left > 0 && !worker.is_stopped() {
            let offset = random.random_below((self.file_kib << 10).div_ceil(LOADER_READ_BYTES))
                * LOADER_READ_BYTES;
            let wanted = left.min(LOADER_READ_BYTES);
            match worker
                .count_as_blocked(|| rustix::io::pread(file, &mut buffer[..wanted], offset as u64))
            {
                // The read began past the end of a file that a stop request had cut short, or of the file's last part.
                Ok(read) => left = left.saturating_sub(read.max(1)),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(FailingStep::ReadFile.as_failure()(errno)),
            }
        }
        Ok(())
    }

    fn train(
        &self,
        worker: &mut Worker<'_>,
        rank: &RankSlots<'_>,
        number: usize,
    ) -> Result<(), WorkFailure> {
        // The thread name only helps users of `ps` and `top`, so a failure does not matter.
        let _ = rustix::thread::set_name(c"trainer");
        let mut gpu = TrainerGpu::open(self, number)?;
        (0..self.queue_depth).for_each(|_| worker.post_to_slot(rank.free_batches, 1));
        let joined = Collective::join(self, worker, number, &gpu, rank.collective)?;
        let Some(mut collective) = joined else {
            return Ok(());
        };
        let mut step = 0;
        let trained = self.train_until_stopped(worker, rank, &mut gpu, &mut collective, &mut step);
        // Other ranks may wait for this rank, even if its training failed.
        let last = collective.finish_collectives(worker);
        trained?;
        if let CollectiveResult::Complete(interval) = last? {
            worker.trace_interval(step, COLLECTIVE_PHASE, interval.start_ns, interval.end_ns);
        }
        Ok(())
    }

    fn train_until_stopped(
        &self,
        worker: &mut Worker<'_>,
        rank: &RankSlots<'_>,
        gpu: &mut TrainerGpu,
        collective: &mut Collective<'_>,
        step: &mut u32,
    ) -> Result<(), WorkFailure> {
        while worker.should_do_another_round() {
            let mut laps = StepPhases::new(*step);
            if !worker.take_from_slot(rank.filled_batches) {
                break;
            }
            worker.post_to_slot(rank.free_batches, 1);
            laps.record_phase_until_now(worker, DATA_LOADING_PHASE);
            self.run_compute_phase(worker, gpu, rank.backward)?;
            laps.record_phase_until_now(worker, GPU_COMPUTE_PHASE);
            match collective.all_reduce(worker)? {
                CollectiveResult::Complete(interval) => {
                    laps.record_phase(worker, COLLECTIVE_PHASE, &interval);
                }
                CollectiveResult::SingleRank => {}
                CollectiveResult::Stopped => break,
            }
            worker.burn_cpu_ns(us_to_ns(self.optimizer_us));
            laps.record_phase_until_now(worker, OPTIMIZER_PHASE);
            worker.count_round(1);
            *step += 1;
        }
        Ok(())
    }

    fn run_compute_phase(
        &self,
        worker: &mut Worker<'_>,
        gpu: &mut TrainerGpu,
        backward: BackwardSlots<'_>,
    ) -> Result<(), WorkFailure> {
        gpu.copy_batch(worker)?;
        for _ in 0..self.launches {
            worker.burn_cpu_ns(us_to_ns(self.launch_us));
            gpu.launch_kernel(us_to_ns(self.gpu_us) / u64::from(self.launches.max(1)))?;
        }
        if self.backward_us > 0 {
            worker.post_to_slot(backward.requested_backward_passes, 1);
            if !worker.take_from_slot(backward.finished_backward_passes) {
                return Ok(());
            }
        }
        gpu.synchronize(worker)
    }
}

/// Records the phases of one step. Each phase begins at the end of the phase before.
struct StepPhases {
    step: u32,
    since_ns: u64,
}

impl StepPhases {
    fn new(step: u32) -> Self {
        Self {
            step,
            since_ns: clock::now_ns(),
        }
    }

    fn record_phase_until_now(&mut self, worker: &Worker<'_>, phase: u32) {
        let now_ns = clock::now_ns();
        worker.trace_interval(self.step, phase, self.since_ns, now_ns);
        self.since_ns = now_ns;
    }

    /// Records a phase with a known start and end. The next phase begins at that end.
    fn record_phase(&mut self, worker: &Worker<'_>, phase: u32, interval: &CollectiveInterval) {
        worker.trace_interval(self.step, phase, interval.start_ns, interval.end_ns);
        self.since_ns = interval.end_ns;
    }
}
