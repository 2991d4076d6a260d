//! The exported functions, one module per chapter of the driver API's manual.

use zernel_softgpu::export::Export;

mod basics;
mod context;
mod copy;
mod device;
mod event;
mod graph;
mod launch;
mod memory;
mod module;
mod pool;
mod stream;
mod virtual_memory;

/// Every function that the library exports, for `cuGetProcAddress`.
pub(crate) const ALL_EXPORTS: &[&[Export]] = &[
    basics::EXPORTS,
    context::EXPORTS,
    copy::EXPORTS,
    device::EXPORTS,
    event::EXPORTS,
    graph::EXPORTS,
    launch::EXPORTS,
    memory::EXPORTS,
    module::EXPORTS,
    pool::EXPORTS,
    stream::EXPORTS,
    virtual_memory::EXPORTS,
];
