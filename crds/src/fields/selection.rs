//! Selectors of nodes and namespaces, tolerations, references to other objects.

use std::collections::BTreeMap;

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::choice;
use super::texts::{KeyName, LabelKey, LabelValue, Name, ShortName};

/// Labels that an object must have, all of them.
pub type Labels = BTreeMap<String, LabelValue>;

/// Label selector. Empty selects all objects.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LabelSelector {
    /// Labels with their values; an object must have all of them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    #[x_kube(validation = Rule::new("self.all(key, size(key) <= 317)")
        .message("a key in matchLabels is longer than 317 characters: use a valid label key"))]
    pub match_labels: Labels,
    /// Requirements on labels; an object must meet all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub match_expressions: Vec<LabelTerm>,
}

/// One requirement on a label.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)")
    .message("operators In and NotIn need values, Exists and DoesNotExist must have no values: add or remove values"))]
pub struct LabelTerm {
    /// Key of the label.
    pub key: LabelKey,
    /// Operator of the comparison.
    pub operator: LabelTermOperator,
    /// Values to compare with, for `In` and `NotIn`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub values: Vec<LabelValue>,
}

choice! {
    /// Comparison operator for labels.
    LabelTermOperator {
        /// The label's value is one of `values`.
        In,
        /// The label is absent, or its value is not in `values`.
        NotIn,
        /// The label is present.
        Exists,
        /// The label is absent.
        DoesNotExist,
    }
    default In
}

/// A toleration of pods for a taint.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.operator == 'Exists' ? !has(self.value) : has(self.key)")
    .message("operator Exists takes no value, operator Equal needs a key: remove value or add key"))]
#[x_kube(validation = Rule::new("!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')")
    .message("tolerationSeconds is valid with effect NoExecute only: set the effect or remove tolerationSeconds"))]
pub struct Toleration {
    /// Key of the taint. Absent with operator `Exists`: every taint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<LabelKey>,
    /// Operator of the comparison.
    #[serde(default)]
    pub operator: TolerationOperator,
    /// Value of the taint, for `Equal`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<LabelValue>,
    /// Effect of the taint. Absent: all effects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect: Option<TolerationEffect>,
    /// Seconds for which a `NoExecute` taint is tolerated. Absent: without limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 604_800))]
    pub toleration_seconds: Option<i64>,
}

choice! {
    /// Comparison operator for taints.
    TolerationOperator {
        /// Key and value are equal.
        Equal,
        /// The key is present.
        Exists,
    }
    default Equal
}

choice! {
    /// Effect of a taint.
    TolerationEffect {
        /// New pods are not scheduled.
        NoSchedule,
        /// New pods are scheduled only if other nodes lack room.
        PreferNoSchedule,
        /// Running pods are evicted.
        NoExecute,
    }
    default NoSchedule
}

/// Reference to an object by its name; the field determines the kind.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectRef {
    /// Name of the object.
    pub name: ShortName,
}

/// Reference to a KVCacheCluster.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterRef {
    /// Namespace of the cluster.
    pub namespace: Name,
    /// Name of the object.
    pub name: ShortName,
}

/// Reference to a Secret in the same namespace.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SecretRef {
    /// Name of the object.
    pub name: Name,
}

/// Reference to an entry of a Secret in the same namespace.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KeyRef {
    /// Name of the Secret.
    pub name: Name,
    /// Key of the entry.
    pub key: KeyName,
}

/// Reference to an entry of a ConfigMap in the same namespace.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigMapRef {
    /// Name of the ConfigMap.
    pub name: Name,
    /// Key of the entry.
    pub key: KeyName,
}
