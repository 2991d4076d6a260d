//! Functions for modules, libraries and kernels.

use std::ffi::{CStr, c_char};
use std::sync::Arc;

use zernel_softgpu::abi_arguments::{InArgument, OutArgument, TextArgument};
use zernel_softgpu::exports;

use crate::context::current_context;
use crate::driver::initialised_driver;
use crate::kernel::{KERNEL_FUNCTIONS, KernelModule, MODULES, function_of_handle};
use crate::status::{
    CudaError, FILE_NOT_FOUND, INVALID_HANDLE, INVALID_IMAGE, INVALID_VALUE, NOT_FOUND,
    NOT_SUPPORTED, Outcome,
};

fn load_module_image(handle: &OutArgument<u64>, image: InArgument<u8>) -> Outcome {
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, so by the C caller's promise an image: text that ends with a zero, or binary,
    // of which a fatbin or cubin has a zero within its header, long before its end.
    let image = unsafe { CStr::from_ptr(image.pointer().cast()) };
    load_image_bytes(handle, image.to_bytes())
}

fn load_image_bytes(handle: &OutArgument<u64>, image: &[u8]) -> Outcome {
    Ok(handle.set(MODULES.insert(Arc::new(KernelModule::load(image)?)))?)
}

fn unload_module(handle: u64) -> Outcome {
    MODULES.remove(handle).ok_or(INVALID_HANDLE)?;
    KERNEL_FUNCTIONS.retain(|function| function.module != handle);
    Ok(())
}

fn find_function_in_module(found: &OutArgument<u64>, module: u64, name: &TextArgument) -> Outcome {
    let object = MODULES.get(module).ok_or(INVALID_HANDLE)?;
    Ok(found.set(object.function_handle(module, &name.get()?)?)?)
}

/// The value of a `CUfunction_attribute`, equal for all kernels: threads per block, then sizes and versions that no
/// simulated kernel has.
fn function_attribute(attribute: i32, handle: u64) -> Result<i32, CudaError> {
    function_of_handle(handle)?;
    match attribute {
        0 => Ok(1024),
        4 => Ok(32),
        5 | 6 => Ok(90),
        1..=15 => Ok(0),
        _ => Err(INVALID_VALUE),
    }
}

