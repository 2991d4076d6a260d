//! The cost of observation per context switch. Two processes pass a byte back and forth on one CPU: without an
//! observer, while other processes are observed, while they are observed themselves, and with an empty BPF
//! program, which shows the part that any program costs. The cases take turns.

use std::fmt::{self, Display};
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use libbpf_rs::query::{LinkInfo, LinkInfoIter, LinkTypeInfo};
use libbpf_rs::{Link, ObjectBuilder};
use libloading::{Library, Symbol};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use zernel_ebpf::observer::{Observer, ObserverOptions};
use zernel_softgpu::install::{Prologue, install_libraries};
use zernel_testkit::bench::{AlternatingTurns, median};

static EMPTY_OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/empty.bpf.o"));

const ROUND_COUNT: usize = 40;
/// Batches of one turn. The result of the turn is their median.
const BATCHES_PER_TURN: usize = 60;
const ROUND_TRIPS_PER_BATCH: u32 = 300;
/// Pause before each turn, in which the kernel finishes its work after loading and freeing programs.
const PAUSE_BEFORE_TURN: Duration = Duration::from_millis(200);
/// How often a turn is tried.
const MAX_TRIES_PER_TURN: usize = 600;

#[derive(Clone, Copy, PartialEq)]
enum MeasuredArm {
    NoObserver,
    Empty,
    Others,
    Both,
}

impl Display for MeasuredArm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoObserver => "no observer",
            Self::Empty => "an empty program",
            Self::Others => "others are observed",
            Self::Both => "both are observed",
        })
    }
}

fn main() {
    if let Err(error) = Observer::start(&ObserverOptions::default()) {
        println!("skipped: {error}");
        return;
    }
    if !set_scheduling_policy(libc::SCHED_FIFO, 1) {
        println!("SCHED_FIFO is not permitted: other processes may run in between");
    }
    set_scheduling_policy(libc::SCHED_OTHER, 0);
    let folder = tempfile::tempdir().expect("a temporary directory");
    install_libraries(folder.path(), Prologue::Push).expect("the software GPU is built");
    let driver = folder.path().join("libcuda.so.1");
    let mut players = PingPongPlayers::fork(|| {});
    let arms = [
        MeasuredArm::NoObserver,
        MeasuredArm::Others,
        MeasuredArm::Empty,
        MeasuredArm::Both,
    ];
    let turns = AlternatingTurns::measure_in_turns(&arms, ROUND_COUNT, |arm| match arm {
        MeasuredArm::NoObserver => players.play_with_programs(0),
        MeasuredArm::Empty => {
            let _link = attach_empty().expect("the observer's programs load too");
            players.play_with_programs(1)
        }
        MeasuredArm::Others => measure_while_observing(&driver, |_| players.play_with_programs(1)),
        MeasuredArm::Both => {
            measure_while_observing(&driver, |observed| observed.play_with_programs(1))
        }
    });
    println!("What a context switch takes:");
    for arm in arms {
        turns.print_median(arm);
    }
    turns.print_difference(MeasuredArm::Others, MeasuredArm::NoObserver);
    turns.print_difference(MeasuredArm::Empty, MeasuredArm::NoObserver);
    turns.print_difference(MeasuredArm::Others, MeasuredArm::Empty);
    turns.print_difference(MeasuredArm::Both, MeasuredArm::NoObserver);
}

fn attach_empty() -> libbpf_rs::Result<Link> {
    let object = ObjectBuilder::default().open_memory(EMPTY_OBJECT)?.load()?;
    let program = object.progs_mut().next();
    program.expect("there is one").attach()
}

fn programs_on_switches() -> usize {
    let sees_switches = |link: &LinkInfo| match &link.info {
        LinkTypeInfo::RawTracepoint(tracepoint) => tracepoint.name == "sched_switch",
        _ => false,
    };
    LinkInfoIter::default().filter(sees_switches).count()
}

/// Measures with an observer like the daemon's, while the two players are an ML process and its loader.
fn measure_while_observing(
    driver: &Path,
    measure: impl FnOnce(&mut PingPongPlayers) -> f64,
) -> f64 {
    let options = ObserverOptions {
        libraries: vec![driver.to_owned()],
        ..ObserverOptions::default()
    };
    let mut observer = Observer::start(&options).expect("it just worked");
    let mut observed = PingPongPlayers::fork(|| call_driver(driver));
    observed.measure_switches();
    observer.read_counts().expect("what was just kept");
    let pid = observed.0.pid.as_raw_nonzero().get().cast_unsigned();
    assert!(observer.processes().any(|process| process.pid == pid));
    measure(&mut observed)
}

