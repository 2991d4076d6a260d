//! A software GPU: simulated hardware, so that programs and probes can be tested where there is none.
//!
//! This package and three others make shared libraries with NVIDIA's exported names:
//!
//! | library | package | what it is |
//! |---|---|---|
//! | `libcuda.so.1` | `zernel-softgpu-cuda` | the CUDA driver API |
//! | `libnccl.so.2` | `zernel-softgpu-nccl` | collectives between processes on this machine |
//! | `libnvidia-ml.so.1` | `zernel-softgpu-nvml` | which processes use the devices, and how much |
//!
//! **Kernels compute nothing.** A kernel takes the time that the launch asks for, on a simulated clock.
//! Device memory is host memory, copies and collectives really move and reduce data, and every thread that waits
//! for the device really waits.
//!
//! # Use
//!
//! ```text
//! make softgpu                                  # or: softgpu-install [--prologue NAME] DIRECTORY
//! LD_LIBRARY_PATH=target/softgpu ./program
//! ```
//!
//! From Rust, call [`install::install_libraries`]. A package whose tests need the libraries names `zernel-softgpu-cuda`,
//! `-nccl` and `-nvml` as dev-dependencies, so that cargo builds them first.
//!
//! A program loads a module whose image is text, and passes each launch its duration:
//!
//! ```text
//! cuModuleLoadData(&module, "softgpu kernel forward\nsoftgpu kernel backward 2500000\n");
//! cuModuleGetFunction(&function, module, "forward");
//! uint64_t nanoseconds = 3000000;
//! void *parameters[] = { &nanoseconds };       // NULL: the image's duration, or 10 µs
//! cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL);
//! ```
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `ZERNEL_SOFTGPU_DIR` | the node's state, shared by its processes | one per user (below) |
//! | `ZERNEL_SOFTGPU_DEVICES` | devices of the node, 1 to 16 | 1 |
//! | `ZERNEL_SOFTGPU_MEMORY` | bytes of memory of each device | 16 GiB |
//! | `ZERNEL_SOFTGPU_CONTEXT_MEMORY` | bytes of device memory that each context takes for itself | 0 |
//! | `ZERNEL_SOFTGPU_COPY_BANDWIDTH` | speed of copies between host and device, bytes/s | 16e9 |
//! | `ZERNEL_SOFTGPU_MEMORY_BANDWIDTH` | speed of copies and fills on the device, bytes/s | 1e12 |
//! | `ZERNEL_SOFTGPU_NCCL_BANDWIDTH` | speed of collectives and messages, bytes/s | 20e9 |
//! | `ZERNEL_SOFTGPU_LOG` | directory of the [truth log](truth) | no log is written |
//! | `ZERNEL_SOFTGPU_LOG_EVENTS` | `1`: the truth log has every event besides the counts | counts only |
//! | `CUDA_VISIBLE_DEVICES` | as for the real driver: numbers or UUIDs | all |
//!
//! The node's state is in `$XDG_RUNTIME_DIR/zernel-softgpu`, or in `/dev/shm/zernel-softgpu-UID` if that variable is
//! not set. The state directory must belong to the user, and no other user may write to it; otherwise the libraries
//! refuse it. The first process on a node sets the number and the memory of the devices, which stay the same while
//! any process uses the node. The last process that ends removes the state, unless that process is killed.
//!
//! # What is simulated
//!
//! - **Time.** The device clock is CLOCK_MONOTONIC. Work in a stream starts when it was submitted
//!   or when the work before it ends, whichever is later; see [`stream`]. Kernels of different
//!   streams overlap without slowing each other down.
//! - **Waits.** Threads spin, yield or block while they wait for the device, as the flags of the context and the
//!   event say. Collectives and host functions run on a thread per stream; all other work needs no thread.
//! - **Memory.** Each device has a capacity, shared by all processes. An allocation takes
//!   exactly the bytes that the program asks for: sizes are not rounded, pools keep no freed memory, and a context
//!   takes memory only if `ZERNEL_SOFTGPU_CONTEXT_MEMORY` says so.
//! - **NCCL** launches one kernel per communicator, stream and group through the exported
//!   `cuLaunchKernelEx`, so a probe on the driver sees the launch. A collective ends when the last rank has
//!   arrived and the time to transfer its bytes has passed, but not before the data is there. If a rank dies,
//!   `ncclCommGetAsyncError` returns an error and the collective does not end until `ncclCommAbort`, as in the
//!   real library.
//! - **Prologues.** Every exported function starts with `push`, as in the real driver, where an
//!   uprobe is cheap. [`install`] can make copies that start with `endbr64`, `mov` or `sub`
//!   instead.
//!
//! # What is not simulated
//!
//! - Real kernels: an image for a real GPU loads, and its kernels take 10 µs. `libcudart` does
//!   not work with this driver, because it needs private tables of the real driver (`cuGetExportTable`).
//! - These functions are exported but return `CUDA_ERROR_NOT_SUPPORTED`: `cuGetExportTable`, `cuIpc*`,
//!   `cuMemExportToShareableHandle`, `cuMemImportFromShareableHandle`,
//!   `cuMemPoolExportToShareableHandle`, `cuMemcpy3D*`, `cuStreamAttachMemAsync`,
//!   `cuLinkCreate_v2`, `cuDeviceGetLuid`. So do functions that are asked for an event with
//!   `CU_EVENT_INTERPROCESS` or a context with an execution affinity. Allocation on a stream that captures returns
//!   `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
//! - Arrays, textures, surfaces, graphics, external semaphores, stream memory operations,
//!   conditional graph nodes.
//! - Of NCCL: 8-bit floats, user-defined reductions, non-blocking communicators (they block), windows, the
//!   device-side API, several nodes. Ranks may share a device, which the real NCCL refuses.
//! - Of NVML: MIG, energy, events, and functions that change settings.
//! - Faults: the host can read addresses of device memory without an error. Programs must not do that.
//! - Prologues on architectures other than x86-64: exported functions start as the compiler made them.

pub mod abi_arguments;
mod busy_meter;
pub mod clock;
pub mod completion;
pub mod config;
pub mod device;
pub mod driver_interface;
pub mod export;
pub mod graph;
pub mod install;
pub mod memory;
pub mod node;
pub mod process;
pub mod registry;
pub mod shared_memory;
mod state_directory;
pub mod stream;
pub mod stream_work;
mod sys;
#[cfg(test)]
mod test_directory;
pub mod truth;
pub mod virtual_memory;
