//! A small fuzzer: mutates the inputs of a corpus and checks a parser with each of them.
//!
//! Every input is made from one number, its seed. A run uses consecutive seeds, so a failure is replayed by the seed
//! that it prints. Mutations do not know the format of the input. So a fuzz test provides a corpus of valid inputs and
//! a dictionary of words.
//!
//! A test binary with fuzz tests declares [`CountingAllocator`](crate::allocation::CountingAllocator) as its global
//! allocator. Its tests are named `fuzz_…`, so that `make fuzz` finds them.

use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{env, fs, io};

use rustix::time::{ClockId, clock_gettime};

use crate::allocation::peak_bytes;

/// Environment variable with the seed of the first input.
pub const SEED_VARIABLE: &str = "ZERNEL_FUZZ_SEED";
/// Environment variable with the CPU time of each target in seconds, which replaces its number of rounds. Without a
/// seed, such a run starts at a seed taken from the time of day.
pub const SECONDS_VARIABLE: &str = "ZERNEL_FUZZ_SECONDS";

/// The most CPU time that a parser may use for one input. A debug build on a busy machine stays far below it.
const MAX_CPU_TIME: Duration = Duration::from_secs(1);
/// The most memory that a parser may allocate for one input.
const MAX_MEMORY_BYTES: usize = 64 << 20;
/// Time after which an input counts as one that never ends. The CPU time of such an input cannot be measured.
const HANG_TIMEOUT: Duration = Duration::from_secs(120);
/// Largest size to which mutations let an input grow.
const MAX_INPUT_BYTES: usize = 1 << 20;

/// A parser to fuzz, with the inputs and words that mutations start from.
#[derive(Debug)]
pub struct FuzzTarget<'a> {
    name: &'a str,
    corpus: Vec<Vec<u8>>,
    dictionary: Vec<Vec<u8>>,
    rounds: u64,
}

/// What a fuzz run did.
#[derive(Debug, Clone, Copy)]
pub struct FuzzStatistics {
    /// Number of inputs that were checked.
    pub inputs: u64,
    /// The most CPU time that the parser used for one input.
    pub most_cpu_time: Duration,
    /// The most memory that the parser allocated for one input.
    pub max_input_memory_bytes: usize,
}

/// What a parser did wrong with an input.
#[derive(Debug, PartialEq, Eq)]
enum FuzzFault {
    Panicked,
    CpuTime(Duration),
    Memory(usize),
}

impl<'a> FuzzTarget<'a> {
    /// A target that is checked with `rounds` inputs, unless [`SECONDS_VARIABLE`] is set.
    #[must_use]
    pub fn new(name: &'a str, rounds: u64) -> Self {
        Self {
            name,
            corpus: Vec::new(),
            dictionary: Vec::new(),
            rounds,
        }
    }

    /// Adds an input to the corpus.
    #[must_use]
    pub fn input(mut self, input: impl Into<Vec<u8>>) -> Self {
        self.corpus.push(input.into());
        self
    }

    /// Adds the files of a folder to the corpus, in the order of their names. Fails if there are none.
    #[must_use]
    pub fn folder(mut self, folder: &Path) -> Self {
        let entries = fs::read_dir(folder).expect("the folder of the corpus exists");
        let mut files: Vec<PathBuf> = entries
            .map(|entry| entry.expect("readable").path())
            .collect();
        files.sort();
        assert!(!files.is_empty(), "{} is empty", folder.display());
        let inputs = files.iter().map(|file| fs::read(file).expect("readable"));
        self.corpus.extend(inputs);
        self
    }

