//! Compiles the scheduler's BPF object and generates its skeleton.

use std::env;
use std::path::PathBuf;

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let crate_folder = env::var("CARGO_MANIFEST_DIR").expect("set by cargo");
    let out_folder = PathBuf::from(env::var("OUT_DIR").expect("set by cargo"));
    let clang = env::var("BPF_CLANG").unwrap_or_else(|_| "clang".into());
    let headers = PathBuf::from(&crate_folder).join("../../bpf");
    let include_flag = format!("-I{}", headers.display());
    // Debug information names the sources relative to the crate, not by their path on this machine.
    let prefix_map_flag = format!("-ffile-prefix-map={crate_folder}=zernel-scheduler");
    println!("cargo:rerun-if-env-changed=BPF_CLANG");
    println!("cargo:rerun-if-changed=src/bpf");
    println!("cargo:rerun-if-changed={}", headers.display());
    SkeletonBuilder::new()
        .source("src/bpf/main.bpf.c")
        .obj(out_folder.join("main.bpf.o"))
        .clang(&clang)
        .clang_args([
            &*include_flag,
            &prefix_map_flag,
            "-mcpu=v3",
            "-Wall",
            "-Werror",
        ])
        .build_and_generate(out_folder.join("main.skel.rs"))
        .unwrap_or_else(|error| panic!("main.bpf.c does not compile with {clang}: {error:?}"));
}
