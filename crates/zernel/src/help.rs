//! Examples that `--help` and the manual pages show after the options.

pub(crate) const ZERNEL_EXAMPLES: &str = "\
Examples:
  zernel doctor                       check this machine; changes nothing
  sudo zernel run -- python train.py  report where the training time goes
  sudo zernel observe                 serve metrics, and answer `zernel ps`

`zernel help COMMAND` describes a command and its options.";

pub(crate) const ATTACH_EXAMPLES: &str = "\
Examples:
  sudo zernel attach 4711 --for 60s    observe process 4711 for a minute
  sudo zernel attach $(pgrep torchrun) --html report.html";

pub(crate) const DOCTOR_EXAMPLES: &str = "\
Examples:
  zernel doctor                       check what this user can do
  sudo zernel doctor                  check what root can do
  zernel doctor --json | jq .observe  in a script: whether observing works";

pub(crate) const HANG_EXAMPLES: &str = "\
Examples:
  zernel hang                               check all jobs
  zernel hang slurm-4711 --after 30         check one job, allow waits of 30 s
  zernel hang; test $? -eq 1 && echo alarm  in a script: exit code 1 is a hang
  zernel hang --json | jq '.communicators[].findings'";

pub(crate) const LAB_EXAMPLES: &str = "\
Examples:
  zernel lab run zernel doctor               the newest kernel with sched_ext
  zernel lab run --kernel 6.1 zernel doctor  the kernel of Debian 12
  zernel lab scenario scenarios/wake.toml    figures of one scenario
  zernel lab test --sched ./mine scenarios/*.toml
                                             check a scheduler of yours";

pub(crate) const LAB_COMPARE_EXAMPLES: &str = "\
Examples:
  zernel lab compare scenarios/wake.toml --sched eevdf,fair,./mine --seeds 6
  zernel lab compare scenarios/train-*.toml --sched eevdf,ref,'./mine:-s 5000'
  zernel lab compare scenarios/*.toml --sched ./mine --plots plots
  zernel lab compare scenarios/*.toml --sched ./mine --baseline yesterday.json";

pub(crate) const LAB_RUN_EXAMPLES: &str = "\
Examples:
  zernel lab run zernel doctor               the newest kernel with sched_ext
  zernel lab run --kernel 6.1 zernel doctor  the kernel of Debian 12
  zernel lab run --cpus 4 -- nproc --all     any program with its options
  zernel lab run --deterministic --seed 7 -- ./load
                                             the same output in every run
  zernel lab run --with ./load.toml zernel workload run $PWD/load.toml";

pub(crate) const LAB_SCENARIO_EXAMPLES: &str = "\
Examples:
  zernel lab scenario scenarios/wake.toml            the kernel's own scheduler
  zernel lab scenario scenarios/wake.toml --sched ./mine  a scheduler of yours
  zernel lab scenario scenarios/wake.toml --sched './mine:-s 5000' --seed 3";

pub(crate) const LAB_TEST_EXAMPLES: &str = "\
Examples:
  zernel lab test --sched ./mine scenarios/*.toml  check a scheduler of yours
  zernel lab test scenarios/weights.toml           what the kernel's own does";

pub(crate) const LAB_KERNEL_EXAMPLES: &str = "\
Examples:
  zernel lab kernel list --available   cached kernels, and what Debian offers
  zernel lab kernel get 6.16           download the newest 6.16
  zernel lab kernel use arch/x86/boot/bzImage
                                       boot your own kernel from now on
  zernel lab kernel use --newest       return to Debian's newest";

pub(crate) const LAB_PEERS_EXAMPLES: &str = "\
Examples:
  zernel lab peers --list              what there is, what is built
  zernel lab peers scx_bpfland         build one of them
  zernel lab peers                     build all, an hour on two cores";

pub(crate) const OBSERVE_EXAMPLES: &str = "\
Examples:
  sudo zernel observe                 observe until Ctrl-C
  curl -s --unix-socket /run/zernel/observe.sock localhost/metrics
                                      read the metrics of your processes
  curl -s -H \"Authorization: Bearer $(cat /var/lib/zernel/token)\" \\
    localhost:9091/metrics            read the metrics of all processes
  sudo zernel observe --expose all    serve without a token
  zernel ps                           list your training processes
  sudo zernel observe --ledger        print the probed functions and exit
  sudo zernel observe --hints /sys/fs/bpf/scx_hints
                                      write classes for scx_layered
  sudo systemctl enable --now zernel  run as a service (Debian package)";

pub(crate) const PS_EXAMPLES: &str = "\
Examples:
  zernel ps                         your training processes
  sudo zernel ps                    all training processes
  watch -n 1 zernel ps              refresh every second
  zernel ps --json | jq '.[].rank'  in a script";

pub(crate) const RUN_EXAMPLES: &str = "\
Examples:
  sudo zernel run -- python train.py
  sudo zernel run -- torchrun --nproc-per-node=2 train.py
  sudo zernel run --sched -- python train.py
                                     and let its critical threads go first
  sudo zernel run --html report.html -- ./train.sh --epochs 1

Everything after `--` is the command with its options.";

pub(crate) const SCHED_EXAMPLES: &str = "\
Examples:
  sudo zernel sched                  schedule all tasks until Ctrl-C
  zernel lab scenario scenarios/wake.toml --sched zernel
                                     measure it in a virtual machine first
  sudo zernel sched --config /etc/zernel/sched.toml --restart 3
                                     as the service zernel-sched does
  sudo zernel sched --ab 10m --privilege all
                                     does it help the jobs that run now?
  sudo zernel sched --replace        take the place of a loaded one
  zernel sched --monitor 1           what it does, from another terminal
  sudo zernel sched --dry-run        schedule nothing, count decisions
  sudo zernel sched --dry-run --for 60s --json
                                     for a minute, as JSON
  sudo zernel sched explain 4711     the classes of a process's threads";

pub(crate) const TRUTH_EXAMPLES: &str = "\
Examples:
  sudo zernel truth record -o run.trace.gz -- python truth/tuning/eager_mlp.py
  zernel truth score run.trace.gz stamps-*.jsonl";

pub(crate) const TRUTH_RECORD_EXAMPLES: &str = "\
Examples:
  sudo ZERNEL_TRUTH=stamps zernel truth record -o run.trace.gz -- \\
    python truth/tuning/eager_mlp.py
  sudo zernel truth record --pid 4711 --for 60s -o run.trace.gz";

pub(crate) const TRUTH_SCORE_EXAMPLES: &str = "\
Examples:
  zernel truth score run.trace.gz stamps/stamps-*.jsonl
  zernel truth score --replay run.trace.gz stamps/stamps-*.jsonl
                              with a changed detector, on the same events";

pub(crate) const WORKLOAD_EXAMPLES: &str = "\
Examples:
  zernel workload list                     list work types and parameters
  zernel workload run examples/mixed.toml  run a load and report each worker";

pub(crate) const WORKLOAD_RUN_EXAMPLES: &str = "\
Examples:
  zernel workload run examples/mixed.toml     batch and interactive work
  zernel workload run examples/training.toml  training (needs `make softgpu`)
  zernel workload run --json load.toml | jq .reports

A file has a duration and groups of workers:
  duration_ms = 5000
  [[group]]
  name = \"neighbour\"
  workers = 2
  work = \"spin_wait\"";

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory};

    fn check_examples(command: &Command) {
        let name = command.get_name();
        let examples = command.get_after_help().map(ToString::to_string);
        for line in examples.unwrap_or_default().lines() {
            assert!(line.chars().count() <= 80, "{name}: {line}");
        }
        command.get_subcommands().for_each(check_examples);
    }

    /// The help of a command and of its subcommands.
    fn long_helps(command: &mut Command) -> Vec<String> {
        let mut helps = vec![command.render_long_help().to_string()];
        helps.extend(command.get_subcommands_mut().flat_map(long_helps));
        helps
    }

    #[test]
    fn examples_come_once() {
        for help in long_helps(&mut crate::Cli::command()) {
            assert!(help.matches("Examples:").count() <= 1, "{help}");
        }
    }

    #[test]
    fn examples_fit_a_narrow_terminal() {
        check_examples(&crate::Cli::command());
        let commands = crate::Cli::command();
        let mut shown = commands.get_subcommands().filter(|sub| !sub.is_hide_set());
        assert!(shown.all(|command| command.get_after_help().is_some()));
    }
}
