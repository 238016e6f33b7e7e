//! One HTTP/2 connection for unary gRPC calls, with little between a call and the socket.
//!
//! tonic's channel gives a call to one task, which gives it to another, and writes its headers and its message apart: two
//! packets, of which the first wakes a server that has nothing to do yet. Here the caller puts both into the connection's
//! buffer, and the connection's task writes them at once. A look-up of one key takes the member a microsecond or two; what
//! is left of its way costs the caller half of the CPU time.
//!
//! ```text
//!   call ──► headers and message into h2's buffer ──► connection's task: one write ──► socket
//! ```
//!
//! The caller's thread does not sleep for the first 100 µs of a wait: on a machine with its member, or near it, the answer
//! comes in that time.
//!
//! It is made by the first call, and again by the first call after it was lost; a call whose connection breaks fails as
//! `UNAVAILABLE`. A peer that is gone without a word is noticed by pings. Runs on a tokio runtime; clones share the
//! connection, which ends with the last of them.
//!
//! Deliberately absent: TLS, compression, streams, metadata, retries, deadlines (a call that is dropped is reset).

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use h2::client::{Connection as Http2, SendRequest};
use h2::{Ping, PingPong, RecvStream};
use prost::Message;
use prost::bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};
use tonic::codegen::http::uri::{Authority, InvalidUri};
use tonic::codegen::http::{HeaderMap, Method, Request, Response, StatusCode, Uri, header};
use tonic::{Code, Status};

/// Path of a look-up.
pub const LOOKUP: &str = "/reprise.controlplane.v1.Directory/Lookup";
/// Path of a list of nodes.
pub const LIST_NODES: &str = "/reprise.controlplane.v1.Membership/ListNodes";

/// Until a peer must have taken the connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// Pings, and the time for their answer: a half-open connection is noticed within both.
const PING_EVERY: Duration = Duration::from_secs(2);
const PING_ANSWER: Duration = Duration::from_secs(2);
/// A caller looks for its answer busily for so long before it sleeps: the answer to a few keys is there sooner, and to be
/// woken costs more than the look-up itself. 100 µs a call are a hundredth of a core at a hundred look-ups a second.
const BUSY_FOR: Duration = Duration::from_micros(100);
/// HTTP/2 windows: the answer to 8,192 keys (up to 545 KiB) arrives without a wait for our acknowledgement.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
/// An answer at the most.
const ANSWER_BYTES_MAX: usize = 4 << 20;
/// Before each message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;

/// See the module.
#[derive(Clone)]
pub struct Connection {
    shared: Arc<Shared>,
}

struct Shared {
    authority: Authority,
    /// Of the connection now; none before the first call.
    current: Mutex<Option<SendRequest<Bytes>>>,
}

impl Connection {
    /// A connection to `host:port`, which is made when it is needed.
    ///
    /// # Errors
    /// It is not written so.
    pub fn to(address: &str) -> Result<Connection, InvalidUri> {
        let authority = address.parse()?;
        Ok(Connection { shared: Arc::new(Shared { authority, current: Mutex::new(None) }) })
    }

    /// One call of the method at `path`.
    ///
    /// # Errors
    /// The server's, or `UNAVAILABLE` when there is no connection or it breaks, or `INTERNAL` when the answer is none.
    pub async fn call<A: Message + Default>(&self, path: &str, request: &impl Message) -> Result<A, Status> {
        let head = self.head(path)?;
        let mut sender = self.sender().await?;
        let (answer, mut stream) = sender.send_request(head, false).map_err(unavailable)?;
        // Without a wait for the window: what it does not admit yet stays in the buffer, one message at the most.
        stream.send_data(framed(request), true).map_err(unavailable)?;
        let message = message(busily(answer).await.map_err(unavailable)?).await?;
        A::decode(message).map_err(|error| Status::internal(format!("the answer cannot be read: {error}")))
    }

    /// HTTP/2 names scheme and host in each request.
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

    /// A sender of a connection that lives, as far as is known.
    async fn sender(&self) -> Result<SendRequest<Bytes>, Status> {
        let known = self.shared.current.lock().await.clone();
        if let Some(sender) = known
            && let Ok(sender) = sender.ready().await
        {
            return Ok(sender);
        }
        // By a task: a call that gives up must not end an attempt that others, or the next one, can use.
        let made = tokio::spawn(connected(self.shared.clone()));
        made.await.map_err(|error| Status::internal(error.to_string()))?
    }
}

/// A connection: the one that others have made meanwhile, or a new one.
async fn connected(shared: Arc<Shared>) -> Result<SendRequest<Bytes>, Status> {
    let mut current = shared.current.lock().await;
    if let Some(sender) = current.clone()
        && let Ok(sender) = sender.ready().await
    {
        return Ok(sender);
    }
    let made = timeout(CONNECT_WITHIN, connect(shared.authority.as_str())).await;
    let sender = made.map_err(|_| Status::unavailable("no connection in time"))??;
    *current = Some(sender.clone());
    Ok(sender)
}

