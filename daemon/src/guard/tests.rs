//! Pages of an admin port with certificates, for each kind of client.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::routing::get;
use reprise_identity::{Authority, Expected, Tls, authority};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::http;
use crate::rejected_connections::{Listener, Reason};

const CONNECTIONS_MAX: usize = 16;
const TOKEN: &str = "0123456789abcdef0123456789abcdef";

struct Port {
    address: SocketAddr,
    authority: Authority,
    rejected: RejectedConnections,
    _folder: tempfile::TempDir,
}

fn tls(authority: &Authority, role: Role) -> Security {
    let identity = Identity::new("c", role).expect("a valid name");
    let issued = authority.issue(&identity, authority::CERTIFICATE_VALID).expect("a certificate");
    Security::Tls(Tls::new(issued.into_credentials(authority.certificate()).expect("valid files")))
}

/// Serves the pages with the certificate of a member.
async fn port() -> Port {
    let folder = tempfile::tempdir().expect("a folder");
    let token = folder.path().join("token");
    std::fs::write(&token, TOKEN).expect("written");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    let authority = Authority::create("c").expect("an authority");
    let scrapers = Scrapers::of_file(&token).expect("a token");
    let guard = Guard::new(tls(&authority, Role::Member), scrapers);
    let rejected = RejectedConnections::default();
    let limit = guard.limit(CONNECTIONS_MAX, rejected.clone());
    let page = || get(async || "ok\n");
    let pages = Router::new()
        .route("/healthz", page())
        .route("/metrics", page())
        .route("/status", page())
        .route("/trace/{seconds}", page());
    tokio::spawn(http::serve(listener, (pages, guard), limit, std::future::pending()));
    Port { address, authority, rejected, _folder: folder }
}

/// Sends a request, and returns the status of the response, or 0 if the connection was closed.
async fn ask(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), path: &str, fields: &str) -> u16 {
    let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\n{fields}\r\n");
    let mut head = Vec::new();
    if stream.write_all(request.as_bytes()).await.is_err() || stream.flush().await.is_err() {
        return 0;
    }
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return 0,
        }
    }
    let head = String::from_utf8(head).expect("text").to_ascii_lowercase();
    // The connection may serve another request, so the body is read.
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.and_then(|length| length.parse().ok()).expect("a length")];
    if stream.read_exact(&mut body).await.is_err() {
        return 0;
    }
    head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status")
}

impl Port {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("listening")
    }

    async fn connect_as(&self, role: Role) -> Stream {
        let (client, address) = (tls(&self.authority, role), self.address.to_string());
        client.dial(&address, Expected::Role(Role::Member)).await.expect("a valid server")
    }

    /// Connects with TLS, and shows no certificate.
    async fn connect_anonymously(&self) -> impl AsyncRead + AsyncWrite + Unpin {
        let Security::Tls(tls) = tls(&self.authority, Role::Console) else { unreachable!("it has one") };
        let config = tls.anonymous_client_config(Expected::Role(Role::Member));
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let name = rustls::pki_types::ServerName::try_from("reprise").expect("a valid name");
        connector.connect(name, self.connect().await).await.expect("a valid server")
    }
}

#[tokio::test]
async fn plain_connections_see_probes_only() {
    let port = port().await;
    assert_eq!(ask(&mut port.connect().await, "/healthz", "").await, 200);
    let bearer = format!("authorization: Bearer {TOKEN}\r\n");
    for (path, fields) in [("/metrics", ""), ("/metrics", &bearer[..]), ("/status", ""), ("/absent", "")] {
        assert_eq!(ask(&mut port.connect().await, path, fields).await, 403, "{path}");
    }
    assert_eq!(port.rejected.get(Listener::Admin, Reason::Refused), 4);
}

