//! Rules for the pages of an admin port: which clients see which.
//!
//! | connection | probes | `/metrics` | other pages |
//! |---|---|---|---|
//! | plain, and the process has no certificates | yes | yes | yes |
//! | plain, and the process has certificates | yes | no | no |
//! | TLS without a client certificate | yes | with a bearer token ([`Scrapers`]) | no |
//! | TLS with a client certificate | yes | yes | as its role allows |
//!
//! One port serves both kinds of connections, because the kubelet's probes cannot present a certificate, and a second
//! port would be one more listener to protect in each process. The first byte of a connection decides: a TLS handshake
//! begins with 0x16, which no HTTP request does.
//!
//! Probes disclose a status and one word. Requests with a body are refused: no page reads one.

use std::fmt;
use std::time::Duration;

use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::body::Body;
use reprise_identity::access::{Call, authorise_for};
use reprise_identity::limits::{CONNECTION_AGE_MAX, VerifiedIdentity};
use reprise_identity::tls::{HANDSHAKE_WITHIN, TlsError};
use reprise_identity::{Identity, Role, Security, Stream};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::connections::ConnectionLimit;
use crate::http::{ClientAddress, REQUEST_WITHIN};
use crate::rejected_connections::{Listener, RejectedConnections};
use crate::scrapers::{Scrapers, Verdict};

/// Pages that all clients may see.
pub const PROBES: [&str; 3] = ["/healthz", "/readyz", "/startz"];

/// First byte of a TLS handshake, RFC 8446 §5.1.
const TLS_HANDSHAKE: u8 = 0x16;

/// Time limit for a request of a client without a certificate, and between two. The kubelet sends its request at once
/// and closes the connection.
const UNKNOWN_REQUEST_WITHIN: Duration = Duration::from_secs(10);

/// Longest connection of a client without a certificate. A start-up probe takes a minute.
const UNKNOWN_CLIENT_FOR: Duration = Duration::from_secs(120);

/// An accepted connection after its handshake.
#[derive(Debug)]
pub(crate) struct Accepted {
    pub(crate) stream: Stream,
    pub(crate) caller: Caller,
    /// Age at which the connection is replaced.
    pub(crate) age_max: Duration,
}

/// Certificates of the process, and tokens of its scrapers.
#[derive(Clone, Debug)]
pub struct Guard {
    security: Security,
    scrapers: Scrapers,
}

/// Client of a connection; in the extensions of its requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// The process has no certificates: all callers may do all.
    Unchecked,
    /// Plain connection to a process with certificates.
    Plain,
    /// TLS connection without a client certificate.
    Anonymous,
    /// TLS connection of a client with a certificate.
    Identity(Identity),
}

impl Guard {
    /// Protects the pages with the certificates of the process.
    pub fn new(security: Security, scrapers: Scrapers) -> Guard {
        Guard { security, scrapers }
    }

    /// Protects no page: the process has no certificates.
    pub fn plain() -> Guard {
        Guard::new(Security::Plain, Scrapers::none())
    }

    /// Certificates of the process.
    pub fn security(&self) -> &Security {
        &self.security
    }

    /// Limit of the connections of an admin port, of which a client with an identity or address has at most a share.
    pub fn limit(&self, connections_max: usize, rejected: RejectedConnections) -> ConnectionLimit {
        ConnectionLimit::of(&self.security, Listener::Admin, connections_max, rejected)
    }

    /// Completes an accepted connection: the handshake, if the client begins one.
    pub(crate) async fn accept(&self, stream: TcpStream) -> Result<Accepted, TlsError> {
        let plain = |stream, caller, age_max| Accepted { stream: Stream::Plain(stream), caller, age_max };
        let Security::Tls(tls) = &self.security else {
            return Ok(plain(stream, Caller::Unchecked, CONNECTION_AGE_MAX));
        };
        let mut first = [0];
        let peeked = timeout(HANDSHAKE_WITHIN, stream.peek(&mut first)).await;
        let length = peeked.map_err(|_| TlsError::Timeout)??;
        if length == 0 || first != [TLS_HANDSHAKE] {
            return Ok(plain(stream, Caller::Plain, UNKNOWN_CLIENT_FOR));
        }
        let (stream, client) = tls.accept_optional(stream).await?;
        let (caller, age_max) = match client {
            None => (Caller::Anonymous, UNKNOWN_CLIENT_FOR),
            Some(VerifiedIdentity { identity, validity }) => {
                (Caller::Identity(identity), validity.replaced_after())
            }
        };
        Ok(Accepted { stream: Stream::Accepted(Box::new(stream)), caller, age_max })
    }

