//! Reviews the bearer token of a scraper: a TokenReview names its account, and a SubjectAccessReview states whether the
//! account may `get` the path `/metrics`.
//!
//! Agents do the same (`reprise-agent-kubernetes`), with their own client.

use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::Client;
use kube::api::{Api, PostParams};
use reprise_daemon::scrapers::{Scrapers, Verdict};
use tokio::time::timeout;

/// Path that the account must be permitted to `get`.
const METRICS_PATH: &str = "/metrics";

/// Bound on both calls of the API server. Scrapers wait for 10 s by default.
const REVIEWED_WITHIN: Duration = Duration::from_secs(4);

/// Scrapers whose tokens the API server confirms.
pub fn reviewed(client: Client) -> Scrapers {
    Scrapers::reviewed(Box::new(move |token| {
        let client = client.clone();
        Box::pin(async move { review(&client, token).await })
    }))
}

/// Reviews a token within a limit.
async fn review(client: &Client, token: String) -> Verdict {
    match timeout(REVIEWED_WITHIN, ask(client, token)).await {
        Ok(Ok(verdict)) => verdict,
        Ok(Err(error)) => Verdict::Unavailable(error.to_string()),
        Err(_) => Verdict::Unavailable(format!("the API server did not respond within {REVIEWED_WITHIN:?}")),
    }
}

async fn ask(client: &Client, token: String) -> Result<Verdict, kube::Error> {
    let spec = TokenReviewSpec { token, audiences: None };
    let review = TokenReview { spec, ..TokenReview::default() };
    let answer = Api::<TokenReview>::all(client.clone()).create(&PostParams::default(), &review).await?;
    let status = answer.status.unwrap_or_default();
    let user = match status.user {
        Some(user) if status.authenticated == Some(true) && user.username.is_some() => user,
        _ => {
            let reason = status.error.unwrap_or_else(|| "the API server does not know the token".to_owned());
            return Ok(Verdict::Rejected(reason));
        }
    };
    let name = user.username.clone().unwrap_or_default();
    let spec = SubjectAccessReviewSpec {
        user: user.username,
        groups: user.groups,
        uid: user.uid,
        extra: user.extra,
        non_resource_attributes: Some(NonResourceAttributes {
            path: Some(METRICS_PATH.to_owned()),
            verb: Some("get".to_owned()),
        }),
        resource_attributes: None,
    };
    let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
    let reviews = Api::<SubjectAccessReview>::all(client.clone());
    let answer = reviews.create(&PostParams::default(), &review).await?;
    // A denial has precedence over a permission, as in the API server.
    let is_allowed = answer.status.is_some_and(|status| status.allowed && status.denied != Some(true));
    Ok(if is_allowed {
        Verdict::Accepted
    } else {
        Verdict::Rejected(format!(
            "{name} may not get {METRICS_PATH}: bind a ClusterRole with this non-resource URL and verb to it"
        ))
    })
}
