//! Initialisation, versions, error texts, and finding functions by name.

use std::ffi::{c_char, c_void};

use zernel_softgpu::abi_arguments::{OutArgument, TextArgument};
use zernel_softgpu::{device, exports};

use crate::driver;
use crate::procedures::{self, FoundProcedure};
use crate::status::{INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, Outcome, name_and_description};

exports! { "cuda" =>
    fn cuInit(_call, flags: u32) -> Outcome {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        driver::initialise_driver()
    }

    fn cuDriverGetVersion(_call, version: OutArgument<i32>) -> Outcome {
        Ok(version.set(device::CUDA_VERSION)?)
    }

    fn cuGetErrorName(_call, error: i32, name: OutArgument<*const c_char>) -> Outcome {
        let (text, _) = name_and_description(error).ok_or(INVALID_VALUE)?;
        Ok(name.set(text.as_ptr())?)
    }

    fn cuGetErrorString(_call, error: i32, description: OutArgument<*const c_char>) -> Outcome {
        let (_, text) = name_and_description(error).ok_or(INVALID_VALUE)?;
        Ok(description.set(text.as_ptr())?)
    }

    fn cuGetProcAddress(
        _call, symbol: TextArgument, address: OutArgument<u64>, cuda_version: i32, flags: u64,
    ) -> Outcome {
        match procedures::find_procedure(&symbol.get()?, cuda_version, flags) {
            FoundProcedure::At(found) => Ok(address.set(found)?),
            FoundProcedure::TooNew | FoundProcedure::Unknown => Err(NOT_FOUND),
        }
    }

    fn cuGetProcAddress_v2(
        _call, symbol: TextArgument, address: OutArgument<u64>, cuda_version: i32, flags: u64, status: OutArgument<i32>,
    ) -> Outcome {
        let found = procedures::find_procedure(&symbol.get()?, cuda_version, flags);
        status.set_unless_null(found.query_result_code());
        match found {
            FoundProcedure::At(found) => Ok(address.set(found)?),
            FoundProcedure::TooNew | FoundProcedure::Unknown => {
                address.set(0)?;
                Err(NOT_FOUND)
            }
        }
    }

    /// Returns no table: export tables are private to NVIDIA's own libraries.
    fn cuGetExportTable(_call, table: OutArgument<*const c_void>, _identity: u64) -> Outcome {
        table.set_unless_null(std::ptr::null());
        Err(NOT_SUPPORTED)
    }

    fn cuProfilerStart(_call) -> Outcome {
        driver::initialised_driver().map(drop)
    }

    fn cuProfilerStop(_call) -> Outcome {
        driver::initialised_driver().map(drop)
    }
}
