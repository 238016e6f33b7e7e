//! Items of Rust sources: types with their fields, functions with their bodies, and modules.
//!
//! The parser blanks comments and literals and then follows braces. It knows only what the figures need: `struct` with
//! named fields, `enum`, `impl`, `trait`, `mod` and `fn`. Items under `#[cfg(test)]` are left out.

use std::collections::BTreeMap;

/// Items of one file.
#[derive(Debug, Default)]
pub(crate) struct Items {
    /// Structures with named fields, by name.
    pub(crate) structs: BTreeMap<String, Vec<Field>>,
    pub(crate) functions: Vec<Function>,
    /// Text of the `use` declarations.
    pub(crate) uses: String,
}

/// A named field of a structure.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Field {
    pub(crate) name: String,
    /// `pub`, `pub(crate)` and so on; empty for a private field.
    pub(crate) visibility: String,
    /// Type without references, path and parameters.
    pub(crate) of: String,
}

/// A function or method.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    /// Type of the surrounding `impl` or `trait`.
    pub(crate) owner: Option<String>,
    /// Parameters with their types, without references, path and parameters.
    pub(crate) parameters: Vec<(String, String)>,
    pub(crate) body: String,
}

/// Replaces comments and the content of strings by spaces. Line ends stay.
pub(crate) fn blank(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = literal_end(bytes, at);
        for byte in out.iter_mut().take(end).skip(at).filter(|byte| **byte != b'\n') {
            *byte = b' ';
        }
        at = end.max(at + 1);
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Returns the end of the comment, string or character that begins at `at`; `at` if none does.
fn literal_end(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    let until = |text: &[u8], from: usize| {
        let found = rest.get(from..).and_then(|rest| rest.windows(text.len()).position(|part| part == text));
        found.map_or(bytes.len(), |found| at + from + found + text.len())
    };
    let follows_word = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    match rest {
        [b'/', b'/', ..] => until(b"\n", 2).saturating_sub(1).max(at + 2),
        [b'/', b'*', ..] => until(b"*/", 2),
        [b'"', ..] => at + quoted(rest, b'"'),
        [b'r', b'"' | b'#', ..] if !follows_word => {
            let marks = rest[1..].iter().take_while(|byte| **byte == b'#').count();
            match rest.get(1 + marks) {
                Some(b'"') => {
                    let mut end = vec![b'"'];
                    end.resize(1 + marks, b'#');
                    until(&end, marks + 2)
                }
                _ => at,
            }
        }
        // A lifetime has no second quote.
        [b'\'', b'\\', ..] => at + quoted(rest, b'\''),
        [b'\'', ..] => {
            let width = std::str::from_utf8(&rest[1..rest.len().min(5)])
                .map_or_else(|error| error.valid_up_to(), str::len)
                .min(4);
            let character = std::str::from_utf8(&rest[1..=width]).ok().and_then(|text| text.chars().next());
            let end = 1 + character.map_or(1, char::len_utf8);
            if rest.get(end) == Some(&b'\'') { at + end + 1 } else { at }
        }
        _ => at,
    }
}

/// Returns the length of a quoted literal with escapes.
fn quoted(rest: &[u8], end: u8) -> usize {
    let mut at = 1;
    while let Some(byte) = rest.get(at) {
        match byte {
            b'\\' => at += 2,
            byte if *byte == end => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// Kind of the block that a `{` begins.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Scope {
    Module,
    /// Its type, or the name of a trait.
    Impl(String),
    Struct(String),
    /// Index of the function.
    Function(usize),
    /// Braces within a header, as in a `use` declaration or in the pattern of a parameter.
    Part,
    Other,
}

/// Returns the items of a source.
pub(crate) fn parse(source: &str) -> Items {
    let text = blank(source);
    let mut items = Items::default();
    let mut scopes: Vec<(Scope, usize, i32)> = Vec::new();
    // Start of the current header, and open parentheses in it.
    let (mut header, mut open) = (0, 0);
    for (at, character) in text.char_indices() {
        let inner = scopes.last().map_or(&Scope::Module, |(scope, ..)| scope);
        let has_items = matches!(inner, Scope::Module | Scope::Impl(_));
        match character {
            '(' | '[' => open += 1,
            ')' | ']' => open -= 1,
            '{' => {
                let scope = if *inner == Scope::Part || (has_items && open > 0) {
                    Scope::Part
                } else if has_items {
                    scope_of(&text[header..at], inner, &mut items)
                } else {
                    Scope::Other
                };
                if scope != Scope::Part {
                    header = at + 1;
                }
                scopes.push((scope, at + 1, open));
                open = 0;
            }
            '}' => {
                let Some((scope, start, outer)) = scopes.pop() else { continue };
                if scope != Scope::Part && outer == 0 {
                    header = at + 1;
                }
                open = outer;
                match scope {
                    Scope::Function(index) => items.functions[index].body = text[start..at].to_owned(),
                    Scope::Struct(name) => drop(items.structs.insert(name, fields(&text[start..at]))),
                    _ => {}
                }
            }
            ';' if open == 0 && has_items => {
                let declared = &text[header..at];
                if words(declared).any(|word| word == "use") {
                    items.uses.push_str(declared);
                }
                header = at + 1;
            }
            _ => {}
        }
    }
    items
}

/// Identifiers of a text.
pub(crate) fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|character: char| !character.is_ascii_alphanumeric() && character != '_')
        .filter(|word| !word.is_empty())
}

fn scope_of(header: &str, inner: &Scope, items: &mut Items) -> Scope {
    if header.contains("#[cfg(test)]") {
        return Scope::Other;
    }
    let header = without_attributes(header);
    let is_word =
        |word: &&str| ["fn", "impl", "trait", "struct", "mod", "use", "enum", "union"].contains(word);
    match words(header).find(is_word) {
        Some("fn") => {
            let owner = match inner {
                Scope::Impl(owner) => Some(owner.clone()),
                _ => None,
            };
            let name = word_after(header, "fn");
            let parameters = parameters(header);
            items.functions.push(Function { name, owner, parameters, body: String::new() });
            Scope::Function(items.functions.len() - 1)
        }
        Some("impl") => {
            let rest = header.split_once("impl").map_or("", |(_, rest)| rest).trim_start();
            let rest = if rest.starts_with('<') { after_generics(rest) } else { rest };
            let rest = rest.split(" where").next().unwrap_or_default();
            Scope::Impl(base(rest.split_once(" for ").map_or(rest, |(_, of)| of)))
        }
        Some("trait") => Scope::Impl(word_after(header, "trait")),
        Some("struct") => Scope::Struct(word_after(header, "struct")),
        Some("mod") => Scope::Module,
        Some("use") => Scope::Part,
        _ => Scope::Other,
    }
}

fn without_attributes(header: &str) -> &str {
    let mut rest = header.trim_start();
    while rest.starts_with("#[") {
        let mut open = 0;
        let end = rest.char_indices().find(|(_, character)| {
            open += match character {
                '[' => 1,
                ']' => -1,
                _ => return false,
            };
            open == 0
        });
        let Some((end, _)) = end else { break };
        rest = rest[end + 1..].trim_start();
    }
    rest
}

fn word_after(header: &str, word: &str) -> String {
    let mut rest = words(header).skip_while(|other| *other != word).skip(1);
    rest.next().unwrap_or_default().to_owned()
}

/// Returns the text after the generics with which it begins.
fn after_generics(text: &str) -> &str {
    let mut open = 0;
    let mut before = ' ';
    for (at, character) in text.char_indices() {
        match character {
            '<' => open += 1,
            // Not the arrow of a function's type.
            '>' if before != '-' => open -= 1,
            _ => {}
        }
        before = character;
        if open == 0 {
            return &text[at + 1..];
        }
    }
    text
}

/// Splits a list at the commas that are in no brackets.
fn split_list(text: &str) -> Vec<&str> {
    let (mut parts, mut open, mut start, mut before) = (Vec::new(), 0, 0, ' ');
    for (at, character) in text.char_indices() {
        match character {
            '(' | '[' | '{' | '<' => open += 1,
            ')' | ']' | '}' => open -= 1,
            '>' if before != '-' && before != '=' => open -= 1,
            ',' if open == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
        before = character;
    }
    parts.push(&text[start..]);
    parts
}

fn fields(body: &str) -> Vec<Field> {
    let field = |part: &str| {
        let part = without_attributes(part);
        let (name, of) = part.split_once(':')?;
        let name = name.trim();
        let (visibility, name) = name.rsplit_once(' ').unwrap_or(("", name));
        Some(Field { name: name.to_owned(), visibility: visibility.trim().to_owned(), of: base(of) })
    };
    split_list(body).into_iter().filter_map(field).collect()
}

fn parameters(header: &str) -> Vec<(String, String)> {
    let Some((_, rest)) = header.split_once("fn ") else { return Vec::new() };
    let rest = match (rest.find('('), rest.find('<')) {
        (Some(list), Some(generics)) if generics < list => after_generics(&rest[generics..]),
        _ => rest,
    };
    let Some((_, list)) = rest.split_once('(') else { return Vec::new() };
    let end = list.rfind(") ->").or_else(|| list.rfind(')')).unwrap_or(list.len());
    let named = |part: &str| {
        let (name, of) = part.split_once(':')?;
        let name = words(name).last()?;
        Some((name.to_owned(), base(of)))
    };
    split_list(&list[..end]).into_iter().filter_map(named).collect()
}

/// Returns the name of a type without references, path and parameters. Owning pointers count as their contents.
fn base(of: &str) -> String {
    let mut rest = of.trim();
    loop {
        rest = rest.trim_start_matches(['&', ' ']);
        let skipped = if rest.starts_with('\'') {
            rest.split_once(' ').map(|(_, rest)| rest)
        } else {
            ["mut ", "dyn ", "impl ", "Box<", "Rc<", "Arc<"].iter().find_map(|word| rest.strip_prefix(word))
        };
        let Some(skipped) = skipped else { break };
        rest = skipped;
    }
    let path = rest.split(['<', '>', ' ', '\n', '(', '[', ',']).next().unwrap_or_default();
    path.rsplit("::").next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_comments_and_literals() {
        let source = "a /* { */ \"}\\\"{\" 'x' '{' '\\'' r#\"\"}\"# b // {\nfn c<'a>(d: &'a str) { 'ä' }";
        let found = blank(source);
        assert_eq!(found.split_whitespace().collect::<Vec<_>>().join(" "), "a b fn c<'a>(d: &'a str) { }");
        assert_eq!(found.lines().count(), 2);
    }

    #[test]
    fn finds_types_fields_and_functions() {
        let source = [
            "use a::{b, c::{d, e}};",
            "#[derive(Debug)] pub struct Core<T> {",
            "pub(crate) cache: Cache, #[allow(x)] map: BTreeMap<u8, (u8, u8)>, own: Box<x::Load<T>> }",
            "impl<T: Fn(u8) -> u8> Core<T> { const N: [u8; 2] = [0; 2];",
            "fn apply(&mut self, load: &'a mut Load<T>, P { x, y }: P) -> u8 { if x { self.a(); } } }",
            "impl Drop for Core<u8> { fn drop(&mut self) {} }",
            "fn free() { loop {} }",
            "#[cfg(test)] mod tests { fn hidden() {} }",
            "mod inner { fn seen() {} }",
        ];
        let items = parse(&source.join("\n"));
        assert_eq!(items.uses.trim(), "use a::{b, c::{d, e}}");
        let field = |name: &str, visibility: &str, of: &str| Field {
            name: name.to_owned(),
            visibility: visibility.to_owned(),
            of: of.to_owned(),
        };
        assert_eq!(
            items.structs["Core"],
            [field("cache", "pub(crate)", "Cache"), field("map", "", "BTreeMap"), field("own", "", "Load")]
        );
        let functions: Vec<_> = items
            .functions
            .iter()
            .map(|function| (function.name.as_str(), function.owner.as_deref()))
            .collect();
        assert_eq!(
            functions,
            [("apply", Some("Core")), ("drop", Some("Core")), ("free", None), ("seen", None)]
        );
        assert!(items.functions[0].parameters.contains(&("load".to_owned(), "Load".to_owned())));
        assert!(items.functions[0].body.contains("self.a()"));
    }
}
