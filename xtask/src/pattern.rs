//! Regular expressions, as far as the checks use them: ASCII, ignoring case, leftmost match, by backtracking.
//!
//! Supported: literals, `.`, `[a-z]`, `[^a]`, `\b`, `\d`, `\s`, `\w`, `^`, `$`, `?`, `*`, `+`, `|`, `(…)`, `(?:…)`,
//! `(?-i:…)` and `(?P<name>…)`, whose names have no meaning. Other constructions are errors.

use std::ops::Range;

/// A compiled regular expression.
pub(crate) struct Pattern {
    branches: Vec<Vec<Node>>,
    /// Bytes with which a match may begin; `None` if it may be empty.
    first: Option<Bytes>,
}

/// A set of bytes.
#[derive(Clone)]
struct Bytes(Box<[bool; 256]>);

enum Node {
    Byte(Bytes),
    Boundary,
    Start,
    End,
    Group(Vec<Vec<Node>>),
    /// A node, and how often it matches at least and at most.
    Repeat(Box<Node>, usize, usize),
}

impl Pattern {
    /// Compiles an expression.
    ///
    /// # Errors
    /// A description of what the expression contains and this module does not support.
    pub(crate) fn new(expression: &str) -> Result<Pattern, String> {
        let mut parser = Parser { rest: expression.as_bytes(), ignores_case: true };
        let branches =
            parser.branches().map_err(|error| format!("invalid expression \"{expression}\": {error}"))?;
        if !parser.rest.is_empty() {
            return Err(format!("invalid expression \"{expression}\": unexpected )"));
        }
        let first = first_of_branches(&branches);
        Ok(Pattern { branches, first })
    }

    /// Returns the ranges of all matches, which do not overlap.
    pub(crate) fn find_all(&self, text: &str) -> Vec<Range<usize>> {
        let (mut found, mut at) = (Vec::new(), 0);
        while at <= text.len() {
            let Some(range) = self.find(text.as_bytes(), at) else { break };
            at = range.end.max(range.start + 1);
            found.push(range);
        }
        found
    }

    pub(crate) fn is_match(&self, text: &str) -> bool {
        self.find(text.as_bytes(), 0).is_some()
    }

    fn find(&self, text: &[u8], from: usize) -> Option<Range<usize>> {
        for start in from..=text.len() {
            let is_candidate = match (&self.first, text.get(start)) {
                (None, _) => true,
                (Some(first), Some(byte)) => first.has(*byte),
                (Some(_), None) => false,
            };
            if !is_candidate {
                continue;
            }
            for branch in &self.branches {
                if let Some(end) = matches(branch, text, start, &mut Some) {
                    return Some(start..end);
                }
            }
        }
        None
    }
}

/// Calls `then` with the ends of the matches of `nodes` at `at`, until it returns an end of the whole match.
fn matches(
    nodes: &[Node],
    text: &[u8],
    at: usize,
    then: &mut dyn FnMut(usize) -> Option<usize>,
) -> Option<usize> {
    let Some((node, rest)) = nodes.split_first() else { return then(at) };
    match node {
        Node::Byte(bytes) if text.get(at).is_some_and(|byte| bytes.has(*byte)) => {
            matches(rest, text, at + 1, then)
        }
        Node::Boundary if is_boundary(text, at) => matches(rest, text, at, then),
        Node::Start if at == 0 => matches(rest, text, at, then),
        Node::End if at == text.len() => matches(rest, text, at, then),
        Node::Group(branches) => branches
            .iter()
            .find_map(|branch| matches(branch, text, at, &mut |end| matches(rest, text, end, then))),
        Node::Repeat(node, least, most) => {
            repeat((node, *least, *most), text, at, &mut |end| matches(rest, text, end, then))
        }
        _ => None,
    }
}

