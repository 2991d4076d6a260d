//! The software NVML, `libnvidia-ml.so.1`: the state of the simulated devices, and the processes that use them.
//!
//! See [`zernel_softgpu`] for what is simulated, how to use it, and what is not.

mod calls;
mod node;
mod status;
mod types;
