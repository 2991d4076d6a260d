//! The verdicts that one resource takes the time of all ranks: what they share, and their rule.

use std::slice;

use super::job::{JobTimes, TotalTime};
use super::next_step::{MAX_NEXT_STEPS, NextStep};
use super::{BOUNDING_RESOURCES, Verdict, VerdictDescription};
use crate::times::{RankTimeParts, TimePart};

/// Share of the time that a resource must take to bound a job.
pub(super) const MIN_BOUNDING_SHARE: f64 = 0.35;
/// Smallest share of the time that the evidence mentions.
pub(super) const MIN_MENTIONED_SHARE: f64 = 0.05;

/// A resource that a job waits for or works with.
pub(super) struct Resource {
    /// Value of the JSON key `bound`.
    pub(super) key: &'static str,
    /// Title of the verdict.
    pub(super) title: &'static str,
    /// Name of its time in a list.
    pub(super) time_name: &'static str,
    /// The parts of a rank's time that it takes, with the end of the sentence "it spent 1 s more".
    pub(super) parts: &'static [(TimePart, &'static str)],
    /// What makes a part of these ranks' time shorter.
    pub(super) remedy: fn(TimePart, &[RankTimeParts]) -> &'static str,
    /// Upper limit of the seconds that a rank can save, besides the time that the resource takes; infinite for no limit.
    pub(super) max_savable_seconds: fn(&RankTimeParts) -> f64,
    /// Things to try, from the parts of the ranks.
    pub(super) next_steps: fn(&ResourceTime, &[RankTimeParts]) -> Vec<NextStep>,
    /// The verdict that the resource bounds a job, from the parts of its ranks.
    pub(super) verdict: fn(ResourceTime, &[RankTimeParts]) -> Verdict,
}

impl Resource {
    /// The resource that takes a part.
    pub(super) fn resource_of_part(part: TimePart) -> Option<&'static Self> {
        let mut resources = BOUNDING_RESOURCES.iter().copied();
        resources.find(|resource| resource.includes_part(part))
    }

    /// The end of the sentence "it spent 1 s more" for a part.
    pub(super) fn excess_activity_text(part: TimePart) -> Option<&'static str> {
        let mut parts = Self::resource_of_part(part)?.parts.iter();
        let (_, text) = parts.find(|(own, _)| *own == part)?;
        Some(text)
    }

    pub(super) fn includes_part(&self, part: TimePart) -> bool {
        self.parts.iter().any(|(own, _)| *own == part)
    }

    /// Seconds of all ranks that it takes.
    pub(super) fn total_seconds_of_ranks(&self, ranks: &[RankTimeParts]) -> f64 {
        let parts = self.parts.iter();
        parts.map(|(part, _)| sum_part_seconds(ranks, *part)).sum()
    }

    /// The verdict that this resource bounds the job, with the possible gain and the next steps.
    pub(super) fn verdict_of_resource(&self, job: &JobTimes) -> Verdict {
        let ranks = &job.parts_with_waits_reassigned;
        let of_rank = |rank: &RankTimeParts| {
            self.total_seconds_of_ranks(slice::from_ref(rank))
                .min((self.max_savable_seconds)(rank))
        };
        let mut time = ResourceTime {
            seconds: self.total_seconds_of_ranks(ranks),
            total: job.total_time,
            other_resources: mentionable_resource_seconds(job, Some(self)),
            at_most_seconds: ranks.iter().map(of_rank).fold(0.0, f64::max),
            next_steps: Vec::new(),
        };
        time.next_steps = (self.next_steps)(&time, ranks);
        if ranks
            .iter()
            .all(|rank| rank.uses_framework_other_than_torch)
        {
            time.next_steps.retain(|step| !step.needs_torch);
        }
        time.next_steps.truncate(MAX_NEXT_STEPS);
        (self.verdict)(time, ranks)
    }
}

/// Seconds of all ranks in a part.
pub(super) fn sum_part_seconds(ranks: &[RankTimeParts], part: TimePart) -> f64 {
    ranks.iter().map(|rank| rank.seconds_in(part)).sum()
}

