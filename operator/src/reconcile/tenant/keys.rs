//! Encryption keys of tenants: entries of the Secrets `<cluster>-keys`, which agents mount, copied from the Secret that
//! the CacheTenant names.
//!
//! An entry is removed only when the named Secret, or its entry, does not exist: the agents then drop all copies of the
//! tenant's blocks. An unreadable Secret, an invalid value and a deleted CacheTenant change nothing.
//!
//! The operator has no watch of the named Secrets, because it may read them by name only. It reads them every
//! [`POLL_INTERVAL`].

use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams, PostParams};
use reprise_crds::status::{ConditionType, Finding, Reason};
use reprise_crds::tenant::{Isolation, NamespacedKeyRef};
use reprise_crds::{CacheTenant, KVCacheCluster, OPERATOR_FIELD_MANAGER};
use reprise_policy::TenantSalt;
use serde_json::json;

use super::usage::UsageMeasurement;
use crate::framework::error::OperatorError;
use crate::framework::labels::CLUSTER_UID;
use crate::framework::metrics::Write;
use crate::framework::refusal::Refusal;
use crate::reconcile::cluster::build::metadata::metadata;
use crate::reconcile::context::Context;
use crate::reconcile::deletion_guard;
use crate::reconcile::membership::applies_to;
use crate::reconcile::names::{ClusterNames, Component};

/// Interval between two readings of the Secret that a tenant names.
pub const POLL_INTERVAL: Duration = Duration::from_secs(20);

/// Maximum number of keys, the one that encrypts included; agents read no more.
const KEYS_MAX: usize = 16;

/// HTTP status code of requests that the operator has no permission for.
const FORBIDDEN: u16 = 403;

/// Keys of a tenant, as its Secret has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TenantKeys {
    /// Lines of the entry, which were copied to the clusters.
    Present,
    /// The Secret or the entry does not exist.
    Absent,
    /// The Secret cannot be read, or has an invalid entry: the clusters keep their copies.
    Unusable(Refusal),
}

/// Copies the keys of an encrypted tenant to its clusters; `None` for other tenants.
///
/// # Errors
/// The API server rejected a call for a copy.
pub async fn sync(
    tenant: &CacheTenant,
    refused: Option<&Refusal>,
    context: &Context,
) -> Result<Option<TenantKeys>, OperatorError> {
    let is_encrypted = tenant.spec.isolation == Isolation::Encrypted;
    let Some(reference) = tenant.spec.key_secret_ref.as_ref().filter(|_| is_encrypted) else {
        return Ok(None);
    };
    if refused.is_some() || tenant.metadata.deletion_timestamp.is_some() {
        return Ok(None);
    }
    let text = match read(reference, context).await {
        Ok(text) => text,
        Err(refusal) => return Ok(Some(TenantKeys::Unusable(refusal))),
    };
    for cluster in context.stores.clusters.state() {
        let names = ClusterNames::of(&cluster);
        let is_there = !deletion_guard::is_released(&*cluster) && !cluster.spec.paused;
        if is_there && applies_to(tenant, &names) {
            copy(&cluster, &names, (&tenant.name_any(), text.as_deref()), context).await?;
        }
    }
    Ok(Some(if text.is_some() { TenantKeys::Present } else { TenantKeys::Absent }))
}

/// Returns condition `KeyAvailable`.
pub fn finding(tenant: &CacheTenant, keys: &TenantKeys, measurements: &[UsageMeasurement]) -> Finding {
    let kind = ConditionType::KeyAvailable;
    let reference = tenant.spec.key_secret_ref.as_ref().map(describe).unwrap_or_default();
    match keys {
        TenantKeys::Present => {
            let message = format!("agents encrypt the tenant's blocks with the first key of {reference}");
            Finding::yes(kind, Reason::AsDesired, message)
        }
        TenantKeys::Unusable(refusal) => {
            let message = format!("{}. Agents keep the keys that they have", refusal.message);
            Finding::no(kind, refusal.reason, message)
        }
        TenantKeys::Absent => match remaining(measurements) {
            Some(remaining) => {
                let message = format!(
                    "{reference} does not exist, so agents drop the tenant's blocks; {remaining}. They cannot be read again, \
                     except with a copy of the key"
                );
                Finding::no(kind, Reason::Releasing, message)
            }
            None => {
                let message = format!(
                    "{reference} does not exist, and no node has blocks of the tenant. Its sessions are refused: create the \
                     entry to use the tenant"
                );
                Finding::no(kind, Reason::Erased, message)
            }
        },
    }
}

