//! Figures about the structure of the sources: `cargo xtask figures`.
//!
//! * **Methods** of a type: functions in `impl Type` and `impl Trait for Type`, without unit tests.
//! * **Call cycle**: the largest set of files that all reach each other by calls ([`calls`]). The file that defines the
//!   type routes to all others and does not count.
//! * **Reach of fields**: the files that may name a field of the type. A private field is visible in the file that
//!   defines the type and in the modules below it; `pub(super)`, `pub(crate)` and `pub` widen that.
//! * **Twins**: files of the simulator that follow a production loop (`check/twins.rs`).
//! * **Lines** of Rust by crate, and **test binaries**: what `tests/` folders link.
//! * **Layers** and **upward arrows** of the operator ([`layers`]): `cargo xtask figures operator`.
//!
//! The types are found by name, wherever they are in their crate.

pub(crate) mod calls;
pub(crate) mod layers;

use std::collections::BTreeMap;
use std::process::ExitCode;

use crate::check;
use crate::manifest::manifests;
use crate::print;
use crate::rust::parse;
use crate::tree::Tree;
use calls::{Files, calls, largest_cycle};

/// A type whose methods and calls are counted.
struct Subject {
    name: &'static str,
    /// Folder of its crate's sources, with a `/` at the end.
    folder: &'static str,
    methods_max: usize,
    /// Most files that contain methods.
    files_max: Option<usize>,
}

const CYCLE_MAX: usize = 3;

/// Sources of the operator.
const OPERATOR: &str = "operator/src/";

/// Most lines of Rust of the operator, with tests.
const OPERATOR_LINES_MAX: usize = 16_000;

const AGENT: Subject =
    Subject { name: "AgentCore", folder: "node-agent/core/src/", methods_max: 40, files_max: Some(1) };
const WORLD: Subject =
    Subject { name: "Simulation", folder: "simulator/src/", methods_max: 60, files_max: None };

/// A figure, its greatest permitted value, and its parts.
struct Figure {
    name: String,
    value: usize,
    max: Option<usize>,
    parts: Vec<String>,
}

