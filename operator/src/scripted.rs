//! An API server of tests: answers each request with the next of its lines, and remembers what it was asked.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::context::Context;
use crate::requests::ApiRequests;
use crate::settings::{DefaultImages, Settings};
use crate::watch::Triggers;
use crate::world::World;

/// One answer.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    /// A code and an object.
    Is(u16, Value),
    /// None at all: the connection stays open.
    Never,
}

/// A request: method, path and body.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Asked {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) body: Value,
}

/// What it was asked so far.
#[derive(Clone, Default)]
pub(crate) struct Script(Arc<Mutex<Vec<Asked>>>);

impl Script {
    /// All requests.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Methods of all requests, in order.
    pub(crate) fn methods(&self) -> Vec<String> {
        self.asked().into_iter().map(|asked| asked.method).collect()
    }
}

/// An object as the API server refuses it.
pub(crate) fn refusal(code: u16, causes: &Value) -> Answer {
    let (reason, details) = (if code == 404 { "NotFound" } else { "Conflict" }, json!({ "causes": causes }));
    let body = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": "refused",
        "details": details,
    });
    Answer::Is(code, body)
}

/// A client of a server that answers so, request by request; the last answer is given for ever.
pub(crate) async fn serve(answers: Vec<Answer>) -> (Client, Script) {
    let (config, script) = script(answers).await;
    (Client::try_from(config).expect("it needs no certificates"), script)
}

/// What such a client is made of.
pub(crate) async fn script(answers: Vec<Answer>) -> (Config, Script) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let script = Script::default();
    let of_server = script.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(converse(stream, of_server.clone(), answers.clone()));
        }
    });
    let mut config = Config::new(url.parse().expect("an address"));
    config.default_retry = false;
    // Nothing here is encrypted; without any the machine's own would be looked for.
    config.root_cert = Some(Vec::new());
    (config, script)
}

/// What reconciles are given, with a server that knows of nothing.
pub(crate) async fn context() -> Arc<Context> {
    let (client, _) = serve(vec![refusal(404, &json!([]))]).await;
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
    Arc::new(Context::new(counted, Arc::new(World::new().0), Arc::new(triggers), settings))
}

/// Serves a connection until its end.
async fn converse(stream: TcpStream, script: Script, answers: Vec<Answer>) {
    let mut stream = BufReader::new(stream);
    while let Some(asked) = read(&mut stream).await {
        let index = {
            let mut all = script.0.lock().unwrap_or_else(PoisonError::into_inner);
            all.push(asked);
            all.len() - 1
        };
        let Some(Answer::Is(code, body)) = answers.get(index).or(answers.last()) else {
            return std::future::pending().await;
        };
        let body = body.to_string();
        let head = format!(
            "HTTP/1.1 {code} Said\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        if stream.get_mut().write_all((head + &body).as_bytes()).await.is_err() {
            return;
        }
    }
}

/// A request; none at the end.
async fn read(stream: &mut BufReader<TcpStream>) -> Option<Asked> {
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
    Some(Asked { method, path, body: serde_json::from_slice(&body).unwrap_or_default() })
}
