//! Selections of nodes and namespaces, tolerations, references to other objects.

use std::collections::BTreeMap;

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::choice;
use super::texts::{KeyName, LabelKey, LabelValue, Name, ShortName};

/// Labels that an object must have, all of them.
pub type Labels = BTreeMap<String, LabelValue>;

/// Objects by their labels. Empty selects all.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LabelSelector {
    /// Labels and their values; an object needs all of them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    #[x_kube(validation = Rule::new("self.all(key, size(key) <= 317)")
        .message("a key in matchLabels is longer than 317 characters: use a label's key as Kubernetes allows it"))]
    pub match_labels: Labels,
    /// Conditions on labels; an object needs to meet all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub match_expressions: Vec<LabelTerm>,
}

/// One condition on a label.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)")
    .message("operators In and NotIn need values, Exists and DoesNotExist must have none: add or remove values"))]
pub struct LabelTerm {
    /// Key of the label.
    pub key: LabelKey,
    /// How the label is compared.
    pub operator: LabelTermOperator,
    /// Values to compare with, for `In` and `NotIn`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub values: Vec<LabelValue>,
}

choice! {
    /// How a label is compared.
    LabelTermOperator {
        /// Its value is one of `values`.
        In,
        /// It is absent, or its value is none of `values`.
        NotIn,
        /// It is there.
        Exists,
        /// It is absent.
        DoesNotExist,
    }
    default In
}

/// A taint that pods may run beside.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.operator == 'Exists' ? !has(self.value) : has(self.key)")
    .message("operator Exists takes no value, operator Equal needs a key: remove value or add key"))]
#[x_kube(validation = Rule::new("!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')")
    .message("tolerationSeconds has a meaning with effect NoExecute only: set the effect or remove tolerationSeconds"))]
pub struct Toleration {
    /// Key of the taint. Absent with operator `Exists`: every taint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<LabelKey>,
    /// How key and value are compared.
    #[serde(default)]
    pub operator: TolerationOperator,
    /// Value of the taint, for `Equal`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<LabelValue>,
    /// Effect of the taint. Absent: all effects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect: Option<TolerationEffect>,
    /// Seconds for which a `NoExecute` taint is tolerated. Absent: for ever.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 604_800))]
    pub toleration_seconds: Option<i64>,
}

choice! {
    /// How a taint is compared.
    TolerationOperator {
        /// Key and value are those given.
        Equal,
        /// The key is there.
        Exists,
    }
    default Equal
}

choice! {
    /// What a taint does.
    TolerationEffect {
        /// Keeps new pods away.
        NoSchedule,
        /// Keeps new pods away where there is room elsewhere.
        PreferNoSchedule,
        /// Removes pods.
        NoExecute,
    }
    default NoSchedule
}

/// An object of a known kind, by its name.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectRef {
    /// Its name.
    pub name: ShortName,
}

/// A KVCacheCluster.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterRef {
    /// Its namespace.
    pub namespace: Name,
    /// Its name.
    pub name: ShortName,
}

/// A Secret of the same namespace.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SecretRef {
    /// Its name.
    pub name: Name,
}

/// One entry of a Secret of the same namespace.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KeyRef {
    /// Name of the Secret.
    pub name: Name,
    /// Key of the entry.
    pub key: KeyName,
}

/// One entry of a ConfigMap of the same namespace.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigMapRef {
    /// Name of the ConfigMap.
    pub name: Name,
    /// Key of the entry.
    pub key: KeyName,
}
