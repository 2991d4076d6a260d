//! The libraries' functions, with the signatures of NVIDIA's headers.

#![allow(non_snake_case)] // the names are C's

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use super::stage_path;

/// Declares a struct for a library: its file name, and the functions that tests call.
macro_rules! library {
    ($(#[$attribute:meta])* $name:ident, $file:literal, { $($function:ident($($argument:ty),*);)* }) => {
        $(#[$attribute])*
        pub(crate) struct $name {
            $(pub(crate) $function: extern "C" fn($($argument),*) -> i32,)*
            _library: libloading::Library,
        }

        impl $name {
            /// Loads the library from the stage of the test.
            pub(crate) fn load() -> Self {
                let path = stage_path().join("lib").join($file);
                // SAFETY: our own library, whose initialisers do nothing; the signatures are the
                // headers'.
                unsafe {
                    let library = libloading::Library::new(path).unwrap();
                    Self {
                        $($function: *library.get(stringify!($function).as_bytes()).unwrap(),)*
                        _library: library,
                    }
                }
            }
        }
    };
}

library! {
    /// The functions of `libcuda.so.1` that tests call.
    Cuda, "libcuda.so.1", {
        cuInit(u32);
        cuDeviceGetCount(*mut i32);
        cuDeviceGetName(*mut c_char, i32, i32);
        cuDeviceGetUuid_v2(*mut [u8; 16], i32);
        cuDeviceTotalMem_v2(*mut usize, i32);
        cuDeviceGetAttribute(*mut i32, i32, i32);
        cuDevicePrimaryCtxRetain(*mut u64, i32);
        cuDevicePrimaryCtxRelease_v2(i32);
        cuDevicePrimaryCtxSetFlags_v2(i32, u32);
        cuCtxCreate_v2(*mut u64, u32, i32);
        cuCtxDestroy_v2(u64);
        cuCtxSetCurrent(u64);
        cuCtxGetCurrent(*mut u64);
        cuCtxSynchronize();
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemAlloc_v2(*mut u64, usize);
        cuMemAllocPitch_v2(*mut u64, *mut usize, usize, usize, u32);
        cuMemAllocManaged(*mut u64, usize, u32);
        cuMemAllocHost_v2(*mut u64, usize);
        cuMemFree_v2(u64);
        cuMemFreeHost(u64);
        cuMemAllocAsync(*mut u64, usize, u64);
        cuMemFreeAsync(u64, u64);
        cuDeviceGetDefaultMemPool(*mut u64, i32);
        cuMemPoolGetAttribute(u64, i32, *mut u64);
        cuMemAddressReserve(*mut u64, usize, usize, u64, u64);
        cuMemAddressFree(u64, usize);
        cuMemCreate(*mut u64, usize, *const [u64; 4], u64);
        cuMemRelease(u64);
        cuMemMap(u64, usize, usize, u64, u64);
        cuMemUnmap(u64, usize);
        cuMemSetAccess(u64, usize, *const [i32; 3], usize);
        cuPointerGetAttribute(*mut u64, i32, u64);
        cuMemcpy(u64, u64, usize);
        cuMemcpyHtoD_v2(u64, *const c_void, usize);
        cuMemcpyDtoH_v2(*mut c_void, u64, usize);
        cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, u64);
        cuMemcpyDtoDAsync_v2(u64, u64, usize, u64);
        cuMemcpy2D_v2(*const [u64; 16]);
        cuMemsetD8_v2(u64, u8, usize);
        cuMemsetD32Async(u64, u32, usize, u64);
        cuStreamCreate(*mut u64, u32);
        cuStreamDestroy_v2(u64);
        cuStreamQuery(u64);
        cuStreamSynchronize(u64);
        cuStreamSynchronize_ptsz(u64);
        cuStreamWaitEvent(u64, u64, u32);
        cuStreamBeginCapture_v2(u64, i32);
        cuStreamEndCapture(u64, *mut u64);
        cuLaunchHostFunc(u64, extern "C" fn(*mut c_void), *mut c_void);
        cuEventCreate(*mut u64, u32);
        cuEventDestroy_v2(u64);
        cuEventRecord(u64, u64);
        cuEventQuery(u64);
        cuEventSynchronize(u64);
        cuEventElapsedTime(*mut f32, u64, u64);
        cuModuleLoadData(*mut u64, *const c_char);
        cuModuleGetFunction(*mut u64, u64, *const c_char);
        cuModuleUnload(u64);
        cuLaunchKernel(u64, u32, u32, u32, u32, u32, u32, u32, u64, *const *const u64, *const c_void);
        cuLaunchKernel_ptsz(u64, u32, u32, u32, u32, u32, u32, u32, u64, *const *const u64, *const c_void);
        cuLaunchKernelEx(*const LaunchConfiguration, u64, *const *const u64, *const *const c_void);
        cuLaunchCooperativeKernel(u64, u32, u32, u32, u32, u32, u32, u32, u64, *const *const u64);
        cuLibraryLoadData(*mut u64, *const c_void, *mut c_void, *mut c_void, u32, *mut c_void, *mut c_void, u32);
        cuLibraryGetKernel(*mut u64, u64, *const c_char);
        cuLibraryUnload(u64);
        cuKernelGetFunction(*mut u64, u64);
        cuFuncGetName(*mut *const c_char, u64);
        cuGraphCreate(*mut u64, u32);
        cuGraphAddKernelNode_v2(*mut u64, u64, *const u64, usize, *const KernelNode);
        cuGraphAddEmptyNode(*mut u64, u64, *const u64, usize);
        cuGraphNodeGetType(u64, *mut i32);
        cuMemcpyHtoD_v2_ptds(u64, *const c_void, usize);
        cuGraphInstantiateWithFlags(*mut u64, u64, u64);
        cuGraphLaunch(u64, u64);
        cuGraphDestroy(u64);
        cuGraphExecDestroy(u64);
        cuGraphGetNodes(u64, *mut u64, *mut usize);
        cuGetErrorName(i32, *mut *const c_char);
        cuGetProcAddress_v2(*const c_char, *mut usize, i32, u64, *mut i32);
        cuGetExportTable(*mut *const c_void, *const c_void);
    }
}

library! {
    /// The functions of `libnccl.so.2` that tests call.
    Nccl, "libnccl.so.2", {
        ncclGetVersion(*mut i32);
        ncclGetUniqueId(*mut UniqueId);
        ncclCommInitRank(*mut u64, i32, UniqueId, i32);
        ncclCommInitAll(*mut u64, i32, *const i32);
        ncclCommSplit(u64, i32, i32, *mut u64, *const c_void);
        ncclCommDestroy(u64);
        ncclCommAbort(u64);
        ncclCommFinalize(u64);
        ncclCommCount(u64, *mut i32);
        ncclCommCuDevice(u64, *mut i32);
        ncclCommUserRank(u64, *mut i32);
        ncclCommGetAsyncError(u64, *mut i32);
        ncclGroupStart();
        ncclGroupEnd();
        ncclAllReduce(u64, u64, usize, i32, i32, u64, u64);
        ncclReduce(u64, u64, usize, i32, i32, i32, u64, u64);
        ncclReduceScatter(u64, u64, usize, i32, i32, u64, u64);
        ncclBroadcast(u64, u64, usize, i32, i32, u64, u64);
        ncclBcast(u64, usize, i32, i32, u64, u64);
        ncclAllGather(u64, u64, usize, i32, u64, u64);
        ncclAlltoAll(u64, u64, usize, i32, u64, u64);
        ncclGather(u64, u64, usize, i32, i32, u64, u64);
        ncclScatter(u64, u64, usize, i32, i32, u64, u64);
        ncclSend(u64, usize, i32, i32, u64, u64);
        ncclRecv(u64, usize, i32, i32, u64, u64);
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct LaunchConfiguration {
    pub(crate) dimensions: [u32; 6],
    pub(crate) shared_bytes: u32,
    pub(crate) stream: u64,
    pub(crate) attributes: *const c_void,
    pub(crate) attribute_count: u32,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
pub(crate) struct KernelNode {
    pub(crate) function: u64,
    pub(crate) dimensions: [u32; 6],
    pub(crate) shared_bytes: u32,
    pub(crate) parameters: *const *const u64,
    pub(crate) extra: *const *const c_void,
    pub(crate) kernel: u64,
    pub(crate) context: u64,
}

/// `ncclUniqueId`, passed by value and so on the stack.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

/// Panics unless the result code of a call is success.
#[track_caller]
pub(crate) fn assert_success(code: i32) {
    assert_eq!(code, 0);
}

/// The value that a call stores through its pointer.
#[track_caller]
pub(crate) fn value_stored_by<T: Default>(call: impl FnOnce(&mut T) -> i32) -> T {
    let mut value = T::default();
    assert_success(call(&mut value));
    value
}

pub(crate) const MILLISECOND_NS: u64 = 1_000_000;
pub(crate) const STREAM_NON_BLOCKING: u32 = 1;
pub(crate) const CUDA_ERROR_NOT_READY: i32 = 600;

/// A process with device 0's primary context current, and a kernel to launch.
pub(crate) struct CudaProgram {
    pub(crate) cuda: Cuda,
    pub(crate) kernel: u64,
}

impl CudaProgram {
    pub(crate) fn new() -> Self {
        Self::on_device(0)
    }

    pub(crate) fn on_device(device: i32) -> Self {
        let cuda = Cuda::load();
        assert_success((cuda.cuInit)(0));
        let context = value_stored_by(|context| (cuda.cuDevicePrimaryCtxRetain)(context, device));
        assert_success((cuda.cuCtxSetCurrent)(context));
        let module = value_stored_by(|module| {
            (cuda.cuModuleLoadData)(module, c"softgpu kernel step\n".as_ptr())
        });
        let kernel =
            value_stored_by(|kernel| (cuda.cuModuleGetFunction)(kernel, module, c"step".as_ptr()));
        Self { cuda, kernel }
    }

    pub(crate) fn create_stream(&self) -> u64 {
        value_stored_by(|stream| (self.cuda.cuStreamCreate)(stream, STREAM_NON_BLOCKING))
    }

    pub(crate) fn create_event(&self, flags: u32) -> u64 {
        value_stored_by(|event| (self.cuda.cuEventCreate)(event, flags))
    }

    pub(crate) fn allocate_memory(&self, bytes: usize) -> u64 {
        value_stored_by(|address| (self.cuda.cuMemAlloc_v2)(address, bytes))
    }

    /// Launches a kernel that takes `duration` nanoseconds.
    pub(crate) fn launch(&self, stream: u64, duration: u64) {
        let parameters = [&raw const duration];
        assert_success((self.cuda.cuLaunchKernel)(
            self.kernel,
            1,
            1,
            1,
            32,
            1,
            1,
            0,
            stream,
            parameters.as_ptr(),
            ptr::null(),
        ));
    }

    pub(crate) fn upload<T: Copy>(&self, address: u64, values: &[T]) {
        assert_success((self.cuda.cuMemcpyHtoD_v2)(
            address,
            values.as_ptr().cast(),
            size_of_val(values),
        ));
    }

    pub(crate) fn download<T: Copy + Default>(&self, address: u64, count: usize) -> Vec<T> {
        let mut values = vec![T::default(); count];
        assert_success((self.cuda.cuMemcpyDtoH_v2)(
            values.as_mut_ptr().cast(),
            address,
            size_of_val(&values[..]),
        ));
        values
    }

    /// Number of bytes in use on the device.
    pub(crate) fn used_memory(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        assert_success((self.cuda.cuMemGetInfo_v2)(&mut free, &mut total));
        total - free
    }

    /// Milliseconds between two recorded events.
    pub(crate) fn milliseconds_between(&self, start: u64, end: u64) -> f32 {
        let mut milliseconds = 0.0;
        assert_success((self.cuda.cuEventElapsedTime)(
            &mut milliseconds,
            start,
            end,
        ));
        milliseconds
    }

    pub(crate) fn error_name(&self, code: i32) -> String {
        let mut name = ptr::null();
        assert_success((self.cuda.cuGetErrorName)(code, &mut name));
        // SAFETY: the library returns a constant string.
        unsafe { CStr::from_ptr(name) }
            .to_string_lossy()
            .into_owned()
    }
}
