//! Waits for peers.

use super::torch::AWAIT_PEERS;
use super::{Probe, Symbol};
use crate::library::LibraryKind::TorchCpu;

pub(super) const SYMBOLS: &[Symbol] = &[Symbol::new(
    TorchCpu,
    Probe::Torch,
    AWAIT_PEERS,
    &[
        "_ZN4c10d4Work4waitE",
        "_ZN4c10d16ProcessGroupGloo9AsyncWork4waitE",
        "_ZN4c10d16ProcessGroupGloo8RecvWork4waitE",
        "_ZN4c10d16ProcessGroupGloo8SendWork4waitE",
    ],
)
.of_cpp("c10d::Work::wait")];
