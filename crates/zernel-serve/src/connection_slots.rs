//! Slots for connections: how many each owner may hold, and which one ends when there are too many.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::peer::ConnectionOwner;

/// The most slots of one owner and of all owners together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotLimits {
    /// Slots of trusted owners, which no other owner can take.
    pub(crate) trusted_slots: usize,
    /// Slots of all other owners together.
    pub(crate) other_slots: usize,
    /// Slots of one tenant of the unix socket.
    pub(crate) tenant_slots: usize,
}

/// What happens to a client that finds its owner's slots taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FullSlotsPolicy {
    /// The oldest connection of the same owner is ended, and the new client gets its slot.
    EndOldest,
    /// It gets none.
    Refuse,
}

/// The slots of one address, or of all WebSocket clients.
#[derive(Clone)]
pub(crate) struct Slots(Arc<SlotPool>);

struct SlotPool {
    limits: SlotLimits,
    full_slots_policy: FullSlotsPolicy,
    table: Mutex<SlotTable>,
    /// Number of [`Slot`]s that exist, ended ones included.
    used_count: watch::Sender<usize>,
}

#[derive(Default)]
struct SlotTable {
    next_id: u64,
    /// The used slots, in the order in which the clients came.
    entries: Vec<TakenSlot>,
}

struct TakenSlot {
    id: u64,
    owner: ConnectionOwner,
    end_signal: watch::Sender<bool>,
}

/// A slot in use. The slot is free again when this value is dropped.
pub(crate) struct Slot {
    shared: Arc<SlotPool>,
    id: u64,
    end_signal: watch::Receiver<bool>,
}

impl Slots {
    pub(crate) fn new(limits: SlotLimits, full_slots_policy: FullSlotsPolicy) -> Self {
        Self(Arc::new(SlotPool {
            limits,
            full_slots_policy,
            table: Mutex::default(),
            used_count: watch::Sender::new(0),
        }))
    }

    /// Takes a slot for a client; `None` if the client is refused, because the slots of its owner, or all, are taken.
    pub(crate) fn take_slot(&self, owner: ConnectionOwner) -> Option<Slot> {
        let mut table = self.0.lock_table();
        self.0.free_slot_for_owner(&mut table, &owner)?;
        let id = table.next_id;
        table.next_id += 1;
        let (end, receiver) = watch::channel(false);
        table.entries.push(TakenSlot {
            id,
            owner,
            end_signal: end,
        });
        self.0.used_count.send_modify(|used| *used += 1);
        Some(Slot {
            shared: Arc::clone(&self.0),
            id,
            end_signal: receiver,
        })
    }

    /// Waits until no slot is in use.
    pub(crate) async fn wait_until_all_free(&self) {
        let mut used = self.0.used_count.subscribe();
        // Waiting fails only if the sender is dropped, and `self` holds the sender.
        let _ = used.wait_for(|used| *used == 0).await;
    }
}

impl Slot {
    /// Counts the client for another owner from now on.
    pub(crate) fn assign_to_owner(&self, owner: &ConnectionOwner) {
        let mut table = self.shared.lock_table();
        let is_own = |entry: &TakenSlot| entry.id == self.id;
        let Some(position) = table.entries.iter().position(is_own) else {
            return;
        };
        if table.entries[position].owner != *owner {
            let mut entry = table.entries.remove(position);
            entry.owner = owner.clone();
            // The client is refused only in a table of WebSockets, whose owners never change.
            let _ = self.shared.free_slot_for_owner(&mut table, owner);
            table.entries.push(entry);
        }
    }

