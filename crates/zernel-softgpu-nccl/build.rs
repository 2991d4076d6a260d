//! Gives the shared library its soname `libnccl.so.2`, which programs link to, and lets it find the libcuda in its
//! folder.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-rpath,$ORIGIN");
    // The library is never unloaded, because its threads and fork handlers may run after any `dlclose`.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
