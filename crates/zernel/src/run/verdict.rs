//! What bounds a training job, judged by where the time of its ranks went.
//!
//! The rule is plain, so that it can be argued with: of all the time of all ranks, what was waited for data,
//! for peers or for a CPU is waste. The largest waste bounds the job if it is at least [`WASTE`] of the
//! time; without such a waste the GPU bounds it, if it had [`BUSY`] of the time. All else cannot be told.

use serde::Serialize;

/// Shorter than this is a start, not a run.
const SHORTEST: f64 = 1.0;
/// The share of the time that a waste must have to be what bounds a job.
const WASTE: f64 = 0.15;
/// The share of the time that the GPU must have to be what bounds a job.
const BUSY: f64 = 0.5;
/// With a larger share of unknown time nothing can be told.
const UNKNOWN: f64 = 0.5;

/// Where the time of one rank went, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct RankTimes {
    pub(super) wall: f64,
    /// In phase DataLoading.
    pub(super) data: f64,
    /// In phase GpuCompute.
    pub(super) gpu: f64,
    /// In phase NcclCollective.
    pub(super) communication: f64,
    pub(super) unknown: f64,
    /// Waits in which somebody was seen to load the data, or to be about to.
    pub(super) data_waits: f64,
    /// Of its waits for data: the loaders were on CPUs.
    pub(super) data_prepare: f64,
    /// Of its waits for data: the loaders waited for disk or network.
    pub(super) data_fetch: f64,
    /// Of its waits for data: the loaders could run, and did not.
    pub(super) data_sched: f64,
    /// Its own threads could run, and did not.
    pub(super) run_delay: f64,
}

/// A part of a rank's time.
type Part = fn(&RankTimes) -> f64;

impl RankTimes {
    /// Waits for data that are not the scheduler's doing.
    fn input(&self) -> f64 {
        (self.data.min(self.data_waits) - self.data_sched).max(0.0)
    }

    /// A thread that waits between two steps seems to load data. If nobody was seen to give it any, it may
    /// as well have waited for a peer.
    fn unexplained(&self) -> f64 {
        (self.data - self.data_waits).max(0.0)
    }

    /// An upper bound: delays of several threads at once count several times, up to the wall time.
    fn scheduler(&self) -> f64 {
        self.data_sched.min(self.data) + self.run_delay.min((self.wall - self.data).max(0.0))
    }
}

/// What bounds a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Bound {
    Input,
    Gpu,
    Communication,
    CpuScheduler,
    CannotTell,
}

impl Bound {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Input => "input-bound",
            Self::Gpu => "GPU-bound",
            Self::Communication => "communication-bound",
            Self::CpuScheduler => "CPU-scheduler-bound",
            Self::CannotTell => "can't tell",
        }
    }
}

/// The judgement with its reasons.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Verdict {
    pub(super) bound: Bound,
    /// What it rests on.
    pub(super) evidence: String,
    /// What would help.
    pub(super) helps: Option<&'static str>,
    /// The share of the time of all ranks that this is about.
    pub(super) share: Option<f64>,
    /// By how many seconds the job could get shorter at most.
    pub(super) at_most_seconds: Option<f64>,
}

impl Verdict {
    fn cannot_tell(evidence: String) -> Self {
        Self {
            bound: Bound::CannotTell,
            evidence,
            helps: None,
            share: None,
            at_most_seconds: None,
        }
    }
}

/// Judges.
pub(super) fn judge(ranks: &[RankTimes]) -> Verdict {
    let sum = |of: Part| ranks.iter().map(of).sum::<f64>();
    let wall = sum(|rank| rank.wall);
    if ranks.is_empty() {
        return Verdict::cannot_tell("no process was seen to train".to_owned());
    }
    let longest = ranks.iter().map(|rank| rank.wall).fold(0.0, f64::max);
    if longest < SHORTEST {
        return Verdict::cannot_tell(format!(
            "the ranks were observed for {longest:.2} s; less than {SHORTEST} s is a start, not a run"
        ));
    }
    let unknown = sum(|rank| rank.unknown);
    let unexplained = sum(RankTimes::unexplained);
    if unknown + unexplained > UNKNOWN * wall {
        return Verdict::cannot_tell(format!(
            "of {unknown:.1} s of the {wall:.1} s of all ranks it is not known what they did, and of {unexplained:.1} s \
             for what they waited: it looks like data, but nobody was seen to load any"
        ));
    }
    let wastes: [(Bound, Part); 3] = [
        (Bound::Input, RankTimes::input),
        (Bound::Communication, |rank| rank.communication),
        (Bound::CpuScheduler, RankTimes::scheduler),
    ];
    let largest = wastes
        .into_iter()
        .max_by(|(_, a), (_, b)| sum(*a).total_cmp(&sum(*b)))
        .filter(|(_, of)| sum(*of) >= WASTE * wall);
    let (bound, of) = match largest {
        Some(largest) => largest,
        None if sum(|rank| rank.gpu) >= BUSY * wall => (Bound::Gpu, (|rank| rank.gpu) as Part),
        None => return nothing_stands_out(ranks, wall),
    };
    Verdict {
        bound,
        evidence: evidence(bound, ranks, sum(of), wall),
        helps: Some(helps(bound, ranks)),
        share: Some(sum(of) / wall),
        at_most_seconds: Some(ranks.iter().map(of).fold(0.0, f64::max)),
    }
}

