//! The cost of a daemon that observes a thousand processes: its memory, the memory of its maps, and the time
//! of a scrape.

use std::fs;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use zernel_ebpf::capability::Capability;
use zernel_softgpu::install::Prologue;
use zernel_testkit::daemon::Daemon;
use zernel_testkit::target::{self, Driver, Stage, call};
use zernel_testkit::{StoppedThread, eventually};

const PROCESS_COUNT: usize = 1000;
const SCRAPE_COUNT: usize = 50;

fn main() -> ExitCode {
    if let Some(code) = target::run_role(&[("parent", fork_gpu_users)]) {
        return code;
    }
    if let Err(reason) = Capability::UprobeSession.try_out() {
        println!("skipped: {reason}");
        return ExitCode::SUCCESS;
    }
    let stage = Stage::new(Prologue::Push);
    let daemon = Daemon::start(env!("CARGO_BIN_EXE_zernel"), &stage);
    report_scrapes("nothing to observe", &daemon);
    let mut target = stage.start_target("parent", PROCESS_COUNT as u64);
    target.run_part();
    wait_until_all_are_exported(&daemon);
    report_scrapes(&format!("{PROCESS_COUNT} processes"), &daemon);
    print_slowest_answers_while_stalled(&daemon);
    ExitCode::SUCCESS
}

/// The slowest answers while the observer's thread is stopped for 5 s.
fn print_slowest_answers_while_stalled(daemon: &Daemon) {
    let stopped = StoppedThread::stop_named(daemon.pid(), "observer").expect("root may stop it");
    let end = Instant::now() + Duration::from_secs(5);
    let (mut metrics, mut health, mut count) = (Duration::ZERO, Duration::ZERO, 0);
    let time = |ask: &dyn Fn()| {
        let begin = Instant::now();
        ask();
        begin.elapsed()
    };
    while Instant::now() < end {
        metrics = metrics.max(time(&|| drop(daemon.metrics_text())));
        health = health.max(time(&|| drop(daemon.get("/healthz"))));
        count += 1;
    }
    let answer = daemon.get("/healthz");
    drop(stopped);
    println!(
        "the observer stalled for 5 s: /metrics {:.1} ms, /healthz {:.1} ms (worst of {count} each); {}",
        metrics.as_secs_f64() * 1e3,
        health.as_secs_f64() * 1e3,
        answer.body.trim(),
    );
}

/// Forks `children` children that make a few GPU calls and wait.
fn fork_gpu_users(driver: &Driver, children: u64) {
    let (mut ready, mut report) = std::io::pipe().expect("a pipe");
    for _ in 0..children {
        // SAFETY: a target has one thread.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork");
        if pid == 0 {
            // SAFETY: a system call that takes plain numbers.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            make_a_few_gpu_calls(driver);
            std::io::Write::write_all(&mut report, b".").expect("a pipe");
            loop {
                thread::park();
            }
        }
    }
    let mut all = vec![0; children as usize];
    std::io::Read::read_exact(&mut ready, &mut all).expect("every child reports");
}

fn make_a_few_gpu_calls(driver: &Driver) {
    driver.open_first_device();
    let function = driver.load_empty_kernel();
    driver.allocate_memory(4096);
    for _ in 0..3 {
        driver.launch_kernel(function);
    }
    call!(driver.cuda(), "cuCtxSynchronize");
}

fn wait_until_all_are_exported(daemon: &Daemon) {
    let exported = || {
        daemon
            .metrics_text()
            .matches("zernel_cuda_launches_total{")
            .count()
    };
    eventually("every process is exported", || exported() >= PROCESS_COUNT);
    println!("{} processes are exported", exported());
}

fn report_scrapes(what: &str, daemon: &Daemon) {
    let mut times: Vec<Duration> = (0..SCRAPE_COUNT)
        .map(|_| {
            let begin = Instant::now();
            daemon.metrics_text();
            begin.elapsed()
        })
        .collect();
    times.sort();
    let text = daemon.metrics_text();
    let series = text.lines().filter(|line| !line.starts_with('#')).count();
    let (resident, maps) = (resident_bytes(daemon.pid()), bpf_map_bytes(daemon.pid()));
    println!(
        "{what}: resident {:.1} MB, maps {:.1} MB; scrape {:.1} ms (median), {:.1} ms (worst of {SCRAPE_COUNT}), \
         {series} series, {:.1} MB",
        resident as f64 / 1e6,
        maps as f64 / 1e6,
        times[SCRAPE_COUNT / 2].as_secs_f64() * 1e3,
        times[SCRAPE_COUNT - 1].as_secs_f64() * 1e3,
        text.len() as f64 / 1e6,
    );
}

/// Resident memory without the pages of BPF maps, which are reported with the maps.
fn resident_bytes(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("it runs");
    let mut is_of_map = false;
    let mut kilobytes = 0;
    for line in text.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("Rss:") if !is_of_map => {
                let number = words.next().and_then(|number| number.parse::<u64>().ok());
                kilobytes += number.unwrap_or(0);
            }
            // A new mapping begins with its addresses.
            Some(word) if !word.ends_with(':') => is_of_map = line.ends_with("bpf-map"),
            _ => {}
        }
    }
    1024 * kilobytes
}

/// Memory of the process's BPF maps, from the kernel, each map counted once.
fn bpf_map_bytes(pid: u32) -> u64 {
    let entries = fs::read_dir(format!("/proc/{pid}/fdinfo")).expect("it runs");
    let mut maps = std::collections::BTreeMap::new();
    for entry in entries.flatten() {
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        let number = |name: &str| -> Option<u64> {
            let value = text.lines().find_map(|line| line.strip_prefix(name))?;
            value.trim().parse().ok()
        };
        if let (Some(id), Some(bytes)) = (number("map_id:"), number("memlock:")) {
            maps.insert(id, bytes);
        }
    }
    maps.values().sum()
}
