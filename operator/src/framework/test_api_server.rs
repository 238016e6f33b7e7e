//! An API server for tests, in the process of the test. It answers requests with canned responses in order, and
//! records the requests.

use std::sync::{Arc, Mutex, PoisonError};

use axum::http::{Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tower::{BoxError, Service};

/// Response to one request.
#[derive(Clone, Debug)]
pub(crate) enum CannedResponse {
    Json(u16, Value),
    Hang,
}

/// A request that the server received.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RecordedRequest {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) body: Value,
}

/// All requests that the server has received so far.
#[derive(Clone, Default)]
pub(crate) struct RequestLog(Arc<Mutex<Vec<RecordedRequest>>>);

impl RequestLog {
    /// Returns all requests, in order.
    pub(crate) fn requests(&self) -> Vec<RecordedRequest> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the methods of all requests, in order.
    pub(crate) fn methods(&self) -> Vec<String> {
        self.requests().into_iter().map(|request| request.method).collect()
    }
}

/// A `Status` object, as the API server returns for rejected requests.
pub(crate) fn error_response(code: u16, causes: &Value) -> CannedResponse {
    let (reason, details) = (if code == 404 { "NotFound" } else { "Conflict" }, json!({ "causes": causes }));
    let body = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": "refused",
        "details": details,
    });
    CannedResponse::Json(code, body)
}

/// Returns a client whose requests are answered in this process, so that tests can pause the clock. After the last
/// response, that response is repeated. Requires a tokio runtime.
pub(crate) fn serve(responses: Vec<CannedResponse>) -> (Client, RequestLog) {
    let (service, log) = service(responses);
    (Client::new(service, "default"), log)
}

/// Returns the service below a client.
pub(crate) fn service(
    responses: Vec<CannedResponse>,
) -> (
    impl Service<Request<Body>, Response = Response<Body>, Error = BoxError, Future: Send> + Send + 'static,
    RequestLog,
) {
    let log = RequestLog::default();
    let shared = Arc::new((log.clone(), responses));
    (tower::service_fn(move |request| answer(request, Arc::clone(&shared))), log)
}

/// Records a request and returns its response.
async fn answer(
    request: Request<Body>,
    shared: Arc<(RequestLog, Vec<CannedResponse>)>,
) -> Result<Response<Body>, BoxError> {
    let (log, responses) = &*shared;
    let (head, body) = request.into_parts();
    let body = serde_json::from_slice(&body.collect_bytes().await?).unwrap_or_default();
    let request = RecordedRequest { method: head.method.to_string(), path: head.uri.to_string(), body };
    let number = {
        let mut all = log.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(request);
        all.len() - 1
    };
    match responses.get(number).or(responses.last()) {
        Some(CannedResponse::Json(code, body)) => {
            let response = Response::builder().status(*code).header("content-type", "application/json");
            Ok(response.body(Body::from(body.to_string().into_bytes()))?)
        }
        Some(CannedResponse::Hang) | None => std::future::pending().await,
    }
}
