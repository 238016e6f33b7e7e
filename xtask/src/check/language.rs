//! Plain English in the tree: constructions that a reader has to decode.
//!
//! `language.toml` has the list of constructions and the exceptions. The check is a tripwire: it finds the words of a
//! dialect, and does not prove that a text is clear.

use std::collections::BTreeSet;

use crate::pattern::Pattern;
use crate::toml::{self, Table};
use crate::tree::Tree;

/// Most exceptions in `language.toml`.
const EXCEPTIONS_MAX: usize = 29;

/// File that holds the words themselves.
const WORDS: &str = "xtask/language.toml";

/// Files that are not checked: they contain the banned constructions as data.
const UNCHECKED: &[&str] = &[WORDS, "xtask/src/check/language.rs"];

struct Rule {
    pattern: Pattern,
    /// A match that this expression matches as well is not an offence.
    except: Option<Pattern>,
    instead: String,
}

struct Exception {
    file: String,
    /// Part of the line in which a construction is allowed.
    text: String,
    reason: String,
}

/// Parses the list of constructions and exceptions.
fn parse(text: &str) -> Result<(Vec<Rule>, Vec<Exception>), String> {
    let (mut rules, mut exceptions) = (Vec::new(), Vec::new());
    for table in toml::tables(text).iter().filter(|table| !table.entries.is_empty()) {
        let required =
            |key: &str| table.text(key).ok_or_else(|| format!("[[{}]] without the string {key}", table.name));
        let only = |keys: &[&str]| unknown_key(table, keys);
        match table.name.as_str() {
            "banned" => {
                only(&["pattern", "except", "instead"])?;
                let pattern = Pattern::new(&required("pattern")?)?;
                let except = table.text("except").map(|except| Pattern::new(&except)).transpose()?;
                rules.push(Rule { pattern, except, instead: required("instead")? });
            }
            "allowed" => {
                only(&["file", "text", "reason"])?;
                let (file, text) = (required("file")?, required("text")?);
                exceptions.push(Exception { file, text, reason: required("reason")? });
            }
            other => return Err(format!("unknown table [[{other}]]")),
        }
    }
    Ok((rules, exceptions))
}

fn unknown_key(table: &Table, known: &[&str]) -> Result<(), String> {
    match table.entries.iter().find(|(key, _)| !known.contains(&key.as_str())) {
        Some((key, _)) => Err(format!("unknown key {key} in [[{}]]", table.name)),
        None => Ok(()),
    }
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
        let name = Pattern::new(r"\b(fn|def) \w+").expect("the expression is valid");
        let (mut text, mut starts) = (String::new(), Vec::new());
        for line in source.lines() {
            starts.push(text.len());
            let line = line.trim_start().trim_start_matches(['/', '!', '#', '*', '>', '|', '-']);
            // Names of functions are sentences, too.
            let mut spaced = line.to_owned();
            for range in name.find_all(line) {
                spaced.replace_range(range.clone(), &line[range].replace('_', " "));
            }
            for word in spaced.split_whitespace() {
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
        for range in rule.pattern.find_all(&flat.text) {
            let words = &flat.text[range.clone()];
            if !rule.except.as_ref().is_some_and(|except| except.is_match(words)) {
                found.push((flat.line(range.start), words.to_owned(), rule.instead.as_str()));
            }
        }
    }
    found.sort();
    found
}

pub(super) fn constructions(tree: &Tree) -> Vec<String> {
    let Some(words) = tree.file(WORDS) else { return vec![format!("{WORDS} is missing")] };
    let (rules, exceptions) = match parse(&words.text) {
        Ok(parsed) => parsed,
        Err(error) => return vec![format!("{WORDS}: {error}")],
    };
    let mut used = BTreeSet::new();
    let mut found = Vec::new();
    for file in tree.files().filter(|file| has_language(&file.path)) {
        let lines: Vec<&str> = file.text.lines().collect();
        for (line, words, instead) in offences(&file.text, &rules) {
            let text = lines.get(line - 1).copied().unwrap_or_default();
            let exception = exceptions
                .iter()
                .position(|exception| exception.file == file.path && text.contains(&exception.text));
            match exception {
                Some(index) => drop(used.insert(index)),
                None => found.push(format!("{}:{line}: \"{words}\": {instead}", file.path)),
            }
        }
    }
    if exceptions.len() > EXCEPTIONS_MAX {
        found.push(format!("at most {EXCEPTIONS_MAX} exceptions, not {}", exceptions.len()));
    }
    for (index, exception) in exceptions.iter().enumerate() {
        if exception.reason.is_empty() {
            found.push(format!("{}: an exception has a reason", exception.file));
        }
        if !used.contains(&index) {
            found.push(format!("{}: nothing needs the exception \"{}\"", exception.file, exception.text));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = include_str!("../../language.toml");

    #[test]
    fn the_search_finds_constructions_and_passes_plain_text() {
        let (rules, _) = parse(LIST).expect("the list parses");
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

    #[test]
    fn every_rule_of_the_list_finds_its_constructions() {
        let (rules, exceptions) = parse(LIST).expect("the list parses");
        assert_eq!((rules.len(), exceptions.len()), (21, 2));
        let words = [
            "everybody",
            "whoever",
            "who",
            "what were",
            "telling",
            "anew",
            "at the least",
            "any more",
            "looked at",
            "gives it back",
            "letting it go",
            "to be had",
            "came about",
            "one of ours.",
            "is none",
            "beside",
            "are no files",
            "was to be",
            "goes on",
            "stood",
            "for good",
        ];
        for word in words {
            assert!(!offences(&format!("It {word} x"), &rules).is_empty(), "{word}");
        }
    }

    #[test]
    fn exceptions_must_be_needed_and_the_list_well_formed() {
        let list = "[[banned]]\npattern = 'x'\ninstead = \"y\"\n\
                    [[allowed]]\nfile = \"a.md\"\ntext = \"an x\"\nreason = \"z\"\n";
        let found = |text: &str| constructions(&Tree::of(&[(WORDS, list), ("a.md", text)]));
        assert_eq!(found("an x"), [""; 0]);
        assert_eq!(found("the x"), ["a.md:1: \"x\": y", "a.md: nothing needs the exception \"an x\""]);
        assert!(parse("[[banned]]\npattern = 'x'\n").is_err());
        assert!(parse("[[banned]]\npattern = 'x'\ninstead = \"y\"\nother = \"z\"\n").is_err());
    }
}
