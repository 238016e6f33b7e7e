//! The control plane's store: run by the operator, or somebody else's.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::default_of_nothing;
use crate::fields::{Endpoint, KeyPrefix, KeyRef, Name, Quantity, Resources, SecretRef, Text, choice};

/// Where the control plane keeps its few facts: node numbers, epochs, modes, budgets, the list of members.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.mode != 'External' || has(self.external)")
    .message("mode External needs endpoints: set external, or use mode Managed"))]
#[x_kube(validation = Rule::new("self.mode != 'Managed' || !has(self.external)")
    .message("mode Managed runs an etcd of its own: remove external, or use mode External in a new KVCacheCluster"))]
#[x_kube(validation = Rule::new("self.mode != 'External' || !has(self.managed)")
    .message("mode External runs no etcd: remove managed, or use mode Managed in a new KVCacheCluster"))]
pub struct Etcd {
    /// Who runs it. Cannot be changed.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("etcd.mode cannot be changed while the cluster runs: make a new KVCacheCluster"))]
    pub mode: EtcdMode,
    /// What every key begins with. Several clusters may share an etcd by other prefixes. Cannot be changed.
    #[serde(default = "key_prefix")]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("etcd.keyPrefix cannot be changed, the cluster's facts are under it: make a new KVCacheCluster"))]
    pub key_prefix: KeyPrefix,
    /// The etcd that the operator runs, with `Managed`. Absent: one member with the defaults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub managed: Option<ManagedEtcd>,
    /// The etcd that is there, with `External`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub external: Option<ExternalEtcd>,
}

choice! {
    /// Who runs etcd.
    EtcdMode {
        /// The operator.
        Managed,
        /// Somebody else.
        External,
    }
    default Managed
}

/// An etcd that the operator runs.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ManagedEtcd {
    /// Members. One is enough where an outage of the store may last as long as a pod's restart; engines keep their local hits. Three
    /// survive the loss of one, five of two. A change of a store that is there is not in this release.
    #[serde(default = "etcd_replicas")]
    #[x_kube(validation = Rule::new("self in [1, 3, 5]")
        .message("etcd.managed.replicas is 1, 3 or 5: an even number survives no more losses than one fewer"))]
    #[x_kube(validation = Rule::new("self >= oldSelf")
        .message("etcd.managed.replicas may only grow: taking members away by hand risks the store"))]
    pub replicas: u8,
    /// Where its data is.
    #[serde(default)]
    pub storage: EtcdStorage,
    /// CPU and memory of a member. Absent: 100m and 256Mi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
}

/// A volume for each member of etcd. Reprise keeps some hundred bytes a node in it.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.storageClassName) == has(oldSelf.storageClassName)")
    .message("etcd.managed.storage.storageClassName can neither be set nor removed afterwards: make a new KVCacheCluster"))]
pub struct EtcdStorage {
    /// Storage class. Absent: the cluster's default one; where there is none, the operator says so and uses nothing else. Cannot
    /// be changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("etcd.managed.storage.storageClassName cannot be changed, the volumes are made: make a new KVCacheCluster"))]
    pub storage_class_name: Option<Name>,
    /// Bytes of each volume. May only grow; growth of volumes that are there is not in this release.
    #[serde(default = "etcd_size")]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity('64Mi')) >= 0")
        .message("etcd.managed.storage.size is at least 64Mi: etcd's log alone takes that much"))]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity(oldSelf)) >= 0")
        .message("etcd.managed.storage.size may only grow, as volumes do: write the old size or a larger one"))]
    pub size: Quantity,
}

/// An etcd that somebody else runs, 3.5 or later.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.tls) ? self.endpoints.all(endpoint, endpoint.startsWith('https://')) : \
    self.endpoints.all(endpoint, endpoint.startsWith('http://'))")
    .message("endpoints begin with https:// when tls is given, and with http:// when it is not: change one or the other"))]
pub struct ExternalEtcd {
    /// `http://host:port` of its members; `https://` with `tls`. A change restarts the control plane's members one by one.
    #[schemars(length(min = 1, max = 9))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub endpoints: Vec<Endpoint>,
    /// How to trust it, and how to be trusted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<EtcdTls>,
    /// Who to be there. Absent: nobody.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<EtcdUser>,
}

/// TLS towards etcd. A Secret that changes restarts the members one by one.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EtcdTls {
    /// Certificates of the authorities that sign etcd's, in PEM.
    pub ca_secret_ref: KeyRef,
    /// Our certificate, where etcd asks for one: a Secret of type `kubernetes.io/tls`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_secret_ref: Option<SecretRef>,
    /// The name in etcd's certificate, where it is not the host of the endpoints.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_name: Option<Name>,
}

/// A user of etcd.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EtcdUser {
    /// Its name.
    #[schemars(length(min = 1))]
    pub name: Text,
    /// Where its password is.
    pub password_secret_ref: KeyRef,
}

fn key_prefix() -> KeyPrefix {
    KeyPrefix::new("/reprise/")
}

fn etcd_replicas() -> u8 {
    1
}

fn etcd_size() -> Quantity {
    Quantity::new("1Gi")
}

default_of_nothing!(Etcd, ManagedEtcd, EtcdStorage);
