//! Doc comments of sources, and lines and sentences of documents.

use std::fmt::Write as _;

use crate::tree::{File, Tree};

/// Most words in a sentence of a document.
const SENTENCE_WORDS_MAX: usize = 40;

/// Most characters in a line of a document; tables, links and code are excepted.
const LINE_CHARS_MAX: usize = 120;

/// Most characters in a cell of a table.
const CELL_CHARS_MAX: usize = 200;

/// Fewest words in a doc comment.
const DOC_WORDS_MIN: usize = 4;

/// Whether a line begins an item that the documentation lists by name. Fields and variants are not
/// items here: their names may already suffice.
fn begins_item(line: &str) -> bool {
    let words = ["fn", "struct", "enum", "trait", "type", "const", "static", "mod", "macro_rules!"];
    line.split_whitespace().take(5).any(|word| words.contains(&word))
}

/// Doc comments of types and functions that have fewer than [`DOC_WORDS_MIN`] words, with their lines.
fn short_docs(source: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut doc: Option<(usize, String)> = None;
    for (index, line) in source.lines().enumerate() {
        let line = line.trim_start();
        if let Some(rest) = line.strip_prefix("///").filter(|rest| !rest.starts_with('/')) {
            let (_, text) = doc.get_or_insert_with(|| (index + 1, String::new()));
            let _ = write!(text, "{} ", rest.trim());
        } else if !line.starts_with("#[") {
            let is_short = |text: &str| text.split_whitespace().count() < DOC_WORDS_MIN;
            found.extend(doc.take().filter(|(_, text)| begins_item(line) && is_short(text)));
        }
    }
    found
}

pub(super) fn short_doc_comments(tree: &Tree) -> Vec<String> {
    let of_file = |file: &File| {
        let found = short_docs(&file.text).into_iter();
        found.map(|(line, doc)| format!("{}:{line}: {}", file.path, doc.trim())).collect::<Vec<_>>()
    };
    tree.rust().flat_map(of_file).collect()
}

/// Whether a line begins a public type or function.
fn begins_public_item(line: &str) -> bool {
    let Some(mut rest) = line.trim_start().strip_prefix("pub ") else { return false };
    let items = ["fn", "struct", "enum", "trait", "union", "type", "const", "static"];
    let begins_name =
        |text: &str| text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
    loop {
        if rest.split_once(' ').is_some_and(|(word, after)| items.contains(&word) && begins_name(after)) {
            return true;
        }
        let modifiers = ["async ", "const ", "unsafe "];
        let Some(after) = modifiers.iter().find_map(|modifier| rest.strip_prefix(modifier)) else {
            return false;
        };
        rest = after;
    }
}

/// Lines that begin a public type or function without a doc comment. Attributes may stand in between.
fn undocumented(source: &str) -> Vec<usize> {
    let lines: Vec<&str> = source.lines().map(str::trim_start).collect();
    let mut found = Vec::new();
    for (index, _) in source.lines().enumerate().filter(|(_, line)| begins_public_item(line)) {
        let mut above = index;
        while above > 0 && lines[above - 1].ends_with(']') && !lines[above - 1].starts_with("///") {
            above -= 1;
            while above > 0 && !lines[above].starts_with("#[") {
                above -= 1;
            }
        }
        if above == 0 || !lines[above - 1].starts_with("///") {
            found.push(index + 1);
        }
    }
    found
}

pub(super) fn missing_doc_comments(tree: &Tree) -> Vec<String> {
    let is_shipped = |file: &&File| {
        let path = &file.path;
        !path.contains("tests/") && !path.ends_with("tests.rs") && !path.contains("/examples/")
    };
    let of_file = |file: &File| {
        let found = undocumented(&file.text).into_iter();
        found.map(|line| format!("{}:{line}", file.path)).collect::<Vec<_>>()
    };
    tree.rust().filter(is_shipped).flat_map(of_file).collect()
}

/// A document without its code blocks, line by line with line numbers.
fn prose(source: &str) -> Vec<(usize, &str)> {
    let mut fenced = false;
    let mut lines = Vec::new();
    for (index, line) in source.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            lines.push((index + 1, line));
        }
    }
    lines
}

