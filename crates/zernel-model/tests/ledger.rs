//! The ledger of a machine whose users have as many library files as may be probed.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use serde_json::Value;
use zernel_model::snapshot::{
    AttachState, FunctionEntry, Ledger, LibraryFile, MappingProcess, Scope, Snapshot,
};
use zernel_testkit::allocation::{CountingAllocator, peak_bytes};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Number of files of one user that may be probed.
const FILE_COUNT: u64 = 384;
/// About as many functions as are probed in a CUDA driver.
const FUNCTIONS_PER_FILE: usize = 90;

/// A snapshot with a process that maps all files. None of the files exports any of the functions.
fn full_snapshot() -> Snapshot {
    let function = FunctionEntry {
        symbol: "cuLaunchCooperativeKernel",
        call_counter_name: "cuLaunchCooperativeKernel",
        state: AttachState::NotAttached("cuLaunchCooperativeKernel is not exported".into()),
        bytes_after_entry: 0,
    };
    let files = (0..FILE_COUNT).map(|number| LibraryFile {
        number,
        path: format!("/home/mallory/{number}/libcuda.so.1").into(),
        kind: "libcuda",
        functions: vec![function.clone(); FUNCTIONS_PER_FILE],
    });
    let process = MappingProcess {
        pid: 7,
        start_ns: 0,
        uid: Some(1000),
        files: (0..FILE_COUNT).collect(),
    };
    Snapshot {
        ledger: Ledger {
            files: files.collect(),
            mapping_processes: vec![process],
            ..Ledger::default()
        },
        ..Snapshot::default()
    }
}

#[test]
fn the_text_of_a_large_ledger_takes_little_more_than_its_own_memory() {
    let snapshot = full_snapshot();
    for scope in [Scope::All, Scope::User(1000)] {
        let (text, peak) = peak_bytes(|| snapshot.ledger_text(scope));
        assert!(text.len() > 3 << 20, "{} bytes", text.len());
        // A string that grows doubles its capacity. The lists of files take little memory besides.
        let limit = 2 * text.len() + (1 << 20);
        assert!(peak <= limit, "{peak} bytes for {} of text", text.len());
    }
}

#[test]
fn ledger_text_and_ledger_json_agree() {
    let mut snapshot = full_snapshot();
    snapshot.ledger.files.truncate(3);
    for scope in [Scope::All, Scope::User(1000), Scope::User(1001)] {
        let text: Value = serde_json::from_str(&snapshot.ledger_text(scope)).unwrap();
        assert_eq!(text, snapshot.ledger_json(scope));
    }
    let own = snapshot.ledger_json(Scope::User(1000));
    assert!(own.get("files").is_none());
    let function = &own["processes"][0]["libraries"][2]["functions"][89];
    assert_eq!(
        function["reason"],
        "cuLaunchCooperativeKernel is not exported"
    );
    assert_eq!(function["calls"], 0);
    assert!(function.get("displacement").is_none());
    let foreign = snapshot.ledger_json(Scope::User(1001));
    assert_eq!(foreign["processes"], Value::Array(Vec::new()));
}

#[test]
fn a_path_need_not_be_unicode() {
    let mut snapshot = full_snapshot();
    snapshot.ledger.files.truncate(1);
    snapshot.ledger.files[0].path = Path::new(OsStr::from_bytes(b"/\xff/libcuda.so.1")).into();
    let ledger = snapshot.ledger_json(Scope::All);
    assert_eq!(ledger["files"][0]["path"], "/\u{fffd}/libcuda.so.1");
}
