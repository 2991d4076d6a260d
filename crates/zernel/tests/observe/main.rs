//! `zernel observe` as a person uses it.

mod decisions;
mod exposure;
mod pods;
mod prometheus;
mod service;
mod users;

use std::ffi::OsStr;
use std::net::TcpListener;
use std::process::{ExitCode, Output};

use rustix::process::Signal;
use serde_json::Value;
use zernel_ebpf::capability::Capability;
use zernel_softgpu::install::Prologue;
use zernel_testkit::daemon::{Daemon, zernel_command};
use zernel_testkit::needs::bpf;
use zernel_testkit::target::{self, Driver, Stage, Target, TargetRole, call};
use zernel_testkit::{NO_KUBELET_NEED, StoppedThread, root, trial};

const ZERNEL_PATH: &str = env!("CARGO_BIN_EXE_zernel");

fn main() -> ExitCode {
    let roles: &[(&str, TargetRole)] = &[("launches", target_launch_kernels)];
    if let Some(code) = target::run_role(roles) {
        return code;
    }
    let needs = [root(), bpf(|| Capability::BtfTracepoint.try_out())];
    let trials: &[(&str, fn())] = &[
        (
            "metrics_of_a_program_are_served",
            metrics_of_a_program_are_served,
        ),
        ("open_metrics_has_an_end", openmetrics_ends_with_eof),
        ("a_port_in_use_is_named", a_port_in_use_is_named),
        (
            "two_daemons_count_the_same_launches",
            two_daemons_count_the_same_launches,
        ),
        ("a_socket_in_use_is_named", a_socket_in_use_is_named),
        (
            "a_stopped_daemon_leaves_no_bpf_object",
            a_stopped_daemon_leaves_no_bpf_object,
        ),
        (
            "a_killed_daemon_leaves_no_bpf_object",
            a_killed_daemon_leaves_no_bpf_object,
        ),
        (
            "a_paused_daemon_reports_its_pause",
            a_paused_daemon_reports_its_pause,
        ),
        (
            "a_stalled_observer_delays_no_reader",
            a_stalled_observer_delays_no_reader,
        ),
        ("the_ledger_is_printed", the_ledger_is_printed),
        (
            "a_dry_run_prints_its_decisions",
            decisions::a_dry_run_prints_its_decisions,
        ),
        (
            "processes_need_the_token",
            exposure::processes_need_the_token,
        ),
        (
            "aggregates_name_no_process_or_cgroup",
            exposure::aggregates_name_no_process_or_cgroup,
        ),
        (
            "a_token_that_others_can_read_is_refused",
            exposure::a_token_that_others_can_read_is_refused,
        ),
        (
            "users_see_their_own_processes",
            users::users_see_their_own_processes,
        ),
        (
            "the_unit_grants_the_needed_capabilities",
            service::the_unit_grants_the_needed_capabilities,
        ),
        (
            "the_unit_detaches_the_probes_of_a_killed_daemon",
            service::the_unit_detaches_the_probes_of_a_killed_daemon,
        ),
        (
            "the_watchdog_is_notified_while_the_observer_publishes",
            service::the_watchdog_is_notified_while_the_observer_publishes,
        ),
        (
            "each_capability_is_needed",
            service::each_capability_is_needed,
        ),
        (
            "missing_privilege_is_reported",
            users::missing_privilege_is_reported,
        ),
    ];
    let trials = trials.iter().map(|(name, test)| trial(name, &needs, test));
    zernel_testkit::main(trials.chain([
        trial(
            "promtool_accepts_the_metrics",
            &[needs[0], needs[1], prometheus::need_for_program("promtool")],
            prometheus::promtool_accepts_the_metrics,
        ),
        trial(
            "prometheus_scrapes_every_series",
            &[
                needs[0],
                needs[1],
                prometheus::need_for_program("prometheus"),
            ],
            prometheus::prometheus_scrapes_every_series,
        ),
        trial(
            "root_in_a_pod_sees_its_pod",
            &[needs[0], needs[1], NO_KUBELET_NEED],
            pods::root_in_a_pod_sees_its_pod,
        ),
        trial(
            "systemd_understands_the_unit",
            &[service::systemd_need()],
            service::systemd_understands_the_unit,
        ),
        trial(
            "systemd_understands_the_unit_of_the_scheduler",
            &[service::systemd_need()],
            service::systemd_understands_the_unit_of_the_scheduler,
        ),
        trial(
            "the_unit_has_the_documented_exposure_score",
            &[service::systemd_need()],
            service::the_unit_has_the_documented_exposure_score,
        ),
        trial(
            "systemd_creates_the_user_of_the_unit",
            &[needs[0], service::systemd_need()],
            service::systemd_creates_the_user_of_the_unit,
        ),
        trial(
            "a_bad_budget_is_wrong_usage",
            &[],
            a_bad_budget_is_wrong_usage,
        ),
        trial(
            "a_token_file_with_expose_all_is_wrong_usage",
            &[],
            exposure::a_token_file_with_expose_all_is_wrong_usage,
        ),
    ]))
}

