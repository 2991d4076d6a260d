//! Runs one command in a VM: `cargo run -p zernel-lab --example boot -- 6.12 /bin/uname -a`.
//! The first word is the kernel: `sched_ext`, or a version such as `6.12`.

use std::env;
use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use zernel_lab::{CommandStatus, KernelCache, KernelRequest, VmSpec};

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("boot: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode, Box<dyn Error>> {
    let mut words = env::args().skip(1);
    let request: KernelRequest = words.next().ok_or("which kernel?")?.parse()?;
    let program = words.next().ok_or("which program?")?;
    let kernel = KernelCache::from_environment()?.obtain(&request)?;
    let version = kernel.version.clone();
    let outcome = VmSpec::new(kernel).run(program, words)?;
    io::stdout().write_all(&outcome.stdout)?;
    io::stderr().write_all(&outcome.stderr)?;
    eprintln!(
        "boot: {version} on {:?}, boot {}, command started after {:.1?}, {} after {:.1?}",
        outcome.accelerator, outcome.boots, outcome.boot_time, outcome.status, outcome.total_time
    );
    Ok(match outcome.status {
        CommandStatus::Exited(code) => u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from),
        CommandStatus::Killed { .. } => ExitCode::FAILURE,
    })
}
