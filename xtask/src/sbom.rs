//! Software bill of materials of a program, as CycloneDX 1.5 in JSON: `cargo xtask sbom`.
//!
//! The crates of a program are what `cargo tree` reports for the packages and features of its build: normal dependencies
//! for its target, without procedural macros and build scripts, which run on the builder only. The modules of a Go program
//! are in the program itself. There is no time and no serial number, so two builds of one source have equal bills.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::process::{Command, ExitCode};

use crate::{print, report, toml};

/// A crate or Go module with its version.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Component {
    /// `cargo` or `golang`, as in package URLs.
    kind: &'static str,
    name: String,
    version: String,
}

/// Facts of a component.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Facts {
    /// Expression of SPDX; empty if unknown.
    licence: String,
    /// SHA-256 of its archive in the registry; empty for our own crates.
    sha256: String,
    depends_on: BTreeSet<Component>,
}

/// The bill of one program.
#[derive(Debug, PartialEq, Eq)]
struct Bill {
    program: Component,
    components: BTreeMap<Component, Facts>,
}

impl Component {
    fn url(&self) -> String {
        format!("pkg:{}/{}@{}", self.kind, self.name, self.version)
    }
}

/// Prints the bill of a package, which `cargo tree` resolves with these arguments.
pub(crate) fn of_package(package: &str, selection: &[&str]) -> ExitCode {
    let tree = run(
        "cargo",
        &[
            &[
                "tree",
                "--locked",
                "--edges",
                "normal,no-proc-macro",
                "--prefix",
                "depth",
                "--format",
                "{p}\t{l}",
            ],
            selection,
        ]
        .concat(),
    );
    let lock =
        std::fs::read_to_string("Cargo.lock").map_err(|error| format!("cannot read Cargo.lock: {error}"));
    answer(tree.and_then(|tree| crates(package, &tree, &lock?)))
}

/// Prints the bill of a Go program.
pub(crate) fn of_go_program(path: &str) -> ExitCode {
    answer(run("go", &["version", "-m", path]).and_then(|text| modules(&text)))
}

