//! Between the operator and the API server: counts requests, answers some of them wrong, and closes at a chosen write.
//!
//! ```text
//!            ┌─ count, look what is due ─┐
//! operator ──┤                           ├──► API server
//!            └─ fault, or hold for ever ─┘
//! ```
//!
//! What is closed passes nothing on any more, neither requests nor answers: to the API server it looks as if the operator had been killed there, so
//! a test has the time to do that. Requests that are held end with the connection of who was killed.
//!
//! Leases and events are no writes of objects: leases are renewed by the clock, and events are said after something was written. They are
//! passed on and disturbed like everything else, and not counted.
//!
//! It speaks plain HTTP to the operator, and TLS as who may do everything to the API server. Watches pass through piece by piece.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::response::Response;
use futures_util::{StreamExt, stream};
use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use kube::Client;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::kubernetes::ApiServer;

/// No object is larger.
const BODY_MAX: usize = 8 << 20;

/// What happens to a request instead of what should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing is done, and the answer is 409, as when somebody else has written at the same moment.
    Conflict,
    /// It is done, and the answer is 504: the API server's own words when it takes too long.
    TimedOut,
    /// It is done, and the connection ends without an answer.
    Unanswered,
    /// Nothing is done, and the connection ends.
    Cut,
}

/// Where it closes, counted in writes of objects since it was opened, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The write is not done.
    Before(u64),
    /// It is done, and nobody hears of it.
    After(u64),
}

/// Faults that a seed decides, each for the n-th request of one method and path. So they do not depend on the order in which an operator asks for
/// different objects.
#[derive(Debug)]
struct Weather {
    seed: u64,
    percent: u32,
    /// Requests so far, by method and path.
    requests: HashMap<(String, String), u64>,
}

impl Weather {
    fn fault(&mut self, method: &Method, path: &str) -> Option<Fault> {
        let request = (method.to_string(), path.to_owned());
        let count = self.requests.entry(request.clone()).or_default();
        *count += 1;
        let mut hasher = DefaultHasher::new();
        (self.seed, request, *count).hash(&mut hasher);
        let mut random = StdRng::seed_from_u64(hasher.finish());
        if !random.random_ratio(self.percent, 100) {
            return None;
        }
        // The API server never answers 409 to a read.
        let faults = [Fault::TimedOut, Fault::Unanswered, Fault::Cut, Fault::Conflict];
        let choices = if is_write(method) { faults.len() } else { faults.len() - 1 };
        Some(faults[random.random_range(0..choices)])
    }
}

fn is_write(method: &Method) -> bool {
    method != Method::GET && method != Method::HEAD
}

#[derive(Debug, Default)]
struct Book {
    /// Requests by method.
    asked: BTreeMap<String, u64>,
    /// Requests that got a fault.
    faults: u64,
    writes: u64,
    last_write: Option<Instant>,
    moment: Option<Moment>,
    is_closed: bool,
    weather: Option<Weather>,
    /// Writes whose path has these words get this fault, so many times.
    due: Option<(String, Fault, u32)>,
    /// Objects that were applied or created, if they are kept.
    written: Option<Vec<Value>>,
}

#[derive(Debug, Default)]
struct Gate {
    book: Mutex<Book>,
    changed: Condvar,
    /// Watches whose path has these words say nothing.
    stalled: watch::Sender<Option<String>>,
}

/// What is done with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Course {
    /// It is passed on; if it is a write of an object, this is its number.
    Pass(Option<u64>),
    Fault(Fault),
    Hold,
}

#[derive(Clone)]
struct Shared {
    gate: Arc<Gate>,
    client: Client,
}

/// An interposer; dropped, it passes nothing on any more.
#[derive(Debug)]
pub struct Interposer {
    gate: Arc<Gate>,
    kubeconfig: PathBuf,
    _runtime: Runtime,
}

