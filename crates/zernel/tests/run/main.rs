//! `zernel run`, `zernel ps` and `zernel hang`, as a user meets them.

mod attach;
mod daemon;
mod files;
mod job;

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use zernel_ebpf::capability::Capability;
use zernel_testkit::needs::bpf;
use zernel_testkit::{Need, copy_program, root, trial};

use job::TestJob;

fn main() -> ExitCode {
    let observing = [root(), bpf(|| Capability::BtfTracepoint.try_out())];
    zernel_testkit::main([
        trial("exit_codes_are_passed_on", &[], exit_codes_are_passed_on),
        trial("signals_are_passed_on", &[], signals_are_passed_on),
        trial(
            "stdout_has_only_the_output_of_the_command",
            &[],
            stdout_has_only_the_output_of_the_command,
        ),
        trial(
            "a_narrow_terminal_gets_short_lines",
            &[],
            a_narrow_terminal_gets_short_lines,
        ),
        trial(
            "wrong_usage_does_not_run_the_command",
            &[],
            wrong_usage_does_not_run_the_command,
        ),
        trial(
            "reports_are_written_after_the_command_exits",
            &[],
            reports_are_written_after_the_command_exits,
        ),
        trial(
            "an_ignored_signal_stays_ignored",
            &[],
            an_ignored_signal_stays_ignored,
        ),
        trial(
            "a_command_runs_as_the_caller_of_sudo",
            &[root()],
            a_command_runs_as_the_caller_of_sudo,
        ),
        trial(
            "reports_belong_to_the_caller_of_sudo",
            &[root()],
            files::reports_belong_to_the_caller_of_sudo,
        ),
        trial(
            "reports_are_written_with_the_rights_of_the_caller_of_sudo",
            &[root()],
            files::reports_are_written_with_the_rights_of_the_caller_of_sudo,
        ),
        trial(
            "a_full_disk_keeps_the_older_report",
            &[],
            files::a_full_disk_keeps_the_older_report,
        ),
        trial(
            "reports_never_get_the_group_of_root",
            &[root()],
            files::reports_never_get_the_group_of_root,
        ),
        trial(
            "without_privilege_the_command_still_runs",
            &[root()],
            without_privilege_the_command_still_runs,
        ),
        trial(
            "a_program_without_training_has_no_verdict",
            &observing,
            a_program_without_training_has_no_verdict,
        ),
        trial(
            "a_training_job_is_reported",
            &observing,
            a_training_job_is_reported,
        ),
        trial(
            "processes_of_others_are_not_reported",
            &observing,
            processes_of_others_are_not_reported,
        ),
        trial(
            "a_torch_program_that_waits_for_its_loader_is_input_bound",
            &[observing[0], observing[1], torch_need()],
            torch_waits_for_its_loader,
        ),
        trial(
            "a_torch_program_whose_loaders_sleep_needs_more_of_them",
            &[observing[0], observing[1], torch_need()],
            torch_waits_for_loaders_that_sleep,
        ),
        trial(
            "a_running_job_is_reported",
            &observing,
            attach::a_running_job_is_reported,
        ),
        trial(
            "nothing_to_attach_to",
            &[],
            attach::a_process_that_does_not_exist_is_refused,
        ),
        trial(
            "a_signal_ends_attaching_with_a_report",
            &observing,
            attach::a_signal_ends_attaching_with_a_report,
        ),
        trial(
            "without_privilege_the_daemon_is_asked",
            &observing,
            attach::without_privilege_the_daemon_is_asked,
        ),
        trial("ps_lists_trainers", &observing, daemon::ps_lists_trainers),
        trial(
            "hang_names_a_stopped_rank",
            &observing,
            daemon::hang_names_a_stopped_rank,
        ),
        trial(
            "ps_and_hang_report_a_missing_daemon",
            &[],
            daemon::ps_and_hang_report_a_missing_daemon,
        ),
    ])
}

const PYTHON_PATH: &str = "/usr/bin/python3";

/// The need for a Python with torch.
fn torch_need() -> Need {
    Need {
        name: "torch",
        check: || {
            let output = Command::new(PYTHON_PATH)
                .args(["-c", "import torch"])
                .output();
            match output.is_ok_and(|output| output.status.success()) {
                true => Ok(()),
                false => Err(format!("{PYTHON_PATH} has no torch; install python3-torch")),
            }
        },
    }
}

pub(crate) fn zernel_command() -> Command {
    Command::new(env!("CARGO_BIN_EXE_zernel"))
}

/// Runs a command with its report on stdout, as JSON.
fn report_on(options: &[&str], command: &[&str]) -> (Value, Output) {
    let mut run = zernel_command();
    run.args(["run", "--json", "-"]).args(options).arg("--");
    let output = run.args(command).output().unwrap();
    let report = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (report, output)
}

