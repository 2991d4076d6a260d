//! The first step of a training loop, which no boundary precedes.

use super::{MAX_RUN_OF_MARKS, Step, StepMark};

/// The backward passes of a process before its first update of the model.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PassesBeforeFirstUpdate {
    /// Start of the first backward pass.
    begin_ns: Option<u64>,
    /// Number of these backward passes.
    passes: u32,
    /// Time of the first update.
    end_ns: Option<u64>,
}

impl PassesBeforeFirstUpdate {
    pub(super) fn mark(&mut self, mark: StepMark, at_ns: u64) {
        match mark {
            StepMark::Backward if self.end_ns.is_none() => {
                self.begin_ns.get_or_insert(at_ns);
                self.passes = self.passes.saturating_add(1);
            }
            StepMark::Optimizer => {
                self.end_ns.get_or_insert(at_ns);
            }
            _ => {}
        }
    }

    /// The first step, if its known part alone is longer than each of the steps that follow: it compiled the model, say.
    /// If the process made more than [`MAX_RUN_OF_MARKS`] backward passes before its first update, they are no step.
    pub(super) fn slow_first_step(&self, following: &[Option<Step>]) -> Option<Step> {
        let step = Step {
            begin_ns: self.begin_ns?,
            end_ns: self.end_ns?,
            launches: None,
            marks: [0; 7],
            lacks_marks: true,
        };
        let longest_ns = following.iter().flatten().map(Step::duration_ns).max()?;
        (self.passes <= MAX_RUN_OF_MARKS && step.duration_ns() > longest_ns).then_some(step)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Launches, StepDetector, StepMarkClass, StepSummary};
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Marks `passes` backward passes, the last one `last_pass_ns` before the first update, and then ten steps of 1 s.
    fn train(detector: &mut StepDetector, passes: u64, pass_ns: u64) -> u64 {
        for pass in 0..passes {
            detector.record_mark(StepMark::Backward, pass_ns * pass, Launches::Unknown);
        }
        let first_update_ns = pass_ns * passes;
        for step in 0..10 {
            let at_ns = first_update_ns + SECOND * step;
            detector.record_mark(StepMark::Optimizer, at_ns, Launches::Unknown);
            detector.record_mark(StepMark::Backward, at_ns + SECOND / 2, Launches::Unknown);
        }
        first_update_ns
    }

    fn warm_up_ns(detector: &StepDetector) -> u64 {
        let steps: Vec<Step> = detector.recent_steps().iter().copied().collect();
        let summary = StepSummary::from_whole_run(&steps, StepMark::Optimizer);
        summary.expect("it has steps").warm_up_ns
    }

    #[test]
    fn a_first_step_that_compiles_is_warm_up() {
        let mut detector = StepDetector::default();
        // The compiler traces a backward pass before the real one begins.
        let first_update_ns = train(&mut detector, 2, 10 * SECOND);
        assert_eq!(detector.boundary_mark(), Some(StepMark::Optimizer));
        assert_eq!(detector.recent_steps()[0].end_ns, first_update_ns);
        assert_eq!(warm_up_ns(&detector), 20 * SECOND);
    }

    #[test]
    fn the_known_part_of_an_ordinary_first_step_is_no_step() {
        let mut detector = StepDetector::default();
        train(&mut detector, 1, SECOND / 2);
        assert_eq!(detector.recent_steps().len(), 9);
        assert_eq!(warm_up_ns(&detector), 0);
    }

    #[test]
    fn backward_passes_without_updates_are_no_first_step() {
        let mut detector = StepDetector::default();
        train(&mut detector, 100, SECOND);
        assert_eq!(warm_up_ns(&detector), 0);
    }

    #[test]
    fn a_first_step_with_missing_marks_is_unknown() {
        let mut detector = StepDetector::default();
        detector.record_mark(StepMark::Backward, 0, Launches::Unknown);
        detector.record_gap(&[StepMarkClass::Training]);
        for step in 20..30 {
            detector.record_mark(StepMark::Optimizer, SECOND * step, Launches::Unknown);
            detector.record_mark(
                StepMark::Backward,
                SECOND * step + SECOND / 2,
                Launches::Unknown,
            );
        }
        assert_eq!(warm_up_ns(&detector), 0);
    }
}
