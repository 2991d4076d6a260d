//! The software GPU's libraries, as a rank calls them.

use std::cell::RefCell;
use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io, ptr, thread};

use libloading::Library;

use crate::plan::JobPlan;

/// Calls an exported function with integer arguments. Returns an error unless the result is 0.
macro_rules! call {
    ($library:expr, $name:literal $(, $argument:expr)*) => {{
        // SAFETY: the software GPU's functions take integers and pointers, as the real ones do.
        let result = unsafe {
            let name = concat!($name, "\0").as_bytes();
            let function: libloading::Symbol<'_, unsafe extern "C" fn($(as_word!($argument)),*) -> i32> =
                $library.get(name).map_err(io::Error::other)?;
            function($($argument as u64),*)
        };
        match result {
            0 => Ok::<(), io::Error>(()),
            code => Err(io::Error::other(format!("{} failed with code {code}", $name))),
        }
    }};
}

macro_rules! as_word {
    ($argument:expr) => {
        u64
    };
}

/// The address of a value, as the place where a function stores its result.
fn out_pointer<T>(value: &mut T) -> *mut c_void {
    ptr::from_mut(value).cast()
}

const SOFTGPU_KERNEL_NAME: &std::ffi::CStr = c"layer";
const SOFTGPU_MODULE_IMAGE: &std::ffi::CStr = c"softgpu kernel layer\n";
const CONTEXT_BLOCKING_SYNC: u64 = 4;
const STREAM_NON_BLOCKING: u64 = 1;
const NCCL_FLOAT: u64 = 7;
const NCCL_SUM: u64 = 0;

/// The GPU of a rank: its context, a kernel, and memory on the device and on the host.
pub(crate) struct RankGpu {
    cuda: Arc<Library>,
    context: u64,
    kernel: u64,
    /// Device memory, to which a batch is copied and from which a loss and a checkpoint are read back.
    memory: u64,
    /// Host memory that the data read back from the GPU is copied to.
    host: HostMemory,
}

/// Host memory for copies: pinned by the driver, or ordinary (pageable) memory.
enum HostMemory {
    Pinned { address: u64, bytes: usize },
    Pageable(RefCell<Vec<u8>>),
}

impl RankGpu {
    pub(crate) fn open(
        libraries: &Path,
        device: u64,
        plan: &JobPlan,
        bytes: usize,
    ) -> io::Result<Self> {
        let cuda = Arc::new(load_library(libraries, "libcuda.so.1")?);
        let (mut context, mut module, mut kernel) = (0_u64, 0_u64, 0_u64);
        let (mut memory, mut address) = (0_u64, 0_u64);
        call!(cuda, "cuInit", 0)?;
        if !plan.spins_for_gpu {
            call!(
                cuda,
                "cuDevicePrimaryCtxSetFlags_v2",
                device,
                CONTEXT_BLOCKING_SYNC
            )?;
        }
        call!(
            cuda,
            "cuDevicePrimaryCtxRetain",
            out_pointer(&mut context),
            device
        )?;
        call!(cuda, "cuCtxSetCurrent", context)?;
        call!(
            cuda,
            "cuModuleLoadData",
            out_pointer(&mut module),
            SOFTGPU_MODULE_IMAGE.as_ptr()
        )?;
        let (module, name) = (module, SOFTGPU_KERNEL_NAME.as_ptr());
        call!(
            cuda,
            "cuModuleGetFunction",
            out_pointer(&mut kernel),
            module,
            name
        )?;
        call!(cuda, "cuMemAlloc_v2", out_pointer(&mut memory), bytes)?;
        let host = match plan.pins_host_memory {
            true => {
                call!(cuda, "cuMemAllocHost_v2", out_pointer(&mut address), bytes)?;
                HostMemory::Pinned { address, bytes }
            }
            false => HostMemory::Pageable(RefCell::new(vec![0; bytes])),
        };
        Ok(Self {
            cuda,
            context,
            kernel,
            memory,
            host,
        })
    }

    /// Makes a launcher, by which this thread or another one can launch kernels.
    pub(crate) fn new_launcher(&self) -> KernelLauncher {
        KernelLauncher {
            cuda: Arc::clone(&self.cuda),
            context: self.context,
            kernel: self.kernel,
        }
    }

    /// Launches a kernel that takes the time `duration` on the GPU.
    pub(crate) fn launch(&self, duration: Duration) -> io::Result<()> {
        self.new_launcher().launch(duration)
    }

    /// Copies a batch to the GPU. The batch is in pageable memory, so the copy is waited for.
    pub(crate) fn copy_batch_to_gpu(&self, batch: *mut u8, bytes: usize) -> io::Result<()> {
        call!(
            self.cuda,
            "cuMemcpyHtoDAsync_v2",
            self.memory,
            batch,
            bytes,
            0
        )?;
        self.synchronize()
    }

    /// Reads `bytes` bytes back from the GPU after all work that was submitted before, and passes them to `take`.
    pub(crate) fn read(&self, bytes: usize, take: impl FnOnce(&[u8])) -> io::Result<()> {
        match &self.host {
            HostMemory::Pageable(buffer) => {
                let mut buffer = buffer.borrow_mut();
                let buffer = &mut buffer[..bytes];
                self.copy_from_gpu(buffer.as_mut_ptr() as u64, bytes)?;
                take(buffer);
            }
            HostMemory::Pinned {
                address,
                bytes: all,
            } => {
                assert!(bytes <= *all, "no more than there is");
                self.copy_from_gpu(*address, bytes)?;
                // SAFETY: the allocation has at least `bytes` bytes, and the GPU no longer uses them.
                take(unsafe { std::slice::from_raw_parts(*address as *const u8, bytes) });
            }
        }
        Ok(())
    }