/// Rule: one resource takes [`MIN_BOUNDING_SHARE`] of the time. The parts follow one another, so the time of each is
/// what it can save.
pub(super) fn judge_dominant_resource(job: &JobTimes) -> Option<Verdict> {
    let (resource, seconds) = resources_by_seconds(job)[0];
    (seconds >= MIN_BOUNDING_SHARE * job.total_time.wall_seconds)
        .then(|| resource.verdict_of_resource(job))
}

/// The resources with their seconds, largest first.
fn resources_by_seconds(job: &JobTimes) -> Vec<(&'static Resource, f64)> {
    let seconds =
        |resource: &Resource| resource.total_seconds_of_ranks(&job.parts_with_waits_reassigned);
    let resources = BOUNDING_RESOURCES.iter().copied();
    let mut resources: Vec<_> = resources.map(|each| (each, seconds(each))).collect();
    resources.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    resources
}

/// Names and seconds of the resources with a share worth mentioning, largest first, without `except`.
pub(super) fn mentionable_resource_seconds(
    job: &JobTimes,
    except: Option<&Resource>,
) -> Vec<(&'static str, f64)> {
    let others = resources_by_seconds(job)
        .into_iter()
        .filter(|(resource, seconds)| {
            let is_excepted = except.is_some_and(|except| except.key == resource.key);
            *seconds >= MIN_MENTIONED_SHARE * job.total_time.wall_seconds && !is_excepted
        });
    let named = others.map(|(resource, seconds)| (resource.time_name, seconds));
    named.collect()
}

/// Names and seconds as a list.
pub(super) fn format_seconds_by_name(times: &[(&str, f64)]) -> String {
    let texts = times
        .iter()
        .map(|(name, seconds)| format!("{name} {seconds:.1} s"));
    texts.collect::<Vec<_>>().join(", ")
}

/// The time that a resource takes. Seconds are sums over all ranks, unless stated otherwise.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ResourceTime {
    pub(super) seconds: f64,
    pub(super) total: TotalTime,
    /// The other resources with a share worth mentioning, largest first.
    pub(super) other_resources: Vec<(&'static str, f64)>,
    /// By how much the job can get shorter at most: the largest time of one rank.
    pub(super) at_most_seconds: f64,
    pub(super) next_steps: Vec<NextStep>,
}

impl ResourceTime {
    /// The time as part of the time of all ranks.
    pub(super) fn share_text(&self) -> String {
        self.total.share_text(self.seconds)
    }

    /// The description of the verdict that `resource` bounds the job. The evidence ends with the other resources.
    pub(super) fn describe(
        &self,
        resource: &Resource,
        cause: TimePart,
        evidence: String,
        helps: &'static str,
    ) -> VerdictDescription {
        let others = match self.other_resources.is_empty() {
            true => String::new(),
            false => format!("; also {}", format_seconds_by_name(&self.other_resources)),
        };
        VerdictDescription {
            title: resource.title,
            bound: resource.key,
            cause: Some(cause),
            straggler: None,
            evidence: evidence + &others + &self.total.warm_up_text(),
            helps: Some(helps),
            next_steps: self.next_steps.clone(),
            share: Some(self.seconds / self.total.wall_seconds),
            at_most_seconds: Some(self.at_most_seconds),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_part_belongs_to_one_resource() {
        for part in TimePart::ALL {
            let takes = BOUNDING_RESOURCES
                .iter()
                .filter(|resource| resource.includes_part(part));
            assert_eq!(takes.count(), 1, "{part:?}");
        }
    }

    #[test]
    fn every_resource_has_its_own_names() {
        for name in [
            |resource: &Resource| resource.key,
            |resource: &Resource| resource.title,
            |resource: &Resource| resource.time_name,
        ] {
            let names: BTreeSet<&str> = BOUNDING_RESOURCES.iter().map(|each| name(each)).collect();
            assert_eq!(names.len(), BOUNDING_RESOURCES.len(), "{names:?}");
        }
    }
}
