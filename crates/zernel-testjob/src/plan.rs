//! The plan of a job: its parts and their durations.

use serde::{Deserialize, Serialize};

/// The bottleneck of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Bottleneck {
    /// Loaders compute longer for a batch than the step takes.
    LoaderCpu,
    /// Loaders wait longer for storage than the step takes: a disk for even seeds, a server for odd ones.
    LoaderFetch,
    /// Kernels take most of the time.
    Gpu,
    /// The transfer of gradients takes most of the time.
    Communication,
    /// One rank is slower than the other, in one of five ways that the seed chooses.
    Straggler,
    /// Other processes use the CPUs of ranks and loaders.
    CpuNoise,
    /// Kernels are small, and the thread that launches them takes longer than they do.
    Host,
}

impl Bottleneck {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::LoaderCpu,
        Self::LoaderFetch,
        Self::Gpu,
        Self::Communication,
        Self::Straggler,
        Self::CpuNoise,
        Self::Host,
    ];

    /// Name of the cause on a command line.
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

/// How a loader gets a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoadMethod {
    /// The loader computes.
    Burn,
    /// The loader reads a file past the page cache.
    Disk,
    /// The loader asks a server.
    Network,
    /// The loader sleeps.
    Sleep,
}

/// A rank that is slower than the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowRank {
    /// The rank.
    pub rank: u32,
    /// The part of its work that is slower.
    pub how: SlownessCause,
    /// How long in each step; spinners on its CPU for [`SlownessCause::Delayed`].
    pub by_us: u64,
}

/// The part of a rank's work that is slower.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SlownessCause {
    /// Its loaders compute longer.
    Prepares,
    /// Its kernels take longer.
    Computes,
    /// The training thread of the rank needs more CPU time for each launch.
    Launches,
    /// Other processes use the CPU of the rank.
    Delayed,
    /// Its storage is slower.
    Fetches,
}

impl SlownessCause {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Prepares,
        Self::Computes,
        Self::Launches,
        Self::Delayed,
        Self::Fetches,
    ];
}

/// A whole job. Times are means; the times of each step are drawn around them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobPlan {
    /// The bottleneck.
    pub cause: Bottleneck,
    /// The seed of all random choices.
    pub seed: u64,
    /// Ranks.
    pub ranks: u32,
    /// Optimizer steps.
    pub steps: u32,
    /// Largest deviation of a time from its mean, as a share of the mean.
    pub jitter: f64,
    /// Loaders of each rank. 0: the training thread prepares its batches itself, and announces none.
    pub loaders: usize,
    /// Batches requested from each loader in advance.
    pub prefetch: usize,
    /// How they get a batch.
    pub load: LoadMethod,
    /// How long that takes them.
    pub load_us: u64,
    /// Size of a batch.
    pub batch_bytes: usize,
    /// Kernels of a forward pass; a backward pass has twice as many.
    pub launches: u32,
    /// CPU time before each launch.
    pub launch_us: u64,
    /// GPU time of each kernel.
    pub kernel_us: u64,
    /// Kernels of the optimizer.
    pub optimizer_launches: u32,
    /// All-reduces of a step.
    pub buckets: u32,
    /// Size of each.
    pub bucket_bytes: u64,
    /// How fast they are.
    pub link_bytes_per_second: u64,
    /// Whether the loss is read back only after the all-reduces, which then run beside the backward pass.
    pub overlaps: bool,
    /// Whether data is read back to pinned memory. Otherwise the call returns only after the copy.
    pub pins: bool,
    /// Whether threads that wait for the GPU spin, as the driver's default is; else they sleep.
    pub spins: bool,
    /// Threads of each rank that are always busy and that no other thread waits for.
    pub busy_threads: u32,
    /// Spinning processes on each of the job's CPUs.
    pub spinners: u32,
    /// Whether each rank has to stay on a CPU with its loaders and spinners.
    pub stays_on_cpus: bool,
    /// A rank that is slower.
    pub slow: Option<SlowRank>,
    /// Micro-batches of an optimizer step.
    pub accumulate: u32,
    /// Steps between two evaluations; 0: no evaluation.
    pub evaluate_every: u32,
    /// Batches of an evaluation.
    pub evaluate_batches: u32,
    /// Steps between two checkpoints; 0: no checkpoint.
    pub checkpoint_every: u32,
    /// Size of a checkpoint.
    pub checkpoint_bytes: usize,
    /// Steps at the start that are slow.
    pub warm_up_steps: u32,
    /// CPU time that makes them slow.
    pub warm_up_us: u64,
    /// Whether the job is a loop of `PyTorch`: it announces what it does, and another thread runs its backward passes.
    pub torch: bool,
    /// Time to reduce gradients through the CPU at the end of each such backward pass; 0: they are not
    /// reduced.
    pub gloo_us: u64,
    /// Whether such a backward pass updates the model in its thread, and no optimizer step follows.
    pub updates_in_backward: bool,
    /// Whether the job only runs forward passes, on batches that the GPU has already.
    pub infers: bool,
}

/// Approximate time that a job trains.
const APPROXIMATE_TRAINING_US: u64 = 2_600_000;

