//! Helm as people run it, with nothing of the user's own configuration, and what it renders as objects.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use reprise_e2e::tree;
use serde::Deserialize;
use serde_json::Value;
use tempfile::TempDir;

/// Where releases of these tests are.
pub(crate) const NAMESPACE: &str = "reprise-system";
/// What they are called.
pub(crate) const RELEASE: &str = "reprise";

/// What a run of Helm has said.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) worked: bool,
    pub(crate) output: String,
    pub(crate) errors: String,
}

/// One object of a render.
#[derive(Clone, Debug)]
pub(crate) struct Document {
    /// The template that it is of, below `templates/`.
    pub(crate) template: String,
    /// Its text, comments included.
    pub(crate) text: String,
    /// It.
    pub(crate) object: Value,
}

/// The binary, built when it is not there yet.
fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let mut build = Command::new(tree().join("e2e/helm/build.sh"));
        let output = build.stderr(Stdio::inherit()).output().expect("the script can be run");
        assert!(output.status.success(), "Helm cannot be built");
        PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim())
    })
}

/// The chart.
pub(crate) fn chart() -> PathBuf {
    tree().join("charts/reprise")
}

/// The files of values that people are shown.
pub(crate) fn examples() -> Vec<PathBuf> {
    ["lab", "external-etcd", "raw-devices"]
        .iter()
        .map(|name| chart().join("examples").join(format!("{name}.yaml")))
        .collect()
}

/// Runs Helm.
pub(crate) fn helm(arguments: &[&str]) -> Said {
    let home = TempDir::new().expect("a folder");
    let mut command = Command::new(binary());
    for name in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        command.env(name, home.path());
    }
    command.env("KUBECONFIG", home.path().join("none")).stdin(Stdio::null());
    let output = command.args(arguments).output().expect("Helm can be run");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("Helm writes text");
    Said { worked: output.status.success(), output: text(output.stdout), errors: text(output.stderr) }
}

/// Runs `helm template` with files of values and further arguments.
pub(crate) fn template(values: &[&Path], more: &[&str]) -> Said {
    let chart = chart();
    let mut arguments = vec!["template", RELEASE, path(&chart), "--namespace", NAMESPACE];
    for file in values {
        arguments.extend(["--values", path(file)]);
    }
    arguments.extend(more);
    helm(&arguments)
}

/// The objects that the chart renders to, hooks included, in Helm's order.
pub(crate) fn render(values: &[&Path], more: &[&str]) -> Vec<Document> {
    let said = template(values, more);
    assert!(said.worked, "{values:?} {more:?}: {}", said.errors);
    let documents = said.output.split("\n---\n").map(|text| text.trim_start_matches("---\n"));
    documents.filter_map(document).collect()
}

/// `None` of comments alone.
fn document(text: &str) -> Option<Document> {
    let object = Value::deserialize(serde_yaml_ng::Deserializer::from_str(text))
        .unwrap_or_else(|error| panic!("{error} in {text}"));
    if object.is_null() {
        return None;
    }
    let source = text.lines().find_map(|line| line.strip_prefix("# Source: reprise/templates/"));
    Some(Document {
        template: source.unwrap_or_else(|| panic!("no source: {text}")).to_owned(),
        text: text.to_owned(),
        object,
    })
}

/// All sets of values that the tests look at: the examples, none, and one with everything on.
pub(crate) fn sets() -> Vec<(&'static str, Vec<PathBuf>)> {
    let [lab, external, raw] = examples().try_into().expect("three");
    let everything = tree().join("e2e/tests/chart/everything.yaml");
    vec![
        ("default", Vec::new()),
        ("lab", vec![lab]),
        ("external-etcd", vec![external]),
        ("raw-devices", vec![raw]),
        ("everything", vec![everything]),
    ]
}

/// Renders a set of [`sets`].
pub(crate) fn render_set(files: &[PathBuf]) -> Vec<Document> {
    render_set_with(files, &[])
}

/// The same, with more arguments.
pub(crate) fn render_set_with(files: &[PathBuf], more: &[&str]) -> Vec<Document> {
    let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    render(&files, more)
}

/// As an argument.
pub(crate) fn path(path: &Path) -> &str {
    path.to_str().expect("paths of tests are UTF-8")
}
