//! The ledger as JSON.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Serialize, Serializer};
use serde_json::Value;

use super::ledger::{
    AttachState, FunctionEntry, LibraryFile, MappingProcess, PROC_START_TIME_UNIT_NS, RefusedFile,
};
use super::wire::hide_pids_except;
use super::{ProcessSnapshot, Scope, Snapshot};

/// The ledger within a scope. The ledger is serialised directly, because a [`Value`] takes six times the memory of
/// the text.
#[derive(Serialize)]
struct LedgerOnWire<'a> {
    rung: &'a str,
    processes: Vec<LibrariesOfProcess<'a>>,
    #[serde(flatten)]
    machine: Option<MachineFiles<'a>>,
}

/// The files that only a reader of the whole machine sees.
#[derive(Serialize)]
struct MachineFiles<'a> {
    files: Vec<LibraryOnWire<'a>>,
    refused: Vec<RefusedFileOnWire<'a>>,
    refused_left_out: BTreeMap<&'static str, u64>,
}

/// A process with the libraries that it maps.
#[derive(Serialize)]
struct LibrariesOfProcess<'a> {
    pid: u32,
    libraries: Vec<LibraryOnWire<'a>>,
}

/// A library file with its functions.
#[derive(Serialize)]
struct LibraryOnWire<'a> {
    path: Cow<'a, str>,
    kind: &'static str,
    functions: FunctionsOnWire<'a>,
}

/// The functions of a library file, with the calls of a process that maps it. A process that made no call yet is `Some(None)`.
struct FunctionsOnWire<'a> {
    functions: &'a [FunctionEntry],
    process: Option<Option<&'a ProcessSnapshot>>,
    /// The pids that reasons may name; `None`: all pids.
    visible: Option<&'a [u32]>,
}

/// A function of a library file.
#[derive(Serialize)]
struct FunctionOnWire<'a> {
    symbol: &'static str,
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    displacement: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    calls: Option<u64>,
}

/// A file that no probe can be attached to.
#[derive(Serialize)]
struct RefusedFileOnWire<'a> {
    path: Cow<'a, str>,
    reason: &'a str,
}

impl Snapshot {
    /// The ledger as JSON: for each process its libraries, for each library its functions with their calls. A user sees
    /// only files that the user's own processes map.
    #[must_use]
    pub fn ledger_text(&self, scope: Scope) -> String {
        let write = |ledger: &LedgerOnWire<'_>| serde_json::to_string(ledger);
        self.pass_wire_ledger_to(scope, write)
            .expect("every key is a string")
    }

    /// The value of [`Self::ledger_text`]. The value takes six times the memory of the text.
    #[must_use]
    pub fn ledger_json(&self, scope: Scope) -> Value {
        let convert = |ledger: &LedgerOnWire<'_>| serde_json::to_value(ledger);
        self.pass_wire_ledger_to(scope, convert)
            .expect("every key is a string")
    }

    /// Calls a function with the ledger within a scope.
    fn pass_wire_ledger_to<T>(&self, scope: Scope, read: impl FnOnce(&LedgerOnWire<'_>) -> T) -> T {
        let mapping_processes = self.ledger.mapping_processes.iter();
        let mapping_processes: Vec<&MappingProcess> = mapping_processes
            .filter(|it| scope.contains_user(it.uid))
            .collect();
        let visible: Vec<u32> = mapping_processes.iter().map(|it| it.pid).collect();
        let visible = (scope != Scope::All).then_some(&visible[..]);
        let processes = mapping_processes.iter();
        read(&LedgerOnWire {
            rung: &self.rung,
            processes: processes
                .map(|mapped| self.libraries_of(mapped, visible))
                .collect(),
            machine: (scope == Scope::All).then(|| self.machine_files()),
        })
    }

    fn libraries_of<'a>(
        &'a self,
        mapped: &MappingProcess,
        visible: Option<&'a [u32]>,
    ) -> LibrariesOfProcess<'a> {
        let process = self.observed.iter().find(|process| {
            let start_ns = process.start_ns - process.start_ns % PROC_START_TIME_UNIT_NS;
            (process.pid, start_ns) == (mapped.pid, mapped.start_ns)
        });
        let files = self.ledger.files.iter();
        let own = files.filter(|file| mapped.files.contains(&file.number));
        LibrariesOfProcess {
            pid: mapped.pid,
            libraries: own
                .map(|file| LibraryOnWire::new(file, Some(process), visible))
                .collect(),
        }
    }

    fn machine_files(&self) -> MachineFiles<'_> {
        let ledger = &self.ledger;
        let files = ledger.files.iter();
        let left_out_counts = ledger.refused.left_out_counts().iter();
        MachineFiles {
            files: files
                .map(|file| LibraryOnWire::new(file, None, None))
                .collect(),
            refused: ledger
                .refused
                .oldest_to_newest()
                .map(RefusedFileOnWire::from)
                .collect(),
            refused_left_out: left_out_counts
                .map(|(cause, count)| (cause.name(), *count))
                .collect(),
        }
    }
}

impl<'a> LibraryOnWire<'a> {
    fn new(
        file: &'a LibraryFile,
        process: Option<Option<&'a ProcessSnapshot>>,
        visible: Option<&'a [u32]>,
    ) -> Self {
        Self {
            path: file.path.to_string_lossy(),
            kind: file.kind,
            functions: FunctionsOnWire {
                functions: &file.functions,
                process,
                visible,
            },
        }
    }
}

impl<'a> From<&'a RefusedFile> for RefusedFileOnWire<'a> {
    fn from(file: &'a RefusedFile) -> Self {
        Self {
            path: file.path.to_string_lossy(),
            reason: &file.reason,
        }
    }
}

impl Serialize for FunctionsOnWire<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(
            self.functions
                .iter()
                .map(|function| self.function_on_wire(function)),
        )
    }
}

impl<'a> FunctionsOnWire<'a> {
    fn function_on_wire(&self, function: &'a FunctionEntry) -> FunctionOnWire<'a> {
        let (state, reason) = match &function.state {
            AttachState::Attached => ("attached", None),
            AttachState::Sampled => ("sampled", None),
            AttachState::NotAttached(reason) => ("not attached", Some(&**reason)),
        };
        FunctionOnWire {
            symbol: function.symbol,
            state,
            reason: reason.map(|reason| match self.visible {
                Some(pids) => Cow::Owned(hide_pids_except(reason, pids)),
                None => Cow::Borrowed(reason),
            }),
            displacement: (function.bytes_after_entry > 0).then_some(function.bytes_after_entry),
            calls: self.process.map(|process| {
                let calls = process.and_then(|it| it.calls.get(function.call_counter_name));
                calls.map_or(0, |calls| calls.calls)
            }),
        }
    }
}
