//! Isolation salts of a cluster's tenants: Secret `<cluster>-salts` with an entry for each tenant, which agents mount.
//!
//! A salt is created when its CacheTenant first applies to the cluster. It is never changed, and it outlives the
//! CacheTenant: with another salt, none of the tenant's blocks would be found. The entry of an encrypted tenant also has
//! the word `encrypted`: with the salt, an agent learns that it may write no block of the tenant in plaintext. A tenant
//! that was created again with another isolation gets or loses the word, and loses it only if the cluster has no key of
//! it. Agents that have read the word require a key until they restart.
//!
//! Invariant: an entry is added to the Secret's version that lacks it. If two operators add one at the same time, the
//! API server rejects one of them, which then retries.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::Api;
use reprise_crds::status::Reason;
use reprise_crds::tenant::Isolation;
use reprise_crds::{CacheTenant, KVCacheCluster};
use reprise_policy::TenantSalt;
use serde_json::json;

use crate::framework::error::OperatorError;
use crate::framework::labels::CLUSTER_UID;
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;
use crate::reconcile::names::ClusterNames;
use crate::reconcile::secrets;

/// Word in the entry of an encrypted tenant, which agents read.
const ENCRYPTED: &str = "encrypted";

/// Entries of a Secret, by tenant.
type Entries = BTreeMap<String, ByteString>;

/// Creates the missing salts of a cluster's tenants. Returns why it cannot, if another component created the Secret.
///
/// # Errors
/// The API server rejected a call.
pub(crate) async fn ensure(
    cluster: &KVCacheCluster,
    tenants: &[Arc<CacheTenant>],
    context: &Context,
) -> Result<Option<Refusal>, OperatorError> {
    let names = ClusterNames::of(cluster);
    let name = names.salts();
    let known = context.secrets.get(&names, &name);
    let known: Entries =
        known.and_then(|secret| serde_json::from_value(secret.data["data"].clone()).ok()).unwrap_or_default();
    if changed(&known, tenants, |_| false, || TenantSalt::new([0; TenantSalt::SIZE])).is_empty() {
        return Ok(None);
    }
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &names.namespace);
    // The watch may be behind, so its state does not show which salts are missing.
    let stored = secrets.get_opt(&name).await.map_err(OperatorError::api(format!("get Secret {name}")))?;
    if stored.as_ref().is_some_and(|secret| secrets::is_foreign(&names, secret)) {
        let message = format!(
            "Secret {name} is not the cluster's: to keep the blocks of its salts, set its label {CLUSTER_UID} to {} and remove its \
             ownerReferences; otherwise delete it, and the operator creates new salts",
            names.uid
        );
        return Ok(Some(Refusal::new(Reason::Conflict, message)));
    }
    let present = stored.as_ref().and_then(|secret| secret.data.clone()).unwrap_or_default();
    // While the keys are unknown, the words stay.
    let keys = secrets.get_opt(&names.keys()).await.ok();
    let keys = keys.map(|secret| secret.and_then(|secret| secret.data).unwrap_or_default());
    let has_key = |tenant: &str| keys.as_ref().is_none_or(|keys| keys.contains_key(tenant));
    let changed = changed(&present, tenants, has_key, || TenantSalt::new(rand::random()));
    if !changed.is_empty() {
        secrets::write_entries(cluster, &name, stored.as_ref(), &json!(changed), context).await?;
    }
    Ok(None)
}

/// Returns an entry for each tenant that lacks its salt, or whose entry must get or lose the word for encryption. Present
/// salts never change.
fn changed(
    present: &Entries,
    tenants: &[Arc<CacheTenant>],
    has_key: impl Fn(&str) -> bool,
    random: impl Fn() -> TenantSalt,
) -> Entries {
    let entry = |tenant: &Arc<CacheTenant>| {
        let name = tenant.name_any();
        let before = present.get(&name).map(|entry| String::from_utf8_lossy(&entry.0));
        let words: Vec<&str> = before.iter().flat_map(|text| text.split_whitespace()).collect();
        let is_marked = words.contains(&ENCRYPTED);
        let is_encrypted = tenant.spec.isolation == Isolation::Encrypted || (is_marked && has_key(&name));
        if before.is_some() && is_marked == is_encrypted {
            return None;
        }
        let salt = words.iter().find(|word| **word != ENCRYPTED);
        let salt = salt.map_or_else(|| random().to_hex(), ToString::to_string);
        let mark = if is_encrypted { format!("{ENCRYPTED}\n") } else { String::new() };
        Some((name, ByteString(format!("{salt}\n{mark}").into_bytes())))
    };
    tenants.iter().filter_map(entry).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::reconcile::test_objects::object;

    #[test]
    fn each_tenant_gets_one_salt_that_never_changes() {
        let tenants = |names: &[&str], isolation: &str| -> Vec<Arc<CacheTenant>> {
            let spec = || object(json!({ "isolation": isolation }));
            names.iter().map(|name| Arc::new(CacheTenant::new(name, spec()))).collect()
        };
        let text = |entries: &Entries, name: &str| String::from_utf8(entries[name].0.clone()).expect("text");
        let count = Cell::new(0);
        let next = || TenantSalt::new([count.replace(count.get() + 1); 32]);
        let no_key = |_: &str| false;
        let first = changed(&Entries::new(), &tenants(&["a", "b"], "Salted"), no_key, next);
        assert_ne!(first["a"], first["b"]);
        TenantSalt::from_hex(&text(&first, "a")).expect("the form of an agent's file");
        let more = changed(&first, &tenants(&["a", "c"], "Salted"), no_key, next);
        assert_eq!(more.keys().collect::<Vec<_>>(), ["c"]);
        let encrypted = tenants(&["a", "d"], "Encrypted");
        let marked = changed(&first, &encrypted, no_key, next);
        assert_eq!(text(&marked, "a"), text(&first, "a") + "encrypted\n", "the salt stays");
        assert!(text(&marked, "d").ends_with("\nencrypted\n"), "{marked:?}");
        assert!(changed(&marked, &encrypted, no_key, next).is_empty());
        // Created again as Salted.
        let keeps_key = |tenant: &str| tenant == "a";
        let stripped = changed(&marked, &tenants(&["a", "d"], "Salted"), keeps_key, next);
        assert_eq!(stripped.keys().collect::<Vec<_>>(), ["d"], "the key of a is still there");
        let stripped = changed(&marked, &tenants(&["a"], "Salted"), no_key, next);
        assert_eq!(stripped["a"], first["a"], "the salt stays");
    }
}
