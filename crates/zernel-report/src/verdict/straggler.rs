//! Straggler-bound: one rank keeps its peers waiting.

use std::slice;

use super::job::{BOUNDING_WAIT_SHARE, JobTimes, TotalTime};
use super::resource::Resource;
use super::slowest::{SlowestRank, mean_of_peers, peers_of_rank};
use super::{Verdict, VerdictDescription, input};
use crate::times::{RankTimeParts, RankTimes, TimePart};

/// The remedy if nothing that was measured makes the rank slow.
const STACK_DUMP_REMEDY: &str = "a stack dump of that rank, for example with `py-spy dump --pid`";

/// One rank that keeps its peers waiting.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Straggler {
    slowest: SlowestRank,
    /// Time that a peer waits for it, on average. The job can get shorter by this at most.
    waited_seconds: f64,
    /// Wall time of a peer, on average.
    peer_wall_seconds: f64,
    /// Time of all ranks.
    total: TotalTime,
    /// Share of `total` that the peers wait.
    share: f64,
    remedy: &'static str,
}

/// Rule: the peers of one rank wait for it for [`BOUNDING_WAIT_SHARE`] of their time, and would not wait even longer for their own
/// loaders if that rank were faster.
pub(super) fn judge_straggler(job: &JobTimes) -> Option<Verdict> {
    let slowest = job.slowest?;
    let (ranks, parts) = (job.ranks, &job.parts);
    let count = peers_of_rank(ranks, slowest.index).count() as f64;
    let peer_mean = |measure: &dyn Fn(&RankTimes, &RankTimeParts) -> f64| {
        mean_of_peers(ranks, slowest.index, |peer| {
            measure(&ranks[peer], &parts[peer])
        })
    };
    let slow = &parts[slowest.index];
    let least = slow.seconds_in(TimePart::Communication);
    let is_for_data = is_slowed_by_loaders(slowest.reason, slow);
    // A peer with loaders that hardly rest would soon wait for them instead.
    let busy = |rank: &RankTimes| {
        rank.wall
            * rank
                .max_loader_busy_share
                .filter(|_| is_for_data)
                .unwrap_or(0.0)
    };
    // A peer that trained for longer began earlier, and waited for the other one to begin.
    let before = |rank: &RankTimes| (rank.wall - ranks[slowest.index].wall).max(0.0);
    let waited = |rank: &RankTimes, parts: &RankTimeParts| {
        (parts.seconds_in(TimePart::Communication) - least - before(rank)).max(0.0)
    };
    let gain = peer_mean(&|rank, parts| waited(rank, parts).min(rank.wall - busy(rank)));
    let hidden =
        peer_mean(&|rank, parts| busy(rank) - (parts.total_seconds() - waited(rank, parts)));
    let input =
        peer_mean(&|_, parts| input::RESOURCE.total_seconds_of_ranks(slice::from_ref(parts)));
    let delay = peer_mean(&|_, parts| parts.seconds_in(TimePart::CpuDelay));
    let peer_wall_seconds = peer_mean(&|rank, _| rank.wall);
    let is_explained = slowest.more_seconds > 0.0;
    let is_enough =
        gain >= BOUNDING_WAIT_SHARE * peer_wall_seconds && gain >= input.max(delay).max(hidden);
    if !is_explained || !is_enough {
        return None;
    }
    Some(Verdict::Straggler(Straggler {
        slowest,
        waited_seconds: gain,
        peer_wall_seconds,
        total: job.total_time,
        share: gain * count / job.total_time.wall_seconds,
        remedy: straggler_remedy(slowest.reason, slow),
    }))
}

/// Whether a rank is slow because of its loaders: they work, or most of its CPU delay is theirs.
fn is_slowed_by_loaders(reason: Option<TimePart>, slow: &RankTimeParts) -> bool {
    let loaders_lack_cpus = reason == Some(TimePart::CpuDelay)
        && 2.0 * slow.loader_cpu_delay > slow.seconds_in(TimePart::CpuDelay);
    reason.is_some_and(|part| input::RESOURCE.includes_part(part)) || loaders_lack_cpus
}

/// What makes the slow rank faster: the remedy for the part that makes it slow.
fn straggler_remedy(reason: Option<TimePart>, slow: &RankTimeParts) -> &'static str {
    let resource = reason.and_then(|part| Some((part, Resource::resource_of_part(part)?)));
    resource.map_or(STACK_DUMP_REMEDY, |(part, resource)| {
        (resource.remedy)(part, slice::from_ref(slow))
    })
}

