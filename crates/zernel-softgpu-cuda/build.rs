//! Gives the shared library its soname `libcuda.so.1`, which programs link to.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // The library is never unloaded, because its threads and fork handlers may run after any `dlclose`.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
