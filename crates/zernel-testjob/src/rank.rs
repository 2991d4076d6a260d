//! The training loop of a rank.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use rustix::time::ClockId;

use crate::driver::{RankCommunicator, RankGpu};
use crate::labels::ThreadLabels;
use crate::loader::{DurationJitter, RankLoaders};
use crate::plan::JobPlan;
use crate::sys::{self, ThreadPriority, now_ns};
use crate::torch::{OPTIMIZER_STEP, TorchAnnouncer, load_torch_library};
use crate::{JobPart, PartStamp};

/// Runs the training loop of a rank, and returns the stamps of all its parts.
pub(crate) fn train_rank(
    directory: &Path,
    plan: &JobPlan,
    rank: u32,
) -> io::Result<Vec<PartStamp>> {
    sys::die_with_parent()?;
    sys::change_priority(ThreadPriority::Rank);
    // A program imports PyTorch before it uses the GPU.
    let load_torch = || load_torch_library(&directory.join("lib"));
    let _torch_library = plan.announces_as_pytorch.then(load_torch).transpose()?;
    let bytes = plan.batch_bytes.max(plan.checkpoint_bytes).max(4096);
    let gpu = RankGpu::open(&directory.join("lib"), rank.into(), plan, bytes)?;
    // This copies the model to the GPU before the loaders start.
    let mut model = vec![1_u8; bytes];
    gpu.copy_batch_to_gpu(model.as_mut_ptr(), bytes)?;
    let seed = plan.seed * 1000 + u64::from(rank);
    let loaders = RankLoaders::fork(directory, plan, seed)?;
    (0..plan.busy_threads).for_each(|_| spin_until_exit());
    let peers =
        RankCommunicator::join_communicator(&gpu, directory, rank, plan.ranks, plan.bucket_bytes)?;
    let start_torch =
        || TorchAnnouncer::start(&directory.join("lib"), gpu.new_launcher(), plan, seed);
    let torch = plan.announces_as_pytorch.then(start_torch).transpose()?;
    let mut trainer = TrainingLoop {
        torch,
        plan,
        gpu: &gpu,
        peers: &peers,
        loaders,
        jitter: DurationJitter::new(seed, plan.jitter),
        stamps: Vec::new(),
        labels: ThreadLabels::new(),
    };
    for step in 0..plan.steps {
        trainer.train_step(step)?;
        if is_end_of_interval(plan.evaluate_every, step) {
            trainer.run_and_stamp_part(JobPart::Evaluation, TrainingLoop::evaluate)?;
        }
        if is_end_of_interval(plan.checkpoint_every, step) {
            let path = directory.join(format!("checkpoint-{rank}"));
            trainer.run_and_stamp_part(JobPart::Checkpoint, |trainer| {
                trainer.write_checkpoint(&path)
            })?;
        }
    }
    trainer.write_labels()?;
    let stamps = trainer.stamps;
    peers.destroy_communicator()?;
    Ok(stamps)
}

/// Keeps a CPU busy until the process exits. No other thread waits for it.
fn spin_until_exit() {
    std::thread::spawn(|| {
        sys::set_priority(ThreadPriority::SchedIdle);
        loop {
            std::hint::spin_loop();
        }
    });
}

fn is_end_of_interval(every: u32, step: u32) -> bool {
    every > 0 && (step + 1).is_multiple_of(every)
}

struct TrainingLoop<'a> {
    torch: Option<TorchAnnouncer>,
    plan: &'a JobPlan,
    gpu: &'a RankGpu,
    peers: &'a RankCommunicator<'a>,
    loaders: RankLoaders,
    jitter: DurationJitter,
    stamps: Vec<PartStamp>,
    labels: ThreadLabels,
}

