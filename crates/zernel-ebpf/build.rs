//! Compiles the BPF objects that the crate and its benchmarks embed.

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use libbpf_cargo::SkeletonBuilder;

const BPF_OBJECTS: [&str; 7] = [
    // Used by a benchmark only.
    "benches/empty",
    "src/capability/capability",
    "src/discovery/discovery",
    "src/discovery/mappings",
    "src/overlay_layers",
    "src/probes/observe",
    "src/twin/phase_twin",
];

include!("../../bpf/probes.rs");

/// Turns the list of probes into names of folders.
macro_rules! name_probes {
    (all { $($(#[$doc:meta])* $variant:ident = $name:ident,)* }
     process { $($process:ident: $state:ident),* }
     thread { $($thread:ident),* }
     $($rest:tt)*) => {
        const PROBES: &[&str] = &[$(stringify!($name)),*];
        const PROCESS_PARTS: &[&str] = &[$(stringify!($process)),*];
        const THREAD_PARTS: &[&str] = &[$(stringify!($thread)),*];
    };
}
for_each_probe!(name_probes);

/// A function that a probe may define: `<probe>_<name>`, and a macro of the same name to say that it does.
struct ProbeHook {
    name: &'static str,
    parameters: &'static str,
    arguments: &'static str,
}

const PROBE_HOOKS: [ProbeHook; 4] = [
    ProbeHook {
        name: "enter",
        parameters: "const struct zernel_symbol *symbol, struct zernel_thread *thread, \
                     struct zernel_open_call *call",
        arguments: "symbol, thread, call",
    },
    ProbeHook {
        name: "leave",
        parameters: "const struct zernel_symbol *symbol, struct zernel_thread *thread, \
                     struct zernel_open_call *call, __u64 now_ns, int result, bool failed",
        arguments: "symbol, thread, call, now_ns, result, failed",
    },
    ProbeHook {
        name: "mark",
        parameters: "const struct zernel_symbol *symbol, struct zernel_thread *thread, \
                     struct zernel_process *process, __u64 now_ns",
        arguments: "symbol, thread, process, now_ns",
    },
    ProbeHook {
        name: "read",
        parameters: "const struct zernel_symbol *symbol, struct zernel_thread *thread, \
                     struct zernel_function_entry *entry",
        arguments: "symbol, thread, entry",
    },
];

fn main() {
    let here = env::var("CARGO_MANIFEST_DIR").expect("set by cargo");
    let headers = Path::new(&here).join("../../bpf");
    let probes = Path::new(&here).join("src/probes");
    let out = PathBuf::from(env::var("OUT_DIR").expect("set by cargo"));
    let includes = [&headers, &probes, &out].map(|folder| format!("-I{}", folder.display()));
    // Debug information names the sources relative to the crate, not by their path on this machine.
    let renamed = [
        (&*here, "zernel-ebpf"),
        (&*out.to_string_lossy(), "generated"),
    ]
    .map(|(from, to)| format!("-ffile-prefix-map={from}={to}"));
    let others = ["-mcpu=v3", "-Wall", "-Werror"].map(String::from);
    let arguments = [&includes[..], &renamed, &others].concat();
    let clang = env::var("BPF_CLANG").unwrap_or_else(|_| "clang".into());
    println!("cargo:rerun-if-env-changed=BPF_CLANG");
    println!("cargo:rerun-if-changed={}", headers.display());
    // The probes' headers are included by one of the objects.
    println!("cargo:rerun-if-changed=src/probes");
    write_generated(&out, "probe_parts.gen.h", &parts_header());
    write_generated(&out, "probe_dispatch.gen.h", &dispatch_header());
    for object in BPF_OBJECTS {
        let source = format!("{object}.bpf.c");
        println!("cargo:rerun-if-changed={source}");
        let name = Path::new(object).file_name().expect("a file");
        SkeletonBuilder::new()
            .source(&source)
            .obj(out.join(name).with_extension("bpf.o"))
            .clang(&clang)
            .clang_args(&arguments)
            .build()
            .unwrap_or_else(|error| panic!("{source} does not compile with {clang}: {error:?}"));
    }
}

fn write_generated(out: &Path, name: &str, text: &str) {
    let path = out.join(name);
    fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// The header with the numbers of the probes and their parts of processes and threads.
fn parts_header() -> String {
    let mut text = String::from("#pragma once\n#include \"btf.h\"\n\nenum zernel_probe {\n");
    for probe in PROBES {
        text += &format!("\t{},\n", probe_constant(probe));
    }
    text += "};\nZERNEL_IN_BTF(enum, zernel_probe);\n\n";
    for part in PROBES {
        if PROCESS_PARTS.contains(part) || THREAD_PARTS.contains(part) {
            text += &format!("#include \"{part}/state.bpf.h\"\n");
        }
    }
    for (owner, parts) in [("process", PROCESS_PARTS), ("thread", THREAD_PARTS)] {
        text += &format!("\n#define ZERNEL_{}_PARTS", owner.to_uppercase());
        for part in parts {
            text += &format!(" struct {part}_{owner} {part};");
        }
    }
    text + "\n"
}

/// The header that includes all probes and calls the hooks of the probe that a function belongs to.
fn dispatch_header() -> String {
    let mut text = String::from("#pragma once\n");
    for probe in PROBES {
        text += &format!("#include \"{probe}/{probe}.bpf.h\"\n");
    }
    for hook in PROBE_HOOKS {
        let ProbeHook {
            name,
            parameters,
            arguments,
        } = hook;
        text += &format!("\nstatic __always_inline void probe_{name}({parameters})\n{{\n");
        let call = |probe: &str| format!("{probe}_{name}({arguments});\n\t\tbreak;");
        text += &(hook_switch(name, call) + "}\n");
    }
    text += "\n/* Whether a call failed: without a hook, every result but 0 is a failure. */\n";
    text += "static __always_inline bool probe_failed(const struct zernel_symbol *symbol, int result)\n{\n";
    let call = |probe: &str| format!("return {probe}_failed(result);");
    text += &(hook_switch("failed", call) + "\treturn result;\n}\n");
    text
}

/// A switch over the probes that define the hook.
fn hook_switch(hook: &str, call: impl Fn(&str) -> String) -> String {
    let mut text = String::from("\tswitch (symbol->probe) {\n");
    for probe in PROBES {
        let (number, call) = (probe_constant(probe), call(probe));
        writeln!(
            text,
            "#ifdef {probe}_{hook}\n\tcase {number}:\n\t\t{call}\n#endif"
        )
        .expect("a string");
    }
    text + "\t}\n"
}

/// The constant that stands for a probe in C.
fn probe_constant(probe: &str) -> String {
    format!("ZERNEL_PROBE_{}", probe.to_uppercase())
}
