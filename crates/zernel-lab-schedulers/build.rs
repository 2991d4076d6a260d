//! Compiles the BPF object that the crate embeds.

use std::env;
use std::path::PathBuf;

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let here = env::var("CARGO_MANIFEST_DIR").expect("set by cargo");
    let out = PathBuf::from(env::var("OUT_DIR").expect("set by cargo"));
    let clang = env::var("BPF_CLANG").unwrap_or_else(|_| "clang".into());
    // Debug information names the sources relative to the crate, not by their path on this machine.
    let renamed = format!("-ffile-prefix-map={here}=zernel-lab-schedulers");
    println!("cargo:rerun-if-env-changed=BPF_CLANG");
    println!("cargo:rerun-if-changed=src");
    SkeletonBuilder::new()
        .source("src/fair.bpf.c")
        .obj(out.join("fair.bpf.o"))
        .clang(&clang)
        .clang_args([&renamed, "-mcpu=v3", "-Wall", "-Werror"])
        .build()
        .unwrap_or_else(|error| panic!("fair.bpf.c does not compile with {clang}: {error:?}"));
}