/// Describes where blocks of the tenant are left, or may be; `None` if no connected node has any.
fn remaining(measurements: &[UsageMeasurement]) -> Option<String> {
    measurements.iter().find_map(|one| {
        let cluster = &one.cluster;
        match &one.usage {
            Err(_) => Some(format!("the usage in {cluster} is unknown")),
            Ok(usage) if usage.used.dram + usage.used.ssd > 0 => {
                Some(format!("nodes of {cluster} still have {} bytes", usage.used.dram + usage.used.ssd))
            }
            Ok(usage) if usage.away > 0 => Some(format!("{} nodes of {cluster} do not report", usage.away)),
            Ok(_) => None,
        }
    })
}

fn describe(reference: &NamespacedKeyRef) -> String {
    let NamespacedKeyRef { namespace, name, key } = reference;
    format!("entry {key} of Secret {namespace}/{name}")
}

/// Reads the keys from the Secret that a tenant names; `None` if it or the entry does not exist.
async fn read(reference: &NamespacedKeyRef, context: &Context) -> Result<Option<String>, Refusal> {
    let NamespacedKeyRef { namespace, name, key } = reference;
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), namespace.as_str());
    let found = secrets.get_opt(name.as_str()).await.map_err(|error| match &error {
        kube::Error::Api(status) if status.code == FORBIDDEN => Refusal::new(
            Reason::Forbidden,
            format!(
                "the operator may not read Secret {namespace}/{name}: add {{namespace: {namespace}, name: {name}}} to the value \
                 rbac.keySecrets of the chart, and upgrade the release"
            ),
        ),
        _ => Refusal::new(
            Reason::SecretInvalid,
            format!("cannot read Secret {namespace}/{name}; retrying: {error}"),
        ),
    })?;
    let entry = found.and_then(|secret| secret.data?.remove(key.as_str()));
    entry.map(|bytes| parse(&bytes.0).ok_or(())).transpose().map_err(|()| {
        Refusal::new(
            Reason::SecretInvalid,
            format!(
                "{} is invalid: expected 64 hexadecimal digits in each of 1 to {KEYS_MAX} lines",
                describe(reference)
            ),
        )
    })
}

/// Returns the keys in the form of an agent's file.
fn parse(bytes: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(bytes).ok()?;
    let keys: Option<Vec<String>> =
        text.split_whitespace().map(|line| TenantSalt::from_hex(line).map(|key| key.to_hex())).collect();
    let keys = keys.filter(|keys| (1..=KEYS_MAX).contains(&keys.len()))?;
    Some(keys.into_iter().map(|key| format!("{key}\n")).collect())
}

