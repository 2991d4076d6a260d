//! A training job: loaders that read and decode, a bounded queue of batches, and one trainer per
//! rank that copies, launches, waits for the GPU, joins an all-reduce and runs the optimizer.
//!
//! Each worker notes when it was in which phase, so that what a detector says can be held against
//! the truth.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{About, Work, files};
use crate::affinity::Random;
use crate::clock::{self, us};
use crate::shared::Slot;
use crate::worker::{Failure, Step, Worker};

mod collective;
mod gpu;
mod loaders;

use collective::{Collective, CollectiveSlots, Interval, Reduced, SLOTS_PER_JOB};
use gpu::Gpu;
pub use gpu::{GpuBackend, GpuWait};
use loaders::Loaders;

/// The phases of a training job by the number they have in shared memory: the names and the numbers
/// are those that the phase detector uses.
pub(crate) const PHASE_NAMES: [&str; 5] = [
    "Unknown",
    "DataLoading",
    "GpuCompute",
    "NcclCollective",
    "OptimizerStep",
];
const DATA_LOADING: u32 = 1;
const GPU_COMPUTE: u32 = 2;
const COLLECTIVE: u32 = 3;
const OPTIMIZER: u32 = 4;

/// Size of one read of a loader.
const READ: usize = 64 << 10;
/// Steps whose phases can be noted: shared memory holds them all, some 100 MB a trainer.
const MAX_TRACED_STEPS: usize = 1_000_000;
/// Phases that a trainer goes through in a step.
const PHASES_PER_STEP: usize = 4;

/// See [`WorkType::MlTraining`](super::WorkType::MlTraining).
///
/// A job has `ranks * (1 + loaders)` workers: for each rank its trainer and then its loaders; or only its
/// `ranks` trainers, where they fork their loaders themselves. A group may hold several jobs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MlTraining {
    /// Trainers that step together.
    pub ranks: usize,
    /// Loaders of each rank.
    pub loaders: usize,
    /// Whether each trainer forks its loaders itself, as PyTorch does. They are then no workers: there are
    /// no reports on them.
    pub forked_loaders: bool,
    /// Batches that may wait for a trainer.
    pub queue_depth: u32,
    /// Where each loader makes its (nameless) file.
    pub folder: PathBuf,
    /// Size of that file.
    pub file_kib: usize,
    /// Bytes that a loader reads for a batch.
    pub batch_kib: usize,
    /// CPU time to decode a batch.
    pub decode_us: u64,
    /// Bytes that are copied to the GPU in a step.
    pub copy_kib: usize,
    /// Kernels launched in a step.
    pub launches: u32,
    /// CPU time of a launch.
    pub launch_us: u64,
    /// GPU time of all kernels of a step.
    pub gpu_us: u64,
    /// How the trainer waits for the GPU.
    pub gpu_wait: GpuWait,
    /// What stands for the GPU.
    pub gpu: GpuBackend,
    /// CPU time of each rank for a whole all-reduce, where the CPU's clock stands for the GPU; the ring
    /// goes around twice.
    pub all_reduce_us: u64,
    /// Bytes that NCCL adds up over all ranks in a step, where there is a driver.
    pub gradient_kib: usize,
    /// CPU time of the optimizer.
    pub optimizer_us: u64,
    /// Steps whose phases are noted, a million at most; later ones are only counted.
    pub traced_steps: usize,
}

impl Default for MlTraining {
    fn default() -> Self {
        Self {
            ranks: 1,
            loaders: 1,
            forked_loaders: false,
            queue_depth: 2,
            folder: files::default_folder(),
            file_kib: 1024,
            batch_kib: 256,
            decode_us: 2_000,
            copy_kib: 256,
            launches: 20,
            launch_us: 5,
            gpu_us: 4_000,
            gpu_wait: GpuWait::Block,
            gpu: GpuBackend::CpuTime,
            all_reduce_us: 400,
            gradient_kib: 1024,
            optimizer_us: 500,
            traced_steps: 1_000,
        }
    }
}

/// What the trainer and the loaders of a rank share.
struct Rank<'a> {
    free: &'a Slot,
    filled: &'a Slot,
    collective: CollectiveSlots<'a>,
}

const SLOTS_PER_RANK: usize = 3;

impl Work for MlTraining {
    fn about(&self) -> About {
        About {
            name: "ml_training",
            does: "loaders read and decode batches; trainers copy, launch, wait for the GPU, all-reduce and optimize; \
                   a unit for each batch or step",
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

    fn slots(&self, _team_size: usize) -> usize {
        self.ranks * SLOTS_PER_RANK + SLOTS_PER_JOB
    }

    fn trace_entries(&self, team_index: usize) -> usize {
        let is_trainer = team_index.is_multiple_of(self.workers_per_rank());
        if is_trainer {
            self.traced_steps * PHASES_PER_STEP
        } else {
            self.traced_steps
        }
    }

    fn refused_in_container(&self) -> Option<&'static str> {
        let why = "a fork copies the locks that sibling threads hold at that moment; leave out forked_loaders";
        self.forked_loaders.then_some(why)
    }

    fn run(&self, worker: &mut Worker<'_>) -> Result<(), Failure> {
        let team = worker.team();
        let number = team.index / self.workers_per_rank();
        let slot =
            |rank: usize, slot: usize| &team.slots[(rank % self.ranks) * SLOTS_PER_RANK + slot];
        let rank = Rank {
            free: slot(number, 0),
            filled: slot(number, 1),
            collective: CollectiveSlots {
                arrived: slot(number, 2),
                next_arrived: slot(number + 1, 2),
                job: &team.slots[self.ranks * SLOTS_PER_RANK..],
            },
        };
        let seed = |loader: usize| (number * self.loaders + loader) as u64;
        match team.index % self.workers_per_rank() {
            0 if self.forked_loaders => {
                // Before the GPU is opened: it does not survive a fork.
                let load = |loader, worker: &mut Worker<'_>| self.load(worker, &rank, seed(loader));
                let loaders = Loaders::fork(self.loaders, load)?;
                self.train(worker, &rank, number)?;
                loaders.end()
            }
            0 => self.train(worker, &rank, number),
            loader => self.load(worker, &rank, seed(loader)),
        }
    }
}

impl MlTraining {
    fn workers_per_rank(&self) -> usize {
        match self.forked_loaders {
            true => 1,
            false => self.loaders.saturating_add(1),
        }
    }