/// Prints all figures. Fails if one exceeds its limit and `checks` is set.
pub(crate) fn run(checks: bool) -> ExitCode {
    let tree = Tree::read();
    let mut figures = of_type(&tree, &AGENT);
    figures.push(fields_reach(&tree, &AGENT));
    figures.extend(of_type(&tree, &WORLD));
    let twins: Vec<String> = check::twins::found(&tree).into_iter().map(str::to_owned).collect();
    figures.push(Figure {
        name: "files of the simulator that follow a production loop".to_owned(),
        value: twins.len(),
        max: Some(0),
        parts: twins,
    });
    figures.push(Figure {
        name: "integration-test binaries".to_owned(),
        value: check::test_binaries(&tree),
        max: None,
        parts: Vec::new(),
    });
    figures.push(lines(&tree));
    let is_within = print_all(&figures);
    if checks && !is_within { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Prints the structure of the operator: layers, upward arrows, call cycles and lines.
pub(crate) fn run_operator() -> ExitCode {
    let tree = Tree::read();
    let files = sources(&tree, OPERATOR);
    let arrows = layers::arrows(&files, OPERATOR);
    let divided = layers::layers(&arrows);
    let calls = calls(&files);
    let cycle = largest_cycle(&calls);
    let short = |path: &str| path.trim_start_matches(OPERATOR).trim_end_matches(".rs").to_owned();
    let calls_within = |file: &&str| {
        let called = calls[*file].iter().filter(|other| cycle.contains(other)).map(|other| short(other));
        format!("{} → {}", short(file), called.collect::<Vec<_>>().join(", "))
    };
    let cycle: Vec<String> = cycle.iter().map(calls_within).collect();
    let operator = tree.rust().filter(|file| file.path.starts_with("operator/"));
    let all: usize = operator.map(|file| file.text.lines().count()).sum();
    let with = |name: &str, max: Option<usize>, parts: Vec<String>| Figure {
        name: name.to_owned(),
        value: parts.len(),
        max,
        parts,
    };
    let of_layer = divided.layers.iter().map(|layer| layer.join(" ")).collect();
    let figures = [
        with("layers of the operator", None, of_layer),
        with("upward arrows of the operator", None, divided.upward),
        with("arrows from framework to other modules", Some(0), layers::from_framework(&arrows)),
        with("files in the largest call cycle of the operator", Some(CYCLE_MAX), cycle),
        Figure {
            name: "lines of Rust of the operator".to_owned(),
            value: all,
            max: Some(OPERATOR_LINES_MAX),
            parts: Vec::new(),
        },
    ];
    print_all(&figures);
    ExitCode::SUCCESS
}

/// Files of the operator in a call cycle of more than three.
pub(crate) fn operator_call_cycle(tree: &Tree) -> Vec<String> {
    let files = sources(tree, OPERATOR);
    let cycle: Vec<String> = largest_cycle(&calls(&files)).into_iter().map(str::to_owned).collect();
    if cycle.len() > CYCLE_MAX { cycle } else { Vec::new() }
}

/// Arrows from the operator's framework to other modules.
pub(crate) fn arrows_from_framework(tree: &Tree) -> Vec<String> {
    layers::from_framework(&layers::arrows(&sources(tree, OPERATOR), OPERATOR))
}

/// Prints figures and their parts. Returns whether none exceeds its limit.
fn print_all(figures: &[Figure]) -> bool {
    let mut is_within = true;
    for figure in figures {
        let exceeds = figure.max.is_some_and(|max| figure.value > max);
        is_within &= !exceeds;
        let limit = figure.max.map_or_else(String::new, |max| format!(" (at most {max})"));
        let mark = if exceeds { ", exceeded" } else { "" };
        print(&format!("{}: {}{limit}{mark}", figure.name, figure.value));
        for part in &figure.parts {
            print(&format!("    {part}"));
        }
    }
    is_within
}

/// Sources of a folder, without those of unit tests.
fn sources(tree: &Tree, folder: &str) -> Files {
    let is_test = |path: &str| path.ends_with("tests.rs") || path.contains("/tests/");
    tree.rust()
        .filter(|file| file.path.starts_with(folder) && !is_test(&file.path))
        .map(|file| (file.path.clone(), parse(&file.text)))
        .collect()
}

/// The methods of a type and the call cycle of the files below it.
fn of_type(tree: &Tree, subject: &Subject) -> Vec<Figure> {
    let mut files = sources(tree, subject.folder);
    let mut by_file: BTreeMap<&str, usize> = BTreeMap::new();
    for (path, items) in &files {
        let own = items.functions.iter().filter(|function| function.owner.as_deref() == Some(subject.name));
        match own.count() {
            0 => {}
            count => *by_file.entry(path).or_default() += count,
        }
    }
    let methods: usize = by_file.values().sum();
    let mut figures = vec![
        Figure {
            name: format!("methods of {}", subject.name),
            value: methods,
            max: Some(subject.methods_max),
            parts: Vec::new(),
        },
        Figure {
            name: format!("files with methods of {}", subject.name),
            value: by_file.len(),
            max: subject.files_max,
            parts: by_file.iter().map(|(path, count)| format!("{count:4} {path}")).collect(),
        },
    ];
    files.retain(|_, items| !items.structs.contains_key(subject.name));
    let calls = calls(&files);
    let cycle = largest_cycle(&calls);
    figures.push(Figure {
        name: format!("files in the largest call cycle below {}, of {}", subject.name, files.len()),
        value: cycle.len(),
        max: Some(CYCLE_MAX),
        parts: cycle.into_iter().map(str::to_owned).collect(),
    });
    figures
}

/// The files from which a field of a type may be named.
fn fields_reach(tree: &Tree, subject: &Subject) -> Figure {
    let files = sources(tree, subject.folder);
    let mut reached: Vec<String> = Vec::new();
    for (path, items) in files.iter().filter(|(_, items)| items.structs.contains_key(subject.name)) {
        let module = module_folder(path);
        for field in &items.structs[subject.name] {
            let scope = match field.visibility.as_str() {
                "" | "pub(self)" => module.as_str(),
                "pub(super)" => module.rsplit_once('/').map_or("", |(parent, _)| parent),
                _ => subject.folder.trim_end_matches('/'),
            };
            let visible = files.keys().filter(|file| {
                let folder = module_folder(file);
                folder == scope || folder.strip_prefix(scope).is_some_and(|rest| rest.starts_with('/'))
            });
            reached.extend(visible.cloned());
        }
    }
    reached.sort();
    reached.dedup();
    Figure {
        name: format!("files from which fields of {} are reachable", subject.name),
        value: reached.len(),
        max: Some(1),
        parts: reached,
    }
}

/// Returns the folder of the modules below a file.
fn module_folder(path: &str) -> String {
    let path = path.trim_end_matches(".rs");
    let root = ["/mod", "/lib", "/main"].iter().find_map(|root| path.strip_suffix(root));
    root.unwrap_or(path).to_owned()
}

/// Lines of Rust by crate. A file belongs to the crate of the nearest manifest.
fn lines(tree: &Tree) -> Figure {
    let manifests = manifests(tree);
    let mut by_crate: BTreeMap<&str, usize> = BTreeMap::new();
    for file in tree.rust() {
        let own = manifests.iter().filter(|manifest| file.path.starts_with(&manifest.folder));
        let name = own.max_by_key(|manifest| manifest.folder.len()).map_or("-", |manifest| &manifest.name);
        *by_crate.entry(name).or_default() += file.text.lines().count();
    }
    let mut parts: Vec<_> = by_crate.iter().collect();
    parts.sort_by_key(|(_, lines)| std::cmp::Reverse(**lines));
    Figure {
        name: "lines of Rust".to_owned(),
        value: by_crate.values().sum(),
        max: Some(172_000),
        parts: parts.into_iter().map(|(name, lines)| format!("{lines:6} {name}")).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUBJECT: Subject = Subject { name: "Core", folder: "a/src/", methods_max: 2, files_max: Some(1) };

    #[test]
    fn counts_methods_files_and_the_cycle_without_the_type() {
        let tree = Tree::of(&[
            (
                "a/src/core.rs",
                "struct Core { x: u8 }\nimpl Core { fn a(&self) { self.b() } }\nimpl Drop for Core { fn drop(&mut self) {} }",
            ),
            ("a/src/b.rs", "impl Core { fn b(&self) { self.a(); self.c(); } }"),
            ("a/src/c.rs", "impl Core { fn c(&self) { self.b(); } }"),
            ("a/src/b/tests.rs", "impl Core { fn t(&self) {} }"),
        ]);
        let values: Vec<_> = of_type(&tree, &SUBJECT).into_iter().map(|figure| figure.value).collect();
        assert_eq!(values, [4, 3, 2]);
    }

    #[test]
    fn fields_are_reachable_from_the_modules_below_unless_they_are_wider() {
        let reach = |field: &str| {
            let source = format!("struct Core {{ y: u8, {field} x: u8 }}");
            let tree = Tree::of(&[
                ("a/src/lib.rs", ""),
                ("a/src/d/core.rs", &source),
                ("a/src/d/core/b.rs", ""),
                ("a/src/d/core/b/c.rs", ""),
                ("a/src/d/other.rs", ""),
                ("a/src/cores.rs", ""),
            ]);
            fields_reach(&tree, &SUBJECT).value
        };
        assert_eq!((reach(""), reach("pub(super)"), reach("pub(crate)"), reach("pub")), (3, 4, 6, 6));
    }

    #[test]
    fn lines_belong_to_the_nearest_crate() {
        let tree = Tree::of(&[
            ("a/Cargo.toml", "[package]\nname = \"a\"\n"),
            ("a/b/Cargo.toml", "[package]\nname = \"b\"\n"),
            ("a/src/lib.rs", "1\n2\n3\n"),
            ("a/b/src/lib.rs", "1\n"),
        ]);
        let figure = lines(&tree);
        assert_eq!(figure.value, 4);
        assert_eq!(figure.parts, ["     3 a", "     1 b"]);
    }
}
