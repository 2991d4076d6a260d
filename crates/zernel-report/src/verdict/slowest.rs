//! The rank that the others wait for.

use std::collections::BTreeSet;

use serde::Serialize;

use super::resource::Resource;
use crate::times::{RankTimeParts, RankTimes, TimePart};

/// Share of its time by which a rank must wait less than its peers to count as the slowest.
const MIN_SHORTER_WAIT_SHARE: f64 = 0.05;

/// The rank that the others wait for.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct SlowestRank {
    /// Index of the slowest rank in the list of ranks.
    pub(crate) index: usize,
    /// Seconds that the slowest rank waited less in collectives than the rank that waited longest.
    pub(crate) seconds: f64,
    /// The part that the slowest rank spent more time in than its peers on average. `None`: no part, or an unknown one.
    pub(crate) reason: Option<TimePart>,
    /// Seconds that the slowest rank spent more in `reason` than its peers on average; 0 if there is no such part.
    pub(crate) more_seconds: f64,
    /// Whether the slowest rank compiled for most of these seconds. Compiling is no [`TimePart`].
    #[serde(skip)]
    pub(crate) is_excess_mostly_compiling: bool,
}

impl SlowestRank {
    /// What the rank spent more time in than its peers: the end of the sentence "it spent 1 s more".
    pub(crate) fn excess_activity_text(&self) -> &'static str {
        match self.reason {
            None if self.is_excess_mostly_compiling => "compiling",
            reason => reason
                .and_then(Resource::excess_activity_text)
                .unwrap_or("blocked for an unknown reason"),
        }
    }
}

/// Finds the rank that waits least in collectives: peers that are ready wait for the one that is not. `None` if no rank
/// waits longer by [`MIN_SHORTER_WAIT_SHARE`] of its time.
pub(crate) fn find_slowest_rank(ranks: &[RankTimes]) -> Option<SlowestRank> {
    let groups: BTreeSet<usize> = ranks.iter().map(|rank| rank.collective_group).collect();
    let slowest = groups
        .into_iter()
        .filter_map(|group| slowest_rank_of_group(ranks, group));
    slowest.max_by(|a, b| a.seconds.total_cmp(&b.seconds))
}

/// Finds the slowest of the ranks that may wait for each other.
fn slowest_rank_of_group(ranks: &[RankTimes], group: usize) -> Option<SlowestRank> {
    let by_wait = |a: &&(usize, f64), b: &&(usize, f64)| a.1.total_cmp(&b.1);
    let members = ranks.iter().enumerate();
    let waits: Vec<(usize, f64)> = members
        .filter(|(_, rank)| rank.collective_group == group)
        .map(|(index, rank)| (index, rank.communication))
        .collect();
    let (index, least) = *waits.iter().min_by(by_wait)?;
    let (longest_index, most) = *waits.iter().max_by(by_wait)?;
    let seconds = most - least;
    if seconds <= 0.0 || seconds < MIN_SHORTER_WAIT_SHARE * ranks[longest_index].wall {
        return None;
    }
    let (reason, more_seconds) = part_with_largest_excess(ranks, index)?;
    let more_compile =
        ranks[index].compile - mean_of_peers(ranks, index, |peer| ranks[peer].compile);
    Some(SlowestRank {
        index,
        seconds,
        reason: reason.filter(|_| more_seconds > 0.0),
        more_seconds: more_seconds.max(0.0),
        is_excess_mostly_compiling: more_compile > more_seconds / 2.0,
    })
}

