//! The plan of a job: what its ranks do, and how long each part takes.

use serde::{Deserialize, Serialize};

/// What makes the steps of a job slow, as `zernel` has to find it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Bottleneck {
    /// Loaders need more CPU time for a batch than the step takes.
    LoaderCpu,
    /// Loaders wait longer for storage than the step takes: a disk for even seeds, a server for odd ones.
    LoaderFetch,
    /// Kernels take most of the time of a step.
    Gpu,
    /// The transfer of gradients takes most of the time of a step.
    Communication,
    /// One rank is slower than the other, in one of five ways that the seed chooses.
    Straggler,
    /// Spinning processes use the CPUs of ranks and loaders.
    CpuNoise,
    /// Kernels are small, and the thread that launches them takes longer than they do.
    Host,
}

impl Bottleneck {
    /// All bottlenecks.
    pub const ALL: [Self; 7] = [
        Self::LoaderCpu,
        Self::LoaderFetch,
        Self::Gpu,
        Self::Communication,
        Self::Straggler,
        Self::CpuNoise,
        Self::Host,
    ];

    /// Name of the bottleneck on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::LoaderCpu => "loader-cpu",
            Self::LoaderFetch => "loader-fetch",
            Self::Gpu => "gpu",
            Self::Communication => "communication",
            Self::Straggler => "straggler",
            Self::CpuNoise => "cpu-noise",
            Self::Host => "host",
        }
    }
}

/// How a loader gets the data of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoadMethod {
    /// The loader computes.
    Burn,
    /// The loader reads a file without the page cache.
    Disk,
    /// The loader asks a server over the network.
    Network,
    /// The loader sleeps.
    Sleep,
}

/// A rank that is slower than the others, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowRank {
    /// The number of the slow rank.
    pub rank: u32,
    /// The part of the rank's work that is slow.
    pub how: SlownessCause,
    /// Additional time of each step in microseconds. Not used for [`SlownessCause::BusyCpu`].
    pub extra_step_us: u64,
}

/// The part of a rank's work that makes it slower than the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SlownessCause {
    /// The loaders of the rank need more CPU time for a batch.
    SlowLoaderCpu,
    /// The kernels of the rank take longer.
    SlowKernels,
    /// The training thread of the rank needs more CPU time for each launch.
    SlowLaunches,
    /// Spinning processes use the CPU of the rank.
    BusyCpu,
    /// The storage that the rank's loaders read from is slower.
    SlowStorage,
}

impl SlownessCause {
    /// All causes.
    pub const ALL: [Self; 5] = [
        Self::SlowLoaderCpu,
        Self::SlowKernels,
        Self::SlowLaunches,
        Self::BusyCpu,
        Self::SlowStorage,
    ];
}

