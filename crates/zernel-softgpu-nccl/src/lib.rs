//! The software NCCL, `libnccl.so.2`: collectives between processes on simulated devices.
//!
//! See [`zernel_softgpu`] for what is simulated, how to use it, and what is not.

mod calls;
mod communicator;
mod driver;
mod element;
mod group;
mod message;
mod operation;
mod segment;
mod status;
