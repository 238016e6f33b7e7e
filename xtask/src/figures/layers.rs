//! Imports between the modules of a crate: layers, upward arrows and cycles.
//!
//! A module is a file with the folder of the same name. Modules of the operator are those of `framework/` and
//! `reconcile/`, and the other files and folders at the top. An arrow leads from a module to one that it imports, by a
//! `use` declaration or a path that begins with `crate`. Unit tests do not count.
//!
//! The modules are ordered such that few arrows lead upward: the next module is one that imports no remaining module,
//! else the one with the most importers compared with its imports. The layers are the modules on the longest path of
//! downward arrows.

use std::collections::{BTreeMap, BTreeSet};

use super::calls::Files;

/// Modules, and the modules that each imports with the files that do so.
pub(crate) type Arrows = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Folders whose files count as separate modules.
const DIVIDED: [&str; 2] = ["framework", "reconcile"];

/// Files of a crate that only name its modules.
const ROOTS: [&str; 4] = ["lib", "main", "framework", "reconcile"];

/// Returns the module of a path, like `reconcile::pool` for `reconcile::pool::status`; `None` for the root.
fn module(path: &[&str]) -> Option<String> {
    match path {
        [folder, part, ..] if DIVIDED.contains(folder) => Some(format!("{folder}::{part}")),
        [only] if ROOTS.contains(only) => None,
        [first, ..] => Some((*first).to_owned()),
        [] => None,
    }
}

/// Returns the arrows between the modules of a crate whose sources are in `folder`.
pub(crate) fn arrows(files: &Files, folder: &str) -> Arrows {
    let paths = files.keys().filter_map(|path| path.strip_prefix(folder)?.strip_suffix(".rs"));
    let modules: BTreeSet<String> =
        paths.filter_map(|path| module(&path.split('/').collect::<Vec<_>>())).collect();
    let mut arrows: Arrows = modules.iter().map(|name| (name.clone(), BTreeMap::new())).collect();
    for (path, items) in files {
        let Some(own) = path.strip_prefix(folder).and_then(|path| path.strip_suffix(".rs")) else { continue };
        let Some(from) = module(&own.split('/').collect::<Vec<_>>()) else { continue };
        let bodies = items.functions.iter().map(|function| function.body.as_str());
        for text in std::iter::once(items.uses.as_str()).chain(bodies) {
            for imported in paths_from_root(text) {
                let imported: Vec<&str> = imported.iter().map(String::as_str).collect();
                let to = module(&imported).filter(|to| *to != from && modules.contains(to));
                if let (Some(to), Some(all)) = (to, arrows.get_mut(&from)) {
                    all.entry(to).or_default().insert(own.to_owned());
                }
            }
        }
    }
    arrows
}

/// Returns the paths of a text that begin with `crate`, without it. Groups are expanded.
fn paths_from_root(text: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find("crate::") {
        let begins =
            !rest[..at].ends_with(|last: char| last.is_ascii_alphanumeric() || matches!(last, '_' | '$'));
        rest = &rest[at + "crate::".len()..];
        if begins {
            expand(rest, &mut Vec::new(), &mut paths);
        }
    }
    paths
}

/// Adds the paths of a use tree, and returns the text after it.
fn expand<'t>(text: &'t str, prefix: &mut Vec<String>, paths: &mut Vec<Vec<String>>) -> &'t str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = expand(rest, &mut prefix.clone(), paths).trim_start();
            match rest.strip_prefix(',') {
                Some(next) if !next.trim_start().starts_with('}') => rest = next,
                Some(next) => return next.trim_start().strip_prefix('}').unwrap_or(next),
                None => return rest.strip_prefix('}').unwrap_or(rest),
            }
        }
    }
    let end = text.find(|character: char| !character.is_ascii_alphanumeric() && character != '_');
    let (name, rest) = text.split_at(end.unwrap_or(text.len()));
    prefix.push(name.to_owned());
    if let Some(rest) = rest.strip_prefix("::") {
        return expand(rest, prefix, paths);
    }
    paths.push(prefix.clone());
    // A new name, as in `a as b`.
    rest.trim_start().strip_prefix("as ").map_or(rest, |renamed| {
        let end = renamed.find(|character: char| !character.is_ascii_alphanumeric() && character != '_');
        &renamed[end.unwrap_or(renamed.len())..]
    })
}

