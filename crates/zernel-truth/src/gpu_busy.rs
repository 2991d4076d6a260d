//! GPU busy per second: as the script measured it, and as the observer reported it.

use serde::Serialize;

use crate::stamps::StampLog;
use crate::trace::{RecordedTrace, TraceEntry};

const SECOND_NS: u64 = 1_000_000_000;

/// How far the reported GPU utilization is from the measured one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct GpuBusyScore {
    /// Seconds that were compared.
    pub seconds: usize,
    /// Median difference of a second, in percentage points.
    pub median_points: f64,
    /// Difference of the means over all seconds, in percentage points.
    pub mean_points: f64,
}

impl GpuBusyScore {
    /// Compares each second that a script measured with the samples of its training thread in that second.
    #[must_use]
    pub fn from_trace(trace: &RecordedTrace, log: &StampLog) -> Option<Self> {
        let training_thread = log.training_thread?;
        let samples: Vec<(u64, f64)> = trace
            .entries
            .iter()
            .filter_map(|entry| match entry {
                TraceEntry::Sample(sample) if sample.tid == training_thread => {
                    Some((sample.at_ns, f64::from(sample.gpu_utilization_percent)))
                }
                _ => None,
            })
            .collect();
        let mut pairs = Vec::new();
        for (end_ns, share) in &log.gpu_busy_by_second {
            let second = end_ns.saturating_sub(SECOND_NS)..*end_ns;
            let samples_in_second = samples.iter().filter(|sample| second.contains(&sample.0));
            let samples_in_second: Vec<f64> = samples_in_second.map(|sample| sample.1).collect();
            if !samples_in_second.is_empty() {
                pairs.push((
                    share * 100.0,
                    samples_in_second.iter().sum::<f64>() / samples_in_second.len() as f64,
                ));
            }
        }
        let mut errors: Vec<f64> = pairs
            .iter()
            .map(|(truth, reported)| (truth - reported).abs())
            .collect();
        errors.sort_by(f64::total_cmp);
        let sum: f64 = pairs.iter().map(|(truth, reported)| reported - truth).sum();
        Some(Self {
            seconds: errors.len(),
            median_points: *errors.get(errors.len() / 2)?,
            mean_points: sum / errors.len() as f64,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::SampleEntry;

    #[test]
    fn seconds_are_compared_with_their_samples() {
        let text = "{\"version\": 1, \"pid\": 7, \"begin\": 0}\n[1, 7, \"+step\"]\n[2, 7, \"-\"]\n\
                    {\"end\": 9, \"gpu_busy\": [[1000000000, 0.5], [2000000000, 0.9], [9000000000, 1.0]]}\n";
        let log = StampLog::parse(text).unwrap();
        let sample = |at_ms: u64, gpu_utilization_percent: u8| {
            TraceEntry::Sample(SampleEntry {
                at_ns: at_ms * 1_000_000,
                tid: 7,
                pid: 7,
                last_gpu_sync_ns: 0,
                cpu_burst_ns: 0,
                io_wait_q16: 0,
                futex_waits: 0,
                gpu_utilization_percent,
                nccl_active: false,
            })
        };
        let trace = RecordedTrace {
            entries: vec![sample(100, 40), sample(900, 50), sample(1500, 80)],
            ..RecordedTrace::default()
        };
        let score = GpuBusyScore::from_trace(&trace, &log).unwrap();
        assert_eq!(score.seconds, 2);
        assert!((score.median_points - 10.0).abs() < 1e-9);
        assert!((score.mean_points + 7.5).abs() < 1e-9);
        assert_eq!(
            GpuBusyScore::from_trace(&RecordedTrace::default(), &log),
            None
        );
    }
}
