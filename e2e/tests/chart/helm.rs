//! Runs Helm without the user's configuration, and parses the objects that it renders.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use reprise_e2e::tree;
use serde::Deserialize;
use serde_json::Value;
use tempfile::TempDir;

/// Namespace of the releases in these tests.
pub(crate) const NAMESPACE: &str = "reprise-system";
/// Name of the releases in these tests.
pub(crate) const RELEASE: &str = "reprise";

/// Result of a run of Helm.
#[derive(Debug)]
pub(crate) struct HelmOutput {
    pub(crate) success: bool,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

#[derive(Clone, Debug)]
pub(crate) struct Document {
    /// Path of its template below `templates/`.
    pub(crate) template: String,
    /// Its rendered text, comments included.
    pub(crate) text: String,
    /// The parsed object.
    pub(crate) object: Value,
}

/// Returns the path of the binary, which is built if it does not exist.
fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let mut build = Command::new(tree().join("e2e/helm/build.sh"));
        let output = build.stderr(Stdio::inherit()).output().expect("the script can be run");
        assert!(output.status.success(), "cannot build Helm");
        PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim())
    })
}

/// Returns the folder of the chart.
pub(crate) fn chart() -> PathBuf {
    tree().join("charts/reprise")
}

/// Returns the documented example files of values.
pub(crate) fn examples() -> Vec<PathBuf> {
    ["lab", "external-etcd", "raw-devices"]
        .iter()
        .map(|name| chart().join("examples").join(format!("{name}.yaml")))
        .collect()
}

/// Runs Helm and returns its output.
pub(crate) fn helm(arguments: &[&str]) -> HelmOutput {
    let home = TempDir::new().expect("a folder");
    let mut command = Command::new(binary());
    for name in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        command.env(name, home.path());
    }
    command.env("KUBECONFIG", home.path().join("none")).stdin(Stdio::null());
    let output = command.args(arguments).output().expect("Helm can be run");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("Helm writes text");
    HelmOutput { success: output.status.success(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Runs `helm template` with files of values and further arguments.
pub(crate) fn template(values: &[&Path], more: &[&str]) -> HelmOutput {
    let chart = chart();
    let mut arguments = vec!["template", RELEASE, path(&chart), "--namespace", NAMESPACE];
    for file in values {
        arguments.extend(["--values", path(file)]);
    }
    arguments.extend(more);
    helm(&arguments)
}

/// Returns the objects that the chart renders, hooks included, in Helm's order.
pub(crate) fn render(values: &[&Path], more: &[&str]) -> Vec<Document> {
    let rendered = template(values, more);
    assert!(rendered.success, "{values:?} {more:?}: {}", rendered.stderr);
    let documents = rendered.stdout.split("\n---\n").map(|text| text.trim_start_matches("---\n"));
    documents.filter_map(document).collect()
}

/// Parses one document; `None` if it contains only comments.
fn document(text: &str) -> Option<Document> {
    let object = Value::deserialize(serde_yaml_ng::Deserializer::from_str(text))
        .unwrap_or_else(|error| panic!("{error} in {text}"));
    if object.is_null() {
        return None;
    }
    let source = text.lines().find_map(|line| line.strip_prefix("# Source: reprise/templates/"));
    Some(Document {
        template: source.unwrap_or_else(|| panic!("no source line in: {text}")).to_owned(),
        text: text.to_owned(),
        object,
    })
}

/// Returns all sets of values that the tests use: the examples, no values, and one with every feature
/// enabled.
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

/// Renders a set of [`sets`] with further arguments.
pub(crate) fn render_set_with(files: &[PathBuf], more: &[&str]) -> Vec<Document> {
    let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    render(&files, more)
}

/// Returns a path as a command-line argument.
pub(crate) fn path(path: &Path) -> &str {
    path.to_str().expect("paths of tests are UTF-8")
}
