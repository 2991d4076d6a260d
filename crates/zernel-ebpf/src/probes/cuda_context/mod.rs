//! The device that a thread works on.

mod layout;

#[cfg(test)]
pub(super) use layout::MIRRORS;
use layout::{CREATE, DESTROY, INIT, OPEN, POP, PUSH, RESET, SET};

use super::{Probe, ProbedFunction};
use zernel_elf::LibraryKind::Cuda;

const fn context(role: u8, names: &'static [&'static str]) -> ProbedFunction {
    ProbedFunction::new(Cuda, Probe::CudaContext, role, names)
}

pub(super) const SYMBOLS: &[ProbedFunction] = &[
    context(INIT, &["cuInit"]),
    context(OPEN, &["cuDevicePrimaryCtxRetain"]).arguments([1, 2, 0, 0]),
    context(CREATE, &["cuCtxCreate_v2"]).arguments([1, 3, 0, 0]),
    context(CREATE, &["cuCtxCreate_v3"]).arguments([1, 5, 0, 0]),
    context(CREATE, &["cuCtxCreate_v4"]).arguments([1, 4, 0, 0]),
    context(SET, &["cuCtxSetCurrent"])
        .arguments([1, 0, 0, 0])
        .frequent(),
    context(PUSH, &["cuCtxPushCurrent_v2"])
        .arguments([1, 0, 0, 0])
        .frequent(),
    context(POP, &["cuCtxPopCurrent_v2"]).frequent(),
    context(DESTROY, &["cuCtxDestroy_v2"]).arguments([1, 0, 0, 0]),
    context(RESET, &["cuDevicePrimaryCtxReset_v2"]).arguments([1, 0, 0, 0]),
];
