//! Which verdict the times of the ranks give.
//!
//! The time of a rank is split into parts that do not overlap (`parts`): waits for data, for peers and for the GPU, time
//! runnable without a CPU, and host work. The verdict names what would make the job faster. The first rule that applies
//! wins:
//!
//! 1. **Straggler**: the peers of one rank wait for it for [`WASTE`] of their time, and would not wait even longer for
//!    their own loaders if that rank were faster. If this rule does not apply, waits for the slowest rank count as the
//!    part that makes it slow.
//! 2. **Saturated loaders**: the loaders never rest and the ranks wait for data for [`WASTE`] of the time. Loaders work
//!    in parallel to the steps, so a faster step does not make such a job faster.
//! 3. **Dominant resource**: one resource takes [`DOMINANT`] of the time. The parts follow one another, so the time of
//!    each is what it can save.
//!
//! Otherwise there is no verdict.

use std::slice;

use super::{
    Bound, Evidence, GpuActivity, Inconclusive, Remedy, Resource, Slowest, Straggler, TotalTime,
    Verdict,
    slowest::{peers, slowest},
};
use crate::times::{Part, Parts, RankTimes};

/// Seconds that the longest rank must have been observed for. Anything shorter is start-up.
pub(super) const SHORTEST: f64 = 1.0;
/// Share of the time that a wait must take to bound a job that nothing else can speed up.
const WASTE: f64 = 0.15;
/// Share of the time that a resource must take to bound a job.
pub(super) const DOMINANT: f64 = 0.35;
/// Largest share of unknown time that allows a verdict.
const UNKNOWN: f64 = 0.5;
/// Busy share from which loaders count as never resting. The rest is handing over requests and batches.
const NEVER_RESTS: f64 = 0.75;
/// Smallest share of the time that the evidence mentions.
pub(super) const MENTIONED: f64 = 0.05;

/// Judges what bounds a job.
pub(crate) fn judge(ranks: &[RankTimes]) -> Verdict {
    if ranks.is_empty() {
        return Verdict::CannotTell(Inconclusive::NoRanks);
    }
    let longest_seconds = ranks.iter().map(|rank| rank.wall).fold(0.0, f64::max);
    if longest_seconds < SHORTEST {
        return Verdict::CannotTell(Inconclusive::TooShort { longest_seconds });
    }
    let mut parts: Vec<Parts> = ranks.iter().map(Parts::new).collect();
    let total = TotalTime {
        ranks: ranks.len(),
        wall_seconds: ranks.iter().map(|rank| rank.wall).sum(),
    };
    let known: f64 = parts.iter().map(Parts::total).sum();
    let unknown_seconds = total.wall_seconds - known;
    if unknown_seconds > UNKNOWN * total.wall_seconds {
        return Verdict::CannotTell(Inconclusive::MostlyUnknown {
            unknown_seconds,
            total,
        });
    }
    if let Some(slowest) = slowest(ranks) {
        if let Some(straggler) = judge_straggler(ranks, &parts, slowest) {
            return Verdict::Straggler(straggler);
        }
        charge_waits_for_slowest(&mut parts, slowest);
    }
    let resource = saturated_loaders(ranks, &parts, total.wall_seconds)
        .or_else(|| dominant_resource(&parts, total.wall_seconds));
    match resource {
        Some(resource) => Verdict::Bound(bound_by(resource, &parts, total)),
        None => Verdict::CannotTell(Inconclusive::NothingDominates {
            shares: mentioned(&parts, total.wall_seconds, None),
            total,
        }),
    }
}

fn sum_of_part(parts: &[Parts], part: Part) -> f64 {
    parts.iter().map(|rank| rank.seconds_in(part)).sum()
}

/// Seconds of all ranks that a resource takes.
fn sum(parts: &[Parts], resource: Resource) -> f64 {
    let of_resource = resource.parts().iter();
    of_resource.map(|part| sum_of_part(parts, *part)).sum()
}

/// The resources with their seconds, largest first.
fn by_size(parts: &[Parts]) -> Vec<(Resource, f64)> {
    let mut resources = Resource::ALL
        .map(|resource| (resource, sum(parts, resource)))
        .to_vec();
    resources.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    resources
}

/// The resources with a share worth mentioning, largest first, without `except`.
fn mentioned(parts: &[Parts], wall: f64, except: Option<Resource>) -> Vec<(Resource, f64)> {
    let mut resources = by_size(parts);
    resources
        .retain(|(resource, seconds)| *seconds >= MENTIONED * wall && Some(*resource) != except);
    resources
}

/// What holds up loaders that never rest, if the ranks wait for them.
fn saturated_loaders(ranks: &[RankTimes], parts: &[Parts], wall: f64) -> Option<Resource> {
    let never_rest = ranks
        .iter()
        .all(|rank| rank.loader_busy >= Some(NEVER_RESTS));
    let delays: f64 = parts.iter().map(|rank| rank.data_delay).sum();
    if !never_rest || sum(parts, Resource::Input) + delays < WASTE * wall {
        return None;
    }
    let resources = by_size(parts).into_iter().map(|(resource, _)| resource);
    let mut of_loaders =
        resources.filter(|resource| matches!(resource, Resource::Input | Resource::CpuScheduler));
    of_loaders.next()
}

fn dominant_resource(parts: &[Parts], wall: f64) -> Option<Resource> {
    let (resource, seconds) = by_size(parts)[0];
    (seconds >= DOMINANT * wall).then_some(resource)
}

