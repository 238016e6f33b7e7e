//! Handshakes between identities, clusters and authorities.

use std::time::Instant;

use time::{Duration as Span, OffsetDateTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use crate::authority::{Authority, CERTIFICATE_VALID, Issued, SKEW};

fn identity(cluster: &str, role: &str) -> Identity {
    Identity::new(cluster, role.parse().expect("a role")).expect("valid names")
}

fn credentials(trusted: &[&Authority], issued: Issued) -> Credentials {
    let authorities = trusted.iter().map(|authority| authority.certificate()).collect::<String>();
    issued.into_credentials(&authorities).expect("valid files")
}

fn tls(authority: &Authority, role: &str) -> Tls {
    let issued = authority.issue(&identity("c", role), CERTIFICATE_VALID).expect("a certificate");
    Tls::new(credentials(&[authority], issued))
}

fn authority() -> Authority {
    Authority::create("c").expect("an authority")
}

/// Results of both sides of a handshake, with an echo of one byte, got.
async fn meet(
    server: &Tls,
    client: &Tls,
    expected: Expected,
) -> (Result<Identity, String>, Result<u8, String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let accepting = async {
        let (stream, _) = listener.accept().await.expect("a client");
        let (mut stream, identity) = server.accept(stream).await.map_err(|error| error.to_string())?;
        let byte = stream.read_u8().await.map_err(|error| error.to_string())?;
        stream.write_u8(byte).await.map_err(|error| error.to_string())?;
        stream.flush().await.map_err(|error| error.to_string())?;
        Ok(identity.identity)
    };
    let connecting = async {
        let stream = TcpStream::connect(address).await.expect("listening");
        let mut stream = client.connect(stream, expected).await.map_err(|error| error.to_string())?;
        stream.write_u8(7).await.map_err(|error| error.to_string())?;
        stream.flush().await.map_err(|error| error.to_string())?;
        stream.read_u8().await.map_err(|error| error.to_string())
    };
    tokio::join!(accepting, connecting)
}

#[tokio::test]
async fn both_sides_learn_the_identity_of_the_other() {
    let authority = authority();
    let (member, agent) = (tls(&authority, "member"), tls(&authority, "agent/n1"));
    let (seen, echo) = meet(&member, &agent, Expected::Role(Role::Member)).await;
    assert_eq!((seen, echo), (Ok(identity("c", "agent/n1")), Ok(7)));
    let (seen, echo) = meet(&agent, &member, Expected::AnyAgent).await;
    assert_eq!((seen, echo), (Ok(identity("c", "member")), Ok(7)));
}

#[tokio::test]
async fn server_of_another_role_or_node_is_refused_by_the_client() {
    let authority = authority();
    let (agent, member) = (tls(&authority, "agent/n1"), tls(&authority, "member"));
    for expected in [Expected::Role(Role::Member), Expected::Role(Role::Agent("n2".to_owned()))] {
        let (seen, echo) = meet(&agent, &member, expected).await;
        assert!(seen.is_err() && echo.is_err(), "{seen:?} {echo:?}");
    }
}

#[tokio::test]
async fn certificates_of_others_are_refused_by_the_server() {
    let (own, foreign) = (authority(), authority());
    let server = tls(&own, "member");
    let now = OffsetDateTime::now_utc();
    let of_cluster = |cluster: &str, from, until| {
        let issued = own.issue_between(&identity(cluster, "agent/n1"), now + from, now + until);
        Tls::new(credentials(&[&own], issued.expect("a certificate")))
    };
    let day = Span::days(1);
    let by_foreign = foreign.issue(&identity("c", "agent/n1"), CERTIFICATE_VALID).expect("a certificate");
    for (client, why) in [
        (Tls::new(credentials(&[&own], by_foreign)), "another authority"),
        (of_cluster("c", -2 * day, -day), "expired"),
        (of_cluster("c", day, 2 * day), "not yet valid"),
        (of_cluster("d", -day, day), "another cluster"),
    ] {
        let (seen, echo) = meet(&server, &client, Expected::Role(Role::Member)).await;
        assert!(seen.is_err() && echo.is_err(), "{why}: {seen:?} {echo:?}");
        // For the log: the identity that the certificate names. A client of another cluster refuses the server first.
        let error = seen.expect_err("refused");
        assert!(error.contains("/agent/n1") || why == "another cluster", "{why}: {error}");
    }
}

/// What an open server learns of a client that shows this.
async fn seen_by_open_server(server: &Tls, config: ClientConfig) -> Result<Option<Identity>, String> {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let accepting = async {
        let (stream, _) = listener.accept().await.expect("a client");
        let accepted = server.accept_optional(stream).await;
        accepted.map(|(_, client)| client.map(|client| client.identity)).map_err(|error| error.to_string())
    };
    let connecting = async {
        let stream = TcpStream::connect(address).await.expect("listening");
        let name = ServerName::try_from("reprise").expect("a valid name");
        TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(|error| error.to_string())
    };
    // The client's side must stay until the server has read its last message.
    let (seen, _client) = tokio::join!(accepting, connecting);
    seen
}

#[tokio::test]
async fn open_server_admits_clients_without_a_certificate_and_refuses_invalid_ones() {
    let (own, foreign) = (authority(), authority());
    let server = tls(&own, "member");
    let config = |authority: &Authority| tls(authority, "admin").client_config(Expected::Role(Role::Member));
    assert_eq!(seen_by_open_server(&server, config(&own)).await, Ok(Some(identity("c", "admin"))));
    let anonymous = tls(&own, "admin").anonymous_client_config(Expected::Role(Role::Member));
    assert_eq!(seen_by_open_server(&server, anonymous).await, Ok(None));
    let mut invalid = config(&own);
    invalid.client_auth_cert_resolver = config(&foreign).client_auth_cert_resolver;
    let refused = seen_by_open_server(&server, invalid).await;
    assert!(refused.is_err(), "{refused:?}");
}

#[tokio::test]
async fn client_without_a_certificate_is_refused() {
    let authority = authority();
    let server = tls(&authority, "member");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let config = tls(&authority, "agent/n1").anonymous_client_config(Expected::Role(Role::Member));
    let accepting = async {
        let (stream, _) = listener.accept().await.expect("a client");
        server.accept(stream).await.map(|_| ())
    };
    let connecting = async {
        let stream = TcpStream::connect(address).await.expect("listening");
        let name = ServerName::try_from("reprise").expect("a valid name");
        let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        stream.read_u8().await
    };
    let (accepted, answer) = tokio::join!(accepting, connecting);
    let error = accepted.expect_err("no certificate").to_string();
    assert!(error.contains("peer sent no certificates"), "{error}");
    assert!(answer.is_err(), "{answer:?}");
}

#[tokio::test]
async fn silent_and_plain_clients_are_closed_in_time() {
    let authority = authority();
    let server = tls(&authority, "member");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let mut silent = TcpStream::connect(address).await.expect("listening");
    let (stream, _) = listener.accept().await.expect("a client");
    let began = Instant::now();
    let error = server.accept(stream).await.map(|_| ()).expect_err("no handshake");
    assert!(matches!(error, TlsError::Timeout) && began.elapsed() < 2 * HANDSHAKE_WITHIN, "{error}");
    assert_eq!(silent.read(&mut [0; 1]).await.ok(), Some(0));
    let mut plain = TcpStream::connect(address).await.expect("listening");
    let (stream, _) = listener.accept().await.expect("a client");
    plain.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").await.expect("sent");
    let error = server.accept(stream).await.map(|_| ()).expect_err("no handshake");
    assert!(matches!(error, TlsError::NotTls), "{error}");
}

#[tokio::test]
async fn authority_is_replaced_in_three_steps_without_a_refused_connection() {
    let (old, new) = (authority(), authority());
    let issue = |by: &Authority, role: &str| {
        by.issue(&identity("c", role), CERTIFICATE_VALID).expect("a certificate")
    };
    let (member, agent) = (tls(&old, "member"), tls(&old, "agent/n1"));
    let expected = || Expected::Role(Role::Member);
    for (trusted, by) in [(vec![&old, &new], &old), (vec![&old, &new], &new), (vec![&new], &new)] {
        // Each process changes at its own time.
        for (process, role) in [(&agent, "agent/n1"), (&member, "member")] {
            process.replace(credentials(&trusted, issue(by, role)));
            let (seen, echo) = meet(&member, &agent, expected()).await;
            assert_eq!((seen, echo), (Ok(identity("c", "agent/n1")), Ok(7)));
        }
    }
    let (seen, echo) = meet(&member, &tls(&old, "agent/n1"), expected()).await;
    assert!(seen.is_err() && echo.is_err(), "the old authority counts for nothing");
}

#[test]
fn clocks_may_differ_by_an_hour_from_issue_to_renewal() {
    let authority = authority();
    let issued = authority.issue(&identity("c", "agent/n1"), CERTIFICATE_VALID).expect("a certificate");
    let verifier = tls(&authority, "member");
    let other = credentials(&[&authority], issued);
    let accepts = |clock: std::time::SystemTime| {
        let now =
            UnixTime::since_unix_epoch(clock.duration_since(std::time::UNIX_EPOCH).expect("after 1970"));
        let (certificate, current) = (&other.key.cert[0], &*verifier.current);
        ClientCertVerifier::verify_client_cert(current, certificate, &[], now).is_ok()
    };
    let (hour, now) = (Duration::from_secs(3_600), std::time::SystemTime::now());
    assert!(SKEW >= Span::hours(1));
    // At the issue, by a clock that is late; at the renewal and until the end, by one that is early.
    assert!(accepts(now - hour) && !accepts(now - 3 * hour));
    let renewal = other.not_after - other.valid_for() / 3;
    assert!(other.is_renewal_due(renewal) && accepts(renewal + hour));
    assert!(accepts(other.not_after - hour - hour / 60) && !accepts(other.not_after + hour));
}
