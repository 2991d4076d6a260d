//! The pipes of the teams whose workers are being created. The caller closes its ends of a forked team's pipes once the
//! team's last member exists, so the number of open files does not grow with the number of workers.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::ops::Range;

use rustix::pipe::{PipeFlags, pipe_with};

use crate::worker::TeamPipe;
use crate::workload_plan::WorkloadPlan;

/// The open pipes of each team, by the team's number.
#[derive(Debug, Default)]
pub(crate) struct TeamPipes(BTreeMap<usize, Vec<TeamPipe>>);

impl TeamPipes {
    /// Opens the pipes of the teams that `workers` belong to, and closes the pipes of all other teams.
    pub(crate) fn open_for_teams_of(
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

    /// The open pipes of a team. Fork safe.
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
