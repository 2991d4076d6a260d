//! The few calls of the CUDA driver API that a training step makes.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr;

use super::library::{
    DeviceAddress, Library, LibraryError, LibraryHandle, LibraryStatus, check_status, library_calls,
};

/// How a thread waits for the device; the numbers are those of `CU_CTX_SCHED_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum CudaWaitMode {
    Spin = 1,
    Yield = 2,
    Block = 4,
}

/// `CU_STREAM_NON_BLOCKING`: ranks that are threads on one device do not wait for each other's work.
const NON_BLOCKING_STREAM: c_uint = 1;

library_calls! {
    init = c"cuInit": fn(c_uint);
    device_get = c"cuDeviceGet": fn(*mut c_int, c_int);
    device_count = c"cuDeviceGetCount": fn(*mut c_int);
    set_flags = c"cuDevicePrimaryCtxSetFlags_v2": fn(c_int, c_uint);
    retain = c"cuDevicePrimaryCtxRetain": fn(*mut LibraryHandle, c_int);
    set_current_context = c"cuCtxSetCurrent": fn(LibraryHandle);
    create_stream = c"cuStreamCreate": fn(*mut LibraryHandle, c_uint);
    load_data = c"cuModuleLoadData": fn(*mut LibraryHandle, *const c_void);
    get_function = c"cuModuleGetFunction": fn(*mut LibraryHandle, LibraryHandle, *const c_char);
    allocate = c"cuMemAlloc_v2": fn(*mut DeviceAddress, usize);
    copy_to_device = c"cuMemcpyHtoDAsync_v2": fn(DeviceAddress, *const c_void, usize, LibraryHandle);
    launch = c"cuLaunchKernel": fn(
        LibraryHandle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, LibraryHandle, *mut *mut c_void, *mut *mut c_void
    );
    synchronize = c"cuStreamSynchronize": fn(LibraryHandle);
}

/// A device with a stream, memory to copy to, and a kernel that takes a given time.
pub(crate) struct OpenedCudaDevice {
    calls: Calls,
    stream: LibraryHandle,
    kernel: LibraryHandle,
    memory: DeviceAddress,
    bytes: usize,
}

impl OpenedCudaDevice {
    /// Opens device `number` (modulo the number of devices) of the driver at `path`.
    ///
    /// `image` is the module image that the driver loads, and `kernel` the name of a kernel in the image.
    pub(crate) fn open(
        path: &Path,
        number: usize,
        schedule: CudaWaitMode,
        image: &CStr,
        kernel: &CStr,
        bytes: usize,
    ) -> Result<Self, LibraryError> {
        let calls = Calls::find_functions(Library::load(path)?)?;
        let (mut count, mut device, mut context, mut stream, mut module, mut function) = (
            0,
            0,
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
        );
        // SAFETY: every pointer is to a local that lives through the call, and the handles come
        // from the driver itself.
        unsafe {
            check_status((calls.init)(0))?;
            check_status((calls.device_count)(&raw mut count))?;
            let number = number % usize::try_from(count).unwrap_or(1).max(1);
            check_status((calls.device_get)(&raw mut device, number as c_int))?;
            check_status((calls.set_flags)(device, schedule as c_uint))?;
            check_status((calls.retain)(&raw mut context, device))?;
            check_status((calls.set_current_context)(context))?;
            check_status((calls.create_stream)(&raw mut stream, NON_BLOCKING_STREAM))?;
            check_status((calls.load_data)(&raw mut module, image.as_ptr().cast()))?;
            check_status((calls.get_function)(
                &raw mut function,
                module,
                kernel.as_ptr(),
            ))?;
        }
        let mut device = Self {
            calls,
            stream,
            kernel: function,
            memory: 0,
            bytes,
        };
        device.memory = device.allocate_memory(bytes)?;
        Ok(device)
    }

    /// Allocates device memory. It is never freed.
    pub(crate) fn allocate_memory(&self, bytes: usize) -> Result<DeviceAddress, LibraryError> {
        let mut address = 0;
        // SAFETY: the pointer is to a local that lives through the call.
        check_status(unsafe { (self.calls.allocate)(&raw mut address, bytes.max(1)) })?;
        Ok(address)
    }

    /// The stream that all work of this device is queued in.
    pub(crate) fn stream(&self) -> LibraryHandle {
        self.stream
    }

    /// Copies `source` to the device's memory.
    pub(crate) fn copy_to_device(&self, source: &[u8]) -> Result<(), LibraryError> {
        let bytes = source.len().min(self.bytes);
        // SAFETY: source and destination hold that many bytes; pageable memory is read before the
        // call returns.
        check_status(unsafe {
            (self.calls.copy_to_device)(self.memory, source.as_ptr().cast(), bytes, self.stream)
        })
    }

    /// Launches a kernel. On the software GPU it takes `duration_ns`.
    pub(crate) fn launch_kernel(&self, duration_ns: u64) -> Result<(), LibraryError> {
        let mut duration_ns = duration_ns;
        let mut parameters = [(&raw mut duration_ns).cast::<c_void>()];
        let (stream, extra) = (self.stream, ptr::null_mut());
        // SAFETY: the kernel takes one 64-bit parameter, which the driver copies before the call
        // returns.
        check_status(unsafe {
            (self.calls.launch)(
                self.kernel,
                1,
                1,
                1,
                32,
                1,
                1,
                0,
                stream,
                parameters.as_mut_ptr(),
                extra,
            )
        })
    }

    /// Waits until the device has done all work in the stream.
    pub(crate) fn synchronize(&self) -> Result<(), LibraryError> {
        // SAFETY: the stream was made by the driver and is never destroyed.
        check_status(unsafe { (self.calls.synchronize)(self.stream) })
    }
}
