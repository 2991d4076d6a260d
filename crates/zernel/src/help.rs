//! What `--help` and the manual pages show beside the options: examples to copy.

pub(crate) const ZERNEL: &str = "\
Examples:
  zernel doctor                                 can this machine be observed, and what is missing
  sudo zernel run -- python train.py            where does the time of my training go
  sudo zernel observe                           watch everything, for Prometheus and for `zernel ps`

Start with `zernel doctor`. It changes nothing.";

pub(crate) const DOCTOR: &str = "\
Examples:
  zernel doctor                                 what you may do as this user
  sudo zernel doctor                            what root may do
  zernel doctor --json | jq .observe            the verdict alone, for a program";

pub(crate) const HANG: &str = "\
Examples:
  zernel hang                                   every job that you may see
  zernel hang slurm-4711 --after 30             one job, whose ranks have waited for half a minute
  zernel hang; test $? -eq 2 && echo alarm      for a script: 2 says that something hangs";

pub(crate) const LAB: &str = "\
Examples:
  zernel lab run zernel doctor                  what the newest kernel with sched_ext would allow
  zernel lab run --kernel 6.1 zernel doctor     the same of Debian 12's kernel";

pub(crate) const LAB_RUN: &str = "\
Examples:
  zernel lab run zernel doctor                  with the newest kernel that has sched_ext
  zernel lab run --kernel 6.1 zernel doctor     with another one
  zernel lab run --cpus 4 -- nproc --all        any program of this machine, with its own options";

pub(crate) const OBSERVE: &str = "\
Examples:
  sudo zernel observe                           until Ctrl-C
  curl -s localhost:9091/metrics                what it tells, from another terminal
  zernel ps                                     the same as a table of your own training processes
  sudo zernel observe --ledger                  which function of which library would be watched
  sudo systemctl enable --now zernel            as a service, where the package is installed";

pub(crate) const PS: &str = "\
Examples:
  zernel ps                                     your own training processes
  sudo zernel ps                                everybody's
  watch -n 1 zernel ps                          again every second";

pub(crate) const RUN: &str = "\
Examples:
  sudo zernel run -- python train.py
  sudo zernel run -- torchrun --nproc-per-node=2 train.py
  sudo zernel run --json report.json -- ./train.sh --epochs 1

What comes after `--` is the command, with its own options.";

pub(crate) const WORKLOAD: &str = "\
Examples:
  zernel workload list                          the types of work, and what each exercises
  zernel workload run examples/mixed.toml       a load, reported worker by worker";

pub(crate) const WORKLOAD_RUN: &str = "\
Examples:
  zernel workload run examples/mixed.toml       batch beside interactive work
  zernel workload run examples/training.toml    a training job on the software GPU of `make softgpu`
  zernel workload run --json load.toml | jq .reports

A file has a duration and groups of workers:
  duration_ms = 5000
  [[group]]
  name = \"neighbour\"
  workers = 2
  work = \"spin_wait\"";
