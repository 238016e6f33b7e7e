//! A proxy between the operator and the API server: counts requests, injects faults, and closes at a chosen
//! write.
//!
//! ```text
//!            ┌─ count, choose the action ─┐
//! operator ──┤                            ├──► API server
//!            └─ fault, or hold forever ───┘
//! ```
//!
//! A closed proxy passes neither requests nor responses. To the API server, a closed proxy looks like an
//! operator that was killed. The test then has time to kill the operator. Held requests end with the killed
//! client's connection.
//!
//! Leases and events do not count as writes: leases are renewed on a timer, and events follow other writes.
//! They are passed on and get faults like all other requests.
//!
//! The operator connects by plain HTTP. The proxy connects to the API server by TLS as an administrator.
//! Watches are streamed.

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

/// Maximum bytes of a request's body.
const BODY_MAX: usize = 8 << 20;

/// A fault that a request gets instead of the normal response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request is not performed; the response is 409, as after a concurrent modification.
    Conflict,
    /// The request is performed; the response is 504, as from an API server that timed out.
    TimedOut,
    /// The request is performed; the connection ends without a response.
    Unanswered,
    /// The request is not performed; the connection ends.
    Cut,
}

/// The write at which the proxy closes, counted from 1 after [`FaultProxy::open`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashPoint {
    /// The write is not performed.
    Before(u64),
    /// The write is performed, but gets no response.
    After(u64),
}

/// Faults that a seed determines, each for the n-th request of one method and path. The faults of one object
/// therefore do not depend on the order of requests for different objects.
#[derive(Debug)]
struct RandomFaults {
    seed: u64,
    percent: u32,
    /// Requests so far, by method and path.
    requests: HashMap<(String, String), u64>,
}

impl RandomFaults {
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
        // The API server never responds 409 to a read.
        let faults = [Fault::TimedOut, Fault::Unanswered, Fault::Cut, Fault::Conflict];
        let choices = if is_write(method) { faults.len() } else { faults.len() - 1 };
        Some(faults[random.random_range(0..choices)])
    }
}

fn is_write(method: &Method) -> bool {
    method != Method::GET && method != Method::HEAD
}

/// Counts of requests, and the faults to inject.
#[derive(Debug, Default)]
struct ProxyControl {
    /// Number of requests by method.
    by_method: BTreeMap<String, u64>,
    /// Number of requests that got a fault.
    faults: u64,
    writes: u64,
    last_write: Option<Instant>,
    crash_point: Option<CrashPoint>,
    is_closed: bool,
    random_faults: Option<RandomFaults>,
    /// The next writes whose path contains the text get this fault: text, fault, remaining number.
    pending_faults: Option<(String, Fault, u32)>,
    /// Objects that were applied or created; `None` unless they are recorded.
    written: Option<Vec<Value>>,
}

#[derive(Debug, Default)]
struct ProxyState {
    control: Mutex<ProxyControl>,
    changed: Condvar,
    /// Part of a path. Watches of matching paths are held.
    stalled_path: watch::Sender<Option<String>>,
}

/// What the proxy does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// Passes the request on. `Some(n)`: the n-th write of an object.
    Pass(Option<u64>),
    Fault(Fault),
    Hold,
}

#[derive(Clone)]
struct Shared {
    state: Arc<ProxyState>,
    client: Client,
}

/// A proxy with fault injection. It stops when it is dropped.
#[derive(Debug)]
pub struct FaultProxy {
    state: Arc<ProxyState>,
    kubeconfig: PathBuf,
    _runtime: Runtime,
}