fn repeat(
    (node, least, most): (&Node, usize, usize),
    text: &[u8],
    at: usize,
    then: &mut dyn FnMut(usize) -> Option<usize>,
) -> Option<usize> {
    if most > 0 {
        let further = matches(std::slice::from_ref(node), text, at, &mut |end| {
            // An empty repetition would repeat without end.
            if end == at {
                return None;
            }
            repeat((node, least.saturating_sub(1), most - 1), text, end, then)
        });
        if further.is_some() {
            return further;
        }
    }
    if least == 0 { then(at) } else { None }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

fn is_boundary(text: &[u8], at: usize) -> bool {
    let before = at > 0 && is_word(text[at - 1]);
    before != text.get(at).is_some_and(|byte| is_word(*byte))
}

/// Bytes with which one of the branches begins; `None` if one may be empty.
fn first_of_branches(branches: &[Vec<Node>]) -> Option<Bytes> {
    let mut all = Bytes::of(|_| false);
    for branch in branches {
        let first = first(branch)?;
        all = Bytes::of(|byte| all.has(byte) || first.has(byte));
    }
    Some(all)
}

fn first(nodes: &[Node]) -> Option<Bytes> {
    let (node, rest) = nodes.split_first()?;
    match node {
        Node::Byte(bytes) => Some(bytes.clone()),
        Node::Boundary => first(rest),
        Node::Start | Node::End => None,
        Node::Group(branches) => first_of_branches(branches),
        Node::Repeat(node, least, _) => {
            let own = first(std::slice::from_ref(node))?;
            if *least > 0 {
                return Some(own);
            }
            let next = first(rest)?;
            Some(Bytes::of(|byte| own.has(byte) || next.has(byte)))
        }
    }
}

impl Bytes {
    fn of(contains: impl Fn(u8) -> bool) -> Bytes {
        let mut set = Box::new([false; 256]);
        for byte in 0..=u8::MAX {
            set[usize::from(byte)] = contains(byte);
        }
        Bytes(set)
    }

    fn has(&self, byte: u8) -> bool {
        self.0[usize::from(byte)]
    }
}

struct Parser<'e> {
    rest: &'e [u8],
    ignores_case: bool,
}

