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
use super::budget::BudgetResult;
use super::dereference::{TenantCluster, TenantClusters};
use super::usage::UsageMeasurement;
use crate::framework::error::{FORBIDDEN, OperatorError};
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;
use crate::reconcile::control_plane::TierBytes;
use crate::reconcile::secrets;

/// Maximum number of keys, the one that encrypts included; agents refuse longer lists.
const KEYS_MAX: usize = 16;

/// Copies the keys of an encrypted tenant to its clusters, and returns condition `KeyAvailable`; `None` for other
/// tenants. A cluster that fails does not affect others. If the Secret that the tenant names cannot be read or has an
/// invalid entry, the clusters keep their copies.
pub async fn sync(
    tenant: &CacheTenant,
    refused: Option<&Refusal>,
    clusters: &TenantClusters,
    measurements: &[UsageMeasurement],
    context: &Context,
) -> Option<Finding> {
    let kind = ConditionType::KeyAvailable;
    let is_encrypted = tenant.spec.isolation == Isolation::Encrypted;
    let reference = tenant.spec.key_secret_ref.as_ref().filter(|_| is_encrypted)?;
    if refused.is_some() || tenant.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let text = match read(reference, context).await {
        Ok(text) => text,
        Err(Refusal { reason, message }) => {
            return Some(Finding::no(
                kind,
                reason,
                format!("{message}. Agents keep the keys that they have"),
            ));
        }
    };
    let (mut copies, mut failures, mut is_removed) = (0, Vec::new(), false);
    // Former clusters keep their copies until the keys are gone.
    for cluster in clusters.present.iter().filter(|one| one.is_member || text.is_none()) {
        match copy(cluster, &tenant.name_any(), text.as_deref(), context).await {
            Ok(is_changed) => {
                copies += usize::from(cluster.is_member);
                is_removed |= is_changed && text.is_none();
            }
            Err(refusal) => failures.push(refusal),
        }
    }
    let source = describe(reference);
    if let Some(first) = failures.first() {
        let messages: Vec<&str> = failures.iter().map(|failure| failure.message.as_str()).collect();
        let absent = if text.is_none() { format!("{source} does not exist, but ") } else { String::new() };
        return Some(Finding::no(kind, first.reason, format!("{absent}{}", messages.join("; "))));
    }
    if is_removed {
        let message = format!(
            "{source} does not exist, so its copies were removed; agents notice it within two minutes"
        );
        return Some(Finding::no(kind, Reason::Releasing, message));
    }
    if text.is_none() {
        return Some(erased(&source, measurements));
    }
    if copies == 0 {
        return Some(Finding::no(kind, Reason::ReferenceNotFound, NO_CLUSTER));
    }
    let message = format!(
        "{source} is copied to the Secrets of {copies} clusters; agents read it within two minutes, and encrypt the tenant's \
         blocks with its first key"
    );
    Some(Finding::yes(kind, Reason::AsDesired, message))
}

/// Removes the keys of a purged tenant from its clusters. The result of a cluster that still has them becomes a failure.
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
                result.outcome = Err(Refusal::new(Reason::Releasing, &refusal.message));
            }
        }
    }
}

/// Returns condition `KeyAvailable` of a tenant whose keys are gone: whether nodes may still have blocks of it.
fn erased(source: &str, measurements: &[UsageMeasurement]) -> Finding {
    let kind = ConditionType::KeyAvailable;
    if measurements.is_empty() {
        let message = format!(
            "{source} does not exist, and the tenant applies to no KVCacheCluster: it is unknown whether nodes have blocks of it"
        );
        return Finding::unknown(kind, Reason::ReferenceNotFound, message);
    }
    let remaining = measurements.iter().find_map(|UsageMeasurement { cluster, usage }| match usage {
        Err(_) => Some(format!("the usage in {cluster} is unknown")),
        Ok(usage) if usage.used != TierBytes::default() => {
            Some(format!("nodes of {cluster} still have {} bytes", usage.used.dram + usage.used.ssd))
        }
        Ok(usage) if usage.away > 0 => Some(format!("{} nodes of {cluster} do not report", usage.away)),
        Ok(_) => None,
    });
    if let Some(remaining) = remaining {
        let message = format!(
            "{source} does not exist, so agents drop the tenant's blocks; {remaining}. They cannot be read again, except with a \
             copy of the key"
        );
        return Finding::no(kind, Reason::Releasing, message);
    }
    let clusters: Vec<&str> = measurements.iter().map(|one| one.cluster.as_str()).collect();
    let message = format!(
        "{source} does not exist, and no node of {} has blocks of the tenant. Its sessions are refused: create the entry to \
         use the tenant",
        clusters.join(", ")
    );
    Finding::no(kind, Reason::Erased, message)
}

