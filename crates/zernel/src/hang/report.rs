//! The findings, as `--json` prints them.

use serde::Serialize;

use super::activity::{ProcessActivity, ProcessActivityKind};
use super::analysis::{
    self, CommunicatorMember, HangThreshold, LateRank, LocalCommunicator, RankProblem,
};
use zernel_model::snapshot::{ProcessSnapshot, Snapshot};

/// The report on all communicators.
#[derive(Debug, Serialize)]
pub(super) struct HangReport {
    pub(super) verdict: HangVerdict,
    /// The selected job.
    pub(super) job: Option<String>,
    pub(super) communicators: Vec<CommunicatorReport>,
    /// Pids of ranks without a known communicator. Whether these ranks hang is unknown.
    pub(super) pids_without_communicator: Vec<u32>,
}

/// Whether a rank of a communicator, or of any communicator, hangs.
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

/// A communicator with its ranks on this node.
#[derive(Debug, Serialize)]
pub(super) struct CommunicatorReport {
    pub(super) communicator: String,
    pub(super) job: Option<String>,
    pub(super) verdict: HangVerdict,
    /// Number of ranks on all nodes.
    pub(super) ranks: Option<u32>,
    /// The ranks of the communicator on this node.
    pub(super) members: Vec<RankReport>,
    pub(super) findings: Vec<LateRankReport>,
}

/// A rank of a communicator, with the last collective that it entered.
#[derive(Debug, Clone, Serialize)]
pub(super) struct RankReport {
    pub(super) rank: Option<u32>,
    pub(super) pid: u32,
    pub(super) comm: String,
    pub(super) sequence: u64,
    pub(super) op: String,
    pub(super) bytes: u64,
    pub(super) in_call: bool,
    /// Whether the rank waits for others to join. If so, `entered_seconds_ago` counts from the begin of this wait.
    pub(super) is_being_made: bool,
    pub(super) entered_seconds_ago: Option<f64>,
    pub(super) longest_gap_seconds: f64,
    pub(super) ended_seconds_ago: Option<f64>,
}

/// A rank that others wait for.
#[derive(Debug, Serialize)]
pub(super) struct LateRankReport {
    #[serde(flatten)]
    pub(super) rank: RankReport,
    /// Whether it hangs. Otherwise it is late.
    pub(super) hangs: bool,
    /// How long the rank that waits longest for this one has waited.
    pub(super) waited_seconds: f64,
    #[serde(flatten)]
    pub(super) problem: RankProblem,
    #[serde(rename = "doing")]
    pub(super) activity: ProcessActivity,
    /// Another communicator on which this rank waits for a rank that hangs.
    pub(super) waits_itself_on: Option<String>,
}

impl HangReport {
    pub(super) fn new(
        snapshot: &Snapshot,
        job: Option<&str>,
        threshold: HangThreshold,
        is_stopped: impl Fn(&ProcessSnapshot) -> bool,
        inspect: impl Fn(&ProcessSnapshot) -> ProcessActivity,
    ) -> Self {
        let found = analysis::local_communicators_of_job(snapshot, job);
        let mut communicators: Vec<CommunicatorReport> = found
            .iter()
            .map(|communicator| {
                CommunicatorReport::new(communicator, threshold, &is_stopped, &inspect)
            })
            .collect();
        mark_ranks_waiting_elsewhere(&found, &mut communicators);
        let is_unknown = |process: &&ProcessSnapshot| {
            process.is_rank()
                && !process.complete
                && process.probes.nccl.communicators.is_empty()
                && (job.is_none() || process.job() == job)
        };
        let unknown = snapshot.observed.iter().filter(is_unknown);
        let unknown: Vec<u32> = unknown.map(|process| process.pid).collect();
        let verdicts = communicators.iter().map(|ranks| ranks.verdict);
        let without_findings = match unknown.is_empty() && (job.is_none() || !found.is_empty()) {
            true => HangVerdict::NothingHangs,
            false => HangVerdict::CannotTell,
        };
        Self {
            verdict: verdicts.fold(without_findings, HangVerdict::max),
            job: job.map(str::to_owned),
            communicators,
            pids_without_communicator: unknown,
        }
    }
}

impl CommunicatorReport {
    fn new(
        communicator: &LocalCommunicator<'_>,
        threshold: HangThreshold,
        is_stopped: impl Fn(&ProcessSnapshot) -> bool,
        inspect: impl Fn(&ProcessSnapshot) -> ProcessActivity,
    ) -> Self {
        let findings = communicator.find_late_ranks(threshold, is_stopped);
        let verdict = if findings.iter().any(|finding| finding.hangs) {
            HangVerdict::Hang
        } else if communicator.all_ranks_wait(threshold) {
            HangVerdict::CannotTell
        } else {
            HangVerdict::NothingHangs
        };
        Self {
            communicator: communicator.hash.to_owned(),
            job: communicator.job().map(str::to_owned),
            verdict,
            ranks: communicator.rank_count(),
            members: communicator.members.iter().map(RankReport::new).collect(),
            findings: findings
                .into_iter()
                .map(|finding| LateRankReport::new(finding, &inspect))
                .collect(),
        }
    }
}

