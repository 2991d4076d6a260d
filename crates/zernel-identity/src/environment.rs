//! The listed variables of a process's environment, and the rank, job and pod in them.
//!
//! An environment contains passwords and tokens. Only the variables listed in this file are kept, each as a bounded,
//! printable string. `/proc` shows the environment at the start of the process, so variables that a program sets for
//! itself are missing.

use std::io::Read;

use procfs::process::Process;
use procfs::{ProcError, ProcResult};
use zernel_model::identity::{JobSource, Rank, RankSource};

use super::printable_text::{MAX_NAME_BYTES, to_printable};

/// Largest environment that is read. A process can make the kernel show any part of its memory as
/// its environment.
const MAX_ENVIRONMENT_BYTES: u64 = 1 << 20;

/// Longest list of devices that is kept: more than 70 UUIDs.
const MAX_DEVICE_LIST_BYTES: usize = 4096;

/// Variables with a single value.
const SINGLE_VALUE_VARIABLES: [&str; 24] = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_GPUS",
    "SLURM_JOB_GPUS",
    "HOSTNAME",
    "POD_NAME",
    "POD_NAMESPACE",
    "CUDA_DEVICE_ORDER",
];

/// Variables with a list of devices. An empty list is kept, because it differs from a missing variable.
const DEVICE_LIST_VARIABLES: [&str; 2] = ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"];

/// Those variables of one process that this module reads.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Environment {
    variables: Vec<(&'static str, String)>,
}

impl Environment {
    /// Reads the environment of a process.
    ///
    /// `procfs` is not used, because it keeps the whole environment and the last of duplicate
    /// variables. Programs see the first.
    pub(super) fn read(process: &Process) -> ProcResult<Self> {
        Self::read_from(process.open_relative("environ")?)
    }

    /// Reads an environment. An environment that exceeds the limit is an error: a variable that is cut off would
    /// have another value.
    fn read_from(file: impl Read) -> ProcResult<Self> {
        let mut bytes = Vec::new();
        file.take(MAX_ENVIRONMENT_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(ProcError::from)?;
        if bytes.len() as u64 > MAX_ENVIRONMENT_BYTES {
            return Err(ProcError::Other("the environment is too large".to_owned()));
        }
        Ok(Self::parse(&bytes))
    }

    /// Parses `NAME=value` strings that end with a zero byte.
    pub(super) fn parse(bytes: &[u8]) -> Self {
        let mut environment = Self::default();
        for entry in bytes.split(|byte| *byte == 0) {
            let Some(equals) = entry.iter().position(|byte| *byte == b'=') else {
                continue;
            };
            let (name, value) = (&entry[..equals], &entry[equals + 1..]);
            let same = |known: &&&str| known.as_bytes() == name;
            if let Some(known) = SINGLE_VALUE_VARIABLES.iter().find(same) {
                environment.insert_variable(known, to_printable(value, MAX_NAME_BYTES));
            } else if let Some(known) = DEVICE_LIST_VARIABLES.iter().find(same) {
                environment.insert_variable(
                    known,
                    to_printable(truncate_between_entries(value), MAX_DEVICE_LIST_BYTES),
                );
            }
        }
        environment
    }

    fn insert_variable(&mut self, name: &'static str, value: String) {
        let is_new = self.variables.iter().all(|(known, _)| *known != name);
        if is_new {
            self.variables.push((name, value));
        }
    }

    /// Returns the value of a variable, even if it is empty.
    pub(super) fn get_raw(&self, name: &str) -> Option<String> {
        let found = self.variables.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| value.clone())
    }

    /// Returns the value of a variable if it is not empty.
    pub(super) fn get_nonempty(&self, name: &str) -> Option<String> {
        self.get_raw(name).filter(|value| !value.is_empty())
    }

    fn get_number(&self, name: &str) -> Option<u32> {
        self.get_nonempty(name)?.trim().parse().ok()
    }

    /// Returns the rank from the most trusted source. A missing local rank is taken from another source only if both
    /// sources have the same rank and world size, so that ranks of two launchers never mix.
    pub(super) fn find_rank(&self) -> Option<Rank> {
        let mut candidates = self.ranks_by_source();
        let mut best = candidates.next()?;
        for other in candidates {
            let same = other.rank == best.rank && other.world_size == best.world_size;
            if same {
                best.local_rank = best.local_rank.or(other.local_rank);
            }
        }
        Some(best)
    }

