//! `zernel observe`: the daemon that watches ML processes and tells what it sees.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::Value;
use signal_hook::consts::{SIGUSR1, SIGUSR2};
use signal_hook::iterator::{Handle, Signals};
use zernel_ebpf::observer::{self, GovernorOptions, Observer, TextFormat, Whose};
use zernel_serve::{Format, Health, Scope, Secret, Server, Source};

use crate::run::attach::parse_time;
use crate::{interrupt, print, service};

/// Watch every ML process of this machine, and serve what is seen
///
/// Probes are attached to the CUDA driver, NCCL and PyTorch as soon as a process uses them, and stay
/// attached for later ones. Nothing is changed in the programs. The numbers are served as Prometheus
/// metrics on /metrics, as JSON on /api/v1/snapshot and /api/v1/ledger, and pushed to WebSocket clients.
/// Users without privilege see their own processes over the unix socket.
///
/// SIGUSR1 takes all probes off, SIGUSR2 puts them on again; meanwhile /healthz answers with 503.
///
/// Needs root, or CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH and CAP_CHECKPOINT_RESTORE;
/// `zernel doctor` tells what this machine lacks.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Where to serve HTTP
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9091")]
    http: SocketAddr,
    /// Where to serve WebSocket clients
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9092")]
    websocket: SocketAddr,
    /// Where to serve local users, each their own processes
    #[arg(long, value_name = "PATH", default_value = "/run/zernel/observe.sock")]
    socket: PathBuf,
    /// A file with the token that clients must show; needed for addresses other machines can reach
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// A further name by which clients may call this machine, such as node7.example; may be repeated
    #[arg(long = "host", value_name = "NAME")]
    hosts: Vec<String>,
    /// The share of its time that any observed thread may pay, such as 0.5%; `none`: whatever it takes
    #[arg(long, value_name = "SHARE", default_value = "0.5%", value_parser = parse_budget)]
    budget: f64,
    /// A library to attach to at once, before any process uses it
    #[arg(long = "library", value_name = "FILE")]
    libraries: Vec<PathBuf>,
    /// End after this time, such as 60s, 5m or 1h
    #[arg(long = "for", value_name = "TIME", value_parser = parse_time)]
    time: Option<Duration>,
    /// Serve nothing: look for two seconds (or --for), print what is attached where, and end
    #[arg(long)]
    ledger: bool,
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
    let stop = interrupt::flag()?;
    let observer = Arc::new(Mutex::new(Observer::start(&observer_options(options))?));
    if options.ledger {
        let time = options.time.unwrap_or(Duration::from_secs(2));
        observe_for(&observer, &stop, time)?;
        let ledger = lock(&observer).ledger(Whose::All);
        print(format!("{ledger:#}\n").as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let daemon = Daemon {
        observer: Arc::clone(&observer),
        ended: Arc::default(),
    };
    let ended = Arc::clone(&daemon.ended);
    let server = Server::bind(server_options(options)?, daemon)?;
    // Before anybody knows of us: unheeded, these signals would end us.
    let pausing = pause_on_signals(&observer)?;
    announce(&server, &observer);
    if let Err(error) = service::ready() {
        eprintln!("zernel: the service manager cannot be told that we are ready: {error}");
    }
    let end = options.time.map(|time| Instant::now() + time);
    thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let result = observer::run(&observer, &stop);
            ended.store(true, Ordering::Relaxed);
            result
        });
        let served = server.run_on_this_thread(until_stopped(&stop, &ended, end));
        stop.store(true, Ordering::Relaxed);
        pausing.close();
        watching.join().map_err(|_| "watching broke off")??;
        served?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Takes all probes off on SIGUSR1 and puts them on again on SIGUSR2, until the handle is closed.
fn pause_on_signals(observer: &Arc<Mutex<Observer>>) -> std::io::Result<Handle> {
    let mut signals = Signals::new([SIGUSR1, SIGUSR2])?;
    let handle = signals.handle();
    let observer = Arc::clone(observer);
    thread::spawn(move || {
        for signal in signals.forever() {
            match signal {
                SIGUSR1 => lock(&observer).pause(),
                _ => lock(&observer).resume(),
            }
        }
    });
    Ok(handle)
}