#[tokio::test]
async fn certificates_see_pages_as_their_role_allows() {
    let port = port().await;
    let agent = Role::Agent("n1".to_owned());
    // An agent sees the pages of its own process only, and this is a member.
    for (role, seen) in [(agent, 403), (Role::Member, 200), (Role::Operator, 200), (Role::Console, 200)] {
        for (path, status) in [("/healthz", 200), ("/metrics", seen), ("/status", seen), ("/trace/1", 403)] {
            assert_eq!(
                ask(&mut port.connect_as(role.clone()).await, path, "").await,
                status,
                "{role} {path}"
            );
        }
    }
    assert_eq!(ask(&mut port.connect_as(Role::Admin).await, "/trace/1", "").await, 200);
}

#[tokio::test]
async fn clients_without_a_certificate_see_metrics_with_a_token_only() {
    let port = port().await;
    let bearer = |token: &str| format!("authorization: Bearer {token}\r\n");
    let (valid, wrong) = (bearer(TOKEN), bearer("fedcba9876543210fedcba9876543210"));
    for (path, fields, status) in [
        ("/healthz", "", 200),
        ("/metrics", &valid[..], 200),
        ("/metrics", "", 401),
        ("/metrics", "authorization: Basic YTpi\r\n", 401),
        ("/metrics", &wrong, 403),
        ("/status", &valid, 401),
        ("/trace/1", &valid, 401),
    ] {
        let mut stream = port.connect_anonymously().await;
        assert_eq!(ask(&mut stream, path, fields).await, status, "{path} {fields}");
    }
}

#[tokio::test]
async fn certificates_of_another_authority_are_refused() {
    let port = port().await;
    let other = Authority::create("c").expect("an authority");
    // The client trusts the server, and shows a certificate of the other authority.
    let Security::Tls(own) = tls(&port.authority, Role::Admin) else { unreachable!("it has one") };
    let Security::Tls(foreign) = tls(&other, Role::Admin) else { unreachable!("it has one") };
    let mut config = own.client_config(Expected::Role(Role::Member));
    config.client_auth_cert_resolver =
        foreign.client_config(Expected::AnyAgent).client_auth_cert_resolver.clone();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let name = rustls::pki_types::ServerName::try_from("reprise").expect("a valid name");
    let status = match connector.connect(name, port.connect().await).await {
        Ok(mut stream) => ask(&mut stream, "/metrics", "").await,
        Err(_) => 0,
    };
    assert_eq!(status, 0);
    while port.rejected.get(Listener::Admin, Reason::Refused) == 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn requests_with_a_body_are_refused() {
    let port = port().await;
    for fields in ["content-length: 1\r\n", "transfer-encoding: chunked\r\n"] {
        assert_eq!(ask(&mut port.connect().await, "/healthz", fields).await, 413);
    }
}

#[tokio::test]
async fn one_client_has_at_most_its_share_of_the_connections() {
    let port = port().await;
    let mut first = port.connect_as(Role::Console).await;
    assert_eq!(ask(&mut first, "/status", "").await, 200);
    let mut admin = port.connect_as(Role::Admin).await;
    assert_eq!(ask(&mut admin, "/status", "").await, 200);
    let mut more = Vec::new();
    for _ in 0..2 * CONNECTIONS_MAX {
        let mut stream = port.connect_as(Role::Console).await;
        assert_eq!(ask(&mut stream, "/status", "").await, 200);
        more.push(stream);
    }
    assert_eq!(ask(&mut first, "/status", "").await, 0, "it made room for later ones");
    assert_eq!(ask(&mut admin, "/status", "").await, 200, "another client keeps its connection");
}

#[tokio::test(start_paused = true)]
async fn half_open_handshakes_end_in_time_and_delay_no_probe() {
    let port = port().await;
    let mut open = Vec::new();
    for _ in 0..CONNECTIONS_MAX / 4 {
        let mut stream = port.connect().await;
        stream.write_all(&[TLS_HANDSHAKE]).await.expect("open");
        open.push(stream);
    }
    assert_eq!(ask(&mut port.connect().await, "/healthz", "").await, 200);
    for stream in &mut open[1..] {
        assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
    }
    assert_eq!(port.rejected.get(Listener::Admin, Reason::Timeout), open.len() as u64 - 1);
}