pub(crate) fn decode_output(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn exit_codes_are_passed_on() {
    for (command, code) in [
        (&["true"][..], 0),
        (&["false"], 1),
        (&["sh", "-c", "exit 7"], 7),
        (&["sh", "-c", "kill -TERM $$"], 128 + 15),
        (&["sh", "-c", "kill -KILL $$"], 128 + 9),
        (&["no-such-command-anywhere"], 127),
        (&["/etc/passwd"], 126),
    ] {
        let output = zernel_command()
            .args(["run", "--"])
            .args(command)
            .output()
            .unwrap();
        let printed = decode_output(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{command:?}: {printed}");
        assert!(printed.contains(command[0]), "{command:?}: {printed}");
        assert!(output.stdout.is_empty());
    }
}

fn signals_are_passed_on() {
    for (signal, name) in [
        (Signal::INT, "INT"),
        (Signal::TERM, "TERM"),
        (Signal::HUP, "HUP"),
        (Signal::USR1, "USR1"),
        (Signal::USR2, "USR2"),
    ] {
        let script = format!("trap 'exit 42' {name}; echo ready; while :; do sleep 0.05; done");
        // The parent of the tests may ignore the signal, and children inherit that.
        let mut child = Command::new("env")
            .args(["--default-signal", env!("CARGO_BIN_EXE_zernel")])
            .args(["run", "--", "sh", "-c", &script])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_for_output(&mut child);
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(42), "{name}");
    }
}

/// Waits until a command prints something.
fn wait_for_output(child: &mut std::process::Child) {
    let mut byte = [0];
    let output = child.stdout.as_mut().unwrap();
    std::io::Read::read_exact(output, &mut byte).unwrap();
}

fn stdout_has_only_the_output_of_the_command() {
    let output = zernel_command()
        .args(["run", "--", "sh", "-c", "cat; printf '%s' \"$MARK\""])
        .env("MARK", "from the environment")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(decode_output(&output.stdout), "from the environment");
    let printed = decode_output(&output.stderr);
    assert!(printed.starts_with("zernel run sh -c"), "{printed}");
    assert!(!printed.contains('\x1b'), "{printed}");
    assert!(
        printed.lines().all(|line| line.chars().count() <= 100),
        "{printed}"
    );
}

fn a_narrow_terminal_gets_short_lines() {
    let zernel = env!("CARGO_BIN_EXE_zernel");
    let longest = |columns: u32| {
        let words = "word ".repeat(50);
        let line = format!("stty cols {columns}; exec '{zernel}' run -- true {words}");
        let output = Command::new("script")
            .args(["--quiet", "--command", &line, "/dev/null"])
            .env("NO_COLOR", "1")
            .output()
            .unwrap();
        let printed = decode_output(&output.stdout);
        let begin = printed.find("zernel run true").expect("a report");
        let lines = printed[begin..].lines();
        lines.map(|line| line.chars().count()).max()
    };
    assert!(longest(70) > Some(60) && longest(70) <= Some(70));
    // A terminal of unknown width gets the same lines as a file.
    for columns in [0, 300] {
        assert!(longest(columns) > Some(90) && longest(columns) <= Some(100));
    }
}

fn wrong_usage_does_not_run_the_command() {
    for (options, complaint) in [
        (&["--htlm", "page"][..], "--htlm"),
        (&["--html", "/no/such/folder/page"], "/no/such/folder/page"),
        (&["--html", "-", "--json", "-"], "both"),
    ] {
        let mut run = zernel_command();
        run.arg("run").args(options).args(["--", "echo", "it ran"]);
        let output = run.output().unwrap();
        let printed = decode_output(&output.stderr);
        assert!(!output.status.success(), "{options:?}");
        assert!(printed.contains(complaint), "{options:?}: {printed}");
        assert!(output.stdout.is_empty(), "{options:?}");
    }
}

fn reports_are_written_after_the_command_exits() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("page"), "an old one").unwrap();
    let output = zernel_command()
        .current_dir(folder.path())
        .args(["run", "--json", "report", "--html", "page", "--"])
        .args(["sh", "-c", "ls; cat page"])
        .output()
        .unwrap();
    assert_eq!(decode_output(&output.stdout), "page\nan old one");
    let written = |name| std::fs::read_to_string(folder.path().join(name)).unwrap();
    assert!(written("report").starts_with('{') && written("page").starts_with("<!"));
}

/// As under `nohup`.
fn an_ignored_signal_stays_ignored() {
    let binary = env!("CARGO_BIN_EXE_zernel");
    let script = format!("trap '' HUP; exec {binary} run -- sh -c 'kill -HUP $$; echo alive'");
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(decode_output(&output.stdout), "alive\n");
}

