//! A verdict, its evidence and its remedy in words.

use super::judge::{DOMINANT, MENTIONED, SHORTEST};
use super::{
    Bound, Evidence, GpuActivity, Inconclusive, Remedy, Resource, Slowest, Straggler, TotalTime,
    Verdict,
};
use crate::times::Part;

impl Verdict {
    /// The verdict as a title.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Bound(bound) => match bound.evidence.resource() {
                Resource::Input => "input-bound",
                Resource::CpuScheduler => "CPU-scheduler-bound",
                Resource::Communication => "communication-bound",
                Resource::Gpu => "GPU-bound",
                Resource::Host => "host-bound",
            },
            Self::Straggler(_) => "straggler-bound",
            Self::CannotTell(_) => "can't tell",
        }
    }

    /// The measurements behind the verdict. The reader knows which rank is the straggler.
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
        let others = match self.others.is_empty() {
            true => String::new(),
            false => format!("; also {}", list(&self.others)),
        };
        self.resource_text(&self.total.share(self.seconds)) + &others
    }

    fn resource_text(&self, share: &str) -> String {
        match self.evidence {
            Evidence::Input {
                prepare,
                fetch,
                other,
            } => format!(
                "waits for data took {share}: loaders prepared for {prepare:.1} s, fetched for {fetch:.1} s, did \
                 neither for {other:.1} s"
            ),
            Evidence::CpuScheduler { loaders, ranks } => format!(
                "threads were runnable without a CPU for up to {share}: loaders that a rank waited for \
                 {loaders:.1} s, training threads {ranks:.1} s"
            ),
            Evidence::Communication => format!("collectives took {share}"),
            Evidence::Gpu { collectives, ahead } => {
                let collectives = match collectives > MENTIONED * self.seconds {
                    true => format!(", of which up to {collectives:.1} s may be collectives"),
                    false => String::new(),
                };
                let ahead = match ahead > 0.0 {
                    true => format!(
                        "; this includes {ahead:.1} s of host work, because the GPU was never idle (NVML)"
                    ),
                    false => String::new(),
                };
                format!("waits for the GPU took {share}{collectives}{ahead}")
            }
            Evidence::Host { gpu } => {
                let gpu = match gpu {
                    GpuActivity::Unused => "and no rank used a GPU".to_owned(),
                    GpuActivity::NotReported => "and hardly waited for the GPU".to_owned(),
                    GpuActivity::Busy(share) => {
                        format!("while the GPU was busy {:.0} % (NVML)", 100.0 * share)
                    }
                };
                format!("training threads ran on CPUs for {share} {gpu}")
            }
        }
    }
}

impl TotalTime {
    /// A time of all ranks as part of this one.
    fn share(&self, seconds: f64) -> String {
        let wall = self.wall_seconds;
        let ranks = match self.ranks {
            0 | 1 => String::new(),
            ranks => format!(", sum of {ranks} ranks"),
        };
        let percent = 100.0 * seconds / wall;
        format!("{seconds:.1} s of {wall:.1} s ({percent:.0} %{ranks})")
    }
}

impl Straggler {
    fn text(&self) -> String {
        format!(
            "its peers waited for it for {:.1} s of {:.1} s ({:.0} %, mean); it spent {:.1} s more {} than they did",
            self.waited_seconds,
            self.peer_wall_seconds,
            100.0 * self.waited_seconds / self.peer_wall_seconds,
            self.slowest.more_seconds,
            self.slowest.excess_text()
        )
    }
}

impl Inconclusive {
    fn text(&self) -> String {
        match self {
            Self::NotObserved => "nothing was observed".to_owned(),
            Self::NoRanks => "no training process was observed".to_owned(),
            Self::TooShort { longest_seconds } => format!(
                "no rank was observed for longer than {longest_seconds:.2} s; a verdict needs at least {SHORTEST} s"
            ),
            Self::MostlyUnknown {
                unknown_seconds,
                total,
            } => format!(
                "the cause of waiting is unknown for {}",
                total.share(*unknown_seconds)
            ),
            Self::NothingDominates { shares, total } => format!(
                "no resource took {:.0} % of {:.1} s: {}",
                100.0 * DOMINANT,
                total.wall_seconds,
                list(shares)
            ),
        }
    }
}

/// Resources with their seconds.
fn list(resources: &[(Resource, f64)]) -> String {
    let texts = resources.iter().map(|(resource, seconds)| {
        let what = match resource {
            Resource::Input => "waits for data",
            Resource::CpuScheduler => "runnable without a CPU",
            Resource::Communication => "collectives",
            Resource::Gpu => "waits for the GPU",
            Resource::Host => "host work",
        };
        format!("{what} {seconds:.1} s")
    });
    texts.collect::<Vec<_>>().join(", ")
}

impl Slowest {
    /// What the rank spent more time in than its peers: the part of a sentence after "spent more".
    pub(crate) fn excess_text(&self) -> &'static str {
        match self.reason {
            Some(Part::Prepare) => "waiting while loaders prepared data",
            Some(Part::Fetch) => "waiting while loaders fetched data",
            Some(Part::OtherData) => "waiting for data that no loader worked on",
            Some(Part::CpuDelay) => "runnable without a CPU (with its loaders)",
            Some(Part::Communication) => "in collectives",
            Some(Part::Gpu) => "waiting for its GPU",
            Some(Part::Host) => "running on CPUs",
            None => "blocked for an unknown reason",
        }
    }
}

impl Remedy {
    /// The remedy as a list of things to try.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::MoreLoaders => "more loaders if CPUs are free, or cheaper preprocessing",
            Self::CheaperPreprocessing => {
                "cheaper preprocessing; there are already as many loaders as CPUs"
            }
            Self::FasterStorage => "faster storage or network, or deeper prefetching",
            Self::CheckDataSource => {
                "checking the data source: no process that the ranks started worked on the data"
            }
            Self::FewerThreads => "fewer threads on these CPUs, or moving other processes off them",
            Self::OverlapCollectives => {
                "overlapping collectives with the backward pass, or fewer bytes"
            }
            Self::FasterGpu => "faster kernels or GPUs",
            Self::FasterGpuOrFewerBytes => {
                "faster kernels or GPUs, or fewer bytes in collectives; a GPU profile shows which"
            }
            Self::AddGpu => "a GPU, or more or faster CPUs",
            Self::LessHostWork => {
                "CUDA graphs, torch.compile or larger batches (less host work per kernel)"
            }
            Self::DumpStack => "a stack dump of that rank, for example with `py-spy dump --pid`",
        }
    }
}
