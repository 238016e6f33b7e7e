//! Counts what is asked of the API server, done or refused, and keeps it below a rate. [`crate::metrics::Write`] counts what was done.
//!
//! ```text
//! Client ──► tries again (429, 503, 504) ──► waits for its turn ──► counts ──► rights, TLS, the API server
//! ```
//!
//! Each try counts, also one that the client makes by itself: the API server has the work of all. A watch counts once, when it begins; what it says
//! later is no request. What nobody answers counts when it is given up.
//!
//! The rate is for storms: a thousand nodes that come at once, or that a watch tells anew. Without it nothing but the API server's own speed bounds
//! what it has to do for us, since 48 reconciles may run at once. In rest nobody waits.
//!
//! Labels are bounded: verbs and codes by HTTP and Kubernetes, resources by what this program asks for; no name of an object is among them.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::{Method, Request, Response, StatusCode, Uri};
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

/// Requests that wait until one may be sent: as many as kube's own client takes.
const WAITING_MAX: usize = 1024;

/// Requests of [`TURN`], at the most: 500 a second. Kubernetes' own controllers have 20 to 100 a second each, by flags; this is one program for all that
/// is ours. Those that run at once are 48, so none waits for longer than one turn, and the lease is not late. With 20 a turn reconciles of a thousand nodes
/// that came waited for each other: p99 of pools was twice as long.
const REQUESTS_MAX: u64 = 50;
const TURN: Duration = Duration::from_millis(100);

/// The code of what nobody answered.
const NONE: &str = "none";
/// The resource of a path that names none.
const OTHER: &str = "other";

/// Labels of requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    /// As rights call it: `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, or `other`.
    pub verb: &'static str,
    /// The plural, with the subresource if there is one.
    pub resource: String,
    /// HTTP's code of the answer, or `none`.
    pub code: String,
}

/// Requests so far.
#[derive(Clone, Debug, Default)]
pub struct ApiRequests(pub(crate) Family<RequestLabels, Counter>);

/// A client whose requests are counted, and bounded.
///
/// # Errors
/// The address or the certificates cannot be used.
pub fn client(mut config: Config) -> kube::Result<(Client, ApiRequests)> {
    let requests = ApiRequests::default();
    // Kube's own would hide the tries from who counts outside of it; the same is put around the counting.
    let tries_again = std::mem::replace(&mut config.default_retry, false);
    let counts = layer_fn(|service| Counting { service, requests: requests.clone() });
    let builder = ClientBuilder::try_from(config)?.with_layer(&counts);
    let turns = RateLimitLayer::new(REQUESTS_MAX, TURN);
    let builder = builder.with_layer(&turns).with_layer(&BufferLayer::new(WAITING_MAX));
    let client = if tries_again {
        builder.with_layer(&RetryLayer::new(RetryPolicy::server_retry())).build()
    } else {
        builder.build()
    };
    Ok((client, requests))
}

/// A service that counts.
struct Counting<S> {
    service: S,
    requests: ApiRequests,
}

/// A request that is under way; dropped, it is counted.
struct Asked {
    requests: ApiRequests,
    labels: RequestLabels,
}

impl Asked {
    fn is_answered(&mut self, code: StatusCode) {
        self.labels.code = code.as_u16().to_string();
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.requests.0.get_or_create(&self.labels).inc();
    }
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
        let labels = labels(request.method(), request.uri());
        let mut asked = Asked { requests: self.requests.clone(), labels };
        let answer = self.service.call(request);
        Box::pin(async move {
            let answered = answer.await;
            if let Ok(response) = &answered {
                asked.is_answered(response.status());
            }
            answered
        })
    }
}

/// Labels of a request that nobody has answered yet.
fn labels(method: &Method, uri: &Uri) -> RequestLabels {
    let path: Vec<&str> = uri.path().split('/').filter(|part| !part.is_empty()).collect();
    let rest = match path.as_slice() {
        ["api", _, rest @ ..] | ["apis", _, _, rest @ ..] => rest,
        _ => &[],
    };
    // A namespace is an object itself, and the place of others.
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

    use super::*;
    use crate::scripted::{Answer, refusal, script};

    #[test]
    fn a_request_is_counted_by_what_rights_call_it_without_names_of_objects() {
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

    #[tokio::test]
    async fn refused_requests_count_and_those_that_are_tried_again_count_each_time() {
        let taken =
            Answer::Is(200, json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "m" } }));
        let answers =
            vec![refusal(404, &json!([])), refusal(504, &json!([])), refusal(504, &json!([])), taken];
        let (mut config, _script) = script(answers).await;
        config.default_retry = true;
        let (client, requests) = client(config).expect("it needs no certificates");
        let maps: Api<ConfigMap> = Api::namespaced(client, "n");
        assert!(maps.get_opt("m").await.expect("it answers").is_none());
        assert!(maps.get_opt("m").await.expect("it answers").is_some());
        let count = |code: &str| {
            let labels =
                RequestLabels { verb: "get", resource: "configmaps".to_owned(), code: code.to_owned() };
            requests.0.get_or_create(&labels).get()
        };
        assert_eq!(["404", "504", "200", NONE].map(count), [1, 2, 1, 0]);
    }

    #[tokio::test]
    async fn more_than_the_rate_waits_for_its_turn() {
        let (config, script) = script(vec![refusal(404, &json!([]))]).await;
        let (client, _) = client(config).expect("it needs no certificates");
        let maps: Api<ConfigMap> = Api::namespaced(client, "n");
        let begun = std::time::Instant::now();
        let all = (0..=3 * REQUESTS_MAX).map(|_| maps.get_opt("m"));
        futures_util::future::try_join_all(all).await.expect("it answers");
        assert!(begun.elapsed() >= TURN * 3, "{:?}", begun.elapsed());
        assert_eq!(script.methods().len() as u64, 3 * REQUESTS_MAX + 1);
    }

    #[tokio::test]
    async fn what_is_given_up_counts_as_not_answered() {
        let (config, _script) = script(vec![Answer::Never]).await;
        let (client, requests) = client(config).expect("it needs no certificates");
        let maps: Api<ConfigMap> = Api::namespaced(client, "n");
        let within = Duration::from_millis(100);
        tokio::time::timeout(within, maps.get_opt("m")).await.expect_err("nobody answers");
        let labels = RequestLabels { verb: "get", resource: "configmaps".to_owned(), code: NONE.to_owned() };
        // The buffer drops it in its own time.
        while requests.0.get_or_create(&labels).get() == 0 {
            tokio::task::yield_now().await;
        }
    }
}
