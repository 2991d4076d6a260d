//! The deterministic virtual machine: the same files, command and seed give the same output to the last byte, on any
//! host and under any load.
//!
//! QEMU counts instructions and derives every clock of the guest from the count: one instruction takes one nanosecond,
//! and while all vCPUs are idle the clock jumps to the next timer. One host thread executes all vCPUs in turn; each
//! runs until the next virtual timer. So a timer every 10 µs bounds how long a vCPU waits for its turn. A preloaded
//! library (`qemu_threads.c`) keeps QEMU's other threads from changing the order of turns. docs/lab-machine.md lists
//! what this machine can measure and what it cannot.

use std::fmt;
use std::time::Duration;

/// Interval of the timer that ends a vCPU's turn. With it, four pinned spinners differ by 1 % under QEMU 7.2; without
/// it a vCPU waits for milliseconds.
const VCPU_TURN_TIMER_US: u32 = 10;

/// QEMU's setting for the guest's date at boot, and for a clock that follows virtual time.
const RTC_OPTION_VALUE: &str = "base=2026-01-01,clock=vm";

/// Settings of a deterministic run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeterministicSettings {
    /// The seed of the guest's random numbers and of the moment at which the command starts.
    pub seed: u64,
    /// How the scheduler ticks of the CPUs are aligned.
    pub ticks: TickAlignment,
    /// Virtual time after which the guest stops the command.
    pub virtual_time_limit: Duration,
    /// How many boots of this run the emulator has crashed.
    crashed_boots: usize,
}

impl DeterministicSettings {
    /// Virtual time that a command may take by default. In a busy guest that is several minutes on the host.
    pub const DEFAULT_VIRTUAL_TIME_LIMIT: Duration = Duration::from_secs(40);

    /// Settings of a run with this seed, aligned ticks and the default limit.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            ticks: TickAlignment::default(),
            virtual_time_limit: Self::DEFAULT_VIRTUAL_TIME_LIMIT,
            crashed_boots: 0,
        }
    }

    /// The same settings with another alignment of the ticks.
    #[must_use]
    pub fn ticks(mut self, ticks: TickAlignment) -> Self {
        self.ticks = ticks;
        self
    }

    /// The same settings with another limit of virtual time.
    #[must_use]
    pub fn virtual_time_limit(mut self, virtual_time_limit: Duration) -> Self {
        self.virtual_time_limit = virtual_time_limit;
        self
    }

    /// The settings of the next boot after the emulator has crashed the guest: the same limit and ticks, other random
    /// numbers, another start time and another kernel command line. The same boots crash in every run, so the result stays
    /// the same, too.
    pub(crate) fn settings_after_emulator_crash(&self) -> impl Iterator<Item = Self> {
        /// This step is larger than the number of seeds of any comparison, so no other run has the same seed.
        const RETRY_SEED_STEP: u64 = 1_000_003;
        (1..4).map(|attempt| Self {
            seed: self.seed.wrapping_add(attempt * RETRY_SEED_STEP),
            crashed_boots: attempt as usize,
            ..self.clone()
        })
    }

    /// A word for the kernel's command line after boots that the emulator crashed. Until the kernel starts its first
    /// program, a boot does not depend on the seed. The kernel ignores the word, but reads and prints it, which takes
    /// time, so that interrupts come at other moments.
    pub(crate) fn boot_delay_argument(&self) -> Option<String> {
        const LETTERS_PER_CRASH: usize = 17;
        let letters = "x".repeat(LETTERS_PER_CRASH * self.crashed_boots);
        (self.crashed_boots > 0).then(|| format!("zernel.boot_delay={letters}"))
    }

    /// QEMU's options of a deterministic run, without the accelerator and the CPU.
    pub(crate) fn qemu_options(&self) -> Vec<(&'static str, String)> {
        vec![
            ("-icount", "shift=0,sleep=off".to_owned()),
            ("-seed", self.seed.to_string()),
            ("-rtc", RTC_OPTION_VALUE.to_owned()),
            // A network hub without a network card: only the timer of its filter matters.
            ("-netdev", "hubport,id=turns,hubid=0".to_owned()),
            (
                "-object",
                format!("filter-buffer,id=turn,netdev=turns,interval={VCPU_TURN_TIMER_US}"),
            ),
        ]
    }

    /// The words that a deterministic run adds to the kernel's command line.
    pub(crate) fn kernel_arguments(&self) -> &'static [&'static str] {
        match self.ticks {
            TickAlignment::Aligned => &["clocksource=tsc", "skew_tick=0"],
            TickAlignment::Skewed => &["clocksource=tsc", "skew_tick=1"],
        }
    }

    /// Time between the moment at which the guest is ready and the start of the command: up to two ticks of 4 ms.
    pub(crate) fn command_start_delay(&self) -> Duration {
        const TWO_TICKS_US: u64 = 8_000;
        Duration::from_micros(random_words(self.seed).next().unwrap_or(0) % TWO_TICKS_US)
    }

    /// The 64 bytes that the guest's random number generator starts from.
    pub(crate) fn entropy(&self) -> [u8; 64] {
        let mut entropy = [0; 64];
        for (bytes, word) in entropy.chunks_mut(8).zip(random_words(self.seed).skip(1)) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        entropy
    }
}

