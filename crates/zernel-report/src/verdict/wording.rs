//! A verdict, its evidence and its remedy in words.

use super::judge::{DOMINANT, MENTIONED, SHORTEST};
use super::{
    Bound, Evidence, GpuActivity, Inconclusive, Remedy, Resource, Slowest, Straggler, Verdict,
};
use crate::parts::Part;

impl Verdict {
    /// The verdict as a title.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Bound(bound) => match bound.evidence.resource() {
                Resource::Input => "input-bound",
                Resource::Gpu => "GPU-bound",
                Resource::Communication => "communication-bound",
                Resource::CpuScheduler => "CPU-scheduler-bound",
                Resource::Host => "host-bound",
            },
            Self::Straggler(_) => "straggler-bound",
            Self::CannotTell(_) => "can't tell",
        }
    }

    /// What the verdict rests on. The subject of a straggler's sentence is that rank.
    pub(crate) fn evidence(&self) -> String {
        match self {
            Self::Bound(bound) => bound.text(),
            Self::Straggler(straggler) => straggler.text(),
            Self::CannotTell(reason) => reason.text(),
        }
    }
}

impl Bound {
    fn text(&self) -> String {
        let size = format!(
            "{:.1} s of the {:.1} s of all ranks ({:.0} %)",
            self.seconds,
            self.wall_seconds,
            100.0 * self.seconds / self.wall_seconds
        );
        let others = match self.others.is_empty() {
            true => String::new(),
            false => format!("; of the rest, {}", list(&self.others)),
        };
        format!("{}{others}", self.resource_text(&size))
    }

    fn resource_text(&self, size: &str) -> String {
        match self.evidence {
            Evidence::Input {
                prepare,
                fetch,
                other,
            } => format!(
                "{size} were waits for data; meanwhile the loaders prepared for {prepare:.1} s, fetched for \
                 {fetch:.1} s, and did neither for {other:.1} s"
            ),
            Evidence::CpuScheduler { loaders, ranks } => format!(
                "up to {size} threads could have run, and did not: loaders that were waited for {loaders:.1} s, the \
                 ranks themselves {ranks:.1} s"
            ),
            Evidence::Communication => format!("{size} were collectives"),
            Evidence::Gpu { collectives, ahead } => {
                let collectives = match collectives > MENTIONED * self.seconds {
                    true => {
                        format!(
                            "; in up to {collectives:.1} s of them it had collectives to do, too"
                        )
                    }
                    false => String::new(),
                };
                let ahead = match ahead > 0.0 {
                    true => format!(
                        "; for {ahead:.1} s of them threads worked, but NVML says that it always had something to do"
                    ),
                    false => String::new(),
                };
                format!("{size} were waits for the GPU{collectives}{ahead}")
            }
            Evidence::Host { gpu } => {
                let gpu = match gpu {
                    GpuActivity::Unused => "; none of them used a GPU".to_owned(),
                    GpuActivity::NotReported => ", and hardly ever waited for the GPU".to_owned(),
                    GpuActivity::Busy(share) => format!(
                        ", and the GPU was busy for {:.0} % of it, as NVML says",
                        100.0 * share
                    ),
                };
                format!("{size} the ranks' own threads were at work on CPUs{gpu}")
            }
        }
    }
}

impl Straggler {
    fn text(&self) -> String {
        format!(
            "its peers waited for it for {:.1} s of their {:.1} s each ({:.0} %); it spent {:.1} s more {} than they did",
            self.waited_seconds,
            self.peer_wall_seconds,
            100.0 * self.waited_seconds / self.peer_wall_seconds,
            self.slowest.more_seconds,
            self.slowest.spent()
        )
    }
}

impl Inconclusive {
    fn text(&self) -> String {
        match self {
            Self::NotObserved => "nothing was observed".to_owned(),
            Self::NoRanks => "no process was seen to train".to_owned(),
            Self::TooShort { longest_seconds } => format!(
                "the ranks were observed for {longest_seconds:.2} s; less than {SHORTEST} s is a start, not a run"
            ),
            Self::MostlyUnknown {
                unknown_seconds,
                wall_seconds,
            } => format!(
                "of {unknown_seconds:.1} s of the {wall_seconds:.1} s of all ranks it is not known what they waited for"
            ),
            Self::NothingDominates {
                shares,
                wall_seconds,
            } => format!(
                "of the {wall_seconds:.1} s of all ranks, {}: nothing has {:.0} % of it",
                list(shares),
                100.0 * DOMINANT
            ),
        }
    }
}

/// Resources with their seconds.
fn list(resources: &[(Resource, f64)]) -> String {
    let texts = resources.iter().map(|(resource, seconds)| {
        let what = match resource {
            Resource::Input => "waits for data",
            Resource::CpuScheduler => "delays without a CPU",
            Resource::Communication => "collectives",
            Resource::Gpu => "waits for the GPU",
            Resource::Host => "own work on CPUs",
        };
        format!("{seconds:.1} s were {what}")
    });
    texts.collect::<Vec<_>>().join(", ")
}

impl Slowest {
    /// What it spent more time in.
    pub(crate) fn spent(&self) -> &'static str {
        match self.reason {
            Some(Part::Prepare) => "waiting for loaders that prepared data",
            Some(Part::Fetch) => "waiting for loaders that fetched data",
            Some(Part::OtherData) => "waiting for data that nobody was busy with",
            Some(Part::CpuDelay) => "without a CPU, itself or its loaders",
            Some(Part::Communication) => "in collectives",
            Some(Part::Gpu) => "waiting for its GPU",
            Some(Part::Host) => "at work on its CPU",
            None => "blocked by what is not seen",
        }
    }
}

impl Remedy {
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::MoreLoaders => "more loaders where CPUs are free, or less to do for each batch",
            Self::CheaperPreprocessing => {
                "less to do for each batch: there are as many loaders as CPUs"
            }
            Self::FasterStorage => "faster storage or network, or fetching further ahead",
            Self::CheckDataSource => {
                "a look at what loads the data: nothing that the ranks started was busy with it"
            }
            Self::FewerThreads => "fewer threads for the CPUs there are, or no neighbours on them",
            Self::OverlapCollectives => {
                "overlapping collectives with the backward pass, or fewer bytes"
            }
            Self::FasterGpu => "faster kernels or GPUs",
            Self::FasterGpuOrFewerBytes => {
                "faster kernels or GPUs, or fewer bytes to reduce: a profile of the GPU tells which"
            }
            Self::AddGpu => "a GPU, or more and faster CPUs",
            Self::LessHostWork => {
                "CUDA graphs, torch.compile or larger batches: less to do for each kernel"
            }
            Self::DumpStack => {
                "a look at the stack of that rank: it is blocked by nothing that is seen"
            }
        }
    }
}