    /// Returns the answer to a request that the caller may not send; `None` if it may.
    pub(crate) async fn refuse<B: Body>(&self, caller: &Caller, request: &Request<B>) -> Option<Response> {
        if !request.body().is_end_stream() {
            return Some(answer(StatusCode::PAYLOAD_TOO_LARGE, "no page reads a body: send none\n"));
        }
        let path = request.uri().path();
        if is_probe(path) {
            return None;
        }
        match caller {
            Caller::Unchecked => None,
            Caller::Identity(identity) => {
                let refusal = authorise_for(Some(identity), call_of(path), &self.own_node()).err()?;
                Some(answer(StatusCode::FORBIDDEN, format!("{refusal}\n")))
            }
            Caller::Plain => {
                let text = "this page needs TLS: connect with https and a client certificate of the cluster \
                            (`reprise certs issue` writes one, and commands take it with --tls)\n";
                Some(answer(StatusCode::FORBIDDEN, text))
            }
            Caller::Anonymous if path == "/metrics" => self.refuse_token(request).await,
            Caller::Anonymous => {
                let text = "this page needs a client certificate of the cluster (`reprise certs issue` writes one)\n";
                Some(answer(StatusCode::UNAUTHORIZED, text))
            }
        }
    }

    /// Node of this process; empty for one that is not an agent.
    fn own_node(&self) -> String {
        match &self.security {
            Security::Tls(tls) => tls.credentials().identity.role.node().unwrap_or_default().to_owned(),
            Security::Plain => String::new(),
        }
    }

    /// Checks the bearer token of a scraper.
    async fn refuse_token<B>(&self, request: &Request<B>) -> Option<Response> {
        let field = request.headers().get(header::AUTHORIZATION).and_then(|field| field.to_str().ok());
        let token = field.and_then(|field| field.split_once(' '));
        let token = token.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        let Some((_, token)) = token else {
            let text = "/metrics needs a client certificate of the cluster, or a bearer token\n";
            let mut refused = answer(StatusCode::UNAUTHORIZED, text);
            refused.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            return Some(refused);
        };
        let address = request.extensions().get::<ClientAddress>();
        let ip = address.map(|address| address.client.ip().to_canonical());
        let client = ip.map(tracing::field::display);
        match self.scrapers.check(token.trim(), ip).await {
            Verdict::Accepted => None,
            Verdict::Rejected(reason) => {
                tracing::warn!(listener = "admin", client, reason, "refused the bearer token of a scraper");
                Some(answer(StatusCode::FORBIDDEN, "this bearer token may not read /metrics\n"))
            }
            Verdict::Unavailable(reason) => {
                tracing::warn!(
                    listener = "admin",
                    client,
                    reason,
                    "cannot check the bearer token of a scraper"
                );
                Some(answer(StatusCode::SERVICE_UNAVAILABLE, "the bearer token cannot be checked now\n"))
            }
            Verdict::Busy => {
                tracing::warn!(listener = "admin", client, "too many bearer tokens of scrapers at once");
                let text = "too many bearer tokens are being checked: try again in a second\n";
                let mut refused = answer(StatusCode::TOO_MANY_REQUESTS, text);
                refused.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
                Some(refused)
            }
        }
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Caller::Unchecked => f.write_str("unchecked"),
            Caller::Plain => f.write_str("plain"),
            Caller::Anonymous => f.write_str("without a certificate"),
            Caller::Identity(identity) => identity.fmt(f),
        }
    }
}

impl Caller {
    /// Whether the client has the certificate of an admin.
    pub fn is_admin(&self) -> bool {
        matches!(self, Caller::Identity(Identity { role: Role::Admin, .. }))
    }

    /// Time limit for a request header, and between two requests.
    pub(crate) fn request_within(&self) -> Duration {
        match self {
            Caller::Unchecked | Caller::Identity(_) => REQUEST_WITHIN,
            Caller::Plain | Caller::Anonymous => UNKNOWN_REQUEST_WITHIN,
        }
    }

    /// Whether a connection is kept for the client after a request that it may send: others close it only if no connection
    /// without such a request is left. Clients without an identity get no hold on connections, except scrapers with a
    /// valid token.
    pub(crate) fn keeps_connection(&self, path: &str) -> bool {
        match self {
            Caller::Unchecked | Caller::Identity(_) => true,
            Caller::Plain => false,
            Caller::Anonymous => !is_probe(path),
        }
    }

    /// Whether the client is unknown on a process with certificates.
    pub(crate) fn is_unknown(&self) -> bool {
        matches!(self, Caller::Plain | Caller::Anonymous)
    }
}

/// Whether a page is a probe. Probes may wait for a minute, and all clients may see them.
pub(crate) fn is_probe(path: &str) -> bool {
    PROBES.contains(&path)
}

/// The row of the table of calls that a page belongs to.
fn call_of(path: &str) -> Call {
    let first = path.split('/').nth(1).unwrap_or_default();
    match first {
        "metrics" => Call::Metrics,
        "blocks" => Call::ReadBlock,
        "trace" => Call::Trace,
        _ => Call::Status,
    }
}

/// A refusal ends the connection, so that a refused client holds none.
fn answer(status: StatusCode, text: impl Into<String>) -> Response {
    (status, [(header::CONNECTION, "close")], text.into()).into_response()
}

#[cfg(test)]
mod tests;
