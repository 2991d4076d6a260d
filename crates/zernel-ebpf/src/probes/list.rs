// The list of probes. build.rs, mod.rs and layout.rs include this file, each with its own macro `probes!`.
// A probe is a folder of the same name. Its place in `all` is its number in the kernel.
probes! {
    all {
        /// Launches, copies and waits.
        CudaTrace = cuda_trace,
        /// The device that a thread works on.
        CudaContext = cuda_context,
        /// GPU memory.
        GpuMem = gpu_mem,
        /// Collectives.
        Nccl = nccl,
        /// Calls that only a training loop makes.
        Torch = torch,
        /// Waits for data.
        Dataload = dataload,
        /// Waits for peers.
        DistSync = dist_sync,
        /// Threads on and off their CPUs.
        Sched = sched,
    }
    // Probes that keep state in `struct zernel_process`: `struct <name>_process` of their state.bpf.h.
    process { sched, dataload }
    // Probes that keep state in `struct zernel_thread`: `struct <name>_thread` of their state.bpf.h.
    thread { sched, dataload, dist_sync, cuda_trace, cuda_context }
    // Probes with metric families of their own, in metrics.rs, in the order of the text.
    metrics { cuda_trace, nccl, gpu_mem, sched, dataload }
}
