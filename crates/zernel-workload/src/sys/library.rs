//! Loads CUDA and NCCL libraries at run time, and finds the few functions in them that a training step calls.
//!
//! The worker itself loads the libraries, because their state does not survive a fork. They are never unloaded.

use std::ffi::{CStr, c_void};
use std::path::Path;

use rustix::path::Arg;

/// Why a library cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LibraryError {
    /// The library was not found, or it lacks a function.
    NotLoaded,
    /// A function of the library returned this error code.
    Code(i32),
}

/// A pointer whose meaning only the library knows.
pub(crate) type LibraryHandle = *mut c_void;
/// An address in the memory of a device.
pub(crate) type DeviceAddress = u64;
/// The return value of every function of these libraries; 0 is success.
pub(crate) type LibraryStatus = std::ffi::c_int;

/// A loaded library.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Library(LibraryHandle);

impl Library {
    /// Loads the library at `path`, or the one that the dynamic loader finds if `path` is a bare name.
    pub(crate) fn load(path: &Path) -> Result<Self, LibraryError> {
        let library = path.into_with_c_str(|path| {
            // SAFETY: the path ends with NUL. The user who names a library is responsible for its
            // initialisers.
            Ok(unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) })
        });
        let library = library.ok().filter(|library| !library.is_null());
        library.map(Self).ok_or(LibraryError::NotLoaded)
    }

    /// The address of a function in the library.
    pub(crate) fn symbol_address(self, name: &CStr) -> Result<LibraryHandle, LibraryError> {
        // SAFETY: the library is loaded and never unloaded, the name ends with NUL.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        match address.is_null() {
            true => Err(LibraryError::NotLoaded),
            false => Ok(address),
        }
    }
}

/// Turns the return value of a library's function into an error, unless it is 0.
pub(crate) fn check_status(status: LibraryStatus) -> Result<(), LibraryError> {
    match status {
        0 => Ok(()),
        code => Err(LibraryError::Code(code)),
    }
}

/// Declares a struct with the functions of a library that are used, and the code that finds them in the library.
macro_rules! library_calls {
    ($($field:ident = $symbol:literal: fn($($argument:ty),* $(,)?);)*) => {
        struct Calls {
            $($field: unsafe extern "C" fn($($argument),*) -> LibraryStatus,)*
        }

        impl Calls {
            fn find_functions(library: Library) -> Result<Self, LibraryError> {
                Ok(Self {
                    $(
                        // SAFETY: the symbol has this signature in every version of the library.
                        $field: unsafe {
                            std::mem::transmute::<LibraryHandle, unsafe extern "C" fn($($argument),*) -> LibraryStatus>(
                                library.symbol_address($symbol)?,
                            )
                        },
                    )*
                })
            }
        }
    };
}

pub(crate) use library_calls;
