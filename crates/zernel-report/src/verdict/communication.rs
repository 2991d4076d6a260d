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
    remedy: |_, _| REMEDY,
    max_savable_seconds: |_| f64::INFINITY,
    next_steps,
    verdict: |time, _| Verdict::Communication(CommunicationBound { time }),
};

const REMEDY: &str = "overlapping collectives with the backward pass, or fewer bytes";

fn next_steps(time: &ResourceTime, _: &[RankTimeParts]) -> Vec<NextStep> {
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
}

impl CommunicationBound {
    pub(super) fn describe(&self) -> VerdictDescription {
        let evidence = format!("collectives took {}", self.time.share_text());
        (self.time).describe(&RESOURCE, TimePart::Communication, evidence, REMEDY)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::times::RankTimes;
    use crate::verdict::tests::{
        assert_bound_of_cases, assert_verdict_json, rank_waiting_for_gpu, rank_waiting_for_peer,
    };

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
