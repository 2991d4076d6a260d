//! Who is behind, from a snapshot.

use std::collections::BTreeMap;

use zernel_ebpf::observer::snapshot::{Communicator, Process, Snapshot};

/// A communicator, as far as its ranks are on this node.
#[derive(Debug)]
pub(super) struct Group<'a> {
    pub(super) hash: &'a str,
    /// By rank.
    pub(super) members: Vec<Member<'a>>,
}

/// One rank of a communicator.
#[derive(Debug, Clone, Copy)]
pub(super) struct Member<'a> {
    pub(super) process: &'a Process,
    pub(super) of: &'a Communicator,
}

/// Something that makes others wait.
#[derive(Debug)]
pub(super) struct Finding<'a> {
    pub(super) member: &'a Member<'a>,
    pub(super) problem: Problem,
}

/// What is wrong with a rank.
#[derive(Debug, PartialEq)]
pub(super) enum Problem {
    /// It has not entered what others have.
    Behind {
        /// How many have come furthest.
        leaders: usize,
        /// The number of the collective that it has to enter next.
        next: u64,
        /// How long the first of them has waited at least.
        seconds: f64,
    },
    /// It is in a call that others have left.
    InCall { seconds: f64 },
    /// It entered what the others did, and was stopped before that was done.
    Stopped { seconds: f64 },
    /// It entered something else than most others did.
    Different { others: String },
}

/// The communicators of a job, or of all jobs.
pub(super) fn groups<'a>(snapshot: &'a Snapshot, job: Option<&str>) -> Vec<Group<'a>> {
    let mut groups: BTreeMap<&str, Vec<Member<'_>>> = BTreeMap::new();
    for process in &snapshot.observed {
        if process.ended_seconds_ago.is_some() || (job.is_some() && process.job() != job) {
            continue;
        }
        for of in &process.communicators {
            let members = groups.entry(&of.communicator).or_default();
            members.push(Member { process, of });
        }
    }
    let mut groups: Vec<Group<'_>> = groups
        .into_iter()
        .map(|(hash, members)| Group { hash, members })
        .collect();
    for group in &mut groups {
        group
            .members
            .sort_by_key(|member| (member.of.rank, member.process.pid));
    }
    groups
}

impl Group<'_> {
    pub(super) fn job(&self) -> Option<&str> {
        self.members.iter().find_map(|member| member.process.job())
    }

    /// How many ranks there are on all nodes.
    pub(super) fn ranks(&self) -> Option<u32> {
        self.members.iter().find_map(|member| member.of.ranks)
    }

    /// The ranks that others have waited for, for so many seconds at least. `is_stopped` says of a pid
    /// whether somebody has stopped it.
    pub(super) fn findings(
        &self,
        after: f64,
        is_stopped: impl Fn(u32) -> bool,
    ) -> Vec<Finding<'_>> {
        let furthest = self.members.iter().map(|member| member.of.sequence).max();
        let leaders = || {
            let members = self.members.iter();
            members.filter(|member| Some(member.of.sequence) == furthest)
        };
        let longest = leaders().filter_map(|member| member.of.entered_seconds_ago);
        let seconds = longest.fold(0.0, f64::max);
        let usual = self.usual_operation(furthest);
        let problem = |member: &Member<'_>| {
            if Some(member.of.sequence) < furthest {
                let behind = Problem::Behind {
                    leaders: leaders().count(),
                    next: member.of.sequence + 1,
                    seconds,
                };
                return (seconds >= after).then_some(behind);
            }
            if let Some(others) = usual.filter(|usual| *usual != member.of.op) {
                let others = others.to_owned();
                return (seconds >= after).then_some(Problem::Different { others });
            }
            let seconds = member.of.entered_seconds_ago.unwrap_or(0.0);
            let others_have_left = leaders().any(|leader| !leader.of.in_call);
            if seconds >= after && is_stopped(member.process.pid) {
                return Some(Problem::Stopped { seconds });
            }
            let is_stuck = member.of.in_call && others_have_left && seconds >= after;
            is_stuck.then_some(Problem::InCall { seconds })
        };
        let members = self.members.iter();
        members
            .filter_map(|member| {
                let problem = problem(member)?;
                Some(Finding { member, problem })
            })
            .collect()
    }

    /// What most ranks entered as their collective `sequence`; of two as frequent, what the lowest rank did.
    fn usual_operation(&self, sequence: Option<u64>) -> Option<&str> {
        let mut counts: Vec<(&str, usize)> = Vec::new();
        for member in &self.members {
            if Some(member.of.sequence) != sequence {
                continue;
            }
            match counts.iter_mut().find(|(op, _)| *op == member.of.op) {
                Some((_, count)) => *count += 1,
                None => counts.push((&member.of.op, 1)),
            }
        }
        let most = counts.iter().map(|(_, count)| *count).max()?;
        let usual = counts.into_iter().find(|(_, count)| *count == most)?;
        Some(usual.0)
    }
}

