//! What bounds a training job, judged by where the time of its ranks went.
//!
//! The time of a rank is split into parts that do not overlap (`parts`): waits for data, for peers and for
//! the GPU, delays because no CPU was free, and what is left: its thread at work on a CPU. What bounds the
//! job is then what would make it faster:
//!
//! 1. A **straggler** does, if its peers wait for it for [`WASTE`] of their time, and would not wait even
//!    longer for their own loaders if it were faster. Otherwise waits for the slowest rank count as waits for
//!    what it waits for itself.
//! 2. **Loaders that never rest** do, if they are waited for for [`WASTE`] of the time: they work beside the
//!    steps, so nothing that makes a step faster makes the job faster.
//! 3. Else the largest part does, if it has [`DOMINANT`] of the time: these come one after the other, so
//!    what each takes is what can be gained by it.
//!
//! All else cannot be told.

use serde::Serialize;

use super::parts::{Part, Parts, RankTimes};

/// Shorter than this is a start, not a run.
const SHORTEST: f64 = 1.0;
/// The share of the time that a wait must have to be worth a word where nothing else could help.
const WASTE: f64 = 0.15;
/// The share of the time that a part must have to be what bounds a job.
const DOMINANT: f64 = 0.35;
/// With a larger share of unknown time nothing can be told.
const UNKNOWN: f64 = 0.5;
/// Loaders that work for this share of the time never rest: orders and batches have to travel, too.
const NEVER_RESTS: f64 = 0.75;
/// The share of its time by which a rank must wait less than its peers to be called the slowest.
const STANDS_OUT: f64 = 0.05;
/// Parts with less than this share are not worth a word.
const WORTH_A_WORD: f64 = 0.05;

/// What bounds a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Bound {
    Input,
    Gpu,
    Communication,
    CpuScheduler,
    Host,
    Straggler,
    CannotTell,
}

impl Bound {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Input => "input-bound",
            Self::Gpu => "GPU-bound",
            Self::Communication => "communication-bound",
            Self::CpuScheduler => "CPU-scheduler-bound",
            Self::Host => "host-bound",
            Self::Straggler => "straggler-bound",
            Self::CannotTell => "can't tell",
        }
    }

    fn parts(self) -> &'static [Part] {
        match self {
            Self::Input => &[Part::Prepare, Part::Fetch, Part::OtherData],
            Self::CpuScheduler => &[Part::CpuDelay],
            Self::Communication => &[Part::Communication],
            Self::Gpu => &[Part::Gpu],
            Self::Host => &[Part::Host],
            Self::Straggler | Self::CannotTell => &[],
        }
    }
}

/// The judgement with its reasons.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Verdict {
    pub(crate) bound: Bound,
    /// The largest part of what it is about: of waits for data, what was waited for; of a straggler, what
    /// it spent more of than its peers.
    pub(crate) cause: Option<Part>,
    /// The straggler's place in the list of ranks.
    pub(crate) straggler: Option<usize>,
    /// What it rests on.
    pub(crate) evidence: String,
    /// What would help.
    pub(crate) helps: Option<&'static str>,
    /// The share of the time of all ranks that this is about.
    pub(crate) share: Option<f64>,
    /// By how many seconds the job could get shorter at most.
    pub(crate) at_most_seconds: Option<f64>,
}

impl Verdict {
    fn cannot_tell(evidence: String) -> Self {
        Self {
            bound: Bound::CannotTell,
            cause: None,
            straggler: None,
            evidence,
            helps: None,
            share: None,
            at_most_seconds: None,
        }
    }
}

/// Judges.
pub(crate) fn judge(ranks: &[RankTimes]) -> Verdict {
    if ranks.is_empty() {
        return Verdict::cannot_tell("no process was seen to train".to_owned());
    }
    let longest = ranks.iter().map(|rank| rank.wall).fold(0.0, f64::max);
    if longest < SHORTEST {
        return Verdict::cannot_tell(format!(
            "the ranks were observed for {longest:.2} s; less than {SHORTEST} s is a start, not a run"
        ));
    }
    let mut parts: Vec<Parts> = ranks.iter().map(Parts::new).collect();
    let wall: f64 = ranks.iter().map(|rank| rank.wall).sum();
    let known: f64 = parts.iter().map(Parts::total).sum();
    if wall - known > UNKNOWN * wall {
        return Verdict::cannot_tell(format!(
            "of {:.1} s of the {wall:.1} s of all ranks it is not known what they waited for",
            wall - known
        ));
    }
    let slowest = slowest(ranks);
    if let Some(verdict) = slowest.and_then(|slowest| judge_straggler(ranks, &parts, slowest)) {
        return verdict;
    }
    if let Some(slowest) = slowest {
        blame(&mut parts, slowest);
    }
    let Some(bound) = starved(ranks, &parts, wall).or_else(|| dominant(&parts, wall)) else {
        let all = list(&parts, wall, &[]);
        let less = format!("nothing has {:.0} % of it", 100.0 * DOMINANT);
        return Verdict::cannot_tell(format!("of the {wall:.1} s of all ranks, {all}: {less}"));
    };
    bound_by(bound, &parts, wall)
}

