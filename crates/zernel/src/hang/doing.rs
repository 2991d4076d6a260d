//! What a process is doing, as far as the caller may see it.

use procfs::process::{ProcState, Process};

/// What the main thread of a process is at, as part of a sentence.
pub(super) fn describe(pid: u32) -> String {
    let process = i32::try_from(pid)
        .ok()
        .and_then(|pid| Process::new(pid).ok());
    let stat = process.as_ref().and_then(|process| process.stat().ok());
    let (Some(process), Some(stat)) = (process, stat) else {
        return "it is gone by now".to_owned();
    };
    // Only those who may trace it are told: others read `0`, or nothing at all.
    let place = process.wchan().ok().filter(|place| place.len() > 1);
    match stat.state() {
        Ok(ProcState::Stopped) => format!("it is stopped: `kill -CONT {pid}` lets it go on"),
        Ok(ProcState::Tracing) => "it is stopped by a debugger".to_owned(),
        Ok(ProcState::Waiting) => format!("it waits for a disk or a device{}", at(place)),
        Ok(ProcState::Running) => "it is on a CPU, or waits for one".to_owned(),
        Ok(ProcState::Sleeping | ProcState::Idle) => {
            let what = place.as_deref().map_or("sleeps", waits_for);
            format!("its main thread {what}{}", at(place))
        }
        Ok(ProcState::Zombie | ProcState::Dead) => "it has ended".to_owned(),
        _ => "what it does is not known".to_owned(),
    }
}

/// Whether somebody has stopped a process.
pub(super) fn is_stopped(pid: u32) -> bool {
    let process = i32::try_from(pid)
        .ok()
        .and_then(|pid| Process::new(pid).ok());
    let stat = process.and_then(|process| process.stat().ok());
    let state = stat.and_then(|stat| stat.state().ok());
    matches!(state, Some(ProcState::Stopped | ProcState::Tracing))
}

fn at(place: Option<String>) -> String {
    place.map_or(String::new(), |place| format!(" (in {place})"))
}

/// What a thread waits for that sleeps in a function of the kernel.
fn waits_for(place: &str) -> &'static str {
    let known = [
        ("futex", "waits for another thread"),
        ("poll", "waits for any of several files or sockets"),
        ("nanosleep", "sleeps for a while"),
        ("pipe", "waits for another process at a pipe"),
        ("unix", "waits for another process at a socket"),
        ("tcp", "waits for the network"),
        ("sk_wait", "waits for the network"),
        ("wait4", "waits for a child"),
        ("do_wait", "waits for a child"),
    ];
    let found = known.iter().find(|(part, _)| place.contains(part));
    found.map_or("sleeps", |(_, what)| what)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    #[test]
    fn a_stopped_process_is_told_from_a_sleeping_and_an_ended_one() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        wait_for(pid, "sleeps");
        kill_process(Pid::from_child(&child), Signal::STOP).unwrap();
        wait_for(pid, "it is stopped");
        assert!(is_stopped(pid));
        child.kill().unwrap();
        wait_for(pid, "it has ended");
        child.wait().unwrap();
        assert_eq!(describe(pid), "it is gone by now");
        assert!(!is_stopped(pid));
    }

    /// A signal takes a moment.
    fn wait_for(pid: u32, part: &str) {
        for _ in 0..1000 {
            if describe(pid).contains(part) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("{}", describe(pid));
    }
}
