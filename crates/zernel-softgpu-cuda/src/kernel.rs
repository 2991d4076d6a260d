//! Modules and the kernels in them.
//!
//! A module image is text, one kernel per line:
//!
//! ```text
//! softgpu kernel NAME [NANOSECONDS]
//! ```
//!
//! Parameter 0 of a launch is the kernel's duration in nanoseconds, a `u64`. A launch without parameters takes the
//! duration in the image, or 10 µs. Images that are not such text (PTX, cubin, fatbin) are accepted: they have a kernel
//! of every name, which takes 10 µs and whose parameters are ignored.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};

use zernel_softgpu::abi_arguments::InArgument;
use zernel_softgpu::driver_interface::{ExternalKernel, ExternalLaunch};
use zernel_softgpu::registry::Registry;
use zernel_softgpu::stream_work::StreamWork;

use crate::status::{CudaError, INVALID_HANDLE, INVALID_IMAGE, INVALID_VALUE, NOT_FOUND};

pub(crate) const DEFAULT_KERNEL_NS: u64 = 10_000;
const IMAGE_PREFIX: &str = "softgpu ";

/// All loaded modules, by handle. A CUDA library is a module too.
pub(crate) static MODULES: Registry<KernelModule> = Registry::new();
/// All functions of modules, by handle. A kernel of a CUDA library is a function too.
pub(crate) static KERNEL_FUNCTIONS: Registry<KernelFunction> = Registry::new();

/// What a launch of a function does.
#[derive(Debug, Clone, Copy)]
enum FunctionKind {
    /// The launch takes as many nanoseconds as its parameter 0 says; without parameters, as many as stated here.
    Timed(u64),
    /// The launch takes the default time.
    Opaque,
    /// Another library runs the kernel, and returns its end.
    External(ExternalKernel),
}

/// A function of a loaded module.
#[derive(Debug)]
pub(crate) struct KernelFunction {
    pub(crate) name: CString,
    pub(crate) module: u64,
    kind: FunctionKind,
}

/// A module: a loaded image and the functions that the program asked for.
#[derive(Debug)]
pub(crate) struct KernelModule {
    /// The names of the image's kernels, and their durations in nanoseconds; `None` if the image is not text of this
    /// format.
    kernels: Option<BTreeMap<String, u64>>,
    functions: Mutex<BTreeMap<String, u64>>,
}

impl KernelModule {
    /// Parses an image.
    pub(crate) fn load(image: &[u8]) -> Result<Self, CudaError> {
        let kernels = match image.starts_with(IMAGE_PREFIX.as_bytes()) {
            true => Some(parse_image(&String::from_utf8_lossy(image)).ok_or(INVALID_IMAGE)?),
            false => None,
        };
        Ok(Self {
            kernels,
            functions: Mutex::default(),
        })
    }

    /// The handle of the function called `name`; the function is created at the first request.
    pub(crate) fn function_handle(&self, own_handle: u64, name: &str) -> Result<u64, CudaError> {
        let kind = match &self.kernels {
            Some(kernels) => FunctionKind::Timed(*kernels.get(name).ok_or(NOT_FOUND)?),
            None => FunctionKind::Opaque,
        };
        let mut functions = self
            .functions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(handle) = functions.get(name) {
            return Ok(*handle);
        }
        let handle = KERNEL_FUNCTIONS.insert(Arc::new(KernelFunction {
            name: CString::new(name).map_err(|_| NOT_FOUND)?,
            module: own_handle,
            kind,
        }));
        functions.insert(name.into(), handle);
        Ok(handle)
    }

    /// The number of kernels in the image.
    pub(crate) fn kernel_count(&self) -> usize {
        self.kernels.as_ref().map_or(0, BTreeMap::len)
    }
}

fn parse_image(image: &str) -> Option<BTreeMap<String, u64>> {
    let lines = image.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.map(parse_kernel).collect()
}

fn parse_kernel(line: &str) -> Option<(String, u64)> {
    let mut words = line.split_ascii_whitespace();
    let ("softgpu", "kernel", name) = (words.next()?, words.next()?, words.next()?) else {
        return None;
    };
    let duration = words
        .next()
        .map_or(Ok(DEFAULT_KERNEL_NS), str::parse)
        .ok()?;
    words.next().is_none().then(|| (name.to_owned(), duration))
}

/// Creates a function that another library runs.
pub(crate) fn create_external_function(name: CString, kernel: ExternalKernel) -> u64 {
    KERNEL_FUNCTIONS.insert(Arc::new(KernelFunction {
        name,
        module: 0,
        kind: FunctionKind::External(kernel),
    }))
}

/// The function with this handle.
pub(crate) fn function_of_handle(handle: u64) -> Result<Arc<KernelFunction>, CudaError> {
    KERNEL_FUNCTIONS.get(handle).ok_or(INVALID_HANDLE)
}

impl KernelFunction {
    /// The stream work of a launch of this function with these parameters.
    pub(crate) fn launch_work(
        &self,
        parameters: InArgument<*const u64>,
        extra: InArgument<u64>,
    ) -> Result<StreamWork, CudaError> {
        let work = match self.kind {
            FunctionKind::Opaque => StreamWork::Kernel {
                duration: DEFAULT_KERNEL_NS,
            },
            FunctionKind::Timed(default) => StreamWork::Kernel {
                duration: first_parameter(parameters, extra)?.unwrap_or(default),
            },
            FunctionKind::External(kernel) => {
                let argument = first_parameter(parameters, extra)?.ok_or(INVALID_VALUE)?;
                StreamWork::External {
                    launch: ExternalLaunch::new(kernel, argument),
                }
            }
        };
        Ok(work)
    }
}

/// Parameter 0 of a launch, from the array of pointers or from the packed buffer.
fn first_parameter(
    parameters: InArgument<*const u64>,
    extra: InArgument<u64>,
) -> Result<Option<u64>, CudaError> {
    const EXTRA_LIST_END: u64 = 0;
    const EXTRA_BUFFER_POINTER: u64 = 1;
    if !parameters.is_null() {
        // SAFETY: the C caller's array of parameters; entry 0 of a kernel that has one points to it.
        let first = unsafe { InArgument::new(parameters.get()?) };
        return Ok(Some(first.get()?));
    }
    if extra.is_null() {
        return Ok(None);
    }
    let mut index = 0;
    while extra.get_at(index)? != EXTRA_LIST_END {
        if extra.get_at(index)? == EXTRA_BUFFER_POINTER {
            // SAFETY: the C caller's buffer of packed parameters.
            let buffer = unsafe { InArgument::new(extra.get_at(index + 1)? as *const u64) };
            return Ok(Some(buffer.get()?));
        }
        index += 2;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_image_lists_names_and_durations() {
        let kernels =
            parse_image("softgpu kernel forward\n\n softgpu kernel backward 2500\n").unwrap();
        assert_eq!(kernels["forward"], DEFAULT_KERNEL_NS);
        assert_eq!(kernels["backward"], 2500);
        assert!(parse_image("softgpu kernel").is_none());
        assert!(parse_image("softgpu kernel a b").is_none());
        assert!(parse_image("softgpu kernel a 1 2").is_none());
    }
}
