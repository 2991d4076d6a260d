//! What is served: the questions a server passes on.

use serde::Serialize;

pub use zernel_model::aggregation::exposition::TextFormat;
pub use zernel_model::snapshot::Scope;

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
    fn metrics(&self, scope: Scope, format: TextFormat) -> String;
    /// The state of this moment as JSON, as pushed to live clients.
    fn snapshot(&self, scope: Scope) -> String;
    /// Which functions are watched, and why others are not.
    fn ledger(&self, scope: Scope) -> serde_json::Value;
    /// Whether all this can be relied on.
    fn health(&self) -> Health;
}
