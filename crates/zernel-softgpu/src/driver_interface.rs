//! The interface through which libnccl uses the simulated device inside libcuda.
//!
//! Like the real library, libnccl launches kernels with the driver's exported `cuLaunchKernelEx`. Its
//! kernels are *external*: a function in libnccl returns their end. The driver exports one private symbol,
//! [`INTERFACE_SYMBOL`], that creates such kernels.

use std::ffi::{CStr, c_char};

/// The private symbol of libcuda: a [`DriverInterface`].
pub const INTERFACE_SYMBOL: &CStr = c"zernel_softgpu_driver_interface_v1";

/// The functions that the driver offers to libnccl.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct DriverInterface {
    /// Makes a function for `cuLaunchKernelEx`; its parameter 0 is a `u64` passed to the kernel.
    pub create_external_kernel: extern "C" fn(name: *const c_char, kernel: ExternalKernel) -> u64,
}

/// A kernel that runs outside the driver.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ExternalKernel {
    /// Runs on a thread of the stream after all earlier work. It gets the launch argument and the start, may
    /// block, and returns the end.
    pub run: extern "C" fn(argument: u64, start: u64) -> u64,
    /// Adds a reference to the argument, for a launch or a graph node.
    pub retain: extern "C" fn(argument: u64),
    /// Drops a reference to the argument.
    pub release: extern "C" fn(argument: u64),
}

/// A launch of an external kernel: holds its argument.
#[derive(Debug)]
pub struct ExternalLaunch {
    kernel: ExternalKernel,
    argument: u64,
}

impl ExternalLaunch {
    /// A launch of `kernel` on `argument`.
    #[must_use]
    pub fn new(kernel: ExternalKernel, argument: u64) -> Self {
        (kernel.retain)(argument);
        Self { kernel, argument }
    }

    /// Runs it and returns the end.
    #[must_use]
    pub fn run(&self, start: u64) -> u64 {
        (self.kernel.run)(self.argument, start)
    }
}

impl Clone for ExternalLaunch {
    fn clone(&self) -> Self {
        Self::new(self.kernel, self.argument)
    }
}

impl Drop for ExternalLaunch {
    fn drop(&mut self) {
        (self.kernel.release)(self.argument);
    }
}
