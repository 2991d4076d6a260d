//! BPF capabilities of this machine.

use zernel_ebpf::capability::{Capability, CapabilityRefusal};

use super::CapabilityTrials;
use super::kernel::Privilege;
use super::row::CheckRow;

pub(super) fn bpf_rows(trials: &CapabilityTrials) -> Vec<CheckRow> {
    trials
        .iter()
        .map(|(capability, trial)| match trial {
            Ok(()) => CheckRow::ok(capability.name(), "loads, attaches and runs"),
            Err(refusal) => refused_capability_row(*capability, refusal),
        })
        .collect()
}

fn refused_capability_row(capability: Capability, refusal: &CapabilityRefusal) -> CheckRow {
    let row = CheckRow::missing(
        capability.name(),
        refusal.to_string(),
        consequence_without(capability),
    );
    let lacking = Privilege::of_this_process();
    match capability {
        _ if refusal.is_permission_denied() && !lacking.can_load_bpf() => {
            row.with_remedy("run as root, or with CAP_BPF and CAP_PERFMON")
        }
        Capability::UprobePerf if refusal.is_permission_denied() && !lacking.is_root() => {
            row.with_remedy("run as root")
        }
        _ if refusal.is_permission_denied() => row,
        Capability::UprobeSession => row.with_remedy("Linux 6.13 or newer"),
        Capability::UprobeMulti => row.with_remedy("Linux 6.6 or newer"),
        Capability::Tracepoint => row.with_remedy("mount -t tracefs tracefs /sys/kernel/tracing"),
        _ => row,
    }
}

fn consequence_without(capability: Capability) -> &'static str {
    match capability {
        Capability::BtfTracepoint => "no scheduler events: nothing can be observed",
        Capability::TaskStorage => "no state per task: nothing can be observed",
        Capability::MmapArray => "no shared histograms: nothing can be observed",
        Capability::UprobeSession => {
            "calls are timed with two probes and a map instead of one link"
        }
        Capability::UprobeMulti => "each function takes a perf event of its own, slow to detach",
        Capability::UprobePerf => "nothing is lost where uprobe.multi works",
        Capability::TaskVmaIterator => "libraries are found by reading /proc, more slowly",
        Capability::RingBuffer => "new processes are found by scanning, more slowly",
        Capability::RawTracepoint | Capability::Tracepoint => "nothing is lost: Zernel uses tp_btf",
        Capability::Fentry | Capability::Kprobe => {
            "nothing is lost: Zernel attaches to no kernel function"
        }
    }
}
