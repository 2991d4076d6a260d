//! A value over time.

/// A value that changes at certain times, from the first of them up to, not including, an end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeline<T> {
    /// Starts in ascending order, each with the value from then on.
    changes: Vec<(u64, T)>,
    end_ns: u64,
}

impl<T: Copy + PartialEq> Timeline<T> {
    /// A timeline from changes in any order. If several changes have the same time, the last of them counts.
    #[must_use]
    pub fn new(mut changes: Vec<(u64, T)>, end_ns: u64) -> Self {
        changes.sort_by_key(|(start_ns, _)| *start_ns);
        let mut timeline = Self {
            changes: Vec::with_capacity(changes.len()),
            end_ns,
        };
        for (start_ns, value) in changes {
            timeline.set_from(start_ns, value);
        }
        timeline
    }

    /// A timeline without changes.
    #[must_use]
    pub fn constant(value: T, start_ns: u64, end_ns: u64) -> Self {
        Self {
            changes: vec![(start_ns, value)],
            end_ns,
        }
    }

    /// Sets the value from `start_ns` to the end. Changes at or after `start_ns` are removed. Nothing changes at or after the end.
    pub(crate) fn set_from(&mut self, start_ns: u64, value: T) {
        if start_ns >= self.end_ns {
            return;
        }
        while self.changes.last().is_some_and(|last| last.0 >= start_ns) {
            self.changes.pop();
        }
        if self.changes.last().is_none_or(|last| last.1 != value) {
            self.changes.push((start_ns, value));
        }
    }

    /// The value at a time.
    #[must_use]
    pub fn value_at(&self, at_ns: u64) -> Option<T> {
        let next_index = self.changes.partition_point(|change| change.0 <= at_ns);
        let value = self.changes.get(next_index.checked_sub(1)?)?.1;
        (at_ns < self.end_ns).then_some(value)
    }

