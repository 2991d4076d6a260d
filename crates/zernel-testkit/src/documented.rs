//! The commands that README.md, CONTRIBUTING.md and the pages in `docs` show, split into words as a shell does.

use std::fs;
use std::path::{Path, PathBuf};

/// Programs by which a command inside a sentence is recognised: code that begins with another word is no command.
const DOCUMENTED_PROGRAMS: [&str; 5] = ["zernel", "make", "cargo", "curl", "systemctl"];
/// Folders with programs of this repository, which count as commands too.
const PROGRAM_FOLDERS: [&str; 2] = ["scripts/", "truth/"];

/// A command that a document shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DocumentedCommand {
    /// The document, and the line at which the block or the paragraph with the command begins.
    pub place: String,
    /// The program and its arguments, without `sudo` and without assignments of variables before the program.
    pub words: Vec<String>,
    /// Whether the command stands inside a sentence. Such a command may lack required arguments.
    pub is_inside_sentence: bool,
}

impl DocumentedCommand {
    /// Where the command stands, and its words, for messages of tests.
    pub fn describe(&self) -> String {
        format!("{}: {}", self.place, self.words.join(" "))
    }
}

/// The folder of the workspace that this crate was compiled in.
pub fn workspace() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    folder.canonicalize().expect("two folders up")
}

/// The commands of README.md, CONTRIBUTING.md and all pages in `docs`.
pub fn documented_commands() -> Vec<DocumentedCommand> {
    let workspace = workspace();
    let entries = fs::read_dir(workspace.join("docs")).expect("a folder of documents");
    let pages = entries.map(|entry| entry.expect("readable").path());
    let mut documents: Vec<PathBuf> = pages
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    documents.extend(["README.md", "CONTRIBUTING.md"].map(|name| workspace.join(name)));
    documents.sort();
    let commands = documents.iter().flat_map(|document| {
        let name = document.strip_prefix(&workspace).expect("inside").display();
        let text = fs::read_to_string(document).unwrap_or_else(|error| panic!("{name}: {error}"));
        commands_of_page(&name.to_string(), &text)
    });
    commands.collect()
}

/// The commands of one page: those in indented blocks, in fenced blocks without a language or with `sh` or `bash`, and
/// in code inside sentences.
pub fn commands_of_page(name: &str, text: &str) -> Vec<DocumentedCommand> {
    let mut commands = Vec::new();
    let mut part = PagePart::default();
    let mut fence: Option<bool> = None;
    for (index, line) in text.lines().enumerate() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            part.add_commands_of_part(name, &mut commands);
            fence = match fence {
                Some(_) => None,
                None => Some(matches!(language, "" | "sh" | "bash")),
            };
            continue;
        }
        let kind = match (fence, line.trim().is_empty()) {
            (Some(true), _) => PagePartKind::Block,
            (Some(false), _) | (None, true) => PagePartKind::Ignored,
            (None, false) if line.starts_with("    ") => PagePartKind::Block,
            (None, false) => PagePartKind::Paragraph,
        };
        if kind != part.kind {
            part.add_commands_of_part(name, &mut commands);
            part.kind = kind;
        }
        if part.text.is_empty() {
            part.line = index + 1;
        }
        part.text.push_str(line);
        part.text.push('\n');
    }
    part.add_commands_of_part(name, &mut commands);
    commands
}

