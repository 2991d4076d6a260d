//! The data source behind a server.

use serde::Serialize;

pub use zernel_model::aggregation::exposition::TextFormat;
pub use zernel_model::snapshot::Scope;

/// Health of a source, as `/healthz` reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Health {
    /// Whether the source works.
    pub ok: bool,
    /// Problems, one sentence each. Minor problems are listed even when `ok` is true.
    pub problems: Vec<String>,
}

/// Provides metrics and snapshots to a [`Server`](crate::Server). Methods may block and may be
/// called from several threads at once.
pub trait Source: Send + Sync + 'static {
    /// A number that changes when answers change. Answers with the same version number are reused for a moment. `None`:
    /// answers are never reused.
    fn answers_version(&self) -> Option<u64> {
        None
    }
    /// Returns all metrics in scope as text.
    fn metrics(&self, scope: Scope, format: TextFormat) -> String;
    /// Returns the current snapshot as JSON. WebSocket clients get the same text.
    fn snapshot(&self, scope: Scope) -> String;
    /// Returns the probed functions, and the reason for each function that has no probe, as JSON.
    fn ledger(&self, scope: Scope) -> String;
    /// Returns whether the source works, and its problems.
    fn health(&self) -> Health;
}
