//! Settings of pods: images, resources, logs.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::texts::{CpuAmount, ImageDigest, ImageRepository, ImageTag, LogFilter};
use super::{Quantity, choice, from_defaults};

/// Container image. A digest is permanent; a tag can change its image.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.tag) != has(self.digest)")
    .message("an image needs exactly one of tag and digest: set one of them and remove the other"))]
pub struct Image {
    /// Registry and path of the image.
    pub repository: ImageRepository,
    /// Tag of the image. A change rolls the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<ImageTag>,
    /// Digest of the image. A change rolls the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<ImageDigest>,
}

choice! {
    /// Pull policy of an image.
    PullPolicy {
        /// Pull if the node does not have the image.
        IfNotPresent,
        /// Pull at every start of a pod.
        Always,
        /// Do not pull; the image was imported on the nodes.
        Never,
    }
    default IfNotPresent
}

/// CPU and memory of a container.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.requests) || !has(self.requests.memory) || !has(self.limits) || \
    !has(self.limits.memory) || quantity(self.requests.memory).compareTo(quantity(self.limits.memory)) <= 0")
    .message("requests.memory is larger than limits.memory: raise limits.memory or lower requests.memory"))]
pub struct Resources {
    /// Resources that a node must have free. Absent: the operator's estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<Amounts>,
    /// Upper bounds on resources. Absent: memory as requested, no CPU limit.
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
    /// Amount of memory in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Quantity>,
}

/// Log on standard error. A change restarts the process.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LogSettings {
    /// Format of the log.
    #[serde(default)]
    pub format: LogFormat,
    /// Log level: `error`, `warn`, `info`, `debug`, `trace`, or a filter such as
    /// `info,reprise_transport=debug`.
    #[serde(default = "log_level")]
    pub level: LogFilter,
}

choice! {
    /// Format of the log.
    LogFormat {
        /// One JSON object per event.
        Json,
        /// One text line per event.
        Text,
    }
    default Json
}

fn log_level() -> LogFilter {
    LogFilter::new("info")
}

impl Default for LogSettings {
    fn default() -> LogSettings {
        from_defaults()
    }
}