/// Orders the modules from the lowest to the highest.
fn order(arrows: &Arrows) -> Vec<&str> {
    let mut remaining: BTreeSet<&str> = arrows.keys().map(String::as_str).collect();
    let mut ordered = Vec::new();
    while !remaining.is_empty() {
        let imports = |name: &str| arrows[name].keys().filter(|to| remaining.contains(to.as_str())).count();
        let importers =
            |name: &str| remaining.iter().filter(|other| arrows[**other].contains_key(name)).count();
        let difference = |name: &&&str| match imports(name) {
            0 => usize::MAX,
            own => (importers(name) + remaining.len()).saturating_sub(own),
        };
        let Some(next) = remaining.iter().max_by_key(difference).copied() else { break };
        remaining.remove(next);
        ordered.push(next);
    }
    ordered
}

/// Layers of the modules and the arrows that lead upward.
pub(crate) struct Layers {
    /// Modules of each layer, the lowest first.
    pub(crate) layers: Vec<Vec<String>>,
    /// Upward arrows, with the files that import.
    pub(crate) upward: Vec<String>,
}

/// Divides modules into layers.
pub(crate) fn layers(arrows: &Arrows) -> Layers {
    let ordered = order(arrows);
    let mut layer_of: BTreeMap<&str, usize> = BTreeMap::new();
    let mut upward = Vec::new();
    for name in &ordered {
        let mut layer = 0;
        for (to, files) in &arrows[*name] {
            match layer_of.get(to.as_str()) {
                Some(below) => layer = layer.max(below + 1),
                None => upward.push(format!("{name} → {to}: {}", list(files))),
            }
        }
        layer_of.insert(name, layer);
    }
    let count = layer_of.values().max().map_or(0, |highest| highest + 1);
    let mut layers = vec![Vec::new(); count];
    for (name, layer) in layer_of {
        layers[layer].push(name.to_owned());
    }
    Layers { layers, upward }
}

fn list(files: &BTreeSet<String>) -> String {
    files.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// Arrows from `framework/` to anything else of the operator.
pub(crate) fn from_framework(arrows: &Arrows) -> Vec<String> {
    let below = arrows.iter().filter(|(from, _)| from.starts_with("framework::"));
    below
        .flat_map(|(from, all)| {
            let outside = all.iter().filter(|(to, _)| !to.starts_with("framework::"));
            outside.map(move |(to, files)| format!("{from} → {to}: {}", list(files)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rust::parse;

    fn arrows_of(sources: &[(&str, &str)]) -> Arrows {
        let files =
            sources.iter().map(|(path, source)| (format!("o/src/{path}.rs"), parse(source))).collect();
        arrows(&files, "o/src/")
    }

    #[test]
    fn finds_imports_of_every_form_and_skips_own_modules_and_tests() {
        let found = arrows_of(&[
            ("lib", "pub mod run;"),
            ("framework/a", "use std::b;\n#[cfg(test)]\nmod tests { use crate::run; }"),
            ("framework/b", "use crate::framework::{a::{self, X as Y}, c};"),
            ("framework/c", ""),
            (
                "reconcile/pool/status",
                "use crate::reconcile::pool::K;\nfn f() { crate::reconcile::node::g() }",
            ),
            ("reconcile/node", "use $crate::run::a;"),
            ("run", "use crate::{framework::{a, b}, reconcile::pool, other};"),
        ]);
        let to = |from: &str| found[from].keys().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(to("framework::a"), [""; 0]);
        assert_eq!(to("framework::b"), ["framework::a", "framework::c"]);
        assert_eq!(to("reconcile::pool"), ["reconcile::node"]);
        assert_eq!(to("reconcile::node"), [""; 0]);
        assert_eq!(to("run"), ["framework::a", "framework::b", "reconcile::pool"]);
    }

    #[test]
    fn orders_layers_and_reports_arrows_against_the_order() {
        let found = arrows_of(&[
            ("framework/a", "use crate::reconcile::pool;"),
            ("framework/b", "use crate::framework::a;"),
            ("reconcile/pool", "use crate::framework::{a, b};"),
            ("run", "use crate::reconcile::pool;"),
        ]);
        let divided = layers(&found);
        assert_eq!(divided.layers.concat(), ["framework::a", "framework::b", "reconcile::pool", "run"]);
        assert_eq!(divided.upward, ["framework::a → reconcile::pool: framework/a"]);
        assert_eq!(from_framework(&found), ["framework::a → reconcile::pool: framework/a"]);
    }
}
