//! `SlackProfile`: how much I/O fits next to the compute of one model on one GPU, measured offline.
//!
//! The operator reads the measurement, validates its tables, and computes a digest. It distributes them to the
//! agents of the clusters that select the profile, as files next to the agents' configuration
//! ([`content_file`]). Agents report the digest in their CacheNode. Profiles become outdated with drivers
//! and engines: `Drifted` compares them with measurements on nodes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::fields::{ConfigMapRef, Digest, LabelSelector, OciReference, Percent, Span, Text, choice};
use crate::status::Condition;

/// Measurement and its use.
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
    doc = "Measured slack of one model on one GPU: spans of compute during which I/O costs nothing. The operator \
           distributes it to the nodes with this GPU.",
    validation = Rule::new("size(self.metadata.name) <= 40")
        .message("the profile's name is longer than 40 characters, the most for derived names: choose a shorter name"),
    printcolumn(name = "Model", type_ = "string", json_path = ".spec.subject.model"),
    printcolumn(name = "GPU", type_ = "string", json_path = ".spec.subject.gpuProduct"),
    printcolumn(name = "Valid", type_ = "string", json_path = ".status.conditions[?(@.type==\"Valid\")].status"),
    printcolumn(name = "Active", type_ = "string", json_path = ".status.conditions[?(@.type==\"Active\")].status"),
    printcolumn(name = "Applied", type_ = "integer", json_path = ".status.nodes.applied"),
    printcolumn(name = "Target", type_ = "integer", json_path = ".status.nodes.target"),
    printcolumn(name = "Digest", type_ = "string", json_path = ".status.digest", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(validation = Rule::new("[has(self.measurement), has(self.configMapRef), has(self.ociRef)].exists_one(given, given)")
    .message("a profile needs exactly one of measurement, configMapRef and ociRef: set one of them and remove the others"))]
pub struct SlackProfileSpec {
    /// Model, GPU and engine of the measurement. Immutable.
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("subject is immutable: create a new SlackProfile"))]
    pub subject: Subject,
    /// Measurement, inline in the spec.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measurement: Option<Measurement>,
    /// Measurement, as a JSON object in a ConfigMap of this namespace. A change of the ConfigMap makes a new
    /// revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_map_ref: Option<ConfigMapRef>,
    /// Measurement, as an OCI artifact. Not in this release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oci_ref: Option<OciRef>,
    /// Usable share of each window in percent; the rest is a safety margin.
    #[serde(default = "usable")]
    #[schemars(range(min = 10, max = 100))]
    pub usable_percent: Percent,
    /// Behaviour of agents outside all windows. Distributed to agents; the data path does not use it in
    /// this release.
    #[serde(default)]
    pub fallback: SlackFallback,
    /// Upper bound on the 99th percentile of the prediction error, in percent. Above it, the condition
    /// `Drifted` is true.
    #[serde(default = "max_error")]
    #[schemars(range(min = 1, max = 100))]
    pub max_error_percent: Percent,
    /// Rollout of a new revision.
    #[serde(default)]
    pub rollout: Rollout,
}

/// Model, GPU and engine of the measurement.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Subject {
    /// Model name, as in the engine. Engines get the budget of the profile with their model.
    #[schemars(length(min = 1))]
    pub model: Text,
    /// GPU product name, as reported by the driver. Only nodes with this GPU get the profile.
    #[schemars(length(min = 1))]
    pub gpu_product: Text,
    /// Tensor-parallel size of the model. Distributed to agents; the data path does not use it in this
    /// release.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub tensor_parallel: u32,
    /// Engine and its version. Distributed to agents; the data path does not use it in this release.
    #[schemars(length(min = 1))]
    pub engine_version: Text,
}

/// Windows of layers, and times of I/O kernels.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Measurement {
    /// Tokens that one warp computes. Bounds of prefill windows are multiples of it.
    #[schemars(range(min = 1, max = 65_536))]
    pub step_tokens: u32,
    /// Bytes that each IOCB of the kernel tables transfers.
    #[schemars(range(min = 1, max = 2_147_483_648_u32))]
    pub iocb_bytes: u32,
    /// Windows by phase, input length and prefix length. They must not overlap.
    #[schemars(length(min = 1, max = 256))]
    pub windows: Vec<Window>,
    /// Read kernels, sorted by IOCB count.
    #[schemars(length(min = 1, max = 64))]
    pub reads: Vec<KernelTime>,
    /// Write kernels, sorted by IOCB count.
    #[schemars(length(min = 1, max = 64))]
    pub writes: Vec<KernelTime>,
}

/// Layer's computation at a range of lengths, and the window in it during which I/O costs nothing. The input
/// are the tokens that a batch computes, the prefix those before them whose KV exists.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.minInputTokens < self.maxInputTokens")
    .message("minInputTokens is not below maxInputTokens: set maxInputTokens above minInputTokens"))]
#[x_kube(validation = Rule::new("self.minPrefixTokens < self.maxPrefixTokens")
    .message("minPrefixTokens is not below maxPrefixTokens: set maxPrefixTokens above minPrefixTokens"))]