    /// Adds words to the dictionary, from which mutations insert words.
    #[must_use]
    pub fn words<'w>(mut self, words: impl IntoIterator<Item = &'w str>) -> Self {
        let words = words.into_iter().map(|word| word.as_bytes().to_vec());
        self.dictionary.extend(words);
        self
    }

    /// Checks the inputs of the corpus, then mutations of them. Panics at the first input that makes `check` panic,
    /// take too much CPU time or allocate too much memory. The message contains the seed; the input is written to a
    /// file.
    pub fn run(self, mut check: impl FnMut(&[u8])) -> FuzzStatistics {
        let seconds = env_number(SECONDS_VARIABLE).map(Duration::from_secs);
        let first = env_number(SEED_VARIABLE).unwrap_or_else(|| match seconds {
            Some(_) => time_of_day(),
            None => 1,
        });
        println!("fuzz {}: {SEED_VARIABLE}={first}", self.name);
        let mut outcome = FuzzStatistics {
            inputs: 0,
            most_cpu_time: Duration::ZERO,
            max_input_memory_bytes: 0,
        };
        for (number, input) in self.corpus.iter().enumerate() {
            if let Err(fault) = run_one_input(input, &mut check, &mut outcome) {
                self.fail_with_input(input, &fault, &format!("input {number} of the corpus"));
            }
        }
        let watchdog = InputWatchdog::start(HANG_TIMEOUT, {
            let name = self.name.to_owned();
            move |seed| {
                eprintln!("{name}: no end with {SEED_VARIABLE}={seed}");
                std::process::abort();
            }
        });
        let start = thread_cpu_time();
        for round in 0.. {
            let ended = match seconds {
                Some(seconds) => thread_cpu_time() - start >= seconds,
                None => round == self.rounds,
            };
            if ended {
                break;
            }
            let seed = first.wrapping_add(round);
            watchdog.set_current_seed(seed);
            let input = self.mutated_input(seed);
            if let Err(fault) = run_one_input(&input, &mut check, &mut outcome) {
                self.fail_with_input(&input, &fault, &format!("{SEED_VARIABLE}={seed}"));
            }
        }
        println!("fuzz {}: {outcome:?}", self.name);
        outcome
    }

    /// Makes the input that belongs to a seed: a mutation of an input of the corpus.
    fn mutated_input(&self, seed: u64) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut input = random.choice(&self.corpus).cloned().unwrap_or_default();
        // Half of all inputs keep their length. In binary formats a change of length moves what headers point to, and
        // little of the parser is reached.
        let mutations = match random.bool() {
            true => 0..4,
            false => 0..10,
        };
        for _ in 0..1 << random.u32(0..5) {
            self.apply_mutation(&mut input, random.u32(mutations.clone()), &mut random);
            input.truncate(MAX_INPUT_BYTES);
        }
        input
    }

    /// Applies one mutation to the input. The first four mutations replace bytes; the others also change the length.
    fn apply_mutation(&self, input: &mut Vec<u8>, mutation: u32, random: &mut fastrand::Rng) {
        let at = random.usize(0..=input.len());
        let range = at..at + random.usize(0..=(input.len() - at).min(64));
        match mutation {
            0 => flip_bit(input, random),
            1 => overwrite_bytes(input, at, &interesting_integer(random)),
            2 => overwrite_bytes(input, at, &[random.u8(..)]),
            3 => overwrite_bytes(input, at, &self.random_word(random)),
            4 => drop(input.splice(at..at, interesting_integer(random))),
            5 => drop(input.splice(at..at, self.random_word(random))),
            6 => input.truncate(at),
            7 => drop(input.drain(range)),
            8 => {
                let repeated = input[range].repeat(1 << random.u32(0..8));
                input.splice(at..at, repeated);
            }
            _ => {
                let other = random.choice(&self.corpus).map_or(&[][..], Vec::as_slice);
                let from = random.usize(0..=other.len());
                let to = random.usize(from..=other.len());
                input.splice(at..at, other[from..to].iter().copied());
            }
        }
    }

    /// A random word of the dictionary.
    fn random_word(&self, random: &mut fastrand::Rng) -> Vec<u8> {
        let word = random.choice(&self.dictionary);
        word.cloned().unwrap_or_default()
    }

    fn fail_with_input(&self, input: &[u8], fault: &FuzzFault, replay: &str) -> ! {
        let mut message = format!("{}: {fault:?} with {replay}", self.name);
        match write_input(self.name, input) {
            Ok(path) => _ = write!(message, "; the input is in {}", path.display()),
            Err(error) => _ = write!(message, "; the input cannot be written: {error}"),
        }
        panic!("{message}");
    }
}

/// A thread that finds an input with which the parser never ends.
struct InputWatchdog {
    /// The seed of the input that is being checked.
    seed: Arc<AtomicU64>,
    /// The thread ends when this sender is dropped.
    _end: mpsc::Sender<()>,
}

impl InputWatchdog {
    /// Starts the thread. It calls `found` with a seed if the check of its input lasts longer than `patience`; the call
    /// may be late by another `patience`.
    fn start(patience: Duration, found: impl FnOnce(u64) + Send + 'static) -> Self {
        let seed = Arc::new(AtomicU64::new(0));
        let (end, ended) = mpsc::channel();
        let current = Arc::clone(&seed);
        thread::spawn(move || {
            let mut before = None;
            while ended.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                let now = current.load(Ordering::Relaxed);
                if before.replace(now) == Some(now) {
                    return found(now);
                }
            }
        });
        Self { seed, _end: end }
    }

    fn set_current_seed(&self, seed: u64) {
        self.seed.store(seed, Ordering::Relaxed);
    }
}

fn run_one_input(
    input: &[u8],
    check: &mut impl FnMut(&[u8]),
    outcome: &mut FuzzStatistics,
) -> Result<(), FuzzFault> {
    let before = thread_cpu_time();
    let (result, memory) = peak_bytes(|| catch_unwind(AssertUnwindSafe(|| check(input))));
    let cpu_time = thread_cpu_time() - before;
    outcome.inputs += 1;
    outcome.most_cpu_time = outcome.most_cpu_time.max(cpu_time);
    outcome.max_input_memory_bytes = outcome.max_input_memory_bytes.max(memory);
    match result {
        Err(_) => Err(FuzzFault::Panicked),
        Ok(()) if cpu_time > MAX_CPU_TIME => Err(FuzzFault::CpuTime(cpu_time)),
        Ok(()) if memory > MAX_MEMORY_BYTES => Err(FuzzFault::Memory(memory)),
        Ok(()) => Ok(()),
    }
}

