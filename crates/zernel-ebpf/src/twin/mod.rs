//! The kernel's copy of the phase rule, run on states of our choice.
//!
//! `bpf/phase_rule.h` is what every BPF object uses; this loads a program made of nothing else and
//! runs it with `BPF_PROG_TEST_RUN`. Tests compare its answers with [`zernel_phase`]'s, benchmarks
//! time it.

use libbpf_rs::{MapCore, MapFlags, MapHandle, Object, ObjectBuilder, ProgramInput};
use zernel_phase::shared::{RawPhaseConfig, RawPhaseSample, RawTaskState};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// How many states one run takes.
pub const BATCH: usize = 4096;

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/phase_twin.bpf.o"));

/// `struct classify_batch`: samples in, phases out.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)] // the names say it all
pub struct ClassifyBatch {
    pub config: RawPhaseConfig,
    pub samples: [RawPhaseSample; BATCH],
    pub phases: [u8; BATCH],
}

/// `struct detect_batch`: tasks, each sampled once at its own time and changed in place.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)] // the names say it all
pub struct DetectBatch {
    pub config: RawPhaseConfig,
    pub now_ns: [u64; BATCH],
    pub tasks: [RawTaskState; BATCH],
}

/// The loaded programs.
pub struct PhaseTwin {
    object: Object,
}

impl PhaseTwin {
    /// Loads the programs that were built with this crate.
    pub fn load() -> libbpf_rs::Result<Self> {
        Self::load_object(OBJECT)
    }

    /// Loads the programs from another build of `phase_twin.bpf.c`.
    pub fn load_object(elf: &[u8]) -> libbpf_rs::Result<Self> {
        let object = ObjectBuilder::default().open_memory(elf)?.load()?;
        Ok(Self { object })
    }

    /// The loaded object, for a look at its types.
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

    /// Copies the batch into the program's map, runs the program, and copies the result back.
    fn run<B>(&self, name: &str, batch: &mut B) -> libbpf_rs::Result<()>
    where
        B: FromBytes + IntoBytes + Immutable,
    {
        let map = self.map(name)?;
        let key = 0_u32.to_ne_bytes();
        map.update(&key, batch.as_bytes(), MapFlags::ANY)?;
        self.run_in_place(name)?;
        let result = map.lookup(&key, MapFlags::ANY)?.ok_or_else(|| gone(name))?;
        batch.as_mut_bytes().copy_from_slice(&result);
        Ok(())
    }

    /// Runs the program `classify` or `detect` on what its map holds already.
    pub fn run_in_place(&self, name: &str) -> libbpf_rs::Result<()> {
        let program = self
            .object
            .progs_mut()
            .find(|program| program.name() == name)
            .ok_or_else(|| gone(name))?;
        match program.test_run(ProgramInput::default())?.return_value as i32 {
            done if done == BATCH as i32 => Ok(()),
            done => Err(std::io::Error::other(format!(
                "the BPF program {name} handled {done} of {BATCH} states"
            ))
            .into()),
        }
    }

    fn map(&self, name: &str) -> libbpf_rs::Result<MapHandle> {
        let name = format!("{name}_map");
        let map = self.object.maps().find(|map| *map.name() == *name);
        MapHandle::try_from(&map.ok_or_else(|| gone(&name))?)
    }
}

fn gone(name: &str) -> libbpf_rs::Error {
    std::io::Error::other(format!("the BPF object has no {name}")).into()
}
