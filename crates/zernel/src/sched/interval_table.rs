//! The lines of `--stats` and `--monitor`: what the scheduler did in each interval.

use std::fmt::Write;

use zernel_model::scheduler::{ClassStatistics, SchedulerStatistics};
use zernel_phase::class::TaskClass;

/// Lines between two headers.
const LINES_PER_HEADER: u32 = 20;
/// Order of the columns.
const CLASS_COLUMNS: [TaskClass; 4] = [
    TaskClass::Critical,
    TaskClass::Feed,
    TaskClass::GpuWait,
    TaskClass::Other,
];

/// A table that grows by a line per interval.
#[derive(Debug, Default)]
pub(super) struct IntervalTable {
    last_statistics: Option<SchedulerStatistics>,
    lines_since_header: u32,
}

impl IntervalTable {
    /// Whether these statistics already ended the last line or began the first interval.
    pub(super) fn is_already_in_table(&self, statistics: &SchedulerStatistics) -> bool {
        let last = self.last_statistics.as_ref();
        last.is_some_and(|last| last.taken_ns == statistics.taken_ns)
    }

    /// The line of the interval since the last call, below a header if one is due. The first call begins the first
    /// interval and returns nothing.
    pub(super) fn add_interval(&mut self, now: &SchedulerStatistics) -> Option<String> {
        let last = self.last_statistics.replace(now.clone())?;
        let seconds = now.taken_ns.saturating_sub(last.taken_ns) as f64 / 1e9;
        let mut text = match self.lines_since_header.is_multiple_of(LINES_PER_HEADER) {
            true => format_header(),
            false => String::new(),
        };
        self.lines_since_header += 1;
        text += &format_line(&now.counted_since(&last), seconds.max(1e-9));
        Some(text)
    }
}

fn format_header() -> String {
    let mut text = String::new();
    for class in CLASS_COLUMNS {
        let _ = write!(text, "{:>20}  ", class.to_string());
    }
    text = text.trim_end().to_owned() + "\n";
    for _ in CLASS_COLUMNS {
        text += "  RUN/S  P99 WAIT  CPU  ";
    }
    text + "PREEMPT/S  HELD/S LENT/S\n"
}

fn format_line(interval: &SchedulerStatistics, seconds: f64) -> String {
    let all_ns: u64 = interval.classes.values().map(|class| class.run_ns).sum();
    let nothing = ClassStatistics::default();
    let mut text = String::new();
    for class in CLASS_COLUMNS {
        let counted = interval.classes.get(&class).unwrap_or(&nothing);
        let wait = match counted.wakeups {
            0 => "-".to_owned(),
            _ => format_duration(counted.wait_histogram().p99_ns()),
        };
        let share = 100.0 * counted.run_ns as f64 / all_ns.max(1) as f64;
        let rate = counted.runs as f64 / seconds;
        let _ = write!(text, "{rate:7.0}  {wait:>8} {share:3.0}%  ");
    }
    let counters = &interval.counters;
    let preemptions =
        counters.preempting_wakeups + counters.critical_wakeups + counters.feed_wakeups;
    let rate = |count: u64| count as f64 / seconds;
    let (preemptions, held) = (rate(preemptions), rate(counters.guarantee_hits));
    let lent = rate(counters.lent);
    let _ = writeln!(text, "{preemptions:9.0}  {held:6.0} {lent:6.0}");
    text
}

/// A time with two or three digits.
fn format_duration(ns: u64) -> String {
    match ns as f64 {
        ns if ns < 999.5e3 => format!("{:.0} µs", ns / 1e3),
        ns if ns < 99.95e6 => format!("{:.1} ms", ns / 1e6),
        ns if ns < 999.5e6 => format!("{:.0} ms", ns / 1e6),
        ns => format!("{:.1} s", ns / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statistics_at(seconds: u64) -> SchedulerStatistics {
        let critical = ClassStatistics {
            runs: 1500 * seconds,
            run_ns: 250_000_000 * seconds,
            wakeups: 1000 * seconds,
            wait_ns: 40_000_000 * seconds,
            wait_buckets: vec![900 * seconds, 0, 0, 0, 0, 0, 100 * seconds],
        };
        let other = ClassStatistics {
            runs: 10,
            run_ns: 750_000_000 * seconds,
            ..ClassStatistics::default()
        };
        let mut statistics = SchedulerStatistics {
            taken_ns: seconds * 1_000_000_000,
            ..SchedulerStatistics::default()
        };
        statistics.counters.critical_wakeups = 20 * seconds;
        statistics.counters.feed_wakeups = 10 * seconds;
        statistics.counters.guarantee_hits = 4 * seconds;
        statistics.counters.lent = 900 * seconds;
        statistics.classes.insert(TaskClass::Critical, critical);
        statistics.classes.insert(TaskClass::Other, other);
        statistics
    }

    #[test]
    fn a_line_describes_its_interval() {
        let mut table = IntervalTable::default();
        assert!(!table.is_already_in_table(&statistics_at(1)));
        assert_eq!(table.add_interval(&statistics_at(1)), None);
        assert!(table.is_already_in_table(&statistics_at(1)));
        assert!(!table.is_already_in_table(&statistics_at(3)));
        let text = table.add_interval(&statistics_at(3)).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        let words: Vec<&str> = lines[2].split_whitespace().collect();
        let expected = [
            "1500", "65", "µs", "25%", "0", "-", "0%", "0", "-", "0%", "0", "-", "75%", "30", "4",
            "900",
        ];
        assert_eq!(words, expected);
        assert_eq!(lines[1].chars().count(), lines[2].chars().count(), "{text}");
        assert!(
            lines.iter().all(|line| line.chars().count() <= 120),
            "{text}"
        );
        let next = table.add_interval(&statistics_at(4)).unwrap();
        assert_eq!(next.lines().count(), 1, "the header is there: {next}");
    }

    #[test]
    fn times_have_two_or_three_digits() {
        assert_eq!(format_duration(1023), "1 µs");
        assert_eq!(format_duration(131_071), "131 µs");
        assert_eq!(format_duration(1_048_575), "1.0 ms");
        assert_eq!(format_duration(134_217_727), "134 ms");
        assert_eq!(format_duration(8_589_934_591), "8.6 s");
    }
}