fn target_launch_kernels(driver: &Driver, rounds: u64) {
    driver.open_first_device();
    driver.allocate_memory(5000);
    let function = driver.load_empty_kernel();
    for _ in 0..rounds {
        driver.launch_kernel(function);
    }
    call!(driver.cuda(), "cuCtxSynchronize");
}

/// A stage, and a target that has launched on it.
fn start_launching_target(stage: &Stage, rounds: u64) -> Target {
    let mut target = stage.start_target("launches", rounds);
    target.run_part();
    target
}

fn exported_launches(pid: u32, launches: u64) -> String {
    format!("zernel_cuda_launches_total{{pid=\"{pid}\"}} {launches}")
}

fn metrics_of_a_program_are_served() {
    let stage = Stage::new(Prologue::Push);
    let daemon = Daemon::start(ZERNEL_PATH, &stage);
    let target = start_launching_target(&stage, 123);
    let pid = target.pid();
    daemon.wait_for_metrics_line(&exported_launches(pid, 123));
    daemon.wait_for_metrics_line(&format!(
        "zernel_gpu_memory_used_bytes{{pid=\"{pid}\",gpu_id=\"0\"}} 5000"
    ));
    let snapshot = daemon.get("/api/v1/snapshot").body_as_json();
    let observed = snapshot["observed"].as_array().expect("a list").iter();
    let mut observed = observed.filter(|process| process["pid"] == pid);
    let process = observed.next().expect("it is exported");
    assert_eq!(process["calls"]["cuLaunchKernel"]["calls"], 123);
    let health = daemon.get("/healthz");
    assert!(health.head.starts_with("HTTP/1.1 200"), "{}", health.head);
    assert_eq!(
        health.body_as_json(),
        serde_json::json!({ "ok": true, "problems": [] })
    );
}

fn openmetrics_ends_with_eof() {
    let stage = Stage::new(Prologue::Push);
    let daemon = Daemon::start(ZERNEL_PATH, &stage);
    let target = start_launching_target(&stage, 5);
    daemon.wait_for_metrics_line(&exported_launches(target.pid(), 5));
    let answer = daemon.get_accepting("/metrics", "application/openmetrics-text; version=1.0.0");
    assert!(
        answer.head.contains("application/openmetrics-text"),
        "{}",
        answer.head
    );
    assert!(answer.body.ends_with("\n# EOF\n"));
    assert_eq!(answer.body.matches("# EOF").count(), 1);
    // OpenMetrics: the family of a counter has no suffix, its samples end with `_total`.
    assert!(
        answer
            .body
            .contains("# TYPE zernel_cuda_launches counter\n")
    );
    assert!(answer.body.contains(&exported_launches(target.pid(), 5)));
}

/// Runs `zernel observe` until it exits by itself.
fn output_of_observe(arguments: &[&dyn AsRef<OsStr>]) -> Output {
    let mut command = zernel_command(ZERNEL_PATH);
    command.args(["--expose", "all"]);
    for argument in arguments {
        command.arg(argument);
    }
    command.output().expect("zernel runs")
}

fn a_port_in_use_is_named() {
    let stage = Stage::new(Prologue::Push);
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("bound").to_string();
    let socket = stage.path().join("observe.sock");
    let websocket = "127.0.0.1:0";
    let output = output_of_observe(&[
        &"--http",
        &address,
        &"--websocket",
        &websocket,
        &"--socket",
        &socket,
    ]);
    let printed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains(&address), "{printed}");
    assert!(!socket.exists());
}

fn a_socket_in_use_is_named() {
    let stage = Stage::new(Prologue::Push);
    let daemon = Daemon::start(ZERNEL_PATH, &stage);
    let any = "127.0.0.1:0";
    let output = output_of_observe(&[
        &"--http",
        &any,
        &"--websocket",
        &any,
        &"--socket",
        &daemon.socket,
    ]);
    let printed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(
        printed.contains(&*daemon.socket.to_string_lossy()),
        "{printed}"
    );
    assert!(daemon.get("/healthz").head.starts_with("HTTP/1.1 200"));
}

fn two_daemons_count_the_same_launches() {
    let stage = Stage::new(Prologue::Push);
    let daemons = ["one", "two"].map(|name| {
        Daemon::start_as(
            zernel_command(ZERNEL_PATH),
            &stage,
            &stage.path().join(name),
        )
    });
    let target = start_launching_target(&stage, 1000);
    for daemon in &daemons {
        daemon.wait_for_metrics_line(&exported_launches(target.pid(), 1000));
    }
}

