//! The software CUDA driver, `libcuda.so.1`: the driver API on simulated devices.
//!
//! See [`zernel_softgpu`] for what is simulated, how to use it, and what is not.

mod calls;
mod context;
mod driver;
mod interface;
mod kernel;
mod procedures;
mod status;
mod types;
