//! The control plane's etcd: run by the operator, or external.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::default_from_schema;
use crate::fields::{Endpoint, KeyPrefix, KeyRef, Name, Quantity, Resources, SecretRef, Text, choice};

/// The etcd in which the control plane stores its state: node numbers, epochs, modes, budgets and members.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.mode != 'External' || has(self.external)")
    .message("mode External needs endpoints: set external, or use mode Managed"))]
#[x_kube(validation = Rule::new("self.mode != 'Managed' || !has(self.external)")
    .message("mode Managed excludes external: remove external, or use mode External in a new KVCacheCluster"))]
#[x_kube(validation = Rule::new("self.mode != 'External' || !has(self.managed)")
    .message("mode External excludes managed: remove managed, or use mode Managed in a new KVCacheCluster"))]
pub struct Etcd {
    /// Whether the operator runs etcd or an external etcd is used. Immutable.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("etcd.mode is immutable: create a new KVCacheCluster"))]
    pub mode: EtcdMode,
    /// Prefix of all keys. Several clusters may share an etcd with different prefixes. Immutable.
    #[serde(default = "key_prefix")]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("etcd.keyPrefix is immutable because the cluster's state is stored under it: create a new KVCacheCluster"))]
    pub key_prefix: KeyPrefix,
    /// The etcd that the operator runs, with `Managed`. Absent: one member with the defaults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub managed: Option<ManagedEtcd>,
    /// Existing etcd, with `External`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub external: Option<ExternalEtcd>,
}

choice! {
    /// Whether the operator runs etcd or an external etcd is used.
    EtcdMode {
        /// The operator runs etcd.
        Managed,
        /// An existing etcd is used.
        External,
    }
    default Managed
}

/// An etcd that the operator runs.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ManagedEtcd {
    /// Number of members: 1, 3 or 5. Three members tolerate the loss of one, five of two. One suffices if
    /// an outage may last as long as a pod restart; local hits continue. This release cannot resize an
    /// existing etcd.
    #[serde(default = "etcd_replicas")]
    #[x_kube(validation = Rule::new("self in [1, 3, 5]")
        .message("etcd.managed.replicas is not 1, 3 or 5: an even number tolerates as many failures as the odd number below it"))]
    #[x_kube(validation = Rule::new("self >= oldSelf")
        .message("etcd.managed.replicas must not decrease: removing members risks data loss"))]
    pub replicas: u8,
    /// Volumes of the members.
    #[serde(default)]
    pub storage: EtcdStorage,
    /// CPU and memory of a member. Absent: 100m and 256Mi.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
}

/// Volume of each etcd member. Reprise stores some hundred bytes per node.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.storageClassName) == has(oldSelf.storageClassName)")
    .message("etcd.managed.storage.storageClassName can neither be added nor removed: create a new KVCacheCluster"))]
pub struct EtcdStorage {
    /// Storage class of the volumes. Absent: the default storage class. If none exists, the operator sets
    /// the reason `NoStorageClass`. Immutable.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("etcd.managed.storage.storageClassName is immutable because the volumes exist: create a new KVCacheCluster"))]
    pub storage_class_name: Option<Name>,
    /// Size of each volume, at least 64Mi. Must not decrease. This release cannot grow existing volumes.
    #[serde(default = "etcd_size")]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity('64Mi')) >= 0")
        .message("etcd.managed.storage.size is less than 64Mi, which etcd's log alone takes: set at least 64Mi"))]
    #[x_kube(validation = Rule::new("quantity(self).compareTo(quantity(oldSelf)) >= 0")
        .message("etcd.managed.storage.size must not decrease, as volumes cannot shrink: set the old size or a larger one"))]
    pub size: Quantity,
}

/// An existing etcd, version 3.5 or later.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.tls) ? self.endpoints.all(endpoint, endpoint.startsWith('https://')) : \
    self.endpoints.all(endpoint, endpoint.startsWith('http://'))")
    .message("endpoints must begin with https:// if tls is set, and with http:// otherwise: change endpoints or tls"))]
pub struct ExternalEtcd {
    /// Endpoints of the members: `http://host:port`, or `https://host:port` with `tls`. A change restarts
    /// the control plane members one by one.
    #[schemars(length(min = 1, max = 9))]
    #[x_kube(merge_strategy = ListMerge::Set)]
    pub endpoints: Vec<Endpoint>,
    /// TLS settings. Absent: no TLS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<EtcdTls>,
    /// User to authenticate as. Absent: no authentication.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<EtcdUser>,
}

/// TLS settings for etcd connections. A change of a Secret restarts the control plane members one by one.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EtcdTls {
    /// CA certificates for etcd's certificate, in PEM.
    pub ca_secret_ref: KeyRef,
    /// Client certificate, if etcd requires one: a Secret of type `kubernetes.io/tls`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_secret_ref: Option<SecretRef>,
    /// Server name in etcd's certificate, if it differs from the endpoints' hosts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_name: Option<Name>,
}

/// Credentials of an etcd user.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EtcdUser {
    /// Name of the user.
    #[schemars(length(min = 1))]
    pub name: Text,
    /// Password of the user.
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

default_from_schema!(Etcd, ManagedEtcd, EtcdStorage);
