//! `zernel generate`: writes manual pages and shell completions, made from the help texts.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;

/// Write manual pages and shell completions
///
/// Writes to share/man/man1, share/bash-completion/completions, share/zsh/site-functions and
/// share/fish/vendor_completions.d below PREFIX.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Folder to write below, such as /usr/local or ~/.local
    #[arg(value_name = "PREFIX")]
    prefix: PathBuf,
}

/// The file below `share` from which each shell reads its completions.
const COMPLETION_FILES: [(Shell, &str); 3] = [
    (Shell::Bash, "bash-completion/completions/zernel"),
    (Shell::Zsh, "zsh/site-functions/_zernel"),
    (Shell::Fish, "fish/vendor_completions.d/zernel.fish"),
];

pub(crate) fn run(options: &Options, zernel: Command) -> Result<ExitCode, Box<dyn Error>> {
    let share = options.prefix.join("share");
    write_completions(&share, without_hidden_subcommands(&zernel))?;
    write_manual(&share.join("man/man1"), zernel)?;
    Ok(ExitCode::SUCCESS)
}

/// The command without hidden subcommands, which some shells would offer, too.
fn without_hidden_subcommands(zernel: &Command) -> Command {
    let subcommands = zernel.get_subcommands().filter(|sub| !sub.is_hide_set());
    Command::new("zernel")
        .version(env!("CARGO_PKG_VERSION"))
        .args(zernel.get_arguments().cloned())
        .subcommands(subcommands.cloned())
}

fn write_completions(share: &Path, mut zernel: Command) -> Result<(), GenerateError> {
    for (shell, file) in COMPLETION_FILES {
        let file = share.join(file);
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut zernel, "zernel", &mut script);
        let folder = file.parent().unwrap_or(share);
        make_folder(folder)?;
        fs::write(&file, script).map_err(error_at(&file))?;
    }
    Ok(())
}

fn write_manual(folder: &Path, zernel: Command) -> Result<(), GenerateError> {
    make_folder(folder)?;
    // Each command has its own page, so `help` needs none.
    let mut zernel = zernel.disable_help_subcommand(true);
    zernel.build();
    write_manual_pages(folder, &zernel)
}

/// Writes the page of a command and of its subcommands.
fn write_manual_pages(folder: &Path, command: &Command) -> Result<(), GenerateError> {
    let man = Man::new(command.clone())
        .source(concat!("zernel ", env!("CARGO_PKG_VERSION")))
        .manual("Zernel");
    let file = folder.join(man.get_filename());
    let mut text = Vec::new();
    man.render(&mut text).map_err(error_at(&file))?;
    // clap titles the text after the options EXTRA. In Zernel's help this text is the examples, which have a heading
    // of their own.
    let text = String::from_utf8_lossy(&text)
        .replace(".SH EXTRA", ".SH EXAMPLES")
        .replace("\nExamples:\n", "\n");
    fs::write(&file, text).map_err(error_at(&file))?;
    let mut subcommands = command.get_subcommands().filter(|sub| !sub.is_hide_set());
    subcommands.try_for_each(|subcommand| write_manual_pages(folder, subcommand))
}

fn make_folder(folder: &Path) -> Result<(), GenerateError> {
    fs::create_dir_all(folder).map_err(error_at(folder))
}

/// A file that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}; choose a folder that you can write to", path.display())]
struct GenerateError {
    path: PathBuf,
    source: std::io::Error,
}

fn error_at(path: &Path) -> impl FnOnce(std::io::Error) -> GenerateError {
    let path = path.to_owned();
    |source| GenerateError { path, source }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn every_command_has_a_page_and_every_shell_its_completions() {
        let folder = tempfile::tempdir().unwrap();
        let options = Options {
            prefix: folder.path().to_owned(),
        };
        run(&options, crate::Cli::command()).unwrap();
        let share = folder.path().join("share");
        for command in crate::Cli::command().get_subcommands() {
            let page = share.join(format!("man/man1/zernel-{}.1", command.get_name()));
            assert_eq!(
                page.exists(),
                !command.is_hide_set(),
                "{}",
                command.get_name()
            );
        }
        let page = fs::read_to_string(share.join("man/man1/zernel-run.1")).unwrap();
        assert!(page.contains(".SH EXAMPLES"), "{page}");
        for (_, file) in COMPLETION_FILES {
            let script = fs::read_to_string(share.join(file)).unwrap();
            assert!(script.contains("observe"), "{file}: {script}");
            assert!(script.contains("version"), "{file}: {script}");
            assert!(!script.contains("generate"), "{file}: {script}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let options = Options {
            prefix: file.path().to_owned(),
        };
        let error = run(&options, crate::Cli::command()).unwrap_err();
        let said = error.to_string();
        assert!(said.contains(file.path().to_str().unwrap()), "{said}");
    }
}
