//! A map from pid to a small value that evicts pids not used for long, in bounded memory.

use std::collections::HashMap;

use rustc_hash::FxBuildHasher;

type Generation<V> = HashMap<u32, V, FxBuildHasher>;

/// Values of recently used pids.
///
/// The map has two generations, each as large as the capacity. A used value moves to the young
/// generation. When the young generation is full it becomes the old one, and the values left in the
/// previous old generation are evicted and counted. A lookup in the young generation is one hash
/// probe. Pids up to the capacity can be used in turn without eviction; at most twice the capacity is kept.
#[derive(Debug, Clone)]
pub(crate) struct RecentPids<V> {
    young_generation: Generation<V>,
    old_generation: Generation<V>,
    capacity: usize,
    eviction_count: u64,
}

impl<V> RecentPids<V> {
    /// Creates a map for `capacity` pids (at least 1).
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self {
            young_generation: Generation::default(),
            old_generation: Generation::default(),
            capacity: capacity.max(1),
            eviction_count: 0,
        }
    }

    /// Returns the value of `pid`, inserting `default()` if there is none.
    pub(crate) fn get_or_insert_with(&mut self, pid: u32, default: impl FnOnce() -> V) -> &mut V {
        if self.young_generation.len() >= self.capacity && !self.young_generation.contains_key(&pid)
        {
            let kept = self.old_generation.remove(&pid);
            self.drop_old_generation();
            self.young_generation.extend(kept.map(|value| (pid, value)));
        }
        self.young_generation
            .entry(pid)
            .or_insert_with(|| self.old_generation.remove(&pid).unwrap_or_else(default))
    }

    pub(crate) fn remove(&mut self, pid: u32) {
        if self.young_generation.remove(&pid).is_none() {
            self.old_generation.remove(&pid);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.young_generation.len() + self.old_generation.len()
    }

    /// Number of values evicted to stay within the capacity.
    pub(crate) fn eviction_count(&self) -> u64 {
        self.eviction_count
    }

    fn drop_old_generation(&mut self) {
        self.eviction_count = self
            .eviction_count
            .saturating_add(self.old_generation.len() as u64);
        self.old_generation.clear();
        std::mem::swap(&mut self.young_generation, &mut self.old_generation);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_most_twice_the_capacity_is_kept_and_evictions_are_counted() {
        let mut recent = RecentPids::with_capacity(8);
        for pid in 0..1_000 {
            recent.get_or_insert_with(pid, || pid);
            assert!(recent.len() <= 16);
        }
        assert_eq!(recent.eviction_count(), 1_000 - recent.len() as u64);
    }

    #[test]
    fn a_pid_in_constant_use_is_never_evicted() {
        let mut recent = RecentPids::with_capacity(8);
        *recent.get_or_insert_with(7, || 0) = 99;
        for pid in 100..1_000 {
            recent.get_or_insert_with(pid, || 0);
            assert_eq!(*recent.get_or_insert_with(7, || 0), 99);
        }
    }

    #[test]
    fn as_many_pids_as_the_capacity_cause_no_eviction() {
        let mut recent = RecentPids::with_capacity(100);
        for _ in 0..50 {
            for pid in 0..100 {
                *recent.get_or_insert_with(pid, || 0) += 1;
            }
        }
        assert_eq!(recent.eviction_count(), 0);
        assert!((0..100).all(|pid| *recent.get_or_insert_with(pid, || 0) == 50));
    }

    #[test]
    fn removal_reaches_both_generations() {
        let mut recent = RecentPids::with_capacity(2);
        for pid in 0..3 {
            recent.get_or_insert_with(pid, || pid);
        }
        for pid in 0..3 {
            recent.remove(pid);
        }
        recent.remove(77);
        assert_eq!((recent.len(), recent.eviction_count()), (0, 0));
    }
}