#[x_kube(validation = Rule::new("self.slackMicros <= self.layerMicros")
    .message("slackMicros is above layerMicros: a window is within its layer"))]
pub struct Window {
    /// Phase of the inference.
    pub phase: Phase,
    /// Lower bound on the input length in tokens, inclusive.
    #[schemars(range(min = 0, max = 16_777_216))]
    pub min_input_tokens: u32,
    /// Upper bound on the input length in tokens, exclusive.
    #[schemars(range(min = 1, max = 16_777_217))]
    pub max_input_tokens: u32,
    /// Lower bound on the prefix length in tokens, inclusive.
    #[schemars(range(min = 0, max = 16_777_216))]
    pub min_prefix_tokens: u32,
    /// Upper bound on the prefix length in tokens, exclusive.
    #[schemars(range(min = 1, max = 16_777_217))]
    pub max_prefix_tokens: u32,
    /// Computation of one layer without I/O, in microseconds.
    #[schemars(range(min = 1, max = 10_000_000))]
    pub layer_micros: u32,
    /// Slack of one layer in microseconds. 0: the layer has no window.
    #[schemars(range(min = 0, max = 10_000_000))]
    pub slack_micros: u32,
    /// Streaming multiprocessors that the computation leaves free during the window.
    #[schemars(range(min = 0, max = 256))]
    pub free_sms: u32,
}

/// Duration and multiprocessors of an I/O kernel with a number of IOCBs.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KernelTime {
    /// IOCBs of the launch.
    #[schemars(range(min = 1, max = 65_536))]
    pub iocbs: u32,
    /// Microseconds from the launch to the last completion.
    #[schemars(range(min = 1, max = 10_000_000))]
    pub micros: u32,
    /// Streaming multiprocessors that the kernel occupies.
    #[schemars(range(min = 0, max = 256))]
    pub sms: u32,
}

choice! {
    /// Phase of the inference.
    Phase {
        /// The GPU computes a prompt.
        Prefill,
        /// The GPU generates tokens one at a time.
        Decode,
    }
    default Prefill
}

/// Reference to an OCI artifact.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OciRef {
    /// Registry, path and digest.
    pub reference: OciReference,
}

choice! {
    /// Behaviour of agents outside all windows.
    SlackFallback {
        /// Writes wait and reads continue. Not in this release.
        ThrottleWrites,
        /// Background I/O pauses. Not in this release.
        PauseIo,
        /// The agent ignores the profile.
        Ignore,
    }
    default ThrottleWrites
}

/// Rollout of a new revision.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rollout {
    /// Upper bound on nodes that change their revision at the same time, in percent.
    #[serde(default = "max_unavailable")]
    #[schemars(range(min = 1, max = 100))]
    pub max_unavailable_percent: Percent,
    /// Nodes that get a new revision first. Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub canary: Option<Canary>,
}

/// Nodes that get a new revision first.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Canary {
    /// Selects the canary nodes.
    pub node_selector: LabelSelector,
    /// Time for which canary nodes must run the revision without drift before the rollout continues. At
    /// most 168h.
    #[serde(default = "soak")]
    #[x_kube(validation = Rule::new("duration(self) <= duration('168h')")
        .message("rollout.canary.soak is longer than 168h: set at most 168h"))]
    pub soak: Span,
}

/// Observed state of the profile.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SlackProfileStatus {
    /// Generation of the spec that this status was computed for.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// Digest of the current revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Number of the current revision.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub revision: i64,
    /// Counts of target nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<ProfileNodes>,
    /// Time since which all canary nodes have the revision without drift. Absent: not all have it, or the
    /// rollout has no canary.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub soaking_since: Option<Time>,
    /// Maximum of each measurement over all nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
    /// Conditions: `Accepted`, `Valid`, `Distributed`, `Active`, `Drifted`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// Counts of the profile's nodes.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProfileNodes {
    /// Number of nodes with the GPU.
    pub target: u32,
    /// Number of nodes that have validated the revision.
    pub applied: u32,
    /// Number of nodes that rejected the revision.
    pub failed: u32,
}

/// Prediction errors of the profile in percent.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Measured {
    /// Median of the prediction error.
    pub prediction_error_p50_percent: u32,
    /// 99th percentile of the prediction error.
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
        crate::fields::from_defaults()
    }
}

/// Returns the file name for a revision's content next to the agent's configuration. The name contains the
/// digest, so several revisions of a profile can exist side by side. `None` if `digest` is not a SHA-256
/// digest.
pub fn content_file(digest: &str) -> Option<String> {
    let hex = digest.strip_prefix("sha256:")?;
    let is_hex = hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    is_hex.then(|| format!("profile-{hex}.json"))
}

/// Returns the digest in the name of such a file, or `None` for other names.
pub fn digest_of_file(name: &str) -> Option<String> {
    let hex = name.strip_prefix("profile-")?.strip_suffix(".json")?;
    let digest = format!("sha256:{hex}");
    content_file(&digest).map(|_| digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_file_name_contains_the_digest() {
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
