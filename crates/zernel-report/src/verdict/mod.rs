//! What bounds a training job, and the evidence for it.
//!
//! | module | subject |
//! |---|---|
//! | `judge` | which verdict the times of the ranks give |
//! | `slowest` | the rank that the others wait for |
//! | `wording` | verdict, evidence and remedy in words |
//!
//! A verdict is data. Its JSON form is here, its sentences are in `wording`. A new verdict needs a variant here, the
//! rule that gives it in `judge` and its sentence in `wording`.

mod judge;
mod slowest;
#[cfg(test)]
mod tests;
mod wording;

use serde::{Serialize, Serializer};

use super::times::Part;
pub(crate) use judge::judge;
pub(crate) use slowest::{Slowest, slowest};

/// What bounds a job.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Verdict {
    /// One resource takes the time of all ranks.
    Bound(Bound),
    /// One rank keeps its peers waiting.
    Straggler(Straggler),
    /// The evidence does not point at one cause.
    CannotTell(Inconclusive),
}

/// A resource that a job waits for or works with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Resource {
    /// The data loaders.
    Input,
    /// A free CPU.
    CpuScheduler,
    /// Collectives with other ranks.
    Communication,
    Gpu,
    /// The training threads' own work on CPUs.
    Host,
}

impl Resource {
    pub(crate) const ALL: [Self; 5] = [
        Self::Input,
        Self::CpuScheduler,
        Self::Communication,
        Self::Gpu,
        Self::Host,
    ];

    /// The parts of a rank's time that this resource takes.
    fn parts(self) -> &'static [Part] {
        match self {
            Self::Input => &[Part::Prepare, Part::Fetch, Part::OtherData],
            Self::CpuScheduler => &[Part::CpuDelay],
            Self::Communication => &[Part::Communication],
            Self::Gpu => &[Part::Gpu],
            Self::Host => &[Part::Host],
        }
    }
}

/// Wall time of all ranks together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TotalTime {
    pub(crate) ranks: usize,
    pub(crate) wall_seconds: f64,
}

/// A job that is bound by one resource. Seconds are sums over all ranks, unless stated otherwise.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Bound {
    pub(crate) evidence: Evidence,
    /// Time that the resource took.
    pub(crate) seconds: f64,
    pub(crate) total: TotalTime,
    /// The other resources with a share worth mentioning, largest first.
    pub(crate) others: Vec<(Resource, f64)>,
    pub(crate) remedy: Remedy,
    /// By how much the job can get shorter at most: the largest time of one rank.
    pub(crate) at_most_seconds: f64,
}

/// The resource that bounds a job, with what was measured about it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Evidence {
    /// Waits for data, by what the loaders did meanwhile.
    Input {
        prepare: f64,
        fetch: f64,
        other: f64,
    },
    /// Time in which threads were runnable without a CPU.
    CpuScheduler {
        loaders: f64,
        ranks: f64,
    },
    Communication,
    Gpu {
        /// Waits for the GPU in which collectives may have run.
        collectives: f64,
        /// Host work that counts as waiting, because the GPU was never idle.
        ahead: f64,
    },
    Host {
        gpu: GpuActivity,
    },
}

/// What the GPUs did while the training threads ran.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum GpuActivity {
    /// No rank used a GPU.
    Unused,
    /// NVML reported no utilization.
    NotReported,
    /// Share of the time in which they were busy, as NVML reports it.
    Busy(f64),
}

impl Evidence {
    pub(crate) fn resource(self) -> Resource {
        match self {
            Self::Input { .. } => Resource::Input,
            Self::CpuScheduler { .. } => Resource::CpuScheduler,
            Self::Communication => Resource::Communication,
            Self::Gpu { .. } => Resource::Gpu,
            Self::Host { .. } => Resource::Host,
        }
    }

    /// The part of the time that the resource took most of.
    pub(crate) fn cause(self) -> Part {
        match self {
            Self::Input {
                prepare,
                fetch,
                other,
            } => {
                let (part, most) = match fetch >= prepare {
                    true => (Part::Fetch, fetch),
                    false => (Part::Prepare, prepare),
                };
                if other >= most { Part::OtherData } else { part }
            }
            Self::CpuScheduler { .. } => Part::CpuDelay,
            Self::Communication => Part::Communication,
            Self::Gpu { .. } => Part::Gpu,
            Self::Host { .. } => Part::Host,
        }
    }
}

