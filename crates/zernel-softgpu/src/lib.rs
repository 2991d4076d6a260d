//! A software GPU: simulated hardware, so that programs and probes can be tested where there is none.
//!
//! This package and its three sisters make shared libraries with NVIDIA's exported names:
//!
//! | library | package | what it is |
//! |---|---|---|
//! | `libcuda.so.1` | `zernel-softgpu-cuda` | the CUDA driver API |
//! | `libnccl.so.2` | `zernel-softgpu-nccl` | collectives between processes on this machine |
//! | `libnvidia-ml.so.1` | `zernel-softgpu-nvml` | which processes use the devices, and how much |
//!
//! **Nothing is computed.** A kernel takes the time that the launch asks for, on a simulated clock.
//! Memory is real (host memory), copies and collectives really move and reduce data, and every wait
//! really waits.
//!
//! # Use
//!
//! ```text
//! make softgpu                                  # or: softgpu-install [--prologue NAME] DIRECTORY
//! LD_LIBRARY_PATH=target/softgpu ./program
//! ```
//!
//! From Rust: [`install::install_libraries`]. A package whose tests need the libraries names `zernel-softgpu-cuda`,
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
//! | `ZERNEL_SOFTGPU_MEMORY` | bytes of each | 16 GiB |
//! | `ZERNEL_SOFTGPU_CONTEXT_MEMORY` | bytes that each context takes for itself | 0 |
//! | `ZERNEL_SOFTGPU_COPY_BANDWIDTH` | host-device copies, bytes/s | 16e9 |
//! | `ZERNEL_SOFTGPU_MEMORY_BANDWIDTH` | copies and fills on the device, bytes/s | 1e12 |
//! | `ZERNEL_SOFTGPU_NCCL_BANDWIDTH` | collectives and messages, bytes/s | 20e9 |
//! | `ZERNEL_SOFTGPU_LOG` | directory of the [truth log](truth) | none is written |
//! | `ZERNEL_SOFTGPU_LOG_EVENTS` | `1`: log every event too | counts only |
//! | `CUDA_VISIBLE_DEVICES` | as for the real driver: numbers or UUIDs | all |
//!
//! The state is in `$XDG_RUNTIME_DIR/zernel-softgpu`, or in `/dev/shm/zernel-softgpu-UID` if there
//! is none. The directory must belong to the user, and no other user may write to it; any other
//! directory is refused. The first process on a node sets its devices and memory; while any process uses it they
//! stay. The last process that ends removes the state, unless it is killed.
//!
//! # What is simulated
//!
//! - **Time.** The device clock is CLOCK_MONOTONIC. Work in a stream starts when it was submitted
//!   or when the work before it ends, whichever is later; see [`stream`]. Kernels of different
//!   streams overlap without slowing each other down.
//! - **Waits** spin, yield or block, as the context's and the event's flags say. Collectives and
//!   host functions run on a thread per stream; everything else needs none.
//! - **Memory.** Each device has a capacity, shared by all processes. Bytes are counted as asked
//!   for: there is no rounding, no pool that keeps memory back, and no overhead of a context
//!   unless it is asked for.
//! - **NCCL** launches one kernel per communicator, stream and group through the exported
//!   `cuLaunchKernelEx`, so a probe on the driver sees it. A collective ends when the last rank has
//!   arrived and its bytes had their time (and not before the data is there). If a rank dies,
//!   `ncclCommGetAsyncError` says so and the collective stays until `ncclCommAbort`, as with the
//!   real one.
//! - **Prologues.** Every exported function starts with `push`, as in the real driver, where an
//!   uprobe is cheap. [`install`] can make copies that start with `endbr64`, `mov` or `sub`
//!   instead.
//!
//! # What is not
//!
//! - Real kernels: an image that is not ours loads, and its kernels take 10 µs. `libcudart` does
//!   not work on top, because it needs private tables of the real driver (`cuGetExportTable`).
//! - These are exported but return `CUDA_ERROR_NOT_SUPPORTED`: `cuGetExportTable`, `cuIpc*`,
//!   `cuMemExportToShareableHandle`, `cuMemImportFromShareableHandle`,
//!   `cuMemPoolExportToShareableHandle`, `cuMemcpy3D*`, `cuStreamAttachMemAsync`,
//!   `cuLinkCreate_v2`, `cuDeviceGetLuid`; events with `CU_EVENT_INTERPROCESS`; execution affinity
//!   of contexts; allocation on a stream that captures is refused.
//! - Arrays, textures, surfaces, graphics, external semaphores, stream memory operations,
//!   conditional graph nodes.
//! - NCCL: 8-bit floats, user-defined reductions, non-blocking communicators (they block), windows,
//!   device-side API, several nodes. Ranks may share a device, which the real one refuses.
//! - NVML: MIG, energy, events, and everything that sets something.
//! - Addresses on a device can be read by the host without an error. Do not.
//! - Architectures other than x86-64 get plain functions without prepared prologues.

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
