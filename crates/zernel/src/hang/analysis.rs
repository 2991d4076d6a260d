//! Target keeps others waiting, from a snapshot. Pure.
//!
//! Every rank counts the collectives that it enters on a communicator, and so do all others: what has the same number
//! is the same collective. Those that have come furthest wait for the rest. A rank that comes late is no
//! hang, so besides the wait itself, how long the rank has ever gone without a collective is heeded; a rank
//! that is gone, stopped or in another operation than the others never comes.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::LazyLock;

use serde::Serialize;
use zernel_phase::task_state::WorkloadPhase;

use zernel_model::snapshot::{CommunicatorSnapshot, ProcessSnapshot, Snapshot};

/// From how many seconds of waiting on a rank that is late is worth telling.
const MIN_REPORTED_WAIT: f64 = 1.0;
/// For how many seconds ranks may wait for another one to start: programs begin at different times.
const JOIN_TIME: f64 = 60.0;
/// Of how many collectives a rank's operations are known.
const KNOWN_OPERATIONS: u64 = 16;

/// A communicator, as far as its ranks are on this node.
#[derive(Debug)]
pub(super) struct Communicator<'a> {
    pub(super) hash: &'a str,
    /// By rank.
    pub(super) members: Vec<Member<'a>>,
}

/// One rank of a communicator.
#[derive(Debug, Clone, Copy)]
pub(super) struct Member<'a> {
    pub(super) process: &'a ProcessSnapshot,
    pub(super) state: &'a CommunicatorSnapshot,
}

/// For how long others must have waited until it counts as a hang.
#[derive(Debug, Clone, Copy)]
pub(super) struct HangThreshold {
    pub(super) seconds: f64,
    /// Whether a rank may take as long as it ever has.
    pub(super) allows_longest_gap: bool,
}

/// Something that makes others wait.
#[derive(Debug)]
pub(super) struct Finding<'a> {
    pub(super) member: &'a Member<'a>,
    pub(super) problem: Problem,
    /// Others wait, and it is not to be expected that this ends.
    pub(super) hangs: bool,
    /// For how many seconds the first of the others has waited at least.
    pub(super) waited: f64,
}

/// What is wrong with a rank.
#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "problem", rename_all = "kebab-case")]
pub(super) enum Problem {
    /// It has ended, and has not done its part.
    #[serde(rename = "gone")]
    Exited,
    /// It has not begun to make the communicator that others make.
    NotJoined,
    /// It has not entered what others have.
    Behind {
        /// How many have come furthest.
        leaders: usize,
        /// The number of the collective that it has to enter next.
        next: u64,
    },
    /// It is in a call that others have left.
    InCall,
    /// It entered what the others did, and was stopped before that was done.
    Stopped,
    /// It entered something else than most others did.
    Different {
        sequence: u64,
        own: String,
        others: String,
    },
}

/// The communicators of a job, or of all jobs.
pub(super) fn groups<'a>(snapshot: &'a Snapshot, job: Option<&str>) -> Vec<Communicator<'a>> {
    let mut groups: BTreeMap<&str, Vec<Member<'_>>> = BTreeMap::new();
    let living = snapshot.observed.iter();
    let living = living.filter(|process| process.ended_seconds_ago.is_none());
    for process in living.chain(&snapshot.gone_ranks) {
        if job.is_some() && process.job() != job {
            continue;
        }
        for state in &process.nccl.communicators {
            let members = groups.entry(&state.communicator).or_default();
            members.push(Member { process, state });
        }
    }
    let mut groups: Vec<Communicator<'_>> = groups
        .into_iter()
        .map(|(hash, members)| Communicator { hash, members })
        .collect();
    for group in &mut groups {
        group.add_absent(snapshot);
        group
            .members
            .sort_by_key(|member| (member.rank(), member.process.pid));
    }
    groups
}

/// What a rank has of a communicator that it has not begun to make.
static ABSENT: LazyLock<CommunicatorSnapshot> = LazyLock::new(CommunicatorSnapshot::default);

