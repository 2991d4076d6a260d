//! Things to try, with the line of `PyTorch` that does each.

use serde::Serialize;

/// Most next steps that a verdict lists.
pub(super) const MAX_NEXT_STEPS: usize = 3;

/// Something to try.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct NextStep {
    /// What to change.
    pub(crate) what: &'static str,
    /// The line of `PyTorch`, or the setting, that does it.
    pub(crate) line: &'static str,
    /// By how many seconds the job can get shorter at most. `None`: what was measured gives no bound.
    pub(crate) at_most_seconds: Option<f64>,
    /// Whether only a program that uses `PyTorch` can do it.
    #[serde(skip)]
    pub(super) needs_torch: bool,
}

impl NextStep {
    pub(super) fn with_max_saving(
        what: &'static str,
        line: &'static str,
        at_most_seconds: f64,
    ) -> Self {
        Self {
            what,
            line,
            at_most_seconds: Some(at_most_seconds),
            needs_torch: true,
        }
    }

    pub(super) fn without_max_saving(what: &'static str, line: &'static str) -> Self {
        Self {
            what,
            line,
            at_most_seconds: None,
            needs_torch: true,
        }
    }

    /// The same for a change that needs no `PyTorch`.
    pub(super) fn for_any_program(self) -> Self {
        Self {
            needs_torch: false,
            ..self
        }
    }
}
