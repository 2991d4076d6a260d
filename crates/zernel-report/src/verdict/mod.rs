//! What bounds a training job, and the evidence for it.
//!
//! | module | subject |
//! |---|---|
//! | `job` | the times of all ranks, as the rules use them |
//! | `slowest` | the rank that the others wait for |
//! | `straggler` | verdict: one rank keeps its peers waiting |
//! | `resource` | the verdicts that one resource takes the time: what they share, and their rule |
//! | `input`, `cpu_scheduler`, `cpu_limit`, `communication`, `gpu`, `host` | verdict: this resource takes the time |
//! | `inference` | the evidence that a job does not train |
//! | `next_step` | things to try, with the line of `PyTorch` that does each |
//! | `inconclusive` | verdict: the evidence does not point at one cause |
//!
//! A file has all of its verdict: the data, the rule that gives it, the sentences and the tests. This file lists the
//! verdicts and the order of the rules. So a new verdict needs a file, and here a variant, its arm in
//! [`Verdict::describe`] and an entry in [`VERDICT_RULES`] or [`BOUNDING_RESOURCES`]. A figure that it lacks goes into
//! `times`.

mod communication;
mod cpu_limit;
mod cpu_scheduler;
mod gpu;
mod host;
mod inconclusive;
mod inference;
mod input;
mod job;
mod next_step;
mod resource;
mod slowest;
mod straggler;
#[cfg(test)]
pub(crate) mod tests;

use serde::{Serialize, Serializer};

use crate::times::{RankTimes, TimePart};
use communication::CommunicationBound;
use cpu_limit::CpuLimitBound;
use cpu_scheduler::CpuSchedulerBound;
use gpu::GpuBound;
use host::HostBound;
pub(crate) use inconclusive::Inconclusive;
use input::InputBound;
use job::JobTimes;
pub(crate) use next_step::NextStep;
use resource::Resource;
pub(crate) use slowest::{SlowestRank, find_slowest_rank};
use straggler::Straggler;

/// What bounds a job.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Verdict {
    Straggler(Straggler),
    Input(InputBound),
    CpuScheduler(CpuSchedulerBound),
    CpuLimit(CpuLimitBound),
    Communication(CommunicationBound),
    Gpu(GpuBound),
    Host(HostBound),
    CannotTell(Inconclusive),
}

impl Verdict {
    pub(crate) fn describe(&self) -> VerdictDescription {
        match self {
            Self::Straggler(straggler) => straggler.describe(),
            Self::Input(bound) => bound.describe(),
            Self::CpuScheduler(bound) => bound.describe(),
            Self::CpuLimit(bound) => bound.describe(),
            Self::Communication(bound) => bound.describe(),
            Self::Gpu(bound) => bound.describe(),
            Self::Host(bound) => bound.describe(),
            Self::CannotTell(reason) => reason.describe(),
        }
    }
}

/// Gives a verdict, if it applies to the job.
type VerdictRule = fn(&JobTimes) -> Option<Verdict>;

/// The rules. The first rule that applies gives the verdict.
const VERDICT_RULES: &[VerdictRule] = &[
    inconclusive::judge_too_little_evidence,
    straggler::judge_straggler,
    input::judge_saturated_loaders,
    resource::judge_dominant_resource,
];

/// The resources. If several take the same time, the first in this list counts as the largest.
static BOUNDING_RESOURCES: &[&Resource] = &[
    &input::RESOURCE,
    &cpu_scheduler::RESOURCE,
    &cpu_limit::RESOURCE,
    &communication::RESOURCE,
    &gpu::RESOURCE,
    &host::RESOURCE,
];

/// Judges what bounds a job.
pub(crate) fn judge_ranks(ranks: &[RankTimes]) -> Verdict {
    let job = JobTimes::new(ranks);
    let verdict = VERDICT_RULES.iter().find_map(|rule| rule(&job));
    verdict.unwrap_or_else(|| inconclusive::no_dominant_resource_verdict(&job))
}

/// What the report shows of a verdict. The JSON form has the same keys for every verdict, `null` where one has no such
/// value.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct VerdictDescription {
    #[serde(skip)]
    pub(crate) title: &'static str,
    /// The resource, `straggler` or `cannot-tell`.
    pub(crate) bound: &'static str,
    /// The largest part of the resource's time, or what a straggler spent more time in than its peers.
    pub(crate) cause: Option<TimePart>,
    /// The straggler's index in the list of ranks.
    pub(crate) straggler: Option<usize>,
    /// The measurements behind the verdict. The reader knows which rank is the straggler.
    pub(crate) evidence: String,
    /// Things to try that would make the job faster.
    pub(crate) helps: Option<&'static str>,
    /// The changes of `helps` in detail: at most three, each supported by what was measured.
    pub(crate) next_steps: Vec<NextStep>,
    /// The share of the time of all ranks that the verdict is about.
    pub(crate) share: Option<f64>,
    /// By how many seconds the job can get shorter at most.
    pub(crate) at_most_seconds: Option<f64>,
}

impl Serialize for Verdict {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.describe().serialize(serializer)
    }
}