/// Everything that a job does. Times are means; the times of each step are drawn at random around them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobPlan {
    /// The bottleneck of the job.
    pub cause: Bottleneck,
    /// The seed of all random choices of the job.
    pub seed: u64,
    /// Number of ranks.
    pub ranks: u32,
    /// Number of optimizer steps.
    pub steps: u32,
    /// Largest deviation of a time from its mean, as a share of the mean.
    pub jitter: f64,
    /// Number of loaders of each rank. If it is 0, the training thread prepares its batches itself and does not
    /// announce that.
    pub loaders: usize,
    /// Number of batches that are requested from each loader in advance.
    pub prefetch: usize,
    /// How loaders get the data of a batch.
    pub load_method: LoadMethod,
    /// Time in which a loader gets the data of a batch.
    pub load_us: u64,
    /// Size of a batch in bytes.
    pub batch_bytes: usize,
    /// Number of kernels in a forward pass; a backward pass has twice as many.
    pub launches: u32,
    /// CPU time that the training thread uses before each launch.
    pub launch_us: u64,
    /// GPU time of each kernel.
    pub kernel_us: u64,
    /// Number of kernels in an optimizer step.
    pub optimizer_launches: u32,
    /// Number of all-reduces in a step: buckets of gradients.
    pub buckets: u32,
    /// Size of the gradients in each all-reduce, in bytes.
    pub bucket_bytes: u64,
    /// Speed of an all-reduce in bytes per second.
    pub link_bytes_per_second: u64,
    /// Whether the loss is read back only after the all-reduces, which then run beside the backward pass.
    pub overlaps_reductions: bool,
    /// Whether data is read back from the GPU to pinned memory. With pageable memory the call returns only after the
    /// copy.
    pub pins_host_memory: bool,
    /// Whether threads that wait for the GPU spin, which is the driver's default; otherwise they sleep.
    pub spins_for_gpu: bool,
    /// Number of threads of each rank that are always busy and that no other thread waits for.
    pub busy_threads: u32,
    /// Number of spinning processes on each of the job's CPUs.
    pub spinners: u32,
    /// Whether each rank has to stay on one CPU, with its loaders and spinners.
    pub stays_on_cpus: bool,
    /// The rank that is slower than the others, if there is one.
    pub slow: Option<SlowRank>,
    /// Number of micro-batches in an optimizer step.
    pub micro_batches_per_step: u32,
    /// Number of steps between two evaluations; 0: no evaluation.
    pub evaluate_every: u32,
    /// Number of batches in an evaluation.
    pub evaluate_batches: u32,
    /// Number of steps between two checkpoints; 0: no checkpoint.
    pub checkpoint_every: u32,
    /// Size of a checkpoint in bytes.
    pub checkpoint_bytes: usize,
    /// Number of slow steps at the start.
    pub warm_up_steps: u32,
    /// CPU time in microseconds that each slow step at the start takes in addition.
    pub warm_up_us: u64,
    /// Whether the job behaves like a training loop of `PyTorch`: it announces its parts through functions of the
    /// stand-in library, and another thread runs its backward passes.
    pub announces_as_pytorch: bool,
    /// Time to reduce gradients through the CPU at the end of each backward pass of such a loop; 0: they are not
    /// reduced there.
    pub gloo_us: u64,
    /// Whether the thread that runs the backward passes also updates the model, and no optimizer step follows.
    pub updates_in_backward: bool,
    /// Whether the job only runs forward passes, on batches that are on the GPU already.
    pub only_infers: bool,
    /// Whether such a loop of `PyTorch` calls a layer in each forward pass.
    pub has_layers: bool,
}

/// Approximate time for which a job trains, in microseconds.
const TARGET_TRAINING_US: u64 = 2_600_000;

