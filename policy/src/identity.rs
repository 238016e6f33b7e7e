//! Tenant identity: which pods may use which tenant, according to the bindings of a cluster.
//!
//! A tenant is *bound* if a binding reserves it for certain pods. A session of a bound tenant must present a
//! token of its service account, and the account must be bound to that tenant. Tenants without a binding need
//! no token.
//!
//! This module is pure; the agent turns tokens into a [`ServiceAccount`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::tenant::TenantName;

/// Maximum bytes for the bindings of one cluster, each counted twice: as a line of a file and as an entry of
/// a ConfigMap, whose limit is 1 MiB. With names of 20 characters, this is enough for 8,000 namespaces.
pub const BINDINGS_BYTES_MAX: usize = 768 << 10;

/// Maximum characters of a ConfigMap key.
const KEY_CHARS_MAX: usize = 253;

/// Bytes of a binding in addition to its names: quotes, a colon, a comma, and the framing of a ConfigMap
/// entry.
const ENTRY_BYTES: usize = 16;

/// Audience of tokens for agents; an agent rejects tokens for other audiences, including the API server's.
pub const TOKEN_AUDIENCE: &str = "reprise.dev";

/// Prefix of a service account's user name in Kubernetes, followed by its namespace, a colon and its name.
const USER_PREFIX: &str = "system:serviceaccount:";

/// The result of a token review.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReviewOutcome {
    /// The token is valid for this user name.
    User(String),
    /// The server rejects the token, for this reason.
    Rejected(String),
    /// The server could not be asked, for this reason.
    Unreachable(String),
}

/// Service account of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceAccount {
    /// Namespace of the account and of its pods.
    pub namespace: String,
    /// Name of the account.
    pub name: String,
}

/// Bindings of pods to tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodBindings {
    /// Bound tenants, including those without any bound pod.
    tenants: BTreeSet<TenantName>,
    /// Tenant of each namespace.
    namespaces: BTreeMap<String, TenantName>,
    /// Tenant of each service account, by [`ServiceAccount::key`]; overrides the tenant of its namespace.
    service_accounts: BTreeMap<String, TenantName>,
    /// Tenant whose blocks sessions of all tenants may read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    public: Option<TenantName>,
}

/// Reason why a session may not use the tenant that it names; the text states the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// The tenant is bound, and the session presented no token.
    #[error(
        "tenant '{0}' is kept for the pods that its CacheTenant names, and this session shows no token: give the engine a projected \
        service account token of the audience {TOKEN_AUDIENCE}, and its path in REPRISE_TOKEN_FILE"
    )]
    NoToken(TenantName),
    /// The tenant is bound, but not to this account.
    #[error(
        "tenant '{tenant}' is kept for the pods that its CacheTenant names, and those of service account {account} are not among them: add \
        the namespace or the service account there, or set another tenant here; a new binding takes effect after about a minute"
    )]
    NotItsPod {
        /// Tenant named by the session.
        tenant: TenantName,
        /// Service account of the pod.
        account: ServiceAccount,
    },
    /// The account is bound to another tenant.
    #[error(
        "a CacheTenant binds pods of service account {account} to tenant '{owner}', but this session names '{tenant}': set the \
        engine's tenant, or REPRISE_TENANT, to {owner}"
    )]
    OthersPod {
        /// Tenant named by the session.
        tenant: TenantName,
        /// Service account of the pod.
        account: ServiceAccount,
        /// Tenant that the account is bound to.
        owner: TenantName,
    },
}

impl ServiceAccount {
    /// Returns the service account of a Kubernetes user name; `None` for other users.
    pub fn of_user(user: &str) -> Option<ServiceAccount> {
        let (namespace, name) = user.strip_prefix(USER_PREFIX)?.split_once(':')?;
        let whole = !namespace.is_empty() && !name.is_empty() && !name.contains(':');
        whole.then(|| ServiceAccount { namespace: namespace.to_owned(), name: name.to_owned() })
    }

    /// Whether the account fits into bindings: a valid namespace, and both names short enough together.
    pub fn is_entry(&self) -> bool {
        !self.namespace.contains('.') && self.key().len() <= KEY_CHARS_MAX
    }

    /// Name of the account in bindings: `namespace.name`. It is unique, because names of namespaces contain
    /// no dots.
    pub fn key(&self) -> String {
        format!("{}.{}", self.namespace, self.name)
    }
}

impl fmt::Display for ServiceAccount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl PodBindings {
    /// Whether there are no bindings.
    pub fn is_empty(&self) -> bool {
        self.tenants.is_empty()
    }

    /// Number of bound namespaces and service accounts.
    pub fn count(&self) -> usize {
        self.namespaces.len() + self.service_accounts.len()
    }

    /// Approximate bytes of a binding; see [`BINDINGS_BYTES_MAX`].
    pub fn cost(name: &str, tenant: &TenantName) -> usize {
        2 * (name.len() + tenant.as_str().len() + ENTRY_BYTES)
    }

    /// Binds a tenant, so that only bound pods may use it.
    pub fn bind_tenant(&mut self, tenant: &TenantName) {
        self.tenants.insert(tenant.clone());
    }

    /// Binds the pods of a namespace to a tenant.
    pub fn bind_namespace(&mut self, namespace: &str, tenant: &TenantName) {
        self.bind_tenant(tenant);
        self.namespaces.insert(namespace.to_owned(), tenant.clone());
    }

    /// Binds the pods of a service account to a tenant.
    pub fn bind_service_account(&mut self, account: &ServiceAccount, tenant: &TenantName) {
        self.bind_tenant(tenant);
        self.service_accounts.insert(account.key(), tenant.clone());
    }

