//! GETs to admin ports on this machine or in the cluster: enough for status pages, no more.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Bound on connecting, sending and receiving, each.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Longest body accepted: a status page of 1,000 nodes.
const BODY_BYTES_MAX: u64 = 16 << 20;

/// What an admin port has answered.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// HTTP's status.
    pub(crate) code: u16,
    pub(crate) body: String,
}

/// Fetches `path` from `address` (`host:port`); returns the body of a 200 response.
pub(crate) fn get(address: &str, path: &str) -> anyhow::Result<String> {
    body(ask(address, path, TIMEOUT)?, address, path)
}

/// Asks for `path` at `address`; connecting, sending and receiving take as long as `patience` at the most, each.
pub(crate) fn ask(address: &str, path: &str, patience: Duration) -> anyhow::Result<Answer> {
    let target = address
        .to_socket_addrs()
        .with_context(|| format!("'{address}' is not an address"))?
        .next()
        .with_context(|| format!("'{address}' has no address"))?;
    let mut stream = TcpStream::connect_timeout(&target, patience)
        .with_context(|| format!("cannot connect to {address}"))?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    stream.write_all(request(address, path).as_bytes())?;
    let mut response = String::new();
    stream
        .take(BODY_BYTES_MAX)
        .read_to_string(&mut response)
        .with_context(|| format!("reading from {address}"))?;
    answer(&response, address)
}

/// As [`get`], beside others, without a bound of its own.
pub(crate) async fn get_beside(address: &str, path: &str) -> anyhow::Result<String> {
    let mut stream = tokio::net::TcpStream::connect(address)
        .await
        .with_context(|| format!("cannot connect to {address}"))?;
    stream.write_all(request(address, path).as_bytes()).await?;
    let mut response = String::new();
    stream
        .take(BODY_BYTES_MAX)
        .read_to_string(&mut response)
        .await
        .with_context(|| format!("reading from {address}"))?;
    body(answer(&response, address)?, address, path)
}

/// HTTP/1.0: the server closes the connection at the end of the body, so no length or chunks to parse.
fn request(address: &str, path: &str) -> String {
    format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n")
}

fn answer(response: &str, address: &str) -> anyhow::Result<Answer> {
    let parts = response.split_once("\r\n\r\n").and_then(|(head, body)| {
        let code = head.split_whitespace().nth(1)?.parse().ok()?;
        Some(Answer { code, body: body.to_owned() })
    });
    parts.with_context(|| format!("{address} does not speak HTTP"))
}

fn body(Answer { code, body }: Answer, address: &str, path: &str) -> anyhow::Result<String> {
    ensure!(code == 200, "{address}{path}: HTTP status {code}");
    Ok(body)
}
