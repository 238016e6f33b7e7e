//! Whose pods: which tenant a session may be, where a cluster says which pods are which tenant's.
//!
//! A tenant is *bound* when somebody has said which pods are it. Sessions of a bound tenant must show which service account they run as, and
//! it must be one of that tenant's. Tenants that nobody has bound are believed, as everywhere.
//!
//! Decided here, pure; how a token becomes a [`ServiceAccount`] is the agent's business.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::tenant::TenantName;

/// Bytes that bindings of one cluster may have, each counted twice, as a line of a file and as an entry: of the 1 MiB that a ConfigMap holds. With
/// names of 20 characters these are 8,000 namespaces.
pub const BINDINGS_BYTES_MAX: usize = 768 << 10;

/// Characters of a ConfigMap's key.
const KEY_CHARS_MAX: usize = 253;

/// What a binding has beside its names: quotes, a colon and a comma, and what a ConfigMap writes around an entry.
const ENTRY_BYTES: usize = 16;

/// What tokens for agents are made for: a token for anybody else, the API server's own included, says nothing to an agent.
pub const TOKEN_AUDIENCE: &str = "reprise.dev";

/// How Kubernetes names the user of a service account: this, its namespace, a colon, its name.
const USER_PREFIX: &str = "system:serviceaccount:";

/// Who a pod runs as.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceAccount {
    /// Its namespace, which is its pods'.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// Which pods are which tenant's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodBindings {
    /// Tenants that are bound, also those of which no pod is at present.
    tenants: BTreeSet<TenantName>,
    /// Tenant of each namespace.
    namespaces: BTreeMap<String, TenantName>,
    /// Tenant of each service account, whatever its namespace's is; by [`ServiceAccount::key`].
    service_accounts: BTreeMap<String, TenantName>,
}

/// Why a session is not the tenant that it names. Each says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// The tenant is bound, and the session shows nothing.
    #[error(
        "tenant '{0}' is kept for the pods that its CacheTenant names, and this session shows no token: give the engine a projected service \
         account token of the audience {TOKEN_AUDIENCE}, and its path in REPRISE_TOKEN_FILE"
    )]
    NoToken(TenantName),
    /// The tenant is bound, and not to this account.
    #[error(
        "tenant '{tenant}' is kept for the pods that its CacheTenant names, and those of service account {account} are not among them: name \
         the namespace or the service account there, or another tenant here; what was just named takes a minute or so"
    )]
    NotItsPod {
        /// What the session named.
        tenant: TenantName,
        /// Who it runs as.
        account: ServiceAccount,
    },
    /// The account is another tenant's.
    #[error(
        "pods of service account {account} are tenant '{owner}', as its CacheTenant says, and this session names '{tenant}': set the engine's \
         tenant, or REPRISE_TENANT, to {owner}"
    )]
    OthersPod {
        /// What the session named.
        tenant: TenantName,
        /// Who it runs as.
        account: ServiceAccount,
        /// Whose it is.
        owner: TenantName,
    },
}

impl ServiceAccount {
    /// The account behind a user of Kubernetes; `None`: the user is none.
    pub fn of_user(user: &str) -> Option<ServiceAccount> {
        let (namespace, name) = user.strip_prefix(USER_PREFIX)?.split_once(':')?;
        let whole = !namespace.is_empty() && !name.is_empty() && !name.contains(':');
        whole.then(|| ServiceAccount { namespace: namespace.to_owned(), name: name.to_owned() })
    }

    /// Whether it can be an entry: its namespace is one, and both names together are short enough.
    pub fn is_entry(&self) -> bool {
        !self.namespace.contains('.') && self.key().len() <= KEY_CHARS_MAX
    }

    /// What it is called in bindings: `namespace.name`. Names of namespaces have no dots, so it is one account's alone.
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
    /// Nobody is bound.
    pub fn is_empty(&self) -> bool {
        self.tenants.is_empty()
    }

    /// Namespaces and service accounts that are bound.
    pub fn count(&self) -> usize {
        self.namespaces.len() + self.service_accounts.len()
    }

    /// Bytes that a binding takes, about; see [`BINDINGS_BYTES_MAX`].
    pub fn cost(name: &str, tenant: &TenantName) -> usize {
        2 * (name.len() + tenant.as_str().len() + ENTRY_BYTES)
    }