    /// Sets the tenant whose blocks sessions of all tenants may read.
    pub fn set_public(&mut self, tenant: TenantName) {
        self.public = Some(tenant);
    }

    /// Returns the tenant whose blocks sessions of all tenants may read.
    pub fn public(&self) -> Option<&TenantName> {
        self.public.as_ref()
    }

    /// Returns the tenant of a namespace.
    pub fn namespace(&self, namespace: &str) -> Option<&TenantName> {
        self.namespaces.get(namespace)
    }

    /// Returns the tenant of a service account's own binding.
    pub fn service_account(&self, account: &ServiceAccount) -> Option<&TenantName> {
        self.service_accounts.get(&account.key())
    }

    /// Iterates all bindings by name: a namespace, or the key of a service account.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &TenantName)> {
        self.namespaces.iter().chain(&self.service_accounts).map(|(name, tenant)| (name.as_str(), tenant))
    }

    /// Whether sessions of this tenant must present a token.
    pub fn is_bound(&self, tenant: &TenantName) -> bool {
        self.tenants.contains(tenant)
    }

    /// Returns the tenant of an account's pods: by its own binding or, failing that, by its namespace.
    pub fn owner(&self, account: &ServiceAccount) -> Option<&TenantName> {
        self.service_account(account).or_else(|| self.namespace(&account.namespace))
    }

    /// Checks whether a session may use the tenant that it names.
    ///
    /// # Errors
    /// [`IdentityError`], with the remedy for the administrator of the engine.
    pub fn judge(&self, tenant: &TenantName, account: Option<&ServiceAccount>) -> Result<(), IdentityError> {
        let Some(account) = account else {
            return if self.is_bound(tenant) { Err(IdentityError::NoToken(tenant.clone())) } else { Ok(()) };
        };
        let (tenant, account) = (tenant.clone(), account.clone());
        match self.owner(&account) {
            Some(owner) if *owner == tenant => Ok(()),
            Some(owner) => Err(IdentityError::OthersPod { tenant, account, owner: owner.clone() }),
            None if self.is_bound(&tenant) => Err(IdentityError::NotItsPod { tenant, account }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> TenantName {
        name.parse().expect("a name")
    }

    fn account(namespace: &str, name: &str) -> ServiceAccount {
        ServiceAccount { namespace: namespace.to_owned(), name: name.to_owned() }
    }

    fn bindings() -> PodBindings {
        let mut bindings = PodBindings::default();
        bindings.bind_namespace("chat", &tenant("a"));
        bindings.bind_service_account(&account("chat", "batch"), &tenant("b"));
        bindings.bind_tenant(&tenant("c"));
        bindings
    }

    #[test]
    fn parses_users_of_service_accounts_only() {
        assert_eq!(ServiceAccount::of_user("system:serviceaccount:chat:vllm"), Some(account("chat", "vllm")));
        for user in [
            "",
            "system:admin",
            "system:serviceaccount:chat",
            "system:serviceaccount::x",
            "system:serviceaccount:a:b:c",
        ] {
            assert_eq!(ServiceAccount::of_user(user), None, "{user}");
        }
    }

    #[test]
    fn binding_of_an_account_overrides_its_namespace() {
        let bindings = bindings();
        assert_eq!(bindings.owner(&account("chat", "vllm")), Some(&tenant("a")));
        assert_eq!(bindings.owner(&account("chat", "batch")), Some(&tenant("b")));
        assert_eq!(bindings.owner(&account("other", "batch")), None);
        assert_eq!(bindings.count(), 2);
    }

    #[test]
    fn bound_tenant_and_its_pods_are_exclusive_to_each_other() {
        let bindings = bindings();
        let judge = |name: &str, account: Option<&ServiceAccount>| bindings.judge(&tenant(name), account);
        let (ours, batch, stranger) = (account("chat", "vllm"), account("chat", "batch"), account("x", "y"));
        assert_eq!(judge("a", Some(&ours)), Ok(()));
        assert_eq!(judge("b", Some(&batch)), Ok(()));
        assert_eq!(judge("a", None), Err(IdentityError::NoToken(tenant("a"))));
        assert_eq!(judge("c", None), Err(IdentityError::NoToken(tenant("c"))), "bound, although to no pod");
        let not = IdentityError::NotItsPod { tenant: tenant("a"), account: stranger.clone() };
        assert_eq!(judge("a", Some(&stranger)), Err(not));
        let others =
            IdentityError::OthersPod { tenant: tenant("a"), account: batch.clone(), owner: tenant("b") };
        assert_eq!(judge("a", Some(&batch)), Err(others));
        assert!(matches!(judge("default", Some(&ours)), Err(IdentityError::OthersPod { .. })));
        for unbound in ["default", "d"] {
            assert_eq!(judge(unbound, None), Ok(()), "tenants without a binding need no token");
            assert_eq!(judge(unbound, Some(&stranger)), Ok(()));
        }
    }

    #[test]
    fn bindings_round_trip_and_unknown_fields_are_rejected() {
        let text = serde_json::to_string(&bindings()).expect("JSON");
        assert_eq!(
            text,
            r#"{"tenants":["a","b","c"],"namespaces":{"chat":"a"},"serviceAccounts":{"chat.batch":"b"}}"#
        );
        assert_eq!(serde_json::from_str::<PodBindings>(&text).expect("reads"), bindings());
        assert!(serde_json::from_str::<PodBindings>(&text.replace("\"tenants\"", "\"tenant\"")).is_err());
        let mut public = bindings();
        public.set_public(tenant("c"));
        let written = serde_json::to_string(&public).expect("JSON");
        assert_eq!(written, text.replace("\"b\"}}", "\"b\"},\"public\":\"c\"}"));
        assert_eq!(serde_json::from_str::<PodBindings>(&written).expect("reads"), public);
    }
}