#[cfg(test)]
mod tests {
    use zernel_ebpf::observer::snapshot::Role;

    use super::*;

    /// The pid of a process that somebody has stopped.
    const STOPPED: u32 = 109;

    fn process(rank: u32, sequence: u64, op: &str, seconds: f64) -> Process {
        Process {
            pid: 100 + rank,
            role: Role::Trainer,
            communicators: vec![Communicator {
                communicator: "ab".to_owned(),
                rank: Some(rank),
                ranks: Some(4),
                sequence,
                op: op.to_owned(),
                entered_seconds_ago: Some(seconds),
                ..Communicator::default()
            }],
            ..Process::default()
        }
    }

    /// The problems by rank.
    fn problems(observed: Vec<Process>) -> Vec<(u32, Problem)> {
        let snapshot = Snapshot {
            observed,
            ..Snapshot::default()
        };
        let groups = groups(&snapshot, None);
        let findings = groups
            .iter()
            .flat_map(|group| group.findings(5.0, |pid| pid == STOPPED));
        findings
            .map(|finding| (finding.member.of.rank.unwrap(), finding.problem))
            .collect()
    }

    #[test]
    fn a_rank_that_never_entered_is_behind() {
        let found = problems(vec![
            process(0, 7, "AllReduce", 29.0),
            process(1, 6, "AllReduce", 40.0),
            process(2, 7, "AllReduce", 30.0),
        ]);
        let behind = Problem::Behind {
            leaders: 2,
            next: 7,
            seconds: 30.0,
        };
        assert_eq!(found, [(1, behind)]);
    }

    #[test]
    fn ranks_that_are_apart_for_a_moment_do_not_hang() {
        let found = problems(vec![
            process(0, 7, "AllReduce", 0.1),
            process(1, 6, "AllReduce", 0.3),
        ]);
        assert_eq!(found, []);
    }

    #[test]
    fn all_that_are_behind_are_named() {
        let found = problems(vec![
            process(0, 7, "AllReduce", 30.0),
            process(1, 6, "AllReduce", 40.0),
            process(2, 5, "Broadcast", 50.0),
        ]);
        let ranks: Vec<u32> = found.iter().map(|(rank, _)| *rank).collect();
        assert_eq!(ranks, [1, 2]);
    }

    #[test]
    fn another_operation_than_the_others_is_named() {
        let found = problems(vec![
            process(0, 7, "AllReduce", 30.0),
            process(1, 7, "Broadcast", 30.0),
            process(2, 7, "AllReduce", 30.0),
        ]);
        let others = "AllReduce".to_owned();
        assert_eq!(found, [(1, Problem::Different { others })]);
    }

    #[test]
    fn a_call_that_others_have_left_is_named_and_one_that_all_are_in_is_not() {
        let mut stuck = process(1, 7, "AllReduce", 30.0);
        stuck.communicators[0].in_call = true;
        let found = problems(vec![process(0, 7, "AllReduce", 30.0), stuck.clone()]);
        assert_eq!(found, [(1, Problem::InCall { seconds: 30.0 })]);
        assert_eq!(problems(vec![stuck.clone(), stuck]), []);
    }

    #[test]
    fn a_rank_that_was_stopped_in_what_all_have_entered_is_named() {
        let found = problems(
            (8..11)
                .map(|rank| process(rank, 7, "AllReduce", 30.0))
                .collect(),
        );
        assert_eq!(found, [(9, Problem::Stopped { seconds: 30.0 })]);
    }

    #[test]
    fn a_job_that_computes_for_long_does_not_hang() {
        let found = problems(
            (0..4)
                .map(|rank| process(rank, 7, "AllReduce", 600.0))
                .collect(),
        );
        assert_eq!(found, []);
    }

    #[test]
    fn only_the_job_asked_for_and_what_is_there_counts() {
        let mut ended = process(0, 6, "AllReduce", 40.0);
        ended.ended_seconds_ago = Some(1.0);
        let snapshot = Snapshot {
            observed: vec![ended, process(1, 7, "AllReduce", 30.0)],
            ..Snapshot::default()
        };
        assert_eq!(groups(&snapshot, None)[0].members.len(), 1);
        assert!(groups(&snapshot, Some("another")).is_empty());
    }
}
