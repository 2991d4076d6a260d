//! Stamp logs: the labels that a process wrote about its own threads.
//!
//! A log has one JSON value per line. The first line is an object with pid, variant and begin of the log. Lines `[time,
//! tid, "+label"]` and `[time, tid, "-"]` enter and leave a label. The last line is an object with the end of the log.
//! The label `step` is a frame: it limits a step and labels no time.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::label::StampLabel;
use crate::timeline::Timeline;

/// Deepest nesting of labels.
const MAX_LABEL_DEPTH: usize = 64;

/// Why a file is no stamp log.
#[derive(Debug, thiserror::Error)]
pub enum StampError {
    /// A line is not valid.
    #[error("line {line_number} is not valid: {reason}")]
    InvalidLine {
        /// Its number, from 1.
        line_number: usize,
        /// What is wrong with the line.
        reason: String,
    },
    /// The log has no first line.
    #[error("it is empty")]
    EmptyLog,
}

/// The labels of one process.
#[derive(Debug, Clone, PartialEq)]
pub struct StampLog {
    /// The process.
    pub pid: u32,
    /// Name of the script's variant.
    pub variant: String,
    /// Known by construction.
    pub ground_truth: ScriptGroundTruth,
    /// Start of the log, in nanoseconds of CLOCK_MONOTONIC.
    pub begin_ns: u64,
    /// End of the log.
    pub end_ns: u64,
    /// Start and end of all steps.
    pub step_spans_ns: Vec<(u64, u64)>,
    /// The thread that makes the steps.
    pub training_thread: Option<u32>,
    /// Ends of seconds, and the share of each in which the GPU was busy.
    pub gpu_busy_by_second: Vec<(u64, f64)>,
    /// The label of each thread over time.
    pub thread_labels: BTreeMap<u32, Timeline<StampLabel>>,
}

/// What is known about a script by construction.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct ScriptGroundTruth {
    /// The right verdict.
    pub verdict: Option<String>,
    /// Phases that do not occur.
    pub absent: Vec<String>,
}

#[derive(Deserialize)]
struct StampLogHeader {
    version: u32,
    pid: u32,
    #[serde(default)]
    variant: String,
    begin: u64,
    #[serde(default)]
    known: ScriptGroundTruth,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum StampLogLine {
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
    /// Labels that the thread has entered and not left, with the time of entry; `None` stands for a step.
    entered_labels: Vec<(Option<StampLabel>, u64)>,
    label_changes: Vec<(u64, StampLabel)>,
    step_spans_ns: Vec<(u64, u64)>,
}

impl StampLog {
    /// Parses a log.
    pub fn parse(text: &str) -> Result<Self, StampError> {
        let mut lines = text
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.trim().is_empty());
        let (_, first_line) = lines.next().ok_or(StampError::EmptyLog)?;
        let invalid = |line_index: usize, reason: String| StampError::InvalidLine {
            line_number: line_index + 1,
            reason,
        };
        let header: StampLogHeader =
            serde_json::from_str(first_line).map_err(|error| invalid(0, error.to_string()))?;
        if header.version != 1 {
            let reason = format!("version {} is not known", header.version);
            return Err(invalid(0, reason));
        }
        let mut threads: BTreeMap<u32, ThreadStamps> = BTreeMap::new();
        let mut end_ns = header.begin;
        let mut gpu_busy_by_second = Vec::new();
        for (line_index, line) in lines {
            match serde_json::from_str(line)
                .map_err(|error| invalid(line_index, error.to_string()))?
            {
                StampLogLine::Stamp(at_ns, tid, label) => {
                    end_ns = end_ns.max(at_ns);
                    let thread = threads.entry(tid).or_default();
                    thread
                        .apply_stamp(at_ns, &label)
                        .map_err(|reason| invalid(line_index, reason.to_owned()))?;
                }
                StampLogLine::Tail { end, gpu_busy } => {
                    end_ns = end_ns.max(end);
                    gpu_busy_by_second.extend(gpu_busy.unwrap_or_default());
                }
            }
        }
        let mut log = Self::from_thread_stamps(header, threads, end_ns);
        log.gpu_busy_by_second = gpu_busy_by_second;
        Ok(log)
    }

    fn from_thread_stamps(
        header: StampLogHeader,
        threads: BTreeMap<u32, ThreadStamps>,
        end_ns: u64,
    ) -> Self {
        let training_thread = threads
            .iter()
            .max_by_key(|(_, thread)| thread.step_spans_ns.len());
        let training_thread =
            training_thread.filter(|(_, thread)| !thread.step_spans_ns.is_empty());
        Self {
            pid: header.pid,
            variant: header.variant,
            ground_truth: header.known,
            begin_ns: header.begin,
            end_ns,
            step_spans_ns: training_thread
                .map_or_else(Vec::new, |(_, thread)| thread.step_spans_ns.clone()),
            training_thread: training_thread.map(|(tid, _)| *tid),
            gpu_busy_by_second: Vec::new(),
            thread_labels: threads
                .into_iter()
                .map(|(tid, thread)| (tid, Timeline::new(thread.label_changes, end_ns)))
                .collect(),
        }
    }