/// One rank that keeps its peers waiting.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Straggler {
    pub(crate) slowest: Slowest,
    /// Time that a peer waits for it, on average. The job can get shorter by this at most.
    pub(crate) waited_seconds: f64,
    /// Wall time of a peer, on average.
    pub(crate) peer_wall_seconds: f64,
    /// Share of the time of all ranks that the peers wait.
    pub(crate) share: f64,
    pub(crate) remedy: Remedy,
}

/// Why there is no verdict.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Inconclusive {
    NotObserved,
    NoRanks,
    TooShort {
        longest_seconds: f64,
    },
    MostlyUnknown {
        unknown_seconds: f64,
        total: TotalTime,
    },
    /// No resource has a dominant share.
    NothingDominates {
        /// The resources with a share worth mentioning, largest first.
        shares: Vec<(Resource, f64)>,
        total: TotalTime,
    },
}

/// What would make the job faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Remedy {
    MoreLoaders,
    CheaperPreprocessing,
    FasterStorage,
    CheckDataSource,
    FewerThreads,
    OverlapCollectives,
    FasterGpu,
    FasterGpuOrFewerBytes,
    AddGpu,
    LessHostWork,
    DumpStack,
}

impl Verdict {
    /// The resource, `straggler` or `cannot-tell`.
    fn key(&self) -> Key {
        match self {
            Self::Bound(bound) => Key::Bound(bound.evidence.resource()),
            Self::Straggler(_) => Key::Outcome("straggler"),
            Self::CannotTell(_) => Key::Outcome("cannot-tell"),
        }
    }

    /// The largest part of the resource's time, or what a straggler spent more time in than its peers.
    pub(crate) fn cause(&self) -> Option<Part> {
        match self {
            Self::Bound(bound) => Some(bound.evidence.cause()),
            Self::Straggler(straggler) => straggler.slowest.reason,
            Self::CannotTell(_) => None,
        }
    }

    /// The straggler's index in the list of ranks.
    pub(crate) fn straggler(&self) -> Option<usize> {
        match self {
            Self::Straggler(straggler) => Some(straggler.slowest.index),
            Self::Bound(_) | Self::CannotTell(_) => None,
        }
    }

    pub(crate) fn remedy(&self) -> Option<Remedy> {
        match self {
            Self::Bound(bound) => Some(bound.remedy),
            Self::Straggler(straggler) => Some(straggler.remedy),
            Self::CannotTell(_) => None,
        }
    }

    /// The share of the time of all ranks that the verdict is about.
    pub(crate) fn share(&self) -> Option<f64> {
        match self {
            Self::Bound(bound) => Some(bound.seconds / bound.total.wall_seconds),
            Self::Straggler(straggler) => Some(straggler.share),
            Self::CannotTell(_) => None,
        }
    }

    /// By how many seconds the job can get shorter at most.
    pub(crate) fn at_most_seconds(&self) -> Option<f64> {
        match self {
            Self::Bound(bound) => Some(bound.at_most_seconds),
            Self::Straggler(straggler) => Some(straggler.waited_seconds),
            Self::CannotTell(_) => None,
        }
    }
}

#[derive(Serialize)]
#[serde(untagged)]
enum Key {
    Bound(Resource),
    Outcome(&'static str),
}

/// The JSON form of a verdict: the same keys for every kind, `null` where one has no such value.
#[derive(Serialize)]
struct VerdictJson {
    bound: Key,
    cause: Option<Part>,
    straggler: Option<usize>,
    evidence: String,
    helps: Option<&'static str>,
    share: Option<f64>,
    at_most_seconds: Option<f64>,
}

impl Serialize for Verdict {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let json = VerdictJson {
            bound: self.key(),
            cause: self.cause(),
            straggler: self.straggler(),
            evidence: self.evidence(),
            helps: self.remedy().map(Remedy::text),
            share: self.share(),
            at_most_seconds: self.at_most_seconds(),
        };
        json.serialize(serializer)
    }
}
