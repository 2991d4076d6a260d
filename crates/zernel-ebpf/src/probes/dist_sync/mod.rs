//! Waits for peers.

use super::Symbol;
use super::torch::{AWAIT_GRADIENTS, AWAIT_PEERS, torch};

pub(super) const SYMBOLS: &[Symbol] = &[
    torch(
        AWAIT_PEERS,
        "c10d::Work::wait",
        &[
            "_ZN4c10d4Work4waitE",
            "_ZN4c10d16ProcessGroupGloo9AsyncWork4waitE",
            "_ZN4c10d16ProcessGroupGloo8RecvWork4waitE",
            "_ZN4c10d16ProcessGroupGloo8SendWork4waitE",
        ],
    ),
    // Where a model waits for its gradients to be reduced; the waits themselves are inlined.
    torch(
        AWAIT_GRADIENTS,
        "c10d::Reducer::finalize_backward",
        &["_ZN4c10d7Reducer17finalize_backwardE"],
    ),
];