pub(crate) const NOBODY_UID: u32 = 65534;

fn a_command_runs_as_the_caller_of_sudo() {
    let run = |options: &[&str]| {
        let mut run = zernel_command();
        run.env("SUDO_UID", NOBODY_UID.to_string());
        run.env("SUDO_GID", NOBODY_UID.to_string());
        run.arg("run")
            .args(options)
            .args(["--", "sh", "-c", "id -u; id -G; echo $USER"]);
        decode_output(&run.output().unwrap().stdout)
    };
    assert_eq!(run(&[]), "65534\n65534\nnobody\n");
    assert!(run(&["--as-root"]).starts_with("0\n"));
}

fn without_privilege_the_command_still_runs() {
    // A folder that the user nobody cannot enter.
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open).unwrap();
    let copy = folder.path().join("zernel");
    copy_program(env!("CARGO_BIN_EXE_zernel"), &copy);
    let output = Command::new(copy)
        .args(["run", "--", "sh", "-c", "echo works; exit 3"])
        .current_dir("/")
        .uid(NOBODY_UID)
        .gid(NOBODY_UID)
        .output()
        .unwrap();
    assert_eq!(decode_output(&output.stdout), "works\n");
    assert_eq!(output.status.code(), Some(3));
    let printed = decode_output(&output.stderr);
    assert!(
        printed.contains("missing   phases") && printed.contains("CAP_BPF"),
        "{printed}"
    );
}

fn a_program_without_training_has_no_verdict() {
    let (report, output) = report_on(&[], &["sleep", "1"]);
    assert_eq!(report["verdict"]["bound"], "cannot-tell", "{report}");
    assert_eq!(report["ranks"], Value::Array(Vec::new()));
    let others = (&report["loaders"], &report["others"]);
    assert_eq!(others, (&0.into(), &0.into()), "{report}");
    let printed = decode_output(&output.stderr);
    assert!(
        printed.contains("no process made a training call to CUDA, NCCL or torch"),
        "{printed}"
    );
}

