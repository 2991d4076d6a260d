//! The daemon's metrics, scraped by Prometheus itself.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use std::{env, fs, thread};

use zernel_softgpu::install::Prologue;
use zernel_testkit::daemon::Daemon;
use zernel_testkit::target::Stage;
use zernel_testkit::{Need, eventually_within};

use crate::{exported_launches, start_launching_target};

/// The variable with the number of scrapes, one per second.
const SCRAPES_VARIABLE: &str = "ZERNEL_TEST_SCRAPES";

pub(crate) fn need_for_program(name: &'static str) -> Need {
    fn program_runs(name: &str) -> Result<(), String> {
        match Command::new(name).arg("--version").output() {
            Ok(_) => Ok(()),
            Err(error) => Err(format!("{name} does not run: {error}")),
        }
    }
    Need {
        name,
        check: match name {
            "promtool" => || program_runs("promtool"),
            _ => || program_runs("prometheus"),
        },
    }
}

pub(crate) fn promtool_accepts_the_metrics() {
    let stage = Stage::new(Prologue::Push);
    let daemon = Daemon::start(crate::ZERNEL_PATH, &stage);
    let target = start_launching_target(&stage, 5);
    daemon.wait_for_metrics_line(&exported_launches(target.pid(), 5));
    for path in ["/metrics", "/metrics/quantiles"] {
        let mut promtool = Command::new("promtool");
        promtool.args(["check", "metrics"]).stdin(Stdio::piped());
        let promtool = promtool.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut promtool = promtool.spawn().expect("promtool runs");
        let mut input = promtool.stdin.take().expect("piped");
        let text = daemon.get(path).body;
        input.write_all(text.as_bytes()).expect("it reads");
        drop(input);
        let output = promtool.wait_with_output().expect("our child");
        let printed = [output.stdout, output.stderr].concat();
        assert!(
            output.status.success(),
            "{path}: {}",
            String::from_utf8_lossy(&printed)
        );
    }
}

/// A Prometheus that scrapes a daemon.
struct RunningPrometheus {
    child: Child,
    address: String,
}

impl RunningPrometheus {
    fn start(stage: &Stage, daemon: &Daemon) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
        let address = port.expect("a free port").to_string();
        let file = stage.path().join("prometheus.yml");
        let configuration = format!(
            "global: {{scrape_interval: 1s}}\nscrape_configs:\n- job_name: zernel\n  static_configs:\n  - targets: ['{}']\n",
            daemon.http
        );
        fs::write(&file, configuration).expect("our directory");
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                stage.path().join("tsdb").display()
            ))
            .arg(format!("--web.listen-address={address}"))
            .arg("--log.level=error");
        Self {
            child: command.spawn().expect("prometheus runs"),
            address,
        }
    }

    /// The value that a Prometheus expression evaluates to; `None` if the result is empty.
    fn query_value(&self, expression: &str) -> Option<f64> {
        let mut promtool = Command::new("promtool");
        promtool.args(["query", "instant", &format!("http://{}", self.address)]);
        let output = promtool.arg(expression).output().expect("promtool runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let (_, value) = text.lines().next()?.split_once("=> ")?;
        value.split_whitespace().next()?.parse().ok()
    }
}

impl Drop for RunningPrometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Every scrape succeeds, and every series of a process is in each of them.
pub(crate) fn prometheus_scrapes_every_series() {
    let seconds = env::var(SCRAPES_VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok());
    let seconds = seconds.unwrap_or(10);
    let stage = Stage::new(Prologue::Push);
    let daemon = Daemon::start(crate::ZERNEL_PATH, &stage);
    let target = start_launching_target(&stage, 5);
    daemon.wait_for_metrics_line(&exported_launches(target.pid(), 5));
    let prometheus = RunningPrometheus::start(&stage, &daemon);
    let scrapes = || prometheus.query_value("count_over_time(up[1h])");
    let limit = Duration::from_secs(60 + 3 * seconds);
    eventually_within(limit, "a scrape per second", || {
        thread::sleep(Duration::from_millis(500));
        scrapes() >= Some(seconds as f64)
    });
    let scrapes = scrapes().expect("just asked");
    assert_eq!(prometheus.query_value("min_over_time(up[1h])"), Some(1.0));
    let mark = format!("pid=\"{}\"", target.pid());
    let text = daemon.get("/metrics").body;
    let exported: Vec<&str> = text.lines().filter(|line| line.contains(&mark)).collect();
    let kept = prometheus.query_value(&format!("count({{__name__=~\"zernel_.*\",{mark}}})"));
    assert_eq!(kept, Some(exported.len() as f64));
    let names = exported.iter().filter_map(|line| line.split('{').next());
    for name in names.collect::<BTreeSet<&str>>() {
        let fewest = prometheus.query_value(&format!("min(count_over_time({name}{{{mark}}}[1h]))"));
        assert!(fewest >= Some(scrapes), "{name}: {fewest:?} of {scrapes}");
    }
    let exported = exported.len();
    println!("{scrapes} scrapes, {exported} series of one process in each of them");
}
