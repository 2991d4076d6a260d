//! Shares of a limited table, so that one user cannot fill it for all.

/// How a table is shared by users. Any user may use all that is free, except the reserve. The reserve is for users who have
/// less than the minimum.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shares {
    pub(crate) capacity: usize,
    pub(crate) reserve: usize,
    pub(crate) minimum: usize,
}

impl Shares {
    /// Whether a user may get another entry. `users` has the user of every entry in use.
    pub(crate) fn admits(&self, user: u32, users: impl Iterator<Item = u32>) -> bool {
        let (mut own, mut all) = (0, 0);
        for other in users {
            own += usize::from(other == user);
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
    fn gets(user: u32, used: &mut Vec<u32>) -> usize {
        let before = used.len();
        while SHARES.admits(user, used.iter().copied()) {
            used.push(user);
        }
        used.len() - before
    }

    #[test]
    fn a_greedy_user_leaves_the_reserve_to_others() {
        let mut used = Vec::new();
        assert_eq!(gets(1, &mut used), 12);
        for user in 2..6 {
            assert_eq!(gets(user, &mut used), 2, "user {user}");
        }
        assert_eq!(gets(6, &mut used), 0, "the table is full");
    }

    #[test]
    fn an_alone_user_may_use_all_but_the_reserve() {
        assert_eq!(gets(1, &mut vec![2; 4]), 8);
    }
}