fn answer(bill: Result<Bill, String>) -> ExitCode {
    match bill {
        Ok(bill) => {
            print(bill.json().trim_end());
            ExitCode::SUCCESS
        }
        Err(error) => {
            report(&format!("cannot create the bill of materials: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.map_err(|error| format!("cannot run {program}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    String::from_utf8(output.stdout).map_err(|error| error.to_string())
}

/// Reads the output of `cargo tree`: lines `DEPTHname vVERSION (source)\tlicence`, each subtree once.
fn crates(package: &str, tree: &str, lock: &str) -> Result<Bill, String> {
    let checksums = checksums(lock);
    let mut all: BTreeMap<Component, Facts> = BTreeMap::new();
    let mut path: Vec<Component> = Vec::new();
    for line in tree.lines().filter(|line| !line.is_empty()) {
        let invalid = || format!("unexpected line of cargo tree: {line}");
        let digits = line.chars().take_while(char::is_ascii_digit).count();
        let depth: usize = line[..digits].parse().map_err(|_| invalid())?;
        let (name, licence) = line[digits..].split_once('\t').ok_or_else(invalid)?;
        let mut words = name.split(' ');
        let (Some(name), Some(version)) =
            (words.next(), words.next().and_then(|word| word.strip_prefix('v')))
        else {
            return Err(invalid());
        };
        let component = Component { kind: "cargo", name: name.to_owned(), version: version.to_owned() };
        path.truncate(depth);
        if let Some(parent) = path.last() {
            all.entry(parent.clone()).or_default().depends_on.insert(component.clone());
        }
        let facts = all.entry(component.clone()).or_default();
        facts.licence = licence.trim_end_matches("(*)").trim().replace('/', " OR ").replace("  OR  ", " OR ");
        facts.sha256 = checksums.get(&(name.to_owned(), version.to_owned())).cloned().unwrap_or_default();
        path.push(component);
    }
    let program = all.keys().find(|component| component.name == package).cloned();
    let program = program.ok_or_else(|| format!("cargo tree has no package {package}"))?;
    let mut reached = BTreeSet::new();
    let mut waiting = vec![program.clone()];
    while let Some(component) = waiting.pop() {
        if reached.insert(component.clone()) {
            waiting.extend(all[&component].depends_on.iter().cloned());
        }
    }
    all.retain(|component, _| reached.contains(component));
    Ok(Bill { program, components: all })
}

/// Checksums of `Cargo.lock`, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let tables = toml::tables(lock);
    let of =
        |table: &toml::Table| Some(((table.text("name")?, table.text("version")?), table.text("checksum")?));
    tables.iter().filter(|table| table.name == "package").filter_map(of).collect()
}

/// Reads the output of `go version -m`: lines of `path`, `mod` and `dep` between tabs.
fn modules(text: &str) -> Result<Bill, String> {
    let mut program = None;
    let mut modules: BTreeMap<Component, Facts> = BTreeMap::new();
    let mut main = None;
    for line in text.lines() {
        let fields: Vec<&str> = line.split('\t').skip(1).collect();
        let component = |name: &str, version: &str| Component {
            kind: "golang",
            name: name.to_owned(),
            version: version.to_owned(),
        };
        match fields[..] {
            ["path", path] => program = Some(path.to_owned()),
            ["mod", name, version, ..] => main = Some(component(name, version)),
            ["dep" | "=>", name, version, ..] => {
                modules.insert(component(name, version), Facts::default());
            }
            _ => {}
        }
    }
    let main = main.ok_or("the program has no list of Go modules")?;
    // The main module only lists versions; the module of the program is among its dependencies.
    let of_program =
        |module: &&Component| program.as_ref().is_some_and(|path| path.starts_with(&module.name));
    let program = modules.keys().filter(of_program).max_by_key(|module| module.name.len()).cloned();
    let program = program.unwrap_or(main);
    let others: BTreeSet<Component> = modules.keys().filter(|module| **module != program).cloned().collect();
    modules.entry(program.clone()).or_default().depends_on = others;
    Ok(Bill { program, components: modules })
}

impl Bill {
    /// Writes the bill. The program is described in `metadata`, all others in `components`.
    fn json(&self) -> String {
        let mut text = String::from(
            "{\n  \"bomFormat\": \"CycloneDX\",\n  \"specVersion\": \"1.5\",\n  \"version\": 1,\n",
        );
        let program = self.component(&self.program, "application");
        let _ = writeln!(text, "  \"metadata\": {{\"component\": {program}}},");
        let others = self.components.keys().filter(|component| **component != self.program);
        let components: Vec<String> =
            others.map(|component| format!("    {}", self.component(component, "library"))).collect();
        let _ = writeln!(text, "  \"components\": [\n{}\n  ],", components.join(",\n"));
        let edges = self.components.iter().map(|(component, facts)| {
            let on: Vec<String> = facts.depends_on.iter().map(|other| quoted(&other.url())).collect();
            format!("    {{\"ref\": {}, \"dependsOn\": [{}]}}", quoted(&component.url()), on.join(", "))
        });
        let edges: Vec<String> = edges.collect();
        let _ = writeln!(text, "  \"dependencies\": [\n{}\n  ]\n}}", edges.join(",\n"));
        text
    }

    fn component(&self, component: &Component, kind: &str) -> String {
        let url = quoted(&component.url());
        let mut text = format!(
            "{{\"type\": \"{kind}\", \"bom-ref\": {url}, \"name\": {}, \"version\": {}, \"purl\": {url}",
            quoted(&component.name),
            quoted(&component.version),
        );
        let facts = &self.components[component];
        if !facts.licence.is_empty() {
            let _ = write!(text, ", \"licenses\": [{{\"expression\": {}}}]", quoted(&facts.licence));
        }
        if !facts.sha256.is_empty() {
            let _ = write!(
                text,
                ", \"hashes\": [{{\"alg\": \"SHA-256\", \"content\": {}}}]",
                quoted(&facts.sha256)
            );
        }
        text + "}"
    }
}

/// Returns a text as a string of JSON.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            control if control.is_control() => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(control));
            }
            other => quoted.push(other),
        }
    }
    quoted + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "0agent v0.1.0 (/tree/agent)\tApache-2.0\n1serde v1.0.1\tMIT OR Apache-2.0\n2itoa v1.0.2\tMIT/Apache-2.0\n\
        1own v0.1.0 (/tree/own)\tApache-2.0\n2serde v1.0.1\tMIT OR Apache-2.0 (*)\n\n\
        0operator v0.1.0 (/tree/operator)\tApache-2.0\n1own v0.1.0 (/tree/own)\tApache-2.0 (*)\n1kube v5.0.0\t\n";

    const LOCK: &str = "[[package]]\nname = \"serde\"\nversion = \"1.0.1\"\nchecksum = \"ab12\"\n";

    fn names(bill: &Bill) -> Vec<&str> {
        bill.components.keys().map(|component| component.name.as_str()).collect()
    }

    #[test]
    fn bill_has_the_crates_that_the_program_reaches_and_no_others() {
        let agent = crates("agent", TREE, LOCK).expect("a tree");
        assert_eq!(names(&agent), ["agent", "itoa", "own", "serde"]);
        let operator = crates("operator", TREE, LOCK).expect("a tree");
        assert_eq!(
            names(&operator),
            ["itoa", "kube", "operator", "own", "serde"],
            "through a subtree printed before"
        );
        assert!(crates("other", TREE, LOCK).is_err() && crates("agent", "x", LOCK).is_err());
    }

    #[test]
    fn bill_is_json_with_licences_checksums_and_edges() {
        let text = crates("agent", TREE, LOCK).expect("a tree").json();
        for part in [
            "\"metadata\": {\"component\": {\"type\": \"application\", \"bom-ref\": \"pkg:cargo/agent@0.1.0\"",
            "\"licenses\": [{\"expression\": \"MIT OR Apache-2.0\"}], \"hashes\": [{\"alg\": \"SHA-256\", \"content\": \"ab12\"}]",
            "{\"ref\": \"pkg:cargo/own@0.1.0\", \"dependsOn\": [\"pkg:cargo/serde@1.0.1\"]}",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("MIT/Apache"), "expressions of SPDX have no slash: {text}");
    }

    #[test]
    fn modules_of_a_go_program_are_read_from_it() {
        let text = "/bin/etcd: go1.26\n\tpath\tgo.etcd.io/etcd/server/v3\n\tmod\tlocal\t(devel)\t\n\
            \tdep\tgo.etcd.io/etcd/server/v3\tv3.6.1\th1:x=\n\tdep\tgo.uber.org/zap\tv1.27.0\th1:y=\n\tbuild\t-trimpath=true\n";
        let bill = modules(text).expect("a list");
        assert_eq!(bill.program.url(), "pkg:golang/go.etcd.io/etcd/server/v3@v3.6.1");
        assert_eq!(names(&bill), ["go.etcd.io/etcd/server/v3", "go.uber.org/zap"]);
        assert!(modules("no program").is_err());
    }

    #[test]
    fn texts_are_escaped() {
        assert_eq!(quoted("a\"b\\c\n"), "\"a\\\"b\\\\c\\u000a\"");
    }
}
