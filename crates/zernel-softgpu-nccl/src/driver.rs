//! The CUDA driver that NCCL uses: libcuda's exported functions, called as the real NCCL calls them.

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;

use zernel_softgpu::driver_interface::{DriverInterface, ExternalKernel, INTERFACE_SYMBOL};

use crate::status::NcclError;

type Result<T> = std::result::Result<T, NcclError>;

/// `CUlaunchConfig` of a launch with a single thread.
#[repr(C)]
struct LaunchConfiguration {
    dimensions: [u32; 6],
    shared_bytes: u32,
    stream: u64,
    attributes: u64,
    attribute_count: u32,
}

type LaunchKernelExFunction =
    extern "C" fn(*const LaunchConfiguration, u64, *const *const u64, *const u64) -> i32;
type GetDeviceFunction = extern "C" fn(*mut i32) -> i32;
type ContextFunction = extern "C" fn(u64) -> i32;
type GetContextFunction = extern "C" fn(*mut u64) -> i32;
type RetainPrimaryFunction = extern "C" fn(*mut u64, i32) -> i32;
type IsCapturingFunction = extern "C" fn(u64, *mut i32) -> i32;
type AllocateFunction = extern "C" fn(*mut u64, usize) -> i32;

/// The functions of libcuda that NCCL calls.
pub(crate) struct Driver {
    launch: LaunchKernelExFunction,
    get_current_device: GetDeviceFunction,
    get_current_context: GetContextFunction,
    push_current_context: ContextFunction,
    pop_current_context: GetContextFunction,
    retain_primary_context: RetainPrimaryFunction,
    is_capturing: IsCapturingFunction,
    allocate: AllocateFunction,
    free: ContextFunction,
    interface: &'static DriverInterface,
}

/// Looks up a function of libcuda, and gives it the type that the function has there.
macro_rules! typed_libcuda_function {
    ($library:expr, $name:expr, $type:ty) => {{
        let address = find_function($library, $name)?;
        // SAFETY: this name is a function of this type in libcuda.
        unsafe { std::mem::transmute::<*mut c_void, $type>(address) }
    }};
}

fn find_function(library: *mut c_void, name: &CStr) -> Result<*mut c_void> {
    // SAFETY: a handle from dlopen and a zero-terminated name.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    match address.is_null() {
        true => Err(report_driver_problem(&format!(
            "libcuda.so.1 has no {}: it is not the software one",
            name.to_string_lossy()
        ))),
        false => Ok(address),
    }
}

fn report_driver_problem(problem: &str) -> NcclError {
    eprintln!("softgpu: NCCL: {problem}");
    NcclError::UnhandledCudaError
}

fn check_driver_code(code: i32) -> Result<()> {
    match code {
        0 => Ok(()),
        _ => Err(NcclError::UnhandledCudaError),
    }
}

/// The CUDA driver, found at first use: the libcuda that is already loaded, or the one in the folder of this library.
pub(crate) fn loaded_driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<std::result::Result<Driver, NcclError>> = OnceLock::new();
    DRIVER
        .get_or_init(Driver::load)
        .as_ref()
        .map_err(|error| *error)
}

impl Driver {
    fn load() -> Result<Self> {
        // SAFETY: a constant name; the library's initialisers are ours.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return Err(report_driver_problem(
                "cannot load libcuda.so.1; it belongs beside libnccl.so.2 or in LD_LIBRARY_PATH",
            ));
        }
        let interface = find_function(library, INTERFACE_SYMBOL)?.cast::<DriverInterface>();
        // SAFETY: this name is an object of this type in libcuda, which is never unloaded.
        let interface = unsafe { &*interface };
        Ok(Self {
            launch: typed_libcuda_function!(library, c"cuLaunchKernelEx", LaunchKernelExFunction),
            get_current_device: typed_libcuda_function!(
                library,
                c"cuCtxGetDevice",
                GetDeviceFunction
            ),
            get_current_context: typed_libcuda_function!(
                library,
                c"cuCtxGetCurrent",
                GetContextFunction
            ),
            push_current_context: typed_libcuda_function!(
                library,
                c"cuCtxPushCurrent_v2",
                ContextFunction
            ),
            pop_current_context: typed_libcuda_function!(
                library,
                c"cuCtxPopCurrent_v2",
                GetContextFunction
            ),
            retain_primary_context: typed_libcuda_function!(
                library,
                c"cuDevicePrimaryCtxRetain",
                RetainPrimaryFunction
            ),
            is_capturing: typed_libcuda_function!(
                library,
                c"cuStreamIsCapturing",
                IsCapturingFunction
            ),
            allocate: typed_libcuda_function!(library, c"cuMemAlloc_v2", AllocateFunction),
            free: typed_libcuda_function!(library, c"cuMemFree_v2", ContextFunction),
            interface,
        })
    }

    /// The calling thread's current device and context.
    pub(crate) fn current_device_and_context(&self) -> Result<DeviceAndContext> {
        let mut place = DeviceAndContext::default();
        check_driver_code((self.get_current_device)(&raw mut place.device))?;
        check_driver_code((self.get_current_context)(&raw mut place.context))?;
        Ok(place)
    }

    /// A device and its primary context.
    pub(crate) fn device_and_primary_context(&self, device: i32) -> Result<DeviceAndContext> {
        let mut place = DeviceAndContext { device, context: 0 };
        check_driver_code((self.retain_primary_context)(
            &raw mut place.context,
            device,
        ))?;
        Ok(place)
    }

    /// Runs `body` while `context` is the current context.
    pub(crate) fn run_in_context<T>(
        &self,
        context: u64,
        body: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        check_driver_code((self.push_current_context)(context))?;
        let result = body();
        let mut popped = 0;
        check_driver_code((self.pop_current_context)(&raw mut popped))?;
        result
    }

    pub(crate) fn is_capturing(&self, stream: u64) -> Result<bool> {
        let mut status = 0;
        check_driver_code((self.is_capturing)(stream, &raw mut status))?;
        Ok(status != 0)
    }

    /// Launches a function that [`Self::create_kernel`] made.
    pub(crate) fn launch_function(&self, function: u64, stream: u64, argument: u64) -> Result<()> {
        let configuration = LaunchConfiguration {
            dimensions: [1; 6],
            shared_bytes: 0,
            stream,
            attributes: 0,
            attribute_count: 0,
        };
        let parameters = [&raw const argument];
        check_driver_code((self.launch)(
            &raw const configuration,
            function,
            parameters.as_ptr(),
            std::ptr::null(),
        ))
    }

    pub(crate) fn create_kernel(&self, name: &CStr, kernel: ExternalKernel) -> u64 {
        (self.interface.create_external_kernel)(name.as_ptr(), kernel)
    }

    pub(crate) fn allocate_device_memory(&self, bytes: usize) -> Result<u64> {
        let mut address = 0;
        check_driver_code((self.allocate)(&raw mut address, bytes))?;
        Ok(address)
    }

    pub(crate) fn free_device_memory(&self, address: u64) -> Result<()> {
        check_driver_code((self.free)(address))
    }
}

/// The device and the context that a communicator works on.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct DeviceAndContext {
    pub(crate) device: i32,
    pub(crate) context: u64,
}
