//! Capabilities as found on the machine that runs the tests.

mod bpf;

use std::process::ExitCode;

use zernel_ebpf::capability::Capability;
use zernel_testkit::{root, trial};

fn main() -> ExitCode {
    let needs = [root(), bpf::need()];
    zernel_testkit::main([
        trial("what_observing_needs_is_found", &needs, || {
            for capability in Capability::OBSERVE_NEEDS {
                capability.try_out().unwrap();
            }
        }),
        trial("one_rung_of_the_ladder_holds", &needs, || {
            assert!(
                Capability::UPROBE_LADDER
                    .into_iter()
                    .any(|rung| rung.try_out().is_ok())
            );
        }),
        trial("every_answer_is_the_same_twice", &needs, || {
            for capability in Capability::ALL {
                let first = capability.try_out().map_err(|e| e.to_string());
                let second = capability.try_out().map_err(|e| e.to_string());
                assert_eq!(first, second, "{}", capability.name());
            }
        }),
    ])
}
