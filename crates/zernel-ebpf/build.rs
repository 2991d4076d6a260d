//! Compiles the BPF objects that the crate and its benchmarks embed.

use std::env;
use std::path::{Path, PathBuf};

use libbpf_cargo::SkeletonBuilder;

const OBJECTS: [&str; 6] = [
    // Only a benchmark's.
    "benches/empty",
    "src/capability/capability",
    "src/discovery/discovery",
    "src/discovery/mappings",
    "src/probes/observe",
    "src/twin/phase_twin",
];

fn main() {
    let here = env::var("CARGO_MANIFEST_DIR").expect("set by cargo");
    let headers = Path::new(&here).join("../../bpf");
    // The objects name their sources: by where they are here, not on the machine that compiled them.
    let sources = format!("-ffile-prefix-map={here}=zernel-ebpf");
    let out = PathBuf::from(env::var("OUT_DIR").expect("set by cargo"));
    let clang = env::var("BPF_CLANG").unwrap_or_else(|_| "clang".into());
    println!("cargo:rerun-if-env-changed=BPF_CLANG");
    println!("cargo:rerun-if-changed={}", headers.display());
    // Whose files are included by one of them.
    println!("cargo:rerun-if-changed=src/probes");
    for object in OBJECTS {
        let source = format!("{object}.bpf.c");
        println!("cargo:rerun-if-changed={source}");
        let name = Path::new(object).file_name().expect("a file");
        SkeletonBuilder::new()
            .source(&source)
            .obj(out.join(name).with_extension("bpf.o"))
            .clang(&clang)
            .clang_args([
                "-I".as_ref(),
                headers.as_os_str(),
                "-mcpu=v3".as_ref(),
                sources.as_ref(),
                "-Wall".as_ref(),
                "-Werror".as_ref(),
            ])
            .build()
            .unwrap_or_else(|error| panic!("{source} does not compile with {clang}: {error:?}"));
    }
}
