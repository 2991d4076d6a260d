//! `zernel observe`: the daemon that observes ML processes and serves the results.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use signal_hook::consts::{SIGUSR1, SIGUSR2};
use signal_hook::iterator::{Handle, Signals};
use zernel_ebpf::observer::{
    self, GovernorOptions, Observer, ObserverRequests, ObserverThread, PublishedSnapshot,
};
use zernel_ebpf::{metrics, quarantine};
use zernel_model::snapshot::{Snapshot, is_snapshot_late, late_snapshot_problem};
use zernel_serve::{Expose, Health, Scope, Secret, Server, Source, TextFormat};

use crate::run::attach::parse_duration;
use crate::sched::published_statistics;
use crate::service_manager::ServiceManager;
use crate::{interrupt_flags, print_to_stdout};

/// The token file that is used without `--token-file`. The service can write to the directory of this file.
const DEFAULT_TOKEN_FILE: &str = "/var/lib/zernel/token";

/// Interval at which the observer reads the counts of the probes and publishes a snapshot.
const ROUND_INTERVAL: Duration = Duration::from_millis(500);

/// Observe all ML processes of this machine and serve metrics
///
/// Attaches probes to the CUDA driver, NCCL and PyTorch when a process loads them. Programs are not
/// changed or restarted. Serves Prometheus metrics on /metrics, JSON on /api/v1/snapshot and
/// /api/v1/ledger, problems on /healthz, and snapshots to WebSocket clients. Users without privilege
/// see their own processes through the unix socket.
///
/// HTTP and WebSocket clients must send the token that the first start writes to --token-file,
/// because every local user can connect to a loopback address. --expose changes this.
///
/// SIGUSR1 detaches all probes, SIGUSR2 attaches them again. While probes are detached, /healthz answers 503.
///
/// Needs root, or CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH and
/// CAP_CHECKPOINT_RESTORE. `zernel doctor` prints what is missing.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Address for HTTP clients
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9091")]
    http: SocketAddr,
    /// Address for WebSocket clients
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9092")]
    websocket: SocketAddr,
    /// Unix socket for local users, who see their own processes
    #[arg(long, value_name = "PATH", default_value = "/run/zernel/observe.sock")]
    socket: PathBuf,
    /// What HTTP and WebSocket clients see
    #[arg(long, value_name = "WHAT", default_value = "token")]
    expose: ExposeOption,
    /// File with the token that clients send, created if missing [default: /var/lib/zernel/token]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Directory of the list of files that the daemon is reading. If the daemon dies, the next one refuses these
    /// files for an hour
    #[arg(
        long = "state-dir",
        value_name = "DIR",
        default_value = "/var/lib/zernel"
    )]
    state_directory: PathBuf,
    /// Another host name of this machine that clients may use, such as node7.example; may be repeated
    #[arg(long = "host", value_name = "NAME")]
    hosts: Vec<String>,
    /// Largest overhead of any observed thread, such as 0.5%; `none` for no limit
    #[arg(long, value_name = "SHARE", default_value = "0.5%", value_parser = parse_budget)]
    budget: f64,
    /// Attach to this library before any process loads it; may be repeated
    #[arg(long = "library", value_name = "FILE")]
    libraries: Vec<PathBuf>,
    /// Write the class of each ML thread to this pinned map, in the format of scx_layered
    #[arg(long, value_name = "PATH")]
    hints: Option<PathBuf>,
    /// Sample the phases of processes that use a GPU and whose calls cannot be probed
    ///
    /// The sampled rule sees the GPU's utilization and waits for I/O only, and is often wrong. Needs NVML.
    #[arg(long)]
    sampled_phases: bool,
    /// Stop after TIME, such as 60s, 5m or 1h [default: run until stopped]
    #[arg(long = "for", value_name = "TIME", value_parser = parse_duration)]
    time: Option<Duration>,
    /// Print which functions are probed, and exit after 2 s or --for TIME; serve nothing
    #[arg(long)]
    ledger: bool,
}

impl Options {
    fn token_file(&self) -> &Path {
        self.token_file
            .as_deref()
            .unwrap_or(Path::new(DEFAULT_TOKEN_FILE))
    }
}

