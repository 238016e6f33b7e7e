//! Answers requests for certificates: CertificateSigningRequests of the signer [`SIGNER`].
//!
//! [`review`] decides from the request and from the requester, whom the API server has authenticated. Requests of pods
//! are approved without a person, because the token of a pod names its service account, pod and node. Requests of
//! people are approved if they may use a verb on the `KVCacheCluster`, which the API server answers.
//!
//! A request is answered by the replica that holds the lease, once. A failed answer is tried again.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::controller::Action;
use kube::runtime::{Controller, watcher};
use kube::{Client, Resource, ResourceExt};
use reprise_crds::{KVCacheCluster, OPERATOR_FIELD_MANAGER};
use serde_json::json;

use crate::framework::clock;
use crate::framework::error::{NOT_FOUND, OperatorError};
use crate::framework::feed::WatchBackoff;
use crate::framework::metrics::Write;
use crate::reconcile::authority::{self, AuthorityState};
use crate::reconcile::context::Context;
use crate::reconcile::names::ClusterNames;

pub mod certificate;
pub mod review;

use review::Grant;

/// Signer of the requests.
pub const SIGNER: &str = "reprise.dev/process";

/// Interval of new attempts while the cluster has no authority. Its reconcile creates one.
const RETRY_EVERY: Duration = Duration::from_secs(2);

/// Reason in the condition of approved requests.
const APPROVED: &str = "IdentityConfirmed";
/// Reason in the condition of denied requests.
const DENIED: &str = "IdentityRefused";

/// Returns the controller of the requests.
pub fn controller(client: &Client) -> Controller<CertificateSigningRequest> {
    let ours = watcher::Config::default().fields(&format!("spec.signerName={SIGNER}"));
    Controller::new(Api::all(client.clone()), ours).trigger_backoff(WatchBackoff::default())
}

/// Answers a request, unless it is answered.
///
/// # Errors
/// Returns an error if an API request failed; the reconcile is retried.
pub async fn reconcile(
    request: Arc<CertificateSigningRequest>,
    context: Arc<Context>,
) -> Result<Action, OperatorError> {
    if is_answered(&request) {
        return Ok(Action::await_change());
    }
    // An approval causes an event before the certificate is there.
    let current = api(&context).get_opt(&request.name_any()).await;
    let current = current.map_err(OperatorError::api("read a request for a certificate"))?;
    let Some(current) = current.filter(|current| !is_answered(current)) else {
        return Ok(Action::await_change());
    };
    match answer(&context, &current).await {
        // The requester has deleted it.
        Err(error) if error.code() == Some(NOT_FOUND) => Ok(Action::await_change()),
        answered => answered,
    }
}

/// Whether a request has a certificate, or will not get one.
fn is_answered(request: &CertificateSigningRequest) -> bool {
    let has_certificate = request.status.as_ref().is_some_and(|status| status.certificate.is_some());
    has_certificate || has_condition(request, "Denied") || has_condition(request, "Failed")
}

fn has_condition(request: &CertificateSigningRequest, kind: &str) -> bool {
    let conditions = request.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == kind)
}

