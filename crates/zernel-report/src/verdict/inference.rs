//! Inference: what a job does between two waits for the GPU, if nothing shows that it trains.

use crate::times::{RankTimeParts, TimePart};

/// Work between two waits of a job that does not train.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct InferenceWork {
    launches_per_wait: f64,
    host_seconds_per_wait: f64,
}

impl InferenceWork {
    /// `None` if something shows that a rank trains, or if none waits for the GPU.
    pub(super) fn new(ranks: &[RankTimeParts]) -> Option<Self> {
        let sum = |figure: fn(&RankTimeParts) -> f64| ranks.iter().map(figure).sum::<f64>();
        let waits = sum(|rank| rank.gpu_wait_calls);
        let is_inference = ranks.iter().all(|rank| rank.only_infers) && waits > 0.0;
        is_inference.then(|| Self {
            launches_per_wait: sum(|rank| rank.launches) / waits,
            host_seconds_per_wait: sum(|rank| rank.seconds_in(TimePart::Host)) / waits,
        })
    }

    /// The end of a sentence of evidence.
    pub(super) fn describe(self) -> String {
        format!("; nothing shows training: {}", self.figures_text())
    }

    /// What the job does between two waits.
    pub(super) fn figures_text(self) -> String {
        format!(
            "{:.0} launches and {:.1} ms of host work per wait for the GPU",
            self.launches_per_wait,
            1e3 * self.host_seconds_per_wait
        )
    }
}