    /// Returns the rank from each source, the most trusted source first.
    fn ranks_by_source(&self) -> impl Iterator<Item = Rank> {
        let sources = [
            self.rank_from(RankSource::Torchrun, "RANK", "LOCAL_RANK", &["WORLD_SIZE"]),
            self.rank_from(
                RankSource::OpenMpi,
                "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_LOCAL_RANK",
                &["OMPI_COMM_WORLD_SIZE"],
            ),
            self.rank_from(
                RankSource::Pmi,
                "PMI_RANK",
                "MPI_LOCALRANKID",
                &["PMI_SIZE"],
            ),
            self.rank_from(
                RankSource::Slurm,
                "SLURM_PROCID",
                "SLURM_LOCALID",
                &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
            )
            .filter(|_| self.is_in_slurm_step()),
        ];
        sources.into_iter().flatten()
    }

    /// Returns the rank from one source, unless the rank exceeds the world size.
    fn rank_from(
        &self,
        source: RankSource,
        rank: &str,
        local: &str,
        sizes: &[&str],
    ) -> Option<Rank> {
        let rank = self.get_number(rank)?;
        let world_size = sizes.iter().find_map(|name| self.get_number(name));
        let possible = world_size.is_none_or(|size| rank < size);
        possible.then(|| Rank {
            rank,
            local_rank: self.get_number(local),
            world_size,
            source,
        })
    }

    /// Whether srun started the process. A batch script also has a `SLURM_PROCID`, but it has no
    /// step id or one of the special ids at the end of the range.
    fn is_in_slurm_step(&self) -> bool {
        const FIRST_SPECIAL_STEP: u32 = 0xffff_fff0;
        self.get_number("SLURM_STEP_ID")
            .is_some_and(|step| step < FIRST_SPECIAL_STEP)
    }

    /// Returns the name of the job. `slurm_job` comes from the cgroup and takes precedence, because
    /// the process cannot forge it.
    pub(super) fn find_job(&self, slurm_job: Option<&str>) -> Option<(String, JobSource)> {
        let slurm = slurm_job
            .map(str::to_owned)
            .or_else(|| self.get_nonempty("SLURM_JOB_ID"));
        // `none` is torchrun's default name.
        let torchrun = self
            .get_nonempty("TORCHELASTIC_RUN_ID")
            .filter(|name| name != "none");
        slurm
            .map(|job| (job, JobSource::Slurm))
            .or_else(|| torchrun.map(|job| (job, JobSource::Torchrun)))
            .or_else(|| Some((self.rendezvous_id()?, JobSource::Rendezvous)))
    }

    fn rendezvous_id(&self) -> Option<String> {
        let (address, port) = (
            self.get_nonempty("MASTER_ADDR")?,
            self.get_number("MASTER_PORT")?,
        );
        Some(format!("{address}:{port}"))
    }

    /// Returns the name of the pod. `HOSTNAME` is the pod's name only inside a pod; with the host's
    /// network it is the name of the host.
    pub(super) fn find_pod(&self, is_in_pod: bool, host_name: &str) -> Option<String> {
        let host = self.get_nonempty("HOSTNAME");
        self.get_nonempty("POD_NAME")
            .or_else(|| host.filter(|name| is_in_pod && name != host_name))
    }
}

