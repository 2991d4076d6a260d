//! Shares of a limited table, so that one tenant cannot take all entries.

use std::collections::BTreeMap;

use zernel_identity::Tenant;

/// How a table is shared by tenants. Any tenant may use all that is free, except the reserve. Half of the reserve is for
/// tenants that have fewer entries than the largest one. All of the reserve is for tenants that have less than the minimum.
/// `bpf/tenants.h` has the same rule.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TenantShares {
    pub(crate) capacity: usize,
    pub(crate) reserved_entries: usize,
    pub(crate) minimum_per_tenant: usize,
}

impl TenantShares {
    /// Whether a tenant may get another entry. `tenants` has the tenant of every entry in use.
    pub(crate) fn may_add_entry<'a>(
        &self,
        tenant: &Tenant,
        tenants: impl Iterator<Item = &'a Tenant>,
    ) -> bool {
        let mut used: BTreeMap<&Tenant, usize> = BTreeMap::new();
        for other in tenants {
            *used.entry(other).or_default() += 1;
        }
        let all: usize = used.values().sum();
        let own = used.get(tenant).copied().unwrap_or(0);
        let largest = used.values().copied().max().unwrap_or(0);
        let reserved = match own {
            _ if own < self.minimum_per_tenant => 0,
            _ if own < largest => self.reserved_entries / 2,
            _ => self.reserved_entries,
        };
        all < self.capacity - reserved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE_SHARES: TenantShares = TenantShares {
        capacity: 20,
        reserved_entries: 8,
        minimum_per_tenant: 2,
    };

    /// Number of further entries that a user gets, if these entries are in use.
    fn entries_gained(user: u32, used: &mut Vec<Tenant>) -> usize {
        let (tenant, before) = (Tenant::User(user), used.len());
        while EXAMPLE_SHARES.may_add_entry(&tenant, used.iter()) {
            used.push(tenant.clone());
        }
        used.len() - before
    }

    #[test]
    fn a_greedy_tenant_leaves_the_reserve_to_others() {
        let mut used = Vec::new();
        assert_eq!(entries_gained(1, &mut used), 12);
        for user in 2..6 {
            used.extend([Tenant::User(user), Tenant::User(user)]);
            assert!(
                EXAMPLE_SHARES.may_add_entry(&Tenant::User(user), used[..used.len() - 1].iter())
            );
        }
        assert_eq!(entries_gained(6, &mut used), 0, "the table is full");
    }

    /// The largest tenant fills the table, a smaller one grows beyond its minimum, and a third one gets its minimum.
    #[test]
    fn a_full_table_refuses_the_largest_tenant_first() {
        let mut used = Vec::new();
        assert_eq!(entries_gained(1, &mut used), 12);
        assert_eq!(entries_gained(2, &mut used), 4, "half of the reserve");
        assert_eq!(entries_gained(1, &mut used), 0);
        assert_eq!(entries_gained(3, &mut used), 2);
        assert_eq!(entries_gained(2, &mut used), 0);
    }

    #[test]
    fn an_alone_tenant_may_use_all_but_the_reserve() {
        assert_eq!(entries_gained(1, &mut vec![Tenant::User(2); 4]), 8);
    }
}
