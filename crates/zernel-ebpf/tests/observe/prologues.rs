//! Functions with other prologues than those of the real driver.

use zernel_ebpf::probes::SYMBOLS;
use zernel_softgpu::install::Prologue;
use zernel_testkit::target::Stage;

use crate::harness::{
    assert_exact, find_process, functions_in_ledger, logged_calls, observe_stage, observed_calls,
    run_next_parts,
};

/// A push follows `endbr64` or `mov`. The probe is attached to the push instruction, where a probe is cheap.
pub(crate) fn functions_with_other_prologues_are_counted() {
    for (prologue, bytes_after_entry) in [(Prologue::Endbr64, 4), (Prologue::Mov, 3)] {
        let stage = Stage::new(prologue);
        let mut observer = observe_stage(&stage);
        let mut targets = vec![stage.start_target("everything", 50)];
        run_next_parts(&mut targets);
        assert_exact(&mut observer, &stage, &targets);
        let library = stage.library_path("libcuda.so.1");
        let functions = functions_in_ledger(&observer, &library.to_string_lossy());
        let launch = &functions["cuLaunchKernel"];
        assert_eq!(launch["state"], "attached", "{}", prologue.name());
        assert_eq!(
            launch["displacement"],
            bytes_after_entry,
            "{}",
            prologue.name()
        );
    }
}

/// Functions that are called often get no probe if the kernel would have to single-step.
pub(crate) fn frequent_single_stepping_is_refused() {
    let stage = Stage::new(Prologue::Sub);
    let mut observer = observe_stage(&stage);
    let mut target = stage.start_target("everything", 50);
    target.run_part();
    observer.read_counts().expect("maps can be read");
    let library = stage.library_path("libcuda.so.1");
    let functions = functions_in_ledger(&observer, &library.to_string_lossy());
    let mut truth = logged_calls(&stage, target.pid());
    for symbol in SYMBOLS.iter().filter(|symbol| symbol.is_frequent) {
        truth.remove(symbol.name());
        if let Some(function) = functions.get(symbol.name()) {
            assert_eq!(function["state"], "not attached", "{}", symbol.name());
            let reason = function["reason"].as_str().expect("a reason");
            assert!(reason.contains("single-step"), "{reason}");
        }
    }
    assert!(functions.contains_key("cuLaunchKernel"));
    assert!(truth.contains_key("cuMemAlloc_v2"));
    assert_eq!(observed_calls(find_process(&observer, target.pid())), truth);
}