exports! { "cuda" =>
    fn cuModuleLoadData(_call, module: OutArgument<u64>, image: InArgument<u8>) -> Outcome {
        current_context()?;
        load_module_image(&module, image)
    }

    fn cuModuleLoadDataEx(
        _call, module: OutArgument<u64>, image: InArgument<u8>, _option_count: u32, _options: u64, _values: u64,
    ) -> Outcome {
        current_context()?;
        load_module_image(&module, image)
    }

    fn cuModuleLoadFatBinary(_call, module: OutArgument<u64>, image: InArgument<u8>) -> Outcome {
        current_context()?;
        load_module_image(&module, image)
    }

    fn cuModuleLoad(_call, module: OutArgument<u64>, path: TextArgument) -> Outcome {
        current_context()?;
        let image = std::fs::read(path.get()?).map_err(|_| FILE_NOT_FOUND)?;
        if image.is_empty() {
            return Err(INVALID_IMAGE);
        }
        load_image_bytes(&module, &image)
    }

    fn cuModuleUnload(_call, module: u64) -> Outcome {
        current_context()?;
        unload_module(module)
    }

    fn cuModuleGetFunction(_call, found: OutArgument<u64>, module: u64, name: TextArgument) -> Outcome {
        current_context()?;
        find_function_in_module(&found, module, &name)
    }

    fn cuModuleGetFunctionCount(_call, count: OutArgument<u32>, module: u64) -> Outcome {
        let module = MODULES.get(module).ok_or(INVALID_HANDLE)?;
        Ok(count.set(module.kernel_count() as u32)?)
    }

    /// No image of the software GPU has variables.
    fn cuModuleGetGlobal_v2(
        _call, _address: OutArgument<u64>, _bytes: OutArgument<usize>, module: u64, _name: TextArgument,
    ) -> Outcome {
        MODULES.get(module).ok_or(INVALID_HANDLE)?;
        Err(NOT_FOUND)
    }

    /// Reports lazy loading, the default of the real driver.
    fn cuModuleGetLoadingMode(_call, mode: OutArgument<i32>) -> Outcome {
        initialised_driver()?;
        Ok(mode.set(2)?)
    }

    fn cuLibraryLoadData(
        _call, library: OutArgument<u64>, code: InArgument<u8>, _jit_options: u64, _jit_values: u64, _jit_count: u32,
        _options: u64, _values: u64, _count: u32,
    ) -> Outcome {
        initialised_driver()?;
        load_module_image(&library, code)
    }

    fn cuLibraryUnload(_call, library: u64) -> Outcome {
        initialised_driver()?;
        unload_module(library)
    }

    fn cuLibraryGetKernel(_call, kernel: OutArgument<u64>, library: u64, name: TextArgument) -> Outcome {
        initialised_driver()?;
        find_function_in_module(&kernel, library, &name)
    }

    fn cuLibraryGetModule(_call, module: OutArgument<u64>, library: u64) -> Outcome {
        MODULES.get(library).ok_or(INVALID_HANDLE)?;
        Ok(module.set(library)?)
    }

    fn cuKernelGetFunction(_call, found: OutArgument<u64>, kernel: u64) -> Outcome {
        function_of_handle(kernel)?;
        Ok(found.set(kernel)?)
    }

    fn cuKernelGetAttribute(
        _call, value: OutArgument<i32>, attribute: i32, kernel: u64, device: i32,
    ) -> Outcome {
        initialised_driver()?.device(device)?;
        Ok(value.set(function_attribute(attribute, kernel)?)?)
    }

    fn cuKernelGetName(_call, name: OutArgument<*const c_char>, kernel: u64) -> Outcome {
        Ok(name.set(function_of_handle(kernel)?.name.as_ptr())?)
    }

    fn cuFuncGetAttribute(_call, value: OutArgument<i32>, attribute: i32, handle: u64) -> Outcome {
        Ok(value.set(function_attribute(attribute, handle)?)?)
    }

    /// Shared memory and cache preferences change nothing for a kernel that only takes time.
    fn cuFuncSetAttribute(_call, handle: u64, attribute: i32, _value: i32) -> Outcome {
        function_attribute(attribute, handle).map(drop)
    }

    fn cuFuncSetCacheConfig(_call, handle: u64, _configuration: i32) -> Outcome {
        function_of_handle(handle).map(drop)
    }

    /// The name stays valid until the module is unloaded.
    fn cuFuncGetName(_call, name: OutArgument<*const c_char>, handle: u64) -> Outcome {
        Ok(name.set(function_of_handle(handle)?.name.as_ptr())?)
    }

    fn cuFuncGetModule(_call, module: OutArgument<u64>, handle: u64) -> Outcome {
        Ok(module.set(function_of_handle(handle)?.module)?)
    }

    fn cuFuncLoad(_call, handle: u64) -> Outcome {
        function_of_handle(handle).map(drop)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        _call, blocks: OutArgument<i32>, handle: u64, block_size: i32, _shared: usize,
    ) -> Outcome {
        store_occupancy(&blocks, handle, block_size)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        _call, blocks: OutArgument<i32>, handle: u64, block_size: i32, _shared: usize, _flags: u32,
    ) -> Outcome {
        store_occupancy(&blocks, handle, block_size)
    }

    fn cuLinkCreate_v2(_call, _count: u32, _options: u64, _values: u64, _state: u64) -> Outcome {
        Err(NOT_SUPPORTED)
    }
}

fn store_occupancy(blocks: &OutArgument<i32>, handle: u64, block_size: i32) -> Outcome {
    function_of_handle(handle)?;
    if !(1..=1024).contains(&block_size) {
        return Err(INVALID_VALUE);
    }
    Ok(blocks.set((2048 / block_size).min(32))?)
}