fn nothing_stands_out(ranks: &[RankTimes], wall: f64) -> Verdict {
    let sum = |of: Part| ranks.iter().map(of).sum::<f64>();
    Verdict::cannot_tell(format!(
        "of the {wall:.1} s of all ranks, {:.1} s were waits for data, {:.1} s collectives, {:.1} s the GPU's: \
         no waste of {:.0} %, and the GPU has not {:.0} %",
        sum(|rank| rank.data.min(rank.data_waits)),
        sum(|rank| rank.communication),
        sum(|rank| rank.gpu),
        100.0 * WASTE,
        100.0 * BUSY,
    ))
}

fn evidence(bound: Bound, ranks: &[RankTimes], seconds: f64, wall: f64) -> String {
    let sum = |of: Part| ranks.iter().map(of).sum::<f64>();
    let share = 100.0 * seconds / wall;
    let size = format!("{seconds:.1} s of the {wall:.1} s of all ranks ({share:.0} %)");
    match bound {
        Bound::Input => format!(
            "{size} were waits for data; meanwhile the loaders that the ranks started prepared for {:.1} s, \
             fetched for {:.1} s, and did neither for {:.1} s",
            sum(|rank| rank.data_prepare),
            sum(|rank| rank.data_fetch),
            (seconds - sum(|rank| rank.data_prepare + rank.data_fetch)).max(0.0),
        ),
        Bound::Communication => {
            format!("{size} were collectives, waiting for the slowest rank included")
        }
        Bound::CpuScheduler => format!(
            "up to {size} threads could have run, and did not: loaders that were waited for {:.1} s, \
             the ranks themselves {:.1} s",
            sum(|rank| rank.data_sched),
            sum(|rank| rank.run_delay),
        ),
        Bound::Gpu | Bound::CannotTell => format!(
            "{size} were the GPU's; {:.1} s were waits for data, {:.1} s collectives",
            sum(|rank| rank.data.min(rank.data_waits)),
            sum(|rank| rank.communication),
        ),
    }
}

fn helps(bound: Bound, ranks: &[RankTimes]) -> &'static str {
    let sum = |of: Part| ranks.iter().map(of).sum::<f64>();
    match bound {
        Bound::Input => {
            let prepare = sum(|rank| rank.data_prepare);
            let fetch = sum(|rank| rank.data_fetch);
            let other = sum(RankTimes::input) - prepare - fetch;
            if fetch > prepare && fetch > other {
                "faster storage or network, or fetching further ahead"
            } else if prepare > other {
                "more loaders where CPUs are free, or less to do for each batch"
            } else {
                "a look at what loads the data: nothing that the ranks started was busy with it"
            }
        }
        Bound::Communication => {
            "a faster slowest rank, overlapping collectives with the backward pass, or fewer bytes"
        }
        Bound::CpuScheduler => "fewer threads for the CPUs there are, or no neighbours on them",
        Bound::Gpu => "faster kernels or GPUs",
        Bound::CannotTell => "",
    }
}

/// The rank that the others wait for.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Slowest {
    /// Its place in the list of ranks.
    pub(super) index: usize,
    /// How much less it waited in collectives than the rank that waited longest.
    pub(super) seconds: f64,
}

