//! Encryption keys of tenants: entries of the Secrets `<cluster>-keys`, which agents mount, copied from the Secret that
//! the CacheTenant names.
//!
//! An entry is removed when the named Secret, or its entry, does not exist: the agents then drop all copies of the
//! tenant's blocks. This includes clusters that the tenant no longer names. A purge removes the entries when no node has
//! blocks. An unreadable Secret, an invalid value and the deletion of a CacheTenant without a purge change nothing.
//!
//! The operator has no watch of the named Secrets, because it may read them by name only, nor of the copies. It reads
//! them every [`super::POLL_INTERVAL`].

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::Api;
use reprise_crds::CacheTenant;
use reprise_crds::status::{ConditionType, Finding, Reason};
use reprise_crds::tenant::{Isolation, NamespacedKeyRef};
use reprise_policy::TenantSalt;
use serde_json::json;

use super::NO_CLUSTER;
use super::budget::{BudgetOutcome, BudgetResult};
use super::dereference::{TenantCluster, TenantClusters};
use super::usage::UsageMeasurement;
use crate::framework::error::OperatorError;
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;
use crate::reconcile::secrets;

/// Maximum number of keys, the one that encrypts included; agents refuse longer lists.
const KEYS_MAX: usize = 16;

/// HTTP status code of requests that the operator has no permission for.
const FORBIDDEN: u16 = 403;

/// Result of copying the keys of a tenant to its clusters.
#[derive(Clone, Debug)]
pub struct KeySync {
    /// Whether the Secret that the tenant names has keys. An error if it cannot be read or has an invalid entry: the
    /// clusters keep their copies.
    pub present: Result<bool, Refusal>,
    /// Number of the tenant's clusters whose Secret has the same entry, or lacks it as well.
    pub copies: usize,
    /// Clusters whose copy differs from the Secret, with the cause.
    pub failures: Vec<Refusal>,
}

/// Copies the keys of an encrypted tenant to its clusters; `None` for other tenants. A cluster that fails does not affect
/// others.
pub async fn sync(
    tenant: &CacheTenant,
    refused: Option<&Refusal>,
    clusters: &TenantClusters,
    context: &Context,
) -> Option<KeySync> {
    let is_encrypted = tenant.spec.isolation == Isolation::Encrypted;
    let reference = tenant.spec.key_secret_ref.as_ref().filter(|_| is_encrypted)?;
    if refused.is_some() || tenant.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let text = match read(reference, context).await {
        Ok(text) => text,
        Err(refusal) => return Some(KeySync { present: Err(refusal), copies: 0, failures: Vec::new() }),
    };
    let mut sync = KeySync { present: Ok(text.is_some()), copies: 0, failures: Vec::new() };
    // Former clusters keep their copies until the keys are gone.
    for cluster in clusters.present.iter().filter(|one| one.is_member || text.is_none()) {
        match copy(cluster, &tenant.name_any(), text.as_deref(), context).await {
            Ok(()) => sync.copies += usize::from(cluster.is_member),
            Err(refusal) => sync.failures.push(refusal),
        }
    }
    Some(sync)
}

/// Removes the keys of a purged tenant from its clusters. The result of a cluster that still has them becomes
/// [`BudgetOutcome::BlocksRemain`].
pub async fn remove(
    tenant: &CacheTenant,
    clusters: &TenantClusters,
    results: &mut [BudgetResult],
    context: &Context,
) {
    if tenant.spec.isolation != Isolation::Encrypted {
        return;
    }
    for cluster in clusters.members() {
        if let Err(refusal) = copy(cluster, &tenant.name_any(), None, context).await {
            for result in results.iter_mut().filter(|result| result.cluster == cluster.names.key()) {
                result.outcome = BudgetOutcome::BlocksRemain(refusal.message.clone());
            }
        }
    }
}