fn call_driver(path: &Path) {
    // SAFETY: loading the software GPU runs no code of its own.
    let library = unsafe { Library::new(path) }.expect("just installed");
    // SAFETY: `cuInit` takes flags and returns a result.
    let result = unsafe {
        let init: Symbol<'_, unsafe extern "C" fn(u32) -> i32> =
            library.get(b"cuInit\0").expect("every driver has it");
        init(0)
    };
    assert_eq!(result, 0);
}

/// Pins this process to one CPU with real-time priority. Every pass of the byte is then one switch, and no
/// other process runs in between.
fn pin_to_one_cpu() {
    let allowed = sched_getaffinity(None).expect("our own");
    let mut one = CpuSet::new();
    let first = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu));
    one.set(first.expect("we run somewhere"));
    sched_setaffinity(None, &one).expect("a part of what is allowed");
    set_scheduling_policy(libc::SCHED_FIFO, 1);
}

/// Sets the scheduling policy of the calling thread. Returns false if the kernel refuses.
fn set_scheduling_policy(policy: i32, sched_priority: i32) -> bool {
    let priority = libc::sched_param { sched_priority };
    // SAFETY: a valid parameter for the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const priority) == 0 }
}

/// A child with two pipes to it.
struct PipedChild {
    pid: Pid,
    to_child: PipeWriter,
    from_child: PipeReader,
}

impl PipedChild {
    fn fork(life: impl FnOnce(PipeReader, PipeWriter)) -> Self {
        let (there_end, there) = std::io::pipe().expect("a pipe");
        let (back, back_end) = std::io::pipe().expect("a pipe");
        // SAFETY: this program has one thread when it forks.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            drop((there, back));
            life(there_end, back_end);
            std::process::exit(0);
        }
        let pid = Pid::from_raw(pid).expect("the fork worked");
        Self {
            pid,
            to_child: there,
            from_child: back,
        }
    }

    /// Sends a byte, and waits for the answer.
    fn exchange_byte(&mut self, answer: &mut [u8]) {
        self.to_child.write_all(&[0]).expect("the child listens");
        self.from_child
            .read_exact(answer)
            .expect("the child answers");
    }
}

impl Drop for PipedChild {
    fn drop(&mut self) {
        let _ = kill_process(self.pid, Signal::KILL);
        let _ = waitpid(Some(self.pid), WaitOptions::empty());
    }
}

/// Two processes that pass a byte back and forth when asked to.
struct PingPongPlayers(PipedChild);

impl PingPongPlayers {
    /// Forks the first player, which calls `prepare` and forks the second.
    fn fork(prepare: impl FnOnce()) -> Self {
        Self(PipedChild::fork(|mut asked, mut answers| {
            prepare();
            pin_to_one_cpu();
            let mut partner = PipedChild::fork(|mut from, mut to| {
                let mut byte = [0];
                while from.read_exact(&mut byte).is_ok() && to.write_all(&byte).is_ok() {}
            });
            while asked.read_exact(&mut [0]).is_ok() {
                let batches = (0..BATCHES_PER_TURN).map(|_| ns_per_switch(&mut partner));
                let ns = median(batches.collect());
                answers.write_all(&ns.to_ne_bytes()).expect("we are heard");
            }
        }))
    }

    /// Plays while exactly `programs` BPF programs are attached to switches. Waits while another observer has
    /// programs there, because their cost would be counted as ours.
    fn play_with_programs(&mut self, programs: usize) -> f64 {
        let alone = || programs_on_switches() == programs;
        for _ in 0..MAX_TRIES_PER_TURN {
            sleep(PAUSE_BEFORE_TURN);
            if alone() {
                let ns = self.measure_switches();
                if alone() {
                    return ns;
                }
            }
        }
        panic!("another program observes switches on this machine: end it first");
    }

    fn measure_switches(&mut self) -> f64 {
        let mut ns = [0; 8];
        self.0.exchange_byte(&mut ns);
        f64::from_ne_bytes(ns)
    }
}

fn ns_per_switch(partner: &mut PipedChild) -> f64 {
    let start = Instant::now();
    for _ in 0..ROUND_TRIPS_PER_BATCH {
        partner.exchange_byte(&mut [0]);
    }
    // There and back.
    start.elapsed().as_nanos() as f64 / f64::from(2 * ROUND_TRIPS_PER_BATCH)
}
