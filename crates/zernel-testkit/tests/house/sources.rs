//! The source files of the product without their tests, and the lengths of their functions.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::tokens::{Token, tokenize};

/// A source file without its test modules.
pub(crate) struct SourceFile {
    /// Path of the file, relative to the workspace.
    pub(crate) path: String,
    /// Number of lines outside of test modules.
    pub(crate) lines: usize,
    tokens: Vec<Token>,
}

/// A function, and the number of lines from its name to its closing brace.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MeasuredFunction {
    pub(crate) name: String,
    pub(crate) lines: usize,
}

/// All source files of the product, Rust and BPF, without files that contain only tests.
pub(crate) fn product_sources(workspace: &Path) -> Vec<SourceFile> {
    let crates = children_of_folder(&workspace.join("crates"));
    let folders = crates.into_iter().map(|folder| folder.join("src"));
    let mut paths: Vec<PathBuf> = folders.flat_map(|folder| files_below(&folder)).collect();
    paths.extend(files_below(&workspace.join("bpf")));
    let tests: BTreeSet<PathBuf> = paths.iter().flat_map(|path| test_modules(path)).collect();
    let is_test = |path: &PathBuf| path.ancestors().any(|ancestor| tests.contains(ancestor));
    let paths = paths.into_iter().filter(|path| !is_test(path));
    let mut sources: Vec<SourceFile> = paths
        .map(|path| SourceFile::read(workspace, &path))
        .collect();
    sources.sort_by(|one, other| one.path.cmp(&other.path));
    sources
}

fn children_of_folder(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let is_source = |path: &PathBuf| {
        let extension = path.extension().and_then(|extension| extension.to_str());
        matches!(extension, Some("rs" | "c" | "h"))
    };
    let children = children_of_folder(folder).into_iter();
    let (folders, files): (Vec<PathBuf>, Vec<PathBuf>) = children.partition(|path| path.is_dir());
    let below = folders.iter().flat_map(|folder| files_below(folder));
    files.into_iter().filter(is_source).chain(below).collect()
}

/// The files and folders of the modules that a file declares for tests only.
fn test_modules(path: &Path) -> Vec<PathBuf> {
    let tokens = tokenize(&read(path));
    let folder = match path.file_name().and_then(|name| name.to_str()) {
        Some("lib.rs" | "main.rs" | "mod.rs") => path.parent().expect("a file").to_owned(),
        _ => path.with_extension(""),
    };
    let modules = test_module_starts(&tokens).filter(|(_, end)| tokens[*end].text == ";");
    let names = modules.map(|(_, end)| tokens[end - 1].text.clone());
    names
        .flat_map(|name| [folder.join(format!("{name}.rs")), folder.join(name)])
        .collect()
}

/// The places where `#[cfg(test)] mod name` begins, each with the place of its `{` or `;`.
fn test_module_starts(tokens: &[Token]) -> impl Iterator<Item = (usize, usize)> {
    const TEST_MODULE_START: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    let starts = (0..tokens.len()).filter(|start| tokens_match(tokens, *start, &TEST_MODULE_START));
    starts.filter_map(|start| {
        let visibility_and_module = start + TEST_MODULE_START.len();
        let module = (visibility_and_module..tokens.len().min(visibility_and_module + 5))
            .find(|place| tokens[*place].text == "mod")?;
        (module + 2 < tokens.len()).then_some((start, module + 2))
    })
}

