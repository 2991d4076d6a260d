//! Benchmarks that end in ratios: several ways to do the same thing, timed in one run.

use std::time::Instant;

use criterion::{Criterion, Throughput};

/// Times ways to do things and remembers the median time of each, for ratios at the end.
pub struct Comparison {
    criterion: Criterion,
    medians: Vec<(String, f64)>,
}

impl Comparison {
    /// Takes criterion's command line.
    #[must_use]
    pub fn from_args() -> Self {
        Self {
            criterion: Criterion::default().configure_from_args(),
            medians: Vec::new(),
        }
    }

    /// Times `routine`, one call of which does `operations` of what is to be compared.
    pub fn measure(&mut self, name: &str, operations: u64, mut routine: impl FnMut()) {
        let mut samples = Vec::new();
        let mut group = self.criterion.benchmark_group(name);
        group.throughput(Throughput::Elements(operations));
        group.bench_function("run", |bencher| {
            bencher.iter_custom(|calls| {
                let begin = Instant::now();
                for _ in 0..calls {
                    routine();
                }
                let elapsed = begin.elapsed();
                samples.push(elapsed.as_nanos() as f64 / (calls * operations) as f64);
                elapsed
            });
        });
        group.finish();
        samples.sort_by(f64::total_cmp);
        if let Some(median) = samples.get(samples.len() / 2) {
            self.medians.push((name.to_owned(), *median));
        }
    }

    /// Prints how the two compare by their median time per operation; nothing if one was filtered
    /// out.
    pub fn ratio(&self, name: &str, to: &str) {
        let median = |wanted| self.medians.iter().find(|(name, _)| name == wanted);
        if let (Some((_, this)), Some((_, that))) = (median(name), median(to)) {
            println!(
                "{name}: {this:.1} ns, {:.2} times that of {to} ({that:.1} ns)",
                this / that
            );
        }
    }
}