/// The part that a rank spent most time in beyond the mean of its peers, and how much. `None` as a part is unknown time.
fn part_with_largest_excess(ranks: &[RankTimes], index: usize) -> Option<(Option<TimePart>, f64)> {
    let split: Vec<(&RankTimes, RankTimeParts)> = ranks
        .iter()
        .map(|rank| (rank, RankTimeParts::new(rank)))
        .collect();
    let spent = |part: Option<TimePart>, (rank, parts): &(&RankTimes, RankTimeParts)| match part {
        Some(part) => parts.seconds_in(part),
        None => rank.wall - parts.total_seconds(),
    };
    let excess = |part: Option<TimePart>| {
        let of_peers = mean_of_peers(ranks, index, |peer| spent(part, &split[peer]));
        spent(part, &split[index]) - of_peers
    };
    let parts = TimePart::ALL
        .into_iter()
        .filter(|part| *part != TimePart::Communication);
    let parts = parts.map(Some).chain([None]);
    let excesses = parts.map(|part| (part, excess(part)));
    excesses.max_by(|(_, a), (_, b)| a.total_cmp(b))
}

/// Indices of the other ranks that a rank may wait for in collectives.
pub(super) fn peers_of_rank(ranks: &[RankTimes], index: usize) -> impl Iterator<Item = usize> {
    let group = ranks[index].collective_group;
    let is_peer = move |peer: &usize| *peer != index && ranks[*peer].collective_group == group;
    (0..ranks.len()).filter(is_peer)
}

/// The mean of a figure over the peers of a rank that has at least one.
pub(super) fn mean_of_peers(
    ranks: &[RankTimes],
    index: usize,
    figure: impl Fn(usize) -> f64,
) -> f64 {
    let peers: Vec<f64> = peers_of_rank(ranks, index).map(figure).collect();
    peers.iter().sum::<f64>() / peers.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::judge_ranks;
    use crate::verdict::tests::{json_bound_of, rank_waiting_for_gpu, rank_waiting_for_peer};

    /// One rank compiles anew while its peers wait in their collectives.
    #[test]
    fn a_rank_that_compiles_is_a_straggler() {
        let peer = RankTimes {
            communication: 45.0,
            peer_waits: 45.0,
            training_cpu: 50.0,
            ..RankTimes::default()
        };
        let peer = RankTimes {
            wall: 100.0,
            launches: 1.0,
            ..peer
        };
        let compiles = RankTimes {
            communication: 0.0,
            peer_waits: 0.0,
            compile: 45.0,
            unknown: 45.0,
            training_cpu: 50.2,
            ..peer
        };
        let verdict = judge_ranks(&[peer, compiles, peer, peer]);
        assert_eq!(json_bound_of(&verdict), "straggler");
        let evidence = verdict.describe().evidence;
        assert!(
            evidence.contains("more compiling than they did"),
            "{evidence}"
        );
    }

    #[test]
    fn the_slowest_rank_waits_least_in_collectives() {
        let found = find_slowest_rank(&[
            rank_waiting_for_peer(),
            rank_waiting_for_gpu(),
            rank_waiting_for_peer(),
        ])
        .unwrap();
        assert_eq!((found.index, found.seconds), (1, 42.0));
        assert_eq!(
            (found.reason, found.more_seconds),
            (Some(TimePart::Gpu), 42.0)
        );
        assert!(!found.is_excess_mostly_compiling);
        assert_eq!(
            find_slowest_rank(&[rank_waiting_for_gpu(), rank_waiting_for_gpu()]),
            None
        );
        assert_eq!(find_slowest_rank(&[rank_waiting_for_gpu()]), None);
        assert_eq!(find_slowest_rank(&[]), None);
    }

    /// A process beside the training, which evaluates the model or trains another one, keeps no rank waiting.
    #[test]
    fn a_process_without_peers_is_not_the_slowest_rank() {
        let alone = RankTimes {
            communication: 0.0,
            collective_group: 3,
            ..rank_waiting_for_gpu()
        };
        let peer = rank_waiting_for_peer();
        assert_eq!(find_slowest_rank(&[peer, peer, peer, alone]), None);
        let verdict = judge_ranks(&[peer, peer, peer, alone]);
        assert_ne!(json_bound_of(&verdict), "straggler");
        // The slowest rank of another group of ranks is found beside it.
        let slow = RankTimes {
            collective_group: 0,
            ..alone
        };
        let found = find_slowest_rank(&[peer, slow, peer, alone]).unwrap();
        assert_eq!((found.index, found.seconds), (1, 50.0));
    }
}
