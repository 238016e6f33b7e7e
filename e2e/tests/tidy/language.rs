//! Plain English in the tree: banned constructions, long sentences, and empty doc comments.
//!
//! `language.toml` has the list of constructions and the exceptions. The checks are a tripwire: they find the words of
//! a dialect, and do not prove that a text is clear.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use regex::{Regex, RegexBuilder};
use reprise_e2e::tree;
use serde::Deserialize;

use super::{assert_none, tracked};

/// Most exceptions in `language.toml`.
const EXCEPTIONS_MAX: usize = 29;

/// Most words in a sentence of a document.
const SENTENCE_WORDS_MAX: usize = 40;

/// Most characters in a line of a document; tables, links and code are excepted.
const LINE_CHARS_MAX: usize = 120;

/// Most characters in a cell of a table.
const CELL_CHARS_MAX: usize = 200;

/// Fewest words in a doc comment.
const DOC_WORDS_MIN: usize = 4;

/// File that holds the words themselves.
const WORDS: &str = "e2e/tests/tidy/language.toml";

/// Files that are not checked: they contain the banned constructions as data.
const UNCHECKED: &[&str] = &[WORDS, "e2e/tests/tidy/language.rs"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rules {
    banned: Vec<Banned>,
    #[serde(default)]
    allowed: Vec<Allowed>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Banned {
    /// Regular expression over text in which each run of white space is one space.
    pattern: String,
    /// A match that this expression matches as well is not an offence.
    except: Option<String>,
    instead: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Allowed {
    file: String,
    /// Part of the line in which a construction is allowed.
    text: String,
    reason: String,
}

struct Rule {
    pattern: Regex,
    except: Option<Regex>,
    instead: String,
}

fn expression(pattern: &str) -> Regex {
    RegexBuilder::new(pattern)
        .case_insensitive(true)
        .unicode(false)
        .build()
        .expect("a pattern of language.toml compiles")
}

fn rules() -> (Vec<Rule>, Vec<Allowed>) {
    let text = std::fs::read_to_string(tree().join(WORDS)).expect("the list of words reads");
    let rules: Rules = toml::from_str(&text).expect("the list of words parses");
    let compile = |banned: Banned| Rule {
        pattern: expression(&banned.pattern),
        except: banned.except.as_deref().map(expression),
        instead: banned.instead,
    };
    (rules.banned.into_iter().map(compile).collect(), rules.allowed)
}

fn has_language(file: &str) -> bool {
    let kinds =
        ["rs", "py", "pyi", "md", "yaml", "yml", "toml", "proto", "sh", "tpl", "txt", "go", "cu", "h"];
    let named = file.rsplit_once('.').is_some_and(|(_, kind)| kinds.contains(&kind));
    (named || file.ends_with("Makefile")) && !UNCHECKED.contains(&file)
}

/// Text of a file with comment markers removed and white space collapsed, so that a construction is found across the
/// end of a line; and the line of each of its bytes.
struct Flat {
    text: String,
    /// Offset in `text` at which each line of the file begins.
    starts: Vec<usize>,
}

impl Flat {
    fn of(source: &str) -> Self {
        let name = expression(r"\b(fn|def) \w+");
        let (mut text, mut starts) = (String::new(), Vec::new());
        for line in source.lines() {
            starts.push(text.len());
            let line = line.trim_start().trim_start_matches(['/', '!', '#', '*', '>', '|', '-']);
            // Names of functions are sentences, too.
            let line = name.replace_all(line, |found: &regex::Captures| found[0].replace('_', " "));
            for word in line.split_whitespace() {
                text.push_str(word);
                text.push(' ');
            }
        }
        Self { text, starts }
    }

    /// Line, from 1, of the byte at `offset`.
    fn line(&self, offset: usize) -> usize {
        self.starts.partition_point(|start| *start <= offset)
    }
}

/// Offences of one file as `(line, construction, replacement)`.
fn offences<'r>(source: &str, rules: &'r [Rule]) -> Vec<(usize, String, &'r str)> {
    let flat = Flat::of(source);
    let mut found = Vec::new();
    for rule in rules {
        for matched in rule.pattern.find_iter(&flat.text) {
            if !rule.except.as_ref().is_some_and(|except| except.is_match(matched.as_str())) {
                found.push((flat.line(matched.start()), matched.as_str().to_owned(), rule.instead.as_str()));
            }
        }
    }
    found.sort();
    found
}

#[test]
fn the_tree_uses_no_banned_construction() {
    let (rules, allowed) = rules();
    let mut used: BTreeMap<usize, usize> = BTreeMap::new();
    let mut offenders = Vec::new();
    for file in tracked().into_iter().filter(|file| has_language(file)) {
        let Ok(source) = std::fs::read_to_string(tree().join(&file)) else { continue };
        let lines: Vec<&str> = source.lines().collect();
        for (line, words, instead) in offences(&source, &rules) {
            let text = lines.get(line - 1).copied().unwrap_or_default();
            let exception =
                allowed.iter().position(|allowed| allowed.file == file && text.contains(&allowed.text));
            match exception {
                Some(index) => *used.entry(index).or_default() += 1,
                None => offenders.push(format!("{file}:{line}: \"{words}\": {instead}")),
            }
        }
    }
    assert_none("plain English (e2e/tests/tidy/language.toml)", &offenders);
    assert!(allowed.len() <= EXCEPTIONS_MAX, "at most {EXCEPTIONS_MAX} exceptions, not {}", allowed.len());
    for (index, exception) in allowed.iter().enumerate() {
        assert!(!exception.reason.is_empty(), "{}: an exception has a reason", exception.file);
        assert!(
            used.contains_key(&index),
            "{}: nothing needs the exception \"{}\"",
            exception.file,
            exception.text
        );
    }
}

#[test]
fn the_search_finds_constructions_and_passes_plain_text() {
    let (rules, _) = rules();
    let found = |text: &str| {
        offences(text, &rules).into_iter().map(|(line, words, _)| (line, words)).collect::<Vec<_>>()
    };
    assert_eq!(
        found("// The member has\n// told nobody."),
        [(2, "nobody".to_owned()), (2, "told".to_owned())]
    );
    assert_eq!(found("/// A limit at\n/// the most."), [(1, "at the most".to_owned())]);
    assert_eq!(found("fn what_is_left_stays() {}"), [(1, "what is".to_owned())]);
    assert_eq!(found("log.level 'x' is no filter"), [(1, "is no filter".to_owned())]);
    assert_eq!(found("There is no pool. It is no longer open. No more than 4. if slot.is_none() {}"), []);
}

/// Whether a line begins an item that has a name of its own in the documentation. Fields and variants are not
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

#[test]
fn doc_comments_are_more_than_a_name() {
    let offenders: Vec<String> = super::rust_files()
        .into_iter()
        .flat_map(|(file, text)| {
            short_docs(&text).into_iter().map(move |(line, doc)| format!("{file}:{line}: {}", doc.trim()))
        })
        .collect();
    assert_none("a doc comment of a type or function has at least four words", &offenders);
}

/// Lines that begin a public type or function without a doc comment. Attributes may stand in between.
fn undocumented(source: &str) -> Vec<usize> {
    let item = Regex::new(
        r"^\s*pub (async |const |unsafe )*(fn|struct|enum|trait|union|type|const|static) [A-Za-z_]",
    )
    .expect("the expression is valid");
    let lines: Vec<&str> = source.lines().map(str::trim_start).collect();
    let mut found = Vec::new();
    for (index, _) in source.lines().enumerate().filter(|(_, line)| item.is_match(line)) {
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

#[test]
fn public_types_and_functions_have_doc_comments() {
    let is_shipped =
        |file: &str| !file.contains("tests/") && !file.ends_with("tests.rs") && !file.contains("/examples/");
    let offenders: Vec<String> = super::rust_files()
        .into_iter()
        .filter(|(file, _)| is_shipped(file))
        .flat_map(|(file, text)| undocumented(&text).into_iter().map(move |line| format!("{file}:{line}")))
        .collect();
    assert_none("a public type or function has a doc comment", &offenders);
    let source = "/// Opens the pool.\n#[must_use]\n#[expect(\n    dead_code,\n    reason = \"x\"\n)]\npub fn open() {}\npub struct A;\n";
    assert_eq!(undocumented(source), [8]);
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

fn documents() -> Vec<(String, String)> {
    tracked()
        .into_iter()
        .filter(|file| file.ends_with(".md"))
        .map(|file| {
            let text = std::fs::read_to_string(tree().join(&file)).expect("a document reads");
            (file, text)
        })
        .collect()
}

#[test]
fn lines_of_documents_fit_a_screen() {
    let mut offenders = Vec::new();
    for (file, text) in documents() {
        for (number, line) in prose(&text) {
            if line.trim_start().starts_with('|') {
                // Code cannot be wrapped.
                let cells = line.split(" | ").filter(|cell| !cell.starts_with('`'));
                let widest = cells.map(|cell| cell.chars().count()).max().unwrap_or_default();
                if widest > CELL_CHARS_MAX {
                    offenders.push(format!("{file}:{number}: a table cell of {widest} characters"));
                }
            } else if line.chars().count() > LINE_CHARS_MAX && !line.contains("](") && !line.contains("://") {
                offenders.push(format!("{file}:{number}: {} characters", line.chars().count()));
            }
        }
    }
    assert_none("lines of documents have at most 120 characters, cells 200", &offenders);
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

#[test]
fn sentences_of_documents_are_short() {
    let mut offenders = Vec::new();
    for (file, text) in documents() {
        for (number, sentence) in sentences(&text) {
            let words = sentence.split_whitespace().count();
            if words > SENTENCE_WORDS_MAX {
                offenders.push(format!("{file}:{number}: {words} words: {sentence:.60}…"));
            }
        }
    }
    assert_none("a sentence of a document has at most 40 words", &offenders);
}
