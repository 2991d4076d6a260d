//! Which functions are probed in which library file, and which processes map it.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value, json};

use super::wire::hide_foreign_pids;
use super::{ProcessSnapshot, Scope, Snapshot};

/// The resolution of start times in `/proc`.
pub const START_UNIT_NS: u64 = 10_000_000;

/// Which functions are probed in which library file, and which processes map it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Ledger {
    /// The files with probes.
    pub files: Vec<LibraryFile>,
    /// The processes that map one of them.
    pub mapped_by: Vec<MappedBy>,
    /// Files that no probe can be attached to.
    pub refused: Arc<Vec<RefusedFile>>,
}

/// A library file.
#[derive(Debug, Clone, PartialEq)]
pub struct LibraryFile {
    /// Number that identifies the file within a snapshot.
    pub number: u64,
    /// Its path, as its users know it.
    pub path: PathBuf,
    /// Name of the library without its version.
    pub kind: &'static str,
    /// Its functions.
    pub functions: Vec<FunctionEntry>,
}

/// A function of a library file.
#[derive(Debug, Clone, PartialEq)]
pub struct FunctionEntry {
    /// Name in the file.
    pub symbol: &'static str,
    /// Name that its calls are counted under.
    pub counted_as: &'static str,
    /// Whether it is probed.
    pub state: AttachState,
    /// Offset of the probe from the entry of the function.
    pub displacement: u64,
}

/// Whether a function is probed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttachState {
    /// All the time.
    Attached,
    /// In sampling windows.
    Sampled,
    /// Not at all, for this reason.
    NotAttached(Arc<str>),
}

/// A process that maps library files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedBy {
    /// Process id.
    pub pid: u32,
    /// Start time in nanoseconds since boot, rounded down to [`START_UNIT_NS`].
    pub start_ns: u64,
    /// User of the process.
    pub uid: Option<u32>,
    /// Numbers of the files.
    pub files: BTreeSet<u64>,
}

/// A file that no probe can be attached to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedFile {
    /// Its path.
    pub path: PathBuf,
    /// Why.
    pub reason: String,
}

impl Snapshot {
    /// The ledger as JSON: for each process its libraries, for each library its functions with their calls. A user sees
    /// only files that the user's own processes map.
    #[must_use]
    pub fn ledger_json(&self, scope: Scope) -> Value {
        let ledger = &self.ledger;
        let mapped_by = ledger.mapped_by.iter();
        let mapped_by: Vec<&MappedBy> =
            mapped_by.filter(|it| scope.contains_user(it.uid)).collect();
        let visible: Vec<u32> = mapped_by.iter().map(|it| it.pid).collect();
        let visible = (scope != Scope::All).then_some(&visible[..]);
        let processes: Vec<Value> = mapped_by
            .iter()
            .map(|mapped| {
                let process = self.observed.iter().find(|process| {
                    let start_ns = process.start_ns - process.start_ns % START_UNIT_NS;
                    (process.pid, start_ns) == (mapped.pid, mapped.start_ns)
                });
                let files = ledger.files.iter();
                let own = files.filter(|file| mapped.files.contains(&file.number));
                let libraries: Vec<Value> = own
                    .map(|file| file.to_json(Some(process), visible))
                    .collect();
                json!({ "pid": mapped.pid, "libraries": libraries })
            })
            .collect();
        let mut value = json!({ "rung": self.rung, "processes": processes });
        if scope == Scope::All {
            let files = ledger.files.iter();
            value["files"] = files.map(|file| file.to_json(None, visible)).collect();
            let refused = ledger.refused.iter();
            value["refused"] = refused
                .map(|file| json!({ "path": file.path, "reason": file.reason }))
                .collect();
        }
        value
    }
}

impl LibraryFile {
    /// The file with its functions, and with the calls of a process that maps it. A process that made no call yet is
    /// `Some(None)`. Reasons name only the pids in `visible`, or all of them without it.
    fn to_json(&self, process: Option<Option<&ProcessSnapshot>>, visible: Option<&[u32]>) -> Value {
        let functions: Vec<Value> = self
            .functions
            .iter()
            .map(|function| {
                let (state, reason) = match &function.state {
                    AttachState::Attached => ("attached", None),
                    AttachState::Sampled => ("sampled", None),
                    AttachState::NotAttached(reason) => ("not attached", Some(reason)),
                };
                let mut entry = json!({ "symbol": function.symbol, "state": state });
                if let Some(reason) = reason {
                    entry["reason"] = match visible {
                        Some(pids) => json!(hide_foreign_pids(reason, pids)),
                        None => json!(&**reason),
                    };
                }
                if function.displacement > 0 {
                    entry["displacement"] = json!(function.displacement);
                }
                if let Some(process) = process {
                    let calls = process.and_then(|it| it.calls.get(function.counted_as));
                    entry["calls"] = json!(calls.map_or(0, |calls| calls.calls));
                }
                entry
            })
            .collect();
        json!({ "path": self.path, "kind": self.kind, "functions": functions })
    }
}
