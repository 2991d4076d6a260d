//! `zernel lab peers`: public schedulers to compare with.

use std::error::Error;
use std::process::ExitCode;

use clap::Args;
use zernel_lab::peer_schedulers::{PEER_SCHEDULERS, PeerCache, PeerScheduler, find_peer_scheduler};

use crate::help;

/// Build public sched_ext schedulers from crates.io into the cache
///
/// The first build takes some ten minutes on two cores, later ones share its dependencies. Schedulers that are built
/// already are left alone.
#[derive(Debug, Args)]
#[command(after_help = help::LAB_PEERS_EXAMPLES)]
pub(super) struct Options {
    /// Schedulers to build; all by default
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// List the schedulers and what is built; build nothing
    #[arg(long, conflicts_with = "update")]
    list: bool,
    /// Build the newest version of each scheduler even if a version is built already
    #[arg(long)]
    update: bool,
}

pub(super) fn run(options: &Options) -> Result<ExitCode, Box<dyn Error>> {
    let cache = PeerCache::from_environment()?;
    let chosen: Vec<PeerScheduler> = match options.names.is_empty() {
        true => PEER_SCHEDULERS.to_vec(),
        false => options
            .names
            .iter()
            .map(|name| find_peer_scheduler(name))
            .collect::<Result<_, _>>()?,
    };
    if options.list {
        let rows: String = chosen.iter().map(|peer| peer_row(&cache, *peer)).collect();
        crate::print_to_stdout(rows.as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut failed = false;
    for peer in chosen {
        if cache.program_path(peer).is_none() || options.update {
            eprintln!("zernel: building {}", peer.name);
            // If one scheduler does not build, the others are still built.
            if let Err(error) = cache.build_peer(peer) {
                crate::print_error(&error);
                failed = true;
                continue;
            }
        }
        crate::print_to_stdout(peer_row(&cache, peer).as_bytes())?;
    }
    Ok(ExitCode::from(u8::from(failed)))
}

fn peer_row(cache: &PeerCache, peer: PeerScheduler) -> String {
    let state = match (cache.program_path(peer), cache.built_version(peer)) {
        (None, _) => "not built".to_owned(),
        (Some(_), version) => version.unwrap_or_else(|| "built".to_owned()),
    };
    let arguments = peer.arguments.join(" ");
    format!(
        "{:13} {state:10} {:60} {arguments}",
        peer.name, peer.design_summary
    )
    .trim_end()
    .to_owned()
        + "\n"
}
