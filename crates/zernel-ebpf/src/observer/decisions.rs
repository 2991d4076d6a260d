//! What a scheduler that follows the classes would have decided, counted by the kernel.

use std::collections::BTreeMap;
use std::io;

use libbpf_rs::MapHandle;
use zernel_phase::class::TaskClass;

use super::Observer;
use super::kernel::KernelPrograms;
use super::mapped_array::MappedArray;
use crate::probes::layout::{self, RawDecisions};

/// The section with the switch of the decisions.
pub(super) const SWITCH_SECTION: &str = ".rodata.decisions";
pub(super) const DECISIONS_MAP: &str = "decisions";
/// BPF maps that are not created if decisions are not counted.
pub(super) const OPTIONAL_MAPS: [&str; 2] = [DECISIONS_MAP, "uncounted_runs"];

/// What a scheduler would have decided about the threads of a process while they were in one class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct ClassDecisions {
    /// Time on a CPU.
    pub run_ns: u64,
    /// Time runnable without a CPU.
    pub delay_ns: u64,
    /// Wake-ups.
    pub wakeups: u64,
    /// Wake-ups after which a thread waited for a CPU: the scheduler would have preempted another thread for it.
    pub would_preempt: u64,
    /// Preemptions of a critical thread: the scheduler would have kept the thread on its CPU.
    pub would_keep: u64,
    /// Delays that the preempting wake-ups and the prevented preemptions would have saved. A scheduler that has to be
    /// fair to other tasks saves less.
    pub saved_ns: u64,
    /// Spinning waits for the GPU: the scheduler would have lent the CPU to other threads.
    pub would_lend: u64,
}

impl ClassDecisions {
    /// Adds the counts of another process to these.
    pub fn add_decisions(&mut self, other: &Self) {
        for (sum, more) in [
            (&mut self.run_ns, other.run_ns),
            (&mut self.delay_ns, other.delay_ns),
            (&mut self.wakeups, other.wakeups),
            (&mut self.would_preempt, other.would_preempt),
            (&mut self.would_keep, other.would_keep),
            (&mut self.saved_ns, other.saved_ns),
            (&mut self.would_lend, other.would_lend),
        ] {
            *sum = sum.saturating_add(more);
        }
    }
}

impl From<RawDecisions> for ClassDecisions {
    fn from(raw: RawDecisions) -> Self {
        Self {
            run_ns: raw.run_ns,
            delay_ns: raw.delay_ns,
            wakeups: raw.wakeups,
            would_preempt: raw.would_preempt,
            would_keep: raw.would_keep,
            saved_ns: raw.saved_ns,
            would_lend: raw.would_lend,
        }
    }
}

/// Decisions about the threads of one process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessDecisions {
    /// The handle that identifies the process, because a pid may be reused.
    pub process_handle: u32,
    /// Its pid.
    pub pid: u32,
    /// Pid of the trainer that the process loads data for; its own pid if it is no loader, or if the trainer is
    /// forgotten.
    pub trainer: u32,
    /// Whether the sampled rule decides the classes of this process.
    pub is_sampled: bool,
    /// Its name.
    pub comm: String,
    /// Decisions by class, without classes in which no thread ran.
    pub classes: BTreeMap<TaskClass, ClassDecisions>,
}

/// Maps the table of decisions into memory: one row per process and class.
pub(super) fn map_decision_rows(map: &MapHandle) -> io::Result<MappedArray<RawDecisions>> {
    MappedArray::new(map, layout::PROCESSES * TaskClass::ALL.len())
}

/// Reads the rows of all processes.
fn read_decisions(
    kernel: &KernelPrograms,
    rows: &MappedArray<RawDecisions>,
) -> Vec<ProcessDecisions> {
    let processes = 1..layout::PROCESSES;
    let decisions = processes.filter_map(|index| {
        let record = kernel.process_record_at(index)?;
        let classes = TaskClass::ALL.iter().map(|class| {
            let row = rows.read(index * TaskClass::ALL.len() + *class as usize);
            (*class, row)
        });
        let classes = classes.filter(|(_, row)| row.process == u64::from(record.process_handle));
        let trainer = kernel.process_record(record.trainer_handle);
        let comm = record.comm.split(|byte| *byte == 0).next();
        Some(ProcessDecisions {
            process_handle: record.process_handle,
            pid: record.pid,
            trainer: trainer.map_or(record.pid, |trainer| trainer.pid),
            is_sampled: record.is_sampled != 0,
            comm: String::from_utf8_lossy(comm.unwrap_or_default()).into_owned(),
            classes: classes.map(|(class, row)| (class, row.into())).collect(),
        })
    });
    decisions.collect()
}

impl Observer {
    /// Counted decisions so far, of all processes that are observed now. Empty unless
    /// [`ObserverOptions::counts_decisions`](super::ObserverOptions::counts_decisions) is set.
    #[must_use]
    pub fn decisions(&self) -> Vec<ProcessDecisions> {
        let rows = self.kernel.decisions.as_ref();
        rows.map_or_else(Vec::new, |rows| read_decisions(&self.kernel, rows))
    }
}
