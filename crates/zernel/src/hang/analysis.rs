//! Finds the ranks that keep others waiting, from a snapshot. Pure.
//!
//! Every rank numbers the collectives that it enters on a communicator, so the same number is the same collective. The
//! ranks whose number is highest (the leaders) wait for the other ranks. A slow rank is not a hang, so its wait is
//! compared with its longest time without a collective so far. A rank that has exited, is stopped or has entered
//! another operation never catches up.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::LazyLock;

use serde::Serialize;
use zernel_phase::task_state::WorkloadPhase;

use zernel_model::snapshot::{CommunicatorSnapshot, ProcessSnapshot, Snapshot};

/// Shortest wait, in seconds, for which a late rank is reported.
const MIN_REPORTED_WAIT_SECONDS: f64 = 1.0;
/// Seconds that ranks may wait for another one to join. Programs start at different times.
const MAX_JOIN_SECONDS: f64 = 60.0;
/// How much longer than its longest time without a collective a rank may take: the same work does not take the same time
/// twice. For example, a sleep of 12 s took 15 ms longer the second time.
const LONGEST_GAP_FACTOR: f64 = 1.1;
/// Number of most recent collectives of a rank with a known operation.
const KNOWN_OPERATIONS_PER_RANK: u64 = 16;

/// A communicator with its ranks on this node.
#[derive(Debug)]
pub(super) struct LocalCommunicator<'a> {
    pub(super) hash: &'a str,
    /// Sorted by rank.
    pub(super) members: Vec<CommunicatorMember<'a>>,
}

/// One rank of a communicator.
#[derive(Debug, Clone, Copy)]
pub(super) struct CommunicatorMember<'a> {
    pub(super) process: &'a ProcessSnapshot,
    pub(super) state: &'a CommunicatorSnapshot,
}

/// How long other ranks must have waited so that a late rank counts as a hang.
#[derive(Debug, Clone, Copy)]
pub(super) struct HangThreshold {
    pub(super) seconds: f64,
    /// Whether a rank may also take about as long as its longest time without a collective.
    pub(super) allows_longest_gap: bool,
}

/// A rank that makes others wait.
#[derive(Debug)]
pub(super) struct LateRank<'a> {
    pub(super) member: &'a CommunicatorMember<'a>,
    pub(super) problem: RankProblem,
    /// Whether the wait is not expected to end. If false, the rank is only late.
    pub(super) hangs: bool,
    /// How long the rank that waits longest for this one has waited, in seconds.
    pub(super) waited_seconds: f64,
}

/// What is wrong with a rank.
#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "problem", rename_all = "kebab-case")]
pub(super) enum RankProblem {
    /// The rank exited before the collective was complete.
    #[serde(rename = "gone")]
    Exited,
    /// The rank has not joined the communicator that other ranks create.
    NotJoined,
    /// The rank has not entered a collective that other ranks have entered.
    Behind {
        /// Number of leaders.
        leaders: usize,
        /// Number of the collective that the rank has to enter next.
        next: u64,
    },
    /// The rank is in the call of a collective that other ranks have left.
    InCall,
    /// The rank has entered the collective and is stopped by a signal or a debugger.
    Stopped,
    /// The rank has entered another operation than most ranks.
    Different {
        sequence: u64,
        own: String,
        others: String,
    },
}

/// The communicators of a job, or of all jobs.
pub(super) fn local_communicators_of_job<'a>(
    snapshot: &'a Snapshot,
    job: Option<&str>,
) -> Vec<LocalCommunicator<'a>> {
    let mut communicators: BTreeMap<&str, Vec<CommunicatorMember<'_>>> = BTreeMap::new();
    let running = snapshot.observed.iter();
    let running = running.filter(|process| process.ended_seconds_ago.is_none());
    for process in running.chain(&snapshot.gone_ranks) {
        if job.is_some() && process.job() != job {
            continue;
        }
        for state in &process.probes.nccl.communicators {
            let members = communicators.entry(&state.communicator).or_default();
            members.push(CommunicatorMember { process, state });
        }
    }
    let mut communicators: Vec<LocalCommunicator<'_>> = communicators
        .into_iter()
        .map(|(hash, members)| LocalCommunicator { hash, members })
        .collect();
    for communicator in &mut communicators {
        communicator.add_absent_ranks(snapshot);
        communicator
            .members
            .sort_by_key(|member| (member.rank(), member.process.pid));
    }
    communicators
}

/// The state of a rank that has not joined a communicator.
static ABSENT_MEMBER_STATE: LazyLock<CommunicatorSnapshot> =
    LazyLock::new(CommunicatorSnapshot::default);

