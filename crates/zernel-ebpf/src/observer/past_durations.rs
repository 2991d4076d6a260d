//! Durations of collectives of processes whose grace period is over.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use zernel_model::aggregation::LatencyHistogram;
use zernel_model::snapshot::{ExitedRankTimes, SharedHistogram};

use crate::probes::DurationKind;

/// The most users whose durations are kept separately. The durations of further users are added up, because a user
/// can have many subordinate uids.
const MAX_SEPARATE_USERS: usize = 64;

/// Durations of collectives, by user. The key `None` holds durations of unknown users, and of all users beyond the
/// limit.
#[derive(Debug, Default)]
pub(super) struct PastDurations {
    durations_by_user: BTreeMap<(Option<u32>, DurationKind), SharedHistogram>,
    users: BTreeSet<u32>,
}

impl PastDurations {
    /// Adds durations of a process of a user. Only durations of collectives are added.
    pub(super) fn add_durations_of_user(
        &mut self,
        user: Option<u32>,
        family: DurationKind,
        histogram: &LatencyHistogram,
    ) {
        if !matches!(
            family,
            DurationKind::Enqueue(_) | DurationKind::UntilSync(_)
        ) {
            return;
        }
        let user = user.filter(|user| {
            let is_known = self.users.contains(user);
            is_known || (self.users.len() < MAX_SEPARATE_USERS && self.users.insert(*user))
        });
        let past = self.durations_by_user.entry((user, family)).or_default();
        Arc::make_mut(past).merge(histogram);
    }

    /// All durations.
    pub(super) fn snapshot(&self) -> Vec<ExitedRankTimes> {
        let past = self
            .durations_by_user
            .iter()
            .filter_map(|((uid, family), times)| {
                let times = Some(SharedHistogram::clone(times));
                let (operation, enqueue_times, until_sync_times) = match family {
                    DurationKind::Enqueue(operation) => (operation, times, None),
                    DurationKind::UntilSync(operation) => (operation, None, times),
                    _ => return None,
                };
                Some(ExitedRankTimes {
                    uid: *uid,
                    op: operation.name(),
                    enqueue_times,
                    until_sync_times,
                })
            });
        past.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probes::NcclOperation;

    #[test]
    fn the_number_of_users_is_bounded_and_no_duration_is_lost() {
        let mut one = LatencyHistogram::default();
        one.record(1000);
        let mut past = PastDurations::default();
        let family = DurationKind::Enqueue(NcclOperation::ALL[0]);
        for user in 0..10_000 {
            past.add_durations_of_user(Some(user), family, &one);
        }
        past.add_durations_of_user(Some(1), family, &one);
        past.add_durations_of_user(Some(1), DurationKind::Launch, &one);
        let all = past.snapshot();
        assert_eq!(all.len(), MAX_SEPARATE_USERS + 1);
        let counts = all
            .iter()
            .map(|it| it.enqueue_times.as_ref().unwrap().count);
        assert_eq!(counts.sum::<u64>(), 10_001);
        assert_eq!(all[0].uid, None);
        let of_user = all.iter().find(|it| it.uid == Some(1)).unwrap();
        assert_eq!(of_user.enqueue_times.as_ref().unwrap().count, 2);
    }
}
