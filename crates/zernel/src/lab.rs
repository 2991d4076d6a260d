//! `zernel lab`: runs commands and scenarios in virtual machines with other kernels.

use std::env;
use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand, value_parser};
use zernel_lab::{
    CommandStatus, CpuTopology, DeterministicRunRecord, DeterministicSettings, Initramfs, Kernel,
    KernelRequest, TickAlignment, VmError, VmSpec,
};

use crate::{help, interrupt_flags};

mod compare;
mod kernel;
mod peers;
mod scenario;

/// Run commands and scenarios in virtual machines with other kernels
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Compare(compare::CompareOptions),
    #[command(hide = true)]
    Guest(scenario::GuestOptions),
    Kernel(kernel::Options),
    Peers(peers::Options),
    Run(RunOptions),
    Scenario(scenario::ScenarioOptions),
    #[command(hide = true)]
    Scheduler(scenario::SchedulerOptions),
    Test(scenario::TestOptions),
}

/// Boot a Debian kernel in QEMU and run a command in it as root
///
/// The kernel is downloaded with apt and cached in ~/.cache/zernel. The machine contains only COMMAND, the libraries
/// that it is linked to, and the files of --with. After the run, nothing but the kernel is kept. The output of
/// COMMAND is printed when it exits, and its exit code is passed on.
///
/// If COMMAND is `zernel`, this program runs in the machine.
#[derive(Debug, Args)]
#[command(after_help = help::LAB_RUN_EXAMPLES)]
struct RunOptions {
    /// Kernel version, such as 6.12 or 6.18.15 [default: that of `zernel lab kernel use`, else
    /// `sched_ext`, the newest one that loads schedulers]
    #[arg(long, value_name = "VERSION")]
    kernel: Option<KernelRequest>,
    /// Number of CPUs of the virtual machine [default: 2]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=255))]
    cpus: Option<u32>,
    /// NUMA nodes x last-level caches per node x cores per cache x threads per core, such as 1x2x4x1
    #[arg(long, value_name = "NxLxCxT", conflicts_with = "cpus")]
    topology: Option<CpuTopology>,
    /// Emulate the machine with a clock that counts instructions: equal runs print equal bytes,
    /// whatever the host does, but take 5 to 10 times as long
    #[arg(long)]
    deterministic: bool,
    /// Seed of the random numbers and of the start time of a deterministic run
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        requires = "deterministic"
    )]
    seed: u64,
    /// Spread the scheduler ticks of the CPUs over the tick interval
    #[arg(long, requires = "deterministic")]
    skew_ticks: bool,
    /// Limit of virtual time for COMMAND in a deterministic run, in seconds
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 40,
        requires = "deterministic"
    )]
    #[arg(value_parser = value_parser!(u64).range(1..=4000))]
    virtual_limit: u64,
    /// Memory of the virtual machine, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = value_parser!(u32).range(128..))]
    memory: u32,
    /// Time limit for COMMAND after the kernel has booted, in seconds [default: 120, deterministic: 600]
    #[arg(long, value_name = "SECONDS", value_parser = value_parser!(u64).range(1..))]
    timeout: Option<u64>,
    /// Copy FILE to the same path in the machine, with the libraries that it is linked to; may be
    /// repeated
    #[arg(long, value_name = "FILE")]
    with: Vec<PathBuf>,
    /// Command to run, with its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(crate) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    match &options.command {
        Command::Compare(options) => compare::run(options),
        Command::Guest(options) => scenario::run_plan_in_guest(options),
        Command::Kernel(options) => kernel::run(options),
        Command::Peers(options) => peers::run(options),
        Command::Run(options) => run_in_vm(options),
        Command::Scenario(options) => scenario::run_scenario(options),
        Command::Scheduler(options) => scenario::run_lab_scheduler(options),
        Command::Test(options) => scenario::test_scenarios(options),
    }
}

fn run_in_vm(options: &RunOptions) -> Result<ExitCode, Box<dyn Error>> {
    let interrupt = interrupt_flags::interrupt_flag()?;
    let kernel = kernel::obtain_kernel(options.kernel.as_ref())?;
    if io::stderr().is_terminal() {
        eprintln!("zernel: booting; the output follows when the command exits");
    }
    let mut files = Initramfs::new();
    for file in &options.with {
        files.add_at_same_path(program_path(file.as_os_str())?)?;
    }
    let (program, arguments) = options.command.split_first().expect("clap requires it");
    let result = vm_spec(options, kernel)
        .files(files)
        .interrupted_by(interrupt)
        .run(program_path(program)?, arguments);
    match result {
        Ok(outcome) => {
            print_output(&outcome.stdout, &outcome.stderr)?;
            if let Some(deterministic_run) = outcome.deterministic_run {
                print_determinism(options.seed, &deterministic_run, outcome.boot_time);
            }
            Ok(ExitCode::from(shell_exit_code(outcome.status)))
        }
        Err(error) => {
            if let Some(partial_output) = error.partial_output() {
                print_output(&partial_output.stdout, &partial_output.stderr)?;
            }
            match error {
                VmError::Interrupted { .. } => {
                    Ok(ExitCode::from(interrupt_flags::INTERRUPTED_EXIT_CODE))
                }
                error => Err(error.into()),
            }
        }
    }
}

/// The virtual machine of the options, without files.
fn vm_spec(options: &RunOptions, kernel: Kernel) -> VmSpec {
    let topology = options
        .topology
        .unwrap_or(CpuTopology::with_one_cache(options.cpus.unwrap_or(2)));
    let default_timeout = if options.deterministic { 600 } else { 120 };
    let spec = VmSpec::new(kernel)
        .topology(topology)
        .memory_mib(options.memory)
        .command_timeout(Duration::from_secs(
            options.timeout.unwrap_or(default_timeout),
        ));
    if !options.deterministic {
        return spec;
    }
    let ticks = match options.skew_ticks {
        true => TickAlignment::Skewed,
        false => TickAlignment::Aligned,
    };
    let deterministic = DeterministicSettings::new(options.seed)
        .ticks(ticks)
        .virtual_time_limit(Duration::from_secs(options.virtual_limit));
    spec.deterministic(deterministic)
}

/// Prints the line by which two deterministic runs are compared. The line goes to stderr, because stdout belongs to
/// the command.
fn print_determinism(seed: u64, deterministic_run: &DeterministicRunRecord, boot_time: Duration) {
    eprintln!(
        "zernel: deterministic, seed {seed}: digest {}, {:.6} virtual seconds; booted in {:.1} s",
        deterministic_run.digest,
        deterministic_run.virtual_run_time.as_secs_f64(),
        boot_time.as_secs_f64()
    );
}

/// The path of a program. If the command is `zernel`, the path is that of the running program.
fn program_path(program: &OsStr) -> io::Result<PathBuf> {
    if program == "zernel" {
        return env::current_exe();
    }
    Ok(program.into())
}

fn print_output(stdout: &[u8], stderr: &[u8]) -> io::Result<()> {
    io::stderr().write_all(stderr)?;
    match io::stdout().write_all(stdout) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// The exit code that a shell would report: 128 plus the number of a signal.
fn shell_exit_code(status: CommandStatus) -> u8 {
    let code = match status {
        CommandStatus::Exited(code) => code,
        CommandStatus::Killed { signal } => 128 + signal,
    };
    u8::try_from(code).unwrap_or(u8::MAX)
}