impl Parser<'_> {
    fn next(&mut self) -> Option<u8> {
        let (byte, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*byte)
    }

    fn skip(&mut self, text: &str) -> bool {
        self.rest.strip_prefix(text.as_bytes()).map(|rest| self.rest = rest).is_some()
    }

    fn branches(&mut self) -> Result<Vec<Vec<Node>>, String> {
        let mut branches = vec![Vec::new()];
        while let Some(byte) = self.rest.first() {
            match byte {
                b')' => break,
                b'|' => {
                    self.next();
                    branches.push(Vec::new());
                }
                _ => {
                    let node = self.repeated()?;
                    branches.last_mut().expect("there is a first branch").push(node);
                }
            }
        }
        Ok(branches)
    }

    fn repeated(&mut self) -> Result<Node, String> {
        let node = self.node()?;
        let (least, most) = match self.rest.first() {
            Some(b'?') => (0, 1),
            Some(b'*') => (0, usize::MAX),
            Some(b'+') => (1, usize::MAX),
            Some(b'{') => return Err("counted repetitions are not supported".to_owned()),
            _ => return Ok(node),
        };
        self.next();
        match self.rest.first() {
            Some(b'?' | b'*' | b'+') => Err("lazy and possessive repetitions are not supported".to_owned()),
            _ => Ok(Node::Repeat(Box::new(node), least, most)),
        }
    }

    fn node(&mut self) -> Result<Node, String> {
        match self.next().ok_or("it ends early")? {
            b'^' => Ok(Node::Start),
            b'$' => Ok(Node::End),
            b'.' => Ok(Node::Byte(Bytes::of(|byte| byte != b'\n'))),
            b'(' => self.group(),
            b'[' => Ok(Node::Byte(self.class()?)),
            b'\\' if self.skip("b") => Ok(Node::Boundary),
            b'\\' => Ok(Node::Byte(self.escaped()?)),
            repetition @ (b'?' | b'*' | b'+') => Err(format!("nothing precedes {}", char::from(repetition))),
            byte if self.ignores_case => Ok(Node::Byte(Bytes::of(|other| other.eq_ignore_ascii_case(&byte)))),
            byte => Ok(Node::Byte(Bytes::of(|other| other == byte))),
        }
    }

    fn group(&mut self) -> Result<Node, String> {
        let ignored_case = self.ignores_case;
        if self.skip("?-i:") {
            self.ignores_case = false;
        } else if self.skip("?P<") {
            while self.next().ok_or("a name does not end")? != b'>' {}
        } else if !self.skip("?:") && self.rest.first() == Some(&b'?') {
            return Err("unknown kind of group".to_owned());
        }
        let branches = self.branches()?;
        if !self.skip(")") {
            return Err("a group does not end".to_owned());
        }
        self.ignores_case = ignored_case;
        Ok(Node::Group(branches))
    }

    fn escaped(&mut self) -> Result<Bytes, String> {
        match self.next().ok_or("it ends early")? {
            b'd' => Ok(Bytes::of(|byte| byte.is_ascii_digit())),
            b's' => Ok(Bytes::of(|byte| byte.is_ascii_whitespace())),
            b'w' => Ok(Bytes::of(is_word)),
            byte if byte.is_ascii_punctuation() => Ok(Bytes::of(|other| other == byte)),
            byte => Err(format!("unknown escape \\{}", char::from(byte))),
        }
    }

    fn class(&mut self) -> Result<Bytes, String> {
        let is_negated = self.skip("^");
        let mut set = Bytes::of(|_| false);
        loop {
            let next = match self.next().ok_or("a class does not end")? {
                b']' => break,
                b'\\' => self.escaped()?,
                from if self.rest.first() == Some(&b'-') && self.rest.get(1) != Some(&b']') => {
                    self.next();
                    let to = self.next().ok_or("a class does not end")?;
                    Bytes::of(|byte| (from..=to).contains(&byte))
                }
                byte => Bytes::of(|other| other == byte),
            };
            set = Bytes::of(|byte| set.has(byte) || next.has(byte));
        }
        if self.ignores_case {
            let exact = set.clone();
            set = Bytes::of(|byte| {
                exact.has(byte.to_ascii_lowercase()) || exact.has(byte.to_ascii_uppercase())
            });
        }
        Ok(Bytes::of(|byte| set.has(byte) != is_negated))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found<'t>(expression: &str, text: &'t str) -> Vec<&'t str> {
        let pattern = Pattern::new(expression).expect("it compiles");
        pattern.find_all(text).into_iter().map(|range| &text[range]).collect()
    }

    #[test]
    fn finds_words_groups_classes_and_repetitions() {
        assert_eq!(found(r"\b(red|green)ish\b", "Reddish GREENISH greenishly"), ["GREENISH"]);
        assert_eq!(found(r"\bread(s|ed)? it\b", "he reads it, readed  it, read it"), ["reads it", "read it"]);
        assert_eq!(found(r"a[b-d]+e|x.y", "abcde ae x-y"), ["abcde", "x-y"]);
        assert_eq!(found(r"[^a-z ]+", "abc 12 Z3"), ["12", "3"]);
        assert_eq!(found(r"(?-i:\b(is|are) red\b)", "is red, is RED"), ["is red"]);
        assert_eq!(
            found(r"of (red|blue(?P<end>[.,;:)]|$| in\b))", "of blue. of blue"),
            ["of blue.", "of blue"]
        );
    }

    #[test]
    fn takes_the_first_branch_and_the_longest_repetition() {
        assert_eq!(found("ab|abc", "abc"), ["ab"]);
        assert_eq!(found(r"(a|ab)c", "abc"), ["abc"]);
        assert_eq!(found(r"a*", "baa"), ["", "aa", ""]);
        assert_eq!(found(r"\w+ \w+$", "one two three"), ["two three"]);
        assert_eq!(found(r"^one", "one one"), ["one"]);
    }

    #[test]
    fn rejects_unsupported_constructions() {
        for expression in ["a{2}", "a+?", "(?i)a", "(a", "a)", r"\pL", "[a", "*a"] {
            assert!(Pattern::new(expression).is_err(), "{expression}");
        }
    }
}
