//! What was found, in the form that `--json` has.

use serde::Serialize;

use super::activity::{Activity, State};
use super::analysis::{self, Communicator, Finding, HangThreshold, Member, Problem};
use zernel_model::snapshot::{ProcessSnapshot, Snapshot};

/// All that there is to say.
#[derive(Debug, Serialize)]
pub(super) struct HangReport {
    pub(super) verdict: HangVerdict,
    /// The job that was asked for.
    pub(super) job: Option<String>,
    pub(super) communicators: Vec<CommunicatorReport>,
    /// CommunicatorReport of which no communicator is known: those cannot be told of.
    pub(super) pids_without_communicator: Vec<u32>,
}

/// What can be said of a communicator, or of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum HangVerdict {
    NothingHangs,
    CannotTell,
    Hang,
}

impl HangVerdict {
    pub(super) fn exit_code(self) -> u8 {
        match self {
            Self::NothingHangs => 0,
            Self::Hang => 1,
            Self::CannotTell => 2,
        }
    }
}

/// A communicator, and how far its ranks on this node have come.
#[derive(Debug, Serialize)]
pub(super) struct CommunicatorReport {
    pub(super) communicator: String,
    pub(super) job: Option<String>,
    pub(super) verdict: HangVerdict,
    /// How many there are on all nodes.
    pub(super) ranks: Option<u32>,
    /// Those of this node.
    pub(super) members: Vec<RankReport>,
    pub(super) findings: Vec<FindingReport>,
}

/// A rank, and its last collective.
#[derive(Debug, Clone, Serialize)]
pub(super) struct RankReport {
    pub(super) rank: Option<u32>,
    pub(super) pid: u32,
    pub(super) comm: String,
    pub(super) sequence: u64,
    pub(super) op: String,
    pub(super) bytes: u64,
    pub(super) in_call: bool,
    /// It waits for others to join; then it entered when it began to.
    pub(super) is_being_made: bool,
    pub(super) entered_seconds_ago: Option<f64>,
    pub(super) longest_gap_seconds: f64,
    pub(super) ended_seconds_ago: Option<f64>,
}

/// A rank that others wait for.
#[derive(Debug, Serialize)]
pub(super) struct FindingReport {
    #[serde(flatten)]
    pub(super) rank: RankReport,
    /// Otherwise it is only late.
    pub(super) hangs: bool,
    /// For how many seconds the first of the others has waited at least.
    pub(super) waited_seconds: f64,
    #[serde(flatten)]
    pub(super) problem: Problem,
    #[serde(rename = "doing")]
    pub(super) activity: Activity,
    /// Another communicator on which it waits itself, for a rank that hangs there.
    pub(super) waits_itself_on: Option<String>,
}

impl HangReport {
    pub(super) fn new(
        snapshot: &Snapshot,
        job: Option<&str>,
        threshold: HangThreshold,
        is_stopped: impl Fn(&ProcessSnapshot) -> bool,
        inspect: impl Fn(&ProcessSnapshot) -> Activity,
    ) -> Self {
        let groups = analysis::groups(snapshot, job);
        let mut communicators: Vec<CommunicatorReport> = groups
            .iter()
            .map(|group| CommunicatorReport::new(group, threshold, &is_stopped, &inspect))
            .collect();
        mark_victims(&groups, &mut communicators);
        let is_unknown = |process: &&ProcessSnapshot| {
            process.is_rank()
                && !process.complete
                && process.nccl.communicators.is_empty()
                && (job.is_none() || process.job() == job)
        };
        let unknown = snapshot.observed.iter().filter(is_unknown);
        let unknown: Vec<u32> = unknown.map(|process| process.pid).collect();
        let verdicts = communicators.iter().map(|ranks| ranks.verdict);
        let of_the_rest = match unknown.is_empty() && (job.is_none() || !groups.is_empty()) {
            true => HangVerdict::NothingHangs,
            false => HangVerdict::CannotTell,
        };
        Self {
            verdict: verdicts.fold(of_the_rest, HangVerdict::max),
            job: job.map(str::to_owned),
            communicators,
            pids_without_communicator: unknown,
        }
    }
}

impl CommunicatorReport {
    fn new(
        group: &Communicator<'_>,
        threshold: HangThreshold,
        is_stopped: impl Fn(&ProcessSnapshot) -> bool,
        inspect: impl Fn(&ProcessSnapshot) -> Activity,
    ) -> Self {
        let findings = group.findings(threshold, is_stopped);
        let verdict = if findings.iter().any(|finding| finding.hangs) {
            HangVerdict::Hang
        } else if group.all_ranks_wait(threshold) {
            HangVerdict::CannotTell
        } else {
            HangVerdict::NothingHangs
        };
        Self {
            communicator: group.hash.to_owned(),
            job: group.job().map(str::to_owned),
            verdict,
            ranks: group.ranks(),
            members: group.members.iter().map(RankReport::new).collect(),
            findings: findings
                .into_iter()
                .map(|finding| FindingReport::new(finding, &inspect))
                .collect(),
        }
    }
}

impl RankReport {
    fn new(member: &Member<'_>) -> Self {
        let Member { process, state } = member;
        Self {
            rank: member.rank(),
            pid: process.pid,
            comm: process.comm().to_owned(),
            sequence: state.sequence,
            op: state.op.to_string(),
            bytes: state.bytes,
            in_call: state.in_call,
            is_being_made: state.is_being_made,
            entered_seconds_ago: state.entered_seconds_ago,
            longest_gap_seconds: state.longest_gap_seconds,
            ended_seconds_ago: process.ended_seconds_ago,
        }
    }
}

