//! Waits for peers.

mod state;

#[cfg(test)]
pub(super) use state::MIRRORS;
pub use state::PeerWaits;
use state::{AWAIT_GRADIENTS, AWAIT_PEERS, REDUCE_ON_CPU};

use super::{Probe, ProbedFunction};
use zernel_elf::LibraryKind::TorchCpu;

const fn waits(role: u8, label: &'static str, names: &'static [&'static str]) -> ProbedFunction {
    ProbedFunction::new(TorchCpu, Probe::DistSync, role, names).cpp_function(label)
}

pub(super) const SYMBOLS: &[ProbedFunction] = &[
    waits(
        AWAIT_PEERS,
        "c10d::Work::wait",
        &[
            "_ZN4c10d4Work4waitE",
            "_ZN4c10d16ProcessGroupGloo9AsyncWork4waitE",
            "_ZN4c10d16ProcessGroupGloo8RecvWork4waitE",
            "_ZN4c10d16ProcessGroupGloo8SendWork4waitE",
        ],
    ),
    // In this function of PyTorch a model waits for the reduction of its gradients; the functions that wait are
    // inlined.
    waits(
        AWAIT_GRADIENTS,
        "c10d::Reducer::finalize_backward",
        &["_ZN4c10d7Reducer17finalize_backwardE"],
    ),
    // Of all reductions of gradients on a GPU, only those through this function block a thread.
    waits(
        REDUCE_ON_CPU,
        "c10d::ProcessGroupGloo::allreduce",
        &["_ZN4c10d16ProcessGroupGloo9allreduceE"],
    ),
];
