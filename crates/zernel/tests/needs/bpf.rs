//! The need for a kernel that loads BPF programs for us.

use std::sync::OnceLock;

use zernel_ebpf::capability::Capability;
use zernel_testkit::Need;

pub(crate) fn bpf() -> Need {
    Need {
        name: "bpf",
        check: || {
            static CHECKED: OnceLock<Result<(), String>> = OnceLock::new();
            let check = || {
                let tried = Capability::BtfTracepoint.try_out();
                tried.map_err(|error| error.to_string())
            };
            CHECKED.get_or_init(check).clone()
        },
    }
}
