//! What `--help` and the manual pages show beside the options: examples to copy.

pub(crate) const ZERNEL: &str = "\
Examples:
  zernel doctor                       can this machine be observed
  sudo zernel run -- python train.py  where does the time of my training go
  sudo zernel observe                 watch all, for Prometheus and `zernel ps`

Start with `zernel doctor`. It changes nothing.";

pub(crate) const ATTACH: &str = "\
Examples:
  sudo zernel attach 4711 --for 60s    one minute of process 4711
  sudo zernel attach $(pgrep torchrun) --html report.html";

pub(crate) const DOCTOR: &str = "\
Examples:
  zernel doctor                       what you may do as this user
  sudo zernel doctor                  what root may do
  zernel doctor --json | jq .observe  the verdict alone, for a program";

pub(crate) const HANG: &str = "\
Examples:
  zernel hang                               check all jobs
  zernel hang slurm-4711 --after 30         check one job, allow waits of 30 s
  zernel hang; test $? -eq 1 && echo alarm  in a script: exit code 1 is a hang
  zernel hang --json | jq '.communicators[].findings'";

pub(crate) const LAB: &str = "\
Examples:
  zernel lab run zernel doctor               the newest kernel with sched_ext
  zernel lab run --kernel 6.1 zernel doctor  Debian 12's kernel";

pub(crate) const LAB_RUN: &str = "\
Examples:
  zernel lab run zernel doctor               the newest kernel with sched_ext
  zernel lab run --kernel 6.1 zernel doctor  another one
  zernel lab run --cpus 4 -- nproc --all     any program, with its own options
  zernel lab run --with ./load.toml zernel workload run $PWD/load.toml";

pub(crate) const OBSERVE: &str = "\
Examples:
  sudo zernel observe                 until Ctrl-C
  curl -s localhost:9091/metrics      what it tells, from another terminal
  zernel ps                           the same, as a table of your processes
  sudo zernel observe --ledger        which functions would be watched, and end
  sudo systemctl enable --now zernel  as a service, where the package is";

pub(crate) const PS: &str = "\
Examples:
  zernel ps                         your training processes
  sudo zernel ps                    all training processes
  watch -n 1 zernel ps              refresh every second
  zernel ps --json | jq '.[].rank'  in a script";

pub(crate) const RUN: &str = "\
Examples:
  sudo zernel run -- python train.py
  sudo zernel run -- torchrun --nproc-per-node=2 train.py
  sudo zernel run --html report.html -- ./train.sh --epochs 1

Everything after `--` is the command with its options.";

pub(crate) const WORKLOAD: &str = "\
Examples:
  zernel workload list                     the work types and their parameters
  zernel workload run examples/mixed.toml  a load, reported worker by worker";

pub(crate) const WORKLOAD_RUN: &str = "\
Examples:
  zernel workload run examples/mixed.toml     batch beside interactive work
  zernel workload run examples/training.toml  training; needs `make softgpu`
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

    fn check(command: &Command) {
        let name = command.get_name();
        let examples = command.get_after_help().map(ToString::to_string);
        for line in examples.unwrap_or_default().lines() {
            assert!(line.chars().count() <= 80, "{name}: {line}");
        }
        command.get_subcommands().for_each(check);
    }

    /// The help of a command and of those below it.
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
        check(&crate::Cli::command());
        let commands = crate::Cli::command();
        let mut shown = commands.get_subcommands().filter(|sub| !sub.is_hide_set());
        assert!(shown.all(|command| command.get_after_help().is_some()));
    }
}