/// The rank that waits least in collectives, if others wait longer by a twentieth of their time: peers
/// that are ready wait for the one that is not.
pub(super) fn slowest(ranks: &[RankTimes]) -> Option<Slowest> {
    let by_wait = |a: &&(usize, f64), b: &&(usize, f64)| a.1.total_cmp(&b.1);
    let waits: Vec<(usize, f64)> = ranks
        .iter()
        .map(|rank| rank.communication)
        .enumerate()
        .collect();
    let (index, least) = *waits.iter().min_by(by_wait)?;
    let (longest_index, most) = *waits.iter().max_by(by_wait)?;
    let seconds = most - least;
    let stands_out = seconds >= 0.05 * ranks[longest_index].wall && seconds > 0.0;
    stands_out.then_some(Slowest { index, seconds })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANK: RankTimes = RankTimes {
        wall: 100.0,
        data: 2.0,
        gpu: 80.0,
        communication: 8.0,
        unknown: 5.0,
        data_waits: 2.0,
        data_prepare: 1.0,
        data_fetch: 0.5,
        data_sched: 0.5,
        run_delay: 1.0,
    };

    #[test]
    fn what_wastes_most_bounds() {
        let waits_for_data = RankTimes {
            data: 40.0,
            data_waits: 40.0,
            gpu: 42.0,
            data_prepare: 35.0,
            ..RANK
        };
        let cases = [
            ("busy GPU", RANK, Bound::Gpu),
            ("waits for data", waits_for_data, Bound::Input),
            (
                "waits for data whose loaders do not get to run",
                RankTimes {
                    data_prepare: 5.0,
                    data_sched: 34.0,
                    ..waits_for_data
                },
                Bound::CpuScheduler,
            ),
            (
                "does not get to run itself",
                RankTimes {
                    run_delay: 30.0,
                    ..RANK
                },
                Bound::CpuScheduler,
            ),
            (
                "waits for peers",
                RankTimes {
                    communication: 45.0,
                    gpu: 43.0,
                    ..RANK
                },
                Bound::Communication,
            ),
            (
                "waits between steps, with nobody seen to load",
                RankTimes {
                    data: 60.0,
                    gpu: 22.0,
                    ..RANK
                },
                Bound::CannotTell,
            ),
            (
                "mostly unknown",
                RankTimes {
                    unknown: 60.0,
                    gpu: 25.0,
                    ..RANK
                },
                Bound::CannotTell,
            ),
            (
                "a bit of everything",
                RankTimes {
                    unknown: 40.0,
                    gpu: 40.0,
                    ..RANK
                },
                Bound::CannotTell,
            ),
            (
                "too short",
                RankTimes {
                    wall: 0.3,
                    gpu: 0.3,
                    ..RankTimes::default()
                },
                Bound::CannotTell,
            ),
        ];
        for (name, rank, bound) in cases {
            for ranks in [vec![rank], vec![rank; 8]] {
                let verdict = judge(&ranks);
                assert_eq!(verdict.bound, bound, "{name}: {}", verdict.evidence);
                assert!(!verdict.evidence.is_empty());
                let is_judged = bound != Bound::CannotTell;
                assert_eq!(verdict.at_most_seconds.is_some(), is_judged, "{name}");
            }
        }
    }

    #[test]
    fn an_idle_python_and_a_compiler_cannot_be_told() {
        let verdict = judge(&[]);
        assert_eq!(verdict.bound, Bound::CannotTell);
        assert!(verdict.evidence.contains("no process was seen"));
        // It initialised CUDA and slept: all of its time is unknown.
        let idle = RankTimes {
            wall: 60.0,
            unknown: 60.0,
            ..RankTimes::default()
        };
        assert_eq!(judge(&[idle]).bound, Bound::CannotTell);
    }

    #[test]
    fn a_gain_is_no_more_than_what_the_worst_rank_wasted() {
        let waits = RankTimes {
            data: 30.0,
            data_waits: 30.0,
            gpu: 50.0,
            ..RANK
        };
        let verdict = judge(&[RANK, waits]);
        assert_eq!(verdict.bound, Bound::Input);
        assert_eq!(verdict.at_most_seconds, Some(29.5));
        assert_eq!(verdict.share, Some((1.5 + 29.5) / 200.0));
    }

    #[test]
    fn the_slowest_rank_is_the_one_that_never_waits() {
        let waits = RankTimes {
            communication: 30.0,
            ..RANK
        };
        let found = slowest(&[waits, RANK, waits]);
        let expected = Slowest {
            index: 1,
            seconds: 22.0,
        };
        assert_eq!(found, Some(expected));
        assert_eq!(slowest(&[RANK, RANK]), None);
        assert_eq!(slowest(&[RANK]), None);
        assert_eq!(slowest(&[]), None);
    }
}
