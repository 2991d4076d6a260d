//! `zernel lab kernel`: the kernels that the lab can boot.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use zernel_lab::{AvailableKernel, Kernel, KernelCache, KernelRequest, SchedulerSupport};

use crate::help;

/// List, download and choose the kernels of virtual machines
#[derive(Debug, Args)]
#[command(after_help = help::LAB_KERNEL_EXAMPLES)]
pub(super) struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the kernels in the cache
    List {
        /// Also list the kernels that Debian's archive offers
        #[arg(long)]
        available: bool,
    },
    /// Download a kernel into the cache
    Get {
        /// Version, such as 6.12 or 6.18.15; `sched_ext` for the newest one that loads schedulers
        #[arg(value_name = "VERSION", default_value = "sched_ext")]
        kernel: KernelRequest,
    },
    /// Boot this kernel when no --kernel is given
    ///
    /// A kernel image that is given as a file is copied into the cache. The configuration of the image is --config,
    /// or else a file beside the image: config-RELEASE, or .config of the kernel tree that the image was built in.
    Use {
        /// Kernel image (vmlinuz, bzImage), or the release of a kernel in the cache
        #[arg(value_name = "PATH", required_unless_present = "newest")]
        kernel: Option<PathBuf>,
        /// Configuration that the kernel was built with
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Return to the newest kernel that loads schedulers
        #[arg(long, conflicts_with_all = ["kernel", "config"])]
        newest: bool,
    },
}

pub(super) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    let cache = KernelCache::from_environment()?;
    match &options.command {
        Command::List { available } => list_kernels(&cache, *available)?,
        Command::Get { kernel } => {
            eprintln!("zernel: downloading the kernel {kernel}");
            let kernel = cache.fetch_newest(kernel)?;
            let support = kernel.scheduler_support();
            crate::print_to_stdout(format!("{}  {support}\n", kernel.version).as_bytes())?;
        }
        Command::Use { kernel: None, .. } => cache.set_default_kernel(None)?,
        Command::Use {
            kernel: Some(path),
            config,
            ..
        } => use_kernel(&cache, path, config.as_deref())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The kernel to boot: the requested one, else the chosen one, else the newest that loads schedulers.
pub(super) fn obtain_kernel(request: Option<&KernelRequest>) -> Result<Kernel, Box<dyn Error>> {
    let cache = KernelCache::from_environment()?;
    if request.is_none()
        && let Some(kernel) = cache.default_kernel()?
    {
        return Ok(kernel);
    }
    let request = request.unwrap_or(&KernelRequest::NewestWithSchedExt);
    let kernel = match cache.newest_cached(request)? {
        Some(kernel) => kernel,
        None => {
            eprintln!("zernel: downloading the kernel {request}");
            cache.fetch_newest(request)?
        }
    };
    if let support @ SchedulerSupport::MalformedBtf(_) = kernel.scheduler_support() {
        eprintln!("zernel: kernel {} {support}", kernel.version);
    }
    Ok(kernel)
}

fn list_kernels(cache: &KernelCache, available: bool) -> Result<(), Box<dyn Error>> {
    let mut kernels = cache.cached_kernels()?;
    kernels.sort_by(|left, right| left.version.cmp(&right.version));
    let default = match cache.default_kernel()? {
        Some(kernel) => Some(kernel),
        None => cache.newest_cached(&KernelRequest::NewestWithSchedExt)?,
    };
    let offered = match available {
        true => cache.kernels_offered_by_debian()?,
        false => Vec::new(),
    };
    crate::print_to_stdout(kernel_table(&kernels, default.as_ref(), &offered).as_bytes())?;
    Ok(())
}

fn kernel_table(
    kernels: &[Kernel],
    default: Option<&Kernel>,
    offered: &[AvailableKernel],
) -> String {
    let cached = |version| kernels.iter().any(|kernel| kernel.version == version);
    let mut rows: Vec<(String, String)> = kernels
        .iter()
        .map(|kernel| {
            let mut about = kernel.scheduler_support().to_string();
            if default.is_some_and(|default| default.version == kernel.version) {
                about += " (default)";
            }
            (kernel.version.to_string(), about)
        })
        .collect();
    rows.extend(
        offered
            .iter()
            .filter(|kernel| !cached(kernel.version.clone()))
            .map(|kernel| {
                (
                    kernel.version.to_string(),
                    format!("in Debian {}", kernel.suite),
                )
            }),
    );
    let width = rows
        .iter()
        .map(|(version, _)| version.len())
        .max()
        .unwrap_or(0);
    rows.iter()
        .map(|(version, about)| format!("{version:width$}  {about}\n"))
        .collect()
}

fn use_kernel(
    cache: &KernelCache,
    path: &Path,
    config: Option<&Path>,
) -> Result<(), Box<dyn Error>> {
    let kernel = if path.is_file() {
        let config = config
            .map(Path::to_owned)
            .or_else(|| find_kernel_config(path));
        if config.is_none() {
            eprintln!(
                "zernel: no configuration beside {}: use --config, or BPF loaders may miss it",
                path.display()
            );
        }
        Kernel::from_image(path, config.as_deref())?
    } else {
        cache.kernel_of_release(&path.to_string_lossy())?
    };
    cache.set_default_kernel(Some(&kernel))?;
    let support = kernel.scheduler_support();
    crate::print_to_stdout(format!("{}  {support}\n", kernel.version).as_bytes())?;
    Ok(())
}

/// The configuration of an image: `config-RELEASE` beside the image, or `.config` of the kernel tree if the image is
/// its `arch/x86/boot/bzImage`.
fn find_kernel_config(image: &Path) -> Option<PathBuf> {
    let release = Kernel::from_image(image, None).ok()?.version;
    let beside = image.with_file_name(format!("config-{release}"));
    let tree = image.ancestors().nth(4).map(|tree| tree.join(".config"));
    [Some(beside), tree]
        .into_iter()
        .flatten()
        .find(|path| path.is_file())
}
