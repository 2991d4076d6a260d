//! Colour goes to terminals only, and respects `NO_COLOR`.

use std::process::Command;

const COLOURED_COMMANDS: [&[&str]; 3] = [&["doctor"], &["run", "--", "true"], &["--help"]];

/// The output of a command, stdout and stderr together, to a terminal or to a pipe.
fn output_of(arguments: &[&str], to_terminal: bool, no_colour: bool) -> String {
    let zernel = env!("CARGO_BIN_EXE_zernel");
    let line = format!("'{zernel}' {} 2>&1", arguments.join(" "));
    let mut command = match to_terminal {
        true => {
            let mut script = Command::new("script");
            script.args(["--quiet", "--command", &line, "/dev/null"]);
            script
        }
        false => {
            let mut shell = Command::new("sh");
            shell.args(["-c", &line]);
            shell
        }
    };
    for variable in ["NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "CI"] {
        command.env_remove(variable);
    }
    command.env("TERM", "xterm-256color");
    if no_colour {
        command.env("NO_COLOR", "1");
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        text.contains("zernel"),
        "{arguments:?} says nothing: {text}"
    );
    text
}

#[test]
fn a_terminal_gets_colour() {
    for command in COLOURED_COMMANDS {
        let text = output_of(command, true, false);
        assert!(text.contains("\x1b["), "{command:?}: {text:?}");
    }
}

#[test]
fn no_color_is_respected() {
    for command in COLOURED_COMMANDS {
        let text = output_of(command, true, true);
        // Bold and underlined text needs escape sequences too.
        assert!(!text.contains("\x1b["), "{command:?}: {text:?}");
    }
}

#[test]
fn a_pipe_gets_no_colour() {
    for command in COLOURED_COMMANDS {
        let text = output_of(command, false, false);
        assert!(!text.contains('\x1b'), "{command:?}: {text:?}");
    }
}
