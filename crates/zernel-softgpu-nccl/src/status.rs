//! What NCCL calls return.

use std::ffi::CStr;

use zernel_softgpu::abi_arguments::NullPointer;

/// Result of an exported function's body.
pub(crate) type Outcome = Result<(), NcclError>;

/// A `ncclResult_t` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum NcclError {
    UnhandledCudaError = 1,
    SystemError = 2,
    InvalidArgument = 4,
    InvalidUsage = 5,
    RemoteError = 6,
    /// No error: a communicator that does not block may need longer than the call.
    InProgress = 7,
}

impl From<NcclError> for i32 {
    fn from(error: NcclError) -> Self {
        error as Self
    }
}

impl From<NullPointer> for NcclError {
    fn from(_: NullPointer) -> Self {
        Self::InvalidArgument
    }
}

impl From<std::io::Error> for NcclError {
    fn from(error: std::io::Error) -> Self {
        eprintln!("softgpu: NCCL: {error}");
        Self::SystemError
    }
}

impl NcclError {
    /// The error of a code.
    pub(crate) fn from_code(code: i32) -> Option<Self> {
        let all = [
            Self::UnhandledCudaError,
            Self::SystemError,
            Self::InvalidArgument,
            Self::InvalidUsage,
            Self::RemoteError,
        ];
        all.into_iter().find(|error| *error as i32 == code)
    }
}

/// `ncclGetErrorString`.
pub(crate) fn error_description(code: i32) -> &'static CStr {
    match code {
        0 => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error - please report this issue to the NCCL developers",
        4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        _ => c"unknown result code",
    }
}
