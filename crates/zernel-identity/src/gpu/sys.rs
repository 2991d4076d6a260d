//! Calls of NVML that `nvml-wrapper` does not wrap.

use nvml_wrapper::Device;
use nvml_wrapper::error::nvml_try;

use super::MigInstance;

/// Which instances a part of a divided GPU is made of.
pub(super) fn mig_instance(part: &Device<'_>) -> Option<MigInstance> {
    let library = part.nvml().lib();
    let gpu_instance = library.nvmlDeviceGetGpuInstanceId.as_ref().ok()?;
    let compute_instance = library.nvmlDeviceGetComputeInstanceId.as_ref().ok()?;
    let (mut gpu, mut compute) = (0, 0);
    // SAFETY: the handle is the library's own, which lives as long as `part`; each call writes one
    // integer.
    let told = unsafe {
        let handle = part.handle();
        nvml_try(gpu_instance(handle, &raw mut gpu))
            .and_then(|()| nvml_try(compute_instance(handle, &raw mut compute)))
    };
    told.ok().map(|()| MigInstance { gpu, compute })
}