impl Interposer {
    /// One in front of a server, open and without faults, with its file in a folder.
    ///
    /// # Panics
    /// When there is no port.
    pub(crate) fn to(server: &ApiServer, folder: &Path) -> Interposer {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("threads can be started");
        let inside = runtime.enter();
        let client = Client::try_from(server.passing()).expect("its own certificates are valid");
        drop(inside);
        let gate = Arc::new(Gate::default());
        let shared = Shared { gate: Arc::clone(&gate), client };
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let address = listener.local_addr().expect("bound");
        let router = Router::new().fallback(answer).with_state(shared);
        runtime.spawn(async move { axum::serve(listener, router).await });
        let kubeconfig = folder.join(format!("interposer-{}.kubeconfig", address.port()));
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            // A program that is given no authority looks for those of the machine, even if it needs none.
            "clusters": [{ "name": "test", "cluster": {
                "server": format!("http://{address}"), "certificate-authority": server.certificate_authority(),
            } }],
            "users": [{ "name": "test", "user": {} }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        });
        // JSON is YAML.
        fs::write(&kubeconfig, config.to_string()).expect("one's own folder takes files");
        Interposer { gate, kubeconfig, _runtime: runtime }
    }

    /// The file by which programs are led here.
    pub(crate) fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Passes everything on, until it closes at a moment; counts writes from zero.
    pub fn open(&self, moment: Option<Moment>) {
        let mut book = self.gate.book();
        (book.writes, book.last_write, book.is_closed) = (0, None, false);
        book.moment = moment;
    }

    /// From now on so many of a hundred requests get a fault, which a seed decides; none after `None`.
    pub fn disturb(&self, weather: Option<(u64, u32)>) {
        self.gate.book().weather =
            weather.map(|(seed, percent)| Weather { seed, percent, requests: HashMap::new() });
    }

    /// The next writes whose path has these words get this fault, so many of them.
    pub fn fail_next(&self, words: &str, fault: Fault, times: u32) {
        self.gate.book().due = Some((words.to_owned(), fault, times));
    }

    /// From now on watches whose path has these words say nothing, and what they would have said comes after `None`.
    pub fn stall(&self, words: Option<&str>) {
        self.gate.stalled.send_replace(words.map(str::to_owned));
    }

    /// From now on objects are kept as they are asked to be made: applied or created.
    pub fn keep_written(&self) {
        self.gate.book().written.get_or_insert_default();
    }

    /// Those that were kept, in the order of the requests.
    pub fn written(&self) -> Vec<Value> {
        self.gate.book().written.clone().unwrap_or_default()
    }

    /// Whether everything that was to fail has.
    pub fn has_failed(&self) -> bool {
        self.gate.book().due.is_none()
    }

    /// Writes of objects since it was opened.
    pub fn writes(&self) -> u64 {
        self.gate.book().writes
    }

    /// How long ago the last write of an object was; none since it was opened: nothing.
    pub fn quiet_for(&self) -> Option<Duration> {
        self.gate.book().last_write.map(|last| last.elapsed())
    }

    /// Requests by method, since the beginning.
    pub fn asked(&self) -> BTreeMap<String, u64> {
        self.gate.book().asked.clone()
    }

    /// Faults, since the beginning.
    pub fn faults(&self) -> u64 {
        self.gate.book().faults
    }

    /// Waits until it has closed. False when it has not within that time.
    pub fn wait_closed(&self, within: Duration) -> bool {
        let book = self.gate.book();
        let waited = self.gate.changed.wait_timeout_while(book, within, |book| !book.is_closed);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_closed
    }
}

impl Gate {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request, and says what becomes of it.
    fn admit(&self, method: &Method, path: &str) -> Course {
        let mut book = self.book();
        *book.asked.entry(method.to_string()).or_default() += 1;
        let course = book.admit(method, path);
        if course == Course::Hold {
            self.changed.notify_all();
        }
        course
    }

