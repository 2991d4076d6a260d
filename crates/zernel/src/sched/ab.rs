//! `zernel sched --ab`: compares this machine's training with and without the scheduler, in alternating blocks of time.

use std::error::Error;
use std::fmt;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use zernel_lab::compare::statistics::SignTestOutcome;
use zernel_scheduler::scheduler::{self, SchedError};

use super::load_scheduler::check_scheduler_can_load;
use super::paired_blocks::{PairedBlocks, StepCounts, StepRates};
use super::policy_options::PolicyOptions;
use super::published_statistics::monotonic_ns;
use super::scheduler_session::SchedulerSession;
use crate::daemon_client::{ClientError, DaemonSocket};
use crate::interrupt_flags;
use crate::run::attach::parse_duration;

/// Pairs of blocks in the whole time, if blocks are then long enough.
const DEFAULT_PAIR_COUNT: u32 = 20;
/// The shortest block that is chosen without `--block`: training must make many steps in it.
const MIN_DEFAULT_BLOCK: Duration = Duration::from_secs(5);
/// The shortest block of `--block`. The observer reads the counts of steps twice a second.
const MIN_REQUESTED_BLOCK: Duration = Duration::from_secs(2);
/// The fewest pairs that have an interval.
const MIN_PAIRS: u32 = 2;
/// Pairs in a row that may fail before the comparison ends.
const MAX_FAILED_PAIRS_IN_A_ROW: u32 = 3;
/// The part of a block that is not counted, while training adapts to the change.
const UNMEASURED_SHARE_OF_BLOCK: f64 = 0.2;
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// The exit code if the scheduler makes training slower.
const SLOWER_TRAINING_EXIT_CODE: u8 = 3;

#[derive(Debug, Args)]
pub(crate) struct AbOptions {
    /// For TIME, such as 10m, alternate between this scheduler and the kernel's, and compare steps/s
    ///
    /// Needs `zernel observe`. Blocks come in pairs, in random order. The time to load the scheduler comes on top of
    /// TIME. The comparison stops early if a sign test over the pairs shows that the scheduler is worse, and then exits
    /// with 3.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    #[arg(conflicts_with_all = ["stats", "restart", "monitor", "dry_run", "config", "watchdog_ms", "without", "replace", "gpu_nodes"])]
    pub(super) ab: Option<Duration>,
    /// Length of a block of --ab [default: a 40th of its TIME, at least 5s]
    #[arg(long, value_name = "TIME", value_parser = parse_block_length, requires = "ab")]
    block: Option<Duration>,
    #[command(flatten)]
    socket: DaemonSocket,
}

pub(super) fn run(
    options: &AbOptions,
    time: Duration,
    policy: &PolicyOptions,
) -> Result<ExitCode, Box<dyn Error>> {
    let stop = interrupt_flags::interrupt_flag()?;
    check_scheduler_can_load()?;
    if read_step_counts(&options.socket)?.is_empty() {
        return Err("no training process runs; start one first".into());
    }
    let schedule = BlockSchedule::new(time, options.block);
    eprintln!("zernel: {schedule}");
    let comparison = BlockSettings {
        socket: &options.socket,
        policy,
        block_length: schedule.block,
        stop: &stop,
    };
    let mut blocks = PairedBlocks::default();
    let ended = measure_pairs(&comparison, schedule.pairs, &mut blocks);
    // What was measured is printed even if the comparison could not go on.
    crate::print_to_stdout(format_result(&blocks).as_bytes())?;
    ended?;
    Ok(match blocks.sign_test_outcome() {
        SignTestOutcome::Worse => ExitCode::from(SLOWER_TRAINING_EXIT_CODE),
        _ => ExitCode::SUCCESS,
    })
}

fn parse_block_length(text: &str) -> Result<Duration, String> {
    let block = parse_duration(text)?;
    match block >= MIN_REQUESTED_BLOCK {
        true => Ok(block),
        false => Err("a block takes at least 2s".to_owned()),
    }
}

/// How the time of the comparison is divided into pairs of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BlockSchedule {
    pairs: u32,
    block: Duration,
}

