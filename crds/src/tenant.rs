//! `CacheTenant`: isolation and quotas of one tenant's blocks.
//!
//! The object's name is the tenant's name. `budget` applies to a whole cluster and is enforced by the
//! control plane; `perNode` is part of the configuration of every agent. Namespaces and service accounts
//! define the pods of the tenant, and agents verify the pods by their tokens. If a tenant selects neither,
//! agents trust the tenant name of a session (docs/ARCHITECTURE.md, invariant 7).

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::fields::{ClusterRef, KeyName, LabelSelector, Name, Quantity, choice};
use crate::status::Condition;

/// Desired isolation and quotas of a tenant.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "reprise.dev",
    version = "v1alpha1",
    kind = "CacheTenant",
    plural = "cachetenants",
    shortname = "ctenant",
    category = "reprise",
    status = "CacheTenantStatus",
    derive = "PartialEq",
    doc = "A tenant, whose blocks are isolated from those of other tenants: budget in the cluster, quotas on each node. \
           The object's name is the tenant's name. Sessions that name no tenant use `default`.",
    validation = Rule::new("self.metadata.name.matches('^[-a-z0-9]+$') && size(self.metadata.name) <= 63")
        .message("invalid tenant name: use 1 to 63 of a-z, 0-9 and '-'"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Feasible", type_ = "string", json_path = ".status.conditions[?(@.type==\"QuotaFeasible\")].status"),
    printcolumn(name = "SSD Used", type_ = "string", json_path = ".status.usage.ssd"),
    printcolumn(name = "SSD Limit", type_ = "string", json_path = ".spec.budget.ssd.limit"),
    printcolumn(name = "DRAM Used", type_ = "string", json_path = ".status.usage.dram"),
    printcolumn(name = "DRAM Limit", type_ = "string", json_path = ".spec.budget.dram.limit"),
    printcolumn(name = "Isolation", type_ = "string", json_path = ".spec.isolation", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(validation = Rule::new("(self.isolation == 'Encrypted') == has(self.keySecretRef)")
    .message("keySecretRef must be set with isolation Encrypted and with no other isolation: set it or remove it"))]
#[x_kube(validation = Rule::new("!self.public || self.isolation != 'Encrypted'")
    .message("a public tenant must not have isolation Encrypted, because copies of other tenants would be plaintext: set public to false"))]
#[x_kube(validation = Rule::new("!has(oldSelf.number) || has(self.number)")
    .message("number must not be removed because blocks on devices carry it: set the old number"))]
pub struct CacheTenantSpec {
    /// Clusters that the tenant applies to. Empty: all. A cluster that is removed from the list drops the
    /// budget and keeps the blocks, regardless of `deletionPolicy`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["namespace".into(), "name".into()]))]
    pub clusters: Vec<ClusterRef>,
    /// Namespaces whose pods belong to the tenant; `{}` selects all. Absent: none. If two tenants select a
    /// namespace, the older tenant gets it. With this field or `serviceAccounts`, only these pods can use
    /// the tenant: a session names the tenant and presents a service account token, which the agent
    /// verifies with the API server. The cluster's injection gives pods both.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<LabelSelector>,
    /// Service accounts whose pods belong to the tenant. They take precedence over namespace selectors. If
    /// two tenants name a service account, the older tenant gets it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["namespace".into(), "name".into()]))]
    pub service_accounts: Vec<ServiceAccountRef>,
    /// Isolation of the tenant's blocks. Immutable.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("isolation is immutable because the keys of blocks depend on it: create a new CacheTenant with another name"))]
    pub isolation: Isolation,
    /// Whether sessions of all tenants may read the tenant's blocks, those from before included, for example shared system
    /// prompts. Not with isolation `Encrypted`. Only its own sessions save and delete blocks. At most one tenant of a cluster is public, the oldest one.
    /// Readers get copies within their own quotas. Their sessions must connect again after a tenant became public.
    #[serde(default)]
    pub public: bool,
    /// Encryption keys of the tenant's blocks, with `Encrypted`: 64 hexadecimal digits in each of up to 16 lines. The
    /// first key encrypts, the others decrypt older blocks. Without the entry, all blocks of the tenant are erased. The
    /// operator needs the value `rbac.keySecrets` of the chart to read it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_secret_ref: Option<NamespacedKeyRef>,
    /// Tenant number in the block headers on devices. Absent: derived from the name. Set it if an agent
    /// reports that two names have the same number. Immutable once set.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_535))]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("number is immutable because blocks on devices carry it: set the old number"))]
    pub number: Option<u16>,
    /// Quotas in each cluster. A change applies within seconds; blocks above a lowered limit are evicted.
    /// The operator reverts changes made with `reprise tenant set`.
    #[serde(default)]
    pub budget: Quotas,
    /// Quotas on each node. A change restarts agents according to `agents.updateStrategy`.
    #[serde(default)]
    pub per_node: Quotas,
    /// Share of bandwidth on each node. A change restarts agents according to `agents.updateStrategy`.
    #[serde(default)]
    pub bandwidth: Bandwidth,
    /// Upper bound on NVMe queue pairs of all of the tenant's GPUs. Absent: no limit. Not in this release.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub max_gpu_queue_pairs: Option<u32>,
    /// Handling of the tenant's blocks in its current clusters when the object is deleted.
    #[serde(default)]
    pub deletion_policy: TenantDeletion,
}