fn describe(reference: &NamespacedKeyRef) -> String {
    let NamespacedKeyRef { namespace, name, key } = reference;
    format!("entry {key} of Secret {namespace}/{name}")
}

/// Reads the keys from the Secret that a tenant names; `None` if it or the entry does not exist.
async fn read(reference: &NamespacedKeyRef, context: &Context) -> Result<Option<String>, Refusal> {
    let NamespacedKeyRef { namespace, name, key } = reference;
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), namespace.as_str());
    let found = match secrets.get_opt(name.as_str()).await {
        Ok(found) => found,
        Err(kube::Error::Api(status)) if status.code == FORBIDDEN => {
            let message = format!(
                "the operator may not read Secret {namespace}/{name}: add {{namespace: {namespace}, name: {name}}} to the value \
                 rbac.keySecrets of the chart, and upgrade the release"
            );
            return Err(Refusal::new(Reason::Forbidden, message));
        }
        Err(error) => {
            let message = format!("cannot read Secret {namespace}/{name}; retrying: {error}");
            return Err(Refusal::new(Reason::SecretInvalid, message));
        }
    };
    let Some(bytes) = found.and_then(|secret| secret.data?.remove(key.as_str())) else { return Ok(None) };
    let invalid = || {
        let expected = format!("expected 64 hexadecimal digits in each of 1 to {KEYS_MAX} lines");
        Refusal::new(Reason::SecretInvalid, format!("{} is invalid: {expected}", describe(reference)))
    };
    parse(&bytes.0).ok_or_else(invalid).map(Some)
}

/// Returns the keys in the form of an agent's file.
fn parse(bytes: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(bytes).ok()?;
    let keys: Option<Vec<String>> =
        text.split_whitespace().map(|line| TenantSalt::from_hex(line).map(|key| key.to_hex())).collect();
    let keys = keys.filter(|keys| (1..=KEYS_MAX).contains(&keys.len()))?;
    Some(keys.into_iter().map(|key| format!("{key}\n")).collect())
}

