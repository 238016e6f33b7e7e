//! `SlackProfile`: how much I/O one model leaves room for on one GPU, measured offline.
//!
//! The operator reads the windows, checks them (order, overlap), computes a digest over them and hands them to the agents of the
//! clusters that select the profile, as files beside their configuration ([`content_file`]); agents say which digest they work by in their
//! CacheNode. Profiles age with drivers and engines: `Drifted` compares them with what nodes measure.
//!
//! In this release contents reach the agents and end there: nothing on the data path uses them, and no agent measures. Fields say so in the
//! words that all kinds have for it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::fields::{ConfigMapRef, Digest, LabelSelector, OciReference, Percent, Span, Text, choice};
use crate::status::Condition;

/// What was measured, and how it is put to use.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "reprise.dev",
    version = "v1alpha1",
    kind = "SlackProfile",
    plural = "slackprofiles",
    shortname = "slack",
    category = "reprise",
    namespaced,
    status = "SlackProfileStatus",
    derive = "PartialEq",
    doc = "Measured slack of one model on one GPU: spans of its compute during which I/O costs nothing. Distributed to the nodes \
           that have this GPU, whose agents keep it ready; nothing on the data path uses it in this release.",
    validation = Rule::new("size(self.metadata.name) <= 40")
        .message("the profile's name is longer than 40 characters, too long for the names made of it: choose a shorter one"),
    printcolumn(name = "Model", type_ = "string", json_path = ".spec.subject.model"),
    printcolumn(name = "GPU", type_ = "string", json_path = ".spec.subject.gpuProduct"),
    printcolumn(name = "Valid", type_ = "string", json_path = ".status.conditions[?(@.type==\"Valid\")].status"),
    printcolumn(name = "Active", type_ = "string", json_path = ".status.conditions[?(@.type==\"Active\")].status"),
    printcolumn(name = "Applied", type_ = "integer", json_path = ".status.nodes.applied"),
    printcolumn(name = "Target", type_ = "integer", json_path = ".status.nodes.target"),
    printcolumn(name = "Digest", type_ = "string", json_path = ".status.digest", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(validation = Rule::new("[has(self.windows), has(self.configMapRef), has(self.ociRef)].exists_one(given, given)")
    .message("a profile is in exactly one of windows, configMapRef and ociRef: set one of them and remove the others"))]
pub struct SlackProfileSpec {
    /// What was measured. Cannot be changed: another subject is another profile.
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("the subject of a profile cannot be changed: make a new SlackProfile"))]
    pub subject: Subject,
    /// The windows, inline.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub windows: Option<Vec<Window>>,
    /// The windows, as a JSON list in a ConfigMap of this namespace. A change of it is a new revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_map_ref: Option<ConfigMapRef>,
    /// The windows, as an OCI artifact; not in this release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oci_ref: Option<OciRef>,
    /// Share of each window that is used; the rest is left for what was not measured. Brought to the agents; nothing on the data path uses
    /// it in this release.
    #[serde(default = "usable")]
    #[schemars(range(min = 10, max = 100))]
    pub usable_percent: Percent,
    /// What an agent does outside all windows. Brought to the agents; nothing on the data path uses it in this release.
    #[serde(default)]
    pub fallback: SlackFallback,
    /// Measured error of the profile's predictions, at the 99th of 100, beyond which it counts as drifted. Compared with what nodes measure; no
    /// agent of this release measures it.
    #[serde(default = "max_error")]
    #[schemars(range(min = 1, max = 100))]
    pub max_error_percent: Percent,
    /// How a new revision reaches the nodes.
    #[serde(default)]
    pub rollout: Rollout,
}

/// What was measured.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Subject {
    /// Model, as the engine names it. Brought to the agents; nothing on the data path uses it in this release.
    #[schemars(length(min = 1))]
    pub model: Text,
    /// GPU, as its driver names it. Nodes with other GPUs do not get the profile.
    #[schemars(length(min = 1))]
    pub gpu_product: Text,
    /// GPUs that the model was spread over. Brought to the agents; nothing on the data path uses it in this release.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub tensor_parallel: u32,
    /// Engine and its version. Brought to the agents; nothing on the data path uses it in this release.
    #[schemars(length(min = 1))]
    pub engine_version: Text,
}

/// A span of compute during which I/O costs nothing.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.minTokens < self.maxTokens")
    .message("a window is for a range of tokens: set maxTokens above minTokens"))]