impl BlockSchedule {
    fn new(time: Duration, block: Option<Duration>) -> Self {
        let block =
            block.unwrap_or_else(|| (time / (2 * DEFAULT_PAIR_COUNT)).max(MIN_DEFAULT_BLOCK));
        let pairs = (time.as_secs_f64() / (2.0 * block.as_secs_f64())).round();
        Self {
            // A float that is too large becomes the largest integer.
            pairs: (pairs as u32).max(MIN_PAIRS),
            block,
        }
    }
}

impl fmt::Display for BlockSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pairs, block } = self;
        write!(
            f,
            "{pairs} pairs of blocks, {} s each; the comparison stops early if the scheduler is worse in 6 of 6 pairs, \
             11 of 13 or the like (sign test, p ≤ 0.016)",
            block.as_secs_f64()
        )
    }
}

/// Measures pairs of blocks until there are enough pairs, the scheduler turns out to be worse, or Ctrl-C is pressed.
/// A pair that fails is measured again.
fn measure_pairs(
    comparison: &BlockSettings<'_>,
    pairs: u32,
    blocks: &mut PairedBlocks,
) -> Result<(), Box<dyn Error>> {
    let (mut measured, mut failures) = (0, 0);
    while measured < pairs && blocks.sign_test_outcome() != SignTestOutcome::Worse {
        match comparison.measure_pair() {
            Ok(Some((with, without))) => {
                blocks.add_pair(&with, &without);
                (measured, failures) = (measured + 1, 0);
                let so_far = blocks
                    .mean_ratio()
                    .map(|ratio| format!("; so far, {ratio}"));
                eprintln!(
                    "zernel: pair {measured} of {pairs}{}",
                    so_far.unwrap_or_default()
                );
            }
            Ok(None) => break,
            Err(BlockError::Scheduler(error)) => return Err(error.into()),
            Err(BlockError::Observer(problem)) if failures + 1 == MAX_FAILED_PAIRS_IN_A_ROW => {
                return Err(format!("{problem}; the comparison ends").into());
            }
            Err(BlockError::Observer(problem)) => {
                failures += 1;
                eprintln!("zernel: the pair is measured again: {problem}");
            }
        }
    }
    Ok(())
}

/// Why a block was not measured.
enum BlockError {
    /// The scheduler was not loaded, or did not stay loaded.
    Scheduler(SchedError),
    /// The observer did not answer.
    Observer(String),
}

fn format_result(blocks: &PairedBlocks) -> String {
    let mut text = match blocks.mean_ratio() {
        Some(ratio) => format!("{ratio}\n"),
        None => "too few pairs of blocks to compare\n".to_owned(),
    };
    text += match blocks.sign_test_outcome() {
        SignTestOutcome::Better => "the scheduler is better\n",
        SignTestOutcome::Worse => "the scheduler is worse\n",
        SignTestOutcome::Undecided => "neither is shown to be better\n",
    };
    if blocks.discarded_pairs > 0 {
        let discarded = blocks.discarded_pairs;
        text += &format!(
            "{discarded} pairs were discarded: training processes came, went or made no steps\n"
        );
    }
    text
}

/// What the measurements of all blocks use: the daemon's socket, the policy, the length of a block and the stop flag.
struct BlockSettings<'a> {
    socket: &'a DaemonSocket,
    policy: &'a PolicyOptions,
    block_length: Duration,
    stop: &'a AtomicBool,
}