impl FindingReport {
    fn new(finding: Finding<'_>, inspect: impl Fn(&ProcessSnapshot) -> Activity) -> Self {
        let process = finding.member.process;
        let activity = match finding.member.has_exited() {
            true => Activity::new(State::Ended, how_it_ended(process)),
            false => inspect(process),
        };
        Self {
            rank: RankReport::new(finding.member),
            hangs: finding.hangs,
            waited_seconds: finding.waited,
            problem: finding.problem,
            activity,
            waits_itself_on: None,
        }
    }
}

/// As part of a sentence whose subject is the process.
fn how_it_ended(process: &ProcessSnapshot) -> String {
    let ago = process
        .ended_seconds_ago
        .map_or(String::new(), |ago| format!(", {ago:.1} s ago"));
    match (process.signal, process.exit_code) {
        (Some(9), _) => format!(
            "is gone: SIGKILL ended it{ago} (if nobody sent that, `dmesg` tells whether memory had run out)"
        ),
        (Some(signal), _) => format!("is gone: signal {signal} ended it{ago}"),
        (None, Some(code)) => format!("is gone: it exited with code {code}{ago}"),
        (None, None) => format!("is gone: it ended{ago}"),
    }
}

/// A rank that is waited for may wait itself, for a rank of another communicator.
fn mark_victims(groups: &[Communicator<'_>], communicators: &mut [CommunicatorReport]) {
    let mut waiting: Vec<(u32, String)> = Vec::new();
    for (group, ranks) in groups.iter().zip(communicators.iter()) {
        let culprits: Vec<u32> = ranks.findings.iter().map(|found| found.rank.pid).collect();
        if ranks.verdict == HangVerdict::Hang {
            let victims = group.leaders().map(|leader| leader.process.pid);
            let victims = victims.filter(|pid| !culprits.contains(pid));
            waiting.extend(victims.map(|pid| (pid, ranks.communicator.clone())));
        }
    }
    for found in communicators
        .iter_mut()
        .flat_map(|ranks| &mut ranks.findings)
    {
        let own = waiting.iter().find(|(pid, _)| *pid == found.rank.pid);
        found.waits_itself_on = own.map(|(_, communicator)| communicator.clone());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const THRESHOLD: HangThreshold = HangThreshold {
        seconds: 5.0,
        allows_longest_gap: true,
    };

    fn report_on(snapshot: serde_json::Value, job: Option<&str>) -> HangReport {
        let snapshot: Snapshot = serde_json::from_value(snapshot).unwrap();
        let inspect = |_: &ProcessSnapshot| Activity::new(State::Stopped, "is stopped");
        HangReport::new(&snapshot, job, THRESHOLD, |_| false, inspect)
    }

    fn on(communicator: &str, sequence: u64) -> serde_json::Value {
        json!({
            "communicator": communicator, "sequence": sequence, "op": "AllReduce",
            "entered_seconds_ago": 30.0,
        })
    }

    #[test]
    fn a_rank_without_a_communicator_cannot_be_told_of() {
        let observed = |trainer: &serde_json::Value| json!({"observed": [trainer]});
        let rank = json!({"pid": 7, "role": "trainer", "identity": {"job": "a", "rank": 0}});
        let report = report_on(observed(&rank), None);
        assert_eq!(report.verdict, HangVerdict::CannotTell);
        assert_eq!(report.pids_without_communicator, [7]);
        let talks = json!({"pid": 7, "role": "trainer", "calls": {"ncclAllReduce": {}}});
        assert_eq!(
            report_on(observed(&talks), None).verdict,
            HangVerdict::CannotTell
        );
        let alone = json!({"pid": 7, "role": "trainer", "calls": {"cuLaunchKernel": {}}});
        assert_eq!(
            report_on(observed(&alone), None).verdict,
            HangVerdict::NothingHangs
        );
    }

    #[test]
    fn a_job_that_is_not_there_cannot_be_told_of() {
        let report = report_on(json!({"observed": []}), Some("b"));
        assert_eq!(report.verdict, HangVerdict::CannotTell);
    }

    #[test]
    fn who_is_waited_for_and_waits_itself_is_told_from_the_cause() {
        let report = report_on(
            json!({"observed": [
                {"pid": 1, "communicators": [on("a", 5)]},
                {"pid": 2, "communicators": [on("a", 4), on("b", 9)]},
                {"pid": 3, "communicators": [on("b", 8)]},
            ]}),
            None,
        );
        let itself = |place: usize| {
            let found = &report.communicators[place].findings[0];
            (found.rank.pid, found.waits_itself_on.as_deref())
        };
        assert_eq!(itself(0), (2, Some("b")));
        assert_eq!(itself(1), (3, None));
    }

    #[test]
    fn how_a_rank_ended_is_told() {
        let ended = |signal, exit_code| {
            how_it_ended(&ProcessSnapshot {
                signal,
                exit_code,
                ended_seconds_ago: Some(2.0),
                ..ProcessSnapshot::default()
            })
        };
        assert!(ended(Some(9), None).contains("SIGKILL ended it, 2.0 s ago"));
        assert!(ended(None, Some(3)).contains("exited with code 3"));
    }
}
