//! A rank's time, split into parts that do not overlap.

use serde::Serialize;

/// Longest launch, in seconds, that does not wait for room in the GPU's queue.
const LONGEST_LAUNCH: f64 = 50e-6;
/// Busy share from which a GPU counts as never idle.
const NEVER_IDLE: f64 = 0.9;

/// Measured times of one rank, in seconds. They may overlap.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct RankTimes {
    pub(crate) wall: f64,
    /// In phase NcclCollective, or in waits for peers if those are longer.
    pub(crate) communication: f64,
    /// In calls that wait for the GPU.
    pub(crate) gpu_waits: f64,
    /// The part of `gpu_waits` in which only collectives were pending.
    pub(crate) peer_waits: f64,
    /// From the call of a collective to the end of the wait that covers it, without overlaps.
    pub(crate) until_sync: f64,
    /// In launch calls.
    pub(crate) launching: f64,
    /// Number of launches.
    pub(crate) launches: f64,
    /// In phase Unknown.
    pub(crate) unknown: f64,
    /// In waits for data.
    pub(crate) data_waits: f64,
    /// The part of `data_waits` in which loaders ran on CPUs.
    pub(crate) data_prepare: f64,
    /// The part of `data_waits` in which loaders waited for disk or network.
    pub(crate) data_fetch: f64,
    /// The part of `data_waits` in which loaders were runnable without a CPU.
    pub(crate) data_sched: f64,
    /// Its training threads ran on CPUs.
    pub(crate) cpu: f64,
    /// Its training threads were runnable without a CPU.
    pub(crate) run_delay: f64,
    /// Its GPUs were busy. `None`: NVML reports no utilization.
    pub(crate) gpu_busy: Option<f64>,
    /// Share of the time in which its busiest loader worked. `None`: it has no loaders.
    pub(crate) loader_busy: Option<f64>,
    /// Whether it has as many loaders as CPUs.
    pub(crate) loaders_fill_cpus: bool,
}

/// A part of a rank's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Part {
    /// Waiting for data while loaders ran on CPUs.
    Prepare,
    /// Waiting for data while loaders waited for disk or network.
    Fetch,
    /// Waiting for data while loaders did neither.
    OtherData,
    /// Runnable without a CPU: its training threads, or the loaders that it waited for.
    CpuDelay,
    /// Waiting for peers.
    Communication,
    /// Waiting for the GPU.
    Gpu,
    /// Running on a CPU.
    Host,
}

impl Part {
    pub(crate) const ALL: [Self; 7] = [
        Self::Prepare,
        Self::Fetch,
        Self::OtherData,
        Self::CpuDelay,
        Self::Communication,
        Self::Gpu,
        Self::Host,
    ];

    /// Whether this is a wait for data.
    pub(crate) fn is_data_wait(self) -> bool {
        matches!(self, Self::Prepare | Self::Fetch | Self::OtherData)
    }
}

/// The parts of a rank's time. Time in none of them is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Parts {
    seconds: [f64; Part::ALL.len()],
    /// The loaders' share of [`Part::CpuDelay`].
    pub(crate) data_delay: f64,
    /// Host work that counts as [`Part::Gpu`], because the GPU was never idle.
    pub(crate) ahead_of_gpu: f64,
    /// Busy share of its GPUs. `None`: NVML reports no utilization.
    pub(crate) gpu_busy: Option<f64>,
    /// Whether it launched on a GPU or waited for one.
    pub(crate) uses_gpu: bool,
    /// Whether it has as many loaders as CPUs.
    pub(crate) loaders_fill_cpus: bool,
    /// Waits for the GPU in which collectives may have run.
    pub(crate) shared_with_collectives: f64,
}

/// The time of a rank that no part has taken yet.
struct Remaining(f64);

impl Remaining {
    fn take(&mut self, seconds: f64) -> f64 {
        let taken = seconds.clamp(0.0, self.0);
        self.0 -= taken;
        taken
    }
}

impl Parts {
    /// Splits a rank's time. Waits come first, because a thread waits for one thing at a time. CPU delay and host work
    /// get what remains, up to what was measured.
    pub(crate) fn new(rank: &RankTimes) -> Self {
        let mut remaining = Remaining(rank.wall.max(0.0));
        let mut parts = Self::default();
        let prepare = remaining.take(rank.data_prepare);
        let fetch = remaining.take(rank.data_fetch);
        let data_delay = remaining.take(rank.data_sched);
        let explained = rank.data_prepare + rank.data_fetch + rank.data_sched;
        let other = remaining.take(rank.data_waits - explained);
        let communication = remaining.take(rank.communication);
        let blocked_launches = rank.launching - LONGEST_LAUNCH * rank.launches;
        let gpu =
            remaining.take((rank.gpu_waits - rank.peer_waits).max(0.0) + blocked_launches.max(0.0));
        let delay = remaining.take(rank.run_delay);
        let uses_gpu = rank.launches > 0.0 || rank.gpu_waits > 0.0;
        // Without a GPU almost all time is in phase Unknown, although the CPU time is known.
        let unknown = if uses_gpu { rank.unknown } else { 0.0 };
        // A thread may spin while it waits. That time was taken by a wait above.
        let host = remaining.take((remaining.0 - unknown).min(rank.cpu));
        // A rank that keeps its GPU busy all the time is limited by it, even if it waits elsewhere or not at all.
        let is_ahead = rank.gpu_busy >= Some(NEVER_IDLE * rank.wall) && rank.wall > 0.0;
        let ahead_of_gpu = if is_ahead { host } else { 0.0 };
        let (gpu, host) = (gpu + ahead_of_gpu, host - ahead_of_gpu);
        for (part, seconds) in [
            (Part::Prepare, prepare),
            (Part::Fetch, fetch),
            (Part::OtherData, other),
            (Part::CpuDelay, data_delay + delay),
            (Part::Communication, communication),
            (Part::Gpu, gpu),
            (Part::Host, host),
        ] {
            parts.seconds[part as usize] = seconds;
        }
        parts.data_delay = data_delay;
        parts.ahead_of_gpu = ahead_of_gpu;
        parts.gpu_busy = rank.gpu_busy.map(|busy| busy / rank.wall.max(f64::EPSILON));
        parts.uses_gpu = uses_gpu;
        parts.loaders_fill_cpus = rank.loaders_fill_cpus;
        parts.shared_with_collectives = (rank.until_sync - communication).clamp(0.0, gpu);
        parts
    }

    /// Seconds in a part.
    pub(crate) fn seconds_in(&self, part: Part) -> f64 {
        self.seconds[part as usize]
    }

    pub(crate) fn total(&self) -> f64 {
        self.seconds.iter().sum()
    }

    /// Moves time from [`Part::Communication`] to another part.
    pub(crate) fn reassign_communication(&mut self, part: Part, seconds: f64) {
        let taken = seconds.clamp(0.0, self.seconds_in(Part::Communication));
        self.seconds[Part::Communication as usize] -= taken;
        self.seconds[part as usize] += taken;
    }
}
