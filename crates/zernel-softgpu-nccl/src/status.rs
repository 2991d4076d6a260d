//! Result codes of NCCL, and their texts.

use std::ffi::CStr;

use zernel_softgpu::abi_arguments::NullPointer;

/// Result of the body of an exported function.
pub(crate) type Outcome = Result<(), NcclError>;

/// An `ncclResult_t` that is not success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum NcclError {
    UnhandledCudaError = 1,
    SystemError = 2,
    InvalidArgument = 4,
    InvalidUsage = 5,
    RemoteError = 6,
    /// Not an error: a communicator that does not block is not ready yet when the call returns.
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
    /// The [`NcclError`] with this code; `None` for other codes.
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

/// The text that `ncclGetErrorString` returns for a code.
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
