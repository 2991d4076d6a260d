// The list of probes. The build script and the probes of zernel-ebpf, and the snapshot of zernel-model include this file.
// `for_each_probe!(callback)` passes the list to a macro of their own.
//
// A probe is a folder of zernel-ebpf/src/probes. Its place in `all` is its number in the kernel.
macro_rules! for_each_probe {
    ($callback:ident) => {
        $callback! {
            all {
                /// Observes launches, copies and waits for the GPU.
                CudaTrace = cuda_trace,
                /// Observes which device a thread works on.
                CudaContext = cuda_context,
                /// Observes GPU memory.
                GpuMem = gpu_mem,
                /// Observes collectives.
                Nccl = nccl,
                /// Observes calls that only a training loop makes.
                Torch = torch,
                /// Observes waits for data.
                Dataload = dataload,
                /// Observes waits for peers.
                DistSync = dist_sync,
                /// Observes when threads run on a CPU, and when they do not.
                Sched = sched,
            }
            // Probes that keep state in `struct zernel_process`: `struct <name>_process` of their state.bpf.h. The type is its
            // mirror in state.rs, and also the state of the probe in userspace.
            process { sched: SchedulingTimes, dataload: DataWaitCauses, dist_sync: PeerWaits, torch: CompileTimes }
            // Probes that keep state in `struct zernel_thread`: `struct <name>_thread` of their state.bpf.h.
            thread { sched, dataload, dist_sync, cuda_trace, cuda_context, torch }
            // Probes whose userspace part keeps state per process and describes it in a snapshot: the type of the state, and
            // the type of the snapshot's part in zernel-model/src/snapshot/<name>.rs.
            snapshot {
                cuda_trace: CudaCalls => CudaSnapshot,
                gpu_mem: GpuMemory => MemorySnapshot,
                nccl: Communicators => NcclSnapshot,
                torch: CompileTimes => TorchSnapshot,
                dataload: DataWaitCauses => DataloadSnapshot,
                dist_sync: PeerWaits => PeerWaitSnapshot,
                sched: SchedulingTimes => SchedSnapshot,
            }
            // Probes with BPF maps of their own that userspace reads: `read_maps` and `delete_entries`.
            maps { gpu_mem, nccl }
            // Probes with metric families of their own, in the order of the text: the rows `COUNTERS` of their state, then the
            // families of their metrics.rs.
            metrics { cuda_trace, nccl, gpu_mem, sched, dataload, torch }
        }
    };
}
