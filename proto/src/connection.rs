//! One HTTP/2 connection for unary gRPC calls, with low overhead per call.
//!
//! tonic's channel passes a call through two tasks and writes headers and message separately. That makes
//! two packets, and the first wakes an idle server before the message arrives. Here the caller puts both
//! into the connection's buffer, and the connection's task writes them at once. A member serves a lookup of
//! one key in one to two microseconds, so this overhead dominates; this path halves the caller's CPU time.
//!
//! ```text
//!   call ──► headers and message into h2's buffer ──► connection's task: one write ──► socket
//! ```
//!
//! During the first 100 µs of a wait the caller's thread polls instead of sleeping: a response from the
//! same machine or a nearby one arrives in that time.
//!
//! The first call connects, and so does the first call after the connection was lost. A call whose
//! connection breaks fails with `UNAVAILABLE`. Pings detect a peer that disappears silently. Requires a
//! tokio runtime; clones share the connection, which closes when the last clone is dropped.
//!
//! With TLS, a call is one record: h2 passes headers and message in one vectored write ([`dial`]).
//!
//! Not supported: compression, streams, metadata, retries, deadlines (dropping a call resets it).

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use h2::client::{Connection as Http2, ResponseFuture, SendRequest};
use h2::{Ping, PingPong, RecvStream, SendStream};
use prost::Message;
use prost::bytes::{Buf, BufMut, Bytes, BytesMut};
use reprise_identity::Security;
use tokio::sync::Mutex;
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};
use tonic::codegen::http::uri::{Authority, InvalidUri};
use tonic::codegen::http::{HeaderMap, Method, Request, Response, StatusCode, Uri, header};
use tonic::{Code, Status};

use crate::dial::{self, MemberStream};

/// Maximum size of a reply that lists tenants. Each has a share on every node: 1,024 tenants on 1,000 nodes are 40 MiB.
pub const REPLY_BYTES_MAX: usize = 64 << 20;

/// Path of the method that looks up replicas.
pub const LOOKUP: &str = "/reprise.controlplane.v2.Directory/Lookup";
/// Path of the method that lists nodes.
pub const LIST_NODES: &str = "/reprise.controlplane.v2.Membership/ListNodes";

/// Time limit for connecting to a peer.
const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// Ping interval and ping timeout: together they bound the time to detect a half-open connection.
const PING_EVERY: Duration = Duration::from_secs(2);
const PING_ANSWER: Duration = Duration::from_secs(2);
/// How long a caller polls for its response before it sleeps. Responses for a few keys arrive sooner, and a
/// wake-up costs more CPU time than the lookup. At 100 lookups a second, 100 µs per call are 1 % of a core.
const BUSY_FOR: Duration = Duration::from_micros(100);
/// HTTP/2 windows: the response for 8,192 keys (up to 545 KiB) arrives without waiting for our window
/// update.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// Maximum size of a response.
const ANSWER_BYTES_MAX: usize = 4 << 20;
/// Length of the gRPC prefix of each message: compression flag and message length.
const PREFIX_BYTES: usize = 5;

/// A connection to one gRPC server, established on demand.
#[derive(Clone)]
pub struct Connection {
    shared: Arc<Shared>,
}

struct Shared {
    authority: Authority,
    security: Security,
    /// The current connection; `None` before the first call.
    current: Mutex<Option<SendRequest<Bytes>>>,
}

impl Connection {
    /// Returns a connection to `host:port`. The first call connects.
    ///
    /// # Errors
    /// `address` is not a valid `host:port`.
    pub fn new(address: &str, security: &Security) -> Result<Connection, InvalidUri> {
        let (authority, security) = (address.parse()?, security.clone());
        Ok(Connection { shared: Arc::new(Shared { authority, security, current: Mutex::new(None) }) })
    }

    /// Calls the unary method at `path`.
    ///
    /// # Errors
    /// The server's status; `UNAVAILABLE` if connecting fails or the connection breaks; `INTERNAL` if the
    /// response is malformed.
    pub async fn call<A: Message + Default>(&self, path: &str, request: &impl Message) -> Result<A, Status> {
        let head = self.head(path)?;
        let mut sender = self.sender().await?;
        let started = sender.send_request(head, false).map_err(unavailable)?;
        let message = exchange(started, framed(request)).await?;
        A::decode(message).map_err(|error| Status::internal(format!("invalid response: {error}")))
    }

