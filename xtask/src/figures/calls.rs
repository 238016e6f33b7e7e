//! Calls between files, and the largest cycle of files by calls.
//!
//! A file calls another one if a function in it calls a function that the other one defines:
//! * `self.name(…)`, `parameter.name(…)`, and `self.field.name(…)` with any number of fields: a method of the type that
//!   the declarations of the `impl`, the parameter and the fields name;
//! * `Type::name`, with or without parentheses, and `Self::name`: a method of that type;
//! * `module::name(…)`: a function of that module; `outer::module::name(…)`: of that one in `outer`, if there is one;
//! * `name(…)`: a function that a `use` of the file names.
//!
//! Of several modules of one name, the one counts that a `use` of the file names, or that is below the file. Types are
//! found by name. If several files define a method of one name for types of one name, all of them count,
//! unless the calling file is among them. Calls of local variables and of what a call returns do not count. Neither do
//! calls in unit tests. Files are in one cycle if each reaches the other by calls.

use std::collections::{BTreeMap, BTreeSet};

use crate::rust::{Function, Items, words};

/// Files with their items.
pub(crate) type Files = BTreeMap<String, Items>;

/// Where functions are defined.
#[derive(Default)]
struct Definitions<'f> {
    /// Files by type and method.
    methods: BTreeMap<(&'f str, &'f str), BTreeSet<&'f str>>,
    /// Files by name of a function.
    free: BTreeMap<&'f str, BTreeSet<&'f str>>,
    /// Types of fields by structure and field.
    fields: BTreeMap<(&'f str, &'f str), BTreeSet<&'f str>>,
}

/// Returns the files that each file calls.
pub(crate) fn calls(files: &Files) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut definitions = Definitions::default();
    for (path, items) in files {
        for function in &items.functions {
            match &function.owner {
                Some(owner) => {
                    definitions.methods.entry((owner, &function.name)).or_default().insert(path);
                }
                None => {
                    definitions.free.entry(&function.name).or_default().insert(path);
                }
            }
        }
        for (name, fields) in &items.structs {
            for field in fields {
                definitions.fields.entry((name, &field.name)).or_default().insert(&field.of);
            }
        }
    }
    let mut calls = BTreeMap::new();
    for (path, items) in files {
        let mut called = BTreeSet::new();
        for function in &items.functions {
            definitions.called_by(&Site { path, items, function }, &mut called);
        }
        calls.insert(path.as_str(), called);
    }
    calls
}

/// A token of a body: an identifier, `::`, or another character.
fn tokens(body: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = body.trim_start();
    while let Some(first) = rest.chars().next() {
        let is_word = |character: char| character.is_ascii_alphanumeric() || character == '_';
        let length = if is_word(first) {
            rest.find(|character| !is_word(character)).unwrap_or(rest.len())
        } else if rest.starts_with("::") {
            2
        } else {
            first.len_utf8()
        };
        tokens.push(&rest[..length]);
        rest = rest[length..].trim_start();
    }
    tokens
}

fn is_name(token: &str) -> bool {
    token.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
}

/// A function that calls others.
struct Site<'f> {
    path: &'f str,
    items: &'f Items,
    function: &'f Function,
}

impl<'f> Definitions<'f> {
    /// Adds the files that a function calls.
    fn called_by(&self, site: &Site<'f>, called: &mut BTreeSet<&'f str>) {
        let tokens = tokens(&site.function.body);
        let token = |at: usize| tokens.get(at).copied().unwrap_or_default();
        let mut at = 0;
        while at < tokens.len() {
            let begins = is_name(tokens[at]) && (at == 0 || !matches!(tokens[at - 1], "." | "::"));
            if !begins {
                at += 1;
                continue;
            }
            // The path `a::b::c`.
            let mut names = vec![tokens[at]];
            at += 1;
            while token(at) == "::" && is_name(token(at + 1)) {
                names.push(tokens[at + 1]);
                at += 2;
            }
            let is_call = matches!(token(at), "(" | "::");
            if names.len() > 1 {
                self.add_path(site, &names, is_call, called);
            } else if token(at) == "." {
                at = self.add_chain(site, &tokens, at - 1, called);
            } else if is_call && words(&site.items.uses).any(|word| word == names[0]) {
                let files = self.free.get(names[0]).into_iter().flatten().copied().collect();
                let module = imported(site, names[0]).map(|mut path| {
                    path.pop();
                    path
                });
                let files = narrow(files, module.as_deref());
                self.add(site.path, Some(&files.into_iter().collect()), called);
            }
        }
    }