/// Makes a cluster's Secret have this entry, or none.
async fn copy(
    cluster: &KVCacheCluster,
    names: &ClusterNames,
    (tenant, text): (&str, Option<&str>),
    context: &Context,
) -> Result<(), OperatorError> {
    let name = names.keys();
    let wanted = text.map(|text| ByteString(text.as_bytes().to_vec()));
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &names.namespace);
    // The watch may be behind: an entry that was removed in the meantime would stay.
    let stored = secrets.get_opt(&name).await.map_err(OperatorError::api(format!("get Secret {name}")))?;
    if stored.as_ref().is_some_and(|secret| secret.labels().get(CLUSTER_UID) != Some(&names.uid)) {
        return Err(OperatorError::Identity(format!(
            "Secret {name} is not the cluster's: delete it, so that the operator copies the keys of its tenants"
        )));
    }
    let present = stored.as_ref().and_then(|secret| secret.data.as_ref()?.get(tenant).cloned());
    if present == wanted {
        return Ok(());
    }
    let written = match stored {
        None => {
            let metadata = metadata(cluster, names, Component::Agent, &name);
            let secret = json!({
                "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": { tenant: wanted },
            });
            let secret: Secret =
                serde_json::from_value(secret).map_err(|error| OperatorError::Identity(error.to_string()))?;
            let params = PostParams {
                field_manager: Some(OPERATOR_FIELD_MANAGER.to_owned()),
                ..PostParams::default()
            };
            secrets.create(&params, &secret).await
        }
        Some(stored) => {
            let patch = json!({
                "metadata": { "resourceVersion": stored.resource_version() }, "data": { tenant: wanted },
            });
            let params = PatchParams {
                field_manager: Some(OPERATOR_FIELD_MANAGER.to_owned()),
                ..PatchParams::default()
            };
            secrets.patch(&name, &params, &Patch::Merge(&patch)).await
        }
    };
    written.map_err(OperatorError::api(format!("write Secret {name}")))?;
    context.metrics.record_write("Secret", Write::Apply);
    Ok(())
}

#[cfg(test)]
mod tests {
    use reprise_crds::status::ConditionStatus;

    use super::*;
    use crate::reconcile::control_plane::{MeasuredUsage, TierBytes, UsageUnknown};

    fn tenant() -> CacheTenant {
        let reference = json!({ "namespace": "team-a", "name": "kv-key", "key": "key" });
        let spec = json!({ "isolation": "Encrypted", "keySecretRef": reference });
        CacheTenant::new("t", serde_json::from_value(spec).expect("a spec"))
    }

    fn used(ssd: u64, away: u32) -> UsageMeasurement {
        let usage = MeasuredUsage { used: TierBytes { dram: 0, ssd }, blocks: None, away };
        UsageMeasurement { cluster: "n/c".to_owned(), usage: Ok(usage) }
    }

    #[test]
    fn keys_have_one_form_and_others_are_invalid() {
        let digits = "aB".repeat(32);
        assert_eq!(parse(digits.as_bytes()), Some(format!("{}\n", "ab".repeat(32))));
        let two = format!(" {digits}\r\n\n{}\n", "1".repeat(64));
        assert_eq!(parse(two.as_bytes()), Some(format!("{}\n{}\n", "ab".repeat(32), "1".repeat(64))));
        for invalid in ["", "\n", "abc", &format!("{digits} x"), &format!("{digits}\n").repeat(17), "é"] {
            assert_eq!(parse(invalid.as_bytes()), None, "{invalid}");
        }
    }

    #[test]
    fn absent_key_is_reported_as_erased_once_no_node_has_blocks() {
        let found = |measured: &[UsageMeasurement]| finding(&tenant(), &TenantKeys::Absent, measured);
        let unknown = UsageUnknown::NodesUnreported("no".to_owned());
        let unknown = UsageMeasurement { cluster: "n/c".to_owned(), usage: Err(unknown) };
        for (measured, words) in [
            (used(4096, 0), "4096 bytes"),
            (used(0, 2), "2 nodes of n/c do not report"),
            (unknown, "unknown"),
        ] {
            let found = found(&[used(0, 0), measured]);
            assert_eq!((found.status, found.reason), (ConditionStatus::False, Reason::Releasing));
            assert!(found.message.contains(words), "{}", found.message);
        }
        let erased = found(&[used(0, 0)]);
        assert_eq!((erased.status, erased.reason), (ConditionStatus::False, Reason::Erased));
        assert!(erased.message.contains("entry key of Secret team-a/kv-key"), "{}", erased.message);
        assert_eq!(finding(&tenant(), &TenantKeys::Present, &[]).status, ConditionStatus::True);
    }
}