pub struct Window {
    /// What the GPU does.
    pub phase: Phase,
    /// Tokens of the batch, at the least.
    #[schemars(range(min = 0, max = 16_777_216))]
    pub min_tokens: u32,
    /// Tokens of the batch; the window ends before so many.
    #[schemars(range(min = 1, max = 16_777_217))]
    pub max_tokens: u32,
    /// Microseconds of a layer that I/O may take. Brought to the agents; nothing on the data path uses it in this release.
    #[schemars(range(min = 1, max = 10_000_000))]
    pub slack_micros: u32,
    /// Multiprocessors that I/O may use at once. Brought to the agents; nothing on the data path uses it in this release.
    #[schemars(range(min = 0, max = 256))]
    pub max_io_sms: u32,
}

choice! {
    /// What a GPU does.
    Phase {
        /// Computes a prompt.
        Prefill,
        /// Computes one token after the other.
        Decode,
    }
    default Prefill
}

/// An OCI artifact.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OciRef {
    /// Registry, path and digest.
    pub reference: OciReference,
}

choice! {
    /// What an agent does outside all windows.
    SlackFallback {
        /// Writes wait, reads go on; not in this release.
        ThrottleWrites,
        /// All I/O that nobody waits for stops; not in this release.
        PauseIo,
        /// As if there were no profile.
        Ignore,
    }
    default ThrottleWrites
}

/// How a new revision reaches the nodes.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rollout {
    /// Nodes that may be between two revisions at once.
    #[serde(default = "max_unavailable")]
    #[schemars(range(min = 1, max = 100))]
    pub max_unavailable_percent: Percent,
    /// Nodes that get a revision first. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub canary: Option<Canary>,
}

/// Nodes that get a revision first.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Canary {
    /// Which nodes.
    pub node_selector: LabelSelector,
    /// Time for which they must have it, without drift, before the others follow.
    #[serde(default = "soak")]
    #[x_kube(validation = Rule::new("duration(self) <= duration('168h')")
        .message("rollout.canary.soak is at most 168h: choose a shorter time"))]
    pub soak: Span,
}

/// How far the profile is.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SlackProfileStatus {
    /// Generation of the spec that this status was found for.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// Digest of the revision that nodes should have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Counts revisions.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub revision: i64,
    /// Nodes that have the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<ProfileNodes>,
    /// Since when all canary nodes have the revision ready, none of them with drift. Absent: they do not, or none are wanted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub soaking_since: Option<Time>,
    /// What nodes measure, of each number the largest that one has. No agent of this release measures it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
    /// What is so: `Accepted`, `Valid`, `Distributed`, `Active`, `Drifted`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// Nodes, counted.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProfileNodes {
    /// Nodes that have the GPU, and should have the revision in the end.
    pub target: u32,
    /// Nodes that have said that they have it ready.
    pub applied: u32,
    /// Nodes that have refused it.
    pub failed: u32,
}

/// Errors of the profile's predictions, hundredths of what was predicted.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Measured {
    /// Half of all are below it.
    pub prediction_error_p50_percent: u32,
    /// 99 of 100 are below it.
    pub prediction_error_p99_percent: u32,
}

fn usable() -> Percent {
    Percent(80)
}

fn max_error() -> Percent {
    Percent(30)
}

fn one() -> u32 {
    1
}

fn max_unavailable() -> Percent {
    Percent(10)
}

fn soak() -> Span {
    Span::new("10m")
}

impl Default for Rollout {
    fn default() -> Rollout {
        crate::fields::of_nothing()
    }
}

/// Name of the file in which a revision's content lies beside the agents' configuration: by its digest, so that several revisions of one
/// profile lie side by side. `None` of what is no digest.
pub fn content_file(digest: &str) -> Option<String> {
    let hex = digest.strip_prefix("sha256:")?;
    let is_hex = hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    is_hex.then(|| format!("profile-{hex}.json"))
}

/// The digest by which such a file is called.
pub fn digest_of_file(name: &str) -> Option<String> {
    let hex = name.strip_prefix("profile-")?.strip_suffix(".json")?;
    let digest = format!("sha256:{hex}");
    content_file(&digest).map(|_| digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_called_by_the_digest_of_its_content_and_by_nothing_else() {
        let digest = format!("sha256:{}", "0f".repeat(32));
        let file = content_file(&digest).expect("a digest");
        assert_eq!(file, format!("profile-{}.json", "0f".repeat(32)));
        assert_eq!(digest_of_file(&file), Some(digest));
        for wrong in ["", "sha256:", "sha256:0f", "../../etc/passwd", &format!("sha256:{}", "0F".repeat(32))]
        {
            assert_eq!(content_file(wrong), None, "{wrong}");
        }
        for wrong in ["agent.toml", "profile-.json", "profile-0f.json"] {
            assert_eq!(digest_of_file(wrong), None, "{wrong}");
        }
    }
}