fn tokens_match(tokens: &[Token], start: usize, texts: &[&str]) -> bool {
    let following = tokens[start..].iter().map(|token| &*token.text);
    following.take(texts.len()).eq(texts.iter().copied())
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

impl SourceFile {
    fn read(workspace: &Path, path: &Path) -> Self {
        let relative = path.strip_prefix(workspace).expect("below the workspace");
        Self::parse(&relative.to_string_lossy(), &read(path))
    }

    fn parse(path: &str, text: &str) -> Self {
        let mut tokens = tokenize(text);
        let mut lines = text.lines().count();
        loop {
            let mut modules = test_module_starts(&tokens);
            let Some((start, body)) = modules.find(|(_, body)| tokens[*body].text == "{") else {
                break;
            };
            drop(modules);
            let end = closing_brace(&tokens, body);
            lines -= tokens[end].line - tokens[start].line + 1;
            tokens.drain(start..=end);
        }
        Self {
            path: path.to_owned(),
            lines,
            tokens,
        }
    }

    /// The functions of the file that have a body, with their lengths.
    pub(crate) fn functions(&self) -> Vec<MeasuredFunction> {
        match self.path.ends_with(".rs") {
            true => self.rust_functions(),
            false => self.c_functions(),
        }
    }

    fn rust_functions(&self) -> Vec<MeasuredFunction> {
        let starts = (1..self.tokens.len()).filter(|name| {
            let is_name = self.tokens[*name]
                .text
                .starts_with(|c: char| c.is_alphabetic() || c == '_');
            self.tokens[name - 1].text == "fn" && is_name
        });
        let functions = starts.filter_map(|name| {
            let body = body_of_signature(&self.tokens, name)?;
            Some(self.measure_function(name, body))
        });
        functions.collect()
    }

    /// The functions of a C file. At the outermost level a brace that follows `)` begins the body of a function.
    fn c_functions(&self) -> Vec<MeasuredFunction> {
        let (mut place, mut functions) = (0, Vec::new());
        while place < self.tokens.len() {
            if self.tokens[place].text == "{" {
                if let Some(name) = name_before_arguments(&self.tokens, place) {
                    functions.push(self.measure_function(name, place));
                }
                place = closing_brace(&self.tokens, place);
            }
            place += 1;
        }
        functions
    }

    fn measure_function(&self, name: usize, body: usize) -> MeasuredFunction {
        let end = closing_brace(&self.tokens, body);
        MeasuredFunction {
            name: self.tokens[name].text.clone(),
            lines: self.tokens[end].line - self.tokens[name].line + 1,
        }
    }

    /// The names that the file declares with `pub struct`, `pub enum`, `pub trait` and `pub union`. A macro that
    /// declares `pub struct $name` names no type itself.
    pub(crate) fn public_types(&self) -> Vec<String> {
        let names = self.tokens.windows(3).filter_map(|window| {
            let is_type = ["struct", "enum", "trait", "union"].contains(&&*window[1].text);
            let is_public_type = window[0].text == "pub" && is_type && window[2].text != "$";
            is_public_type.then(|| window[2].text.clone())
        });
        names.collect()
    }
}

/// The place of the brace that closes the one at `open`; the last token if there is none.
fn closing_brace(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0_usize;
    for (place, token) in tokens.iter().enumerate().skip(open) {
        match &*token.text {
            "{" => depth += 1,
            "}" if depth == 1 => return place,
            "}" => depth -= 1,
            _ => {}
        }
    }
    tokens.len() - 1
}

/// The place of the brace that begins the body of the function at `name`; `None` for a declaration, which ends with `;`
/// instead.
fn body_of_signature(tokens: &[Token], name: usize) -> Option<usize> {
    let mut depth = 0_usize;
    for (place, token) in tokens.iter().enumerate().skip(name) {
        match &*token.text {
            "(" | "[" => depth += 1,
            ")" | "]" => depth = depth.checked_sub(1)?,
            "{" if depth == 0 => return Some(place),
            ";" if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

/// The word before the arguments that end just before the brace at `brace`: the name of a C function.
fn name_before_arguments(tokens: &[Token], brace: usize) -> Option<usize> {
    let mut depth = 0_usize;
    for place in (0..brace).rev() {
        match &*tokens[place].text {
            ")" => depth += 1,
            "(" if depth == 1 => return place.checked_sub(1),
            "(" => depth = depth.checked_sub(1)?,
            _ if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn functions(path: &str, text: &str) -> Vec<(String, usize)> {
        let functions = SourceFile::parse(path, text).functions().into_iter();
        functions
            .map(|function| (function.name, function.lines))
            .collect()
    }

    #[test]
    fn rust_function_lengths_are_measured() {
        let text = "trait T { fn declared(&self) -> [u8; 4]; }\n\
            fn outer(x: [u8; 2]) {\n    fn inner() {\n    }\n    let s = \"}\";\n}\nfn one() {}\n";
        let expected = [("outer", 5), ("inner", 2), ("one", 1)];
        let expected = expected.map(|(name, lines)| (name.to_owned(), lines));
        assert_eq!(functions("a.rs", text), expected);
    }

    #[test]
    fn c_function_lengths_are_measured() {
        let text = "struct s { int a; };\nstatic int f(int (*g)(int))\n{\n\tif (g) { }\n}\n\
            SEC(\"x\") int BPF_PROG(h, int a) {\n}\nint t[] = { 1 };\n";
        let expected = [("f".to_owned(), 4), ("BPF_PROG".to_owned(), 2)];
        assert_eq!(functions("a.bpf.c", text), expected);
    }

    #[test]
    fn test_modules_are_left_out_of_line_counts() {
        let text = "pub struct A;\n#[cfg(test)]\nmod tests {\n    pub struct B;\n    fn f() {}\n}\nfn g() {}\n";
        let source = SourceFile::parse("a.rs", text);
        assert_eq!(source.lines, 2);
        assert_eq!(source.public_types(), ["A"]);
        assert_eq!(source.functions().len(), 1);
    }

    #[test]
    fn only_public_types_are_listed() {
        let text = "pub(crate) struct A; struct B; pub enum C {} pub trait D {} pub fn struct_e() {} pub union E {} pub struct $name;";
        assert_eq!(
            SourceFile::parse("a.rs", text).public_types(),
            ["C", "D", "E"]
        );
    }
}
