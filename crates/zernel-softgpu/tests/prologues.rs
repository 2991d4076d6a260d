//! The first bytes of every exported function, in the built libraries and in hostile copies.

mod support;

use std::path::Path;

use object::{Object, ObjectSection, ObjectSymbol, SymbolKind};
use support::libraries::{CudaProgram, MILLISECOND_NS, Nccl, assert_success, value_stored_by};
use support::{Stage, role_of_process};
use zernel_softgpu::install::{CARGO_AND_REAL_LIBRARY_NAMES, Prologue};

/// The names and the first bytes of all functions that a library exports.
fn exported_functions(path: &Path) -> Vec<(String, Vec<u8>)> {
    let content = std::fs::read(path).unwrap();
    let file = object::File::parse(&content[..]).unwrap();
    let functions = file
        .dynamic_symbols()
        .filter(|symbol| symbol.is_definition() && symbol.kind() == SymbolKind::Text);
    functions
        .map(|symbol| {
            let section = file
                .section_by_index(symbol.section_index().unwrap())
                .unwrap();
            let bytes = section.data_range(symbol.address(), 16).unwrap().unwrap();
            (symbol.name().unwrap().to_owned(), bytes.to_owned())
        })
        .collect()
}

/// The names by which the dynamic linker knows the library at `path`.
fn linker_names(path: &Path) -> Vec<&'static str> {
    let content = std::fs::read(path).unwrap();
    let file = object::File::parse(&content[..]).unwrap();
    let strings = file
        .section_by_name(".dynstr")
        .unwrap()
        .data()
        .unwrap()
        .to_owned();
    let has = |name: &str| {
        strings
            .split(|byte| *byte == 0)
            .any(|string| string == name.as_bytes())
    };
    CARGO_AND_REAL_LIBRARY_NAMES
        .into_iter()
        .map(|(_, name)| name)
        .filter(|name| has(name))
        .collect()
}

#[test]
#[cfg(target_arch = "x86_64")]
fn every_exported_function_has_chosen_prologue() {
    for prologue in Prologue::ALL {
        let stage = Stage::with_prologue("every_exported_function_has_chosen_prologue", prologue);
        for (_, name) in CARGO_AND_REAL_LIBRARY_NAMES {
            let path = stage.path().join("lib").join(name);
            let functions = exported_functions(&path);
            assert!(
                functions.len() > 30,
                "{name} exports only {} functions",
                functions.len()
            );
            for (function, bytes) in functions {
                let start = prologue.machine_code();
                assert!(
                    bytes.starts_with(start),
                    "{function} of {name} starts with {bytes:x?}, not {start:x?}"
                );
                assert_eq!(
                    bytes[start.len()],
                    0xe9,
                    "{function} of {name} does not go on with a jump"
                );
            }
            assert_eq!(linker_names(&path), [name]);
        }
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn functions_with_hostile_prologues_work() {
    if role_of_process().is_none() {
        for prologue in Prologue::ALL {
            Stage::with_prologue("functions_with_hostile_prologues_work", prologue).run_roles(1);
        }
        return;
    }
    // A launch has eleven arguments, and `ncclCommInitRank` takes a structure of 128 bytes by value: some of these
    // arguments are on the stack.
    let program = CudaProgram::new();
    let stream = program.create_stream();
    let (begin, end) = (program.create_event(0), program.create_event(0));
    program.launch(stream, 300 * MILLISECOND_NS);
    assert_success((program.cuda.cuEventRecord)(begin, stream));
    program.launch(stream, 5 * MILLISECOND_NS);
    assert_success((program.cuda.cuEventRecord)(end, stream));
    assert_success((program.cuda.cuStreamSynchronize)(stream));
    assert_eq!(program.milliseconds_between(begin, end), 5.0);
    let nccl = Nccl::load();
    let mut id = support::libraries::UniqueId([0; 128]);
    assert_success((nccl.ncclGetUniqueId)(&mut id));
    let communicator =
        value_stored_by(|communicator| (nccl.ncclCommInitRank)(communicator, 1, id, 0));
    assert_success((nccl.ncclCommDestroy)(communicator));
}
