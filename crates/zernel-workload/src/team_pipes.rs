//! The pipes of the teams that are being created. Pipes of a forked team are closed in the caller once its last
//! member exists, so the number of open files does not grow with the number of workers.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::ops::Range;

use rustix::pipe::{PipeFlags, pipe_with};

use crate::worker::TeamPipe;
use crate::workload_plan::WorkloadPlan;

/// Open pipes by team.
#[derive(Debug, Default)]
pub(crate) struct TeamPipes(BTreeMap<usize, Vec<TeamPipe>>);

impl TeamPipes {
    /// Opens the pipes of the teams that `workers` belong to, and closes all others.
    pub(crate) fn open_for(
        &mut self,
        plan: &WorkloadPlan,
        workers: &Range<usize>,
    ) -> io::Result<()> {
        let team_of = |worker: usize| plan.worker_plan(worker).team_number;
        let teams = team_of(workers.start)..=team_of(workers.end - 1);
        self.0.retain(|team, _| teams.contains(team));
        for team in teams {
            if let Entry::Vacant(entry) = self.0.entry(team) {
                entry.insert(open_pipes(plan.team_plan(team).pipes)?);
            }
        }
        Ok(())
    }

    /// The pipes of a team. Fork safe.
    pub(crate) fn of_team(&self, team: usize) -> &[TeamPipe] {
        self.0.get(&team).map_or(&[], Vec::as_slice)
    }
}

fn open_pipes(count: usize) -> io::Result<Vec<TeamPipe>> {
    let open_one = |_| {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        Ok(TeamPipe { reader, writer })
    };
    (0..count).map(open_one).collect()
}
