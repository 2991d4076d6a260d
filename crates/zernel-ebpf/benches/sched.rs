//! What observing costs a context switch: two processes that pass a byte back and forth on one CPU,
//! while nobody observes, while others are observed, and while they are observed themselves.

use std::io::{PipeReader, PipeWriter, Read, Write};

use libloading::{Library, Symbol};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use zernel_ebpf::observer::{Observer, Options};
use zernel_softgpu::install::{Prologue, install};
use zernel_testkit::bench::Comparison;

const ROUND_TRIPS: u64 = 1000;
/// There and back.
const SWITCHES: u64 = 2 * ROUND_TRIPS;

fn main() {
    if let Err(error) = Observer::start(&Options::default()) {
        println!("skipped: {error}");
        return;
    }
    own_one_cpu();
    let mut comparison = Comparison::from_args();
    let mut partner = Partner::fork();
    comparison.measure("switch, nobody observes", SWITCHES, || partner.play());
    {
        let _observer = Observer::start(&Options::default()).expect("it just worked");
        comparison.measure("switch, others are observed", SWITCHES, || partner.play());
    }
    comparison.measure("switch, nobody observes any more", SWITCHES, || {
        partner.play();
    });
    drop(partner);
    observed(&mut comparison);
    println!();
    let bare = "switch, nobody observes";
    comparison.ratio("switch, others are observed", bare);
    comparison.ratio("switch, nobody observes any more", bare);
    comparison.ratio("switch, both are observed", bare);
}

/// Becomes an ML process, and its partner one that loads its data.
fn observed(comparison: &mut Comparison) {
    let folder = tempfile::tempdir().expect("a temporary directory");
    install(folder.path(), Prologue::Push).expect("the software GPU is built");
    let path = folder.path().join("libcuda.so.1");
    let options = Options::exact([path.clone()]);
    let _observer = Observer::start(&options).expect("it just worked");
    // SAFETY: loading the software GPU runs no code of its own.
    let library = unsafe { Library::new(&path) }.expect("just installed");
    // SAFETY: `cuInit` takes flags and returns a result.
    let result = unsafe {
        let init: Symbol<'_, unsafe extern "C" fn(u32) -> i32> =
            library.get(b"cuInit\0").expect("every driver has it");
        init(0)
    };
    assert_eq!(result, 0);
    let mut partner = Partner::fork();
    comparison.measure("switch, both are observed", SWITCHES, || partner.play());
}

/// So that every pass of the byte is one switch, and nobody else comes between.
fn own_one_cpu() {
    let allowed = sched_getaffinity(None).expect("our own");
    let mut one = CpuSet::new();
    let first = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu));
    one.set(first.expect("we run somewhere"));
    sched_setaffinity(None, &one).expect("a part of what is allowed");
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: a valid parameter for the calling thread.
    if unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const priority) } != 0 {
        println!("others may come between: this may not run first in, first out");
    }
}

struct Partner {
    pid: Pid,
    there: PipeWriter,
    back: PipeReader,
}

impl Partner {
    fn fork() -> Self {
        let (mut there_end, there) = std::io::pipe().expect("a pipe");
        let (back, mut back_end) = std::io::pipe().expect("a pipe");
        // SAFETY: this program has one thread when it forks, and the child only reads and writes.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            drop((there, back));
            let mut byte = [0];
            while there_end.read_exact(&mut byte).is_ok() && back_end.write_all(&byte).is_ok() {}
            std::process::exit(0);
        }
        let pid = Pid::from_raw(pid).expect("the fork worked");
        Self { pid, there, back }
    }

    fn play(&mut self) {
        let mut byte = [0];
        for _ in 0..ROUND_TRIPS {
            self.there.write_all(&byte).expect("the partner listens");
            self.back
                .read_exact(&mut byte)
                .expect("the partner answers");
        }
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(self.pid, rustix::process::Signal::KILL);
        // SAFETY: waits for our own child, and wants to know nothing of it.
        unsafe { libc::waitpid(self.pid.as_raw_nonzero().get(), std::ptr::null_mut(), 0) };
    }
}