fn bound_by(resource: Resource, parts: &[Parts], total: TotalTime) -> Bound {
    let of_rank = |rank: &Parts| sum(slice::from_ref(rank), resource);
    let seconds = sum(parts, resource);
    let evidence = evidence(resource, parts);
    let remedy = match evidence {
        Evidence::Gpu { collectives, .. } if 2.0 * collectives > seconds => {
            Remedy::FasterGpuOrFewerBytes
        }
        _ => remedy(evidence.cause(), parts),
    };
    Bound {
        evidence,
        seconds,
        total,
        others: mentioned(parts, total.wall_seconds, Some(resource)),
        remedy,
        at_most_seconds: parts.iter().map(of_rank).fold(0.0, f64::max),
    }
}

fn evidence(resource: Resource, parts: &[Parts]) -> Evidence {
    match resource {
        Resource::Input => Evidence::Input {
            prepare: sum_of_part(parts, Part::Prepare),
            fetch: sum_of_part(parts, Part::Fetch),
            other: sum_of_part(parts, Part::OtherData),
        },
        Resource::CpuScheduler => {
            let loaders: f64 = parts.iter().map(|rank| rank.data_delay).sum();
            Evidence::CpuScheduler {
                loaders,
                ranks: sum_of_part(parts, Part::CpuDelay) - loaders,
            }
        }
        Resource::Communication => Evidence::Communication,
        Resource::Gpu => Evidence::Gpu {
            collectives: parts.iter().map(|rank| rank.shared_with_collectives).sum(),
            ahead: parts.iter().map(|rank| rank.ahead_of_gpu).sum(),
        },
        Resource::Host => Evidence::Host {
            gpu: gpu_activity(parts),
        },
    }
}

fn gpu_activity(parts: &[Parts]) -> GpuActivity {
    let shares: Vec<f64> = parts.iter().filter_map(|rank| rank.gpu_busy).collect();
    match parts.iter().any(|rank| rank.uses_gpu) {
        true if shares.is_empty() => GpuActivity::NotReported,
        true => GpuActivity::Busy(shares.iter().sum::<f64>() / shares.len() as f64),
        false => GpuActivity::Unused,
    }
}

/// What makes a part of these ranks' time shorter.
fn remedy(part: Part, ranks: &[Parts]) -> Remedy {
    let uses_gpu = ranks.iter().any(|rank| rank.uses_gpu);
    let loaders_fill_cpus = ranks.iter().all(|rank| rank.loaders_fill_cpus);
    match part {
        Part::Prepare if loaders_fill_cpus => Remedy::CheaperPreprocessing,
        Part::Prepare => Remedy::MoreLoaders,
        Part::Fetch => Remedy::FasterStorage,
        Part::OtherData => Remedy::CheckDataSource,
        Part::CpuDelay => Remedy::FewerThreads,
        Part::Communication => Remedy::OverlapCollectives,
        Part::Gpu => Remedy::FasterGpu,
        Part::Host if uses_gpu => Remedy::LessHostWork,
        Part::Host => Remedy::AddGpu,
    }
}

/// Judges whether the slowest rank alone holds the others up.
fn judge_straggler(ranks: &[RankTimes], parts: &[Parts], slowest: Slowest) -> Option<Straggler> {
    let count = (ranks.len() - 1) as f64;
    let peer_mean = |measure: &dyn Fn(&RankTimes, &Parts) -> f64| {
        let both: Vec<(&RankTimes, &Parts)> = ranks.iter().zip(parts).collect();
        let peers = peers(&both, slowest.index).map(|(rank, parts)| measure(rank, parts));
        peers.sum::<f64>() / count
    };
    let slow = &parts[slowest.index];
    let least = slow.seconds_in(Part::Communication);
    let is_for_data = is_slowed_by_loaders(slowest.reason, slow);
    // A peer with loaders that hardly rest would soon wait for them instead.
    let busy =
        |rank: &RankTimes| rank.wall * rank.loader_busy.filter(|_| is_for_data).unwrap_or(0.0);
    let waited = |parts: &Parts| (parts.seconds_in(Part::Communication) - least).max(0.0);
    let gain = peer_mean(&|rank, parts| waited(parts).min(rank.wall - busy(rank)));
    let hidden = peer_mean(&|rank, parts| busy(rank) - (parts.total() - waited(parts)));
    let input = peer_mean(&|_, parts| sum(slice::from_ref(parts), Resource::Input));
    let delay = peer_mean(&|_, parts| parts.seconds_in(Part::CpuDelay));
    let peer_wall_seconds = peer_mean(&|rank, _| rank.wall);
    let is_explained = slowest.more_seconds > 0.0;
    let is_enough = gain >= WASTE * peer_wall_seconds && gain >= input.max(delay).max(hidden);
    if !is_explained || !is_enough {
        return None;
    }
    let all: f64 = ranks.iter().map(|rank| rank.wall).sum();
    let remedy_for = |reason| remedy(reason, slice::from_ref(slow));
    Some(Straggler {
        slowest,
        waited_seconds: gain,
        peer_wall_seconds,
        share: gain * count / all,
        remedy: slowest.reason.map_or(Remedy::DumpStack, remedy_for),
    })
}

/// Whether a rank is slow because of its loaders: they work, or most of its CPU delay is theirs.
fn is_slowed_by_loaders(reason: Option<Part>, slow: &Parts) -> bool {
    let loaders_lack_cpus =
        reason == Some(Part::CpuDelay) && 2.0 * slow.data_delay > slow.seconds_in(Part::CpuDelay);
    reason.is_some_and(Part::is_data_wait) || loaders_lack_cpus
}

/// Counts waits for the slowest rank as the part that makes it slow.
fn charge_waits_for_slowest(parts: &mut [Parts], slowest: Slowest) {
    let Some(reason) = slowest.reason else { return };
    let least = parts[slowest.index].seconds_in(Part::Communication);
    for rank in parts {
        rank.reassign_communication(reason, rank.seconds_in(Part::Communication) - least);
    }
}
