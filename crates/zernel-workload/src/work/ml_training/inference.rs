//! An inference server: requests arrive at fixed moments, and each is a few launches and a wait for the GPU.

use super::super::{Work, WorkTypeInfo};
use super::{GPU_COMPUTE_PHASE, GpuBackend, GpuWait, MAX_TRACED_STEPS, MlTraining, TrainerGpu};
use crate::clock::{self, us_to_ns};
use crate::spec_keys::spec_table;
use crate::worker::{WorkFailure, Worker};

spec_table! {
    /// See [`WorkType::Inference`](crate::WorkType::Inference).
    #[derive(Eq)]
    pub struct Inference {
        /// Time between two requests, at least 1.
        pub period_us: u64 = 5_000,
        /// Size of the copy to the GPU per request, 1 KiB to 1 TiB.
        pub copy_kib: usize = 16,
        /// Kernel launches per request.
        pub launches: u32 = 20,
        /// CPU time that the server uses before each launch.
        pub launch_us: u64 = 10,
        /// GPU time of all kernels of a request together.
        pub gpu_us: u64 = 500,
        /// How the server waits for the GPU.
        pub gpu_wait: GpuWait = GpuWait::Block,
        /// How the GPU work of the server is done: as time on the CPU's clock, or by a CUDA driver.
        pub gpu: GpuBackend = GpuBackend::CpuTime,
        /// Requests whose time from arrival to answer is recorded, at most 1000000.
        pub traced_requests: usize = 1_000,
    }
}

impl Work for Inference {
    fn work_type_info(&self) -> WorkTypeInfo {
        WorkTypeInfo {
            name: "inference",
            does: "serves requests that arrive at fixed moments: copies, launches, waits for the GPU, and counts a unit for each request",
            exercises: "the latency of a request: the wake-up at its arrival, launches without a pause, the wake-up after the GPU",
        }
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        if self.period_us == 0 {
            let problem = "a period of 0 never ends; use at least 1";
            return Err(("work.period_us", problem.to_owned()));
        }
        if self.traced_requests > MAX_TRACED_STEPS {
            let problem = format!(
                "{} is too many; use 0 to {MAX_TRACED_STEPS}",
                self.traced_requests
            );
            return Err(("work.traced_requests", problem));
        }
        super::super::check_kib("work.copy_kib", self.copy_kib)?;
        self.gpu.check()
    }

    fn trace_capacity(&self, _team_index: usize) -> usize {
        self.traced_requests
    }

    fn run_worker_rounds(&self, worker: &mut Worker<'_>) -> Result<(), WorkFailure> {
        let _ = rustix::thread::set_name(c"inference");
        let mut gpu = TrainerGpu::open(&self.gpu_settings(), worker.index())?;
        let period_ns = us_to_ns(self.period_us);
        let mut arrival_ns = clock::now_ns().saturating_add(period_ns);
        let mut request = 0;
        while worker.should_do_another_round() {
            // A request that arrived while another was served has waited since its arrival.
            worker.sleep_until_ns(arrival_ns);
            if worker.is_stopped() {
                break;
            }
            self.serve_requests(worker, &mut gpu)?;
            worker.trace_interval(request, GPU_COMPUTE_PHASE, arrival_ns, clock::now_ns());
            worker.count_round(1);
            request += 1;
            arrival_ns = arrival_ns.saturating_add(period_ns);
        }
        Ok(())
    }
}

impl Inference {
    fn gpu_settings(&self) -> MlTraining {
        MlTraining {
            copy_kib: self.copy_kib,
            gpu_wait: self.gpu_wait,
            gpu: self.gpu.clone(),
            ..MlTraining::default()
        }
    }

    fn serve_requests(
        &self,
        worker: &mut Worker<'_>,
        gpu: &mut TrainerGpu,
    ) -> Result<(), WorkFailure> {
        gpu.copy_batch(worker)?;
        for _ in 0..self.launches {
            worker.burn_cpu_ns(us_to_ns(self.launch_us));
            gpu.launch_kernel(us_to_ns(self.gpu_us) / u64::from(self.launches.max(1)))?;
        }
        gpu.synchronize(worker)
    }
}