    /// The label of the process over time: that of its training thread. While the training thread is in its backward
    /// pass, the label of another thread that works for it counts, such as the autograd thread's.
    #[must_use]
    pub fn process_labels(&self) -> Option<Timeline<StampLabel>> {
        let training_thread = self.training_thread?;
        let mut labels = self.thread_labels.get(&training_thread)?.clone();
        for (tid, other) in &self.thread_labels {
            if *tid == training_thread {
                continue;
            }
            let other = other.fill_gaps(StampLabel::Other, self.begin_ns, self.end_ns);
            labels = labels.zip(&other).map(|(own, other)| match (own, other) {
                (StampLabel::Backward, StampLabel::Gpu | StampLabel::Peer) => other,
                _ => own,
            });
        }
        Some(labels)
    }

    /// From the first step to the end of the last.
    #[must_use]
    pub fn training_span_ns(&self) -> Option<(u64, u64)> {
        let start_ns = self.step_spans_ns.iter().map(|step| step.0).min()?;
        let end_ns = self.step_spans_ns.iter().map(|step| step.1).max()?;
        Some((start_ns, end_ns))
    }

    /// The median length of a step.
    #[must_use]
    pub fn median_step_ns(&self) -> Option<u64> {
        let steps = self.step_spans_ns.iter();
        let mut lengths: Vec<u64> = steps
            .map(|(start, end)| end.saturating_sub(*start))
            .collect();
        lengths.sort_unstable();
        lengths.get(lengths.len() / 2).copied()
    }
}

impl ThreadStamps {
    fn apply_stamp(&mut self, at_ns: u64, label: &str) -> Result<(), &'static str> {
        if self.label_changes.last().is_some_and(|last| at_ns < last.0) {
            return Err("its time is before that of the thread's last stamp");
        }
        match label.strip_prefix('+') {
            Some("step") => self.entered_labels.push((None, at_ns)),
            Some(name) => {
                let label = StampLabel::from_name(name).ok_or("unknown label")?;
                self.entered_labels.push((Some(label), at_ns));
            }
            None if label == "-" => {
                let left_label = self
                    .entered_labels
                    .pop()
                    .ok_or("it leaves a label that was not entered")?;
                if let (None, start_ns) = left_label {
                    self.step_spans_ns.push((start_ns, at_ns));
                }
            }
            None => return Err("a stamp is +label or -"),
        }
        if self.entered_labels.len() > MAX_LABEL_DEPTH {
            return Err("labels nest too deep");
        }
        let innermost = self
            .entered_labels
            .iter()
            .rev()
            .find_map(|(label, _)| *label);
        self.label_changes
            .push((at_ns, innermost.unwrap_or(StampLabel::Other)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE_LOG: &str = r#"{"version": 1, "pid": 7, "variant": "v", "clock": "monotonic", "begin": 0, "known": {"verdict": "gpu", "absent": ["NcclCollective"]}}
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
        let log = StampLog::parse(SAMPLE_LOG).unwrap();
        assert_eq!((log.pid, log.training_thread), (7, Some(7)));
        assert_eq!(log.training_span_ns(), Some((100, 200)));
        assert_eq!(log.ground_truth.absent, ["NcclCollective"]);
        let labels: Vec<_> = log.process_labels().unwrap().spans().collect();
        let expected = [
            (100, 110, StampLabel::Other),
            (110, 120, StampLabel::Data),
            (120, 130, StampLabel::Other),
            (130, 140, StampLabel::Forward),
            (140, 150, StampLabel::Gpu),
            (150, 160, StampLabel::Forward),
            (160, 170, StampLabel::Other),
            (170, 175, StampLabel::Backward),
            (175, 178, StampLabel::Gpu),
            (178, 180, StampLabel::Backward),
            (180, 300, StampLabel::Other),
        ];
        assert_eq!(labels, expected);
    }

    #[test]
    fn a_damaged_log_names_the_line() {
        let error = |text: &str| StampLog::parse(text).unwrap_err().to_string();
        assert_eq!(error(""), "it is empty");
        let header = SAMPLE_LOG.lines().next().unwrap();
        assert!(error("{}").starts_with("line 1 "));
        for line in ["[1, 2, \"-\"]", "[1, 2, \"+nothing\"]", "[1]", "{}"] {
            let text = format!("{header}\n{line}");
            assert!(error(&text).starts_with("line 2 "), "{line}");
        }
        assert!(StampLog::parse(header).unwrap().process_labels().is_none());
    }
}