impl JobPlan {
    /// Makes the plan of a job with the bottleneck `cause`.
    #[must_use]
    pub fn new(cause: Bottleneck, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed ^ (cause as u64) << 32);
        let mut plan = Self::without_bottleneck(cause, seed, &mut random);
        plan.add_bottleneck(&mut random);
        plan.steps = (TARGET_TRAINING_US / plan.slowest_step_us()) as u32;
        plan
    }

    /// Number of all kernel launches of a rank.
    #[must_use]
    pub fn launches_per_rank(&self) -> u32 {
        // A backward pass has two launches for each launch of the forward pass, and NCCL launches one kernel per
        // collective.
        let step = self.micro_batches_per_step * 3 * self.launches
            + self.optimizer_launches
            + self.buckets;
        let evaluations = self.steps.checked_div(self.evaluate_every).unwrap_or(0);
        self.steps * step + evaluations * self.evaluate_batches * self.launches
    }

    /// A plan without a bottleneck, with steps of some milliseconds.
    fn without_bottleneck(cause: Bottleneck, seed: u64, random: &mut fastrand::Rng) -> Self {
        Self {
            cause,
            seed,
            ranks: 2,
            steps: 0,
            jitter: random.u64(10..=30) as f64 / 100.0,
            loaders: random.usize(1..=2),
            prefetch: 2,
            load_method: LoadMethod::Burn,
            load_us: random.u64(500..1_000),
            batch_bytes: random.usize(16..=64) << 10,
            launches: random.u32(8..=16),
            launch_us: random.u64(5..=15),
            kernel_us: random.u64(80..=160),
            optimizer_launches: random.u32(2..=6),
            buckets: random.u32(1..=4),
            bucket_bytes: random.u64(32..=64) << 10,
            link_bytes_per_second: 1 << 30,
            overlaps_reductions: false,
            pins_host_memory: true,
            spins_for_gpu: false,
            busy_threads: 0,
            spinners: 0,
            stays_on_cpus: false,
            slow: None,
            micro_batches_per_step: 1,
            evaluate_every: 0,
            evaluate_batches: 0,
            checkpoint_every: 0,
            checkpoint_bytes: 0,
            warm_up_steps: 2,
            warm_up_us: random.u64(20_000..50_000),
            announces_as_pytorch: false,
            gloo_us: 0,
            updates_in_backward: false,
            only_infers: false,
            has_layers: false,
        }
    }

    fn add_bottleneck(&mut self, random: &mut fastrand::Rng) {
        let hindrance_us = random.u64(22_000..34_000);
        let kernels = u64::from(3 * self.launches);
        match self.cause {
            Bottleneck::LoaderCpu => {
                // One loader for each rank, so that loaders of a rank do not wait for each other's CPUs.
                self.loaders = 1;
                self.load_us = hindrance_us;
            }
            Bottleneck::LoaderFetch => {
                self.load_method =
                    [LoadMethod::Disk, LoadMethod::Network][(self.seed % 2) as usize];
                self.load_us = hindrance_us * self.loaders as u64;
            }
            Bottleneck::Gpu => {
                self.kernel_us = hindrance_us / kernels;
                self.pins_host_memory = self.seed.is_multiple_of(2);
            }
            Bottleneck::Communication => {
                let bytes = u64::from(self.buckets) * self.bucket_bytes;
                self.link_bytes_per_second = bytes * 1_000_000 / hindrance_us;
            }
            Bottleneck::Straggler => {
                let how = SlownessCause::ALL[(self.seed % 5) as usize];
                let rank = random.u32(0..self.ranks);
                self.slow = Some(SlowRank {
                    rank,
                    how,
                    extra_step_us: hindrance_us,
                });
                if how == SlownessCause::BusyCpu {
                    self.loaders = 1;
                    self.load_us = hindrance_us / 2;
                    self.stays_on_cpus = true;
                }
            }
            Bottleneck::CpuNoise => {
                self.loaders = 1;
                self.load_us = hindrance_us / 2;
                self.stays_on_cpus = true;
                self.spinners = random.u32(4..=5);
            }
            Bottleneck::Host => {
                self.launches = random.u32(100..=200);
                self.launch_us = hindrance_us / u64::from(3 * self.launches);
                self.kernel_us = 3;
            }
        }
    }

    /// Approximate step time of the slowest rank.
    fn slowest_step_us(&self) -> u64 {
        let of_ranks = (0..self.ranks).map(|rank| self.for_rank(rank).step_us());
        of_ranks.max().unwrap_or(1).max(1)
    }

    fn step_us(&self) -> u64 {
        let delayed = 1 + u64::from(self.spinners);
        let load_us = match self.load_method {
            LoadMethod::Burn => self.load_us * delayed,
            LoadMethod::Disk | LoadMethod::Network | LoadMethod::Sleep => self.load_us,
        };
        let kernels = u64::from(3 * self.launches);
        let bytes = u64::from(self.buckets) * self.bucket_bytes;
        let compute_us = kernels * self.kernel_us.max(self.launch_us);
        let reduce_us = bytes * 1_000_000 / self.link_bytes_per_second;
        (compute_us + reduce_us).max(load_us / self.loaders as u64)
    }

    /// The plan of one rank. A slow rank has longer times in its plan.
    #[must_use]
    pub fn for_rank(&self, rank: u32) -> Self {
        let mut plan = self.clone();
        let Some(slow) = self.slow.filter(|slow| slow.rank == rank) else {
            return plan;
        };
        let kernels = u64::from(3 * self.launches);
        match slow.how {
            SlownessCause::SlowLoaderCpu => {
                plan.loaders = 1;
                plan.load_us = slow.extra_step_us;
            }
            SlownessCause::SlowStorage => {
                plan.load_method = LoadMethod::Network;
                plan.load_us = slow.extra_step_us * plan.loaders as u64;
            }
            SlownessCause::SlowKernels => plan.kernel_us += slow.extra_step_us / kernels,
            SlownessCause::SlowLaunches => plan.launch_us += slow.extra_step_us / kernels,
            SlownessCause::BusyCpu => plan.spinners = 4,
        }
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_determines_job_plan() {
        for cause in Bottleneck::ALL {
            assert_eq!(JobPlan::new(cause, 3), JobPlan::new(cause, 3));
            let mut steps: Vec<u32> = (0..5).map(|seed| JobPlan::new(cause, seed).steps).collect();
            steps.sort_unstable();
            steps.dedup();
            assert!(steps.len() > 2, "{cause:?}: {steps:?}");
            assert!(steps[0] > 20, "{cause:?}: {steps:?}");
        }
    }

    #[test]
    fn plan_differs_only_for_slow_rank() {
        for seed in 0..5 {
            let plan = JobPlan::new(Bottleneck::Straggler, seed);
            let slow = plan.slow.unwrap();
            assert_eq!(plan.for_rank(1 - slow.rank), plan);
            assert_ne!(plan.for_rank(slow.rank), plan);
        }
    }
}
