//! Stamp logs: the labels that a process wrote about its own threads.
//!
//! A log has one JSON value per line. The first is an object with pid, variant and begin. Lines `[time, tid, "+label"]`
//! and `[time, tid, "-"]` enter and leave a label. The last line is an object with the end. The label `step` is a
//! frame: it limits a step and labels no time.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::label::Label;
use crate::timeline::Timeline;

/// Deepest nesting of labels.
const MAX_DEPTH: usize = 64;

/// Why a file is no stamp log.
#[derive(Debug, thiserror::Error)]
pub enum StampError {
    /// A line is not valid.
    #[error("line {line} is not valid: {reason}")]
    Line {
        /// Its number, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// It has no first line.
    #[error("it is empty")]
    Empty,
}

/// The labels of one process.
#[derive(Debug, Clone, PartialEq)]
pub struct StampLog {
    /// The process.
    pub pid: u32,
    /// Name of the script's variant.
    pub variant: String,
    /// Known by construction.
    pub known: Known,
    /// Start of the log, in nanoseconds of CLOCK_MONOTONIC.
    pub begin_ns: u64,
    /// End of the log.
    pub end_ns: u64,
    /// Start and end of all steps.
    pub steps: Vec<(u64, u64)>,
    /// The thread that makes the steps.
    pub training_thread: Option<u32>,
    /// Ends of seconds, and the share of each in which the GPU was busy.
    pub gpu_busy: Vec<(u64, f64)>,
    /// The label of each thread over time.
    pub threads: BTreeMap<u32, Timeline<Label>>,
}

/// What is known about a script by construction.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct Known {
    /// The right verdict.
    pub verdict: Option<String>,
    /// Phases that do not occur.
    pub absent: Vec<String>,
}

#[derive(Deserialize)]
struct StampHeader {
    version: u32,
    pid: u32,
    #[serde(default)]
    variant: String,
    begin: u64,
    #[serde(default)]
    known: Known,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Stamp(u64, u32, String),
    Tail {
        end: u64,
        #[serde(default)]
        gpu_busy: Option<Vec<(u64, f64)>>,
    },
}

/// The labels of one thread while a log is read.
#[derive(Default)]
struct ThreadStamps {
    /// Labels that were entered and not left; `None`: a step, with its start.
    open: Vec<(Option<Label>, u64)>,
    changes: Vec<(u64, Label)>,
    steps: Vec<(u64, u64)>,
}

impl StampLog {
    /// Parses a log.
    pub fn parse(text: &str) -> Result<Self, StampError> {
        let mut lines = text
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.trim().is_empty());
        let (_, first) = lines.next().ok_or(StampError::Empty)?;
        let invalid = |line: usize, reason: String| StampError::Line {
            line: line + 1,
            reason,
        };
        let head: StampHeader =
            serde_json::from_str(first).map_err(|error| invalid(0, error.to_string()))?;
        if head.version != 1 {
            let reason = format!("version {} is not known", head.version);
            return Err(invalid(0, reason));
        }
        let mut threads: BTreeMap<u32, ThreadStamps> = BTreeMap::new();
        let mut end_ns = head.begin;
        let mut busy = Vec::new();
        for (number, line) in lines {
            match serde_json::from_str(line).map_err(|error| invalid(number, error.to_string()))? {
                Line::Stamp(at_ns, tid, label) => {
                    end_ns = end_ns.max(at_ns);
                    let thread = threads.entry(tid).or_default();
                    thread
                        .stamp(at_ns, &label)
                        .map_err(|reason| invalid(number, reason.to_owned()))?;
                }
                Line::Tail { end, gpu_busy } => {
                    end_ns = end_ns.max(end);
                    busy.extend(gpu_busy.unwrap_or_default());
                }
            }
        }
        let mut log = Self::new(head, threads, end_ns);
        log.gpu_busy = busy;
        Ok(log)
    }

    fn new(head: StampHeader, threads: BTreeMap<u32, ThreadStamps>, end_ns: u64) -> Self {
        let training = threads.iter().max_by_key(|(_, thread)| thread.steps.len());
        let training = training.filter(|(_, thread)| !thread.steps.is_empty());
        Self {
            pid: head.pid,
            variant: head.variant,
            known: head.known,
            begin_ns: head.begin,
            end_ns,
            steps: training.map_or_else(Vec::new, |(_, thread)| thread.steps.clone()),
            training_thread: training.map(|(tid, _)| *tid),
            gpu_busy: Vec::new(),
            threads: threads
                .into_iter()
                .map(|(tid, thread)| (tid, Timeline::new(thread.changes, end_ns)))
                .collect(),
        }
    }

    /// The label of the process over time: that of its training thread. While that thread is in its backward pass,
    /// the label of another thread that works for it counts, such as the autograd thread's.
    #[must_use]
    pub fn process_labels(&self) -> Option<Timeline<Label>> {
        let training = self.training_thread?;
        let mut labels = self.threads.get(&training)?.clone();
        for (tid, other) in &self.threads {
            if *tid == training {
                continue;
            }
            let other = other.fill(Label::Other, self.begin_ns, self.end_ns);
            labels = labels.zip(&other).map(|(own, other)| match (own, other) {
                (Label::Backward, Label::Gpu | Label::Peer) => other,
                _ => own,
            });
        }
        Some(labels)
    }

    /// From the first step to the end of the last.
    #[must_use]
    pub fn training_time(&self) -> Option<(u64, u64)> {
        let start_ns = self.steps.iter().map(|step| step.0).min()?;
        let end_ns = self.steps.iter().map(|step| step.1).max()?;
        Some((start_ns, end_ns))
    }

    /// The median length of a step.
    #[must_use]
    pub fn median_step_ns(&self) -> Option<u64> {
        let steps = self.steps.iter();
        let mut lengths: Vec<u64> = steps
            .map(|(start, end)| end.saturating_sub(*start))
            .collect();
        lengths.sort_unstable();
        lengths.get(lengths.len() / 2).copied()
    }
}