choice! {
    /// Isolation from other tenants.
    Isolation {
        /// Block keys contain the tenant's salt, so equal prompts of two tenants have different keys.
        Salted,
        /// As `Salted`, and data on devices is encrypted with the keys in `keySecretRef`.
        Encrypted,
        /// Tenants with this isolation share blocks. Not in this release.
        Shared,
    }
    default Salted
}

choice! {
    /// Handling of a tenant's blocks on deletion.
    TenantDeletion {
        /// The blocks stay until they are evicted.
        Orphan,
        /// The blocks are evicted from all these clusters, except clusters in deletion, before the object
        /// is removed. Copies of the encryption keys are removed from these clusters, too.
        Purge,
    }
    default Orphan
}

/// Quotas of memory and of devices.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Quotas {
    /// Quota of arena memory. On a node, memory is reserved in whole regions.
    #[serde(default)]
    pub dram: Quota,
    /// Quota of device space, including 4 KiB of header per block.
    #[serde(default)]
    pub ssd: Quota,
}

/// Reserved amount and upper limit.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.limit) || quantity(self.reserved).compareTo(quantity(self.limit)) <= 0")
    .message("reserved is larger than limit: raise limit or lower reserved"))]
pub struct Quota {
    /// Bytes reserved for the tenant. All reservations must fit the capacity; the condition `QuotaFeasible`
    /// reports it.
    #[serde(default = "nothing")]
    pub reserved: Quantity,
    /// Upper limit in bytes. Absent: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<Quantity>,
}

/// Share of the bandwidth of devices and of peers' requests.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bandwidth {
    /// Weight of the tenant while several compete: NVMe reads, NVMe writes and blocks for peers are divided in the
    /// ratio of the weights. A tenant alone gets everything.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 1000))]
    pub weight: u32,
}

impl Default for Bandwidth {
    fn default() -> Self {
        Bandwidth { weight: one() }
    }
}

fn one() -> u32 {
    1
}

/// Reference to a service account.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceAccountRef {
    /// Namespace of the service account.
    pub namespace: Name,
    /// Name of the service account. Namespace and name together have at most 252 characters; longer pairs
    /// are ignored and reported by `PodsBound`.
    pub name: Name,
}

/// Reference to one entry of a Secret.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespacedKeyRef {
    /// Namespace of the Secret.
    pub namespace: Name,
    /// Name of the Secret.
    pub name: Name,
    /// Key of the entry.
    pub key: KeyName,
}

/// Observed state of the tenant.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CacheTenantStatus {
    /// Generation of the spec that this status was computed for.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// Usage in all clusters of the tenant, as reported by nodes. While `UsageKnown` is true, it is
    /// accurate to 1/64; otherwise it is the last known usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<TenantUsage>,
    /// Conditions: `Ready`, `Accepted`, `QuotaFeasible`, `BudgetApplied`, `PodsBound`, `KeyAvailable`, `Public`,
    /// `UsageKnown`, `OverQuota`, `DeletionBlocked`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// Usage of memory and of devices.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantUsage {
    /// Bytes of arena memory, rounded up to whole Mi.
    pub dram: Quantity,
    /// Bytes on devices, including block headers, rounded up to whole Mi.
    pub ssd: Quantity,
    /// Blocks in arenas, including blocks that are being filled. Absent if an agent of an older version
    /// holds some.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub dram_blocks: Option<i64>,
    /// Blocks on devices, including blocks that are being written. A block on two nodes counts twice.
    /// Absent like `dramBlocks`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub ssd_blocks: Option<i64>,
    /// Time of these figures. Usage is measured once a minute; the figures are updated if it differs by more
    /// than 1/64.
    pub observed_time: Time,
}

/// Bytes of memory and of devices.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// Bytes of arena memory.
    pub dram: Quantity,
    /// Bytes used on devices.
    pub ssd: Quantity,
}

fn nothing() -> Quantity {
    Quantity::new("0")
}

impl Default for Quota {
    fn default() -> Quota {
        crate::fields::from_defaults()
    }
}
