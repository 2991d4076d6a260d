//! Communication-bound: the ranks wait for each other in collectives.

use super::next_step::NextStep;
use super::resource::{Resource, ResourceTime};
use super::{Verdict, VerdictDescription};
use crate::times::{RankTimeParts, TimePart};

pub(super) static RESOURCE: Resource = Resource {
    key: "communication",
    title: "communication-bound",
    time_name: "collectives",
    parts: &[(TimePart::Communication, "in collectives")],
    remedy: |_, ranks| communication_remedy(ranks),
    max_savable_seconds: |_| f64::INFINITY,
    next_steps,
    verdict: |time, ranks| {
        let remedy = communication_remedy(ranks);
        Verdict::Communication(CommunicationBound { time, remedy })
    },
};

fn communication_remedy(ranks: &[RankTimeParts]) -> &'static str {
    match ranks.iter().all(|rank| rank.only_infers) {
        true => "fewer or smaller collectives per request",
        false => "overlapping collectives with the backward pass, or fewer bytes",
    }
}

/// Ranks that reduce gradients can reduce less. Ranks that gather and scatter shards of a model cannot do without.
fn next_steps(time: &ResourceTime, ranks: &[RankTimeParts]) -> Vec<NextStep> {
    let reduce = |rank: &RankTimeParts| !rank.only_infers && !rank.mostly_moves_shards;
    if !ranks.iter().all(reduce) {
        return Vec::new();
    }
    let most = time.at_most_seconds;
    vec![
        NextStep::with_max_saving(
            "gradients of half the size",
            "model.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook)",
            most,
        ),
        NextStep::with_max_saving(
            "fewer reductions: accumulate gradients",
            "with model.no_sync(): loss.backward()",
            most,
        ),
        NextStep::with_max_saving(
            "reductions beside the backward pass, in larger buckets",
            "DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)",
            most,
        ),
    ]
}

/// The verdict that the ranks wait for each other in collectives.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CommunicationBound {
    time: ResourceTime,
    remedy: &'static str,
}

impl CommunicationBound {
    pub(super) fn describe(&self) -> VerdictDescription {
        let evidence = format!("collectives took {}", self.time.share_text());
        (self.time).describe(&RESOURCE, TimePart::Communication, evidence, self.remedy)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::times::RankTimes;
    use crate::verdict::judge_ranks;
    use crate::verdict::tests::{
        assert_bound_of_cases, assert_verdict_json, rank_waiting_for_gpu, rank_waiting_for_peer,
    };

    #[test]
    fn lines_about_gradients_are_for_ranks_that_reduce_gradients() {
        let count = |rank: RankTimes| judge_ranks(&[rank; 2]).describe().next_steps.len();
        assert_eq!(count(rank_waiting_for_peer()), 3);
        let infers = RankTimes {
            only_infers: true,
            launches: 1.0,
            ..rank_waiting_for_peer()
        };
        assert_eq!(count(infers), 0);
        let helps = judge_ranks(&[infers; 2]).describe().helps;
        assert_eq!(helps, Some("fewer or smaller collectives per request"));
        let shards = RankTimes {
            mostly_moves_shards: true,
            ..rank_waiting_for_peer()
        };
        assert_eq!(count(shards), 0);
    }

    #[test]
    fn long_collectives_bound_a_job() {
        assert_bound_of_cases(
            "communication",
            &[(
                "waits for peers",
                RankTimes {
                    communication: 55.0,
                    peer_waits: 55.0,
                    ..rank_waiting_for_gpu()
                },
            )],
        );
    }

    #[test]
    fn the_json_keeps_its_values() {
        assert_verdict_json(
            &[rank_waiting_for_peer()],
            &json!(["communication", "communication", null, 0.5, 50.0]),
        );
    }
}
