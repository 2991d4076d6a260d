//! Result codes of CUDA, and their texts.

use std::ffi::CStr;

use zernel_softgpu::abi_arguments::NullPointer;
use zernel_softgpu::virtual_memory::VirtualMemoryRefusal;

/// Result of the body of an exported function.
pub(crate) type Outcome = Result<(), CudaError>;

/// A `CUresult` that is not success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CudaError(i32);

impl From<CudaError> for i32 {
    fn from(error: CudaError) -> Self {
        error.0
    }
}

impl From<NullPointer> for CudaError {
    fn from(_: NullPointer) -> Self {
        INVALID_VALUE
    }
}

impl From<VirtualMemoryRefusal> for CudaError {
    fn from(refused: VirtualMemoryRefusal) -> Self {
        match refused {
            VirtualMemoryRefusal::InvalidRange => INVALID_VALUE,
            VirtualMemoryRefusal::OutOfMemory => OUT_OF_MEMORY,
        }
    }
}

/// The error codes that this driver returns, each with the texts of `cuGetErrorName` and `cuGetErrorString`.
macro_rules! errors {
    ($($constant:ident = $code:literal, $name:literal, $text:literal;)*) => {
        $(pub(crate) const $constant: CudaError = CudaError($code);)*
        const NAMES_AND_DESCRIPTIONS: &[(i32, &CStr, &CStr)] =
            &[(0, c"CUDA_SUCCESS", c"no error"), $(($code, $name, $text)),*];
    };
}

errors! {
    INVALID_VALUE = 1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument";
    OUT_OF_MEMORY = 2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory";
    NOT_INITIALIZED = 3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error";
    NO_DEVICE = 100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected";
    INVALID_DEVICE = 101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal";
    INVALID_IMAGE = 200, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid";
    INVALID_CONTEXT = 201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context";
    FILE_NOT_FOUND = 301, c"CUDA_ERROR_FILE_NOT_FOUND", c"file not found";
    OPERATING_SYSTEM = 304, c"CUDA_ERROR_OPERATING_SYSTEM",
        c"OS call failed or operation not supported on this OS";
    INVALID_HANDLE = 400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle";
    ILLEGAL_STATE = 401, c"CUDA_ERROR_ILLEGAL_STATE",
        c"the operation cannot be performed in the present state";
    NOT_FOUND = 500, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found";
    NOT_READY = 600, c"CUDA_ERROR_NOT_READY", c"device not ready";
    HOST_MEMORY_ALREADY_REGISTERED = 712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        c"part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        c"pointer does not correspond to a registered memory region";
    NOT_SUPPORTED = 801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported";
    STREAM_CAPTURE_UNSUPPORTED = 900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        c"operation not permitted when stream is capturing";
    STREAM_CAPTURE_MERGE = 902, c"CUDA_ERROR_STREAM_CAPTURE_MERGE",
        c"dependency created on uncaptured work in another capture";
    STREAM_CAPTURE_UNMATCHED = 903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
        c"capture was not initiated in this stream";
    STREAM_CAPTURE_UNJOINED = 904, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
        c"capture contains a fork that was not joined to the primary stream";
    STREAM_CAPTURE_IMPLICIT = 906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        c"operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907, c"CUDA_ERROR_CAPTURED_EVENT",
        c"operation not permitted on an event last recorded in a capturing stream";
}

/// The name and the description of an error code.
pub(crate) fn name_and_description(code: i32) -> Option<(&'static CStr, &'static CStr)> {
    let known = NAMES_AND_DESCRIPTIONS
        .iter()
        .find(|(known, _, _)| *known == code);
    known.map(|(_, name, text)| (*name, *text))
}