/// Makes a cluster's Secret have this entry, or none. Returns whether that changes it.
async fn copy(
    TenantCluster { cluster, names, .. }: &TenantCluster,
    tenant: &str,
    text: Option<&str>,
    context: &Context,
) -> Result<bool, Refusal> {
    let (key, name) = (names.key(), names.keys());
    let when_erasing = |reason| if text.is_none() { Reason::Releasing } else { reason };
    let failed = |error: OperatorError| match (error.code(), error.message()) {
        (Some(FORBIDDEN), message) => secrets::refusal(names, &message),
        (_, message) => {
            let message =
                format!("cannot write the tenant's keys to Secret {name} of {key}; retrying: {message}");
            Refusal::new(when_erasing(Reason::Progressing), message)
        }
    };
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &names.namespace);
    let stored = secrets.get_opt(&name).await.map_err(OperatorError::api(format!("get Secret {name}")));
    let stored = stored.map_err(failed)?;
    let is_foreign = stored.as_ref().is_some_and(|secret| secrets::is_foreign(names, secret));
    let present = stored.as_ref().and_then(|secret| secret.data.as_ref()?.get(tenant));
    let wanted = text.map(|text| ByteString(text.as_bytes().to_vec()));
    if present == wanted.as_ref() && (wanted.is_none() || !is_foreign) {
        return Ok(false);
    }
    if is_foreign {
        let message = format!(
            "Secret {name} is not that of KVCacheCluster {key}: delete it, so that the operator copies the keys of its tenants"
        );
        return Err(Refusal::new(Reason::SecretInvalid, message));
    }
    if cluster.spec.paused {
        let message = format!(
            "KVCacheCluster {key} is paused, so its Secret {name} keeps its keys of the tenant: set paused to false"
        );
        return Err(Refusal::new(when_erasing(Reason::Paused), message));
    }
    let entries = json!({ tenant: wanted });
    secrets::write_entries(cluster, &name, stored.as_ref(), &entries, context).await.map_err(failed)?;
    // A usage from before does not include what agents write until they notice.
    context.control_planes.forget_usage(names).await;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use reprise_crds::status::ConditionStatus::{False, Unknown};
    use serde_json::Value;

    use super::*;
    use crate::framework::labels::CLUSTER_UID;
    use crate::framework::test_api_server::{CannedResponse, RequestLog, error_response, serve};
    use crate::reconcile::context::tests::context_with;
    use crate::reconcile::control_plane::MeasuredUsage;
    use crate::reconcile::stores::Stores;
    use crate::reconcile::test_objects::{object, resource};

    fn tenant(clusters: &Value) -> CacheTenant {
        let reference = json!({ "namespace": "team-a", "name": "kv-key", "key": "key" });
        let spec = json!({ "isolation": "Encrypted", "keySecretRef": reference, "clusters": clusters });
        CacheTenant::new("t", object(spec))
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
        for (measured, status, reason, words) in [
            (vec![used(0, 0), used(4096, 0)], False, Reason::Releasing, "4096 bytes"),
            (vec![used(0, 2)], False, Reason::Releasing, "2 nodes of n/c do not"),
            (vec![used(0, 0), unknown()], False, Reason::Releasing, "is unknown"),
            (vec![used(0, 0)], False, Reason::Erased, "no node of n/c has"),
            (vec![], Unknown, Reason::ReferenceNotFound, "no KVCacheCluster"),
        ] {
            let of_cluster = |usage| UsageMeasurement { cluster: "n/c".to_owned(), usage };
            let found = erased("entry k", &measured.into_iter().map(of_cluster).collect::<Vec<_>>());
            assert_eq!((found.status, found.reason), (status, reason), "{found:?}");
            assert!(found.message.contains(words), "{found:?}");
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
            let metadata = json!({ "name": name, "namespace": "n", "uid": name });
            Arc::new(resource(metadata, json!({ "spec": { "paused": paused } })))
        };
        TenantClusters::of(tenant, ["a", "b"].into_iter().zip(paused).map(cluster).collect())
    }

    /// A Secret of the cluster with this uid.
    fn secret_of(uid: &str, entry: &str) -> CannedResponse {
        let data = json!({ entry: ByteString(format!("{}\n", "1".repeat(64)).into_bytes()) });
        let metadata = json!({ "name": "s", "namespace": "n", "labels": { CLUSTER_UID: uid } });
        let secret = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data });
        CannedResponse::Json(200, secret)
    }

    #[tokio::test]
    async fn failing_and_paused_clusters_do_not_keep_keys_from_others_and_former_ones_lose_them() {
        let failure = |code| error_response(code, &json!([]));
        let (everywhere, elsewhere) = (json!([]), json!([{ "namespace": "n", "name": "other" }]));
        let rotated = vec![secret_of("", "key"), failure(500), failure(404), secret_of("b", "t")];
        let erased = vec![failure(404), secret_of("a", "t"), secret_of("a", "t"), secret_of("b", "t")];
        for (named, paused, responses, methods, reason, words) in [
            (everywhere, false, rotated, ["GET", "GET", "GET", "POST"], Reason::Progressing, "a-keys of n/a"),
            (elsewhere, true, erased, ["GET", "GET", "PATCH", "GET"], Reason::Releasing, "n/b is paused"),
        ] {
            let (context, log) = context_of(responses);
            let tenant = tenant(&named);
            let found = sync(&tenant, None, &clusters(&tenant, [false, paused]), &[], &context).await;
            let found = found.expect("an encrypted tenant");
            assert_eq!(log.methods(), methods);
            assert_eq!((found.status, found.reason), (False, reason));
            assert!(found.message.contains(words), "{found:?}");
            let patches = log.requests().into_iter().filter(|request| request.method == "PATCH");
            assert!(patches.into_iter().all(|patch| patch.body["data"] == json!({ "t": null })));
        }
    }

    #[tokio::test]
    async fn purge_removes_the_keys_and_waits_for_clusters_that_keep_them() {
        let tenant = tenant(&json!([]));
        let mut results = ["n/a", "n/b"].map(|cluster| BudgetResult {
            cluster: cluster.to_owned(),
            outcome: Ok(()),
            overcommitted: TierBytes::default(),
        });
        let (context, log) = context_of(vec![secret_of("a", "t"), secret_of("a", "t"), secret_of("b", "t")]);
        remove(&tenant, &clusters(&tenant, [false, true]), &mut results, &context).await;
        assert_eq!(log.methods(), ["GET", "PATCH", "GET"]);
        assert_eq!(results[0].outcome, Ok(()));
        let why = results[1].outcome.as_ref().expect_err("the cluster is paused");
        assert!(why.reason == Reason::Releasing && why.message.contains("set paused to false"), "{why:?}");
    }
}
