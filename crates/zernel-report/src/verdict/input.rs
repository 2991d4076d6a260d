//! Input-bound: the ranks wait for data.

use super::job::{BOUNDING_WAIT_SHARE, JobTimes};
use super::next_step::NextStep;
use super::resource::{Resource, ResourceTime, sum_part_seconds};
use super::{Verdict, VerdictDescription, cpu_limit, cpu_scheduler};
use crate::times::{RankTimeParts, TimePart};

/// Busy share from which loaders count as never resting. The rest is handing over requests and batches.
const SATURATED_BUSY_SHARE: f64 = 0.75;

pub(super) static RESOURCE: Resource = Resource {
    key: "input",
    title: "input-bound",
    time_name: "waits for data",
    parts: &[
        (TimePart::Prepare, "waiting while loaders prepared data"),
        (TimePart::Fetch, "waiting while loaders fetched data"),
        (
            TimePart::OtherData,
            "waiting for data that no loader worked on",
        ),
    ],
    remedy: input_remedy,
    max_savable_seconds: |_| f64::INFINITY,
    next_steps,
    verdict: input_verdict,
};

/// The ranks wait for data.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct InputBound {
    time: ResourceTime,
    /// Loaders ran on CPUs meanwhile.
    prepare: f64,
    /// Loaders waited for disk or network meanwhile.
    fetch: f64,
    /// Loaders did neither.
    other: f64,
    /// The largest of the three.
    cause: TimePart,
    remedy: &'static str,
}

/// Rule: the loaders never rest, and the ranks wait for them for [`BOUNDING_WAIT_SHARE`] of the time. Loaders work in parallel to the
/// steps, so a faster step does not make such a job faster. The loaders may lack CPUs; then the CPU scheduler bounds it.
pub(super) fn judge_saturated_loaders(job: &JobTimes) -> Option<Verdict> {
    let mut ranks = job.ranks.iter();
    let never_rest = ranks.all(|rank| rank.max_loader_busy_share >= Some(SATURATED_BUSY_SHARE));
    let parts = &job.parts_with_waits_reassigned;
    let delays: f64 = parts.iter().map(|rank| rank.loader_cpu_delay).sum();
    let data_waits = RESOURCE.total_seconds_of_ranks(parts);
    if !never_rest || data_waits + delays < BOUNDING_WAIT_SHARE * job.total_time.wall_seconds {
        return None;
    }
    let resources = [&RESOURCE, &cpu_scheduler::RESOURCE, &cpu_limit::RESOURCE];
    let by_time = |a: &&&Resource, b: &&&Resource| {
        a.total_seconds_of_ranks(parts)
            .total_cmp(&b.total_seconds_of_ranks(parts))
    };
    let resource = resources.iter().max_by(by_time)?;
    Some(resource.verdict_of_resource(job))
}

/// More loaders help if there are CPUs for them, or if they need none. Without loaders, the first ones help most.
fn next_steps(time: &ResourceTime, ranks: &[RankTimeParts]) -> Vec<NextStep> {
    const MORE_WORKERS_LINE: &str = "DataLoader(dataset, num_workers=N, persistent_workers=True)";
    let most = time.at_most_seconds;
    let prepare = sum_part_seconds(ranks, TimePart::Prepare);
    let fetch = sum_part_seconds(ranks, TimePart::Fetch);
    let other = sum_part_seconds(ranks, TimePart::OtherData);
    let fill_cpus = ranks.iter().all(|rank| rank.loaders_fill_cpus);
    let have_loaders = ranks.iter().any(|rank| rank.loaders > 0.0);
    let mut steps = Vec::new();
    if !have_loaders && prepare + fetch >= other {
        let what = "loader processes: the training thread loads its data itself";
        steps.push(NextStep::with_max_saving(what, MORE_WORKERS_LINE, most));
    } else if have_loaders && (!fill_cpus || prepare < fetch.max(other)) {
        steps.push(NextStep::with_max_saving(
            "more workers",
            MORE_WORKERS_LINE,
            most,
        ));
    }
    if prepare > fetch.max(other) {
        let line = "decode once and store tensors, or torchvision.transforms.v2 on the GPU";
        steps.push(NextStep::with_max_saving(
            "cheaper preprocessing",
            line,
            most,
        ));
    }
    steps
}