async fn answer(context: &Context, request: &CertificateSigningRequest) -> Result<Action, OperatorError> {
    let find = |namespace: &str, name: &str| {
        let found = context.stores.cluster(&format!("{namespace}/{name}"));
        found.map(|cluster| ClusterNames::of(&cluster))
    };
    let verdict = review::review(request, find);
    let Grant { request: signing, names, hosts, valid, verb } = match verdict {
        Ok(grant) => grant,
        Err(message) => return deny(context, request, &message).await,
    };
    if let Some(verb) = verb
        && let Some(refusal) = ask(context, request, verb, &names).await?
    {
        return deny(context, request, &refusal).await;
    }
    let authority = match authority::read(&names, context).await {
        AuthorityState::Present(authority) => authority,
        AuthorityState::Unusable(refusal) => return Err(OperatorError::Identity(refusal.message)),
        AuthorityState::Absent => return Ok(Action::requeue(RETRY_EVERY)),
    };
    let certificate = match authority.authority.sign(&signing, &hosts, valid) {
        Ok(certificate) => ByteString(certificate.into_bytes()),
        Err(error) => return deny(context, request, &error.to_string()).await,
    };
    let message = match verb {
        None => format!("the requester's pod is {}", signing.identity()),
        Some(verb) => format!("the requester may {verb} the KVCacheCluster"),
    };
    set_condition(context, request, ("Approved", APPROVED), &message).await?;
    let name = request.name_any();
    let status = json!({ "status": { "certificate": certificate } });
    let issued = api(context).patch_status(&name, &params(), &Patch::Strategic(&status)).await;
    issued.map_err(OperatorError::api(format!("issue the certificate of request {name}")))?;
    context.metrics.record_write("CertificateSigningRequest", Write::Status);
    tracing::info!(
        request = name,
        identity = %signing.identity(),
        requester = request.spec.username,
        "issued a certificate"
    );
    Ok(Action::await_change())
}

/// Asks whether the requester may use a verb on a cluster. Returns the reason if not.
async fn ask(
    context: &Context,
    request: &CertificateSigningRequest,
    verb: &str,
    names: &ClusterNames,
) -> Result<Option<String>, OperatorError> {
    let spec = &request.spec;
    let review = json!({ "spec": {
        "user": spec.username, "groups": spec.groups, "uid": spec.uid, "extra": spec.extra,
        "resourceAttributes": {
            "group": KVCacheCluster::group(&()), "resource": KVCacheCluster::plural(&()),
            "namespace": names.namespace, "name": names.name, "verb": verb,
        },
    } });
    let review = serde_json::from_value(review).expect("made above");
    let reviews: Api<SubjectAccessReview> = Api::all(context.client.clone());
    let reviewed = reviews.create(&PostParams::default(), &review).await;
    let status = reviewed.map_err(OperatorError::api("review the access of a requester"))?.status;
    let is_allowed = status.is_some_and(|status| status.allowed && status.denied != Some(true));
    let user = spec.username.as_deref().unwrap_or_default();
    Ok((!is_allowed).then(|| {
        format!(
            "{user} may not {verb} kvcacheclusters.reprise.dev {} in namespace {}: bind a Role with this verb to it",
            names.name, names.namespace
        )
    }))
}

async fn deny(
    context: &Context,
    request: &CertificateSigningRequest,
    message: &str,
) -> Result<Action, OperatorError> {
    let (name, requester) = (request.name_any(), request.spec.username.as_deref().unwrap_or_default());
    tracing::warn!(request = name, requester, reason = message, "denied a request for a certificate");
    set_condition(context, request, ("Denied", DENIED), message).await?;
    Ok(Action::await_change())
}

/// Adds the condition that answers a request. Another answer of a person has precedence.
async fn set_condition(
    context: &Context,
    request: &CertificateSigningRequest,
    (kind, reason): (&str, &str),
    message: &str,
) -> Result<(), OperatorError> {
    if has_condition(request, kind) {
        return Ok(());
    }
    let (name, now) = (request.name_any(), clock::now());
    let condition = json!({
        "type": kind, "status": "True", "reason": reason, "message": message,
        "lastUpdateTime": now, "lastTransitionTime": now,
    });
    let status = json!({ "status": { "conditions": [condition] } });
    let patched = api(context).patch_approval(&name, &params(), &Patch::Strategic(&status)).await;
    patched.map_err(OperatorError::api(format!("answer the request {name}")))?;
    context.metrics.record_write("CertificateSigningRequest", Write::Status);
    Ok(())
}

fn api(context: &Context) -> Api<CertificateSigningRequest> {
    Api::all(context.client.clone())
}

fn params() -> PatchParams {
    PatchParams::apply(OPERATOR_FIELD_MANAGER)
}
