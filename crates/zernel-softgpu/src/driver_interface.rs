//! The private interface through which libnccl uses the simulated device inside libcuda.
//!
//! Like the real library, libnccl launches kernels with the driver's exported `cuLaunchKernelEx`. The kernels of
//! libnccl are *external*: libnccl runs them, and returns the time at which they end. The driver exports one private
//! symbol, [`INTERFACE_SYMBOL`], that creates such kernels.

use std::ffi::{CStr, c_char};

/// The name of the private symbol of libcuda: a [`DriverInterface`].
pub const INTERFACE_SYMBOL: &CStr = c"zernel_softgpu_driver_interface_v1";

/// The functions that libcuda offers to libnccl.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct DriverInterface {
    /// Creates a function that libnccl passes to `cuLaunchKernelEx`. Parameter 0 of the launch is a `u64`, which the
    /// kernel gets as its argument.
    pub create_external_kernel: extern "C" fn(name: *const c_char, kernel: ExternalKernel) -> u64,
}

/// A kernel that another library runs, given by three functions of that library.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ExternalKernel {
    /// Runs the kernel on a thread of the stream after all earlier work. It gets the argument of the launch and the
    /// start time, may block, and returns the end time.
    pub run_kernel: extern "C" fn(argument: u64, start: u64) -> u64,
    /// Adds a reference to the argument, for each launch or graph node that holds it.
    pub add_argument_reference: extern "C" fn(argument: u64),
    /// Drops a reference to the argument of a launch or graph node.
    pub drop_argument_reference: extern "C" fn(argument: u64),
}

/// A launch of an external kernel. It holds a reference to its argument.
#[derive(Debug)]
pub struct ExternalLaunch {
    kernel: ExternalKernel,
    argument: u64,
}

impl ExternalLaunch {
    /// Creates a launch of `kernel` with `argument`, and adds a reference to the argument.
    #[must_use]
    pub fn new(kernel: ExternalKernel, argument: u64) -> Self {
        (kernel.add_argument_reference)(argument);
        Self { kernel, argument }
    }

    /// Runs the kernel and returns its end time.
    #[must_use]
    pub fn run(&self, start: u64) -> u64 {
        (self.kernel.run_kernel)(self.argument, start)
    }
}

impl Clone for ExternalLaunch {
    fn clone(&self) -> Self {
        Self::new(self.kernel, self.argument)
    }
}

impl Drop for ExternalLaunch {
    fn drop(&mut self) {
        (self.kernel.drop_argument_reference)(self.argument);
    }
}