impl ThreadStamps {
    fn stamp(&mut self, at_ns: u64, label: &str) -> Result<(), &'static str> {
        if self.changes.last().is_some_and(|last| at_ns < last.0) {
            return Err("its time is before that of the thread's last stamp");
        }
        match label.strip_prefix('+') {
            Some("step") => self.open.push((None, at_ns)),
            Some(name) => {
                let label = Label::from_name(name).ok_or("unknown label")?;
                self.open.push((Some(label), at_ns));
            }
            None if label == "-" => {
                let left = self
                    .open
                    .pop()
                    .ok_or("it leaves a label that was not entered")?;
                if let (None, start_ns) = left {
                    self.steps.push((start_ns, at_ns));
                }
            }
            None => return Err("a stamp is +label or -"),
        }
        if self.open.len() > MAX_DEPTH {
            return Err("labels nest too deep");
        }
        let innermost = self.open.iter().rev().find_map(|(label, _)| *label);
        self.changes
            .push((at_ns, innermost.unwrap_or(Label::Other)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = r#"{"version": 1, "pid": 7, "variant": "v", "clock": "monotonic", "begin": 0, "known": {"verdict": "gpu", "absent": ["NcclCollective"]}}
[100, 7, "+step"]
[110, 7, "+data"]
[120, 7, "-"]
[130, 7, "+forward"]
[140, 7, "+gpu"]
[150, 7, "-"]
[160, 7, "-"]
[170, 7, "+backward"]
[172, 9, "+backward"]
[175, 9, "+gpu"]
[178, 9, "-"]
[179, 9, "-"]
[180, 7, "-"]
[200, 7, "-"]
{"end": 300, "gpu_busy": null}
"#;

    #[test]
    fn the_innermost_label_counts() {
        let log = StampLog::parse(LOG).unwrap();
        assert_eq!((log.pid, log.training_thread), (7, Some(7)));
        assert_eq!(log.training_time(), Some((100, 200)));
        assert_eq!(log.known.absent, ["NcclCollective"]);
        let labels: Vec<_> = log.process_labels().unwrap().spans().collect();
        let expected = [
            (100, 110, Label::Other),
            (110, 120, Label::Data),
            (120, 130, Label::Other),
            (130, 140, Label::Forward),
            (140, 150, Label::Gpu),
            (150, 160, Label::Forward),
            (160, 170, Label::Other),
            (170, 175, Label::Backward),
            (175, 178, Label::Gpu),
            (178, 180, Label::Backward),
            (180, 300, Label::Other),
        ];
        assert_eq!(labels, expected);
    }

    #[test]
    fn a_damaged_log_names_the_line() {
        let error = |text: &str| StampLog::parse(text).unwrap_err().to_string();
        assert_eq!(error(""), "it is empty");
        let head = LOG.lines().next().unwrap();
        assert!(error("{}").starts_with("line 1 "));
        for line in ["[1, 2, \"-\"]", "[1, 2, \"+nothing\"]", "[1]", "{}"] {
            let text = format!("{head}\n{line}");
            assert!(error(&text).starts_with("line 2 "), "{line}");
        }
        assert!(StampLog::parse(head).unwrap().process_labels().is_none());
    }
}
