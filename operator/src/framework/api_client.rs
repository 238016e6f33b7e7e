//! The API server client: counts all requests and limits their rate. [`crate::framework::metrics::Write`] counts
//! accepted writes.
//!
//! ```text
//! Client ──► retries (429, 503, 504) ──► rate limit ──► counter ──► authentication, TLS, the API server
//! ```
//!
//! * Each attempt counts once it is answered or has failed, including retries by the client, because each one costs the
//!   API server work. One that its caller abandons does not count.
//! * A watch counts once, when it starts.
//!
//! The rate limit protects the API server when a thousand nodes appear at once or a watch restarts. In normal operation
//! no request waits.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Bytes, HttpBody};
use axum::http::{Method, Request, Response, Uri};
use kube::client::retry::RetryPolicy;
use kube::client::{Body, ClientBuilder};
use kube::{Client, Config};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tower::buffer::BufferLayer;
use tower::layer::layer_fn;
use tower::limit::RateLimitLayer;
use tower::retry::RetryLayer;
use tower::{BoxError, Service};

/// Requests that may wait for the rate limit, equal to the buffer of kube's own client.
const WAITING_MAX: usize = 1024;

/// Most requests per [`RATE_WINDOW`], that is 500 per second. At most 48 reconciles run at once, so no
/// request waits longer than one window and lease renewals are not delayed. Kubernetes' own controllers are
/// limited to 20 to 100 per second each. With 20 per window, the p99 of pool reconciles doubled when a
/// thousand nodes appeared at once.
const REQUESTS_MAX: u64 = 50;
const RATE_WINDOW: Duration = Duration::from_millis(100);

/// Code label of requests without an answer.
const NONE: &str = "none";
/// Resource label of paths that name no resource.
const OTHER: &str = "other";

/// Labels of the request counter.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    /// RBAC verb: `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, or `other`.
    pub verb: &'static str,
    /// Plural name of the resource, with the subresource if there is one.
    pub resource: String,
    /// HTTP status code, or `none` without an answer.
    pub code: String,
}

/// Counters of all requests.
#[derive(Clone, Debug, Default)]
pub struct ApiRequests(pub(crate) Family<RequestLabels, Counter>);

/// Creates a client with counted and rate-limited requests.
///
/// # Errors
/// The address or the certificates in the configuration are invalid.
pub fn client(mut config: Config) -> kube::Result<(Client, ApiRequests)> {
    // Kube's own retry layer is inside of custom layers and would hide retries from the counter. So it is
    // disabled, and the same policy is added around the counter.
    config.default_retry = false;
    Ok(with_layers(ClientBuilder::try_from(config)?))
}

fn with_layers<S, B>(builder: ClientBuilder<S>) -> (Client, ApiRequests)
where
    S: Service<Request<Body>, Response = Response<B>, Error = BoxError, Future: Send> + Send + 'static,
    B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let requests = ApiRequests::default();
    let client = builder
        .with_layer(&layer_fn(|service| Counting { service, requests: requests.clone() }))
        .with_layer(&RateLimitLayer::new(REQUESTS_MAX, RATE_WINDOW))
        .with_layer(&BufferLayer::new(WAITING_MAX))
        .with_layer(&RetryLayer::new(RetryPolicy::server_retry()))
        .build();
    (client, requests)
}

/// A service that counts requests.
struct Counting<S> {
    service: S,
    requests: ApiRequests,
}

impl<S, B> Service<Request<Body>> for Counting<S>
where
    S: Service<Request<Body>, Response = Response<B>, Error = BoxError>,
    S::Future: Send + 'static,
{
    type Response = Response<B>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<B>, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let mut labels = labels(request.method(), request.uri());
        let (requests, answer) = (self.requests.clone(), self.service.call(request));
        Box::pin(async move {
            let answered = answer.await;
            if let Ok(response) = &answered {
                response.status().as_str().clone_into(&mut labels.code);
            }
            requests.0.get_or_create(&labels).inc();
            answered
        })
    }
}

