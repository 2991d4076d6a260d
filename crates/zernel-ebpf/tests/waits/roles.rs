//! What the observed programs do, and what they say they did.

use std::fs::{self, File, OpenOptions};
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::Duration;
use std::{env, thread};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::target::{Driver, Role};

/// Where a target writes its report.
const REPORT: &str = "ZERNEL_TARGET_LIBRARIES";

/// How long one of two loaders takes for a batch.
const BATCH_MS: u64 = 20;

pub(crate) const ROLES: &[(&str, Role)] = &[
    ("trains_with_busy_loaders", |driver, rounds| {
        train(driver, rounds, burn)
    }),
    ("trains_with_reading_loaders", |driver, rounds| {
        train(driver, rounds, read_from_disk)
    }),
    ("trains_with_sleeping_loaders", |driver, rounds| {
        train(driver, rounds, thread::sleep)
    }),
    ("trains_alone", train_alone),
    ("spins", spin),
    ("forks", fork_children),
    ("idles", |_, _| write(&Report::default())),
];

/// What a target says of itself.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// How long it waited for data, and how often.
    pub(crate) waited_ns: u64,
    pub(crate) waits: u64,
    /// CPU time of the work asked for.
    pub(crate) cpu_ns: u64,
    pub(crate) children: Vec<u32>,
}

pub(crate) fn report_path(libraries: &std::path::Path, pid: u32) -> PathBuf {
    libraries.join(format!("report-{pid}"))
}

fn write(report: &Report) {
    let libraries = PathBuf::from(env::var_os(REPORT).expect("set by the stage"));
    let text = serde_json::to_string(report).expect("plain numbers");
    fs::write(report_path(&libraries, std::process::id()), text).expect("a writable folder");
}

fn now(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Uses CPU time, and nothing else.
fn burn(how_long: Duration) {
    let end = now(ClockId::ThreadCPUTime) + how_long;
    while now(ClockId::ThreadCPUTime) < end {
        std::hint::spin_loop();
    }
}

/// Reads a file past the page cache.
fn read_from_disk(how_long: Duration) {
    const BYTES: u64 = 16 << 20;
    const READ: usize = 256 << 10;
    #[repr(align(4096))]
    struct Aligned([u8; READ]);
    let folder = PathBuf::from(env::var_os(REPORT).expect("set by the stage"));
    let path = folder.join(format!("data-{}", std::process::id()));
    if !path.exists() {
        fs::write(&path, vec![7; BYTES as usize]).expect("a writable folder");
        File::open(&path)
            .and_then(|file| file.sync_all())
            .expect("a disk");
    }
    let mut options = OpenOptions::new();
    let file = options
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path)
        .expect("a disk");
    let mut buffer = Box::new(Aligned([0; READ]));
    let end = now(ClockId::Monotonic) + how_long;
    let mut offset = 0;
    while now(ClockId::Monotonic) < end {
        file.read_exact_at(&mut buffer.0, offset)
            .expect("a file that stays");
        offset = (offset + READ as u64) % BYTES;
    }
}

/// A loader process, which gives a batch for every byte it is sent.
struct Loader {
    asked: PipeWriter,
    given: PipeReader,
}

impl Loader {
    fn fork(work: fn(Duration)) -> Self {
        let (mut asked, ask) = std::io::pipe().expect("a pipe");
        let (given, mut give) = std::io::pipe().expect("a pipe");
        // SAFETY: this program has one thread, so its child may do whatever it could.
        if unsafe { libc::fork() } == 0 {
            drop((ask, given));
            if work as usize == read_from_disk as usize {
                read_from_disk(Duration::ZERO);
            }
            let mut order = [0];
            while asked.read_exact(&mut order).is_ok() {
                work(Duration::from_millis(BATCH_MS));
                if give.write_all(&order).is_err() {
                    break;
                }
            }
            std::process::exit(0);
        }
        Self { asked: ask, given }
    }

    fn ask(&mut self) {
        self.asked.write_all(&[1]).expect("the loader lives");
    }

    /// As a loader's queue does it: polls, then reads.
    fn next(&mut self) {
        let mut polled = libc::pollfd {
            fd: self.given.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one descriptor, which is open, in memory of ours.
        assert_eq!(unsafe { libc::poll(&raw mut polled, 1, -1) }, 1);
        self.given.read_exact(&mut [0]).expect("the loader lives");
    }
}

/// So that what the clock shows is what it does, and not that others run.
fn run_before_others() {
    rustix::process::setpriority_process(None, -20).expect("root may");
}

fn step(driver: &Driver, device: u64, function: u64) {
    let mut batch = [0_u8; 4096];
    driver.copy_to(device, &mut batch);
    driver.launch(function);
    driver.synchronize();
}

/// Trains with two loader processes that are slower than the GPU.
fn train(driver: &Driver, rounds: u64, work: fn(Duration)) {
    let mut report = Report::default();
    // Known before it forks, as a trainer is that has moved its model to the GPU.
    driver.open();
    let (function, device) = (driver.kernel(), driver.allocate(4096));
    step(driver, device, function);
    let mut loaders = [Loader::fork(work), Loader::fork(work)];
    run_before_others();
    for loader in &mut loaders {
        loader.ask();
    }
    for round in 0..rounds as usize {
        let loader = &mut loaders[round % 2];
        let before = now(ClockId::Monotonic);
        loader.next();
        report.waited_ns += (now(ClockId::Monotonic) - before).as_nanos() as u64;
        report.waits += 1;
        loader.ask();
        step(driver, device, function);
    }
    write(&report);
}

/// Reads its data itself, and prepares it itself.
fn train_alone(driver: &Driver, rounds: u64) {
    let mut report = Report::default();
    driver.open();
    let (function, device) = (driver.kernel(), driver.allocate(4096));
    step(driver, device, function);
    read_from_disk(Duration::ZERO);
    run_before_others();
    for _ in 0..rounds {
        let before = now(ClockId::Monotonic);
        read_from_disk(Duration::from_millis(BATCH_MS));
        burn(Duration::from_millis(BATCH_MS / 4));
        report.waited_ns += (now(ClockId::Monotonic) - before).as_nanos() as u64;
        report.waits += 1;
        step(driver, device, function);
    }
    write(&report);
}

/// Uses its CPU without a pause.
fn spin(driver: &Driver, rounds: u64) {
    driver.open();
    let before = now(ClockId::ThreadCPUTime);
    burn(Duration::from_millis(rounds));
    // So that what it did counts.
    thread::sleep(Duration::from_millis(1));
    write(&Report {
        cpu_ns: (now(ClockId::ThreadCPUTime) - before).as_nanos() as u64,
        ..Report::default()
    });
}

/// Has a child that stays as it is, and one that executes another program.
fn fork_children(driver: &Driver, _rounds: u64) {
    driver.open();
    let fork = |act: fn()| {
        // SAFETY: this program has one thread, so its child may do whatever it could.
        match unsafe { libc::fork() } {
            0 => {
                act();
                std::process::exit(0);
            }
            pid => pid as u32,
        }
    };
    let stays = fork(|| thread::sleep(Duration::from_secs(600)));
    let executes = fork(|| {
        use std::os::unix::process::CommandExt;
        let _ = std::process::Command::new("sleep").arg("600").exec();
    });
    while fs::read_to_string(format!("/proc/{executes}/comm")).is_ok_and(|name| name != "sleep\n") {
        thread::sleep(Duration::from_millis(1));
    }
    write(&Report {
        children: vec![stays, executes],
        ..Report::default()
    });
}
