//! The words and punctuation of a Rust or C source file, each with its line. Comments, strings and
//! characters are left out, so that what they contain is not taken for code.

use std::iter::Peekable;
use std::str::Chars;

/// A word, a number or one character of punctuation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) text: String,
    pub(crate) line: usize,
}

pub(crate) fn tokenize(source: &str) -> Vec<Token> {
    let mut lexer = Lexer {
        characters: source.chars().peekable(),
        line: 1,
        tokens: Vec::new(),
    };
    lexer.read_tokens();
    lexer.tokens
}

struct Lexer<'a> {
    characters: Peekable<Chars<'a>>,
    line: usize,
    tokens: Vec<Token>,
}

impl Lexer<'_> {
    fn next_character(&mut self) -> Option<char> {
        let next = self.characters.next();
        self.line += usize::from(next == Some('\n'));
        next
    }

    fn read_tokens(&mut self) {
        while let Some(first) = self.next_character() {
            match first {
                '/' if self.characters.peek() == Some(&'/') => self.skip_line(),
                '/' if self.characters.peek() == Some(&'*') => self.skip_block_comment(),
                '"' => self.skip_until('"'),
                '\'' => self.skip_character(),
                _ if first.is_whitespace() => {}
                _ if is_word_character(first) => self.read_word(first),
                _ => self.push_token(first.into(), self.line),
            }
        }
    }

    fn push_token(&mut self, text: String, line: usize) {
        self.tokens.push(Token { text, line });
    }

    fn read_word(&mut self, first: char) {
        let mut text = String::from(first);
        while let Some(next) = self.characters.next_if(|next| is_word_character(*next)) {
            text.push(next);
        }
        let is_raw = ["r", "br", "cr"].contains(&&*text);
        match self.characters.peek() {
            Some('"' | '#') if is_raw => self.skip_raw_string(),
            _ => self.push_token(text, self.line),
        }
    }

    fn skip_line(&mut self) {
        while !matches!(self.next_character(), None | Some('\n')) {}
    }

    /// Skips a comment like `/* … */`. In Rust these comments nest. In C they do not, but no comment of ours opens
    /// another one.
    fn skip_block_comment(&mut self) {
        let (mut depth, mut last) = (1, self.next_character());
        while depth > 0 {
            let Some(next) = self.next_character() else {
                return;
            };
            match (last, next) {
                (Some('*'), '/') => depth -= 1,
                (Some('/'), '*') => depth += 1,
                _ => {
                    last = Some(next);
                    continue;
                }
            }
            last = None;
        }
    }

    fn skip_until(&mut self, end: char) {
        while let Some(next) = self.next_character() {
            match next {
                '\\' => drop(self.next_character()),
                _ if next == end => return,
                _ => {}
            }
        }
    }

    /// Skips a raw string. It ends at a quote with as many `#` as before the first quote. Also skips the `#` of
    /// `r#name`.
    fn skip_raw_string(&mut self) {
        let mut hashes = 0;
        while self.characters.next_if_eq(&'#').is_some() {
            hashes += 1;
        }
        if self.characters.next_if_eq(&'"').is_none() {
            return;
        }
        while let Some(next) = self.next_character() {
            let mut following = 0;
            while next == '"' && following < hashes && self.characters.next_if_eq(&'#').is_some() {
                following += 1;
            }
            if next == '"' && following == hashes {
                return;
            }
        }
    }

    /// Skips a character literal, or the quote of a lifetime.
    fn skip_character(&mut self) {
        let mut ahead = self.characters.clone();
        match (ahead.next(), ahead.next()) {
            (Some('\\'), _) => self.skip_until('\''),
            (Some(_), Some('\'')) => {
                self.next_character();
                self.next_character();
            }
            _ => {}
        }
    }
}

fn is_word_character(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token_texts(source: &str) -> String {
        let tokens = tokenize(source).into_iter().map(|token| token.text);
        tokens.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn tokenizer_skips_comments_strings_and_characters() {
        assert_eq!(token_texts("a // { fn\nb /* { /* } */ fn */ c"), "a b c");
        assert_eq!(
            token_texts(r##"a "{ \" fn" b r#"{ " fn"# c b"{" d"##),
            "a b c b d"
        );
        assert_eq!(token_texts(r"a '{' b '\'' c '\u{7b}' d"), "a b c d");
    }

    #[test]
    fn lifetimes_are_not_character_literals() {
        assert_eq!(token_texts("&'a str {"), "& a str {");
    }

    #[test]
    fn tokens_have_line_numbers() {
        let tokens = tokenize("a /*\n*/ b \"\n\" c\nd");
        let lines: Vec<usize> = tokens.iter().map(|token| token.line).collect();
        assert_eq!(lines, [1, 2, 3, 4]);
    }
}