impl JobPlan {
    /// A job with the bottleneck `cause`.
    #[must_use]
    pub fn new(cause: Bottleneck, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed ^ (cause as u64) << 32);
        let mut plan = Self::without_bottleneck(cause, seed, &mut random);
        plan.add_bottleneck(&mut random);
        plan.steps = (APPROXIMATE_TRAINING_US / plan.slowest_step_us()) as u32;
        plan
    }

    /// All launches of a rank.
    #[must_use]
    pub fn launches_per_rank(&self) -> u32 {
        // Backward takes two for each of forward, and NCCL one for each collective.
        let step = self.accumulate * 3 * self.launches + self.optimizer_launches + self.buckets;
        let evaluations = self.steps.checked_div(self.evaluate_every).unwrap_or(0);
        self.steps * step + evaluations * self.evaluate_batches * self.launches
    }

    /// A job without a bottleneck, with steps of some milliseconds.
    fn without_bottleneck(cause: Bottleneck, seed: u64, random: &mut fastrand::Rng) -> Self {
        Self {
            cause,
            seed,
            ranks: 2,
            steps: 0,
            jitter: random.u64(10..=30) as f64 / 100.0,
            loaders: random.usize(1..=2),
            prefetch: 2,
            load: LoadMethod::Burn,
            load_us: random.u64(500..1_000),
            batch_bytes: random.usize(16..=64) << 10,
            launches: random.u32(8..=16),
            launch_us: random.u64(5..=15),
            kernel_us: random.u64(80..=160),
            optimizer_launches: random.u32(2..=6),
            buckets: random.u32(1..=4),
            bucket_bytes: random.u64(32..=64) << 10,
            link_bytes_per_second: 1 << 30,
            overlaps: false,
            pins: true,
            spins: false,
            busy_threads: 0,
            spinners: 0,
            stays_on_cpus: false,
            slow: None,
            accumulate: 1,
            evaluate_every: 0,
            evaluate_batches: 0,
            checkpoint_every: 0,
            checkpoint_bytes: 0,
            warm_up_steps: 2,
            warm_up_us: random.u64(20_000..50_000),
            torch: false,
            gloo_us: 0,
            updates_in_backward: false,
            infers: false,
        }
    }

    fn add_bottleneck(&mut self, random: &mut fastrand::Rng) {
        let hindrance_us = random.u64(22_000..34_000);
        let kernels = u64::from(3 * self.launches);
        match self.cause {
            Bottleneck::LoaderCpu => {
                // One for each rank, so that they do not wait for each other's CPUs.
                self.loaders = 1;
                self.load_us = hindrance_us;
            }
            Bottleneck::LoaderFetch => {
                self.load = [LoadMethod::Disk, LoadMethod::Network][(self.seed % 2) as usize];
                self.load_us = hindrance_us * self.loaders as u64;
            }
            Bottleneck::Gpu => {
                self.kernel_us = hindrance_us / kernels;
                self.pins = self.seed.is_multiple_of(2);
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
                    by_us: hindrance_us,
                });
                if how == SlownessCause::Delayed {
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

    /// About how long the slowest rank takes for a step.
    fn slowest_step_us(&self) -> u64 {
        let of_ranks = (0..self.ranks).map(|rank| self.for_rank(rank).step_us());
        of_ranks.max().unwrap_or(1).max(1)
    }

    fn step_us(&self) -> u64 {
        let delayed = 1 + u64::from(self.spinners);
        let load_us = match self.load {
            LoadMethod::Burn => self.load_us * delayed,
            LoadMethod::Disk | LoadMethod::Network | LoadMethod::Sleep => self.load_us,
        };
        let kernels = u64::from(3 * self.launches);
        let bytes = u64::from(self.buckets) * self.bucket_bytes;
        let compute_us = kernels * self.kernel_us.max(self.launch_us);
        let reduce_us = bytes * 1_000_000 / self.link_bytes_per_second;
        (compute_us + reduce_us).max(load_us / self.loaders as u64)
    }

    /// The plan of one rank. The slow rank has longer times.
    #[must_use]
    pub fn for_rank(&self, rank: u32) -> Self {
        let mut plan = self.clone();
        let Some(slow) = self.slow.filter(|slow| slow.rank == rank) else {
            return plan;
        };
        let kernels = u64::from(3 * self.launches);
        match slow.how {
            SlownessCause::Prepares => {
                plan.loaders = 1;
                plan.load_us = slow.by_us;
            }
            SlownessCause::Fetches => {
                plan.load = LoadMethod::Network;
                plan.load_us = slow.by_us * plan.loaders as u64;
            }
            SlownessCause::Computes => plan.kernel_us += slow.by_us / kernels,
            SlownessCause::Launches => plan.launch_us += slow.by_us / kernels,
            SlownessCause::Delayed => plan.spinners = 4,
        }
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_always_gives_the_same_plan() {
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
    fn only_the_slow_rank_is_slow() {
        for seed in 0..5 {
            let plan = JobPlan::new(Bottleneck::Straggler, seed);
            let slow = plan.slow.unwrap();
            assert_eq!(plan.for_rank(1 - slow.rank), plan);
            assert_ne!(plan.for_rank(slow.rank), plan);
        }
    }
}