/// CPU time that the calling thread has used.
fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

fn flip_bit(input: &mut [u8], random: &mut fastrand::Rng) {
    if !input.is_empty() {
        input[random.usize(0..input.len())] ^= 1 << random.u32(0..8);
    }
}

/// Replaces the bytes of `input` from `at` on by `bytes`, and appends those that reach beyond the end.
fn overwrite_bytes(input: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    let end = input.len().min(at + bytes.len());
    input.splice(at..end, bytes.iter().copied());
}

/// The bytes of an integer near a limit of some width, in either byte order.
fn interesting_integer(random: &mut fastrand::Rng) -> Vec<u8> {
    let power = 1_u64 << random.u32(0..64);
    let near = *random
        .choice(&[0, 1, power, power - 1, power + 1, power.wrapping_neg()])
        .expect("not empty");
    let width = 1 << random.usize(0..4);
    match random.bool() {
        true => near.to_le_bytes()[..width].to_vec(),
        false => near.to_be_bytes()[8 - width..].to_vec(),
    }
}

fn env_number(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    let number = text.parse();
    Some(number.unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

fn time_of_day() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    since_epoch.map_or(1, |since| since.as_nanos() as u64)
}

/// Writes an input to a file in the system's temporary folder.
fn write_input(name: &str, input: &[u8]) -> io::Result<PathBuf> {
    let path = env::temp_dir().join(format!("zernel-fuzz-{name}-{}", std::process::id()));
    fs::write(&path, input)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panic_message_of(name: &str, check: impl FnMut(&[u8])) -> String {
        let target = FuzzTarget::new(name, 100_000)
            .input(*b"some text")
            .words(["needle"]);
        let run = catch_unwind(AssertUnwindSafe(|| target.run(check)));
        *run.expect_err("it fails")
            .downcast::<String>()
            .expect("text")
    }

    #[test]
    fn panicking_input_is_found_and_replayed_by_seed() {
        let has_needle = |input: &[u8]| input.windows(6).any(|window| window == b"needle");
        let message = panic_message_of("needle", |input| assert!(!has_needle(input)));
        let (_, seed) = message
            .split_once(&format!("{SEED_VARIABLE}="))
            .expect("a seed");
        let seed = seed.split(';').next().and_then(|seed| seed.parse().ok());
        let target = FuzzTarget::new("self-test", 1)
            .input(*b"some text")
            .words(["needle"]);
        let input = target.mutated_input(seed.expect("a number"));
        assert!(has_needle(&input), "{input:?}");
        let (_, path) = message.split_once("is in ").expect("a path");
        assert_eq!(fs::read(path).expect("written"), input);
        fs::remove_file(path).expect("ours");
    }

    #[test]
    fn inputs_with_too_much_cpu_time_or_memory_are_found() {
        let slow = panic_message_of("slow", |_| {
            let start = thread_cpu_time();
            while thread_cpu_time() - start <= MAX_CPU_TIME {}
        });
        assert!(slow.contains("CpuTime"), "{slow}");
        let large = panic_message_of("large", |_| {
            drop(std::hint::black_box(vec![0_u8; MAX_MEMORY_BYTES + 1]));
        });
        assert!(large.contains("Memory"), "{large}");
        for message in [slow, large] {
            let (_, path) = message.split_once("is in ").expect("a path");
            let _ = fs::remove_file(path);
        }
    }

    #[test]
    fn watchdog_reports_seed_of_hanging_input() {
        let (sender, found) = mpsc::channel();
        let watchdog = InputWatchdog::start(Duration::from_millis(1), move |seed| {
            sender.send(seed).expect("the test waits");
        });
        watchdog.set_current_seed(7);
        assert!([0, 7].contains(&found.recv().expect("it is found")));
        drop(watchdog);
    }

    #[test]
    fn every_mutation_changes_inputs() {
        let target = FuzzTarget::new("self-test", 1).input(*b"some text");
        let inputs: std::collections::BTreeSet<_> =
            (0..1000).map(|seed| target.mutated_input(seed)).collect();
        assert!(inputs.len() > 800, "{}", inputs.len());
        assert!(inputs.iter().any(|input| input.len() > 1000));
        assert!(inputs.iter().any(Vec::is_empty));
    }

    #[test]
    fn fuzz_run_counts_inputs() {
        if env::var_os(SECONDS_VARIABLE).is_none() {
            let outcome = FuzzTarget::new("self-test", 50).input(*b"x").run(|_| ());
            assert_eq!(outcome.inputs, 51);
        }
    }
}