impl RankReport {
    fn new(member: &CommunicatorMember<'_>) -> Self {
        let CommunicatorMember { process, state } = member;
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

impl LateRankReport {
    fn new(finding: LateRank<'_>, inspect: impl Fn(&ProcessSnapshot) -> ProcessActivity) -> Self {
        let process = finding.member.process;
        let activity = match finding.member.has_exited() {
            true => ProcessActivity::new(ProcessActivityKind::Ended, process_exit_text(process)),
            false => inspect(process),
        };
        Self {
            rank: RankReport::new(finding.member),
            hangs: finding.hangs,
            waited_seconds: finding.waited_seconds,
            problem: finding.problem,
            activity,
            waits_itself_on: None,
        }
    }
}

/// How a process ended, as a predicate without a subject, such as "was killed by SIGKILL".
fn process_exit_text(process: &ProcessSnapshot) -> String {
    let ago = process
        .ended_seconds_ago
        .map_or(String::new(), |ago| format!(", {ago:.1} s ago"));
    match (process.signal, process.exit_code) {
        (Some(9), _) => {
            format!("was killed by SIGKILL{ago} (if unexpected, check `dmesg` for the OOM killer)")
        }
        (Some(signal), _) => format!("was killed by signal {signal}{ago}"),
        (None, Some(code)) => format!("exited with code {code}{ago}"),
        (None, None) => format!("exited{ago}"),
    }
}

/// Marks findings on ranks that are not the cause themselves: they wait for a rank of another communicator.
fn mark_ranks_waiting_elsewhere(
    communicators: &[LocalCommunicator<'_>],
    reports: &mut [CommunicatorReport],
) {
    let mut waiting: Vec<(u32, String)> = Vec::new();
    for (communicator, report) in communicators.iter().zip(reports.iter()) {
        if report.verdict != HangVerdict::Hang {
            continue;
        }
        let culprits: Vec<u32> = report.findings.iter().map(|found| found.rank.pid).collect();
        let victims = communicator
            .leading_members()
            .map(|leader| leader.process.pid);
        let victims = victims.filter(|pid| !culprits.contains(pid));
        waiting.extend(victims.map(|pid| (pid, report.communicator.clone())));
    }
    for found in reports.iter_mut().flat_map(|report| &mut report.findings) {
        let own = waiting.iter().find(|(pid, _)| *pid == found.rank.pid);
        found.waits_itself_on = own.map(|(_, communicator)| communicator.clone());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TEST_THRESHOLD: HangThreshold = HangThreshold {
        seconds: 5.0,
        allows_longest_gap: true,
    };

    fn report_on(snapshot: serde_json::Value, job: Option<&str>) -> HangReport {
        let snapshot: Snapshot = serde_json::from_value(snapshot).unwrap();
        let inspect =
            |_: &ProcessSnapshot| ProcessActivity::new(ProcessActivityKind::Stopped, "is stopped");
        HangReport::new(&snapshot, job, TEST_THRESHOLD, |_| false, inspect)
    }

    fn member_on(communicator: &str, sequence: u64) -> serde_json::Value {
        json!({
            "communicator": communicator, "sequence": sequence, "op": "AllReduce",
            "entered_seconds_ago": 30.0,
        })
    }

    #[test]
    fn a_rank_without_a_communicator_is_unknown() {
        let observed = |trainer: &serde_json::Value| json!({"observed": [trainer]});
        let rank = json!({"pid": 7, "role": "trainer", "identity": {"job": "a", "rank": 0}});
        let report = report_on(observed(&rank), None);
        assert_eq!(report.verdict, HangVerdict::CannotTell);
        assert_eq!(report.pids_without_communicator, [7]);
        let with_nccl = json!({"pid": 7, "role": "trainer", "calls": {"ncclAllReduce": {}}});
        assert_eq!(
            report_on(observed(&with_nccl), None).verdict,
            HangVerdict::CannotTell
        );
        let without_nccl = json!({"pid": 7, "role": "trainer", "calls": {"cuLaunchKernel": {}}});
        assert_eq!(
            report_on(observed(&without_nccl), None).verdict,
            HangVerdict::NothingHangs
        );
    }

    #[test]
    fn a_missing_job_is_unknown() {
        let report = report_on(json!({"observed": []}), Some("b"));
        assert_eq!(report.verdict, HangVerdict::CannotTell);
    }

    #[test]
    fn a_rank_that_waits_on_another_communicator_is_marked() {
        let report = report_on(
            json!({"observed": [
                {"pid": 1, "communicators": [member_on("a", 5)]},
                {"pid": 2, "communicators": [member_on("a", 4), member_on("b", 9)]},
                {"pid": 3, "communicators": [member_on("b", 8)]},
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
    fn the_end_of_a_rank_is_described() {
        let ended = |signal, exit_code| {
            process_exit_text(&ProcessSnapshot {
                signal,
                exit_code,
                ended_seconds_ago: Some(2.0),
                ..ProcessSnapshot::default()
            })
        };
        assert!(ended(Some(9), None).contains("killed by SIGKILL, 2.0 s ago"));
        assert!(ended(None, Some(3)).contains("exited with code 3"));
    }
}
