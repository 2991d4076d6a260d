//! On which device a thread works.

use super::{Probe, Symbol};
use zernel_elf::LibraryKind::Cuda;

// In the order of `enum cuda_context_role`.
const INIT: u8 = 0;
const OPEN: u8 = 1;
const CREATE: u8 = 2;
const SET: u8 = 3;
const PUSH: u8 = 4;
const POP: u8 = 5;
const DESTROY: u8 = 6;
const RESET: u8 = 7;

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
