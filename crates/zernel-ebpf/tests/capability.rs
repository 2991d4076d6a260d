//! Capabilities as found on the machine that runs the tests.

use std::process::ExitCode;

use zernel_ebpf::capability::Capability;
use zernel_testkit::needs::bpf;
use zernel_testkit::{root, trial};

fn main() -> ExitCode {
    zernel_testkit::main([trial(
        "every_answer_is_the_same_twice",
        &[root(), bpf(|| Capability::BtfTracepoint.try_out())],
        || {
            for capability in Capability::ALL {
                let first = capability.try_out().map_err(|e| e.to_string());
                let second = capability.try_out().map_err(|e| e.to_string());
                assert_eq!(first, second, "{}", capability.name());
            }
        },
    )])
}
