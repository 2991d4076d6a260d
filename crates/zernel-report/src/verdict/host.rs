//! Host-bound: the training threads run on CPUs.

use super::resource::{Resource, ResourceTime};
use super::{Description, Verdict};
use crate::times::{Part, Parts};

pub(super) static RESOURCE: Resource = Resource {
    key: "host",
    title: "host-bound",
    time: "host work",
    parts: &[(Part::Host, "running on CPUs")],
    remedy,
    verdict,
};

/// The training threads run on CPUs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HostBound {
    time: ResourceTime,
    gpu: GpuActivity,
    remedy: &'static str,
}

/// What the GPUs did while the training threads ran.
#[derive(Debug, Clone, Copy, PartialEq)]
enum GpuActivity {
    /// No rank used a GPU.
    Unused,
    /// NVML reported no utilization.
    NotReported,
    /// Share of the time in which they were busy, as NVML reports it.
    Busy(f64),
}

fn verdict(time: ResourceTime, ranks: &[Parts]) -> Verdict {
    Verdict::Host(HostBound {
        time,
        gpu: GpuActivity::new(ranks),
        remedy: remedy(Part::Host, ranks),
    })
}

fn use_gpu(ranks: &[Parts]) -> bool {
    ranks.iter().any(|rank| rank.uses_gpu)
}

fn remedy(_: Part, ranks: &[Parts]) -> &'static str {
    match use_gpu(ranks) {
        true => "CUDA graphs, torch.compile or larger batches (less host work per kernel)",
        false => "a GPU, or more or faster CPUs",
    }
}

impl GpuActivity {
    fn new(ranks: &[Parts]) -> Self {
        let shares: Vec<f64> = ranks.iter().filter_map(|rank| rank.gpu_busy).collect();
        match use_gpu(ranks) {
            true if shares.is_empty() => Self::NotReported,
            true => Self::Busy(shares.iter().sum::<f64>() / shares.len() as f64),
            false => Self::Unused,
        }
    }
}

impl HostBound {
    pub(super) fn describe(&self) -> Description {
        let gpu = match self.gpu {
            GpuActivity::Unused => "and no rank used a GPU".to_owned(),
            GpuActivity::NotReported => "and hardly waited for the GPU".to_owned(),
            GpuActivity::Busy(share) => {
                format!("while the GPU was busy {:.0} % (NVML)", 100.0 * share)
            }
        };
        let share = self.time.share_text();
        let evidence = format!("training threads ran on CPUs for {share} {gpu}");
        (self.time).describe(&RESOURCE, Part::Host, evidence, self.remedy)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::times::RankTimes;
    use crate::verdict::judge;
    use crate::verdict::tests::{assert_bound, assert_json, bound_of, gpu_rank, remedy_of};

    #[test]
    fn work_on_cpus_bounds_a_job() {
        assert_bound(
            "host",
            &[(
                "launches all the time",
                RankTimes {
                    gpu_waits: 10.0,
                    cpu: 90.0,
                    ..gpu_rank()
                },
            )],
        );
    }

    #[test]
    fn a_job_without_a_gpu_gets_no_cuda_remedy() {
        let computes = RankTimes {
            wall: 100.0,
            cpu: 300.0,
            unknown: 10.0,
            ..RankTimes::default()
        };
        let verdict = judge(&[computes]);
        assert_eq!(bound_of(&verdict), "host");
        assert!(verdict.describe().evidence.contains("no rank used a GPU"));
        assert!(!remedy_of(&verdict).contains("CUDA"));
    }

    /// Without a GPU and a known optimizer all time is in phase Unknown.
    #[test]
    fn without_a_gpu_work_on_cpus_is_known() {
        let alone = RankTimes {
            wall: 100.0,
            unknown: 100.0,
            cpu: 95.0,
            ..RankTimes::default()
        };
        let verdict = judge(&[alone]);
        assert_eq!(
            bound_of(&verdict),
            "host",
            "{}",
            verdict.describe().evidence
        );
        let waiting = RankTimes {
            cpu: 12.0,
            communication: 80.0,
            peer_waits: 80.0,
            ..alone
        };
        let asleep = RankTimes { cpu: 12.0, ..alone };
        let verdict = judge(&[waiting, asleep]);
        assert_eq!(
            bound_of(&verdict),
            "straggler",
            "{}",
            verdict.describe().evidence
        );
        assert_eq!(verdict.describe().straggler, Some(1));
    }

    #[test]
    fn the_json_keeps_its_values() {
        let launching = RankTimes {
            gpu_waits: 10.0,
            cpu: 90.0,
            ..gpu_rank()
        };
        assert_json(&[launching], &json!(["host", "host", null, 0.82, 82.0]));
    }
}
