//! The times of all ranks of a job, as the rules use them.

use super::slowest::{SlowestRank, find_slowest_rank, peers_of_rank};
use crate::times::{RankTimeParts, RankTimes, TimePart};

/// Share of the time that ranks must wait for saturated loaders or for a straggler, so that this wait bounds the job.
pub(super) const BOUNDING_WAIT_SHARE: f64 = 0.15;

/// The job that the rules judge.
pub(super) struct JobTimes<'a> {
    pub(super) ranks: &'a [RankTimes],
    pub(super) total_time: TotalTime,
    pub(super) slowest: Option<SlowestRank>,
    /// The parts of each rank's time.
    pub(super) parts: Vec<RankTimeParts>,
    /// Like `parts`, but the time that peers wait for the slowest rank is moved to the part that makes that rank slow.
    pub(super) parts_with_waits_reassigned: Vec<RankTimeParts>,
}

impl<'a> JobTimes<'a> {
    pub(super) fn new(ranks: &'a [RankTimes]) -> Self {
        let parts: Vec<RankTimeParts> = ranks.iter().map(RankTimeParts::new).collect();
        let slowest = find_slowest_rank(ranks);
        let mut parts_with_waits_reassigned = parts.clone();
        if let Some(slowest) = slowest {
            reassign_waits_for_slowest(ranks, &mut parts_with_waits_reassigned, slowest);
        }
        let total = TotalTime {
            ranks: ranks.len(),
            wall_seconds: ranks.iter().map(RankTimes::wall_without_compiling).sum(),
            warm_up_seconds: ranks.iter().map(|rank| rank.warm_up).sum(),
        };
        Self {
            ranks,
            total_time: total,
            slowest,
            parts,
            parts_with_waits_reassigned,
        }
    }
}

/// Counts waits for the slowest rank as the part that makes it slow.
fn reassign_waits_for_slowest(
    ranks: &[RankTimes],
    parts: &mut [RankTimeParts],
    slowest: SlowestRank,
) {
    let Some(reason) = slowest.reason else { return };
    let least = parts[slowest.index].seconds_in(TimePart::Communication);
    for peer in peers_of_rank(ranks, slowest.index) {
        let waited = parts[peer].seconds_in(TimePart::Communication) - least;
        parts[peer].reassign_communication(reason, waited);
    }
}

/// Wall time of all ranks together, without compilations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TotalTime {
    pub(super) ranks: usize,
    pub(super) wall_seconds: f64,
    /// The warm-up of all ranks, which is not part of it.
    pub(super) warm_up_seconds: f64,
}

impl TotalTime {
    /// The end of the evidence of a verdict: the warm-up, if it took longer than this time.
    pub(super) fn warm_up_text(&self) -> String {
        match self.warm_up_seconds > self.wall_seconds {
            true => format!(
                "; the warm-up took {:.1} s and is left out",
                self.warm_up_seconds
            ),
            false => String::new(),
        }
    }

    /// A time of all ranks as part of this one.
    pub(super) fn share_text(&self, seconds: f64) -> String {
        let wall = self.wall_seconds;
        let ranks = match self.ranks {
            0 | 1 => String::new(),
            ranks => format!(", sum of {ranks} ranks"),
        };
        let percent = 100.0 * seconds / wall;
        format!("{seconds:.1} s of {wall:.1} s ({percent:.0} %{ranks})")
    }
}