impl BlockSettings<'_> {
    /// Measures a block with the scheduler and one without it, in random order. Returns `None` if it was interrupted.
    fn measure_pair(&self) -> Result<Option<(StepRates, StepRates)>, BlockError> {
        let begins_with = random_bool();
        let first = self.measure_block(begins_with)?;
        let second = match first {
            Some(_) => self.measure_block(!begins_with)?,
            None => None,
        };
        let pair = first.zip(second);
        Ok(pair.map(|(first, second)| match begins_with {
            true => (first, second),
            false => (second, first),
        }))
    }

    fn measure_block(&self, is_scheduled: bool) -> Result<Option<StepRates>, BlockError> {
        let mut block = BlockMeasurement::new(self);
        if is_scheduled {
            let mut session = SchedulerSession::new_quiet(self.policy.clone());
            scheduler::run_scheduler(&session.load_settings(), |loaded| {
                match session.poll_session(loaded, self.stop) {
                    ControlFlow::Continue(()) => block.poll_block(),
                    stopped @ ControlFlow::Break(()) => stopped,
                }
            })
            .map_err(BlockError::Scheduler)?;
        } else {
            while !self.stop.load(Ordering::Relaxed) && block.poll_block().is_continue() {
                thread::sleep(POLL_INTERVAL);
            }
        }
        match self.stop.load(Ordering::Relaxed) {
            true => Ok(None),
            false => block.rates.map(Some).map_err(BlockError::Observer),
        }
    }
}

/// A block of time, which begins with the first poll.
struct BlockMeasurement<'a> {
    settings: &'a BlockSettings<'a>,
    began_at: Option<Instant>,
    first_counts: Option<StepCounts>,
    rates: Result<StepRates, String>,
}

impl<'a> BlockMeasurement<'a> {
    fn new(comparison: &'a BlockSettings<'a>) -> Self {
        Self {
            settings: comparison,
            began_at: None,
            first_counts: None,
            rates: Err("the block was not completed".to_owned()),
        }
    }

    /// Breaks at the end of the block, or when the observer does not answer.
    fn poll_block(&mut self) -> ControlFlow<()> {
        let began = *self.began_at.get_or_insert_with(Instant::now);
        let length = self.settings.block_length;
        let elapsed = began.elapsed();
        if elapsed < length.mul_f64(UNMEASURED_SHARE_OF_BLOCK)
            || (elapsed < length && self.first_counts.is_some())
        {
            return ControlFlow::Continue(());
        }
        let counts = match read_step_counts(self.settings.socket) {
            Ok(counts) => counts,
            Err(error) => {
                self.rates = Err(error.to_string());
                return ControlFlow::Break(());
            }
        };
        match &self.first_counts {
            None => {
                self.first_counts = Some(counts);
                ControlFlow::Continue(())
            }
            Some(first) => {
                self.rates = Ok(first.step_rates_until(&counts));
                ControlFlow::Break(())
            }
        }
    }
}

fn read_step_counts(socket: &DaemonSocket) -> Result<StepCounts, ClientError> {
    let snapshot = socket.fresh_snapshot()?;
    Ok(StepCounts::from_snapshot(&snapshot, monotonic_ns()))
}

/// Tosses a coin. Without a source of random numbers the result is always tails.
fn random_bool() -> bool {
    let mut byte = [0];
    let _ = rustix::rand::getrandom(&mut byte, rustix::rand::GetRandomFlags::empty());
    byte[0] & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_divided_into_blocks() {
        let schedule = |seconds, block: Option<u64>| {
            let block = block.map(Duration::from_secs);
            let BlockSchedule { pairs, block } =
                BlockSchedule::new(Duration::from_secs(seconds), block);
            (pairs, block.as_secs())
        };
        assert_eq!(schedule(600, None), (20, 15));
        assert_eq!(schedule(60, None), (6, 5));
        assert_eq!(schedule(1, None), (2, 5));
        assert_eq!(schedule(60, Some(2)), (15, 2));
        assert!(parse_block_length("1.9s").is_err() && parse_block_length("2s").is_ok());
    }

    #[test]
    fn the_report_says_what_was_shown() {
        let mut blocks = PairedBlocks::default();
        assert!(format_result(&blocks).contains("too few pairs"));
        let rates = |rate: f64| StepRates::from([((1, 1), rate)]);
        for _ in 0..6 {
            blocks.add_pair(&rates(1.2), &rates(1.0));
        }
        blocks.add_pair(&rates(1.2), &StepRates::new());
        let text = format_result(&blocks);
        assert!(
            text.starts_with("steps/s with the scheduler: 1.200 times"),
            "{text}"
        );
        assert!(text.contains("the scheduler is better\n"), "{text}");
        assert!(text.contains("1 pairs were discarded"), "{text}");
    }
}
