//! Gives the shared library the name that programs link to, and lets it find the libcuda beside it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-rpath,$ORIGIN");
    // Threads and fork handlers of the library may outlive any `dlclose`.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