    /// A request was done. Whether it may be answered.
    fn done(&self, write: Option<u64>) -> bool {
        let mut book = self.book();
        if write.is_some() {
            book.last_write = Some(Instant::now());
        }
        if let (Some(Moment::After(last)), Some(write)) = (book.moment, write)
            && write == last
        {
            book.is_closed = true;
            self.changed.notify_all();
        }
        !book.is_closed
    }
}

impl Book {
    fn admit(&mut self, method: &Method, path: &str) -> Course {
        if self.is_closed {
            return Course::Hold;
        }
        let is_of_object = is_write(method) && !path.contains("/leases") && !path.contains("/events");
        if is_of_object && self.moment == Some(Moment::Before(self.writes + 1)) {
            self.is_closed = true;
            return Course::Hold;
        }
        if let Some(fault) = self.fault(method, path) {
            self.faults += 1;
            return Course::Fault(fault);
        }
        if is_of_object {
            self.writes += 1;
            self.last_write = Some(Instant::now());
        }
        Course::Pass(is_of_object.then_some(self.writes))
    }

    /// Keeps what is to be made by a request, if it is kept: other patches are parts of objects.
    fn keep(&mut self, method: &Method, kind: Option<&HeaderValue>, body: &[u8]) {
        let Some(written) = &mut self.written else { return };
        let is_apply = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/apply-patch"));
        if method == Method::POST || is_apply {
            written.extend(serde_json::from_slice::<Value>(body));
        }
    }

    fn fault(&mut self, method: &Method, path: &str) -> Option<Fault> {
        if let Some((words, fault, times)) = &mut self.due
            && is_write(method)
            && path.contains(words.as_str())
        {
            let fault = *fault;
            *times -= 1;
            if *times == 0 {
                self.due = None;
            }
            return Some(fault);
        }
        self.weather.as_mut()?.fault(method, path)
    }
}

async fn answer(State(shared): State<Shared>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(body) = to_bytes(body, BODY_MAX).await else { return said(StatusCode::PAYLOAD_TOO_LARGE, "") };
    let course = shared.gate.admit(&parts.method, parts.uri.path());
    if let Course::Pass(Some(_)) = course {
        shared.gate.book().keep(&parts.method, parts.headers.get(CONTENT_TYPE), &body);
    }
    let pass_on = pass_on(&shared, &parts.method, &parts.uri, &parts.headers, body.to_vec());
    match course {
        Course::Pass(write) => {
            let answered = pass_on.await;
            if shared.gate.done(write) { answered } else { held().await }
        }
        Course::Fault(Fault::Conflict) => said(StatusCode::CONFLICT, "Conflict"),
        Course::Fault(Fault::Cut) => cut(),
        Course::Fault(Fault::Unanswered) => {
            drop(pass_on.await);
            cut()
        }
        Course::Fault(Fault::TimedOut) => {
            drop(pass_on.await);
            said(StatusCode::GATEWAY_TIMEOUT, "Timeout")
        }
        Course::Hold => held().await,
    }
}

/// Until the connection ends, and this with it.
async fn held() -> Response {
    std::future::pending().await
}

async fn pass_on(
    shared: &Shared,
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
    body: Vec<u8>,
) -> Response {
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let mut request = http::Request::builder().method(method).uri(path);
    for name in [ACCEPT, CONTENT_TYPE] {
        if let Some(value) = headers.get(&name) {
            request = request.header(name, value);
        }
    }
    let request = request.body(kube::client::Body::from(body)).expect("made of one that was read");
    // A server that is away cuts the connection.
    let Ok(answered) = shared.client.send(request).await else { return cut() };
    let mut response = Response::builder().status(answered.status());
    if let Some(kind) = answered.headers().get(CONTENT_TYPE) {
        response = response.header(CONTENT_TYPE, kind);
    }
    let body = Body::new(answered.into_body());
    let is_watch = uri.query().is_some_and(|query| query.contains("watch=true"));
    let body = if is_watch { stallable(body, uri.path().to_owned(), shared) } else { body };
    response.body(body).expect("made of one that was read")
}

