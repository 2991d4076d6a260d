//! No text of the repository contains a word of a list: comments, documents, messages and names use the words of the
//! field and name their subject.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use crate::{compare_with_exceptions, workspace};

/// Phrases that no text may contain, each with what to write instead. Letter case matters only for a phrase with a
/// capital.
const DENIED_PHRASES: &[(&str, &str)] = &[
    ("tell", "report, print, export, show, distinguish"),
    ("tells", "report, print, export, show, distinguish"),
    ("told", "report, print, export, show, distinguish"),
    ("telling", "report, print, export, show, distinguish"),
    ("so many", "name the number"),
    ("so much", "name the number"),
    ("in a hundred", "percent"),
    ("let go", "detach, release"),
    ("lets go", "detach, release"),
    ("letting go", "detach, release"),
    ("gone", "exited, removed, freed"),
    ("rubbish", "invalid, malformed"),
    ("such a one", "name the subject"),
    ("who", "name the subject"),
    ("Whose", "name the subject"),
    ("whom", "name the object"),
    ("whoever", "name the subject"),
    ("somebody", "name the process, thread or user"),
    ("someone", "name the process, thread or user"),
    ("anybody", "any process, thread or user"),
    ("anyone", "any process, thread or user"),
    ("everybody", "all processes, threads or users"),
    ("everyone", "all processes, threads or users"),
    ("he", "name the subject"),
    ("him", "name the object"),
    ("his", "name the owner"),
];

/// Phrases that may contain a denied word.
const ALLOWED_PHRASES: &[&str] = &[
    // A verdict of `zernel`, and its name in JSON.
    "can't tell",
    "cannot tell",
    // In "it has gone 60 s without a collective", the word means time that has passed.
    "has gone",
    // A field of the snapshot has this name.
    "gone_ranks",
    // Users and engineers are people.
    "user who",
    "users who",
    "engineers who",
];

/// Files in which one denied phrase is right, each with the reason.
const FILE_EXCEPTIONS: &[(&str, &str)] = &[
    // In the JSON of `zernel hang`, `gone` is a value.
    ("crates/zernel/src/hang/analysis.rs", "gone"),
    ("crates/zernel/tests/hang/main.rs", "gone"),
    // This script is part of the recorded truth.
    ("truth/job.py", "so many"),
];

/// Files that are not checked: sealed or generated files, texts of others, and the lists above.
const FILES_WITHOUT_WORD_CHECK: &[&str] = &[
    "Cargo.lock",
    "LICENSE",
    "crates/zernel-testkit/tests/house/words.rs",
    "truth/data/",
    "truth/held_out/",
    "truth/held_out_2/",
    "truth/held_out_3/",
    "truth/held_out_4/",
    "truth/held_out_5/",
    "truth/held_out_6/",
];

/// A word of a text, with its line.
struct TextWord<'a> {
    text: &'a str,
    line: usize,
    /// Whether only blanks, joiners of a name or comment markers are between this word and the one before.
    continues_phrase: bool,
}

/// The words of a text. The parts of a name like `one_two` are separate words. A comment that is continued on the next
/// line is one text.
fn words_of_text(text: &str) -> Vec<TextWord<'_>> {
    let mut words = Vec::new();
    let mut continues = true;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_start().trim_start_matches(['/', '!', '#', '*']);
        let is_word_character = |character: char| character.is_alphanumeric() || character == '\'';
        let mut rest = line;
        while let Some(start) = rest.find(is_word_character) {
            let between = &rest[..start];
            continues &= between.chars().all(|c| matches!(c, ' ' | '_' | '-' | ','));
            let end = rest[start..].find(|c| !is_word_character(c));
            let end = end.map_or(rest.len(), |length| start + length);
            words.push(TextWord {
                text: without_genitive(&rest[start..end]),
                line: index + 1,
                continues_phrase: continues,
            });
            continues = true;
            rest = &rest[end..];
        }
        continues &= rest
            .chars()
            .all(|c| matches!(c, ' ' | '_' | '-' | ',' | '\\'));
    }
    words
}

/// The word without the ending `'s` and without quotes: `somebody` for `somebody's`.
fn without_genitive(word: &str) -> &str {
    let word = word.trim_matches('\'');
    word.strip_suffix("'s").unwrap_or(word)
}

/// Whether the words from `start` on are those of `phrase`.
fn is_phrase_at(words: &[TextWord<'_>], start: usize, phrase: &[TextWord<'_>]) -> bool {
    let Some(found) = words.get(start..start + phrase.len()) else {
        return false;
    };
    let is_equal = |(found, expected): (&TextWord<'_>, &TextWord<'_>)| {
        let has_capital = || expected.text.contains(char::is_uppercase);
        found.text.eq_ignore_ascii_case(expected.text)
            && (found.text == expected.text || !has_capital())
    };
    found.iter().skip(1).all(|word| word.continues_phrase) && found.iter().zip(phrase).all(is_equal)
}