/// Truncates a list that is too long after its last complete entry: part of a UUID may name another
/// device.
fn truncate_between_entries(list: &[u8]) -> &[u8] {
    match list.get(..MAX_DEVICE_LIST_BYTES) {
        Some(head) if list.len() > MAX_DEVICE_LIST_BYTES => {
            let comma = head.iter().rposition(|byte| *byte == b',');
            &head[..comma.unwrap_or(0)]
        }
        _ => list,
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    fn parse_environment(text: &str) -> Environment {
        let bytes: Vec<u8> = text
            .split_whitespace()
            .flat_map(|variable| [variable.as_bytes(), b"\0"].concat())
            .collect();
        Environment::parse(&bytes)
    }

    #[test]
    fn only_the_listed_variables_are_kept() {
        let bytes = b"AWS_SECRET_ACCESS_KEY=x\0RANK=3\0PATH=/bin\0RANKS=9\0=\0noise\0";
        let kept = Environment::parse(bytes);
        assert_eq!(kept.variables, [("RANK", "3".to_owned())]);
    }

    #[test]
    fn the_first_of_duplicate_variables_wins() {
        assert_eq!(
            parse_environment("RANK=1 RANK=2")
                .find_rank()
                .map(|rank| rank.rank),
            Some(1)
        );
    }

    /// Pieces of random environments.
    const ENVIRONMENT_PIECES: [&[u8]; 7] = [
        b"RANK=",
        b"CUDA_VISIBLE_DEVICES=",
        b"\0",
        b"\xff",
        b",",
        b"7",
        &[b'x'; 3000],
    ];

    proptest! {
        #[test]
        fn arbitrary_environments_never_panic_and_stay_bounded(pieces in vec(select(&ENVIRONMENT_PIECES), 0..40)) {
            let kept = Environment::parse(&pieces.concat());
            kept.find_rank();
            prop_assert!(kept.variables.len() <= SINGLE_VALUE_VARIABLES.len() + DEVICE_LIST_VARIABLES.len());
            prop_assert!(kept.variables.iter().all(|(_, value)| value.len() <= MAX_DEVICE_LIST_BYTES));
        }
    }

    #[test]
    fn an_environment_that_is_too_large_is_not_read() {
        let rank_at_the_end_of = |length: u64| {
            let mut bytes = vec![b'x'; length as usize];
            let rank = b"\0RANK=123";
            let start = bytes.len() - rank.len();
            bytes[start..].copy_from_slice(rank);
            let environment = Environment::read_from(&*bytes).ok()?;
            environment.find_rank().map(|rank| rank.rank)
        };
        assert_eq!(rank_at_the_end_of(MAX_ENVIRONMENT_BYTES), Some(123));
        assert_eq!(rank_at_the_end_of(MAX_ENVIRONMENT_BYTES + 1), None);
        assert!(Environment::read_from(std::io::repeat(0)).is_err());
    }

    #[test]
    fn values_are_bounded() {
        let mut bytes = b"POD_NAME=".to_vec();
        bytes.extend([b'a'; 10_000]);
        let name = Environment::parse(&bytes).get_nonempty("POD_NAME").unwrap();
        assert_eq!(name.len(), MAX_NAME_BYTES);
    }

    #[test]
    fn a_long_list_is_truncated_between_entries() {
        let entry = "GPU-713a8001-4129-af46-2093-26173f053ec1";
        let list = vec![entry; 200].join(",");
        let kept = Environment::parse(format!("CUDA_VISIBLE_DEVICES={list}").as_bytes())
            .get_raw("CUDA_VISIBLE_DEVICES")
            .unwrap();
        assert!(kept.len() <= MAX_DEVICE_LIST_BYTES);
        assert!(kept.split(',').all(|kept| kept == entry), "{kept}");
        assert!(truncate_between_entries(&[b'1'; MAX_DEVICE_LIST_BYTES + 1]).is_empty());
    }

    #[test]
    fn an_empty_list_differs_from_a_missing_one() {
        let kept = parse_environment("CUDA_VISIBLE_DEVICES= RANK=");
        assert_eq!(kept.get_raw("CUDA_VISIBLE_DEVICES"), Some(String::new()));
        assert_eq!(kept.get_raw("NVIDIA_VISIBLE_DEVICES"), None);
        assert_eq!(kept.find_rank(), None);
    }

    /// Variables; then rank, local rank, world size and source.
    type RankCase = (
        &'static str,
        Option<(u32, Option<u32>, Option<u32>, RankSource)>,
    );

    #[rustfmt::skip] // a table
    const RANK_CASES: &[RankCase] = &[
        ("RANK=3 LOCAL_RANK=1 WORLD_SIZE=8", Some((3, Some(1), Some(8), RankSource::Torchrun))),
        ("RANK=3", Some((3, None, None, RankSource::Torchrun))),
        ("OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_SIZE=16",
            Some((5, Some(1), Some(16), RankSource::OpenMpi))),
        ("PMI_RANK=5 PMI_SIZE=16 MPI_LOCALRANKID=1", Some((5, Some(1), Some(16), RankSource::Pmi))),
        ("SLURM_JOB_ID=9 SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_NTASKS=4",
            Some((2, Some(0), Some(4), RankSource::Slurm))),
        ("SLURM_STEP_ID=1 SLURM_PROCID=2 SLURM_NTASKS=64 SLURM_STEP_NUM_TASKS=4",
            Some((2, None, Some(4), RankSource::Slurm))),
        // torchrun under srun: one Slurm task per node, which starts the ranks.
        ("SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NTASKS=2 RANK=11 LOCAL_RANK=3 WORLD_SIZE=16",
            Some((11, Some(3), Some(16), RankSource::Torchrun))),
        // mpirun in a batch script.
        ("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=8 OMPI_COMM_WORLD_RANK=6 OMPI_COMM_WORLD_SIZE=8",
            Some((6, None, Some(8), RankSource::OpenMpi))),
        // srun with PMI: both have the same rank, and only Slurm has the local rank.
        ("PMI_RANK=2 PMI_SIZE=4 SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_LOCALID=1 SLURM_NTASKS=4",
            Some((2, Some(1), Some(4), RankSource::Pmi))),
        // Intel's mpirun starts one proxy per node under Slurm, so Slurm's rank is that of the proxy.
        ("PMI_RANK=2 PMI_SIZE=4 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NTASKS=2",
            Some((2, None, Some(4), RankSource::Pmi))),
        // A batch script, without and with a step id.
        ("SLURM_JOB_ID=9 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=8", None),
        ("SLURM_STEP_ID=4294967291 SLURM_PROCID=0 SLURM_NTASKS=8", None),
        // A source with an invalid rank does not hide a valid one.
        ("RANK=8 WORLD_SIZE=8 PMI_RANK=1 PMI_SIZE=2", Some((1, None, Some(2), RankSource::Pmi))),
        ("RANK=-1 WORLD_SIZE=8", None),
        ("RANK=one", None),
        ("RANK=99999999999999999999", None),
        ("LOCAL_RANK=1 WORLD_SIZE=8", None),
        ("", None),
    ];

    #[test]
    fn the_rank_comes_from_the_best_launcher() {
        for (text, expected) in RANK_CASES {
            let rank = parse_environment(text)
                .find_rank()
                .map(|rank| (rank.rank, rank.local_rank, rank.world_size, rank.source));
            assert_eq!(rank, *expected, "{text}");
        }
    }

    #[test]
    fn the_job_name_comes_from_slurm_torchrun_or_rendezvous() {
        use JobSource::{Rendezvous, Slurm, Torchrun};
        type JobCase = (
            &'static str,
            Option<&'static str>,
            Option<(&'static str, JobSource)>,
        );
        let cases: [JobCase; 8] = [
            (
                "SLURM_JOB_ID=7 TORCHELASTIC_RUN_ID=llama",
                Some("42"),
                Some(("42", Slurm)),
            ),
            (
                "SLURM_JOB_ID=7 TORCHELASTIC_RUN_ID=llama",
                None,
                Some(("7", Slurm)),
            ),
            (
                "TORCHELASTIC_RUN_ID=llama MASTER_ADDR=a MASTER_PORT=1",
                None,
                Some(("llama", Torchrun)),
            ),
            (
                "TORCHELASTIC_RUN_ID=none MASTER_ADDR=node1 MASTER_PORT=29500",
                None,
                Some(("node1:29500", Rendezvous)),
            ),
            ("TORCHELASTIC_RUN_ID=none", None, None),
            ("MASTER_ADDR=node1", None, None),
            ("MASTER_ADDR=node1 MASTER_PORT=http", None, None),
            ("", None, None),
        ];
        for (text, cgroup, expected) in cases {
            let job = parse_environment(text).find_job(cgroup);
            let job = job.as_ref().map(|(name, source)| (name.as_str(), *source));
            assert_eq!(job, expected, "{text}");
        }
    }

    #[test]
    fn the_host_name_is_the_pod_name_only_in_a_pod_with_its_own_network() {
        let cases = [
            ("POD_NAME=a HOSTNAME=b", false, Some("a")),
            ("HOSTNAME=b", true, Some("b")),
            ("HOSTNAME=b", false, None),
            ("HOSTNAME=machine", true, None),
            ("POD_NAME= HOSTNAME=b", true, Some("b")),
            ("", true, None),
        ];
        for (text, is_in_pod, expected) in cases {
            let pod = parse_environment(text).find_pod(is_in_pod, "machine");
            assert_eq!(pod.as_deref(), expected, "{text}");
        }
    }
}