impl FaultProxy {
    /// Starts an open proxy without faults in front of a server, with its kubeconfig in a folder.
    ///
    /// # Panics
    /// If no port is free.
    pub(crate) fn start(server: &ApiServer, folder: &Path) -> FaultProxy {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("threads can be started");
        let entered = runtime.enter();
        let client = Client::try_from(server.proxy_config()).expect("its own certificates are valid");
        drop(entered);
        let state = Arc::new(ProxyState::default());
        let shared = Shared { state: Arc::clone(&state), client };
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let address = listener.local_addr().expect("bound");
        let router = Router::new().fallback(handle).with_state(shared);
        runtime.spawn(async move { axum::serve(listener, router).await });
        let kubeconfig = folder.join(format!("proxy-{}.kubeconfig", address.port()));
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            // Without an authority here, clients load the machine's authorities, even for plain HTTP.
            "clusters": [{ "name": "test", "cluster": {
                "server": format!("http://{address}"), "certificate-authority": server.certificate_authority(),
            } }],
            "users": [{ "name": "test", "user": {} }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        });
        // JSON is YAML.
        fs::write(&kubeconfig, config.to_string()).expect("the test's folder is writable");
        FaultProxy { state, kubeconfig, _runtime: runtime }
    }

    /// Returns the path of a kubeconfig for this proxy.
    pub(crate) fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// Passes everything on until the crash point; resets the write counter.
    pub fn open(&self, crash_point: Option<CrashPoint>) {
        let mut control = self.state.control();
        (control.writes, control.last_write, control.is_closed) = (0, None, false);
        control.crash_point = crash_point;
    }

    /// From now on, `percent` of 100 requests get a fault that the seed determines; `None` ends the faults.
    pub fn set_random_faults(&self, faults: Option<(u64, u32)>) {
        self.state.control().random_faults =
            faults.map(|(seed, percent)| RandomFaults { seed, percent, requests: HashMap::new() });
    }

    /// The next `times` writes whose path contains `path_part` get this fault.
    pub fn fail_next(&self, path_part: &str, fault: Fault, times: u32) {
        self.state.control().pending_faults = Some((path_part.to_owned(), fault, times));
    }

    /// Holds the data of watches whose path contains `path_part`; `None` sends the held data.
    pub fn stall_watches(&self, path_part: Option<&str>) {
        self.state.stalled_path.send_replace(path_part.map(str::to_owned));
    }

    /// Records all objects that are applied or created from now on.
    pub fn record_writes(&self) {
        self.state.control().written.get_or_insert_default();
    }

    /// Returns the recorded objects in the order of the requests.
    pub fn recorded_writes(&self) -> Vec<Value> {
        self.state.control().written.clone().unwrap_or_default()
    }

    /// Returns whether all faults of [`FaultProxy::fail_next`] were injected.
    pub fn has_injected_all(&self) -> bool {
        self.state.control().pending_faults.is_none()
    }

    /// Returns the number of writes of objects since the proxy was opened.
    pub fn writes(&self) -> u64 {
        self.state.control().writes
    }

    /// Returns the time since the last write of an object; `None` without writes since the proxy was opened.
    pub fn time_since_last_write(&self) -> Option<Duration> {
        self.state.control().last_write.map(|last| last.elapsed())
    }

    /// Returns the number of requests by method, since the proxy was created.
    pub fn requests_by_method(&self) -> BTreeMap<String, u64> {
        self.state.control().by_method.clone()
    }

    /// Returns the number of injected faults, since the proxy was created.
    pub fn faults(&self) -> u64 {
        self.state.control().faults
    }

    /// Waits until the proxy has closed. Returns `false` if it has not within the bound.
    pub fn wait_closed(&self, within: Duration) -> bool {
        let control = self.state.control();
        let waited = self.state.changed.wait_timeout_while(control, within, |control| !control.is_closed);
        waited.unwrap_or_else(PoisonError::into_inner).0.is_closed
    }
}

impl ProxyState {
    fn control(&self) -> MutexGuard<'_, ProxyControl> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request and returns the action for it.
    fn admit(&self, method: &Method, path: &str) -> Action {
        let mut control = self.control();
        *control.by_method.entry(method.to_string()).or_default() += 1;
        let action = control.admit(method, path);
        if action == Action::Hold {
            self.changed.notify_all();
        }
        action
    }

