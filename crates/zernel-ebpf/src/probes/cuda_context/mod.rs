//! The device that a thread works on.

mod layout;

#[cfg(test)]
pub(super) use layout::MIRRORS;
use layout::{CREATE, DESTROY, INIT, OPEN, POP, PUSH, RESET, SET};

use super::{Probe, ProbedFunction};
use zernel_elf::LibraryKind::Cuda;

const fn context_function(role: u8, names: &'static [&'static str]) -> ProbedFunction {
    ProbedFunction::new(Cuda, Probe::CudaContext, role, names)
}

pub(super) const SYMBOLS: &[ProbedFunction] = &[
    context_function(INIT, &["cuInit"]),
    context_function(OPEN, &["cuDevicePrimaryCtxRetain"]).kept_arguments([1, 2, 0, 0]),
    context_function(CREATE, &["cuCtxCreate_v2"]).kept_arguments([1, 3, 0, 0]),
    context_function(CREATE, &["cuCtxCreate_v3"]).kept_arguments([1, 5, 0, 0]),
    context_function(CREATE, &["cuCtxCreate_v4"]).kept_arguments([1, 4, 0, 0]),
    context_function(SET, &["cuCtxSetCurrent"])
        .kept_arguments([1, 0, 0, 0])
        .called_frequently(),
    context_function(PUSH, &["cuCtxPushCurrent_v2"])
        .kept_arguments([1, 0, 0, 0])
        .called_frequently(),
    context_function(POP, &["cuCtxPopCurrent_v2"]).called_frequently(),
    context_function(DESTROY, &["cuCtxDestroy_v2"]).kept_arguments([1, 0, 0, 0]),
    context_function(RESET, &["cuDevicePrimaryCtxReset_v2"]).kept_arguments([1, 0, 0, 0]),
];
