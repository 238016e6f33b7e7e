//! Connections to members, plain or with TLS, for both kinds of gRPC clients: [`crate::connection`] and tonic's
//! channels.
//!
//! A mismatch gives an error with the remedy: a plain client at a TLS port, the reverse, or a certificate that the
//! member refuses. With TLS 1.3 a client learns of the refusal when it first reads.
//!
//! HTTP/2 below stays as it is: its scheme is `http` in both cases, and no protocol is negotiated.

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper_util::rt::TokioIo;
use reprise_identity::{Expected, Role, Security, Stream};
use tokio::io::{AsyncRead, ReadBuf};
use tonic::Status;
use tonic::codegen::http::Uri;
use tonic::codegen::{Service, StdError};
use tonic::transport::{Channel, Endpoint};

/// Content types of TLS records (RFC 8446 §5.1): alert and handshake. As the first byte of an HTTP/2 connection they
/// would announce a frame of more than a megabyte, which no server sends first.
const TLS_RECORDS: [u8; 2] = [21, 22];

/// Connection to a member.
#[derive(Debug)]
pub struct MemberStream {
    stream: Stream,
    /// Whether no byte of the member has been read.
    is_unanswered: bool,
}

/// Connector of tonic's channels to members.
#[derive(Clone, Debug)]
struct Connector(Security);

/// Connects to the member at `host:port`.
///
/// # Errors
/// It is unreachable, has another role, or has no valid certificate of this cluster.
pub async fn dial(security: &Security, address: &str) -> io::Result<MemberStream> {
    let stream = security.dial(address, Expected::Role(Role::Member)).await.map_err(io::Error::other)?;
    Ok(MemberStream { stream, is_unanswered: true })
}

/// Connects a channel to the member of an endpoint.
///
/// # Errors
/// As [`dial`].
pub async fn connect(endpoint: &Endpoint, security: &Security) -> Result<Channel, tonic::transport::Error> {
    endpoint.connect_with_connector(Connector(security.clone())).await
}

/// Creates a channel to the member of an endpoint, which connects when it is used.
pub fn connect_lazy(endpoint: &Endpoint, security: &Security) -> Channel {
    endpoint.connect_with_connector_lazy(Connector(security.clone()))
}

/// Returns the message of a status, and the error below it if the connection failed.
pub fn cause(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut source = status.source();
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text
}

impl Service<Uri> for Connector {
    type Response = TokioIo<MemberStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<MemberStream>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let security = self.0.clone();
        Box::pin(async move {
            let authority = uri.authority().ok_or(io::ErrorKind::InvalidInput)?;
            let address = match authority.port() {
                Some(_) => authority.as_str().to_owned(),
                None => format!("{authority}:80"),
            };
            dial(&security, &address).await.map(TokioIo::new)
        })
    }
}

/// Adds the remedy to an error of reading, if the member refuses the certificate.
fn explained(error: io::Error) -> io::Error {
    let text = error.to_string();
    match text.strip_prefix("received fatal alert: ") {
        Some(alert) => {
            let reason: StdError = format!(
                "the server refused our certificate ({alert}): it has ended, or is of another authority or cluster; \
                 issue a new one"
            )
            .into();
            io::Error::new(error.kind(), reason)
        }
        None => error,
    }
}

impl AsyncRead for MemberStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer)).map_err(explained)?;
        let first = buffer.filled().get(before);
        if self.is_unanswered
            && let Some(first) = first
        {
            self.is_unanswered = false;
            if matches!(self.stream, Stream::Plain(_)) && TLS_RECORDS.contains(first) {
                let remedy = "the server requires TLS: set tls.folder, or pass --tls FOLDER";
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, remedy)));
            }
        }
        Poll::Ready(Ok(()))
    }
}

reprise_identity::write_to_stream!(MemberStream);
