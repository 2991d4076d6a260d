//! What the tests of this crate need from the machine.

use std::sync::OnceLock;

use zernel_ebpf::capability::Capability;
use zernel_testkit::Need;

/// The need for a kernel that loads BPF programs for us.
pub(crate) fn need() -> Need {
    Need {
        name: "bpf",
        check: || {
            static CHECKED: OnceLock<Result<(), String>> = OnceLock::new();
            let check = || {
                Capability::BtfTracepoint
                    .try_out()
                    .map_err(|e| e.to_string())
            };
            CHECKED.get_or_init(check).clone()
        },
    }
}