fn input_verdict(time: ResourceTime, ranks: &[RankTimeParts]) -> Verdict {
    let prepare = sum_part_seconds(ranks, TimePart::Prepare);
    let fetch = sum_part_seconds(ranks, TimePart::Fetch);
    let other = sum_part_seconds(ranks, TimePart::OtherData);
    let (part, most) = match fetch >= prepare {
        true => (TimePart::Fetch, fetch),
        false => (TimePart::Prepare, prepare),
    };
    let cause = if other >= most {
        TimePart::OtherData
    } else {
        part
    };
    Verdict::Input(InputBound {
        time,
        prepare,
        fetch,
        other,
        cause,
        remedy: input_remedy(cause, ranks),
    })
}

fn input_remedy(part: TimePart, ranks: &[RankTimeParts]) -> &'static str {
    let loaders_fill_cpus = ranks.iter().all(|rank| rank.loaders_fill_cpus);
    match part {
        TimePart::Fetch => "faster storage or network, or deeper prefetching",
        // A loader that sleeps or waits for something that is not seen takes no CPU, so more of them can.
        TimePart::OtherData if ranks.iter().any(|rank| rank.loaders > 0.0) => {
            "more loaders: those that the ranks have wait for something else than CPU, disk or network"
        }
        TimePart::OtherData => {
            "checking the data source: no process that the ranks started worked on the data"
        }
        _ if loaders_fill_cpus => {
            "cheaper preprocessing; there are already as many loaders as CPUs"
        }
        _ => "more loaders if CPUs are free, or cheaper preprocessing",
    }
}

impl InputBound {
    pub(super) fn describe(&self) -> VerdictDescription {
        let evidence = format!(
            "waits for data took {}: loaders prepared for {:.1} s, fetched for {:.1} s, did neither for {:.1} s",
            self.time.share_text(),
            self.prepare,
            self.fetch,
            self.other
        );
        (self.time).describe(&RESOURCE, self.cause, evidence, self.remedy)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::times::RankTimes;
    use crate::verdict::judge_ranks;
    use crate::verdict::tests::{
        assert_bound_of_cases, assert_verdict_json, json_bound_of, rank_waiting_for_gpu,
        rank_waiting_for_loaders, remedy_of_verdict,
    };

    #[test]
    fn waits_for_busy_loaders_or_long_waits_for_data_bound_a_job() {
        assert_bound_of_cases(
            "input",
            &[
                ("waits for saturated loaders", rank_waiting_for_loaders()),
                (
                    "loads data itself most of the time",
                    RankTimes {
                        data_waits: 60.0,
                        data_prepare: 50.0,
                        gpu_waits: 30.0,
                        max_loader_busy_share: None,
                        ..rank_waiting_for_gpu()
                    },
                ),
            ],
        );
    }

    #[test]
    fn the_gain_is_at_most_the_time_of_the_worst_rank() {
        let verdict = judge_ranks(&[rank_waiting_for_loaders(), rank_waiting_for_loaders()]);
        assert_eq!(json_bound_of(&verdict), "input");
        assert_eq!(verdict.describe().at_most_seconds, Some(29.5));
        assert_eq!(verdict.describe().share, Some(0.295));
    }

    #[test]
    fn more_loaders_are_a_remedy_only_if_cpus_are_free() {
        let full = RankTimes {
            loaders_fill_cpus: true,
            ..rank_waiting_for_loaders()
        };
        let helps = |ranks: &[RankTimes]| remedy_of_verdict(&judge_ranks(ranks));
        assert!(helps(&[rank_waiting_for_loaders()]).contains("more loaders"));
        assert!(helps(&[full, rank_waiting_for_loaders()]).contains("more loaders"));
        let advice = helps(&[full, full]);
        assert!(!advice.contains("more loaders"), "{advice}");
        assert!(advice.contains("as many loaders as CPUs"), "{advice}");
    }

    #[test]
    fn the_json_keeps_its_values() {
        assert_verdict_json(
            &[rank_waiting_for_loaders()],
            &json!(["input", "prepare", null, 0.295, 29.5]),
        );
    }
}
