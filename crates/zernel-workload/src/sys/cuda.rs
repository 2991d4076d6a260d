//! The few calls of the CUDA driver API that a training step makes, from a library chosen at run
//! time.
//!
//! The library is loaded by the worker itself: a context does not survive a fork.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr;

use rustix::path::Arg;

/// Why the driver cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CudaError {
    /// The library, or a function in it, was not found.
    NotLoaded,
    /// A call returned this `CUresult`.
    Code(i32),
}

type Status = c_int;
type Address = u64;
type Handle = *mut c_void;

/// How a thread waits for the device; the values are those of `CU_CTX_SCHED_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Schedule {
    Spin = 1,
    Yield = 2,
    Block = 4,
}

macro_rules! driver_calls {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*);)*) => {
        struct Calls {
            $($field: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        impl Calls {
            fn load(library: Handle) -> Result<Self, CudaError> {
                Ok(Self {
                    $(
                        // SAFETY: the symbol has this signature in every version of the driver API.
                        $field: unsafe {
                            std::mem::transmute::<Handle, unsafe extern "C" fn($($argument),*) -> Status>(
                                symbol(library, $symbol)?,
                            )
                        },
                    )*
                })
            }
        }
    };
}

driver_calls! {
    init = c"cuInit": fn(c_uint);
    device_get = c"cuDeviceGet": fn(*mut c_int, c_int);
    device_count = c"cuDeviceGetCount": fn(*mut c_int);
    set_flags = c"cuDevicePrimaryCtxSetFlags_v2": fn(c_int, c_uint);
    retain = c"cuDevicePrimaryCtxRetain": fn(*mut Handle, c_int);
    set_current = c"cuCtxSetCurrent": fn(Handle);
    load_data = c"cuModuleLoadData": fn(*mut Handle, *const c_void);
    get_function = c"cuModuleGetFunction": fn(*mut Handle, Handle, *const c_char);
    allocate = c"cuMemAlloc_v2": fn(*mut Address, usize);
    copy_to_device = c"cuMemcpyHtoDAsync_v2": fn(Address, *const c_void, usize, Handle);
    launch = c"cuLaunchKernel": fn(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
    synchronize = c"cuStreamSynchronize": fn(Handle);
}

fn symbol(library: Handle, name: &CStr) -> Result<Handle, CudaError> {
    // SAFETY: the library is loaded and never unloaded, the name ends with NUL.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    if address.is_null() {
        Err(CudaError::NotLoaded)
    } else {
        Ok(address)
    }
}

fn check(status: Status) -> Result<(), CudaError> {
    if status == 0 {
        Ok(())
    } else {
        Err(CudaError::Code(status))
    }
}

/// A device with a kernel that takes the time it is asked for, and memory to copy to.
pub(crate) struct Device {
    calls: Calls,
    kernel: Handle,
    memory: Address,
    bytes: usize,
}

impl Device {
    /// Opens device `number` (modulo the number of devices) of the driver at `path`.
    ///
    /// `image` is what the driver loads as a module, with a kernel named `kernel`.
    pub(crate) fn open(
        path: &Path,
        number: usize,
        schedule: Schedule,
        image: &CStr,
        kernel: &CStr,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let library = path.into_with_c_str(|path| {
            // SAFETY: the path ends with NUL. That the library's initialisers are sound is what
            // naming it vouches for.
            Ok(unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) })
        });
        let library = library
            .ok()
            .filter(|library| !library.is_null())
            .ok_or(CudaError::NotLoaded)?;
        let calls = Calls::load(library)?;
        let (mut count, mut device, mut context, mut module, mut function) =
            (0, 0, ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let mut memory = 0;
        // SAFETY: every pointer is to a local that lives through the call, and the handles come
        // from the driver itself.
        unsafe {
            check((calls.init)(0))?;
            check((calls.device_count)(&raw mut count))?;
            let number = number % usize::try_from(count).unwrap_or(1).max(1);
            check((calls.device_get)(&raw mut device, number as c_int))?;
            check((calls.set_flags)(device, schedule as c_uint))?;
            check((calls.retain)(&raw mut context, device))?;
            check((calls.set_current)(context))?;
            check((calls.load_data)(&raw mut module, image.as_ptr().cast()))?;
            check((calls.get_function)(
                &raw mut function,
                module,
                kernel.as_ptr(),
            ))?;
            check((calls.allocate)(&raw mut memory, bytes.max(1)))?;
        }
        Ok(Self {
            calls,
            kernel: function,
            memory,
            bytes,
        })
    }

    /// Copies to the device.
    pub(crate) fn copy(&self, source: &[u8]) -> Result<(), CudaError> {
        let bytes = source.len().min(self.bytes);
        // SAFETY: source and destination hold that many bytes; pageable memory is read before the
        // call returns.
        check(unsafe {
            (self.calls.copy_to_device)(self.memory, source.as_ptr().cast(), bytes, ptr::null_mut())
        })
    }

    /// Launches a kernel that takes `duration_ns`, where the driver is a simulated one.
    pub(crate) fn launch(&self, duration_ns: u64) -> Result<(), CudaError> {
        let mut duration_ns = duration_ns;
        let mut parameters = [(&raw mut duration_ns).cast::<c_void>()];
        let (stream, extra) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the kernel takes one 64-bit parameter, which the driver copies before the call
        // returns.
        check(unsafe {
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

    /// Waits until the device has done everything.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the null stream exists in every context.
        check(unsafe { (self.calls.synchronize)(ptr::null_mut()) })
    }
}
