//! Result codes of NVML, and their texts.

use std::ffi::CStr;

use zernel_softgpu::abi_arguments::NullPointer;

/// Result of the body of an exported function.
pub(crate) type Outcome = Result<(), NvmlError>;

/// An `nvmlReturn_t` that is not success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum NvmlError {
    Uninitialized = 1,
    InvalidArgument = 2,
    NotSupported = 3,
    NotFound = 6,
    InsufficientSize = 7,
    OperatingSystem = 17,
    VersionMismatch = 25,
}

impl From<NvmlError> for i32 {
    fn from(error: NvmlError) -> Self {
        error as Self
    }
}

impl From<NullPointer> for NvmlError {
    fn from(_: NullPointer) -> Self {
        Self::InvalidArgument
    }
}

/// The text that `nvmlErrorString` returns for a code.
pub(crate) fn error_description(code: i32) -> &'static CStr {
    match code {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        17 => c"Operating System Error",
        25 => c"Argument version mismatch",
        _ => c"Unknown Error",
    }
}
