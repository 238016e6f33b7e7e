//! An API server for tests. It answers requests with canned responses in order, and
//! records the requests.

use std::sync::{Arc, Mutex, PoisonError};

use axum::http::{Request, Response};
use kube::client::Body;
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// Response to one request.
#[derive(Clone, Debug)]
pub(crate) enum CannedResponse {
    /// A status code and a JSON body.
    Json(u16, Value),
    /// No response; the connection stays open.
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

    /// Records a request. Returns the code and body of its response; `None` for a request without one.
    fn record(&self, request: RecordedRequest, responses: &[CannedResponse]) -> Option<(u16, String)> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(request);
        match responses.get(all.len() - 1).or(responses.last())? {
            CannedResponse::Json(code, body) => Some((*code, body.to_string())),
            CannedResponse::Hang => None,
        }
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
    let log = RequestLog::default();
    let (of_service, responses) = (log.clone(), Arc::new(responses));
    let service =
        tower::service_fn(move |request| answer(request, of_service.clone(), Arc::clone(&responses)));
    (Client::new(service, "default"), log)
}

/// Records a request and returns its response.
async fn answer(
    request: Request<Body>,
    log: RequestLog,
    responses: Arc<Vec<CannedResponse>>,
) -> Result<Response<Body>, kube::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect_bytes().await?;
    let (method, path) = (head.method.to_string(), head.uri.to_string());
    let body = serde_json::from_slice(&body).unwrap_or_default();
    match log.record(RecordedRequest { method, path, body }, &responses) {
        Some((code, body)) => {
            let response = Response::builder().status(code).header("content-type", "application/json");
            response.body(Body::from(body.into_bytes())).map_err(kube::Error::HttpError)
        }
        None => std::future::pending().await,
    }
}

/// Starts a server and returns the configuration of a client for it.
pub(crate) async fn serve_config(responses: Vec<CannedResponse>) -> (Config, RequestLog) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let log = RequestLog::default();
    let of_server = log.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(handle(stream, of_server.clone(), responses.clone()));
        }
    });
    let mut config = Config::new(url.parse().expect("an address"));
    config.default_retry = false;
    // An empty list: without one the client would load the certificates of this machine.
    config.root_cert = Some(Vec::new());
    (config, log)
}

/// Serves one connection until it is closed.
async fn handle(stream: TcpStream, log: RequestLog, responses: Vec<CannedResponse>) {
    let mut stream = BufReader::new(stream);
    while let Some(request) = read(&mut stream).await {
        let Some((code, body)) = log.record(request, &responses) else { return std::future::pending().await };
        let head = format!(
            "HTTP/1.1 {code} Canned\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        if stream.get_mut().write_all((head + &body).as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Reads a request. Returns `None` at the end of the connection.
async fn read(stream: &mut BufReader<TcpStream>) -> Option<RecordedRequest> {
    let mut line = String::new();
    stream.read_line(&mut line).await.ok()?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (method, path) = (words.next()?, words.next()?);
    let mut length = 0;
    loop {
        let mut header = String::new();
        stream.read_line(&mut header).await.ok()?;
        match header.trim().to_ascii_lowercase().split_once(':') {
            Some(("content-length", value)) => length = value.trim().parse().ok()?,
            Some(_) => {}
            None => break,
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.ok()?;
    Some(RecordedRequest { method, path, body: serde_json::from_slice(&body).unwrap_or_default() })
}
