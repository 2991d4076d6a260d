//! Loaders like PyTorch's: children of the rank. A rank requests a batch through a pipe. The loader writes the batch to
//! shared memory and announces it through another pipe.

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::path::Path;
use std::time::Duration;

use crate::plan::{JobPlan, LoadMethod};
use crate::storage::{RemoteStorage, UncachedFile};
use crate::sys::{self, SharedMemory, ThreadPriority};

/// The loader processes of a rank, and the memory that they share with it.
pub(crate) struct RankLoaders {
    loader_processes: Vec<LoaderProcess>,
    batches: SharedMemory,
    batch_bytes: usize,
    used_batch_count: usize,
}

struct LoaderProcess {
    batch_orders: PipeWriter,
    results: PipeReader,
}

impl RankLoaders {
    /// Forks the loaders of a rank, and requests the first batches from them.
    pub(crate) fn fork(directory: &Path, plan: &JobPlan, seed: u64) -> io::Result<Self> {
        let slots = (plan.loaders * plan.prefetch).max(1);
        let batches = SharedMemory::new(slots * plan.batch_bytes)?;
        let mut each = Vec::new();
        for number in 0..plan.loaders {
            let (batch_orders, order) = io::pipe()?;
            let (results, result) = io::pipe()?;
            let seed = seed * 100 + number as u64;
            sys::fork_child(|| {
                run_loader_process(directory, plan, seed, &batches, batch_orders, result)
            })?;
            each.push(LoaderProcess {
                batch_orders: order,
                results,
            });
        }
        let mut loaders = Self {
            loader_processes: each,
            batches,
            batch_bytes: plan.batch_bytes,
            used_batch_count: 0,
        };
        for slot in 0..plan.loaders * plan.prefetch {
            loaders.request_batch(slot % plan.loaders, slot)?;
        }
        Ok(loaders)
    }

    fn request_batch(&mut self, loader: usize, slot: usize) -> io::Result<()> {
        self.loader_processes[loader]
            .batch_orders
            .write_all(&[slot as u8])
    }

    /// The memory into which a rank without loaders writes its batches.
    pub(crate) fn batch_buffer_of_training_thread(&self) -> *mut u8 {
        self.batches.address_of_range(0, self.batch_bytes)
    }

    /// Waits for the next batch, passes its address to `take`, and requests another batch.
    pub(crate) fn take_next_batch(&mut self, take: impl FnOnce(*mut u8)) -> io::Result<()> {
        let loader = self.used_batch_count % self.loader_processes.len();
        self.used_batch_count += 1;
        let results = &mut self.loader_processes[loader].results;
        sys::wait_until_readable(results)?;
        let mut slot = [0];
        results.read_exact(&mut slot)?;
        let slot = usize::from(slot[0]);
        take(
            self.batches
                .address_of_range(slot * self.batch_bytes, self.batch_bytes),
        );
        self.request_batch(loader, slot)
    }
}

/// The main loop of a loader process: loads a batch for each request.
fn run_loader_process(
    directory: &Path,
    plan: &JobPlan,
    seed: u64,
    batches: &SharedMemory,
    mut batch_orders: PipeReader,
    mut results: PipeWriter,
) -> io::Result<()> {
    sys::change_priority(ThreadPriority::Loader);
    let mut source = LoaderDataSource::open(directory, plan.load_method)?;
    let mut random = DurationJitter::new(seed, plan.jitter);
    let mut slot = [0];
    while batch_orders.read_exact(&mut slot).is_ok() {
        source.spend_batch_load_time(random.duration_around(plan.load_us))?;
        let start = usize::from(slot[0]) * plan.batch_bytes;
        batches.fill_range(start, plan.batch_bytes, slot[0]);
        results.write_all(&slot)?;
    }
    Ok(())
}

enum LoaderDataSource {
    NoData,
    Sleep,
    Disk(UncachedFile),
    Remote(RemoteStorage),
}

impl LoaderDataSource {
    fn open(directory: &Path, load_method: LoadMethod) -> io::Result<Self> {
        Ok(match load_method {
            LoadMethod::Burn => Self::NoData,
            LoadMethod::Sleep => Self::Sleep,
            LoadMethod::Disk => Self::Disk(UncachedFile::new(directory)?),
            LoadMethod::Network => Self::Remote(RemoteStorage::connect(directory)?),
        })
    }

    fn spend_batch_load_time(&mut self, how_long: Duration) -> io::Result<()> {
        match self {
            Self::NoData => sys::burn_cpu(how_long),
            Self::Sleep => std::thread::sleep(how_long),
            Self::Disk(disk) => disk.read_uncached_for(how_long)?,
            Self::Remote(remote) => remote.fetch_with_delay(how_long)?,
        }
        Ok(())
    }
}

/// Draws random durations around given means.
pub(crate) struct DurationJitter {
    random: fastrand::Rng,
    share: f64,
}

impl DurationJitter {
    pub(crate) fn new(seed: u64, share: f64) -> Self {
        Self {
            random: fastrand::Rng::with_seed(seed),
            share,
        }
    }

    pub(crate) fn duration_around(&mut self, mean_us: u64) -> Duration {
        let factor = 1.0 + self.share * (2.0 * self.random.f64() - 1.0);
        Duration::from_nanos((1e3 * mean_us as f64 * factor) as u64)
    }
}
