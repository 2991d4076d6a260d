//! What is served: the questions a server passes on.

use serde::Serialize;

/// Who asks: everything, or only what belongs to one user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// All there is.
    All,
    /// What belongs to the user with this id.
    User(u32),
}

/// The text formats of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// Prometheus text exposition 0.0.4, histograms as buckets.
    Prometheus,
    /// OpenMetrics 1.0, with its `# EOF`.
    OpenMetrics,
    /// Prometheus text exposition 0.0.4, histograms as `quantile` series.
    Quantiles,
}

/// Whether the source does its work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Health {
    /// Whether it can be relied on.
    pub ok: bool,
    /// What is wrong, one sentence each; there may be some even when it is `ok`.
    pub problems: Vec<String>,
}

/// What knows the numbers. Its methods may take a while and may be called from several threads.
pub trait Source: Send + Sync + 'static {
    /// All metrics as text.
    fn metrics(&self, scope: Scope, format: Format) -> String;
    /// The state of this moment as JSON, as pushed to live clients.
    fn snapshot(&self, scope: Scope) -> String;
    /// Which functions are watched, and why others are not.
    fn ledger(&self, scope: Scope) -> serde_json::Value;
    /// Whether all this can be relied on.
    fn health(&self) -> Health;
}
