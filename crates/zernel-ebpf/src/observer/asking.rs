//! Asks processes again who they are: programs name themselves, and change their user, after they start.
//!
//! Each takes a while to answer. So it is noted whom to ask, they are asked while others use the observer,
//! and it takes in the answers.

use super::process::identify_life;
use super::{ObservedProcess, Observer};
use crate::gpu::{GpuFacts, VisibleDevices};
use crate::identity::Identity;

/// In how many rounds all processes are asked.
const ROUNDS: usize = 40;

/// Whom to ask.
pub(super) struct Questions {
    lives: Vec<Life>,
    gpus: Vec<GpuFacts>,
}

/// One life of a process: its place in the kernel and its pid may be another's later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Life {
    place: u32,
    pid: u32,
    start_ns: u64,
}

/// Who a process is, and the devices it can use.
pub(super) struct Answer {
    life: Life,
    identity: Identity,
    devices: VisibleDevices,
}

impl Life {
    fn new(place: u32, process: &ObservedProcess) -> Self {
        Self {
            place,
            pid: process.pid,
            start_ns: process.start_ns,
        }
    }
}

impl Questions {
    /// The answers of those that are still there.
    pub(super) fn ask(&self) -> Vec<Answer> {
        let answer = |life: &Life| {
            let identity = identify_life(life.pid, life.start_ns)?;
            Some(Answer {
                life: *life,
                devices: VisibleDevices::of(&identity, &self.gpus),
                identity,
            })
        };
        self.lives.iter().filter_map(answer).collect()
    }
}

impl Observer {
    /// Some of the processes, and others the next time.
    pub(super) fn questions(&mut self) -> Questions {
        let count = self.processes.len().div_ceil(ROUNDS);
        let next = self.processes.range(self.next_asked..).take(count);
        let lives: Vec<Life> = next
            .map(|(place, process)| Life::new(*place, process))
            .collect();
        // From the beginning again.
        self.next_asked = lives
            .last()
            .filter(|_| lives.len() == count)
            .map_or(0, |last| last.place + 1);
        Questions {
            lives,
            gpus: self.gpu_facts.clone(),
        }
    }

    pub(super) fn take_answers(&mut self, answers: Vec<Answer>) {
        for answer in answers {
            let place = answer.life.place;
            let process = self.processes.get_mut(&place);
            if let Some(process) = process.filter(|now| Life::new(place, now) == answer.life) {
                process.set_identity(answer.identity);
                process.devices = answer.devices;
            }
        }
    }
}