    /// Adds the method at the end of `self.field.method(`, and returns the position after it.
    fn add_chain(
        &self,
        site: &Site<'f>,
        tokens: &[&str],
        from: usize,
        called: &mut BTreeSet<&'f str>,
    ) -> usize {
        let mut types: BTreeSet<&str> = match tokens[from] {
            "self" => site.function.owner.iter().map(String::as_str).collect(),
            name => {
                let parameters = site.function.parameters.iter().filter(|(parameter, _)| parameter == name);
                parameters.map(|(_, of)| of.as_str()).collect()
            }
        };
        let token = |at: usize| tokens.get(at).copied().unwrap_or_default();
        let mut at = from + 1;
        while token(at) == "." && is_name(token(at + 1)) {
            let name = tokens[at + 1];
            at += 2;
            if matches!(token(at), "(" | "::") {
                for of in types {
                    self.add(site.path, self.methods.get(&(of, name)), called);
                }
                return at;
            }
            let fields = types.iter().filter_map(|of| self.fields.get(&(*of, name)));
            types = fields.flatten().copied().collect();
        }
        at
    }

    fn add_path(&self, site: &Site<'f>, names: &[&str], is_call: bool, called: &mut BTreeSet<&'f str>) {
        let [.., qualifier, name] = names else { return };
        let of = match (*qualifier, &site.function.owner) {
            ("Self", Some(owner)) => owner.as_str(),
            (other, _) => other,
        };
        if of.starts_with(|first: char| first.is_ascii_uppercase()) {
            self.add(site.path, self.methods.get(&(of, *name)), called);
        } else if is_call {
            let module = match of {
                "super" => module_name(parent(site.path)),
                "self" => return,
                other => other,
            };
            let defining = self.free.get(name).into_iter().flatten().copied();
            let files: Vec<&str> =
                defining.filter(|file| *file != site.path && module_name(file) == module).collect();
            // `kind::step::function`: of several modules `step`, that of the kind.
            let outer = names.len().checked_sub(3).map(|at| names[at]);
            let is_inner = |file: &&str| outer.is_some_and(|outer| module_name(parent(file)) == outer);
            let inner: Vec<&str> = files.iter().copied().filter(is_inner).collect();
            let files = if inner.is_empty() { files } else { inner };
            let below = || [module_path(site.path), vec![module.to_owned()]].concat();
            let path = imported(site, module).unwrap_or_else(below);
            called.extend(narrow(files, Some(&path)));
        }
    }

    fn add(&self, path: &str, files: Option<&BTreeSet<&'f str>>, called: &mut BTreeSet<&'f str>) {
        if let Some(files) = files.filter(|files| !files.contains(path)) {
            called.extend(files);
        }
    }
}

/// Returns the path of the module that contains the module of a file.
fn parent(path: &str) -> &str {
    let path = path.strip_suffix("/mod.rs").unwrap_or(path);
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// Returns the name of the module of a file or folder.
fn module_name(path: &str) -> &str {
    let path = path.strip_suffix("/mod.rs").unwrap_or_else(|| path.trim_end_matches(".rs"));
    path.rsplit('/').next().unwrap_or_default()
}

/// Returns the modules from the root of the crate to a file.
fn module_path(path: &str) -> Vec<String> {
    let below = path.rsplit_once("src/").map_or(path, |(_, below)| below);
    let below = below.trim_end_matches(".rs").trim_end_matches("/mod");
    below.split('/').map(str::to_owned).collect()
}

/// Returns the path, from the root of the crate, of the item that a `use` of the file names.
fn imported(site: &Site<'_>, name: &str) -> Option<Vec<String>> {
    let mut path: Vec<&str> = Vec::new();
    let mut outer: Vec<usize> = Vec::new();
    for token in tokens(&site.items.uses) {
        let length = outer.last().copied().unwrap_or_default();
        match token {
            "use" | ";" => (path, outer) = (Vec::new(), Vec::new()),
            "," => path.truncate(length),
            "{" => outer.push(path.len()),
            "}" => path.truncate(outer.pop().unwrap_or_default()),
            "::" | "pub" => {}
            _ => path.push(token),
        }
        if token == name && path.last() == Some(&name) {
            let is_relative = matches!(path.first(), Some(&"super" | &"self"));
            let mut whole = if is_relative { module_path(site.path) } else { Vec::new() };
            for part in path {
                match part {
                    "super" => drop(whole.pop()),
                    "self" | "crate" => {}
                    part => whole.push(part.to_owned()),
                }
            }
            return Some(whole);
        }
    }
    None
}

/// Returns the files of a module if there are some, and all files otherwise.
fn narrow<'f>(files: Vec<&'f str>, module: Option<&[String]>) -> Vec<&'f str> {
    let is_it = |file: &&str| module.is_some_and(|module| module_path(file) == module);
    let of_module: Vec<&str> = files.iter().copied().filter(is_it).collect();
    if of_module.is_empty() { files } else { of_module }
}

/// Returns the largest set of files that all reach each other by calls; empty if there is no cycle.
pub(crate) fn largest_cycle<'f>(calls: &BTreeMap<&'f str, BTreeSet<&'f str>>) -> Vec<&'f str> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        calls.keys().map(|file| (*file, reachable(calls, file))).collect();
    let cycle_of = |file: &&'f str| -> Vec<&'f str> {
        let both = reached[file].iter().filter(|other| reached[**other].contains(file));
        both.copied().collect()
    };
    let cycles = calls.keys().map(cycle_of).filter(|cycle| cycle.len() > 1);
    cycles.max_by_key(Vec::len).unwrap_or_default()
}