impl TrainingLoop<'_> {
    fn write_labels(&self) -> io::Result<()> {
        let absent: &[&str] = match self.plan.ranks {
            1 => &["NcclCollective"],
            _ => &[],
        };
        let name = self.plan.cause.name();
        self.labels
            .write_log(&format!("testjob-{name}"), name, absent)
    }

    /// Runs `act` under a label in the stamp log.
    fn run_under_label<T>(&mut self, label: &'static str, act: impl FnOnce(&mut Self) -> T) -> T {
        self.labels.stamp(label);
        let done = act(self);
        self.labels.stamp("-");
        done
    }

    fn run_and_stamp_part(
        &mut self,
        part: JobPart,
        act: impl FnOnce(&mut Self) -> io::Result<()>,
    ) -> io::Result<()> {
        let start_ns = now_ns(ClockId::Monotonic);
        match part {
            JobPart::WarmUp | JobPart::Step => {
                self.run_under_label("+step", |trainer| trainer.run_under_label("+host", act))?;
            }
            JobPart::Data => self.run_under_label("+data", act)?,
            JobPart::Update => self.run_under_label("+optimizer", act)?,
            JobPart::Evaluation => self.run_under_label("+evaluation", act)?,
            JobPart::Checkpoint => self.run_under_label("+checkpoint", act)?,
        }
        let end_ns = now_ns(ClockId::Monotonic);
        self.stamps.push(PartStamp {
            part,
            start_ns,
            end_ns,
        });
        Ok(())
    }

    fn train_step(&mut self, step: u32) -> io::Result<()> {
        if step >= self.plan.warm_up_steps {
            return self.run_and_stamp_part(JobPart::Step, Self::run_optimizer_step);
        }
        self.run_and_stamp_part(JobPart::WarmUp, |trainer| {
            sys::burn_cpu(trainer.jitter.duration_around(trainer.plan.warm_up_us));
            trainer.run_optimizer_step()
        })
    }

    /// Announces the start of a part of the loop, if the job behaves like a loop of `PyTorch`.
    fn announce_part(&self, name: &str) -> io::Result<()> {
        match &self.torch {
            Some(torch) => torch.announce_part(name),
            None => Ok(()),
        }
    }

    /// Announces the end of a part of the loop, if the rank has no loaders. With loaders, ends are not announced, as in
    /// older versions of `PyTorch`.
    fn announce_end_of_part(&self) -> io::Result<()> {
        match &self.torch {
            Some(torch) if self.plan.loaders == 0 => torch.announce_end_of_part(),
            _ => Ok(()),
        }
    }

    fn run_optimizer_step(&mut self) -> io::Result<()> {
        if self.plan.only_infers {
            if let Some(torch) = self.torch.as_ref().filter(|_| self.plan.has_layers) {
                torch.call_layer()?;
            }
            self.launch(self.plan.launches)?;
            return self.read_loss();
        }
        let last = self.plan.micro_batches_per_step - 1;
        for micro_batch in 0..=last {
            self.run_forward_pass()?;
            let reduces = self.plan.overlaps_reductions && micro_batch == last;
            self.run_under_label("+backward", |trainer| trainer.run_backward_pass(reduces))?;
        }
        if !self.plan.overlaps_reductions {
            self.read_loss()?;
            for _ in 0..self.plan.buckets {
                self.peers.reduce_bucket(self.plan.bucket_bytes)?;
            }
            self.peers.wait_for_reductions()?;
            // The training thread reads the norm of the gradients, or whether they are finite. Meanwhile the GPU has
            // only reductions to run.
            self.run_under_label("+peer", Self::read_one_float)?;
        }
        if self.plan.updates_in_backward {
            return Ok(());
        }
        self.run_and_stamp_part(JobPart::Update, |trainer| {
            trainer.announce_part(OPTIMIZER_STEP)?;
            trainer.launch(trainer.plan.optimizer_launches)?;
            trainer.announce_end_of_part()?;
            trainer.announce_part("Optimizer.zero_grad#AdamW.zero_grad")?;
            trainer.announce_end_of_part()
        })?;
        match self.plan.overlaps_reductions {
            true => self.read_loss(),
            false => Ok(()),
        }
    }

    fn run_forward_pass(&mut self) -> io::Result<()> {
        match self.plan.loaders {
            0 => self.prepare_batch()?,
            _ => self.take_batch_of_loader()?,
        }
        self.run_under_label("+forward", |trainer| trainer.launch(trainer.plan.launches))
    }

    /// Prepares a batch on the training thread, as a loop without a `DataLoader` does. The thread announces nothing
    /// meanwhile.
    fn prepare_batch(&mut self) -> io::Result<()> {
        self.run_and_stamp_part(JobPart::Data, |trainer| {
            sys::burn_cpu(trainer.jitter.duration_around(trainer.plan.load_us));
            Ok(())
        })?;
        let batch = self.loaders.batch_buffer_of_training_thread();
        self.run_under_label("+gpu", |trainer| {
            trainer
                .gpu
                .copy_batch_to_gpu(batch, trainer.plan.batch_bytes)
        })
    }

    fn take_batch_of_loader(&mut self) -> io::Result<()> {
        let (gpu, bytes) = (self.gpu, self.plan.batch_bytes);
        let mut copied = Ok(());
        self.announce_part("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")?;
        let start_ns = now_ns(ClockId::Monotonic);
        let mut end_ns = start_ns;
        let labels = &mut self.labels;
        labels.stamp("+data");
        self.loaders.take_next_batch(|batch| {
            labels.stamp("-");
            end_ns = now_ns(ClockId::Monotonic);
            labels.stamp("+gpu");
            copied = gpu.copy_batch_to_gpu(batch, bytes);
            labels.stamp("-");
        })?;
        copied?;
        let part = JobPart::Data;
        self.stamps.push(PartStamp {
            part,
            start_ns,
            end_ns,
        });
        Ok(())
    }

    /// Runs a backward pass. As in DDP, each bucket of gradients is reduced as soon as it is computed.
    fn run_backward_pass(&mut self, reduces: bool) -> io::Result<()> {
        let launches = 2 * self.plan.launches;
        if let Some(torch) = &self.torch {
            return torch.run_backward_pass(launches);
        }
        if !reduces {
            return self.launch(launches);
        }
        for bucket in 0..self.plan.buckets {
            let until = launches * (bucket + 1) / self.plan.buckets;
            self.launch(until - launches * bucket / self.plan.buckets)?;
            self.peers.reduce_bucket(self.plan.bucket_bytes)?;
        }
        self.peers.wait_for_reductions()
    }

    fn launch(&mut self, launches: u32) -> io::Result<()> {
        for _ in 0..launches {
            sys::burn_cpu(self.jitter.duration_around(self.plan.launch_us));
            self.gpu
                .launch(self.jitter.duration_around(self.plan.kernel_us))?;
        }
        Ok(())
    }

    fn read_loss(&mut self) -> io::Result<()> {
        self.run_under_label("+gpu", Self::read_one_float)
    }

    fn read_one_float(&mut self) -> io::Result<()> {
        self.gpu.read(size_of::<f32>(), |_| {})
    }

    fn evaluate(&mut self) -> io::Result<()> {
        for _ in 0..self.plan.evaluate_batches {
            self.run_forward_pass()?;
            self.read_loss()?;
        }
        Ok(())
    }

    fn write_checkpoint(&mut self, path: &Path) -> io::Result<()> {
        const CHECKPOINT_PIECE_BYTES: usize = 64 << 10;
        let mut file = File::create(path)?;
        let mut left = self.plan.checkpoint_bytes;
        while left > 0 {
            let bytes = left.min(CHECKPOINT_PIECE_BYTES);
            let mut written = Ok(());
            self.gpu
                .read(bytes, |piece| written = file.write_all(piece))?;
            written?;
            left -= bytes;
        }
        file.sync_all()
    }
}