fn observer_options(options: &Options) -> observer::Options {
    observer::Options {
        libraries: options.libraries.clone(),
        governor: GovernorOptions::with_budget(options.budget),
        ..observer::Options::default()
    }
}

fn server_options(options: &Options) -> Result<zernel_serve::Options, zernel_serve::SecretError> {
    let token = options.token_file.as_deref().map(Secret::from_file);
    Ok(zernel_serve::Options {
        http: Some(options.http),
        websocket: Some(options.websocket),
        unix: Some(options.socket.clone()),
        token: token.transpose()?,
        hosts: options.hosts.clone(),
        ..zernel_serve::Options::default()
    })
}

fn announce(server: &Server, observer: &Mutex<Observer>) {
    let addresses = server.local_addresses();
    let cost = lock(observer).cost();
    eprintln!(
        "observing through {}; a probed call costs its thread {:.1} µs here",
        lock(observer).rung().name(),
        cost.ns_per_call / 1e3
    );
    if let Some(http) = addresses.http {
        eprintln!("metrics on http://{http}/metrics, more on http://{http}/");
    }
}

/// Observes for a while, without a server.
fn observe_for(
    observer: &Mutex<Observer>,
    stop: &AtomicBool,
    time: Duration,
) -> Result<(), observer::ObserveError> {
    thread::scope(|scope| {
        let watching = scope.spawn(|| observer::run(observer, stop));
        let end = Instant::now() + time;
        while Instant::now() < end && !stop.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(50));
        }
        stop.store(true, Ordering::Relaxed);
        watching.join().unwrap_or(Ok(()))
    })
}

/// Ends when a signal says so, when watching has ended, or when the time is up.
async fn until_stopped(stop: &AtomicBool, ended: &AtomicBool, end: Option<Instant>) {
    let is_over = || {
        stop.load(Ordering::Relaxed)
            || ended.load(Ordering::Relaxed)
            || end.is_some_and(|end| Instant::now() >= end)
    };
    while !is_over() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What the server asks.
struct Daemon {
    observer: Arc<Mutex<Observer>>,
    /// Whether watching has ended.
    ended: Arc<AtomicBool>,
}

impl Daemon {
    /// The observer, up to date. What cannot be read now stays as it was.
    fn fresh(&self) -> MutexGuard<'_, Observer> {
        let mut observer = lock(&self.observer);
        let _ = observer.read();
        observer
    }
}

impl Source for Daemon {
    fn metrics(&self, scope: Scope, format: Format) -> String {
        let format = match format {
            Format::Prometheus => TextFormat::Prometheus,
            Format::OpenMetrics => TextFormat::OpenMetrics,
            Format::Quantiles => TextFormat::Quantiles,
        };
        self.fresh().metrics(whose(scope), format)
    }

    fn snapshot(&self, scope: Scope) -> String {
        let moment = self.fresh().moment(whose(scope));
        moment.to_json()
    }

    fn ledger(&self, scope: Scope) -> Value {
        self.fresh().ledger(whose(scope))
    }

    fn health(&self) -> Health {
        let observer = lock(&self.observer);
        let (mut problems, off) = (observer.problems(), observer.is_off());
        drop(observer);
        let ended = self.ended.load(Ordering::Relaxed);
        if ended {
            problems.push("processes are not watched any more".to_owned());
        }
        Health {
            ok: !ended && !off,
            problems,
        }
    }
}

fn whose(scope: Scope) -> Whose {
    match scope {
        Scope::All => Whose::All,
        Scope::User(uid) => Whose::User(uid),
    }
}

fn lock(observer: &Mutex<Observer>) -> MutexGuard<'_, Observer> {
    observer.lock().unwrap_or_else(PoisonError::into_inner)
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