    /// Records that a request was performed. Returns whether the client may get the response.
    fn record_performed(&self, write: Option<u64>) -> bool {
        let mut control = self.control();
        if write.is_some() {
            control.last_write = Some(Instant::now());
        }
        if let (Some(CrashPoint::After(last)), Some(write)) = (control.crash_point, write)
            && write == last
        {
            control.is_closed = true;
            self.changed.notify_all();
        }
        !control.is_closed
    }
}

impl ProxyControl {
    fn admit(&mut self, method: &Method, path: &str) -> Action {
        if self.is_closed {
            return Action::Hold;
        }
        let is_of_object = is_write(method) && !path.contains("/leases") && !path.contains("/events");
        if is_of_object && self.crash_point == Some(CrashPoint::Before(self.writes + 1)) {
            self.is_closed = true;
            return Action::Hold;
        }
        if let Some(fault) = self.fault(method, path) {
            self.faults += 1;
            return Action::Fault(fault);
        }
        if is_of_object {
            self.writes += 1;
            self.last_write = Some(Instant::now());
        }
        Action::Pass(is_of_object.then_some(self.writes))
    }

    /// Records the object of a create or an apply, if recording is on. Other patches contain only parts of
    /// objects.
    fn record(&mut self, method: &Method, kind: Option<&HeaderValue>, body: &[u8]) {
        let Some(written) = &mut self.written else { return };
        let is_apply = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/apply-patch"));
        if method == Method::POST || is_apply {
            written.extend(serde_json::from_slice::<Value>(body));
        }
    }

    fn fault(&mut self, method: &Method, path: &str) -> Option<Fault> {
        if let Some((path_part, fault, times)) = &mut self.pending_faults
            && is_write(method)
            && path.contains(path_part.as_str())
        {
            let fault = *fault;
            *times -= 1;
            if *times == 0 {
                self.pending_faults = None;
            }
            return Some(fault);
        }
        self.random_faults.as_mut()?.fault(method, path)
    }
}

async fn handle(State(shared): State<Shared>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(body) = to_bytes(body, BODY_MAX).await else { return failure(StatusCode::PAYLOAD_TOO_LARGE, "") };
    let action = shared.state.admit(&parts.method, parts.uri.path());
    if let Action::Pass(Some(_)) = action {
        shared.state.control().record(&parts.method, parts.headers.get(CONTENT_TYPE), &body);
    }
    let pass_on = pass_on(&shared, &parts.method, &parts.uri, &parts.headers, body.to_vec());
    match action {
        Action::Pass(write) => {
            let response = pass_on.await;
            if shared.state.record_performed(write) { response } else { pending_response().await }
        }
        Action::Fault(Fault::Conflict) => failure(StatusCode::CONFLICT, "Conflict"),
        Action::Fault(Fault::Cut) => cut(),
        Action::Fault(Fault::Unanswered) => {
            drop(pass_on.await);
            cut()
        }
        Action::Fault(Fault::TimedOut) => {
            drop(pass_on.await);
            failure(StatusCode::GATEWAY_TIMEOUT, "Timeout")
        }
        Action::Hold => pending_response().await,
    }
}

/// Waits forever: the future is dropped when the client's connection ends.
async fn pending_response() -> Response {
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
    let request = request.body(kube::client::Body::from(body)).expect("copied from a valid request");
    // Without a server, the client sees a broken connection.
    let Ok(answered) = shared.client.send(request).await else { return cut() };
    let mut response = Response::builder().status(answered.status());
    if let Some(kind) = answered.headers().get(CONTENT_TYPE) {
        response = response.header(CONTENT_TYPE, kind);
    }
    let body = Body::new(answered.into_body());
    let is_watch = uri.query().is_some_and(|query| query.contains("watch=true"));
    let body = if is_watch { stallable(body, uri.path().to_owned(), shared) } else { body };
    response.body(body).expect("copied from a valid response")
}

