//! `CacheTenant`: whose blocks, how much of the cluster and of each node they may take.
//!
//! The object's name is the tenant's. `budget` is for a whole cluster and is kept by the control plane's ledgers; `perNode` goes
//! into the configuration of every agent. Namespaces and service accounts say which pods are this tenant, and agents check it by their tokens;
//! of a tenant that names none, sessions are believed (docs/ARCHITECTURE.md, invariant 7).

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::fields::{ClusterRef, KeyName, LabelSelector, Name, Quantity, choice};
use crate::status::Condition;

/// Whose blocks, and how much they may take.
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
    doc = "Somebody whose blocks are kept apart: isolation, budget in the cluster, quotas on each node. The object's name is the \
           tenant's; sessions that name none are `default`.",
    validation = Rule::new("self.metadata.name.matches('^[-a-z0-9]+$') && size(self.metadata.name) <= 63")
        .message("the object's name is the tenant's: use 1 to 63 of a-z, 0-9 and '-'"),
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
    .message("isolation Encrypted needs keySecretRef, and only it: set it or remove it"))]
#[x_kube(validation = Rule::new("!has(oldSelf.number) || has(self.number)")
    .message("number is on the devices and cannot be removed: write it again as it was"))]
pub struct CacheTenantSpec {
    /// Clusters that know the tenant. Empty: all. One that is named no more loses the budget and keeps the blocks, whatever `deletionPolicy` is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["namespace".into(), "name".into()]))]
    pub clusters: Vec<ClusterRef>,
    /// Namespaces whose pods are this tenant; `{}`: all. Absent: none. A namespace that two tenants select is the older one's, and refused to the
    /// younger one. With this or `serviceAccounts` nobody else is the tenant: agents ask the API server whose the token is that a session shows.
    /// Engines name the tenant and show the token; pods that a cluster injects into are given both.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace_selector: Option<LabelSelector>,
    /// Service accounts whose pods are this tenant, whatever tenant their namespace's are. One that two tenants name is the older one's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["namespace".into(), "name".into()]))]
    pub service_accounts: Vec<ServiceAccountRef>,
    /// How its blocks are kept from others. Cannot be changed.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("isolation cannot be changed, blocks are kept by it: make a new CacheTenant under another name"))]
    pub isolation: Isolation,
    /// Key of its blocks, with `Encrypted`; not in this release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_secret_ref: Option<NamespacedKeyRef>,
    /// What its blocks carry on devices. Absent: follows from the name. Set it when an agent says that two names have one number.
    /// Cannot be changed once it is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_535))]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("number is on the devices and cannot be changed: write it as it was"))]
    pub number: Option<u16>,
    /// What it may have in each of its clusters. A change takes effect within seconds; blocks beyond a lower limit are evicted. The control
    /// plane is told by the operator: `reprise tenant set` of the same tenant is set back.
    #[serde(default)]
    pub budget: Quotas,
    /// What it may have on each node, whoever else is there. A change restarts agents, as `agents.updateStrategy` says.
    #[serde(default)]
    pub per_node: Quotas,
    /// NVMe queue pairs that its GPUs may have together; not in this release. Absent: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub max_gpu_queue_pairs: Option<u32>,
    /// What becomes of its blocks when the object is deleted, in the clusters that `clusters` names then.
    #[serde(default)]
    pub deletion_policy: TenantDeletion,
}

choice! {
    /// How blocks are kept from other tenants.
    Isolation {
        /// Keys carry the tenant's salt: equal prompts of two tenants have different keys.
        Salted,
        /// As `Salted`, and bytes on devices are encrypted; not in this release.
        Encrypted,
        /// Blocks are shared with all tenants of this isolation; not in this release.
        Shared,
    }
    default Salted
}

choice! {
    /// What becomes of a tenant's blocks.
    TenantDeletion {
        /// They stay until their room is needed.
        Orphan,
        /// They are evicted from all these clusters before the object goes, but from those that are being deleted themselves.
        Purge,
    }
    default Orphan
}

/// Quotas of memory and of devices.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Quotas {
    /// Bytes of the arenas. On a node memory is reserved in whole regions.
    #[serde(default)]
    pub dram: Quota,
    /// Bytes on devices, with the header of 4 KiB of each block.
    #[serde(default)]
    pub ssd: Quota,
}

/// What a tenant is sure of, and may have at the most.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.limit) || quantity(self.reserved).compareTo(quantity(self.limit)) <= 0")
    .message("more is reserved than the limit allows: raise limit or lower reserved"))]
pub struct Quota {
    /// Bytes that nobody else takes. All tenants' together must fit what is there; `QuotaFeasible` says whether they do.
    #[serde(default = "nothing")]
    pub reserved: Quantity,
    /// Bytes at the most. Absent: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<Quantity>,
}

/// A service account.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceAccountRef {
    /// Its namespace.
    pub namespace: Name,
    /// Its name. With its namespace and a dot between them it has at most 253 characters; one that has more has no place (`PodsBound`).
    pub name: Name,
}

/// One entry of a Secret.
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

/// What the tenant has.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CacheTenantStatus {
    /// Generation of the spec that this status was found for.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// What it holds in its clusters together, as their nodes have said. As long as `UsageKnown` is true it holds so much still, within a 64th;
    /// otherwise it is what was found last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<TenantUsage>,
    /// What it can really have at the moment, where that is less than its budget. Not written in this release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effective_quota: Option<Usage>,
    /// What is so: `Ready`, `Accepted`, `QuotaFeasible`, `BudgetApplied`, `PodsBound`, `UsageKnown`, `OverQuota`, `DeletionBlocked`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// What a tenant holds of memory and of devices.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantUsage {
    /// Bytes of the arenas, rounded up to whole Mi.
    pub dram: Quantity,
    /// Bytes on devices with the headers of blocks, rounded up to whole Mi.
    pub ssd: Quantity,
    /// Blocks in the arenas, those that are being filled included. Absent while an agent of an older version holds some.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub dram_blocks: Option<i64>,
    /// Blocks on devices, those that are being written included; a block that is on two nodes counts twice. Absent as `dramBlocks`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub ssd_blocks: Option<i64>,
    /// When these figures were found. Others are written after a minute if they differ by more than a 64th, after 5 minutes if by less, and not
    /// at all if they are the same.
    pub observed_time: Time,
}

/// Bytes of memory and of devices.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// Bytes of the arenas.
    pub dram: Quantity,
    /// Bytes on devices.
    pub ssd: Quantity,
}

fn nothing() -> Quantity {
    Quantity::new("0")
}

impl Default for Quota {
    fn default() -> Quota {
        crate::fields::of_nothing()
    }
}