impl Member<'_> {
    pub(super) fn rank(&self) -> Option<u32> {
        self.state.rank.or_else(|| self.process.rank())
    }

    /// Whether it has not begun to make the communicator.
    fn is_absent(&self) -> bool {
        ptr::eq(self.state, &*ABSENT)
    }

    pub(super) fn has_exited(&self) -> bool {
        self.process.ended_seconds_ago.is_some()
    }

    /// What is wrong with it while others wait for all to join.
    fn problem_in_joining(&self, is_stopped: bool) -> Option<Problem> {
        if self.has_exited() {
            return Some(Problem::Exited);
        }
        if self.is_absent() {
            return Some(Problem::NotJoined);
        }
        is_stopped.then_some(Problem::Stopped)
    }

    fn waits_for_its_gpu(&self) -> bool {
        let waits = [WorkloadPhase::NcclCollective, WorkloadPhase::GpuCompute];
        self.process
            .phases
            .phase
            .is_some_and(|phase| waits.contains(&phase))
    }

    /// What it entered as its collective `sequence`, if that is still known.
    fn operation(&self, sequence: u64) -> Option<&str> {
        let place = usize::try_from(self.state.sequence.checked_sub(sequence)?).ok()?;
        match place {
            0 if sequence > 0 => Some(&self.state.op),
            _ => self.state.last_ops.get(place).map(AsRef::as_ref),
        }
    }
}

impl<'a> Communicator<'a> {
    /// Of a communicator of all ranks of a job that is being made, adds those that have not joined.
    fn add_absent(&mut self, snapshot: &'a Snapshot) {
        if !self.is_being_made() || self.ranks() == Some(self.members.len() as u32) {
            return;
        }
        let job = self.job().map(str::to_owned);
        let has_joined = |process: &ProcessSnapshot| {
            let mut members = self.members.iter();
            members.any(|member| member.process.pid == process.pid)
        };
        let is_absent = |process: &&ProcessSnapshot| {
            let world_size = process.identity.as_ref().and_then(|who| who.world_size);
            process.is_rank()
                && process.job() == job.as_deref()
                && world_size.is_some()
                && world_size == self.ranks()
                && !has_joined(process)
        };
        let absent: Vec<Member<'a>> = snapshot
            .observed
            .iter()
            .filter(is_absent)
            .map(|process| Member {
                process,
                state: &ABSENT,
            })
            .collect();
        self.members.extend(absent);
    }
}

