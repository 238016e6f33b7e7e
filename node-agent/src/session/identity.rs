//! Verifies the tenant of a session in a cluster by the service account token of its pod.
//!
//! Without bindings, tenants are not verified. The API server is asked only if the session presents a token
//! and some tenant is bound. While the server is unreachable, a session becomes a bound tenant only with a
//! recently verified token; other sessions are not affected.

use reprise_policy::TenantName;
use reprise_policy::identity::{IdentityError, ReviewOutcome, ServiceAccount};
use reprise_proto::local::FailureKind;

use crate::bindings::BindingsFile;

/// Verifies a token and returns its user.
pub(crate) type Review = dyn Fn(&str) -> ReviewOutcome + Send + Sync;

/// Verifies tenants of sessions against the mapping of pods to tenants.
pub(crate) struct Identity {
    bindings: BindingsFile,
    review: Box<Review>,
}

impl Identity {
    /// Uses these bindings and this token review.
    pub(crate) fn new(bindings: BindingsFile, review: Box<Review>) -> Identity {
        Identity { bindings, review }
    }

    /// Checks whether a session may use the tenant in its greeting; blocks while the API server is asked.
    ///
    /// # Errors
    /// The reason, for the client.
    pub(super) fn check(&self, tenant: &TenantName, token: &str) -> Result<(), (FailureKind, String)> {
        let bindings = self.bindings.current();
        if bindings.is_empty() {
            return Ok(());
        }
        let account = self.account(token, bindings.is_bound(tenant))?;
        bindings.judge(tenant, account.as_ref()).map_err(|error| (kind_of(&error), error.to_string()))
    }

    /// Returns the service account of a token; `None` without a token, or if the result does not matter.
    fn account(&self, token: &str, matters: bool) -> Result<Option<ServiceAccount>, (FailureKind, String)> {
        if token.is_empty() {
            return Ok(None);
        }
        let refuse = |what: String| Err((FailureKind::BadRequest, what));
        match (self.review)(token) {
            ReviewOutcome::User(user) => match ServiceAccount::of_user(&user) {
                Some(account) => Ok(Some(account)),
                None => refuse(format!(
                    "the token of the session belongs to user '{user}', not to a service account"
                )),
            },
            ReviewOutcome::Rejected(words) => refuse(format!(
                "the API server rejects the token of the session: {words}; use the current projected token of the pod"
            )),
            ReviewOutcome::Unreachable(words) if matters => {
                Err((FailureKind::Busy, format!("cannot verify the token of the session, retry: {words}")))
            }
            ReviewOutcome::Unreachable(words) => {
                tracing::debug!(words, "skipping the token of a session: its tenant is not bound");
                Ok(None)
            }
        }
    }
}

/// A binding may still be on its way to this node, so a session with a verified token may retry.
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

    fn identity(text: &str, reviewed: ReviewOutcome) -> (tempfile::TempDir, Identity) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tenants.json");
        std::fs::write(&path, text).expect("written");
        let bindings = BindingsFile::read(path).expect("reads");
        (folder, Identity::new(bindings, Box::new(move |_| reviewed.clone())))
    }

    fn check_result(
        reviewed: &ReviewOutcome,
        tenant: &str,
        token: &str,
    ) -> Result<(), (FailureKind, String)> {
        let (_folder, identity) = identity(BINDINGS, reviewed.clone());
        identity.check(&tenant.parse().expect("a name"), token)
    }

    fn user(name: &str) -> ReviewOutcome {
        ReviewOutcome::User(name.to_owned())
    }

    #[test]
    fn pods_of_a_tenant_are_accepted_and_others_rejected_with_a_remedy() {
        let ours = user("system:serviceaccount:chat:vllm");
        assert_eq!(check_result(&ours, "a", "token"), Ok(()));
        assert_eq!(check_result(&ours, "default", ""), Ok(()), "a tenant that is not bound needs no token");
        let (never, later) = (FailureKind::BadRequest, FailureKind::Busy);
        for (reviewed, tenant, token, wanted, words) in [
            (&ours, "a", "", never, "REPRISE_TOKEN_FILE"),
            (&ours, "default", "token", later, "REPRISE_TENANT"),
            (&user("system:serviceaccount:x:y"), "a", "token", later, "x/y"),
            (&user("alice"), "a", "token", never, "alice"),
            (&ReviewOutcome::Rejected("expired".to_owned()), "a", "token", never, "expired"),
            (&ReviewOutcome::Rejected("expired".to_owned()), "default", "token", never, "expired"),
        ] {
            let (kind, message) = check_result(reviewed, tenant, token).expect_err("refused");
            assert_eq!(kind, wanted, "{message}");
            assert!(message.contains(words), "{message}");
        }
    }

    #[test]
    fn while_the_api_server_is_unreachable_only_bound_tenants_must_retry() {
        let away = ReviewOutcome::Unreachable("down".to_owned());
        let (kind, message) = check_result(&away, "a", "token").expect_err("the token is not verified");
        assert_eq!(kind, FailureKind::Busy);
        assert!(message.contains("down"), "{message}");
        assert_eq!(check_result(&away, "default", "token"), Ok(()));
    }

    #[test]
    fn without_bindings_the_server_is_not_asked() {
        let no_bindings = r#"{"tenants":[],"namespaces":{},"serviceAccounts":{}}"#;
        let (_folder, identity) = identity(no_bindings, ReviewOutcome::Rejected("not asked".to_owned()));
        assert_eq!(identity.check(&"a".parse().expect("a name"), "token"), Ok(()));
    }
}