/// Streams the data of a watch, and holds it while the watch is stalled.
fn stallable(body: Body, path: String, shared: &Shared) -> Body {
    let stalled = shared.state.stalled_path.subscribe();
    let pieces = body.into_data_stream().then(move |piece| {
        let (mut stalled, path) = (stalled.clone(), path.clone());
        async move {
            let passes = |part: &Option<String>| !part.as_ref().is_some_and(|part| path.contains(part));
            // An error means that the proxy was dropped; its connections end too.
            drop(stalled.wait_for(passes).await);
            piece
        }
    });
    Body::from_stream(pieces)
}

/// Returns a response that ends the connection: its body fails at the first read. The server reads the body
/// before it sends the head, so the client gets no response.
fn cut() -> Response {
    let broken = stream::once(async { Err::<Vec<u8>, _>(std::io::Error::other("cut by a test")) });
    Response::new(Body::from_stream(broken))
}

/// Returns a `Status` object as the API server sends it with an error.
fn failure(code: StatusCode, reason: &str) -> Response {
    let status = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code.as_u16(), "reason": reason,
        "message": "injected by the test",
    });
    let response = Response::builder().status(code).header(CONTENT_TYPE, "application/json");
    response.body(Body::from(status.to_string())).expect("a valid response")
}

#[cfg(test)]
mod tests {
    use super::*;

    const OBJECT: &str = "/api/v1/namespaces/n/configmaps/c";
    const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/n/leases/l";

    #[test]
    fn closes_at_the_chosen_write_and_holds_later_requests() {
        let state = ProxyState::default();
        state.control().crash_point = Some(CrashPoint::After(2));
        assert_eq!(state.admit(&Method::PATCH, OBJECT), Action::Pass(Some(1)));
        assert!(state.record_performed(Some(1)));
        assert_eq!(state.admit(&Method::PUT, LEASE), Action::Pass(None), "leases are not counted");
        assert_eq!(state.admit(&Method::GET, OBJECT), Action::Pass(None));
        assert_eq!(state.admit(&Method::DELETE, OBJECT), Action::Pass(Some(2)));
        assert!(!state.record_performed(Some(2)));
        assert_eq!(state.admit(&Method::GET, OBJECT), Action::Hold);
        let state = ProxyState::default();
        state.control().crash_point = Some(CrashPoint::Before(1));
        assert_eq!(state.admit(&Method::POST, OBJECT), Action::Hold);
        assert_eq!(state.control().writes, 0);
    }

    #[test]
    fn pending_faults_hit_the_given_number_of_writes_of_that_path_only() {
        let state = ProxyState::default();
        state.control().pending_faults = Some(("/leases/".to_owned(), Fault::Conflict, 1));
        assert_eq!(state.admit(&Method::GET, LEASE), Action::Pass(None));
        assert_eq!(state.admit(&Method::PUT, OBJECT), Action::Pass(Some(1)));
        assert_eq!(state.admit(&Method::PUT, LEASE), Action::Fault(Fault::Conflict));
        assert_eq!(state.admit(&Method::PUT, LEASE), Action::Pass(None));
        assert_eq!(state.control().faults, 1);
    }

    #[test]
    fn random_faults_depend_on_the_seed_and_not_on_other_requests() {
        let faults = |seed: u64, others: usize| -> Vec<Option<Fault>> {
            let mut random = RandomFaults { seed, percent: 30, requests: HashMap::new() };
            let mut fault = |number: usize| {
                for _ in 0..others {
                    let _ = random.fault(&Method::PATCH, &format!("{LEASE}{number}"));
                }
                random.fault(&Method::PATCH, OBJECT)
            };
            (0..100).map(&mut fault).collect()
        };
        assert_eq!(faults(1, 0), faults(1, 3));
        assert_ne!(faults(1, 0), faults(2, 0));
        let count = faults(1, 0).into_iter().flatten().count();
        assert!((15..45).contains(&count), "{count} of 100");
    }
}
