//! `softgpu-install [--prologue push|endbr64|mov|sub] DIRECTORY`: copies the software `libcuda.so.1`, `libnccl.so.2`
//! and `libnvidia-ml.so.1` to DIRECTORY, for `LD_LIBRARY_PATH`.

use std::path::Path;
use std::process::ExitCode;

use zernel_softgpu::install::{Prologue, install_libraries};

const USAGE: &str = "usage: softgpu-install [--prologue push|endbr64|mov|sub] DIRECTORY";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (prologue, directory) = match arguments[..] {
        [directory] if !directory.starts_with('-') => (Some(Prologue::Push), directory),
        ["--prologue", name, directory] => (Prologue::from_name(name), directory),
        _ => (None, ""),
    };
    let Some(prologue) = prologue else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match install_libraries(Path::new(directory), prologue) {
        Ok(()) => {
            println!("export LD_LIBRARY_PATH={directory}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("softgpu-install: {error}");
            ExitCode::FAILURE
        }
    }
}
