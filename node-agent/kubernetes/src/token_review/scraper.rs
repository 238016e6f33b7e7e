//! Verifies the token of a scraper: a TokenReview names its account, and a SubjectAccessReview whether the account may
//! `get` the path `/metrics` (as of the kubelet and of kube-rbac-proxy).
//!
//! The token needs no special audience: scrapers have the token of their pod. Results are not kept here; the caller
//! keeps accepted ones for a short time.

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::Client;
use kube::api::{Api, PostParams};
use reprise_policy::identity::ReviewOutcome;
use tokio::time::timeout;

use super::REVIEW_TIMEOUT;

/// Path that an account must be permitted to `get`.
const METRICS_PATH: &str = "/metrics";

pub(super) async fn review(client: &Client, token: &str) -> ReviewOutcome {
    let asked = timeout(REVIEW_TIMEOUT, async {
        let spec = TokenReviewSpec { token: token.to_owned(), audiences: None };
        let review = TokenReview { spec, ..TokenReview::default() };
        let answer = Api::<TokenReview>::all(client.clone()).create(&PostParams::default(), &review).await?;
        let user = match user(answer) {
            Ok(user) => user,
            Err(rejected) => return Ok(rejected),
        };
        let review = SubjectAccessReview { spec: spec_of(&user), ..SubjectAccessReview::default() };
        let reviews = Api::<SubjectAccessReview>::all(client.clone());
        let answer = reviews.create(&PostParams::default(), &review).await?;
        Ok::<_, kube::Error>(interpret(&user, answer))
    });
    match asked.await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(error)) => ReviewOutcome::Unreachable(error.to_string()),
        Err(_) => {
            ReviewOutcome::Unreachable(format!("the API server did not respond within {REVIEW_TIMEOUT:?}"))
        }
    }
}

/// Account of a valid token.
fn user(answer: TokenReview) -> Result<UserInfo, ReviewOutcome> {
    let status = answer.status.unwrap_or_default();
    match status.user {
        Some(user) if status.authenticated == Some(true) && user.username.is_some() => Ok(user),
        _ => {
            let reason = status.error.unwrap_or_else(|| "the API server does not know the token".to_owned());
            Err(ReviewOutcome::Rejected(reason))
        }
    }
}

fn spec_of(user: &UserInfo) -> SubjectAccessReviewSpec {
    SubjectAccessReviewSpec {
        user: user.username.clone(),
        groups: user.groups.clone(),
        uid: user.uid.clone(),
        extra: user.extra.clone(),
        non_resource_attributes: Some(NonResourceAttributes {
            path: Some(METRICS_PATH.to_owned()),
            verb: Some("get".to_owned()),
        }),
        resource_attributes: None,
    }
}

fn interpret(user: &UserInfo, answer: SubjectAccessReview) -> ReviewOutcome {
    let name = user.username.clone().unwrap_or_default();
    match answer.status {
        // A denial has precedence over a permission, as in the API server.
        Some(status) if status.allowed && status.denied != Some(true) => ReviewOutcome::User(name),
        _ => ReviewOutcome::Rejected(format!(
            "{name} may not get {METRICS_PATH}: bind a ClusterRole with this non-resource URL and verb to it"
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn reviewed(status: &Value) -> Result<UserInfo, ReviewOutcome> {
        let whole = json!({ "spec": {}, "status": status });
        user(serde_json::from_value(whole).expect("a review"))
    }

    #[test]
    fn only_an_authenticated_token_names_an_account() {
        let known = json!({ "authenticated": true, "user": { "username": "prometheus", "groups": ["g"] } });
        assert_eq!(reviewed(&known).expect("valid").username.as_deref(), Some("prometheus"));
        for other in [
            json!({ "authenticated": false, "user": { "username": "prometheus" } }),
            json!({ "authenticated": true, "user": {} }),
            json!({ "authenticated": true }),
            json!({}),
        ] {
            assert!(matches!(reviewed(&other), Err(ReviewOutcome::Rejected(_))), "{other}");
        }
    }

    #[test]
    fn account_is_asked_for_with_its_groups_and_needs_a_permission_without_denial() {
        let known =
            json!({ "authenticated": true, "user": { "username": "p", "groups": ["g"], "uid": "1" } });
        let user = reviewed(&known).expect("valid");
        let spec = spec_of(&user);
        assert_eq!((spec.user.as_deref(), spec.groups.as_deref()), (Some("p"), Some(&["g".to_owned()][..])));
        let asked = spec.non_resource_attributes.expect("a path");
        assert_eq!((asked.path.as_deref(), asked.verb.as_deref()), (Some("/metrics"), Some("get")));
        let outcome = |status: Value| {
            let whole = json!({ "spec": {}, "status": status });
            interpret(&user, serde_json::from_value(whole).expect("a review"))
        };
        assert_eq!(outcome(json!({ "allowed": true })), ReviewOutcome::User("p".to_owned()));
        for status in [json!({ "allowed": false }), json!({ "allowed": true, "denied": true })] {
            let ReviewOutcome::Rejected(reason) = outcome(status) else { panic!("it is accepted") };
            assert!(reason.contains("ClusterRole"), "{reason}");
        }
    }
}