    /// HTTP/2 requires scheme and host in each request.
    fn head(&self, path: &str) -> Result<Request<()>, Status> {
        let uri = Uri::builder().scheme("http").authority(self.shared.authority.clone()).path_and_query(path);
        let uri = uri.build().map_err(|error| Status::internal(error.to_string()))?;
        Request::builder()
            .method(Method::POST)
            .uri(uri)
            .header(header::TE, "trailers")
            .header(header::CONTENT_TYPE, "application/grpc")
            .body(())
            .map_err(|error| Status::internal(error.to_string()))
    }

    /// Returns a sender of the current connection, or connects.
    async fn sender(&self) -> Result<SendRequest<Bytes>, Status> {
        let known = self.shared.current.lock().await.clone();
        if let Some(sender) = known
            && let Ok(sender) = sender.ready().await
        {
            return Ok(sender);
        }
        // In a separate task: dropping the call must not abort an attempt that other calls can use.
        let made = tokio::spawn(connected(self.shared.clone()));
        made.await.map_err(|error| Status::internal(error.to_string()))?
    }
}

/// Returns the connection that another call has established meanwhile, or connects.
async fn connected(shared: Arc<Shared>) -> Result<SendRequest<Bytes>, Status> {
    let mut current = shared.current.lock().await;
    if let Some(sender) = current.clone()
        && let Ok(sender) = sender.ready().await
    {
        return Ok(sender);
    }
    let made = timeout(CONNECT_WITHIN, connect(&shared)).await;
    let sender = made.map_err(|_| Status::unavailable("timed out connecting"))??;
    *current = Some(sender.clone());
    Ok(sender)
}

async fn connect(shared: &Shared) -> Result<SendRequest<Bytes>, Status> {
    let stream = dial::dial(&shared.security, shared.authority.as_str()).await.map_err(unavailable)?;
    let (sender, mut connection) = h2::client::Builder::new()
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .enable_push(false)
        .handshake(stream)
        .await
        .map_err(unavailable)?;
    let pings = connection.ping_pong().expect("taken once");
    tokio::spawn(run(connection, pings));
    sender.ready().await.map_err(unavailable)
}

/// Runs the connection until it ends or a ping times out. Calls in flight then fail, and the next call
/// reconnects.
async fn run(connection: Http2<MemberStream, Bytes>, mut pings: PingPong) {
    let mut connection = pin!(connection);
    let silent = async {
        loop {
            sleep(PING_EVERY).await;
            if !matches!(timeout(PING_ANSWER, pings.ping(Ping::opaque())).await, Ok(Ok(_))) {
                break;
            }
        }
    };
    tokio::select! {
        // The calls in flight receive the cause.
        _ = &mut connection => {}
        () = silent => {}
    }
}

/// Sends the message of a started call and reads its response.
async fn exchange(
    (answer, mut stream): (ResponseFuture, SendStream<Bytes>),
    request: Bytes,
) -> Result<Bytes, Status> {
    // Does not wait for the flow-control window: the excess stays in the buffer, at most one message. Fails only
    // if the stream has ended. The server may have answered without the message (RFC 9113 §8.1), so the response
    // decides.
    let _ = stream.send_data(request, true);
    message(poll_before_sleep(answer).await.map_err(unavailable)?).await
}

/// Waits for a response; during the first `BUSY_FOR` it yields to the runtime instead of sleeping.
async fn poll_before_sleep<F: Future>(answer: F) -> F::Output {
    let mut answer = pin!(answer);
    let sleep_from = Instant::now() + BUSY_FOR;
    while Instant::now() < sleep_from {
        tokio::select! {
            // The response is polled first, since `yield_now` is ready at the next poll.
            biased;
            output = &mut answer => return output,
            () = yield_now() => {}
        }
    }
    answer.await
}

/// Encodes a message with its gRPC prefix.
fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + length);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(length).expect("requests are far below 4 GiB"));
    message.encode(&mut bytes).expect("there is room for it");
    bytes.freeze()
}

/// Reads the single message of a successful response.
async fn message(answer: Response<RecvStream>) -> Result<Bytes, Status> {
    if answer.status() != StatusCode::OK {
        return Err(Status::unavailable(format!("HTTP status {}", answer.status())));
    }
    // A trailers-only response carries its status in the headers.
    succeeded(answer.headers())?;
    let mut stream = answer.into_body();
    let mut bytes = BytesMut::new();
    while let Some(data) = stream.data().await {
        let data = data.map_err(unavailable)?;
        if bytes.len() + data.len() > PREFIX_BYTES + ANSWER_BYTES_MAX {
            return Err(Status::internal(format!("the response exceeds {ANSWER_BYTES_MAX} bytes")));
        }
        // Fails only if the connection is lost, which the next read reports.
        let _ = stream.flow_control().release_capacity(data.len());
        bytes.extend_from_slice(&data);
    }
    succeeded(&stream.trailers().await.map_err(unavailable)?.unwrap_or_default())?;
    unframed(bytes.freeze())
}