/// What HTTP and WebSocket clients see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ExposeOption {
    /// Everything with the token; without it, only whether the daemon is healthy
    Token,
    /// Everything with the token; without it, figures that name no process, user, cgroup or job
    Aggregate,
    /// Everything without a token: for machines with a single user
    All,
}

pub(crate) fn parse_budget(text: &str) -> Result<f64, String> {
    if text == "none" {
        return Ok(f64::INFINITY);
    }
    let (number, unit) = match text.strip_suffix('%') {
        Some(percent) => (percent, 0.01),
        None => (text, 1.0),
    };
    match number.trim().parse::<f64>() {
        Ok(number) if number > 0.0 && number * unit <= 1.0 => Ok(number * unit),
        _ => Err("a share is more than 0 and at most 100%, such as 0.5% or 0.005".to_owned()),
    }
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn std::error::Error>> {
    if options.expose == ExposeOption::All && options.token_file.is_some() {
        eprintln!(
            "zernel: with --expose all no client needs a token; leave out --token-file or --expose all"
        );
        return Ok(ExitCode::from(2));
    }
    let stop = interrupt_flags::interrupt_flag()?;
    if !options.ledger
        && let Err(error) = quarantine::keep_state_in(&options.state_directory)
    {
        let directory = options.state_directory.display();
        eprintln!("zernel: files in hand are not recorded in {directory}: {error}");
    }
    let observer = Observer::start(&observer_options(options))?;
    let observer = ObserverThread::start(observer, ROUND_INTERVAL)?;
    if options.ledger {
        let time = options.time.unwrap_or(Duration::from_secs(2));
        return print_ledger(observer, &stop, time);
    }
    let published = observer.published_snapshot();
    let daemon = PublishedSource {
        published: Arc::clone(&published),
    };
    let server = Server::bind_addresses(server_options(options)?, daemon)?;
    // The handlers of SIGUSR1 and SIGUSR2 are set before the addresses are printed: without a handler these signals
    // kill the daemon.
    let pausing = pause_on_signals(observer.requests())?;
    announce_addresses(&server, options, &published.snapshot());
    let manager = ServiceManager::from_environment();
    if let Some(Err(error)) = manager.as_ref().map(ServiceManager::notify_ready) {
        eprintln!("zernel: cannot notify the service manager: {error}");
    }
    let end = options.time.map(|time| Instant::now() + time);
    let mut stopping = None;
    let served = server.run_on_this_thread(async {
        wait_until_stopped(&stop, &published, end, manager).await;
        pausing.close();
        // The observer's thread ends while clients get their last answers.
        stopping = Some(thread::spawn(|| observer.stop_before_exit()));
    });
    match stopping.map(JoinHandle::join) {
        Some(Ok(stopped)) => stopped?,
        Some(Err(panic)) => std::panic::resume_unwind(panic),
        None => {}
    }
    served?;
    Ok(ExitCode::SUCCESS)
}

/// Observes for a while without serving, then prints which function is probed in which file.
fn print_ledger(
    observer: ObserverThread,
    stop: &AtomicBool,
    time: Duration,
) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let end = Instant::now() + time;
    while Instant::now() < end && !stop.load(Ordering::Relaxed) && !observer.has_ended() {
        thread::sleep(Duration::from_millis(50));
    }
    let mut observer = observer.stop()?;
    observer.read_counts()?;
    let ledger = observer.snapshot().ledger_json(Scope::All);
    print_to_stdout(format!("{ledger:#}\n").as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Detaches all probes on SIGUSR1 and attaches them again on SIGUSR2, until the handle is closed.
fn pause_on_signals(observer: ObserverRequests) -> std::io::Result<Handle> {
    let mut signals = Signals::new([SIGUSR1, SIGUSR2])?;
    let handle = signals.handle();
    thread::spawn(move || {
        for signal in signals.forever() {
            observer.call_with_observer(|observer| match signal {
                SIGUSR1 => observer.pause(),
                _ => observer.resume(),
            });
        }
    });
    Ok(handle)
}

fn observer_options(options: &Options) -> observer::ObserverOptions {
    observer::ObserverOptions {
        libraries: options.libraries.clone(),
        governor: GovernorOptions::with_budget(options.budget),
        hints: options.hints.clone(),
        samples_phases: options.sampled_phases,
        ..observer::ObserverOptions::default()
    }
}

fn server_options(options: &Options) -> Result<zernel_serve::Options, zernel_serve::SecretError> {
    let (expose, needs_token) = match options.expose {
        ExposeOption::Token => (Expose::Token, true),
        ExposeOption::Aggregate => (Expose::Aggregate, true),
        ExposeOption::All => (Expose::All, false),
    };
    let token = needs_token.then(|| Secret::from_file_or_new(options.token_file()));
    Ok(zernel_serve::Options {
        http: Some(options.http),
        websocket: Some(options.websocket),
        unix: Some(options.socket.clone()),
        expose,
        token: token.transpose()?,
        hosts: options.hosts.clone(),
        ..zernel_serve::Options::default()
    })
}

fn announce_addresses(server: &Server, options: &Options, snapshot: &Snapshot) {
    let addresses = server.local_addresses();
    eprintln!(
        "observing through {}; a probed call costs its thread {:.1} µs here",
        snapshot.rung,
        snapshot.call_cost_seconds * 1e6
    );
    if let Some(path) = &options.hints {
        eprintln!("hints for other schedulers in {}", path.display());
    }
    if let Some(http) = addresses.http {
        eprintln!("metrics on http://{http}/metrics, more on http://{http}/");
        let file = options.token_file().display();
        match options.expose {
            ExposeOption::Token => eprintln!("clients must send the token in {file}"),
            ExposeOption::Aggregate => {
                eprintln!("clients without the token in {file} see no process");
            }
            ExposeOption::All => eprintln!("every user of this machine sees all processes there"),
        }
    }
}

/// Returns on a signal, when the observer has ended, or when the time is up. While it waits, it keeps the service
/// manager from restarting the daemon, as long as the observer publishes.
async fn wait_until_stopped(
    stop: &AtomicBool,
    published: &PublishedSnapshot,
    end: Option<Instant>,
    mut manager: Option<ServiceManager>,
) {
    let is_over = || {
        stop.load(Ordering::Relaxed)
            || published.end_reason().is_some()
            || end.is_some_and(|end| Instant::now() >= end)
    };
    while !is_over() {
        if let Some(manager) = manager
            .as_mut()
            .filter(|_| !is_snapshot_late(published.age_of_snapshot()))
        {
            // If the service manager cannot be notified, it restarts the daemon.
            let _ = manager.notify_watchdog_if_due();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Answers requests from what the observer has published.
struct PublishedSource {
    published: Arc<PublishedSnapshot>,
}

impl Source for PublishedSource {
    fn answers_version(&self) -> Option<u64> {
        // Answers that clients get while the daemon stops must not state that the observer runs.
        let has_ended = self.published.end_reason().is_some();
        (!has_ended).then(|| self.published.snapshot().taken_ns)
    }

    fn metrics(&self, scope: Scope, format: TextFormat) -> String {
        let scheduler = published_statistics::read_statistics(Path::new(
            published_statistics::STATISTICS_DIRECTORY,
        ))
        .ok();
        let snapshot = self.published.snapshot();
        metrics::metrics_text_with_scheduler(&snapshot, scheduler.as_ref(), scope, format)
    }

    fn snapshot(&self, scope: Scope) -> String {
        self.published
            .snapshot()
            .to_json(scope, self.published.age_of_snapshot())
    }

    fn ledger(&self, scope: Scope) -> String {
        self.published.snapshot().ledger_text(scope)
    }

    fn health(&self) -> Health {
        let snapshot = self.published.snapshot();
        let mut problems = snapshot.problems.clone();
        let ended = self.published.end_reason();
        let age = self.published.age_of_snapshot();
        let is_late = ended.is_none() && is_snapshot_late(age);
        problems.extend(ended.map(|_| "processes are no longer observed".to_owned()));
        problems.extend(is_late.then(|| late_snapshot_problem(age)));
        Health {
            ok: ended.is_none() && !is_late && !snapshot.observer.is_off,
            problems,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_a_share_or_a_percentage() {
        assert_eq!(parse_budget("0.5%"), Ok(0.005));
        assert_eq!(parse_budget("0.01"), Ok(0.01));
        assert_eq!(parse_budget("none"), Ok(f64::INFINITY));
        for wrong in ["", "0", "-1%", "101%", "much", "NaN", "inf"] {
            assert!(parse_budget(wrong).is_err(), "{wrong}");
        }
    }
}