/// Derives the labels of a request that has no answer yet.
fn labels(method: &Method, uri: &Uri) -> RequestLabels {
    let path: Vec<&str> = uri.path().split('/').filter(|part| !part.is_empty()).collect();
    let rest = match path.as_slice() {
        ["api", _, rest @ ..] | ["apis", _, _, rest @ ..] => rest,
        _ => &[],
    };
    // `namespaces/x` is an object; `namespaces/x/plural/…` is the prefix of namespaced objects.
    let rest = match rest {
        ["namespaces", _, rest @ ..] if !rest.is_empty() => rest,
        _ => rest,
    };
    let resource = match rest {
        [] => OTHER.to_owned(),
        [plural] | [plural, _] => (*plural).to_owned(),
        [plural, _, part, ..] => format!("{plural}/{part}"),
    };
    let watches = uri.query().is_some_and(|query| query.split('&').any(|word| word == "watch=true"));
    let verb = match (method.as_str(), rest.len()) {
        ("GET", _) if watches => "watch",
        ("GET", 1) => "list",
        ("GET", _) => "get",
        ("POST", _) => "create",
        ("PUT", _) => "update",
        ("PATCH", _) => "patch",
        ("DELETE", _) => "delete",
        _ => OTHER,
    };
    RequestLabels { verb, resource, code: NONE.to_owned() }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::Api;
    use serde_json::json;
    use tokio::time::Instant;

    use super::*;
    use crate::framework::test_api_server::{CannedResponse, RequestLog, error_response, service};

    #[test]
    fn labels_request_with_rbac_verb_and_resource_but_no_object_name() {
        for (method, path, verb, resource) in [
            (Method::GET, "/api/v1/nodes?limit=500", "list", "nodes"),
            (Method::GET, "/api/v1/nodes?watch=true&timeoutSeconds=290", "watch", "nodes"),
            (Method::GET, "/api/v1/namespaces/a", "get", "namespaces"),
            (Method::PATCH, "/api/v1/namespaces/a/configmaps/b?force=true", "patch", "configmaps"),
            (Method::PATCH, "/apis/reprise.dev/v1alpha1/ssdpools/p/status", "patch", "ssdpools/status"),
            (Method::PUT, "/apis/coordination.k8s.io/v1/namespaces/a/leases/l", "update", "leases"),
            (Method::POST, "/apis/events.k8s.io/v1/namespaces/a/events", "create", "events"),
            (Method::DELETE, "/apis/apps/v1/namespaces/a/daemonsets/d", "delete", "daemonsets"),
            (Method::GET, "/version", "get", OTHER),
        ] {
            let found = labels(&method, &path.parse().expect("a path"));
            assert_eq!((found.verb, found.resource.as_str()), (verb, resource), "{path}");
        }
    }

    /// A client whose requests are answered in this process.
    fn served(responses: Vec<CannedResponse>) -> (Api<ConfigMap>, ApiRequests, RequestLog) {
        let (service, log) = service(responses);
        let (client, requests) = with_layers(ClientBuilder::new(service, "default"));
        (Api::namespaced(client, "n"), requests, log)
    }

    fn count(requests: &ApiRequests, code: &str) -> u64 {
        let labels = RequestLabels { verb: "get", resource: "configmaps".to_owned(), code: code.to_owned() };
        requests.0.get_or_create(&labels).get()
    }

    #[tokio::test(start_paused = true)]
    async fn counts_rejected_requests_and_each_retry() {
        let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "m" } });
        let responses = vec![
            error_response(404, &json!([])),
            error_response(504, &json!([])),
            error_response(504, &json!([])),
            CannedResponse::Json(200, map),
        ];
        let (maps, requests, _) = served(responses);
        assert!(maps.get_opt("m").await.expect("an answer").is_none());
        assert!(maps.get_opt("m").await.expect("an answer").is_some());
        assert_eq!(["404", "504", "200", NONE].map(|code| count(&requests, code)), [1, 2, 1, 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_above_the_rate_limit_wait() {
        let (maps, _, log) = served(vec![error_response(404, &json!([]))]);
        let begun = Instant::now();
        let all = (0..=3 * REQUESTS_MAX).map(|_| maps.get_opt("m"));
        futures_util::future::try_join_all(all).await.expect("answers");
        assert!((RATE_WINDOW * 3..RATE_WINDOW * 4).contains(&begun.elapsed()), "{:?}", begun.elapsed());
        assert_eq!(log.methods().len() as u64, 3 * REQUESTS_MAX + 1);
    }
}