/// Returns condition `KeyAvailable` of a tenant.
pub fn finding(tenant: &CacheTenant, sync: &KeySync, measurements: &[UsageMeasurement]) -> Finding {
    let kind = ConditionType::KeyAvailable;
    let reference = tenant.spec.key_secret_ref.as_ref().map(describe).unwrap_or_default();
    let failures: Vec<&str> = sync.failures.iter().map(|failure| failure.message.as_str()).collect();
    let failures = failures.join("; ");
    match (&sync.present, sync.failures.first()) {
        (Err(refusal), _) => {
            let message = format!("{}. Agents keep the keys that they have", refusal.message);
            Finding::no(kind, refusal.reason, message)
        }
        (Ok(true), Some(first)) => Finding::no(kind, first.reason, failures),
        (Ok(true), None) if sync.copies == 0 => Finding::no(kind, Reason::ReferenceNotFound, NO_CLUSTER),
        (Ok(true), None) => {
            let message = format!(
                "{reference} is copied to the Secrets of {} clusters; agents read it within two minutes, and encrypt the \
                 tenant's blocks with its first key",
                sync.copies
            );
            Finding::yes(kind, Reason::AsDesired, message)
        }
        (Ok(false), Some(first)) => {
            Finding::no(kind, first.reason, format!("{reference} does not exist, but {failures}"))
        }
        (Ok(false), None) if measurements.is_empty() => {
            let message = format!(
                "{reference} does not exist, and the tenant applies to no KVCacheCluster: it is unknown whether nodes have \
                 blocks of it"
            );
            Finding::unknown(kind, Reason::ReferenceNotFound, message)
        }
        (Ok(false), None) => match remaining(measurements) {
            Some(remaining) => {
                let message = format!(
                    "{reference} does not exist, so agents drop the tenant's blocks; {remaining}. They cannot be read again, \
                     except with a copy of the key"
                );
                Finding::no(kind, Reason::Releasing, message)
            }
            None => {
                let clusters: Vec<&str> = measurements.iter().map(|one| one.cluster.as_str()).collect();
                let message = format!(
                    "{reference} does not exist, and no node of {} has blocks of the tenant. Its sessions are refused: create \
                     the entry to use the tenant",
                    clusters.join(", ")
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
    cluster: &TenantCluster,
    tenant: &str,
    text: Option<&str>,
    context: &Context,
) -> Result<(), Refusal> {
    let (names, secret) = (&cluster.names, cluster.names.keys());
    let when_erasing = |reason| if text.is_none() { Reason::Releasing } else { reason };
    let (reason, words) = match write(cluster, tenant, text, context).await {
        Ok(true) => return Ok(()),
        Ok(false) => {
            let message = format!(
                "KVCacheCluster {} is paused, so its Secret {secret} keeps its keys of the tenant: set paused to false",
                names.key()
            );
            return Err(Refusal::new(when_erasing(Reason::Paused), message));
        }
        Err(error) if error.code() == Some(FORBIDDEN) => {
            return Err(secrets::refusal(names, &error.message()));
        }
        Err(OperatorError::Identity(words)) => (Reason::SecretInvalid, words),
        Err(error) => (when_erasing(Reason::Progressing), error.message()),
    };
    let message =
        format!("cannot write the tenant's keys to Secret {secret} of {}; retrying: {words}", names.key());
    Err(Refusal::new(reason, message))
}

/// Writes the entry of a cluster's Secret if it differs. `false`: it differs, and the cluster is paused.
async fn write(
    TenantCluster { cluster, names, .. }: &TenantCluster,
    tenant: &str,
    text: Option<&str>,
    context: &Context,
) -> Result<bool, OperatorError> {
    let name = names.keys();
    let wanted = text.map(|text| ByteString(text.as_bytes().to_vec()));
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &names.namespace);
    let stored = secrets.get_opt(&name).await.map_err(OperatorError::api(format!("get Secret {name}")))?;
    let is_foreign = stored.as_ref().is_some_and(|secret| secrets::is_foreign(names, secret));
    let present = stored.as_ref().and_then(|secret| secret.data.as_ref()?.get(tenant).cloned());
    if present == wanted && (wanted.is_none() || !is_foreign) {
        return Ok(true);
    }
    if is_foreign {
        return Err(OperatorError::Identity(format!(
            "Secret {name} is not the cluster's: delete it, so that the operator copies the keys of its tenants"
        )));
    }
    if cluster.spec.paused {
        return Ok(false);
    }
    secrets::write_entries(cluster, &name, stored.as_ref(), &json!({ tenant: wanted }), context).await?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use reprise_crds::status::ConditionStatus::{self, False, True, Unknown};
    use serde_json::Value;

    use super::*;
    use crate::framework::labels::CLUSTER_UID;
    use crate::framework::test_api_server::{CannedResponse, RequestLog, error_response, serve};
    use crate::reconcile::context::tests::context_with;
    use crate::reconcile::control_plane::{MeasuredUsage, TierBytes};
    use crate::reconcile::stores::Stores;

    fn tenant(clusters: &Value) -> CacheTenant {
        let reference = json!({ "namespace": "team-a", "name": "kv-key", "key": "key" });
        let spec = json!({ "isolation": "Encrypted", "keySecretRef": reference, "clusters": clusters });
        CacheTenant::new("t", serde_json::from_value(spec).expect("a spec"))
    }

    /// Status, reason and message of the condition.
    fn found(sync: &KeySync, measured: &[UsageMeasurement]) -> (ConditionStatus, Reason, String) {
        let Finding { status, reason, message, .. } = finding(&tenant(&json!([])), sync, measured);
        (status, reason, message)
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
        let used =
            |ssd: u64, away: u32| Ok(MeasuredUsage { used: TierBytes { dram: 0, ssd }, blocks: None, away });
        let unknown = || Err(Refusal::new(Reason::NotReported, "no"));
        for (present, copies, measured, status, reason, words) in [
            (false, 1, vec![used(0, 0), used(4096, 0)], False, Reason::Releasing, "4096 bytes"),
            (false, 1, vec![used(0, 2)], False, Reason::Releasing, "2 nodes of n/c do not"),
            (false, 1, vec![used(0, 0), unknown()], False, Reason::Releasing, "is unknown"),
            (false, 1, vec![used(0, 0)], False, Reason::Erased, "no node of n/c has"),
            (false, 0, vec![], Unknown, Reason::ReferenceNotFound, "entry key of Secret team-a"),
            (true, 2, vec![], True, Reason::AsDesired, "Secrets of 2 clusters"),
            (true, 0, vec![], False, Reason::ReferenceNotFound, "no KVCacheCluster"),
        ] {
            let of_cluster = |usage| UsageMeasurement { cluster: "n/c".to_owned(), usage };
            let measured: Vec<UsageMeasurement> = measured.into_iter().map(of_cluster).collect();
            let sync = KeySync { present: Ok(present), copies, failures: Vec::new() };
            let (is, why, message) = found(&sync, &measured);
            assert_eq!((is, why), (status, reason), "{message}");
            assert!(message.contains(words), "{message}");
        }
    }

    /// A context whose API server gives these answers.
    fn context_of(responses: Vec<CannedResponse>) -> (Arc<Context>, RequestLog) {
        let (client, log) = serve(responses);
        (context_with(client, Stores::new().0), log)
    }

    /// The clusters `a` and `b` of namespace `n`, with whether they are paused.
    fn clusters(tenant: &CacheTenant, paused: [bool; 2]) -> TenantClusters {
        let cluster = |(name, paused): (&str, bool)| {
            let cluster = json!({
                "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster",
                "metadata": { "name": name, "namespace": "n", "uid": name }, "spec": { "paused": paused },
            });
            Arc::new(serde_json::from_value(cluster).expect("a cluster"))
        };
        let all = ["a", "b"].into_iter().zip(paused).map(cluster).collect();
        TenantClusters::of(tenant, all)
    }

    /// A Secret of the cluster with this uid.
    fn secret_of(uid: &str, entry: &str) -> CannedResponse {
        let data = json!({ entry: ByteString(format!("{}\n", "1".repeat(64)).into_bytes()) });
        let metadata = json!({ "name": "s", "namespace": "n", "labels": { CLUSTER_UID: uid } });
        let secret = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data });
        CannedResponse::Json(200, secret)
    }

    fn not_found() -> CannedResponse {
        error_response(404, &json!([]))
    }

    #[tokio::test]
    async fn failing_cluster_does_not_keep_keys_from_others() {
        let tenant = tenant(&json!([]));
        let responses =
            vec![secret_of("", "key"), error_response(500, &json!([])), not_found(), secret_of("b", "t")];
        let (context, log) = context_of(responses);
        let sync =
            sync(&tenant, None, &clusters(&tenant, [false, false]), &context).await.expect("encrypted");
        assert_eq!((&sync.present, sync.copies), (&Ok(true), 1));
        assert_eq!(log.methods(), ["GET", "GET", "GET", "POST"]);
        let (status, reason, message) = found(&sync, &[]);
        assert_eq!((status, reason), (False, Reason::Progressing));
        assert!(message.contains("a-keys of n/a") && !message.contains("n/b"), "{message}");
    }

    #[tokio::test]
    async fn former_clusters_lose_the_keys_and_paused_ones_are_reported() {
        let tenant = tenant(&json!([{ "namespace": "n", "name": "other" }]));
        let responses = vec![not_found(), secret_of("a", "t"), secret_of("a", "t"), secret_of("b", "t")];
        let (context, log) = context_of(responses);
        let sync = sync(&tenant, None, &clusters(&tenant, [false, true]), &context).await.expect("encrypted");
        assert_eq!((&sync.present, sync.copies), (&Ok(false), 0));
        assert_eq!(log.methods(), ["GET", "GET", "PATCH", "GET"]);
        assert_eq!(log.requests()[2].body["data"], json!({ "t": null }));
        let (status, reason, message) = found(&sync, &[]);
        assert_eq!((status, reason), (False, Reason::Releasing));
        assert!(message.contains("KVCacheCluster n/b is paused"), "{message}");
    }

    #[tokio::test]
    async fn purge_removes_the_keys_and_waits_for_clusters_that_keep_them() {
        let tenant = tenant(&json!([]));
        let mut results = ["n/a", "n/b"].map(|cluster| BudgetResult {
            cluster: cluster.to_owned(),
            is_member: true,
            outcome: BudgetOutcome::Applied,
            overcommitted: TierBytes::default(),
        });
        let responses = vec![secret_of("a", "t"), secret_of("a", "t"), secret_of("b", "t")];
        let (context, log) = context_of(responses);
        remove(&tenant, &clusters(&tenant, [false, true]), &mut results, &context).await;
        assert_eq!(log.methods(), ["GET", "PATCH", "GET"]);
        assert_eq!(results[0].outcome, BudgetOutcome::Applied);
        let BudgetOutcome::BlocksRemain(why) = &results[1].outcome else { panic!("{results:?}") };
        assert!(why.contains("set paused to false"), "{why}");
    }
}