/// Returns the files that a file reaches by at least one call.
fn reachable<'f>(calls: &BTreeMap<&'f str, BTreeSet<&'f str>>, from: &str) -> BTreeSet<&'f str> {
    let mut reached = BTreeSet::new();
    let mut due: Vec<&str> = vec![from];
    while let Some(file) = due.pop() {
        for next in calls.get(file).into_iter().flatten() {
            if reached.insert(*next) {
                due.push(next);
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rust::parse;

    fn files(sources: &[(&str, &str)]) -> Files {
        sources.iter().map(|(path, source)| ((*path).to_owned(), parse(source))).collect()
    }

    #[test]
    fn finds_calls_of_every_form() {
        let files = files(&[
            (
                "src/a.rs",
                "use super::d::made;\nstruct A { b: B, list: Vec<B> }\nimpl A {\n    fn run(&mut self, e: &mut E) {\n        \
                 self\n            .b\n            .go();\n        e.inner.end();\n        made(1);\n        \
                 f::helper(2);\n        x.map(G::new);\n        self.list.go();\n        let h = H::One(3);\n    }\n}\n",
            ),
            ("src/b.rs", "struct B;\nimpl B { fn go(&self) {} }"),
            ("src/d.rs", "fn made(x: u8) {}"),
            ("src/e.rs", "struct E { inner: I }\nstruct I;\nimpl I { fn end(&self) {} }"),
            ("src/f.rs", "fn helper(x: u8) {}"),
            ("src/g.rs", "struct G;\nimpl G { fn new(x: u8) -> Self { Self } }"),
            ("src/h.rs", "enum H { One(u8) }\nimpl H { fn one(&self) {} }"),
        ]);
        let calls = calls(&files);
        let called: Vec<_> = calls["src/a.rs"].iter().copied().collect();
        assert_eq!(called, ["src/b.rs", "src/d.rs", "src/e.rs", "src/f.rs", "src/g.rs"]);
        assert!(calls["src/b.rs"].is_empty());
    }

    #[test]
    fn longer_paths_distinguish_modules_of_one_name() {
        let files = files(&[
            ("src/a.rs", "fn a() { one::step::run(); }"),
            ("src/b.rs", "fn b() { step::run(); }"),
            ("src/one/step.rs", "fn run() {}"),
            ("src/two/step.rs", "fn run() {}"),
        ]);
        let calls = calls(&files);
        let called = |file: &str| calls[file].iter().copied().collect::<Vec<_>>();
        assert_eq!(called("src/a.rs"), ["src/one/step.rs"]);
        assert_eq!(called("src/b.rs"), ["src/one/step.rs", "src/two/step.rs"]);
    }

    #[test]
    fn imports_and_folders_distinguish_modules_of_one_name() {
        let files = files(&[
            ("src/a.rs", "use crate::{one::{step::{run, x}}, y};\nfn a() { run(); }"),
            ("src/b.rs", "use crate::two::step;\nfn b() { step::run(); }"),
            ("src/one.rs", "fn c() { step::run(); }"),
            ("src/two/d.rs", "use super::step::run;\nfn d() { run(); }"),
            ("src/one/step.rs", "fn run() {}"),
            ("src/two/step.rs", "fn run() {}"),
        ]);
        let calls = calls(&files);
        let called = |file: &str| calls[file].iter().copied().collect::<Vec<_>>();
        assert_eq!(called("src/a.rs"), ["src/one/step.rs"]);
        assert_eq!(called("src/b.rs"), ["src/two/step.rs"]);
        assert_eq!(called("src/one.rs"), ["src/one/step.rs"]);
        assert_eq!(called("src/two/d.rs"), ["src/two/step.rs"]);
    }

    #[test]
    fn methods_of_one_type_in_several_files_form_a_cycle() {
        let files = files(&[
            ("core.rs", "struct Core { x: u8 }\nimpl Core { fn a(&self) {} }"),
            ("b.rs", "impl Core { fn b(&self) { self.a(); self.c(); } }"),
            ("c.rs", "impl Core { fn c(&self) { self.d(); } }"),
            (
                "d.rs",
                "impl Core { fn d(&self) { self.b(); } }\n#[cfg(test)]\nmod tests { fn t() { super::e(); } }",
            ),
            ("e.rs", "impl Core { fn e(&self) { self.d(); self.e(); } }"),
        ]);
        assert_eq!(largest_cycle(&calls(&files)), ["b.rs", "c.rs", "d.rs"]);
    }

    #[test]
    fn files_without_a_cycle_have_none() {
        let files = files(&[("a.rs", "fn a() { b::b() }"), ("b.rs", "fn b() { b() }")]);
        assert_eq!(largest_cycle(&calls(&files)), [""; 0]);
    }
}
