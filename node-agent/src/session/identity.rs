//! Who a session is: in a cluster that says which pods are which tenant's, a greeting's tenant is checked by the token that it shows.
//!
//! Where nothing is said, tenants are believed. The API server is asked only when the session shows a token and somebody is bound; while
//! it is away nobody becomes a bound tenant whom it has not known lately, and everybody else goes on.

use reprise_agent_kubernetes::Reviewed;
use reprise_policy::TenantName;
use reprise_policy::identity::{IdentityError, ServiceAccount};
use reprise_proto::local::FailureKind;

use crate::bindings::BindingsFile;

/// Asks whose a token is.
pub(crate) type Review = dyn Fn(&str) -> Reviewed + Send + Sync;

/// See the module.
pub(crate) struct Identity {
    bindings: BindingsFile,
    review: Box<Review>,
}

impl Identity {
    /// Sessions are checked by these bindings.
    pub(crate) fn new(bindings: BindingsFile, review: Box<Review>) -> Identity {
        Identity { bindings, review }
    }

    /// Whether a session may be the tenant that it names; waits for the API server where it has to be asked.
    ///
    /// # Errors
    /// Why not, for the client.
    pub(super) fn check(&self, tenant: &TenantName, token: &str) -> Result<(), (FailureKind, String)> {
        let bindings = self.bindings.current();
        if bindings.is_empty() {
            return Ok(());
        }
        let account = self.account(token, bindings.is_bound(tenant))?;
        bindings.judge(tenant, account.as_ref()).map_err(|error| (kind_of(&error), error.to_string()))
    }

    /// Who shows this token; nobody where it shows none, or where it is no matter.
    fn account(&self, token: &str, matters: bool) -> Result<Option<ServiceAccount>, (FailureKind, String)> {
        if token.is_empty() {
            return Ok(None);
        }
        let refuse = |what: String| Err((FailureKind::BadRequest, what));
        match (self.review)(token) {
            Reviewed::User(user) => match ServiceAccount::of_user(&user) {
                Some(account) => Ok(Some(account)),
                None => {
                    refuse(format!("the session's token is that of user '{user}', and no service account's"))
                }
            },
            Reviewed::Refused(words) => refuse(format!(
                "the API server does not take the session's token: {words}; show a projected token of the pod, as it is now"
            )),
            Reviewed::Away(words) if matters => {
                Err((FailureKind::Busy, format!("the session's token cannot be checked, try again: {words}")))
            }
            Reviewed::Away(words) => {
                tracing::debug!(words, "a session's token is not checked: its tenant is nobody's");
                Ok(None)
            }
        }
    }
}

/// A binding may be on its way still: whoever shows who it is may try again, and is taken once it has come.
fn kind_of(error: &IdentityError) -> FailureKind {
    match error {
        IdentityError::NoToken(_) => FailureKind::BadRequest,
        IdentityError::NotItsPod { .. } | IdentityError::OthersPod { .. } => FailureKind::Busy,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BINDINGS: &str = r#"{"tenants":["a"],"namespaces":{"chat":"a"},"serviceAccounts":{}}"#;

    fn identity(text: &str, reviewed: Reviewed) -> (tempfile::TempDir, Identity) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tenants.json");
        std::fs::write(&path, text).expect("written");
        let bindings = BindingsFile::read(path).expect("reads");
        (folder, Identity::new(bindings, Box::new(move |_| reviewed.clone())))
    }

    fn judged(reviewed: &Reviewed, tenant: &str, token: &str) -> Result<(), (FailureKind, String)> {
        let (_folder, identity) = identity(BINDINGS, reviewed.clone());
        identity.check(&tenant.parse().expect("a name"), token)
    }

    fn user(name: &str) -> Reviewed {
        Reviewed::User(name.to_owned())
    }

    #[test]
    fn the_pods_of_a_tenant_are_taken_and_others_are_told_what_to_do() {
        let ours = user("system:serviceaccount:chat:vllm");
        assert_eq!(judged(&ours, "a", "token"), Ok(()));
        assert_eq!(
            judged(&ours, "default", ""),
            Ok(()),
            "who shows nothing is believed where nobody is bound"
        );
        let (never, later) = (FailureKind::BadRequest, FailureKind::Busy);
        for (reviewed, tenant, token, wanted, words) in [
            (&ours, "a", "", never, "REPRISE_TOKEN_FILE"),
            (&ours, "default", "token", later, "REPRISE_TENANT"),
            (&user("system:serviceaccount:x:y"), "a", "token", later, "x/y"),
            (&user("alice"), "a", "token", never, "alice"),
            (&Reviewed::Refused("expired".to_owned()), "a", "token", never, "expired"),
            (&Reviewed::Refused("expired".to_owned()), "default", "token", never, "expired"),
        ] {
            let (kind, message) = judged(reviewed, tenant, token).expect_err("refused");
            assert_eq!(kind, wanted, "{message}");
            assert!(message.contains(words), "{message}");
        }
    }

    #[test]
    fn while_the_api_server_is_away_only_sessions_of_bound_tenants_wait() {
        let away = Reviewed::Away("down".to_owned());
        let (kind, message) = judged(&away, "a", "token").expect_err("nobody knows");
        assert_eq!(kind, FailureKind::Busy);
        assert!(message.contains("down"), "{message}");
        assert_eq!(judged(&away, "default", "token"), Ok(()));
    }

    #[test]
    fn where_nobody_is_bound_the_server_is_not_asked() {
        let nobody = r#"{"tenants":[],"namespaces":{},"serviceAccounts":{}}"#;
        let (_folder, identity) = identity(nobody, Reviewed::Refused("never asked".to_owned()));
        assert_eq!(identity.check(&"a".parse().expect("a name"), "token"), Ok(()));
    }
}