fn a_stopped_daemon_leaves_no_bpf_object() {
    let stage = Stage::new(Prologue::Push);
    let daemon = Daemon::start(ZERNEL_PATH, &stage);
    let socket = daemon.socket.clone();
    let target = start_launching_target(&stage, 5);
    daemon.wait_for_metrics_line(&exported_launches(target.pid(), 5));
    let objects = daemon.kernel_objects();
    assert!(socket.exists());
    let (status, printed) = daemon.end_by_signal(Signal::TERM);
    assert_eq!(status.code(), Some(0), "{printed}");
    assert!(!socket.exists());
    objects.wait_until_freed();
    target.let_exit();
}

fn a_killed_daemon_leaves_no_bpf_object() {
    let stage = Stage::new(Prologue::Push);
    let daemon = Daemon::start(ZERNEL_PATH, &stage);
    let first = start_launching_target(&stage, 5);
    daemon.wait_for_metrics_line(&exported_launches(first.pid(), 5));
    let objects = daemon.kernel_objects();
    daemon.end_by_signal(Signal::KILL);
    objects.wait_until_freed();
    first.let_exit();
    let daemon = Daemon::start(ZERNEL_PATH, &stage);
    let second = start_launching_target(&stage, 6);
    daemon.wait_for_metrics_line(&exported_launches(second.pid(), 6));
}

/// While the observer's thread is stopped, every reader is answered from the last snapshot, and the health says that it
/// is late.
fn a_stalled_observer_delays_no_reader() {
    let stage = Stage::new(Prologue::Push);
    let daemon = Daemon::start(ZERNEL_PATH, &stage);
    let mut target = stage.start_target("launches", 10);
    target.run_part();
    let launches = format!("zernel_cuda_launches_total{{pid=\"{}\"}} 10", target.pid());
    daemon.wait_for_metrics_line(&launches);
    let stopped = StoppedThread::stop_named(daemon.pid(), "observer").expect("root may stop it");
    let late = daemon.wait_for_health("HTTP/1.1 503");
    assert!(late.body.contains("late"), "{}", late.body);
    assert!(daemon.metrics_text().lines().any(|line| line == launches));
    for path in ["/api/v1/snapshot", "/api/v1/ledger"] {
        let answer = daemon.get(path);
        assert!(answer.head.starts_with("HTTP/1.1 200"), "{}", answer.head);
    }
    let snapshot: Value = serde_json::from_str(&daemon.get("/api/v1/snapshot").body).expect("JSON");
    assert!(snapshot["age_seconds"].as_f64() > Some(2.0), "{snapshot}");
    let problems = snapshot["problems"].to_string();
    assert!(problems.contains("the observer is late"), "{problems}");
    drop(stopped);
    daemon.wait_for_health("HTTP/1.1 200");
}

fn a_paused_daemon_reports_its_pause() {
    let stage = Stage::new(Prologue::Push);
    let daemon = Daemon::start(ZERNEL_PATH, &stage);
    for (signal, status, problems) in [
        (
            Signal::USR1,
            "HTTP/1.1 503",
            &["all probes are detached on request; send SIGUSR2 to attach them"][..],
        ),
        (Signal::USR2, "HTTP/1.1 200", &[]),
    ] {
        daemon.send_signal(signal);
        let health = daemon.wait_for_health(status).body_as_json();
        assert_eq!(health["ok"], problems.is_empty());
        assert_eq!(health["problems"], serde_json::json!(problems));
    }
}

fn the_ledger_is_printed() {
    let stage = Stage::new(Prologue::Push);
    let library = stage.library_path("libcuda.so.1");
    let output = output_of_observe(&[
        &"--ledger",
        &"--for",
        &"0.1",
        &"--budget",
        &"none",
        &"--library",
        &library,
    ]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let ledger: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let files = ledger["files"].as_array().expect("a list").iter();
    let mut files = files.filter(|file| file["path"].as_str() == library.to_str());
    let functions = files.next().expect("the library")["functions"].clone();
    let functions = functions.as_array().expect("a list").iter();
    let mut launches = functions.filter(|function| function["symbol"] == "cuLaunchKernel");
    assert_eq!(launches.next().expect("a function")["state"], "attached");
}

fn a_bad_budget_is_wrong_usage() {
    for budget in ["0", "-1%", "200%", "much"] {
        let output = output_of_observe(&[&format!("--budget={budget}")]);
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{budget}: {printed}");
        assert!(printed.contains("--budget"), "{printed}");
    }
}