    /// Waits until the client must end because another client needs its slot.
    pub(crate) fn wait_until_evicted(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut end = self.end_signal.clone();
        async move {
            // The sender is dropped when the slot was given to another client.
            let _ = end.wait_for(|is_ended| *is_ended).await;
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut table = self.shared.lock_table();
        table.entries.retain(|entry| entry.id != self.id);
        self.shared.used_count.send_modify(|used| *used -= 1);
    }
}

impl SlotPool {
    /// Locks the table even if it is poisoned: no operation leaves it half changed.
    fn lock_table(&self) -> MutexGuard<'_, SlotTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes sure that a slot is free for `owner`. Returns `None` if no slot can be freed.
    fn free_slot_for_owner(&self, table: &mut SlotTable, owner: &ConnectionOwner) -> Option<()> {
        let limit = match owner {
            ConnectionOwner::Trusted => self.limits.trusted_slots,
            ConnectionOwner::Tenant(_) => self.limits.tenant_slots.min(self.limits.other_slots),
            ConnectionOwner::Anonymous => self.limits.other_slots,
        };
        if table.count_slots_by_owner(|other| other == owner) >= limit {
            return self.end_oldest_of_same_owner(table, owner);
        }
        let others = table.count_slots_by_owner(|other| *other != ConnectionOwner::Trusted);
        if *owner == ConnectionOwner::Trusted || others < self.limits.other_slots {
            return Some(());
        }
        match table.owner_with_most_slots(owner) {
            Some(largest) => table.end_oldest_connection(|other| *other == largest),
            None if self.full_slots_policy == FullSlotsPolicy::Refuse => None,
            None => table.end_oldest_connection(|other| *other != ConnectionOwner::Trusted),
        }
    }

    fn end_oldest_of_same_owner(
        &self,
        table: &mut SlotTable,
        owner: &ConnectionOwner,
    ) -> Option<()> {
        match self.full_slots_policy {
            FullSlotsPolicy::EndOldest => table.end_oldest_connection(|other| other == owner),
            FullSlotsPolicy::Refuse => None,
        }
    }
}

impl SlotTable {
    fn count_slots_by_owner(&self, is_counted: impl Fn(&ConnectionOwner) -> bool) -> usize {
        let entries = self.entries.iter();
        entries.filter(|entry| is_counted(&entry.owner)).count()
    }

    /// The owner with the most slots, if it is not trusted and has more than `owner`.
    fn owner_with_most_slots(&self, owner: &ConnectionOwner) -> Option<ConnectionOwner> {
        let mut counts: HashMap<&ConnectionOwner, usize> = HashMap::new();
        for entry in &self.entries {
            *counts.entry(&entry.owner).or_default() += 1;
        }
        counts.remove(&ConnectionOwner::Trusted);
        let own = counts.remove(owner).unwrap_or(0);
        let largest = counts.into_iter().max_by_key(|(_, count)| *count);
        largest
            .filter(|(_, count)| *count > own.max(1))
            .map(|(largest, _)| largest.clone())
    }

