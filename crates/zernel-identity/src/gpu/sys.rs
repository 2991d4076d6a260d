//! Calls of NVML that `nvml-wrapper` does not wrap.

use nvml_wrapper::Device;
use nvml_wrapper::error::nvml_try;

use super::MigInstance;

/// Which instances a part of a divided GPU is made of.
pub(super) fn mig_instance(device: &Device<'_>) -> Option<MigInstance> {
    let library = device.nvml().lib();
    let gpu_instance = library.nvmlDeviceGetGpuInstanceId.as_ref().ok()?;
    let compute_instance = library.nvmlDeviceGetComputeInstanceId.as_ref().ok()?;
    let (mut gpu, mut compute) = (0, 0);
    // SAFETY: the handle is the library's own, which lives as long as `part`; each call writes one
    // integer.
    let result = unsafe {
        let handle = device.handle();
        nvml_try(gpu_instance(handle, &raw mut gpu))
            .and_then(|()| nvml_try(compute_instance(handle, &raw mut compute)))
    };
    result.ok().map(|()| MigInstance { gpu, compute })
}