/// The seconds of all ranks in what a bound is about.
fn sum(parts: &[Parts], bound: Bound) -> f64 {
    let of = |part: &Part| parts.iter().map(|rank| rank.of(*part)).sum::<f64>();
    bound.parts().iter().map(of).sum()
}

/// The bounds that are a part of the time, largest first.
fn by_size(parts: &[Parts]) -> Vec<(Bound, f64)> {
    let mut bounds: Vec<(Bound, f64)> = [
        Bound::Input,
        Bound::CpuScheduler,
        Bound::Communication,
        Bound::Gpu,
        Bound::Host,
    ]
    .map(|bound| (bound, sum(parts, bound)))
    .to_vec();
    bounds.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    bounds
}

/// What loaders that never rest were held up by, if they held the ranks up.
fn starved(ranks: &[RankTimes], parts: &[Parts], wall: f64) -> Option<Bound> {
    let never_rest = ranks
        .iter()
        .all(|rank| rank.loader_busy >= Some(NEVER_RESTS));
    let waited = sum(parts, Bound::Input) + parts.iter().map(|rank| rank.data_delay).sum::<f64>();
    if !never_rest || waited < WASTE * wall {
        return None;
    }
    let held_up = by_size(parts).into_iter().map(|(bound, _)| bound);
    let mut held_up = held_up.filter(|bound| matches!(bound, Bound::Input | Bound::CpuScheduler));
    held_up.next()
}

fn dominant(parts: &[Parts], wall: f64) -> Option<Bound> {
    let (bound, seconds) = by_size(parts)[0];
    (seconds >= DOMINANT * wall).then_some(bound)
}

fn bound_by(bound: Bound, parts: &[Parts], wall: f64) -> Verdict {
    let seconds = sum(parts, bound);
    let of_rank = |rank: &Parts| sum(std::slice::from_ref(rank), bound);
    let total = |part: &Part| parts.iter().map(|rank| rank.of(*part)).sum::<f64>();
    let of_bound = bound.parts().iter().copied();
    let cause = of_bound.max_by(|a, b| total(a).total_cmp(&total(b)));
    let size = format!(
        "{seconds:.1} s of the {wall:.1} s of all ranks ({:.0} %)",
        100.0 * seconds / wall
    );
    let others = list(parts, wall, bound.parts());
    let others = match others.is_empty() {
        true => String::new(),
        false => format!("; of the rest, {others}"),
    };
    Verdict {
        bound,
        cause,
        straggler: None,
        evidence: format!("{}{others}", evidence(bound, &size, parts)),
        helps: help_with(bound, parts).or_else(|| cause.map(|cause| helps(cause, parts))),
        share: Some(seconds / wall),
        at_most_seconds: Some(parts.iter().map(of_rank).fold(0.0, f64::max)),
    }
}

fn evidence(bound: Bound, size: &str, parts: &[Parts]) -> String {
    let sum = |part: Part| parts.iter().map(|rank| rank.of(part)).sum::<f64>();
    match bound {
        Bound::Input => format!(
            "{size} were waits for data; meanwhile the loaders prepared for {:.1} s, fetched for {:.1} s, and \
             did neither for {:.1} s",
            sum(Part::Prepare),
            sum(Part::Fetch),
            sum(Part::OtherData),
        ),
        Bound::Communication => format!("{size} were collectives"),
        Bound::CpuScheduler => {
            let loaders: f64 = parts.iter().map(|rank| rank.data_delay).sum();
            let own = sum(Part::CpuDelay) - loaders;
            format!(
                "up to {size} threads could have run, and did not: loaders that were waited for \
                 {loaders:.1} s, the ranks themselves {own:.1} s"
            )
        }
        Bound::Host => {
            let shares: Vec<f64> = parts.iter().filter_map(|rank| rank.gpu_busy).collect();
            let busy = 100.0 * shares.iter().sum::<f64>() / shares.len().max(1) as f64;
            let meanwhile = match parts.iter().any(|rank| rank.uses_gpu) {
                true if shares.is_empty() => ", and hardly ever waited for the GPU".to_owned(),
                true => format!(", and the GPU was busy for {busy:.0} % of it, as NVML says"),
                false => "; none of them used a GPU".to_owned(),
            };
            format!("{size} the ranks' own threads were at work on CPUs{meanwhile}")
        }
        Bound::Gpu | Bound::Straggler | Bound::CannotTell => {
            let shared: f64 = parts.iter().map(|rank| rank.shared_with_collectives).sum();
            let shared = match shared > WORTH_A_WORD * sum(Part::Gpu) {
                true => format!("; in up to {shared:.1} s of them it had collectives to do, too"),
                false => String::new(),
            };
            let ahead: f64 = parts.iter().map(|rank| rank.ahead_of_gpu).sum();
            let ahead = match ahead > 0.0 {
                true => format!(
                    "; for {ahead:.1} s of them threads worked, but NVML says that it always had something to do"
                ),
                false => String::new(),
            };
            format!("{size} were waits for the GPU{shared}{ahead}")
        }
    }
}

