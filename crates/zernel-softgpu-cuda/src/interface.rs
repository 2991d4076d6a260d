//! The private interface of libcuda that libnccl uses.

use std::ffi::{CStr, CString, c_char};

use zernel_softgpu::driver_interface::{DriverInterface, ExternalKernel};

use crate::kernel;

/// The structure that libnccl finds by its name. See [`zernel_softgpu::driver_interface`].
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals)]
pub(crate) static zernel_softgpu_driver_interface_v1: DriverInterface = DriverInterface {
    create_external_kernel,
};

extern "C" fn create_external_kernel(name: *const c_char, kernel: ExternalKernel) -> u64 {
    // SAFETY: libnccl passes a constant string.
    let name: CString = unsafe { CStr::from_ptr(name) }.to_owned();
    kernel::create_external_function(name, kernel)
}