/// What a watch says, unless it is stalled.
fn stallable(body: Body, path: String, shared: &Shared) -> Body {
    let stalled = shared.gate.stalled.subscribe();
    let pieces = body.into_data_stream().then(move |piece| {
        let (mut stalled, path) = (stalled.clone(), path.clone());
        async move {
            let passes = |words: &Option<String>| !words.as_ref().is_some_and(|words| path.contains(words));
            // Fails when the interposer ends, and its connections with it.
            drop(stalled.wait_for(passes).await);
            piece
        }
    });
    Body::from_stream(pieces)
}

/// An answer that breaks off.
fn cut() -> Response {
    let broken = stream::once(async { Err::<Vec<u8>, _>(std::io::Error::other("cut by a test")) });
    Response::new(Body::from_stream(broken))
}

/// What the API server says when it does not do something.
fn said(code: StatusCode, reason: &str) -> Response {
    let status = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code.as_u16(), "reason": reason,
        "message": "as the test says",
    });
    let response = Response::builder().status(code).header(CONTENT_TYPE, "application/json");
    response.body(Body::from(status.to_string())).expect("a code and a text")
}

#[cfg(test)]
mod tests {
    use super::*;

    const OBJECT: &str = "/api/v1/namespaces/n/configmaps/c";
    const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/n/leases/l";

    #[test]
    fn it_closes_at_the_write_that_was_chosen_and_holds_what_follows() {
        let gate = Gate::default();
        gate.book().moment = Some(Moment::After(2));
        assert_eq!(gate.admit(&Method::PATCH, OBJECT), Course::Pass(Some(1)));
        assert!(gate.done(Some(1)));
        assert_eq!(gate.admit(&Method::PUT, LEASE), Course::Pass(None), "leases are not counted");
        assert_eq!(gate.admit(&Method::GET, OBJECT), Course::Pass(None));
        assert_eq!(gate.admit(&Method::DELETE, OBJECT), Course::Pass(Some(2)));
        assert!(!gate.done(Some(2)));
        assert_eq!(gate.admit(&Method::GET, OBJECT), Course::Hold);
        let gate = Gate::default();
        gate.book().moment = Some(Moment::Before(1));
        assert_eq!(gate.admit(&Method::POST, OBJECT), Course::Hold);
        assert_eq!(gate.book().writes, 0);
    }

    #[test]
    fn faults_that_are_due_come_so_often_and_only_to_writes_of_that_path() {
        let gate = Gate::default();
        gate.book().due = Some(("/leases/".to_owned(), Fault::Conflict, 1));
        assert_eq!(gate.admit(&Method::GET, LEASE), Course::Pass(None));
        assert_eq!(gate.admit(&Method::PUT, OBJECT), Course::Pass(Some(1)));
        assert_eq!(gate.admit(&Method::PUT, LEASE), Course::Fault(Fault::Conflict));
        assert_eq!(gate.admit(&Method::PUT, LEASE), Course::Pass(None));
        assert_eq!(gate.book().faults, 1);
    }

    #[test]
    fn a_seed_decides_the_fault_of_each_request_whatever_is_asked_for_in_between() {
        let faults = |seed: u64, others: usize| -> Vec<Option<Fault>> {
            let mut weather = Weather { seed, percent: 30, requests: HashMap::new() };
            let mut ask = |number: usize| {
                for _ in 0..others {
                    let _ = weather.fault(&Method::PATCH, &format!("{LEASE}{number}"));
                }
                weather.fault(&Method::PATCH, OBJECT)
            };
            (0..100).map(&mut ask).collect()
        };
        assert_eq!(faults(1, 0), faults(1, 3));
        assert_ne!(faults(1, 0), faults(2, 0));
        let count = faults(1, 0).into_iter().flatten().count();
        assert!((15..45).contains(&count), "{count} of 100");
    }
}