/// Consecutive lines of a page that are of one kind.
#[derive(Default)]
struct PagePart {
    kind: PagePartKind,
    line: usize,
    text: String,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum PagePartKind {
    Block,
    Paragraph,
    #[default]
    Ignored,
}

impl PagePart {
    /// Adds the commands in the collected lines to `commands`, and forgets these lines.
    fn add_commands_of_part(&mut self, name: &str, commands: &mut Vec<DocumentedCommand>) {
        let text = std::mem::take(&mut self.text);
        let found = match self.kind {
            PagePartKind::Block => commands_of_block(&text),
            PagePartKind::Paragraph => commands_of_paragraph(&text),
            PagePartKind::Ignored => Vec::new(),
        };
        let place = format!("{name}:{}", self.line);
        let is_inside_sentence = self.kind == PagePartKind::Paragraph;
        commands.extend(found.into_iter().map(|words| DocumentedCommand {
            place: place.clone(),
            words,
            is_inside_sentence,
        }));
    }
}

/// The commands of a block. If a line of the block begins with `$ `, only such lines are commands; the other lines are
/// output. Text after two blanks explains a command.
pub fn commands_of_block(text: &str) -> Vec<Vec<String>> {
    let joined = join_continued_lines(text);
    let has_prompt = joined.iter().any(|line| line.starts_with("$ "));
    let lines = joined.iter().filter_map(|line| match has_prompt {
        true => line.strip_prefix("$ "),
        false => Some(&**line),
    });
    lines
        .flat_map(|line| split_into_commands(line, true))
        .collect()
}

/// Joins each line that ends with a backslash to the next, and removes indentation.
fn join_continued_lines(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut continues = false;
    for line in text.lines().map(str::trim) {
        let (part, next_continues) = match line.strip_suffix('\\') {
            Some(part) => (part.trim_end(), true),
            None => (line, false),
        };
        match lines.last_mut() {
            Some(last) if continues => *last = format!("{last} {part}"),
            _ => lines.push(part.to_owned()),
        }
        continues = next_continues;
    }
    lines
}

/// The commands among the code in a paragraph's sentences.
fn commands_of_paragraph(text: &str) -> Vec<Vec<String>> {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let codes = text.split('`').skip(1).step_by(2);
    let commands = codes.flat_map(|code| split_into_commands(code, false));
    let is_command = |words: &Vec<String>| {
        let program = &*words[0];
        let is_in_folder = |folder: &&str| program.starts_with(*folder);
        words.len() > 1 && DOCUMENTED_PROGRAMS.contains(&program)
            || PROGRAM_FOLDERS.iter().any(is_in_folder) && is_script_path(program)
    };
    commands.filter(is_command).collect()
}

/// Whether a path inside the repository names a script. Only the name counts: folders of data and files of other types
/// are no scripts.
fn is_script_path(path: &str) -> bool {
    let is_file = workspace().join(path).is_file();
    let extension = Path::new(path).extension();
    extension.is_some_and(|extension| extension == "py" || extension == "sh")
        || extension.is_none() && is_file
}

/// Splits a line into commands at `|`, `;` and `&`, and each command into words. If `explained` is true, two blanks end
/// the line, because an explanation follows.
fn split_into_commands(line: &str, explained: bool) -> Vec<Vec<String>> {
    let mut commands = vec![vec![String::new()]];
    let (mut quote, mut depth, mut blanks) = (None, 0_usize, 0_usize);
    for character in line.chars() {
        let command = commands.last_mut().expect("at least one");
        let word = command.last_mut().expect("at least one");
        blanks = if character == ' ' { blanks + 1 } else { 0 };
        match character {
            _ if quote == Some(character) => quote = None,
            _ if quote.is_some() => word.push(character),
            '\'' | '"' if depth == 0 => quote = Some(character),
            ' ' if depth == 0 && explained && blanks == 2 => break,
            ' ' if depth == 0 => command.push(String::new()),
            '|' | ';' | '&' if depth == 0 => commands.push(vec![String::new()]),
            _ => {
                depth += usize::from(character == '(');
                depth -= usize::from(character == ')' && depth > 0);
                word.push(character);
            }
        }
    }
    let commands = commands.into_iter().map(without_prefix);
    commands.filter(|words| !words.is_empty()).collect()
}

/// The words of a command without empty words, `sudo` with its options, and assignments of variables before the
/// program.
fn without_prefix(words: Vec<String>) -> Vec<String> {
    let words = words.into_iter().filter(|word| !word.is_empty());
    let is_variable = |word: &str| {
        let name = word.split_once('=').map_or("", |(name, _)| name);
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphabetic() || c == '_')
    };
    let is_prefix = |word: &String| word == "sudo" || word == "-E" || is_variable(word);
    words.skip_while(is_prefix).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words_of_commands(commands: &[DocumentedCommand]) -> Vec<String> {
        let commands = commands.iter();
        commands.map(|command| command.words.join(" ")).collect()
    }

    #[test]
    fn indented_blocks_are_split_into_commands() {
        let page = "Text.\n\n    make check    format and clippy\n    sudo A=1 zernel ps | jq '.[0] | {pid}'\n\n    \
                    cargo test \\\n        -p one && cargo fmt\n";
        let commands = commands_of_page("page", page);
        assert_eq!(
            words_of_commands(&commands),
            [
                "make check",
                "zernel ps",
                "jq .[0] | {pid}",
                "cargo test -p one",
                "cargo fmt"
            ]
        );
        assert_eq!(commands[1].place, "page:3");
    }

    #[test]
    fn only_lines_with_prompt_are_commands_of_a_session() {
        let page = "    $ zernel run x\n    zernel run x: 3 s\n";
        assert_eq!(
            words_of_commands(&commands_of_page("page", page)),
            ["zernel run x"]
        );
    }

    #[test]
    fn inline_code_counts_if_it_begins_with_a_program() {
        let page =
            "Use `zernel lab\nrun x`, `zernel`, `zernel-lab`, `A=1 make test` and `truth/none`.\n";
        let commands = commands_of_page("page", page);
        assert_eq!(
            words_of_commands(&commands),
            ["zernel lab run x", "make test"]
        );
        assert!(commands.iter().all(|command| command.is_inside_sentence));
    }

    #[test]
    fn code_blocks_of_other_languages_are_ignored() {
        let page = "```toml\nmake = 1\n```\n```sh\nmake one\n```\n";
        assert_eq!(
            words_of_commands(&commands_of_page("page", page)),
            ["make one"]
        );
    }

    #[test]
    fn shell_substitution_is_part_of_its_word() {
        let commands = commands_of_block("zernel attach $(pgrep a | head) -s\n");
        assert_eq!(
            commands,
            [["zernel", "attach", "$(pgrep a | head)", "-s"].map(str::to_owned)]
        );
    }
}