/// What would help where the cause alone does not say it.
fn help_with(bound: Bound, parts: &[Parts]) -> Option<&'static str> {
    let shared: f64 = parts.iter().map(|rank| rank.shared_with_collectives).sum();
    match bound {
        Bound::Gpu if 2.0 * shared > sum(parts, bound) => Some(
            "faster kernels or GPUs, or fewer bytes to reduce: a profile of the GPU tells which",
        ),
        _ => None,
    }
}

/// The parts that are worth a word, largest first, without `but`.
fn list(parts: &[Parts], wall: f64, but: &[Part]) -> String {
    let bounds = by_size(parts).into_iter();
    let worth = bounds.filter(|(bound, seconds)| {
        *seconds >= WORTH_A_WORD * wall && !bound.parts().iter().any(|part| but.contains(part))
    });
    let texts = worth.map(|(bound, seconds)| {
        let what = match bound {
            Bound::Input => "waits for data",
            Bound::CpuScheduler => "delays without a CPU",
            Bound::Communication => "collectives",
            Bound::Host => "own work on CPUs",
            Bound::Gpu | Bound::Straggler | Bound::CannotTell => "waits for the GPU",
        };
        format!("{seconds:.1} s were {what}")
    });
    texts.collect::<Vec<_>>().join(", ")
}

/// What would help ranks.
fn helps(cause: Part, ranks: &[Parts]) -> &'static str {
    let uses_gpu = ranks.iter().any(|rank| rank.uses_gpu);
    let loaders_fill_cpus = ranks.iter().all(|rank| rank.loaders_fill_cpus);
    match cause {
        Part::Prepare if loaders_fill_cpus => {
            "less to do for each batch: there are as many loaders as CPUs"
        }
        Part::Prepare => "more loaders where CPUs are free, or less to do for each batch",
        Part::Fetch => "faster storage or network, or fetching further ahead",
        Part::OtherData => {
            "a look at what loads the data: nothing that the ranks started was busy with it"
        }
        Part::CpuDelay => "fewer threads for the CPUs there are, or no neighbours on them",
        Part::Communication => "overlapping collectives with the backward pass, or fewer bytes",
        Part::Gpu => "faster kernels or GPUs",
        Part::Host if !uses_gpu => "a GPU, or more and faster CPUs",
        Part::Host => "CUDA graphs, torch.compile or larger batches: less to do for each kernel",
    }
}

/// The rank that the others wait for.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Slowest {
    /// Its place in the list of ranks.
    pub(crate) index: usize,
    /// How much less it waited in collectives than the rank that waited longest.
    pub(crate) seconds: f64,
    /// What it spent more time in than its peers do on average; `None` if that was not seen, or there is nothing.
    pub(crate) reason: Option<Part>,
    /// How much more; 0 if there is nothing.
    pub(crate) more_seconds: f64,
}

impl Slowest {
    /// What it spent more time in.
    pub(crate) fn spent(&self) -> &'static str {
        self.reason
            .map_or("blocked by what is not seen", Part::spent)
    }
}

