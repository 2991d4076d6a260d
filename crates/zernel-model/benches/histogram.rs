//! Recording a duration, beside the crates people use for it.

use std::hint::black_box;

use fastrand::Rng;
use zernel_model::aggregation::LatencyHistogram;
use zernel_testkit::bench::Comparison;

const OURS: &str = "LatencyHistogram";
const HDR: &str = "hdrhistogram, 1 digit";
const H2: &str = "histogram, grouping 4";
const H2_AND_REST: &str = "the same, with count, sum, least and greatest beside it";

fn main() {
    let mut rng = Rng::with_seed(7);
    let durations: Vec<u64> = (0..10_000).map(|_| rng.u64(..) >> rng.u8(20..50)).collect();
    let count = durations.len() as u64;
    let mut comparison = Comparison::from_args();

    let mut ours = LatencyHistogram::default();
    comparison.measure(OURS, count, || {
        for ns in &durations {
            ours.record(black_box(*ns));
        }
    });
    let mut hdr = hdrhistogram::Histogram::<u64>::new_with_max(u64::MAX >> 1, 1).expect("in range");
    comparison.measure(HDR, count, || {
        for ns in &durations {
            hdr.record(black_box(*ns)).expect("in range");
        }
    });
    let mut h2 = histogram::Histogram::new(4, 64).expect("in range");
    comparison.measure(H2, count, || {
        for ns in &durations {
            h2.increment(black_box(*ns)).expect("in range");
        }
    });
    let mut with_rest = WithRest::new();
    comparison.measure(H2_AND_REST, count, || {
        for ns in &durations {
            with_rest.record(black_box(*ns));
        }
    });
    black_box((ours, hdr, h2, with_rest));

    println!();
    comparison.ratio(OURS, HDR);
    comparison.ratio(OURS, H2);
    comparison.ratio(OURS, H2_AND_REST);
}

/// That crate's histogram with the count, sum, minimum and maximum that ours keeps.
struct WithRest {
    buckets: histogram::Histogram,
    count: u64,
    sum_ns: u64,
    min_ns: u64,
    max_ns: u64,
}

impl WithRest {
    fn new() -> Self {
        Self {
            buckets: histogram::Histogram::new(4, 64).expect("in range"),
            count: 0,
            sum_ns: 0,
            min_ns: u64::MAX,
            max_ns: 0,
        }
    }

    fn record(&mut self, ns: u64) {
        self.buckets.increment(ns).expect("in range");
        self.count += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
        self.min_ns = self.min_ns.min(ns);
        self.max_ns = self.max_ns.max(ns);
    }
}
