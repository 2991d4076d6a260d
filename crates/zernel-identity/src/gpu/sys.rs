//! NVML calls that `nvml-wrapper` does not wrap.

use nvml_wrapper::Device;
use nvml_wrapper::error::nvml_try;

use super::MigInstance;

/// Returns the instance ids of a MIG device.
pub(super) fn read_mig_instance(device: &Device<'_>) -> Option<MigInstance> {
    let library = device.nvml().lib();
    let gpu_instance = library.nvmlDeviceGetGpuInstanceId.as_ref().ok()?;
    let compute_instance = library.nvmlDeviceGetComputeInstanceId.as_ref().ok()?;
    let (mut gpu, mut compute) = (0, 0);
    // SAFETY: the handle belongs to this library, which lives as long as `device`; each call writes
    // one integer.
    let result = unsafe {
        let handle = device.handle();
        nvml_try(gpu_instance(handle, &raw mut gpu))
            .and_then(|()| nvml_try(compute_instance(handle, &raw mut compute)))
    };
    result.ok().map(|()| MigInstance { gpu, compute })
}