    fn copy_from_gpu(&self, address: u64, bytes: usize) -> io::Result<()> {
        let from = self.memory;
        call!(self.cuda, "cuMemcpyDtoHAsync_v2", address, from, bytes, 0)?;
        self.synchronize()
    }

    fn synchronize(&self) -> io::Result<()> {
        call!(self.cuda, "cuStreamSynchronize", 0)
    }
}

/// What a thread needs to launch kernels.
pub(crate) struct KernelLauncher {
    cuda: Arc<Library>,
    context: u64,
    kernel: u64,
}

impl KernelLauncher {
    /// Lets the calling thread use the GPU.
    pub(crate) fn make_context_current(&self) -> io::Result<()> {
        call!(self.cuda, "cuCtxSetCurrent", self.context)
    }

    /// Launches a kernel that takes the time `duration` on the GPU.
    pub(crate) fn launch(&self, duration: Duration) -> io::Result<()> {
        let duration_ns = duration.as_nanos() as u64;
        let parameters = [&raw const duration_ns];
        let parameters = parameters.as_ptr();
        call!(
            self.cuda,
            "cuLaunchKernel",
            self.kernel,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            0,
            parameters,
            0
        )
    }
}

fn load_library(libraries: &Path, name: &str) -> io::Result<Library> {
    // SAFETY: loading the software GPU runs no code of its own.
    unsafe { Library::new(libraries.join(name)) }.map_err(io::Error::other)
}

/// `ncclUniqueId`, which is passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([u8; 128]);

/// The communicator of a rank, with a stream of its own for reductions, as DDP has.
pub(crate) struct RankCommunicator<'a> {
    gpu: &'a RankGpu,
    nccl: Library,
    communicator: u64,
    stream: u64,
    event: u64,
    gradients: u64,
}

impl<'a> RankCommunicator<'a> {
    pub(crate) fn join_communicator(
        gpu: &'a RankGpu,
        directory: &Path,
        rank: u32,
        ranks: u32,
        bucket_bytes: u64,
    ) -> io::Result<Self> {
        let nccl = load_library(&directory.join("lib"), "libnccl.so.2")?;
        let (mut stream, mut event, mut gradients) = (0_u64, 0_u64, 0_u64);
        call!(
            gpu.cuda,
            "cuStreamCreate",
            out_pointer(&mut stream),
            STREAM_NON_BLOCKING
        )?;
        call!(gpu.cuda, "cuEventCreate", out_pointer(&mut event), 0)?;
        call!(
            gpu.cuda,
            "cuMemAlloc_v2",
            out_pointer(&mut gradients),
            bucket_bytes
        )?;
        let communicator =
            create_nccl_communicator(&nccl, &directory.join("meeting"), rank, ranks)?;
        Ok(Self {
            gpu,
            nccl,
            communicator,
            stream,
            event,
            gradients,
        })
    }

    /// Starts the reduction of a bucket of gradients, which runs after all earlier launches.
    pub(crate) fn reduce_bucket(&self, bytes: u64) -> io::Result<()> {
        let cuda = &self.gpu.cuda;
        call!(cuda, "cuEventRecord", self.event, 0)?;
        call!(cuda, "cuStreamWaitEvent", self.stream, self.event, 0)?;
        let (buffer, elements) = (self.gradients, bytes / 4);
        let (communicator, stream) = (self.communicator, self.stream);
        call!(
            self.nccl,
            "ncclAllReduce",
            buffer,
            buffer,
            elements,
            NCCL_FLOAT,
            NCCL_SUM,
            communicator,
            stream
        )
    }

    /// Makes later launches wait for all reductions that were started so far.
    pub(crate) fn wait_for_reductions(&self) -> io::Result<()> {
        let cuda = &self.gpu.cuda;
        call!(cuda, "cuEventRecord", self.event, self.stream)?;
        call!(cuda, "cuStreamWaitEvent", 0, self.event, 0)
    }

    pub(crate) fn destroy_communicator(self) -> io::Result<()> {
        call!(self.nccl, "ncclCommDestroy", self.communicator)
    }
}

fn create_nccl_communicator(
    nccl: &Library,
    meeting: &Path,
    rank: u32,
    ranks: u32,
) -> io::Result<u64> {
    let mut id = UniqueId([0; 128]);
    if rank == 0 {
        call!(nccl, "ncclGetUniqueId", out_pointer(&mut id))?;
        fs::write(meeting.with_extension("new"), id.0)?;
        fs::rename(meeting.with_extension("new"), meeting)?;
    } else {
        while !meeting.exists() {
            thread::sleep(Duration::from_millis(1));
        }
        let read = fs::read(meeting)?;
        id.0 = read
            .try_into()
            .map_err(|_| io::Error::other("no id of NCCL"))?;
    }
    type InitRankFunction = unsafe extern "C" fn(*mut u64, i32, UniqueId, i32) -> i32;
    let mut communicator = 0;
    // SAFETY: this is the signature of ncclCommInitRank.
    let result = unsafe {
        let init = nccl
            .get::<InitRankFunction>(b"ncclCommInitRank\0")
            .map_err(io::Error::other)?;
        init(&raw mut communicator, ranks as i32, id, rank as i32)
    };
    match result {
        0 => Ok(communicator),
        code => Err(io::Error::other(format!(
            "ncclCommInitRank failed with code {code}"
        ))),
    }
}