impl Straggler {
    pub(super) fn describe(&self) -> VerdictDescription {
        let evidence = format!(
            "its peers waited for it for {:.1} s of {:.1} s ({:.0} %, mean); it spent {:.1} s more {} than they did{}",
            self.waited_seconds,
            self.peer_wall_seconds,
            100.0 * self.waited_seconds / self.peer_wall_seconds,
            self.slowest.more_seconds,
            self.slowest.excess_activity_text(),
            self.total.warm_up_text()
        );
        VerdictDescription {
            title: "straggler-bound",
            bound: "straggler",
            cause: self.slowest.reason,
            straggler: Some(self.slowest.index),
            evidence,
            helps: Some(self.remedy),
            next_steps: Vec::new(),
            share: Some(self.share),
            at_most_seconds: Some(self.waited_seconds),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::verdict::judge_ranks;
    use crate::verdict::tests::{
        assert_verdict_json, json_bound_of, rank_waiting_for_gpu, rank_waiting_for_loaders,
        rank_waiting_for_peer,
    };

    /// The peer waited for the slow rank to begin, not in each step.
    #[test]
    fn a_rank_that_begins_later_is_no_straggler() {
        let early = RankTimes {
            wall: 100.0,
            communication: 70.0,
            peer_waits: 70.0,
            training_cpu: 30.0,
            ..RankTimes::default()
        };
        let late = RankTimes {
            wall: 72.0,
            communication: 42.0,
            peer_waits: 42.0,
            training_cpu: 30.1,
            ..RankTimes::default()
        };
        assert_eq!(json_bound_of(&judge_ranks(&[early, late])), "communication");
        let slow = RankTimes {
            wall: 100.0,
            training_cpu: 58.0,
            ..late
        };
        assert_eq!(json_bound_of(&judge_ranks(&[early, slow])), "straggler");
    }

    #[test]
    fn one_slow_rank_is_a_straggler_for_every_cause() {
        let slow = RankTimes {
            gpu_waits: 38.0,
            ..rank_waiting_for_gpu()
        };
        let cases = [
            (rank_waiting_for_gpu(), TimePart::Gpu),
            (
                RankTimes {
                    training_cpu: 90.0,
                    ..slow
                },
                TimePart::Host,
            ),
            (
                RankTimes {
                    run_delay: 45.0,
                    ..slow
                },
                TimePart::CpuDelay,
            ),
            (
                RankTimes {
                    data_waits: 50.0,
                    data_fetch: 45.0,
                    max_loader_busy_share: Some(0.95),
                    ..slow
                },
                TimePart::Fetch,
            ),
        ];
        for (rank, cause) in cases {
            for peers in [1, 7] {
                let mut ranks = vec![rank_waiting_for_peer(); peers];
                ranks.push(rank);
                let verdict = judge_ranks(&ranks);
                assert_eq!(
                    json_bound_of(&verdict),
                    "straggler",
                    "{}",
                    verdict.describe().evidence
                );
                assert_eq!(
                    verdict.describe().cause,
                    Some(cause),
                    "{}",
                    verdict.describe().evidence
                );
                assert_eq!(verdict.describe().straggler, Some(peers));
                assert_eq!(verdict.describe().at_most_seconds, Some(42.0));
            }
        }
    }

    /// It sleeps or waits for a lock, which no probe reports, while its peers wait for it.
    #[test]
    fn a_straggler_may_be_blocked_for_an_unknown_reason() {
        let asleep = RankTimes {
            gpu_waits: 8.0,
            training_cpu: 10.0,
            ..rank_waiting_for_gpu()
        };
        let ranks = [
            rank_waiting_for_peer(),
            asleep,
            rank_waiting_for_peer(),
            rank_waiting_for_peer(),
        ];
        let verdict = judge_ranks(&ranks);
        assert_eq!(
            json_bound_of(&verdict),
            "straggler",
            "{}",
            verdict.describe().evidence
        );
        assert_eq!(
            (verdict.describe().cause, verdict.describe().straggler),
            (None, Some(1))
        );
        assert!(
            verdict
                .describe()
                .evidence
                .contains("blocked for an unknown reason"),
            "{}",
            verdict.describe().evidence
        );
    }

    /// If loaders hold up all ranks, one rank is always the slowest and hides the waits of the others.
    #[test]
    fn the_slowest_of_many_starved_ranks_is_no_straggler() {
        let ahead = RankTimes {
            data_waits: 3.0,
            data_prepare: 3.0,
            communication: 35.0,
            peer_waits: 35.0,
            gpu_waits: 87.0,
            max_loader_busy_share: Some(0.95),
            ..rank_waiting_for_gpu()
        };
        let mut ranks = vec![ahead; 7];
        ranks.push(rank_waiting_for_loaders());
        let verdict = judge_ranks(&ranks);
        assert_eq!(
            json_bound_of(&verdict),
            "input",
            "{}",
            verdict.describe().evidence
        );
        assert_eq!(verdict.describe().cause, Some(TimePart::Prepare));
        // Nor is a rank a straggler if its peers would wait longer for their own loaders than they gain.
        let lacks_cpus = RankTimes {
            data_waits: 77.0,
            data_prepare: 4.0,
            data_fetch: 0.0,
            data_cpu_delay: 73.0,
            communication: 5.0,
            peer_waits: 5.0,
            gpu_waits: 10.0,
            run_delay: 5.0,
            training_cpu: 3.0,
            max_loader_busy_share: Some(0.99),
            ..rank_waiting_for_gpu()
        };
        let ahead = RankTimes {
            data_waits: 0.0,
            data_prepare: 0.0,
            data_cpu_delay: 0.0,
            communication: 80.0,
            peer_waits: 80.0,
            gpu_waits: 85.0,
            max_loader_busy_share: Some(0.75),
            ..lacks_cpus
        };
        let verdict = judge_ranks(&[ahead, lacks_cpus]);
        assert_eq!(
            json_bound_of(&verdict),
            "cpu-scheduler",
            "{}",
            verdict.describe().evidence
        );
    }

    #[test]
    fn the_json_keeps_its_values() {
        let blocked = RankTimes {
            gpu_waits: 8.0,
            training_cpu: 10.0,
            ..rank_waiting_for_gpu()
        };
        assert_verdict_json(
            &[rank_waiting_for_peer(), rank_waiting_for_gpu()],
            &json!(["straggler", "gpu", 1, 0.21, 42.0]),
        );
        assert_verdict_json(
            &[rank_waiting_for_peer(), blocked],
            &json!(["straggler", null, 1, 0.21, 42.0]),
        );
    }
}