pub(super) fn long_lines(tree: &Tree) -> Vec<String> {
    let mut offences = Vec::new();
    for file in tree.ending(".md") {
        for (number, line) in prose(&file.text) {
            if line.trim_start().starts_with('|') {
                // Code cannot be wrapped.
                let cells = line.split(" | ").filter(|cell| !cell.starts_with('`'));
                let widest = cells.map(|cell| cell.chars().count()).max().unwrap_or_default();
                if widest > CELL_CHARS_MAX {
                    offences.push(format!("{}:{number}: a table cell of {widest} characters", file.path));
                }
            } else if line.chars().count() > LINE_CHARS_MAX && !line.contains("](") && !line.contains("://") {
                offences.push(format!("{}:{number}: {} characters", file.path, line.chars().count()));
            }
        }
    }
    offences
}

/// Sentences of a document with their first lines. A list item, a heading and a blank line end a sentence.
fn sentences(source: &str) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (number, line) in prose(source) {
        let line = line.trim();
        let starts_item = ["* ", "- ", "> "].iter().any(|mark| line.starts_with(mark))
            || line
                .split_once(". ")
                .is_some_and(|(number, _)| number.bytes().all(|byte| byte.is_ascii_digit()));
        if line.is_empty() || line.starts_with('#') || line.starts_with('|') || starts_item {
            found.extend(open.take());
        }
        if line.starts_with('#') || line.starts_with('|') {
            continue;
        }
        for word in line.split_whitespace() {
            let (_, text) = open.get_or_insert_with(|| (number, String::new()));
            let _ = write!(text, "{word} ");
            if word.ends_with(['.', '?', '!', ':', ';']) || word.ends_with(".)") {
                found.extend(open.take());
            }
        }
    }
    found.extend(open);
    found
}

pub(super) fn long_sentences(tree: &Tree) -> Vec<String> {
    let mut offences = Vec::new();
    for file in tree.ending(".md") {
        for (number, sentence) in sentences(&file.text) {
            let words = sentence.split_whitespace().count();
            if words > SENTENCE_WORDS_MAX {
                offences.push(format!("{}:{number}: {words} words: {sentence:.60}…", file.path));
            }
        }
    }
    offences
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_missing_and_short_doc_comments() {
        let lines = [
            "/// Opens the pool of blocks.",
            "#[must_use]",
            "#[expect(",
            "    dead_code,",
            "    reason = \"x\"",
            ")]",
            "pub fn open() {}",
            "pub struct A;",
            "/// Two words.",
            "pub const fn b() {}",
        ];
        let source = lines.join("\n");
        let source = source.as_str();
        assert_eq!(undocumented(source), [8]);
        assert_eq!(short_docs(source), [(9, "Two words. ".to_owned())]);
    }

    #[test]
    fn knows_public_items() {
        for line in [
            "pub fn a()",
            "  pub const fn a()",
            "pub async fn a()",
            "pub const A: u8 = 1;",
            "pub type A = B;",
            "pub struct A;",
            "pub struct A",
            "pub static A: B = C;",
            "pub unsafe trait A {",
        ] {
            assert!(begins_public_item(line), "{line}");
        }
        for line in
            ["pub mod a;", "pub use a::b;", "pub name: String,", "pub(crate) fn a()", "fn a()", "// pub fn"]
        {
            assert!(!begins_public_item(line), "{line}");
        }
    }

    #[test]
    fn finds_long_lines_cells_and_sentences_of_documents() {
        let line = "x".repeat(LINE_CHARS_MAX + 1);
        let cell = "y".repeat(CELL_CHARS_MAX + 1);
        let words = "word ".repeat(SENTENCE_WORDS_MAX + 1);
        let text = format!(
            "{line}\n[{line}](b)\n```\n{line}\n```\n| {cell} | a |\n| a | `{cell}` |\n\n{words}\n* {words}\n"
        );
        let tree = Tree::of(&[("a.md", &text)]);
        let lines = long_lines(&tree);
        assert!(
            lines[0].starts_with("a.md:1: ") && lines[1].starts_with("a.md:6: a table cell"),
            "{lines:?}"
        );
        assert_eq!(lines.len(), 4, "two lines of words and two others: {lines:?}");
        let found = long_sentences(&tree);
        assert!(
            found[0].starts_with("a.md:9: 41 words") && found[1].starts_with("a.md:10: 42 words"),
            "{found:?}"
        );
    }
}