async fn connect(address: &str) -> Result<SendRequest<Bytes>, Status> {
    let stream = TcpStream::connect(address).await.map_err(unavailable)?;
    stream.set_nodelay(true).map_err(unavailable)?;
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

/// Runs the connection until it ends, or a ping is not answered: calls under way fail then, and the next one connects anew.
async fn run(connection: Http2<TcpStream, Bytes>, mut pings: PingPong) {
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
        // Whoever calls learns why it ended.
        _ = &mut connection => {}
        () = silent => {}
    }
}

/// Waits for an answer; at first the thread goes round its tasks and its sockets without a sleep.
async fn busily<F: Future>(answer: F) -> F::Output {
    let mut answer = pin!(answer);
    let asleep_from = Instant::now() + BUSY_FOR;
    while Instant::now() < asleep_from {
        tokio::select! {
            biased;
            output = &mut answer => return output,
            () = yield_now() => {}
        }
    }
    answer.await
}

/// A message with its prefix.
fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + length);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(length).expect("requests are far below 4 GiB"));
    message.encode(&mut bytes).expect("there is room for it");
    bytes.freeze()
}

/// The one message of an answer, when the server says that the call succeeded.
async fn message(answer: Response<RecvStream>) -> Result<Bytes, Status> {
    if answer.status() != StatusCode::OK {
        return Err(Status::unavailable(format!("answered with HTTP status {}", answer.status())));
    }
    // An error without a message stands where the headers are.
    succeeded(answer.headers())?;
    let mut stream = answer.into_body();
    let mut bytes = BytesMut::new();
    while let Some(data) = stream.data().await {
        let data = data.map_err(unavailable)?;
        if bytes.len() + data.len() > PREFIX_BYTES + ANSWER_BYTES_MAX {
            return Err(Status::internal(format!("the answer has more than {ANSWER_BYTES_MAX} bytes")));
        }
        // An error says that the connection is gone, which the next piece shows.
        let _ = stream.flow_control().release_capacity(data.len());
        bytes.extend_from_slice(&data);
    }
    succeeded(&stream.trailers().await.map_err(unavailable)?.unwrap_or_default())?;
    unframed(bytes.freeze())
}

/// Whether a call has failed because there was no connection, or none any more; the other side may have done what it was
/// asked for. Words of the other side are a `Status` out of the answer's headers; what was made here has a source. tonic's
/// channel calls a connection that breaks during a call `UNKNOWN`, or `INTERNAL` by the frame that it was at.
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
        return Err(Status::internal("the answer has no message"));
    }
    let (compressed, length) = (bytes.get_u8(), bytes.get_u32());
    if compressed != 0 || usize::try_from(length) != Ok(bytes.len()) {
        return Err(Status::internal("the answer is not one plain message"));
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
    fn a_message_has_its_length_before_it_and_what_has_not_is_refused() {
        let request = LookupRequest { keys: vec![7; 16].into(), asking_node: 300 };
        let bytes = framed(&request);
        assert_eq!(LookupRequest::decode(unframed(bytes.clone()).expect("whole")).expect("read"), request);
        assert_eq!(unframed(framed(&LookupReply::default())).expect("empty, and whole").len(), 0);
        for wrong in [bytes.slice(..4), bytes.slice(..bytes.len() - 1), [&[1], &bytes[1..]].concat().into()] {
            assert_eq!(unframed(wrong).expect_err("refused").code(), Code::Internal);
        }
    }

    /// What tonic's channel says when the other side closes after the first bytes of a call.
    async fn broken_call() -> Status {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let closing = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.expect("a connection");
            stream.readable().await.expect("it says something");
        });
        let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}"));
        let channel = channel.expect("an address").connect_lazy();
        let mut client = crate::controlplane::membership_client::MembershipClient::new(channel);
        let status =
            client.list_nodes(crate::controlplane::ListNodesRequest {}).await.expect_err("it is closed");
        closing.await.expect("it closed");
        status
    }

    #[tokio::test]
    async fn a_connection_that_breaks_is_absence_and_what_the_other_side_says_is_not() {
        let broken = broken_call().await;
        assert!(is_absence(&broken), "{broken:?}");
        assert!(is_absence(&Status::unavailable("no connection")));
        for said in [Status::internal("a bug"), Status::unknown("who knows"), Status::invalid_argument("no")]
        {
            assert!(!is_absence(&said), "{said:?}");
        }
    }

    #[test]
    fn the_path_of_a_look_up_is_that_of_the_generated_service() {
        use crate::controlplane::directory_server::SERVICE_NAME;
        assert_eq!(LOOKUP, format!("/{SERVICE_NAME}/Lookup"));
    }
}
