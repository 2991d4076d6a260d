//! BPF capabilities of this machine.

use zernel_ebpf::capability::{Capability, Refusal};

use super::Trials;
use super::kernel::Privilege;
use super::row::Row;

pub(super) fn rows(trials: &Trials) -> Vec<Row> {
    trials
        .iter()
        .map(|(capability, trial)| match trial {
            Ok(()) => Row::ok(capability.name(), "loads, attaches and runs"),
            Err(refusal) => refused(*capability, refusal),
        })
        .collect()
}

fn refused(capability: Capability, refusal: &Refusal) -> Row {
    let row = Row::missing(
        capability.name(),
        refusal.to_string(),
        consequence(capability),
    );
    let lacking = Privilege::own();
    match capability {
        _ if refusal.is_permission() && !lacking.can_load_bpf() => {
            row.remedy("run as root, or with CAP_BPF and CAP_PERFMON")
        }
        Capability::UprobePerf if refusal.is_permission() && !lacking.is_root() => {
            row.remedy("run as root")
        }
        _ if refusal.is_permission() => row,
        Capability::UprobeSession => row.remedy("Linux 6.13 or newer"),
        Capability::UprobeMulti => row.remedy("Linux 6.6 or newer"),
        Capability::Tracepoint => row.remedy("mount -t tracefs tracefs /sys/kernel/tracing"),
        _ => row,
    }
}

fn consequence(capability: Capability) -> &'static str {
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