    /// Keeps a tenant for pods that are named for it.
    pub fn bind_tenant(&mut self, tenant: &TenantName) {
        self.tenants.insert(tenant.clone());
    }

    /// Pods of a namespace are this tenant.
    pub fn bind_namespace(&mut self, namespace: &str, tenant: &TenantName) {
        self.bind_tenant(tenant);
        self.namespaces.insert(namespace.to_owned(), tenant.clone());
    }

    /// Pods of a service account are this tenant.
    pub fn bind_service_account(&mut self, account: &ServiceAccount, tenant: &TenantName) {
        self.bind_tenant(tenant);
        self.service_accounts.insert(account.key(), tenant.clone());
    }

    /// Whose a namespace is.
    pub fn namespace(&self, namespace: &str) -> Option<&TenantName> {
        self.namespaces.get(namespace)
    }

    /// Whose a service account is by its own name.
    pub fn service_account(&self, account: &ServiceAccount) -> Option<&TenantName> {
        self.service_accounts.get(&account.key())
    }

    /// Every binding by its name: a namespace's, or a service account's key.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &TenantName)> {
        self.namespaces.iter().chain(&self.service_accounts).map(|(name, tenant)| (name.as_str(), tenant))
    }

    /// Whether a session of this tenant must show who it is.
    pub fn is_bound(&self, tenant: &TenantName) -> bool {
        self.tenants.contains(tenant)
    }

    /// Whose the pods of an account are: by its own name, else by its namespace.
    pub fn owner(&self, account: &ServiceAccount) -> Option<&TenantName> {
        self.service_account(account).or_else(|| self.namespace(&account.namespace))
    }

    /// Whether a session may be the tenant that it names.
    ///
    /// # Errors
    /// [`IdentityError`], in words for whoever configures the engine.
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
    fn users_of_service_accounts_are_told_from_others() {
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
    fn an_account_is_its_own_tenant_before_that_of_its_namespace() {
        let bindings = bindings();
        assert_eq!(bindings.owner(&account("chat", "vllm")), Some(&tenant("a")));
        assert_eq!(bindings.owner(&account("chat", "batch")), Some(&tenant("b")));
        assert_eq!(bindings.owner(&account("other", "batch")), None);
        assert_eq!(bindings.count(), 2);
    }

    #[test]
    fn a_bound_tenant_is_its_pods_alone_and_its_pods_are_nobody_else() {
        let bindings = bindings();
        let judged = |name: &str, account: Option<&ServiceAccount>| bindings.judge(&tenant(name), account);
        let (ours, batch, stranger) = (account("chat", "vllm"), account("chat", "batch"), account("x", "y"));
        assert_eq!(judged("a", Some(&ours)), Ok(()));
        assert_eq!(judged("b", Some(&batch)), Ok(()));
        assert_eq!(judged("a", None), Err(IdentityError::NoToken(tenant("a"))));
        assert_eq!(
            judged("c", None),
            Err(IdentityError::NoToken(tenant("c"))),
            "bound, though to no pod at present"
        );
        let not = IdentityError::NotItsPod { tenant: tenant("a"), account: stranger.clone() };
        assert_eq!(judged("a", Some(&stranger)), Err(not));
        let others =
            IdentityError::OthersPod { tenant: tenant("a"), account: batch.clone(), owner: tenant("b") };
        assert_eq!(judged("a", Some(&batch)), Err(others));
        assert!(matches!(judged("default", Some(&ours)), Err(IdentityError::OthersPod { .. })));
        for unbound in ["default", "d"] {
            assert_eq!(judged(unbound, None), Ok(()), "nobody has bound it: it is believed");
            assert_eq!(judged(unbound, Some(&stranger)), Ok(()));
        }
    }

    #[test]
    fn bindings_are_written_and_read_and_what_is_not_known_is_refused() {
        let text = serde_json::to_string(&bindings()).expect("JSON");
        assert_eq!(
            text,
            r#"{"tenants":["a","b","c"],"namespaces":{"chat":"a"},"serviceAccounts":{"chat.batch":"b"}}"#
        );
        assert_eq!(serde_json::from_str::<PodBindings>(&text).expect("reads"), bindings());
        assert!(serde_json::from_str::<PodBindings>(&text.replace("\"tenants\"", "\"tenant\"")).is_err());
    }
}
