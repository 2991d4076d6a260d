//! The GPU of a training job: a CUDA driver, or a simulation on the CPU's clock.

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rustix::io::Errno;

use super::MlTraining;
use crate::clock;
use crate::spec_keys::spec_choice;
use crate::sys::cuda::{CudaWaitMode, OpenedCudaDevice};
use crate::sys::library::LibraryError;
use crate::sys::memory::PrivateMapping;
use crate::worker::{FailingStep, WorkFailure, Worker};

/// The image of a software GPU's module with one kernel, which takes the time that a launch asks for.
const SOFTGPU_MODULE_IMAGE: &CStr = c"softgpu kernel step\n";
const SOFTGPU_KERNEL_NAME: &CStr = c"step";

spec_choice! {
    /// The GPU that a trainer uses.
    pub enum GpuBackend, default CpuTime {
        /// No GPU: a copy is a copy in memory, and a kernel ends at a time on the CPU's clock.
        CpuTime,
        /// The CUDA driver at this path, for example the software GPU's `libcuda.so.1`. The
        /// all-reduce uses the `libnccl.so.2` beside it, else the one that the dynamic loader finds.
        /// CUDA does not survive a fork: the calling process must not have used the driver.
        Driver(PathBuf),
    }
}

impl GpuBackend {
    /// The path of the CUDA driver; `None` if the job uses no driver.
    pub(super) fn driver_path(&self) -> Option<&Path> {
        match self {
            Self::CpuTime => None,
            Self::Driver(path) => Some(path),
        }
    }

    pub(super) fn check(&self) -> Result<(), (&'static str, String)> {
        match self {
            Self::Driver(path) if !path.is_file() => Err((
                "work.gpu",
                format!(
                    "there is no GPU driver library at `{}`; `make softgpu` builds the software GPU, \
                     with target/softgpu/libcuda.so.1",
                    path.display()
                ),
            )),
            _ => Ok(()),
        }
    }
}

spec_choice! {
    /// How a trainer waits for the GPU.
    #[derive(Copy)]
    pub enum GpuWait, default Block {
        /// The waiting thread sleeps.
        Block,
        /// The waiting thread spins.
        Spin,
        /// The waiting thread yields in a loop.
        Yield,
    }
}

/// The GPU that a trainer has opened, and the batch that it copies there.
pub(super) struct TrainerGpu {
    batch: PrivateMapping,
    target: GpuTarget,
}

enum GpuTarget {
    CpuTime {
        batch_copy_target: PrivateMapping,
        busy_until_ns: u64,
        wait: GpuWait,
    },
    Driver(Rc<OpenedCudaDevice>),
}

impl TrainerGpu {
    pub(super) fn open(job: &MlTraining, rank: usize) -> Result<Self, WorkFailure> {
        let bytes = job.copy_kib << 10;
        let map = || PrivateMapping::new(bytes).map_err(FailingStep::MapMemory.as_failure());
        let target = match &job.gpu {
            GpuBackend::CpuTime => GpuTarget::CpuTime {
                batch_copy_target: map()?,
                busy_until_ns: 0,
                wait: job.gpu_wait,
            },
            GpuBackend::Driver(path) => {
                let schedule = match job.gpu_wait {
                    GpuWait::Block => CudaWaitMode::Block,
                    GpuWait::Spin => CudaWaitMode::Spin,
                    GpuWait::Yield => CudaWaitMode::Yield,
                };
                let device = OpenedCudaDevice::open(
                    path,
                    rank,
                    schedule,
                    SOFTGPU_MODULE_IMAGE,
                    SOFTGPU_KERNEL_NAME,
                    bytes,
                );
                GpuTarget::Driver(Rc::new(device.map_err(library_failure)?))
            }
        };
        Ok(Self {
            batch: map()?,
            target,
        })
    }

    /// Copies the batch to the GPU.
    pub(super) fn copy_batch(&mut self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let batch = self.batch.bytes();
        match &mut self.target {
            GpuTarget::CpuTime {
                batch_copy_target, ..
            } => batch_copy_target.bytes().copy_from_slice(batch),
            GpuTarget::Driver(device) => worker
                .count_as_blocked(|| device.copy_to_device(batch))
                .map_err(library_failure)?,
        }
        Ok(())
    }

    /// Queues a kernel that takes `duration_ns`.
    pub(super) fn launch_kernel(&mut self, duration_ns: u64) -> Result<(), WorkFailure> {
        match &mut self.target {
            GpuTarget::CpuTime { busy_until_ns, .. } => {
                *busy_until_ns = (*busy_until_ns)
                    .max(clock::now_ns())
                    .saturating_add(duration_ns);
                Ok(())
            }
            GpuTarget::Driver(device) => device.launch_kernel(duration_ns).map_err(library_failure),
        }
    }

    /// The device that the CUDA driver opened; `None` without a driver.
    pub(super) fn device(&self) -> Option<Rc<OpenedCudaDevice>> {
        match &self.target {
            GpuTarget::Driver(device) => Some(Rc::clone(device)),
            GpuTarget::CpuTime { .. } => None,
        }
    }

    /// Waits until all queued kernels have ended, or until the stop request.
    pub(super) fn synchronize(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        match &self.target {
            GpuTarget::Driver(device) => worker
                .count_as_blocked(|| device.synchronize())
                .map_err(library_failure),
            GpuTarget::CpuTime {
                busy_until_ns,
                wait,
                ..
            } => {
                wait_until(worker, *busy_until_ns, *wait);
                Ok(())
            }
        }
    }
}

fn wait_until(worker: &mut Worker<'_>, moment_ns: u64, wait: GpuWait) {
    if wait == GpuWait::Block {
        return worker.sleep_until_ns(moment_ns);
    }
    while clock::now_ns() < moment_ns && worker.should_do_another_round() {
        match wait {
            GpuWait::Yield => rustix::thread::sched_yield(),
            _ => worker.spin_about_a_microsecond(),
        }
    }
}

pub(super) fn library_failure(error: LibraryError) -> WorkFailure {
    match error {
        LibraryError::NotLoaded => WorkFailure {
            step: FailingStep::LoadDriver,
            errno: Errno::NOENT,
        },
        LibraryError::Code(code) => WorkFailure {
            step: FailingStep::UseGpu,
            errno: Errno::from_raw_os_error(code),
        },
    }
}