/// Whether a phrase of [`ALLOWED_PHRASES`] covers the words from `start` to `end`.
fn is_in_allowed_phrase(words: &[TextWord<'_>], start: usize, end: usize) -> bool {
    ALLOWED_PHRASES.iter().any(|allowed| {
        let allowed = self::words_of_text(allowed);
        let first = (start + 1).saturating_sub(allowed.len());
        (first..=start)
            .any(|place| is_phrase_at(words, place, &allowed) && place + allowed.len() >= end)
    })
}

/// The denied phrases of a text: the line, the phrase, and what to write instead.
fn denied_phrases_in(text: &str) -> Vec<(usize, &'static str, &'static str)> {
    let words = words_of_text(text);
    let rules: Vec<_> = DENIED_PHRASES
        .iter()
        .map(|rule| (self::words_of_text(rule.0), rule))
        .collect();
    let mut found = Vec::new();
    for start in 0..words.len() {
        for (phrase, (name, instead)) in &rules {
            let end = start + phrase.len();
            if is_phrase_at(&words, start, phrase) && !is_in_allowed_phrase(&words, start, end) {
                found.push((words[start].line, *name, *instead));
            }
        }
    }
    found
}

/// The paths of all files in the repository that are checked.
fn paths_to_read() -> Vec<String> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z"]).current_dir(workspace());
    let output = git.output().expect("git runs");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("paths in UTF-8");
    let is_read = |path: &&str| {
        let is_below = |prefix: &&str| path.starts_with(*prefix);
        !path.is_empty() && !FILES_WITHOUT_WORD_CHECK.iter().any(is_below)
    };
    let paths = text.split('\0').filter(is_read);
    paths.map(str::to_owned).collect()
}

#[test]
fn no_text_contains_a_denied_word() {
    let (workspace, paths) = (workspace(), paths_to_read());
    assert!(paths.len() > 300, "{} files", paths.len());
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for path in paths {
        // A file that is deleted but not yet committed is still listed.
        let Ok(text) = fs::read(workspace.join(&path)) else {
            continue;
        };
        for (line, phrase, instead) in denied_phrases_in(&String::from_utf8_lossy(&text)) {
            let places = found.entry(format!("{path} {phrase}")).or_default();
            *places += &format!("\n    {path}:{line}: write {instead}");
        }
    }
    let exceptions = FILE_EXCEPTIONS
        .iter()
        .map(|(path, phrase)| format!("{path} {phrase}"));
    let exceptions: Vec<String> = exceptions.collect();
    let exceptions: Vec<&str> = exceptions.iter().map(|exception| &**exception).collect();
    let rule = "words of the field, and a named subject";
    if let Err(report) = compare_with_exceptions(rule, &found, &exceptions) {
        panic!("{report}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines_and_phrases(text: &str) -> Vec<(usize, &'static str)> {
        let found = denied_phrases_in(text).into_iter();
        found.map(|(line, phrase, _)| (line, phrase)).collect()
    }

    #[test]
    fn denied_phrases_are_found_with_line() {
        let text = "/// Told of nobody.\nfn f() {}\n// It has so\n// many children.\n";
        assert_eq!(lines_and_phrases(text), [(1, "told"), (3, "so many")]);
        assert_eq!(lines_and_phrases("# The process is gone."), [(1, "gone")]);
        assert_eq!(
            lines_and_phrases("panic!(\"somebody's file\")"),
            [(1, "somebody")]
        );
    }

    #[test]
    fn denied_words_in_identifiers_are_found() {
        assert_eq!(lines_and_phrases("let is_told = 1;"), [(1, "told")]);
        assert_eq!(lines_and_phrases("Stage::Gone"), [(1, "gone")]);
        assert_eq!(lines_and_phrases("let (go, gate) = channel();"), []);
    }

    #[test]
    fn allowed_phrases_may_contain_denied_words() {
        assert_eq!(
            lines_and_phrases("\"Can't tell\" is a verdict (`cannot-tell`)."),
            []
        );
        assert_eq!(
            lines_and_phrases("/// A user\n    /// who starts it, and users, who see it"),
            []
        );
        assert_eq!(
            lines_and_phrases("/// The user. Who starts it?"),
            [(1, "who")]
        );
        assert_eq!(lines_and_phrases("a process whose files"), []);
        assert_eq!(lines_and_phrases("/// Whose files?"), [(1, "Whose")]);
    }
}
