//! A rank: the training loop.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use rustix::time::ClockId;

use crate::driver::{Gpu, Peers};
use crate::labels::Labels;
use crate::loader::{Jitter, Loaders};
use crate::plan::Plan;
use crate::sys::{self, Priority, now_ns};
use crate::torch::Torch;
use crate::{Part, Stamp};

/// Trains, and returns the stamps of all parts.
pub(crate) fn train(directory: &Path, plan: &Plan, rank: u32) -> io::Result<Vec<Stamp>> {
    sys::die_with_parent()?;
    sys::change_priority(Priority::Rank);
    let bytes = plan.batch_bytes.max(plan.checkpoint_bytes).max(4096);
    let gpu = Gpu::open(&directory.join("lib"), rank.into(), plan, bytes)?;
    // The model is copied to the GPU before the loaders start.
    let mut model = vec![1_u8; bytes];
    gpu.copy_to(model.as_mut_ptr(), bytes)?;
    let seed = plan.seed * 1000 + u64::from(rank);
    let loaders = Loaders::fork(directory, plan, seed)?;
    (0..plan.busy_threads).for_each(|_| be_busy());
    let peers = Peers::join_communicator(&gpu, directory, rank, plan.ranks, plan.bucket_bytes)?;
    let start_torch = || Torch::start(&directory.join("lib"), gpu.launcher(), plan, seed);
    let torch = plan.torch.then(start_torch).transpose()?;
    let mut trainer = Trainer {
        torch,
        plan,
        gpu: &gpu,
        peers: &peers,
        loaders,
        jitter: Jitter::new(seed, plan.jitter),
        stamps: Vec::new(),
        labels: Labels::new(),
    };
    for step in 0..plan.steps {
        trainer.step(step)?;
        if is_due(plan.evaluate_every, step) {
            trainer.stamped(Part::Evaluation, Trainer::evaluate)?;
        }
        if is_due(plan.checkpoint_every, step) {
            let path = directory.join(format!("checkpoint-{rank}"));
            trainer.stamped(Part::Checkpoint, |trainer| trainer.checkpoint(&path))?;
        }
    }
    trainer.write_labels()?;
    let stamps = trainer.stamps;
    peers.destroy_communicator()?;
    Ok(stamps)
}

/// Keeps a CPU busy until the process exits. No other thread waits for it.
fn be_busy() {
    std::thread::spawn(|| {
        sys::set_priority(Priority::Last);
        loop {
            std::hint::spin_loop();
        }
    });
}

fn is_due(every: u32, step: u32) -> bool {
    every > 0 && (step + 1).is_multiple_of(every)
}

struct Trainer<'a> {
    torch: Option<Torch>,
    plan: &'a Plan,
    gpu: &'a Gpu,
    peers: &'a Peers<'a>,
    loaders: Loaders,
    jitter: Jitter,
    stamps: Vec<Stamp>,
    labels: Labels,
}