/// Returns whether a call failed because there was no connection or the connection broke. The server may
/// have executed the call. Statuses from the server are parsed from response headers and have no source
/// error; statuses created locally have one. tonic's channel reports a connection that breaks during a call
/// as `UNKNOWN` or `INTERNAL`.
pub fn is_absence(status: &Status) -> bool {
    let made_here = std::error::Error::source(status).is_some();
    match status.code() {
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => true,
        Code::Unknown | Code::Internal => made_here,
        _ => false,
    }
}

fn succeeded(headers: &HeaderMap) -> Result<(), Status> {
    match Status::from_header_map(headers) {
        Some(status) if status.code() != Code::Ok => Err(status),
        _ => Ok(()),
    }
}

fn unframed(mut bytes: Bytes) -> Result<Bytes, Status> {
    if bytes.len() < PREFIX_BYTES {
        return Err(Status::internal("the response has no message"));
    }
    let (compressed, length) = (bytes.get_u8(), bytes.get_u32());
    if compressed != 0 || usize::try_from(length) != Ok(bytes.len()) {
        return Err(Status::internal("the response is not a single uncompressed message"));
    }
    Ok(bytes)
}

fn unavailable(error: impl fmt::Display) -> Status {
    Status::unavailable(error.to_string())
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("authority", &self.shared.authority).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controlplane::{LookupReply, LookupRequest};

    #[test]
    fn messages_are_prefixed_with_their_length_and_invalid_prefixes_are_rejected() {
        let request = LookupRequest { keys: vec![7; 16].into(), asking_node: 300 };
        let bytes = framed(&request);
        assert_eq!(LookupRequest::decode(unframed(bytes.clone()).expect("whole")).expect("read"), request);
        assert_eq!(unframed(framed(&LookupReply::default())).expect("empty, and whole").len(), 0);
        for wrong in [bytes.slice(..4), bytes.slice(..bytes.len() - 1), [&[1], &bytes[1..]].concat().into()] {
            assert_eq!(unframed(wrong).expect_err("refused").code(), Code::Internal);
        }
    }

    /// Returns the status of tonic's channel when the server closes the connection after the first bytes of
    /// a call.
    async fn broken_call() -> Status {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let closing = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.expect("a connection");
            stream.readable().await.expect("the client sends bytes");
        });
        let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}"));
        let channel = channel.expect("an address").connect_lazy();
        let mut client = crate::controlplane::membership_client::MembershipClient::new(channel);
        let status = client
            .list_nodes(crate::controlplane::ListNodesRequest {})
            .await
            .expect_err("the connection is closed");
        closing.await.expect("the server task ended");
        status
    }

    /// A server that rejects every call without reading its message. h2 then resets the stream.
    async fn rejecting_server() -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.expect("a connection");
            let mut connection = h2::server::handshake(stream).await.expect("a client");
            while let Some(call) = connection.accept().await {
                let (_unread, mut respond) = call.expect("a call");
                let status = i32::from(Code::Unimplemented).to_string();
                let rejection = Response::builder().header("grpc-status", status).body(()).expect("valid");
                respond.send_response(rejection, true).expect("the call waits");
            }
        });
        address
    }

    #[tokio::test]
    async fn a_response_that_precedes_the_message_of_the_call_is_read() {
        let connection = Connection::new(&rejecting_server().await, &Security::Plain).expect("an address");
        let head = connection.head(LOOKUP).expect("a path");
        let mut sender = connection.sender().await.expect("connected");
        let mut started = sender.send_request(head, false).expect("started");
        let reset = std::future::poll_fn(|context| started.1.poll_reset(context)).await;
        assert_eq!(reset.expect("the stream ends"), h2::Reason::NO_ERROR);
        let rejected = exchange(started, framed(&LookupRequest::default())).await.expect_err("rejected");
        assert_eq!(rejected.code(), Code::Unimplemented, "{rejected}");
    }

    #[tokio::test]
    async fn broken_connections_count_as_absence_and_statuses_of_the_server_do_not() {
        let broken = broken_call().await;
        assert!(is_absence(&broken), "{broken:?}");
        assert!(is_absence(&Status::unavailable("no connection")));
        for status in [Status::internal("a bug"), Status::unknown("unknown"), Status::invalid_argument("no")]
        {
            assert!(!is_absence(&status), "{status:?}");
        }
    }

    #[test]
    fn lookup_path_matches_the_generated_service() {
        use crate::controlplane::directory_server::SERVICE_NAME;
        assert_eq!(LOOKUP, format!("/{SERVICE_NAME}/Lookup"));
    }
}