fn a_training_job_is_reported() {
    let job = TestJob::new(2, 3000);
    let library = |name| job.library_path(name).to_str().unwrap().to_owned();
    let libraries = [library("libcuda.so.1"), library("libnccl.so.2")];
    let page = job.library_path("page.html");
    let options = [
        "--library",
        &libraries[0],
        "--library",
        &libraries[1],
        "--html",
        page.to_str().unwrap(),
    ];
    let spec = job.spec_path().to_str().unwrap().to_owned();
    let binary = env!("CARGO_BIN_EXE_zernel");
    let script = format!("exec {binary} workload run {spec} >/dev/null");
    // A shell runs between `zernel run` and the job, because children of children count.
    let (report, output) = report_on(&options, &["sh", "-c", &script]);
    let printed = decode_output(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{printed}");
    let ranks = report["ranks"].as_array().unwrap();
    let numbers: Vec<_> = ranks.iter().map(|rank| rank["rank"].as_u64()).collect();
    assert_eq!(numbers, [Some(0), Some(1)], "{report:#}");
    for rank in ranks {
        assert_rank_is_observed_completely(rank);
    }
    // All ranks take part in the same collectives.
    assert_eq!(
        ranks[0]["collectives"][0]["calls"],
        ranks[1]["collectives"][0]["calls"]
    );
    assert!(printed.lines().count() <= 40, "{printed}");
    for part in ["rank 0", "rank 1", "AllReduce", "verdict", "overhead"] {
        assert!(printed.contains(part), "{part} is not in\n{printed}");
    }
    let page = std::fs::read_to_string(page).unwrap();
    for part in ["rank 0", "rank 1", "AllReduce", "Step time", "GPU memory"] {
        assert!(page.contains(part), "{part} is not on the page");
    }
}

/// Checks that a rank was observed completely, and that its phases add up.
fn assert_rank_is_observed_completely(rank: &Value) {
    let number = |value: &Value| value.as_f64().unwrap();
    let wall = number(&rank["wall_seconds"]);
    let phases = rank["phases"].as_object().unwrap();
    let sum: f64 = phases
        .iter()
        .filter(|(name, _)| *name != "more_than_wall")
        .map(|(_, seconds)| number(seconds))
        .sum();
    assert!(
        (sum - wall).abs() <= 0.01 * wall,
        "{sum} of {wall}: {rank:#}"
    );
    // 0.2 % to 1 % were measured: the time before the first call, and between steps.
    assert!(number(&phases["unknown"]) < 0.1 * wall, "{rank:#}");
    // The GPU takes 4 ms a step. A rank that gets no CPU while the GPU works waits less for the GPU.
    let steps = number(&rank["steps"]["count"]);
    assert!(steps > 50.0, "{rank:#}");
    assert!(
        number(&phases["gpu_compute"]) > 0.5 * 0.004 * steps,
        "{rank:#}"
    );
    // The job makes one collective of 256 KiB a step. The software GPU takes 0.9 ms for a collective of this size.
    let collective = &rank["collectives"][0];
    assert_eq!(collective["op"], "AllReduce");
    assert_eq!(number(&collective["calls"]), steps, "{rank:#}");
    assert_eq!(number(&collective["bytes"]), steps * 256.0 * 1024.0);
    let median = number(&collective["until_sync_median_seconds"]);
    assert!(median > 0.0005 && median < 0.1, "{rank:#}");
    assert!(
        number(&phases["nccl_collective"]) > 0.0005 * steps,
        "{rank:#}"
    );
    // A batch and the gradients.
    assert_eq!(
        number(&rank["gpu_memory_peak_bytes"]),
        (64.0 + 256.0) * 1024.0
    );
    assert_eq!(rank["complete"], true, "{rank:#}");
    assert_eq!(rank["still_running"], false);
}

const SLOW_LOADER_SCRIPT: &str = "
import time, torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 240
    def __getitem__(self, index):
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return torch.full((1000,), float(index))

torch.set_num_threads(1)
time.sleep(0.5)
model = torch.nn.Linear(1000, 1)
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
for batch in DataLoader(Slow(), batch_size=4, num_workers=1):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
";

fn torch_waits_for_its_loader() {
    let (report, output) = report_on(&[], &[PYTHON_PATH, "-c", SLOW_LOADER_SCRIPT]);
    let printed = decode_output(&output.stderr);
    assert_eq!(report["ranks"].as_array().unwrap().len(), 1, "{report:#}");
    let before = report["ranks"][0]["before_first_call_seconds"].as_f64();
    let wall = report["wall_seconds"].as_f64();
    assert!(before > Some(0.5) && before < wall, "{report:#}");
    assert!(printed.contains("s to the first call"), "{printed}");
    assert_eq!(report["ranks"][0]["complete"], Value::Null, "{report:#}");
    let waits = &report["ranks"][0]["data_waits"];
    let cause = |name: &str| waits[name].as_f64().unwrap();
    assert!(
        cause("prepare") > cause("fetch") + cause("other"),
        "{printed}"
    );
    let bound = report["verdict"]["bound"].as_str().unwrap();
    let run_delay = report["ranks"][0]["run_delay_seconds"].as_f64().unwrap();
    // On a busy machine the loader of a rank may not get to run.
    let expected = match cause("sched") + run_delay < cause("prepare") {
        true => &["input"][..],
        false => &["input", "cpu-scheduler"],
    };
    assert!(expected.contains(&bound), "{printed}");
}

/// Without a GPU and without announcements, polls for loaders show the waits.
fn torch_waits_for_loaders_that_sleep() {
    let script = SLOW_LOADER_SCRIPT
        .replace("end = time.thread_time() + 0.01", "time.sleep(0.01)")
        .replace("while time.thread_time() < end:", "if False:");
    assert!(script.contains("time.sleep(0.01)"));
    let (report, output) = report_on(&[], &[PYTHON_PATH, "-c", &script]);
    let printed = decode_output(&output.stderr);
    let times = &report["ranks"][0]["training"];
    let wall = times["wall_seconds"].as_f64().unwrap();
    let loading = times["phases"]["data_loading"].as_f64().unwrap();
    assert!(loading > 0.7 * wall, "{printed}");
    assert_eq!(report["verdict"]["bound"], "input", "{printed}");
    let step = &report["verdict"]["next_steps"][0];
    assert_eq!(step["what"], "more workers", "{printed}");
}

fn processes_of_others_are_not_reported() {
    let other = TestJob::new(2, 60_000);
    let mut running = other.start();
    other.wait_until_it_trains();
    let others = other.trainer_pids();
    let own = TestJob::new(2, 2000);
    let spec = own.spec_path().to_str().unwrap().to_owned();
    let script = format!(
        "{} workload run {spec} >/dev/null",
        env!("CARGO_BIN_EXE_zernel")
    );
    let (report, _) = report_on(&[], &["sh", "-c", &script]);
    running.stop();
    let ranks = report["ranks"].as_array().unwrap();
    let pids: Vec<_> = ranks
        .iter()
        .map(|rank| rank["pid"].as_i64().unwrap())
        .collect();
    assert_eq!(pids.len(), 2, "{report:#}");
    for pid in others {
        assert!(!pids.contains(&i64::from(pid)), "{report:#}");
    }
}
