//! The device that a thread works on.

pub(super) mod layout;

use layout::{CREATE, DESTROY, INIT, OPEN, POP, PUSH, RESET, SET};

use super::{Probe, Symbol};
use zernel_elf::LibraryKind::Cuda;

const fn context(role: u8, names: &'static [&'static str]) -> Symbol {
    Symbol::new(Cuda, Probe::CudaContext, role, names)
}

pub(super) const SYMBOLS: &[Symbol] = &[
    context(INIT, &["cuInit"]),
    context(OPEN, &["cuDevicePrimaryCtxRetain"]).keeps([1, 2, 0, 0]),
    context(CREATE, &["cuCtxCreate_v2"]).keeps([1, 3, 0, 0]),
    context(CREATE, &["cuCtxCreate_v3"]).keeps([1, 5, 0, 0]),
    context(CREATE, &["cuCtxCreate_v4"]).keeps([1, 4, 0, 0]),
    context(SET, &["cuCtxSetCurrent"])
        .keeps([1, 0, 0, 0])
        .frequent(),
    context(PUSH, &["cuCtxPushCurrent_v2"])
        .keeps([1, 0, 0, 0])
        .frequent(),
    context(POP, &["cuCtxPopCurrent_v2"]).frequent(),
    context(DESTROY, &["cuCtxDestroy_v2"]).keeps([1, 0, 0, 0]),
    context(RESET, &["cuDevicePrimaryCtxReset_v2"]).keeps([1, 0, 0, 0]),
];
