//! Runs the kernel's copies of the phase rules on given states.
//!
//! Every BPF object uses `bpf/phase_rule.h`, `bpf/phase_tracker.h` and `bpf/class.h`. This module loads programs that
//! consist of these headers alone, and runs them with `BPF_PROG_TEST_RUN`. Tests compare the results of these programs with
//! those of [`zernel_phase`]; benchmarks time the programs.

use libbpf_rs::{MapCore, MapFlags, MapHandle, Object, ObjectBuilder, ProgramInput};
use zernel_phase::class::ClassWord;
use zernel_phase::mirrors;
use zernel_phase::shared::{RawPhaseConfig, RawPhaseSample, RawTaskState};
use zernel_phase::tracker::TrackerConfig;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Number of states in a batch.
pub const BATCH_SIZE: usize = 4096;

pub(crate) static TWIN_OBJECT: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/phase_twin.bpf.o"));

mirrors! {
    #[cfg(test)]
    pub(crate) const MIRRORS;
    structs {
        /// `struct classify_batch`: samples in, phases out.
        pub struct ClassifyBatch = "classify_batch" {
            config: RawPhaseConfig,
            samples: [RawPhaseSample; BATCH_SIZE],
            phases: [u8; BATCH_SIZE],
        }

        /// `struct detect_batch`: tasks, each sampled once at its own time and changed in place.
        pub struct DetectBatch = "detect_batch" {
            config: RawPhaseConfig,
            now_ns: [u64; BATCH_SIZE],
            tasks: [RawTaskState; BATCH_SIZE],
        }

        /// `struct track_batch`: tasks, each given one event at its own time and changed in place. The first event of a
        /// task, whose phase word is 0, only starts its tracker.
        pub struct TrackBatch = "track_batch" {
            config: TrackerConfig,
            at_ns: [u64; BATCH_SIZE],
            events: [u8; BATCH_SIZE],
            tasks: [RawTaskState; BATCH_SIZE],
        }

        /// `struct publish_batch`: tasks, each of which publishes its class at `now_ns`, and their class words at
        /// `read_ns`.
        pub struct PublishBatch = "publish_batch" {
            now_ns: [u64; BATCH_SIZE],
            read_ns: [u64; BATCH_SIZE],
            words: [ClassWord; BATCH_SIZE],
            tasks: [RawTaskState; BATCH_SIZE],
        }
    }
}

/// The loaded programs.
pub struct PhaseTwin {
    object: Object,
}

impl PhaseTwin {
    /// Loads the programs that were built with this crate.
    pub fn load() -> libbpf_rs::Result<Self> {
        Self::load_object(TWIN_OBJECT)
    }

    /// Loads the programs from another build of `phase_twin.bpf.c`.
    pub fn load_object(elf: &[u8]) -> libbpf_rs::Result<Self> {
        let object = ObjectBuilder::default().open_memory(elf)?.load()?;
        Ok(Self { object })
    }

    /// The loaded object.
    #[must_use]
    pub fn object(&self) -> &Object {
        &self.object
    }

    /// Classifies every sample of the batch.
    pub fn classify(&self, batch: &mut ClassifyBatch) -> libbpf_rs::Result<()> {
        self.run("classify", batch)
    }

    /// Detects, debounces and moves every task of the batch.
    pub fn detect(&self, batch: &mut DetectBatch) -> libbpf_rs::Result<()> {
        self.run("detect", batch)
    }

    /// Feeds every task of the batch one event.
    pub fn track(&self, batch: &mut TrackBatch) -> libbpf_rs::Result<()> {
        self.run("track", batch)
    }

    /// Publishes the class of every task of the batch.
    pub fn publish(&self, batch: &mut PublishBatch) -> libbpf_rs::Result<()> {
        self.run("publish", batch)
    }

    /// Copies the batch into the program's map, runs the program, and copies the result back.
    fn run<B>(&self, name: &str, batch: &mut B) -> libbpf_rs::Result<()>
    where
        B: FromBytes + IntoBytes + Immutable,
    {
        let map = self.find_map(name)?;
        let key = 0_u32.to_ne_bytes();
        map.update(&key, batch.as_bytes(), MapFlags::ANY)?;
        self.run_in_place(name)?;
        let result = map
            .lookup(&key, MapFlags::ANY)?
            .ok_or_else(|| missing_error(name))?;
        batch.as_mut_bytes().copy_from_slice(&result);
        Ok(())
    }

    /// Runs the program `classify`, `detect`, `track` or `publish` on the current contents of its map.
    pub fn run_in_place(&self, name: &str) -> libbpf_rs::Result<()> {
        let program = self
            .object
            .progs_mut()
            .find(|program| program.name() == name)
            .ok_or_else(|| missing_error(name))?;
        match program.test_run(ProgramInput::default())?.return_value as i32 {
            done if done == BATCH_SIZE as i32 => Ok(()),
            done => Err(std::io::Error::other(format!(
                "the BPF program {name} handled {done} of {BATCH_SIZE} states"
            ))
            .into()),
        }
    }

    fn find_map(&self, name: &str) -> libbpf_rs::Result<MapHandle> {
        let name = format!("{name}_map");
        let map = self.object.maps().find(|map| *map.name() == *name);
        MapHandle::try_from(&map.ok_or_else(|| missing_error(&name))?)
    }
}

fn missing_error(name: &str) -> libbpf_rs::Error {
    std::io::Error::other(format!("the BPF object has no {name}")).into()
}
