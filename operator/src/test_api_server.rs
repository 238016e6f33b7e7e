//! An API server for tests. It answers requests with canned responses in order, and
//! records the requests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::api_client::ApiRequests;
use crate::context::Context;
use crate::settings::{DefaultImages, Settings};
use crate::stores::Stores;
use crate::watch::Triggers;

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

/// Starts a server and returns a client for it. After the last response, that response is repeated.
pub(crate) async fn serve(responses: Vec<CannedResponse>) -> (Client, RequestLog) {
    let (config, log) = serve_config(responses).await;
    (Client::try_from(config).expect("needs no certificates"), log)
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

/// A context whose API server answers every request with 404.
pub(crate) async fn context() -> Arc<Context> {
    let (client, _) = serve(vec![error_response(404, &json!([]))]).await;
    let settings = Settings {
        images: DefaultImages { agent: "a".to_owned(), control_plane: "c".to_owned(), etcd: "e".to_owned() },
        identity: "operator-0".to_owned(),
        namespace: "reprise-system".to_owned(),
        service_account: None,
        admin: ([127, 0, 0, 1], 0).into(),
        control_planes: BTreeMap::new(),
        unused_for: Duration::from_secs(60),
    };
    let (triggers, _) = Triggers::new();
    let counted = (client, ApiRequests::default());
    Arc::new(Context::new(counted, Arc::new(Stores::new().0), Arc::new(triggers), settings))
}

/// Serves one connection until it is closed.
async fn handle(stream: TcpStream, log: RequestLog, responses: Vec<CannedResponse>) {
    let mut stream = BufReader::new(stream);
    while let Some(request) = read(&mut stream).await {
        let index = {
            let mut all = log.0.lock().unwrap_or_else(PoisonError::into_inner);
            all.push(request);
            all.len() - 1
        };
        let Some(CannedResponse::Json(code, body)) = responses.get(index).or(responses.last()) else {
            return std::future::pending().await;
        };
        let body = body.to_string();
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
