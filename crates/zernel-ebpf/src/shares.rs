//! Shares of a limited table, so that one tenant cannot fill it for all.

use zernel_identity::Tenant;

/// How a table is shared by tenants. Any tenant may use all that is free, except the reserve. The reserve is for tenants that
/// have less than the minimum.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shares {
    pub(crate) capacity: usize,
    pub(crate) reserve: usize,
    pub(crate) minimum: usize,
}

impl Shares {
    /// Whether a tenant may get another entry. `tenants` has the tenant of every entry in use.
    pub(crate) fn admits<'a>(
        &self,
        tenant: &Tenant,
        tenants: impl Iterator<Item = &'a Tenant>,
    ) -> bool {
        let (mut own, mut all) = (0, 0);
        for other in tenants {
            own += usize::from(other == tenant);
            all += 1;
        }
        let limit = match own < self.minimum {
            true => self.capacity,
            false => self.capacity - self.reserve,
        };
        all < limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARES: Shares = Shares {
        capacity: 20,
        reserve: 8,
        minimum: 2,
    };

    /// Number of entries that a user gets, beside those in use.
    fn gets(user: u32, used: &mut Vec<Tenant>) -> usize {
        let (tenant, before) = (Tenant::User(user), used.len());
        while SHARES.admits(&tenant, used.iter()) {
            used.push(tenant.clone());
        }
        used.len() - before
    }

    #[test]
    fn a_greedy_tenant_leaves_the_reserve_to_others() {
        let mut used = Vec::new();
        assert_eq!(gets(1, &mut used), 12);
        for user in 2..6 {
            assert_eq!(gets(user, &mut used), 2, "user {user}");
        }
        assert_eq!(gets(6, &mut used), 0, "the table is full");
    }

    #[test]
    fn an_alone_tenant_may_use_all_but_the_reserve() {
        assert_eq!(gets(1, &mut vec![Tenant::User(2); 4]), 8);
    }
}