impl Trainer<'_> {
    fn write_labels(&self) -> io::Result<()> {
        let absent: &[&str] = match self.plan.ranks {
            1 => &["NcclCollective"],
            _ => &[],
        };
        let name = self.plan.cause.name();
        self.labels.write(&format!("testjob-{name}"), name, absent)
    }

    /// Does something under a label.
    fn labelled<T>(&mut self, label: &'static str, act: impl FnOnce(&mut Self) -> T) -> T {
        self.labels.stamp(label);
        let done = act(self);
        self.labels.stamp("-");
        done
    }

    fn stamped(
        &mut self,
        part: Part,
        act: impl FnOnce(&mut Self) -> io::Result<()>,
    ) -> io::Result<()> {
        let start_ns = now_ns(ClockId::Monotonic);
        match part {
            Part::WarmUp | Part::Step => {
                self.labelled("+step", |trainer| trainer.labelled("+host", act))?;
            }
            Part::Data => self.labelled("+data", act)?,
            Part::Update => self.labelled("+optimizer", act)?,
            Part::Evaluation => self.labelled("+evaluation", act)?,
            Part::Checkpoint => self.labelled("+checkpoint", act)?,
        }
        let end_ns = now_ns(ClockId::Monotonic);
        self.stamps.push(Stamp {
            part,
            start_ns,
            end_ns,
        });
        Ok(())
    }

    fn step(&mut self, step: u32) -> io::Result<()> {
        if step >= self.plan.warm_up_steps {
            return self.stamped(Part::Step, Self::optimize);
        }
        self.stamped(Part::WarmUp, |trainer| {
            sys::burn(trainer.jitter.duration_around(trainer.plan.warm_up_us));
            trainer.optimize()
        })
    }

    /// Announces a part of the loop, if it is one of `PyTorch`.
    fn announce(&self, name: &str) -> io::Result<()> {
        match &self.torch {
            Some(torch) => torch.announce(name),
            None => Ok(()),
        }
    }

    fn optimize(&mut self) -> io::Result<()> {
        if self.plan.infers {
            self.launch(self.plan.launches)?;
            return self.read_loss();
        }
        let last = self.plan.accumulate - 1;
        for micro_batch in 0..=last {
            self.forward()?;
            let reduces = self.plan.overlaps && micro_batch == last;
            self.labelled("+backward", |trainer| trainer.backward(reduces))?;
        }
        if !self.plan.overlaps {
            self.read_loss()?;
            for _ in 0..self.plan.buckets {
                self.peers.reduce(self.plan.bucket_bytes)?;
            }
            self.peers.join_stream()?;
            // Reads the norm of the gradients, or whether they are finite. The GPU only reduces meanwhile.
            self.labelled("+peer", Self::read)?;
        }
        self.stamped(Part::Update, |trainer| {
            trainer.announce("Optimizer.step#AdamW.step")?;
            trainer.launch(trainer.plan.optimizer_launches)?;
            trainer.announce("Optimizer.zero_grad#AdamW.zero_grad")
        })?;
        match self.plan.overlaps {
            true => self.read_loss(),
            false => Ok(()),
        }
    }

    fn forward(&mut self) -> io::Result<()> {
        let (gpu, bytes) = (self.gpu, self.plan.batch_bytes);
        let mut copied = Ok(());
        self.announce("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")?;
        let start_ns = now_ns(ClockId::Monotonic);
        let mut end_ns = start_ns;
        let labels = &mut self.labels;
        labels.stamp("+data");
        self.loaders.next(|batch| {
            labels.stamp("-");
            end_ns = now_ns(ClockId::Monotonic);
            labels.stamp("+gpu");
            copied = gpu.copy_to(batch, bytes);
            labels.stamp("-");
        })?;
        copied?;
        let part = Part::Data;
        self.stamps.push(Stamp {
            part,
            start_ns,
            end_ns,
        });
        self.labelled("+forward", |trainer| trainer.launch(trainer.plan.launches))
    }

    /// Runs a backward pass. As in DDP, each bucket is reduced right after its gradients.
    fn backward(&mut self, reduces: bool) -> io::Result<()> {
        let launches = 2 * self.plan.launches;
        if let Some(torch) = &self.torch {
            return torch.backward(launches);
        }
        if !reduces {
            return self.launch(launches);
        }
        for bucket in 0..self.plan.buckets {
            let until = launches * (bucket + 1) / self.plan.buckets;
            self.launch(until - launches * bucket / self.plan.buckets)?;
            self.peers.reduce(self.plan.bucket_bytes)?;
        }
        self.peers.join_stream()
    }

    fn launch(&mut self, launches: u32) -> io::Result<()> {
        for _ in 0..launches {
            sys::burn(self.jitter.duration_around(self.plan.launch_us));
            self.gpu
                .launch(self.jitter.duration_around(self.plan.kernel_us))?;
        }
        Ok(())
    }

    fn read_loss(&mut self) -> io::Result<()> {
        self.labelled("+gpu", Self::read)
    }

    fn read(&mut self) -> io::Result<()> {
        self.gpu.read(size_of::<f32>(), |_| {})
    }

    fn evaluate(&mut self) -> io::Result<()> {
        for _ in 0..self.plan.evaluate_batches {
            self.forward()?;
            self.read_loss()?;
        }
        Ok(())
    }

    fn checkpoint(&mut self, path: &Path) -> io::Result<()> {
        const PIECE: usize = 64 << 10;
        let mut file = File::create(path)?;
        let mut left = self.plan.checkpoint_bytes;
        while left > 0 {
            let bytes = left.min(PIECE);
            let mut written = Ok(());
            self.gpu
                .read(bytes, |piece| written = file.write_all(piece))?;
            written?;
            left -= bytes;
        }
        file.sync_all()
    }
}
