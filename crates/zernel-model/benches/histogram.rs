//! Compares recording a duration with the crates that programs often use for histograms.

use std::hint::black_box;

use fastrand::Rng;
use zernel_model::aggregation::LatencyHistogram;
use zernel_testkit::bench::TimedComparison;

const OUR_HISTOGRAM_NAME: &str = "LatencyHistogram";
const HDR_HISTOGRAM_NAME: &str = "hdrhistogram, 1 digit";
const H2_HISTOGRAM_NAME: &str = "histogram, grouping 4";
const H2_HISTOGRAM_WITH_TOTALS_NAME: &str =
    "the same, with count, sum, least and greatest beside it";

fn main() {
    let mut rng = Rng::with_seed(7);
    let durations: Vec<u64> = (0..10_000).map(|_| rng.u64(..) >> rng.u8(20..50)).collect();
    let count = durations.len() as u64;
    let mut comparison = TimedComparison::from_args();

    let mut ours = LatencyHistogram::default();
    comparison.measure_routine(OUR_HISTOGRAM_NAME, count, || {
        for ns in &durations {
            ours.record(black_box(*ns));
        }
    });
    let mut hdr = hdrhistogram::Histogram::<u64>::new_with_max(u64::MAX >> 1, 1).expect("in range");
    comparison.measure_routine(HDR_HISTOGRAM_NAME, count, || {
        for ns in &durations {
            hdr.record(black_box(*ns)).expect("in range");
        }
    });
    let mut h2 = histogram::Histogram::new(4, 64).expect("in range");
    comparison.measure_routine(H2_HISTOGRAM_NAME, count, || {
        for ns in &durations {
            h2.increment(black_box(*ns)).expect("in range");
        }
    });
    let mut with_rest = HistogramWithTotals::new();
    comparison.measure_routine(H2_HISTOGRAM_WITH_TOTALS_NAME, count, || {
        for ns in &durations {
            with_rest.record(black_box(*ns));
        }
    });
    black_box((ours, hdr, h2, with_rest));

    println!();
    comparison.print_ratio(OUR_HISTOGRAM_NAME, HDR_HISTOGRAM_NAME);
    comparison.print_ratio(OUR_HISTOGRAM_NAME, H2_HISTOGRAM_NAME);
    comparison.print_ratio(OUR_HISTOGRAM_NAME, H2_HISTOGRAM_WITH_TOTALS_NAME);
}

/// The histogram of the crate `histogram`, with the count, sum, minimum and maximum that Zernel's histogram also
/// keeps.
struct HistogramWithTotals {
    buckets: histogram::Histogram,
    count: u64,
    sum_ns: u64,
    min_ns: u64,
    max_ns: u64,
}

impl HistogramWithTotals {
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
