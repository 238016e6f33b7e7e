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
use reprise_crds::tenant::Isolation;
use reprise_crds::{CacheTenant, KVCacheCluster};
use reprise_policy::TenantSalt;
use serde_json::json;

use crate::framework::error::OperatorError;
use crate::reconcile::context::Context;
use crate::reconcile::names::ClusterNames;
use crate::reconcile::secrets;

/// Word in the entry of an encrypted tenant, which agents read.
const ENCRYPTED: &str = "encrypted";

/// Creates the missing salts of a cluster's tenants.
///
/// # Errors
/// The API server rejected a call, or another component has created a Secret of this name.
pub(crate) async fn ensure(
    cluster: &KVCacheCluster,
    tenants: &[Arc<CacheTenant>],
    context: &Context,
) -> Result<(), OperatorError> {
    let names = ClusterNames::of(cluster);
    let name = names.salts();
    let tenants: Vec<(String, Isolation)> =
        tenants.iter().map(|tenant| (tenant.name_any(), tenant.spec.isolation)).collect();
    let known = context.secrets.get(&names, &name);
    let known: BTreeMap<String, ByteString> =
        known.and_then(|secret| serde_json::from_value(secret.data["data"].clone()).ok()).unwrap_or_default();
    if missing(&known, &tenants, |_| false, || TenantSalt::new([0; TenantSalt::SIZE])).is_empty() {
        return Ok(());
    }
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &names.namespace);
    // The watch may be behind, so its state does not show which salts are missing.
    let stored = secrets.get_opt(&name).await.map_err(OperatorError::api(format!("get Secret {name}")))?;
    if stored.as_ref().is_some_and(|secret| secrets::is_foreign(&names, secret)) {
        return Err(OperatorError::Identity(format!(
            "Secret {name} is not the cluster's: delete it, so that the operator creates the salts of its tenants"
        )));
    }
    let present = stored.as_ref().and_then(|secret| secret.data.clone()).unwrap_or_default();
    let is_stale = |(tenant, isolation): &(String, Isolation)| {
        *isolation != Isolation::Encrypted && present.get(tenant).is_some_and(|entry| is_marked(&entry.0))
    };
    // `None`: unknown, so that the words stay.
    let keys: Option<BTreeMap<String, ByteString>> = if tenants.iter().any(is_stale) {
        let found = secrets.get_opt(&names.keys()).await.ok();
        found.map(|found| found.and_then(|secret| secret.data).unwrap_or_default())
    } else {
        None
    };
    let has_key = |tenant: &str| keys.as_ref().is_none_or(|keys| keys.contains_key(tenant));
    let added = missing(&present, &tenants, has_key, || TenantSalt::new(rand::random()));
    if added.is_empty() {
        return Ok(());
    }
    secrets::write_entries(cluster, &name, stored.as_ref(), &json!(added), context).await
}

/// Returns an entry for each tenant that lacks its salt, or whose entry must get or lose the word for encryption. Present
/// salts never change.
fn missing(
    present: &BTreeMap<String, ByteString>,
    tenants: &[(String, Isolation)],
    has_key: impl Fn(&str) -> bool,
    random: impl Fn() -> TenantSalt,
) -> BTreeMap<String, ByteString> {
    let entry = |(tenant, isolation): &(String, Isolation)| {
        let before = present.get(tenant).map(|bytes| bytes.0.clone());
        let is_encrypted = *isolation == Isolation::Encrypted;
        let mut entry = before.clone().unwrap_or_else(|| format!("{}\n", random().to_hex()).into_bytes());
        match (is_encrypted, is_marked(&entry)) {
            (true, false) => entry.extend_from_slice(format!("{ENCRYPTED}\n").as_bytes()),
            (false, true) if !has_key(tenant) => {
                let text = String::from_utf8_lossy(&entry).into_owned();
                let salt = text.split_whitespace().filter(|word| *word != ENCRYPTED);
                entry = salt.map(|line| format!("{line}\n")).collect::<String>().into_bytes();
            }
            _ => {}
        }
        (before.as_ref() != Some(&entry)).then(|| (tenant.clone(), ByteString(entry)))
    };
    tenants.iter().filter_map(entry).collect()
}

/// Whether an entry has the word for encryption.
fn is_marked(entry: &[u8]) -> bool {
    String::from_utf8_lossy(entry).split_whitespace().any(|word| word == ENCRYPTED)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn each_tenant_gets_one_salt_that_never_changes() {
        let tenants = |names: &[&str]| {
            names.iter().map(|name| ((*name).to_owned(), Isolation::Salted)).collect::<Vec<_>>()
        };
        let count = Cell::new(0);
        let next = || {
            count.set(count.get() + 1);
            TenantSalt::new([count.get(); 32])
        };
        let no_key = |_: &str| false;
        let first = missing(&BTreeMap::new(), &tenants(&["a", "b"]), no_key, next);
        let salt = |name: &str| {
            let text = String::from_utf8(first[name].0.clone()).expect("text");
            TenantSalt::from_hex(&text).expect("the form of an agent's file")
        };
        assert_ne!(salt("a"), salt("b"));
        let more = missing(&first, &tenants(&["a", "c"]), no_key, next);
        assert_eq!(more.keys().collect::<Vec<_>>(), ["c"]);
        let encrypted = [("a".to_owned(), Isolation::Encrypted), ("d".to_owned(), Isolation::Encrypted)];
        let marked = missing(&first, &encrypted, no_key, next);
        let text = |name: &str| String::from_utf8(marked[name].0.clone()).expect("text");
        assert_eq!(text("a"), format!("{}\nencrypted\n", salt("a").to_hex()), "the salt stays");
        assert!(text("d").ends_with("\nencrypted\n"), "{}", text("d"));
        assert!(missing(&marked, &encrypted, no_key, next).is_empty());
        // Created again as Salted.
        let keeps_key = |tenant: &str| tenant == "a";
        let stripped = missing(&marked, &tenants(&["a", "d"]), keeps_key, next);
        assert_eq!(stripped.keys().collect::<Vec<_>>(), ["d"], "the key of a is still there");
        let stripped = missing(&marked, &tenants(&["a"]), no_key, next);
        assert_eq!(stripped["a"], first["a"], "the salt stays");
    }
}
