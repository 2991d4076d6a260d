//! Arbitrary text as a workload spec.

use std::path::Path;

use zernel_testkit::allocation::CountingAllocator;
use zernel_testkit::fuzz::FuzzTarget;
use zernel_workload::WorkloadSpec;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn fuzz_spec() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let words = [
        "[[group]]\n",
        "[[cgroup]]\n",
        "workers = ",
        "18446744073709551615",
        "-1",
        "4096",
        "nan",
        "\"\"",
        "name = ",
        "pcomm = ",
        "affinity = ",
        "work = ",
        "[",
        "{",
        "\"\"\"",
        "= 1\n",
        "a.b.c.d.",
    ];
    let target = FuzzTarget::new("spec", 20_000)
        .folder(&examples)
        .words(words);
    let mut read = 0_u64;
    let outcome = target.run(|bytes| {
        let text = String::from_utf8_lossy(bytes);
        read += u64::from(WorkloadSpec::parse(&text, "folder/spec.toml").is_ok());
    });
    assert!(read > outcome.inputs / 50, "{read} specs: {outcome:?}");
}
