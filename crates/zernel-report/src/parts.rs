//! Where the time of a rank went, in parts that do not overlap.

use serde::Serialize;

/// No launch takes so long but one that waits because the GPU's queue is full, in seconds.
const LONGEST_LAUNCH: f64 = 50e-6;
/// A GPU that is busy for this share of the time waits for nobody.
const NEVER_IDLE: f64 = 0.9;

/// What was seen of one rank, in seconds; these may overlap.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct RankTimes {
    pub(crate) wall: f64,
    /// In phase NcclCollective, with nothing but collectives to wait for, or in waits for peers without such phases.
    pub(crate) communication: f64,
    /// In calls that wait for the GPU, for whatever it had to do.
    pub(crate) gpu_waits: f64,
    /// Of these, the ones with nothing but collectives to wait for.
    pub(crate) peer_waits: f64,
    /// From calling collectives to the ends of waits that cover them, as far as they do not overlap.
    pub(crate) until_sync: f64,
    /// In calls that launch, and how many there were.
    pub(crate) launching: f64,
    pub(crate) launches: f64,
    /// In no phase, or in one that nobody accounts for.
    pub(crate) unknown: f64,
    /// Waits for data, and of these: the loaders were on CPUs, waited for disk or network, could have run
    /// and did not.
    pub(crate) data_waits: f64,
    pub(crate) data_prepare: f64,
    pub(crate) data_fetch: f64,
    pub(crate) data_sched: f64,
    /// Its threads that take part in steps were on CPUs.
    pub(crate) cpu: f64,
    /// These could have run, and did not.
    pub(crate) run_delay: f64,
    /// Its GPUs had something to do, if they say so.
    pub(crate) gpu_busy: Option<f64>,
    /// The share of the time for which its loaders worked, if it has any.
    pub(crate) loader_busy: Option<f64>,
    /// Whether it has as many loaders as CPUs.
    pub(crate) loaders_fill_cpus: bool,
}

/// A part of a rank's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Part {
    /// It waited for data, and the loaders were on CPUs.
    Prepare,
    /// It waited for data, and the loaders for disk or network.
    Fetch,
    /// It waited for data, and the loaders did neither.
    OtherData,
    /// It or the loaders that it waited for could have run, and did not.
    CpuDelay,
    /// It waited for peers.
    Communication,
    /// It waited for the GPU.
    Gpu,
    /// It was at work itself.
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

    /// Whether it is what loaders do.
    pub(crate) fn is_data_wait(self) -> bool {
        matches!(self, Self::Prepare | Self::Fetch | Self::OtherData)
    }
}

/// The parts of a rank's time. What none of them has is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Parts {
    seconds: [f64; Part::ALL.len()],
    /// What of the delays was the loaders', while they were waited for.
    pub(crate) data_delay: f64,
    /// What of the GPU's time its threads were at work for, while it was busy all the time.
    pub(crate) ahead_of_gpu: f64,
    /// The share of the time in which its GPUs had something to do, if they say so.
    pub(crate) gpu_busy: Option<f64>,
    /// Whether it gave a GPU anything to do.
    pub(crate) uses_gpu: bool,
    /// Whether it has as many loaders as CPUs.
    pub(crate) loaders_fill_cpus: bool,
    /// Waits for the GPU in which it may have been at collectives.
    pub(crate) shared_with_collectives: f64,
}

/// What is left of a rank's time while parts are taken from it.
struct Rest(f64);

impl Rest {
    fn take(&mut self, seconds: f64) -> f64 {
        let taken = seconds.clamp(0.0, self.0);
        self.0 -= taken;
        taken
    }
}

impl Parts {
    /// Splits a rank's time. A thread waits for one thing at a time; delays and work are what is left, as
    /// far as they were seen.
    pub(crate) fn new(rank: &RankTimes) -> Self {
        let mut rest = Rest(rank.wall.max(0.0));
        let mut parts = Self::default();
        let prepare = rest.take(rank.data_prepare);
        let fetch = rest.take(rank.data_fetch);
        let data_delay = rest.take(rank.data_sched);
        let explained = rank.data_prepare + rank.data_fetch + rank.data_sched;
        let other = rest.take(rank.data_waits - explained);
        let communication = rest.take(rank.communication);
        let blocked_launches = rank.launching - LONGEST_LAUNCH * rank.launches;
        let gpu =
            rest.take((rank.gpu_waits - rank.peer_waits).max(0.0) + blocked_launches.max(0.0));
        let delay = rest.take(rank.run_delay);
        let uses_gpu = rank.launches > 0.0 || rank.gpu_waits > 0.0;
        // Without a GPU there are hardly any phases, and work on CPUs is all there is.
        let unknown = if uses_gpu { rank.unknown } else { 0.0 };
        // A thread that spins while it waits is on its CPU, too; that it waits is known already.
        let host = rest.take((rest.0 - unknown).min(rank.cpu));
        // Who gives the GPU more than it can do waits for it in the end, if only for a place in its queue.
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

    pub(crate) fn seconds_in(&self, part: Part) -> f64 {
        self.seconds[part as usize]
    }

    pub(crate) fn total(&self) -> f64 {
        self.seconds.iter().sum()
    }

    /// Takes time that was spent in collectives for something else.
    pub(crate) fn reassign_communication(&mut self, part: Part, seconds: f64) {
        let taken = seconds.clamp(0.0, self.seconds_in(Part::Communication));
        self.seconds[Part::Communication as usize] -= taken;
        self.seconds[part as usize] += taken;
    }
}