    fn load(&self, worker: &mut Worker<'_>, rank: &Rank<'_>, seed: u64) -> Result<(), Failure> {
        let _ = rustix::thread::set_name(c"loader");
        let file_bytes = (self.file_kib as u64) << 10;
        let file = files::filled(&self.folder, file_bytes, worker)?;
        let mut random = Random(seed);
        let mut batch = 0;
        while worker.proceed() && worker.take(rank.free) {
            let mut laps = Laps::new(batch);
            self.read_batch(worker, &file, &mut random)?;
            worker.burn_ns(us(self.decode_us));
            laps.lap(worker, DATA_LOADING);
            worker.post(rank.filled, 1);
            worker.done(1);
            batch += 1;
        }
        Ok(())
    }

    fn read_batch(
        &self,
        worker: &mut Worker<'_>,
        file: &std::os::fd::OwnedFd,
        random: &mut Random,
    ) -> Result<(), Failure> {
        let mut buffer = [0; READ];
        let mut left = self.batch_kib << 10;
        while left > 0 && !worker.is_stopped() {
            let offset = random.below((self.file_kib << 10).div_ceil(READ)) * READ;
            let wanted = left.min(READ);
            match worker.blocking(|| rustix::io::pread(file, &mut buffer[..wanted], offset as u64))
            {
                // Past the end of a file that was cut short by a stop, or of its last part.
                Ok(read) => left = left.saturating_sub(read.max(1)),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(Step::ReadFile.failed()(errno)),
            }
        }
        Ok(())
    }

    fn train(
        &self,
        worker: &mut Worker<'_>,
        rank: &Rank<'_>,
        number: usize,
    ) -> Result<(), Failure> {
        // A name that tells people what they see in a list; without it all goes on.
        let _ = rustix::thread::set_name(c"trainer");
        let mut gpu = Gpu::open(self, number)?;
        (0..self.queue_depth).for_each(|_| worker.post(rank.free, 1));
        let joined = Collective::join(self, worker, number, &gpu, rank.collective)?;
        let Some(mut collective) = joined else {
            return Ok(());
        };
        let mut step = 0;
        let trained = self.train_until_stopped(worker, rank, &mut gpu, &mut collective, &mut step);
        // Whatever ended the training, others may wait for this rank.
        let last = collective.finish(worker);
        trained?;
        if let Reduced::Together(interval) = last? {
            worker.trace(step, COLLECTIVE, interval.start_ns, interval.end_ns);
        }
        Ok(())
    }

    fn train_until_stopped(
        &self,
        worker: &mut Worker<'_>,
        rank: &Rank<'_>,
        gpu: &mut Gpu,
        collective: &mut Collective<'_>,
        step: &mut u32,
    ) -> Result<(), Failure> {
        while worker.proceed() {
            let mut laps = Laps::new(*step);
            if !worker.take(rank.filled) {
                break;
            }
            worker.post(rank.free, 1);
            laps.lap(worker, DATA_LOADING);
            self.compute(worker, gpu)?;
            laps.lap(worker, GPU_COMPUTE);
            match collective.all_reduce(worker)? {
                Reduced::Together(interval) => laps.note(worker, COLLECTIVE, &interval),
                Reduced::Alone => {}
                Reduced::Stopped => break,
            }
            worker.burn_ns(us(self.optimizer_us));
            laps.lap(worker, OPTIMIZER);
            worker.done(1);
            *step += 1;
        }
        Ok(())
    }

    fn compute(&self, worker: &mut Worker<'_>, gpu: &mut Gpu) -> Result<(), Failure> {
        gpu.copy(worker)?;
        for _ in 0..self.launches {
            worker.burn_ns(us(self.launch_us));
            gpu.launch(us(self.gpu_us) / u64::from(self.launches.max(1)))?;
        }
        gpu.synchronize(worker)
    }
}

/// Notes the phases of one step, each from the end of the one before.
struct Laps {
    step: u32,
    since_ns: u64,
}

impl Laps {
    fn new(step: u32) -> Self {
        Self {
            step,
            since_ns: clock::now_ns(),
        }
    }

    fn lap(&mut self, worker: &Worker<'_>, phase: u32) {
        let now_ns = clock::now_ns();
        worker.trace(self.step, phase, self.since_ns, now_ns);
        self.since_ns = now_ns;
    }

    /// Notes a phase whose moments are known.
    fn note(&mut self, worker: &Worker<'_>, phase: u32, interval: &Interval) {
        worker.trace(self.step, phase, interval.start_ns, interval.end_ns);
        self.since_ns = interval.end_ns;
    }
}