    /// Ends the oldest client of the owners that `matches` selects.
    fn end_oldest_connection(&mut self, matches: impl Fn(&ConnectionOwner) -> bool) -> Option<()> {
        let position = self
            .entries
            .iter()
            .position(|entry| matches(&entry.owner))?;
        self.entries.remove(position).end_signal.send_replace(true);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use zernel_identity::Tenant;

    use super::*;

    const TEST_LIMITS: SlotLimits = SlotLimits {
        trusted_slots: 2,
        other_slots: 6,
        tenant_slots: 3,
    };

    fn owner_for_uid(uid: u32) -> ConnectionOwner {
        ConnectionOwner::Tenant(Tenant::User(uid))
    }

    fn is_ended(slot: &Slot) -> bool {
        *slot.end_signal.borrow()
    }

    fn take_slots(slots: &Slots, owner: &ConnectionOwner, count: usize) -> Vec<Slot> {
        (0..count)
            .filter_map(|_| slots.take_slot(owner.clone()))
            .collect()
    }

    #[test]
    fn a_user_with_too_many_connections_ends_only_its_own() {
        let slots = Slots::new(TEST_LIMITS, FullSlotsPolicy::EndOldest);
        let other = take_slots(&slots, &owner_for_uid(1), 2);
        let many = take_slots(&slots, &owner_for_uid(2), 9);
        assert!(!other.iter().any(is_ended));
        let ended: Vec<bool> = many.iter().map(is_ended).collect();
        assert_eq!(ended, [vec![true; 6], vec![false; 3]].concat());
    }

    #[test]
    fn the_owner_with_most_slots_loses_one_when_full() {
        let slots = Slots::new(TEST_LIMITS, FullSlotsPolicy::EndOldest);
        let small = take_slots(&slots, &owner_for_uid(1), 2);
        let large = take_slots(&slots, &owner_for_uid(2), 3);
        let _last = take_slots(&slots, &owner_for_uid(3), 1);
        let _new = take_slots(&slots, &owner_for_uid(4), 1);
        assert!(!small.iter().any(is_ended));
        assert!(is_ended(&large[0]) && !is_ended(&large[1]));
    }

    #[test]
    fn many_users_with_one_connection_do_not_shut_out_another() {
        let slots = Slots::new(TEST_LIMITS, FullSlotsPolicy::EndOldest);
        let crowd: Vec<_> = (0..6)
            .flat_map(|uid| take_slots(&slots, &owner_for_uid(uid), 1))
            .collect();
        let _new = slots.take_slot(owner_for_uid(7)).unwrap();
        assert!(is_ended(&crowd[0]) && !is_ended(&crowd[1]));
    }

    #[test]
    fn nobody_takes_the_slots_of_trusted_owners() {
        for full_slots_policy in [FullSlotsPolicy::EndOldest, FullSlotsPolicy::Refuse] {
            let slots = Slots::new(TEST_LIMITS, full_slots_policy);
            let root = slots.take_slot(ConnectionOwner::Trusted).unwrap();
            let _crowd: Vec<_> = (0..50)
                .map(|uid| slots.take_slot(owner_for_uid(uid)))
                .collect();
            let _anonymous: Vec<_> = (0..50)
                .map(|_| slots.take_slot(ConnectionOwner::Anonymous))
                .collect();
            assert!(slots.take_slot(ConnectionOwner::Trusted).is_some());
            assert!(!is_ended(&root));
        }
    }

    #[test]
    fn a_client_that_becomes_trusted_leaves_its_slot_to_others() {
        let slots = Slots::new(TEST_LIMITS, FullSlotsPolicy::EndOldest);
        let first = slots.take_slot(ConnectionOwner::Anonymous).unwrap();
        first.assign_to_owner(&ConnectionOwner::Trusted);
        let _many = take_slots(&slots, &ConnectionOwner::Anonymous, 50);
        assert!(!is_ended(&first));
    }

    /// A user of a pod has the uid of a user of the machine. Once the pod of the client is known, neither user ends
    /// connections of the other.
    #[test]
    fn a_client_whose_tenant_is_known_is_ended_by_its_tenant_only() {
        let slots = Slots::new(TEST_LIMITS, FullSlotsPolicy::EndOldest);
        let local = slots.take_slot(owner_for_uid(1)).unwrap();
        let in_pod = slots.take_slot(owner_for_uid(1)).unwrap();
        in_pod.assign_to_owner(&ConnectionOwner::Tenant(Tenant::Pod("pod".to_owned())));
        let _many = take_slots(&slots, &owner_for_uid(1), 9);
        assert!(is_ended(&local) && !is_ended(&in_pod));
    }

    #[test]
    fn refusing_slots_end_no_connection() {
        let slots = Slots::new(TEST_LIMITS, FullSlotsPolicy::Refuse);
        let mut own = take_slots(&slots, &owner_for_uid(1), 9);
        assert_eq!(own.len(), 3);
        assert!(!own.iter().any(is_ended));
        own.pop();
        assert!(slots.take_slot(owner_for_uid(1)).is_some());
    }

    #[tokio::test]
    async fn all_slots_are_free_when_the_last_one_is_dropped() {
        let slots = Slots::new(TEST_LIMITS, FullSlotsPolicy::EndOldest);
        let taken = take_slots(&slots, &ConnectionOwner::Anonymous, 50);
        drop(taken);
        slots.wait_until_all_free().await;
    }
}