    /// All values with their start and end.
    pub fn spans(&self) -> impl Iterator<Item = (u64, u64, T)> + '_ {
        let ends = self.changes.iter().skip(1).map(|change| change.0);
        let ends = ends.chain([self.end_ns]);
        let spans = self.changes.iter().zip(ends);
        spans
            .map(|(change, end_ns)| (change.0, end_ns.min(self.end_ns), change.1))
            .filter(|(start_ns, end_ns, _)| end_ns > start_ns)
    }

    /// A timeline with the same changes and other values.
    #[must_use]
    pub fn map<U: Copy + PartialEq>(&self, change: impl Fn(T) -> U) -> Timeline<U> {
        let changes = self.changes.iter();
        let changes = changes.map(|(start_ns, value)| (*start_ns, change(*value)));
        Timeline::new(changes.collect(), self.end_ns)
    }

    /// A timeline of pairs, over the time that both timelines cover.
    #[must_use]
    pub fn zip<U: Copy + PartialEq>(&self, other: &Timeline<U>) -> Timeline<(T, U)> {
        let start_or_max_ns = |start: Option<u64>| start.unwrap_or(u64::MAX);
        let first_ns = start_or_max_ns(self.changes.first().map(|change| change.0));
        let first_ns = first_ns.max(start_or_max_ns(
            other.changes.first().map(|change| change.0),
        ));
        let mut joined = Timeline {
            changes: Vec::new(),
            end_ns: self.end_ns.min(other.end_ns),
        };
        let (mut own_index, mut other_index) = (0, 0);
        let mut now_ns = first_ns;
        while now_ns < joined.end_ns {
            while self
                .changes
                .get(own_index + 1)
                .is_some_and(|change| change.0 <= now_ns)
            {
                own_index += 1;
            }
            while other
                .changes
                .get(other_index + 1)
                .is_some_and(|change| change.0 <= now_ns)
            {
                other_index += 1;
            }
            joined.set_from(
                now_ns,
                (self.changes[own_index].1, other.changes[other_index].1),
            );
            let next_ns = start_or_max_ns(self.changes.get(own_index + 1).map(|change| change.0));
            now_ns = next_ns.min(start_or_max_ns(
                other.changes.get(other_index + 1).map(|change| change.0),
            ));
        }
        joined
    }

    /// The timeline without spans shorter than `min_ns`: they become part of the span before. The first span stays.
    #[must_use]
    pub fn without_short_spans(&self, min_ns: u64) -> Self {
        let mut kept = Timeline::new(Vec::new(), self.end_ns);
        for (start_ns, end_ns, value) in self.spans() {
            if kept.changes.is_empty() || end_ns - start_ns >= min_ns {
                kept.set_from(start_ns, value);
            }
        }
        kept
    }

    /// The part between two times.
    #[must_use]
    pub fn clip_to(&self, start_ns: u64, end_ns: u64) -> Self {
        let window = Timeline::constant((), start_ns, end_ns);
        self.zip(&window).map(|(value, ())| value)
    }

    /// Fills the time between `start_ns` and `end_ns` that the timeline does not cover.
    #[must_use]
    pub fn fill_gaps(&self, value: T, start_ns: u64, end_ns: u64) -> Self {
        let first_ns = self.changes.first().map_or(self.end_ns, |first| first.0);
        let change_before = (start_ns < first_ns).then_some((start_ns, value));
        let mut changes: Vec<_> = change_before.into_iter().collect();
        changes.extend(self.changes.iter().copied());
        changes.push((self.end_ns, value));
        changes.retain(|change| change.0 < end_ns.max(self.end_ns));
        Self::new(changes, end_ns.max(self.end_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_cover_the_time_without_gap() {
        let timeline = Timeline::new(vec![(10, 'a'), (30, 'b'), (20, 'a'), (30, 'c')], 50);
        let spans: Vec<_> = timeline.spans().collect();
        assert_eq!(spans, [(10, 30, 'a'), (30, 50, 'c')]);
        assert_eq!(timeline.value_at(9), None);
        assert_eq!(timeline.value_at(10), Some('a'));
        assert_eq!(timeline.value_at(49), Some('c'));
        assert_eq!(timeline.value_at(50), None);
    }

    #[test]
    fn two_timelines_are_joined_where_both_are_known() {
        let numbers = Timeline::new(vec![(0, 1), (10, 2), (40, 3)], 100);
        let letters = Timeline::new(vec![(5, 'a'), (20, 'b')], 50);
        let spans: Vec<_> = numbers.zip(&letters).spans().collect();
        let expected = [
            (5, 10, (1, 'a')),
            (10, 20, (2, 'a')),
            (20, 40, (2, 'b')),
            (40, 50, (3, 'b')),
        ];
        assert_eq!(spans, expected);
        let empty = Timeline::<()>::new(Vec::new(), 100);
        assert_eq!(numbers.zip(&empty).spans().count(), 0);
    }

    #[test]
    fn short_spans_become_part_of_the_span_before() {
        let timeline = Timeline::new(vec![(0, 'a'), (50, 'b'), (55, 'a'), (90, 'c')], 200);
        let spans: Vec<_> = timeline.without_short_spans(10).spans().collect();
        assert_eq!(spans, [(0, 90, 'a'), (90, 200, 'c')]);
    }

    #[test]
    fn a_timeline_is_clipped_and_filled() {
        let timeline = Timeline::new(vec![(10, 1), (20, 2)], 30);
        let clipped: Vec<_> = timeline.clip_to(15, 25).spans().collect();
        assert_eq!(clipped, [(15, 20, 1), (20, 25, 2)]);
        let filled: Vec<_> = timeline.fill_gaps(0, 0, 40).spans().collect();
        assert_eq!(filled, [(0, 10, 0), (10, 20, 1), (20, 30, 2), (30, 40, 0)]);
        let covered: Vec<_> = timeline.fill_gaps(0, 15, 25).spans().collect();
        assert_eq!(covered, [(10, 20, 1), (20, 30, 2)]);
    }
}
