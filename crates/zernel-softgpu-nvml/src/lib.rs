//! The software NVML, `libnvidia-ml.so.1`: what the simulated devices and their users are doing.
//!
//! See [`zernel_softgpu`] for what is simulated, how to use it, and what is not.

mod calls;
mod node;
mod status;
mod types;