impl CommunicatorMember<'_> {
    pub(super) fn rank(&self) -> Option<u32> {
        self.state.rank.or_else(|| self.process.rank())
    }

    /// Whether the rank has not joined the communicator.
    fn is_absent(&self) -> bool {
        ptr::eq(self.state, &*ABSENT_MEMBER_STATE)
    }

    pub(super) fn has_exited(&self) -> bool {
        self.process.ended_seconds_ago.is_some()
    }

    /// The problem of the rank while the communicator is being created.
    fn problem_during_creation(&self, is_stopped: bool) -> Option<RankProblem> {
        if self.has_exited() {
            return Some(RankProblem::Exited);
        }
        if self.is_absent() {
            return Some(RankProblem::NotJoined);
        }
        is_stopped.then_some(RankProblem::Stopped)
    }

    fn waits_for_its_gpu(&self) -> bool {
        let waits = [WorkloadPhase::NcclCollective, WorkloadPhase::GpuCompute];
        self.process
            .phases
            .phase
            .is_some_and(|phase| waits.contains(&phase))
    }

    /// The operation that the rank entered as collective `sequence`; `None` if that is no longer known.
    fn operation_at(&self, sequence: u64) -> Option<&str> {
        let place = usize::try_from(self.state.sequence.checked_sub(sequence)?).ok()?;
        match place {
            0 if sequence > 0 => Some(&self.state.op),
            _ => self.state.last_ops.get(place).map(AsRef::as_ref),
        }
    }
}

impl<'a> LocalCommunicator<'a> {
    /// Adds the ranks of the job that have not joined, if all ranks are creating this communicator.
    fn add_absent_ranks(&mut self, snapshot: &'a Snapshot) {
        if !self.is_being_made() || self.rank_count() == Some(self.members.len() as u32) {
            return;
        }
        let job = self.job().map(str::to_owned);
        let has_joined = |process: &ProcessSnapshot| {
            let mut members = self.members.iter();
            members.any(|member| member.process.pid == process.pid)
        };
        let is_absent = |process: &&ProcessSnapshot| {
            let identity = process.identity.as_ref();
            let world_size = identity.and_then(|identity| identity.world_size);
            process.is_rank()
                && process.job() == job.as_deref()
                && world_size.is_some()
                && world_size == self.rank_count()
                && !has_joined(process)
        };
        let absent: Vec<CommunicatorMember<'a>> = snapshot
            .observed
            .iter()
            .filter(is_absent)
            .map(|process| CommunicatorMember {
                process,
                state: &ABSENT_MEMBER_STATE,
            })
            .collect();
        self.members.extend(absent);
    }
}

