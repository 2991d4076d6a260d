//! Collectives and communicators of a process.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{ProcessSnapshot, Scope, SharedHistogram, Snapshot};
use crate::aggregation::LatencyHistogram;

/// Collectives and communicators of a process.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct NcclSnapshot {
    /// Collectives and messages by operation.
    pub collectives: Vec<CollectiveTotals>,
    /// Progress on each communicator.
    pub communicators: Vec<CommunicatorSnapshot>,
}

/// All collectives of one operation.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CollectiveTotals {
    /// NCCL's name of the operation.
    pub op: Cow<'static, str>,
    /// Number of calls.
    pub calls: u64,
    /// Bytes passed to NCCL.
    pub bytes: u64,
    /// Median time from the call of a collective to the end of the wait that covers the call.
    pub until_sync_median_seconds: Option<f64>,
    /// Mean of the same.
    pub until_sync_mean_seconds: Option<f64>,
    /// Durations of the calls, which hand the work to the GPU.
    #[serde(skip)]
    pub enqueue_times: Option<SharedHistogram>,
    /// Histogram of the times from the call of a collective to the end of the wait that covers the call.
    #[serde(skip)]
    pub until_sync_times: Option<SharedHistogram>,
}

/// Progress of a process on one communicator.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CommunicatorSnapshot {
    /// Id of the communicator, which all its ranks share.
    pub communicator: String,
    /// Rank of the process in the communicator.
    pub rank: Option<u32>,
    /// Number of ranks.
    pub ranks: Option<u32>,
    /// Collectives entered.
    pub sequence: u64,
    /// Operation of the latest collective.
    pub op: Cow<'static, str>,
    /// Bytes of the latest collective.
    pub bytes: u64,
    /// Whether the latest call has not returned.
    pub in_call: bool,
    /// Time since the process entered the latest collective, in seconds.
    pub entered_seconds_ago: Option<f64>,
    /// Longest time between the entries of two successive collectives.
    pub longest_gap_seconds: f64,
    /// Latest operations, newest first.
    pub last_ops: Vec<Cow<'static, str>>,
    /// Whether the call that creates the communicator has not returned.
    pub is_being_made: bool,
}

/// Durations of collectives of processes that are no longer listed. Metric families without a pid must not decrease.
#[derive(Debug, Clone, PartialEq)]
pub struct ExitedRankTimes {
    /// User of the processes.
    pub uid: Option<u32>,
    /// NCCL's name of the operation.
    pub op: &'static str,
    /// Durations of the calls.
    pub enqueue_times: Option<SharedHistogram>,
    /// Histogram of the times from the call of a collective to the end of the wait that covers the call.
    pub until_sync_times: Option<SharedHistogram>,
}

impl Snapshot {
    /// Durations of NCCL calls by operation, of all processes within a scope that were ever observed.
    #[must_use]
    pub fn enqueue_times(&self, scope: Scope) -> BTreeMap<String, LatencyHistogram> {
        self.collective_times(
            scope,
            |totals| totals.enqueue_times.as_ref(),
            |exited| exited.enqueue_times.as_ref(),
        )
    }

    /// Times from NCCL calls to the end of the wait that covers them, like [`Self::enqueue_times`].
    #[must_use]
    pub fn until_sync_times(&self, scope: Scope) -> BTreeMap<String, LatencyHistogram> {
        self.collective_times(
            scope,
            |totals| totals.until_sync_times.as_ref(),
            |exited| exited.until_sync_times.as_ref(),
        )
    }

    fn collective_times<'a>(
        &'a self,
        scope: Scope,
        of_listed: impl Fn(&'a CollectiveTotals) -> Option<&'a SharedHistogram>,
        of_exited: impl Fn(&'a ExitedRankTimes) -> Option<&'a SharedHistogram>,
    ) -> BTreeMap<String, LatencyHistogram> {
        let uid = |process: &ProcessSnapshot| process.identity.as_ref().map(|it| it.uid);
        let counted = self.observed.iter();
        let counted = counted.filter(|process| scope.counts_user_in_sums(uid(process)));
        let collectives = counted.flat_map(|it| &it.probes.nccl.collectives);
        let listed = collectives.filter_map(|it| Some((&*it.op, of_listed(it)?)));
        let exited = self.exited_ranks.iter();
        let exited = exited.filter(|exited| scope.counts_user_in_sums(exited.uid));
        let exited = exited.filter_map(|it| Some((it.op, of_exited(it)?)));
        let mut sums: BTreeMap<String, LatencyHistogram> = BTreeMap::new();
        for (op, times) in listed.chain(exited) {
            sums.entry(op.to_owned()).or_default().merge(times);
        }
        sums
    }
}
