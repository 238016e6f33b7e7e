//! What pods of ours are made of: images, resources, logs.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::texts::{CpuAmount, ImageDigest, ImageRepository, ImageTag, LogFilter};
use super::{Quantity, choice, of_nothing};

/// An image. A digest names it for good; a tag may come to mean another one.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.tag) != has(self.digest)")
    .message("an image is named by its tag or by its digest: set exactly one of tag and digest"))]
pub struct Image {
    /// Registry and path.
    pub repository: ImageRepository,
    /// Tag. A change rolls the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<ImageTag>,
    /// Digest. A change rolls the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<ImageDigest>,
}

choice! {
    /// When nodes fetch an image.
    PullPolicy {
        /// When the node does not have it.
        IfNotPresent,
        /// At every start of a pod.
        Always,
        /// Never: the image was imported.
        Never,
    }
    default IfNotPresent
}

/// CPU and memory of a container.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.requests) || !has(self.requests.memory) || !has(self.limits) || \
    !has(self.limits.memory) || quantity(self.requests.memory).compareTo(quantity(self.limits.memory)) <= 0")
    .message("more memory is requested than the limit allows: raise limits.memory or lower requests.memory"))]
pub struct Resources {
    /// What a node must have free. Absent: what the operator reckons.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<Amounts>,
    /// What it may use. Absent: memory as requested, CPU without a limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<Amounts>,
}

/// Amounts of CPU and memory.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Amounts {
    /// Cores, or thousandths of a core with `m`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuAmount>,
    /// Bytes of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Quantity>,
}

/// The log on standard error. A change restarts the process.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LogSettings {
    /// For people or for machines.
    #[serde(default)]
    pub format: LogFormat,
    /// `error`, `warn`, `info`, `debug`, `trace`, or a filter as `info,reprise_transport=debug`.
    #[serde(default = "log_level")]
    pub level: LogFilter,
}

choice! {
    /// Format of the log.
    LogFormat {
        /// One JSON object an event.
        Json,
        /// One readable line an event.
        Text,
    }
    default Json
}

fn log_level() -> LogFilter {
    LogFilter::new("info")
}

impl Default for LogSettings {
    fn default() -> LogSettings {
        of_nothing()
    }
}