impl LocalCommunicator<'_> {
    /// Whether a rank waits for others to join.
    pub(super) fn is_being_made(&self) -> bool {
        self.running_members()
            .any(|member| member.state.is_being_made)
    }

    pub(super) fn job(&self) -> Option<&str> {
        self.members.iter().find_map(|member| member.process.job())
    }

    /// Number of ranks on all nodes.
    pub(super) fn rank_count(&self) -> Option<u32> {
        self.members.iter().find_map(|member| member.state.ranks)
    }

    fn running_members(&self) -> impl Iterator<Item = &CommunicatorMember<'_>> {
        self.members.iter().filter(|member| !member.has_exited())
    }

    /// The highest collective that a running rank has entered.
    pub(super) fn highest_entered_collective(&self) -> u64 {
        let sequences = self.running_members().map(|member| member.state.sequence);
        sequences.max().unwrap_or(0)
    }

    /// The running ranks that have entered the highest collective.
    pub(super) fn leading_members(&self) -> impl Iterator<Item = &CommunicatorMember<'_>> {
        let furthest = self.highest_entered_collective();
        self.running_members()
            .filter(move |member| member.state.sequence == furthest)
    }

    /// The ranks that others wait for. `is_stopped` returns whether a process is stopped by a signal or a debugger.
    pub(super) fn find_late_ranks(
        &self,
        threshold: HangThreshold,
        is_stopped: impl Fn(&ProcessSnapshot) -> bool,
    ) -> Vec<LateRank<'_>> {
        let waited = self.longest_leader_wait();
        let mismatch = self.find_mismatch();
        let members = self.members.iter();
        members
            .filter_map(|member| {
                let is_stopped = !member.has_exited() && is_stopped(member.process);
                let problem = match self.is_being_made() {
                    true => member.problem_during_creation(is_stopped)?,
                    false => self.problem_in_collective(member, mismatch.as_ref(), is_stopped)?,
                };
                let is_expired = match problem {
                    RankProblem::Exited | RankProblem::Different { .. } => true,
                    _ if is_stopped => true,
                    RankProblem::NotJoined => threshold.is_exceeded_by_join_wait(waited),
                    _ => threshold.is_exceeded_by_rank(member),
                };
                let hangs = is_expired && waited >= threshold.seconds;
                (hangs || waited >= MIN_REPORTED_WAIT_SECONDS).then_some(LateRank {
                    member,
                    problem,
                    hangs,
                    waited_seconds: waited,
                })
            })
            .collect()
    }

    /// The longest time for which a leader has been in its latest collective, in seconds.
    fn longest_leader_wait(&self) -> f64 {
        let waits = self
            .leading_members()
            .filter_map(|leader| leader.state.entered_seconds_ago);
        waits.fold(0.0, f64::max)
    }

    fn problem_in_collective(
        &self,
        member: &CommunicatorMember<'_>,
        mismatch: Option<&OperationMismatch<'_>>,
        is_stopped: bool,
    ) -> Option<RankProblem> {
        if let Some(different) =
            mismatch.and_then(|mismatch| mismatch.problem_of_mismatching_rank(member))
        {
            return Some(different);
        }
        // A rank that has reached the collective with different operations never gets past that collective.
        let has_reached_mismatch =
            mismatch.is_some_and(|mismatch| member.state.sequence >= mismatch.sequence);
        let is_behind =
            member.state.sequence < self.highest_entered_collective() && !has_reached_mismatch;
        if member.has_exited() {
            return (is_behind || self.leader_waits_for_gpu()).then_some(RankProblem::Exited);
        }
        if is_behind {
            return Some(RankProblem::Behind {
                leaders: self.leading_members().count(),
                next: member.state.sequence + 1,
            });
        }
        if is_stopped {
            return Some(RankProblem::Stopped);
        }
        let others_have_left = self.leading_members().any(|leader| !leader.state.in_call);
        (member.state.in_call && others_have_left).then_some(RankProblem::InCall)
    }

    /// Whether a leader waits for its GPU, and so perhaps for its collective.
    fn leader_waits_for_gpu(&self) -> bool {
        self.leading_members()
            .any(CommunicatorMember::waits_for_its_gpu)
    }

    /// Whether all ranks on this node have entered the same collective and wait longer than ever before. If so, a
    /// rank on another node is missing, a GPU or the network has failed, or the ranks compute for unusually long.
    pub(super) fn all_ranks_wait(&self, threshold: HangThreshold) -> bool {
        let mut members = self.members.iter();
        if self.is_being_made() {
            let is_expired = threshold.is_exceeded_by_join_wait(self.longest_leader_wait());
            return is_expired && members.all(|member| member.state.is_being_made);
        }
        self.highest_entered_collective() > 0
            && self.longest_leader_wait() >= threshold.seconds
            && members.all(|member| {
                member.state.sequence == self.highest_entered_collective()
                    && member.waits_for_its_gpu()
                    && threshold.is_exceeded_by_rank(member)
            })
    }

    /// The first known collective that ranks entered as different operations.
    fn find_mismatch(&self) -> Option<OperationMismatch<'_>> {
        let furthest = self.highest_entered_collective();
        let first = furthest
            .saturating_sub(KNOWN_OPERATIONS_PER_RANK - 1)
            .max(1);
        (first..=furthest).find_map(|sequence| {
            let common = self.most_common_operation(sequence)?;
            let mismatch = OperationMismatch {
                sequence,
                common_operation: common,
            };
            let is_mismatch = self
                .members
                .iter()
                .any(|member| mismatch.problem_of_mismatching_rank(member).is_some());
            is_mismatch.then_some(mismatch)
        })
    }

    /// The operation that most ranks entered as collective `sequence`. If two operations are equally frequent, that
    /// of the lowest rank.
    fn most_common_operation(&self, sequence: u64) -> Option<&str> {
        let mut counts: Vec<(&str, usize)> = Vec::new();
        for operation in self
            .members
            .iter()
            .filter_map(|member| member.operation_at(sequence))
        {
            match counts.iter_mut().find(|(known, _)| *known == operation) {
                Some((_, count)) => *count += 1,
                None => counts.push((operation, 1)),
            }
        }
        let most = counts.iter().map(|(_, count)| *count).max()?;
        let common = counts.into_iter().find(|(_, count)| *count == most)?;
        Some(common.0)
    }
}

impl HangThreshold {
    /// Whether a rank has gone too long without a collective.
    fn is_exceeded_by_rank(self, member: &CommunicatorMember<'_>) -> bool {
        let silent = member.state.entered_seconds_ago;
        let allowed = LONGEST_GAP_FACTOR * member.state.longest_gap_seconds;
        let is_longest = silent.is_none_or(|silent| silent > allowed);
        is_longest || !self.allows_longest_gap
    }

    /// Whether other ranks have waited too long for a rank to join a communicator.
    fn is_exceeded_by_join_wait(self, waited: f64) -> bool {
        let seconds = match self.allows_longest_gap {
            true => self.seconds.max(MAX_JOIN_SECONDS),
            false => self.seconds,
        };
        waited >= seconds
    }
}

/// A collective that ranks entered as different operations.
#[derive(Debug)]
struct OperationMismatch<'a> {
    sequence: u64,
    /// The operation that most ranks entered.
    common_operation: &'a str,
}

impl OperationMismatch<'_> {
    /// The problem of a rank that entered another operation.
    fn problem_of_mismatching_rank(&self, member: &CommunicatorMember<'_>) -> Option<RankProblem> {
        let own = member.operation_at(self.sequence)?;
        (own != self.common_operation).then(|| RankProblem::Different {
            sequence: self.sequence,
            own: own.to_owned(),
            others: self.common_operation.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests;