/// Alignment of the scheduler ticks of the CPUs. Latencies depend on the alignment, because most preemption happens at
/// a tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TickAlignment {
    /// All CPUs tick at the same moment, the kernel's default.
    #[default]
    Aligned,
    /// The ticks are spread over the tick interval (`skew_tick=1`).
    Skewed,
}

/// What can be compared between two deterministic runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeterministicRunRecord {
    /// Hash of the output, the console with its timestamps, and the kernel's counters (interrupts, context switches,
    /// CPU time) at the end. Two runs of the same files, command and seed must have the same digest.
    pub digest: RunDigest,
    /// Virtual time from the guest's boot to the end of the command.
    pub virtual_run_time: Duration,
    /// The kernel's counters as text, which the guest printed at the end of the command.
    pub kernel_counters: String,
}

/// The first line in which two runs differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDifference {
    /// The part of the run that differs: its output, the console or the counters.
    pub part: &'static str,
    /// The number of the line, from 1.
    pub line_number: usize,
    /// The differing line in each of the two runs; `None` in the run that has fewer lines.
    pub line_in_each_run: [Option<String>; 2],
}

impl RunDifference {
    /// Compares one part of two runs; `None` if the part is equal in both.
    pub(crate) fn first_difference(
        part: &'static str,
        first_run: &[u8],
        second_run: &[u8],
    ) -> Option<Self> {
        if first_run == second_run {
            return None;
        }
        let [first_run, second_run] =
            [first_run, second_run].map(|text| text.split_inclusive(|byte| *byte == b'\n'));
        let equal_lines = first_run
            .clone()
            .zip(second_run.clone())
            .take_while(|(first_run, second_run)| first_run == second_run)
            .count();
        let text =
            |line: Option<&[u8]>| line.map(|line| String::from_utf8_lossy(line).into_owned());
        Some(Self {
            part,
            line_number: equal_lines + 1,
            line_in_each_run: [first_run, second_run].map(|mut lines| text(lines.nth(equal_lines))),
        })
    }
}

impl fmt::Display for RunDifference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            part,
            line_number,
            line_in_each_run,
        } = self;
        write!(
            formatter,
            "the {part} of the two runs differs in line {line_number}"
        )?;
        for (run, line) in ["first", "second"].into_iter().zip(line_in_each_run) {
            match line {
                Some(line) => write!(formatter, "\n  {run}: {line:?}")?,
                None => write!(formatter, "\n  {run}: no such line")?,
            }
        }
        Ok(())
    }
}

/// A 64-bit hash (FNV-1a), shown as 16 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunDigest(u64);

impl RunDigest {
    /// The hash of some texts, which also depends on where each text ends.
    pub(crate) fn of_texts<'a>(texts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
        const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;
        let mut hash = FNV_OFFSET;
        let mut add = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME);
        for text in texts {
            text.iter().copied().for_each(&mut add);
            text.len().to_le_bytes().into_iter().for_each(&mut add);
        }
        Self(hash)
    }
}

impl fmt::Display for RunDigest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}

/// An endless sequence of random numbers that a seed determines (SplitMix64).
fn random_words(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed;
    std::iter::from_fn(move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Some(word ^ (word >> 31))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_determines_entropy_and_command_start_delay() {
        let settings = DeterministicSettings::new(1);
        assert_eq!(settings.entropy(), DeterministicSettings::new(1).entropy());
        assert_ne!(settings.entropy(), DeterministicSettings::new(2).entropy());
        let delays: Vec<Duration> = (0..6)
            .map(|seed| DeterministicSettings::new(seed).command_start_delay())
            .collect();
        assert!(delays.iter().all(|delay| *delay < Duration::from_millis(8)));
        assert!(
            delays.windows(2).all(|pair| pair[0] != pair[1]),
            "{delays:?}"
        );
    }

    #[test]
    fn random_words_match_splitmix64() {
        // The first numbers that the reference implementation returns for seed 1234567.
        let words: Vec<u64> = random_words(1_234_567).take(2).collect();
        assert_eq!(
            words,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973]
        );
    }

    #[test]
    fn run_difference_names_first_differing_line() {
        let first_difference = |first_run: &str, second_run: &str| {
            RunDifference::first_difference("console", first_run.as_bytes(), second_run.as_bytes())
        };
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        let message = first_difference("a\nb\nc\n", "a\nd\ne\n")
            .unwrap()
            .to_string();
        let expected =
            "the console of the two runs differs in line 2\n  first: \"b\\n\"\n  second: \"d\\n\"";
        assert_eq!(message, expected);
        let longer = first_difference("a\n", "a\nb").unwrap();
        assert_eq!(
            (longer.line_number, longer.line_in_each_run),
            (2, [None, Some("b".to_owned())])
        );
        let cut = first_difference("a", "a\n").unwrap();
        assert_eq!(cut.line_number, 1);
    }

    #[test]
    fn run_digest_covers_bytes_and_text_boundaries() {
        let digest = |texts: &[&str]| RunDigest::of_texts(texts.iter().map(|text| text.as_bytes()));
        assert_eq!(digest(&["a", "b"]), digest(&["a", "b"]));
        for other in [&["a", "c"][..], &["ab", ""], &["", "ab"], &["a", "b", ""]] {
            assert_ne!(digest(&["a", "b"]), digest(other), "{other:?}");
        }
        assert_eq!(digest(&[]).to_string(), "cbf29ce484222325");
    }
}