/// The rank that waits least in collectives, if others wait longer by a twentieth of their time: peers
/// that are ready wait for the one that is not.
pub(crate) fn slowest(ranks: &[RankTimes]) -> Option<Slowest> {
    let by_wait = |a: &&(usize, f64), b: &&(usize, f64)| a.1.total_cmp(&b.1);
    let waits = ranks.iter().map(|rank| rank.communication);
    let waits: Vec<(usize, f64)> = waits.enumerate().collect();
    let (index, least) = *waits.iter().min_by(by_wait)?;
    let (longest_index, most) = *waits.iter().max_by(by_wait)?;
    let seconds = most - least;
    if seconds <= 0.0 || seconds < STANDS_OUT * ranks[longest_index].wall {
        return None;
    }
    let of_all: Vec<(&RankTimes, Parts)> =
        ranks.iter().map(|rank| (rank, Parts::new(rank))).collect();
    let spent = |reason: Option<Part>, (rank, parts): &(&RankTimes, Parts)| match reason {
        Some(part) => parts.of(part),
        None => rank.wall - parts.total(),
    };
    let more = |reason: Option<Part>| {
        let peers = peers(&of_all, index).map(|peer| spent(reason, peer));
        spent(reason, &of_all[index]) - peers.sum::<f64>() / (ranks.len() - 1) as f64
    };
    let reasons = Part::ALL
        .into_iter()
        .filter(|part| *part != Part::Communication);
    let reasons = reasons.map(Some).chain([None]);
    let reasons = reasons.map(|reason| (reason, more(reason)));
    let (reason, more_seconds) = reasons.max_by(|(_, a), (_, b)| a.total_cmp(b))?;
    Some(Slowest {
        index,
        seconds,
        reason: reason.filter(|_| more_seconds > 0.0),
        more_seconds: more_seconds.max(0.0),
    })
}

/// All but one.
fn peers<T>(ranks: &[T], but: usize) -> impl Iterator<Item = &T> {
    let ranks = ranks.iter().enumerate();
    ranks.filter_map(move |(index, rank)| (index != but).then_some(rank))
}

/// Judges whether one rank alone holds the others up.
fn judge_straggler(ranks: &[RankTimes], parts: &[Parts], slowest: Slowest) -> Option<Verdict> {
    let reason = slowest.reason;
    let count = (ranks.len() - 1) as f64;
    let mean = |of: &dyn Fn(&RankTimes, &Parts) -> f64| {
        let both: Vec<(&RankTimes, &Parts)> = ranks.iter().zip(parts).collect();
        peers(&both, slowest.index)
            .map(|(rank, parts)| of(rank, parts))
            .sum::<f64>()
            / count
    };
    let least = parts[slowest.index].of(Part::Communication);
    let slow = &parts[slowest.index];
    let lacks_cpus =
        reason == Some(Part::CpuDelay) && 2.0 * slow.data_delay > slow.of(Part::CpuDelay);
    let is_for_data = reason.is_some_and(Part::is_of_loaders) || lacks_cpus;
    // A peer whose loaders hardly rest would soon wait for them instead.
    let busy =
        |rank: &RankTimes| rank.wall * rank.loader_busy.filter(|_| is_for_data).unwrap_or(0.0);
    let waited = |parts: &Parts| (parts.of(Part::Communication) - least).max(0.0);
    let gain = mean(&|rank, parts| waited(parts).min(rank.wall - busy(rank)));
    let hidden = mean(&|rank, parts| busy(rank) - (parts.total() - waited(parts)));
    let input = mean(&|_, parts| sum(std::slice::from_ref(parts), Bound::Input));
    let delay = mean(&|_, parts| parts.of(Part::CpuDelay));
    let wall = mean(&|rank, _| rank.wall);
    let is_explained = slowest.more_seconds > 0.0;
    if !is_explained || gain < WASTE * wall || gain < input.max(delay).max(hidden) {
        return None;
    }
    let all: f64 = ranks.iter().map(|rank| rank.wall).sum();
    let share = gain / wall;
    Some(Verdict {
        bound: Bound::Straggler,
        cause: reason,
        straggler: Some(slowest.index),
        evidence: format!(
            "its peers waited for it for {gain:.1} s of their {wall:.1} s each ({:.0} %); it spent {:.1} s more {} \
             than they did",
            100.0 * share,
            slowest.more_seconds,
            slowest.spent()
        ),
        helps: Some(reason.map_or(
            "a look at the stack of that rank: it is blocked by nothing that is seen",
            |reason| helps(reason, std::slice::from_ref(slow)),
        )),
        share: Some(gain * count / all),
        at_most_seconds: Some(gain),
    })
}

/// Counts waits for the slowest rank as what that rank was held up by.
fn blame(parts: &mut [Parts], slowest: Slowest) {
    let Some(reason) = slowest.reason else { return };
    let least = parts[slowest.index].of(Part::Communication);
    for rank in parts {
        rank.count_as(reason, rank.of(Part::Communication) - least);
    }
}

#[cfg(test)]
mod tests;
