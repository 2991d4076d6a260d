//! Functions that launch kernels.

use zernel_softgpu::abi_arguments::InArgument;
use zernel_softgpu::exports;
use zernel_softgpu::truth::OpenCall;

use crate::context::stream_of_handle;
use crate::kernel::function_of_handle;
use crate::status::{INVALID_VALUE, Outcome};
use crate::types::LaunchConfiguration;

/// Launches a kernel. The numbers of blocks and threads are checked, but do not change how long the kernel takes.
fn launch_kernel(
    call: &mut OpenCall,
    handle: u64,
    grid: [u32; 3],
    block: [u32; 3],
    stream_handle: u64,
    parameters: InArgument<*const u64>,
    extra: InArgument<u64>,
) -> Outcome {
    let stream = stream_of_handle(call, stream_handle)?;
    call.object = handle;
    let threads: u64 = block.iter().map(|size| u64::from(*size)).product();
    if grid.contains(&0) || !(1..=1024).contains(&threads) {
        return Err(INVALID_VALUE);
    }
    let work = function_of_handle(handle)?.launch_work(parameters, extra)?;
    stream.submit_or_capture(work, call.symbol())
}

exports! { "cuda" =>
    per_thread(cuLaunchKernel_ptsz)
    fn cuLaunchKernel(
        call, function: u64, grid_x: u32, grid_y: u32, grid_z: u32,
        block_x: u32, block_y: u32, block_z: u32,
        _shared_bytes: u32, stream_handle: u64, parameters: InArgument<*const u64>, extra: InArgument<u64>,
    ) -> Outcome {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        launch_kernel(call, function, grid, block, stream_handle, parameters, extra)
    }

    per_thread(cuLaunchKernelEx_ptsz)
    fn cuLaunchKernelEx(
        call, configuration: InArgument<LaunchConfiguration>, function: u64, parameters: InArgument<*const u64>,
        extra: InArgument<u64>,
    ) -> Outcome {
        let LaunchConfiguration { grid, block, stream, .. } = configuration.get()?;
        launch_kernel(call, function, grid, block, stream, parameters, extra)
    }

    per_thread(cuLaunchCooperativeKernel_ptsz)
    fn cuLaunchCooperativeKernel(
        call, function: u64, grid_x: u32, grid_y: u32, grid_z: u32,
        block_x: u32, block_y: u32, block_z: u32,
        _shared_bytes: u32, stream_handle: u64, parameters: InArgument<*const u64>,
    ) -> Outcome {
        // SAFETY: null is always a valid "no extra options".
        let no_extra = unsafe { InArgument::new(std::ptr::null()) };
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        launch_kernel(call, function, grid, block, stream_handle, parameters, no_extra)
    }
}