impl Communicator<'_> {
    /// Whether a rank waits for others to join.
    pub(super) fn is_being_made(&self) -> bool {
        self.running().any(|member| member.state.is_being_made)
    }

    pub(super) fn job(&self) -> Option<&str> {
        self.members.iter().find_map(|member| member.process.job())
    }

    /// How many ranks there are on all nodes.
    pub(super) fn ranks(&self) -> Option<u32> {
        self.members.iter().find_map(|member| member.state.ranks)
    }

    fn running(&self) -> impl Iterator<Item = &Member<'_>> {
        self.members.iter().filter(|member| !member.has_exited())
    }

    /// The number of the last collective that a living rank has entered.
    pub(super) fn furthest(&self) -> u64 {
        let sequences = self.running().map(|member| member.state.sequence);
        sequences.max().unwrap_or(0)
    }

    /// Those that have come furthest.
    pub(super) fn leaders(&self) -> impl Iterator<Item = &Member<'_>> {
        let furthest = self.furthest();
        self.running()
            .filter(move |member| member.state.sequence == furthest)
    }

    /// The ranks that others wait for. `is_stopped` says of a process whether somebody has stopped it.
    pub(super) fn findings(
        &self,
        threshold: HangThreshold,
        is_stopped: impl Fn(&ProcessSnapshot) -> bool,
    ) -> Vec<Finding<'_>> {
        let waited = self.waited();
        let mismatch = self.mismatch();
        let members = self.members.iter();
        members
            .filter_map(|member| {
                let is_stopped = !member.has_exited() && is_stopped(member.process);
                let problem = match self.is_being_made() {
                    true => member.problem_in_joining(is_stopped)?,
                    false => self.problem(member, mismatch.as_ref(), is_stopped)?,
                };
                let is_over = match problem {
                    Problem::Exited | Problem::Different { .. } => true,
                    _ if is_stopped => true,
                    Problem::NotJoined => threshold.is_exceeded_by_join(waited),
                    _ => threshold.is_exceeded_by(member),
                };
                let hangs = is_over && waited >= threshold.seconds;
                (hangs || waited >= MIN_REPORTED_WAIT).then_some(Finding {
                    member,
                    problem,
                    hangs,
                    waited,
                })
            })
            .collect()
    }

    /// For how many seconds those that have come furthest have been there.
    fn waited(&self) -> f64 {
        let waits = self
            .leaders()
            .filter_map(|leader| leader.state.entered_seconds_ago);
        waits.fold(0.0, f64::max)
    }

    fn problem(
        &self,
        member: &Member<'_>,
        mismatch: Option<&Mismatch<'_>>,
        is_stopped: bool,
    ) -> Option<Problem> {
        if let Some(different) = mismatch.and_then(|mismatch| mismatch.problem(member)) {
            return Some(different);
        }
        // Target got as far as the ranks have parted is not to blame for getting no further.
        let has_parted =
            mismatch.is_some_and(|mismatch| member.state.sequence >= mismatch.sequence);
        let is_behind = member.state.sequence < self.furthest() && !has_parted;
        if member.has_exited() {
            return (is_behind || self.leader_waits_for_gpu()).then_some(Problem::Exited);
        }
        if is_behind {
            return Some(Problem::Behind {
                leaders: self.leaders().count(),
                next: member.state.sequence + 1,
            });
        }
        if is_stopped {
            return Some(Problem::Stopped);
        }
        let others_have_left = self.leaders().any(|leader| !leader.state.in_call);
        (member.state.in_call && others_have_left).then_some(Problem::InCall)
    }

    /// Whether a rank waits for its GPU, and so perhaps for what it has entered.
    fn leader_waits_for_gpu(&self) -> bool {
        self.leaders().any(Member::waits_for_its_gpu)
    }

    /// Whether all ranks here have entered the same, and wait longer than they ever have. Then who does not come
    /// is not here, or the GPUs or the network have failed; or they compute for once.
    pub(super) fn all_ranks_wait(&self, threshold: HangThreshold) -> bool {
        let mut members = self.members.iter();
        if self.is_being_made() {
            let is_over = threshold.is_exceeded_by_join(self.waited());
            return is_over && members.all(|member| member.state.is_being_made);
        }
        self.furthest() > 0
            && self.waited() >= threshold.seconds
            && members.all(|member| {
                member.state.sequence == self.furthest()
                    && member.waits_for_its_gpu()
                    && threshold.is_exceeded_by(member)
            })
    }

    /// The first of the last collectives that not all ranks that got there entered as the same operation.
    fn mismatch(&self) -> Option<Mismatch<'_>> {
        let furthest = self.furthest();
        let first = furthest.saturating_sub(KNOWN_OPERATIONS - 1).max(1);
        (first..=furthest).find_map(|sequence| {
            let usual = self.most_common_operation(sequence)?;
            let mismatch = Mismatch { sequence, usual };
            let is_mismatch = self
                .members
                .iter()
                .any(|member| mismatch.problem(member).is_some());
            is_mismatch.then_some(mismatch)
        })
    }

    /// What most ranks entered as their collective `sequence`; of two as frequent, what the lowest rank did.
    fn most_common_operation(&self, sequence: u64) -> Option<&str> {
        let mut counts: Vec<(&str, usize)> = Vec::new();
        for operation in self
            .members
            .iter()
            .filter_map(|member| member.operation(sequence))
        {
            match counts.iter_mut().find(|(known, _)| *known == operation) {
                Some((_, count)) => *count += 1,
                None => counts.push((operation, 1)),
            }
        }
        let most = counts.iter().map(|(_, count)| *count).max()?;
        let usual = counts.into_iter().find(|(_, count)| *count == most)?;
        Some(usual.0)
    }
}

impl HangThreshold {
    /// Whether a rank has taken longer than it may.
    fn is_exceeded_by(self, member: &Member<'_>) -> bool {
        let silent = member.state.entered_seconds_ago;
        let is_longest = silent.is_none_or(|silent| silent > member.state.longest_gap_seconds);
        is_longest || !self.allows_longest_gap
    }

    /// Whether others have waited long enough for a rank to start.
    fn is_exceeded_by_join(self, waited: f64) -> bool {
        let seconds = match self.allows_longest_gap {
            true => self.seconds.max(JOIN_TIME),
            false => self.seconds,
        };
        waited >= seconds
    }
}

/// A collective that ranks entered as different operations.
#[derive(Debug)]
struct Mismatch<'a> {
    sequence: u64,
    /// What most of them entered.
    usual: &'a str,
}

impl Mismatch<'_> {
    /// What is wrong with a rank that entered something else.
    fn problem(&self, member: &Member<'_>) -> Option<Problem> {
        let own = member.operation(self.sequence)?;
        (own != self.usual).then(|| Problem::Different {
            sequence: self.sequence,
            own: own.to_owned(),
            others: self.usual.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests;
