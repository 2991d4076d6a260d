//! One line of the doctor's table.

use serde::Serialize;

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum CheckStatus {
    Ok,
    /// Available with limits, or uncertain.
    Degraded,
    Missing,
}

/// Result of one check. A row that is not ok states the consequence, and the remedy if there is one.
#[derive(Debug, Serialize)]
pub(super) struct CheckRow {
    pub(super) name: &'static str,
    pub(super) status: CheckStatus,
    pub(super) finding: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) consequence: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) remedy: Option<String>,
}

impl CheckRow {
    pub(super) fn ok(name: &'static str, finding: impl Into<String>) -> Self {
        Self {
            name,
            status: CheckStatus::Ok,
            finding: finding.into(),
            consequence: None,
            remedy: None,
        }
    }

    pub(super) fn degraded(
        name: &'static str,
        finding: impl Into<String>,
        consequence: impl Into<String>,
    ) -> Self {
        Self {
            status: CheckStatus::Degraded,
            consequence: Some(consequence.into()),
            ..Self::ok(name, finding)
        }
    }

    pub(super) fn missing(
        name: &'static str,
        finding: impl Into<String>,
        consequence: impl Into<String>,
    ) -> Self {
        Self {
            status: CheckStatus::Missing,
            ..Self::degraded(name, finding, consequence)
        }
    }

    pub(super) fn with_remedy(self, remedy: impl Into<String>) -> Self {
        Self {
            remedy: Some(remedy.into()),
            ..self
        }
    }
}
