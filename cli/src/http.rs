//! Minimal HTTP GET client for the status pages of admin ports.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Timeout of connecting, sending and receiving, each.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Largest accepted response: more than the status page of 1,000 nodes.
const BODY_BYTES_MAX: u64 = 16 << 20;

/// Response of an admin port.
#[derive(Clone, Debug)]
pub(crate) struct Response {
    /// HTTP status code.
    pub(crate) code: u16,
    pub(crate) body: String,
}

/// Fetches `path` from `address` (`host:port`); returns the body of a 200 response.
pub(crate) fn get(address: &str, path: &str) -> anyhow::Result<String> {
    body(ask(address, path, TIMEOUT)?, address, path)
}

/// Fetches `path` from `address`. `timeout` bounds connecting, each read and each write, not the whole call.
pub(crate) fn ask(address: &str, path: &str, timeout: Duration) -> anyhow::Result<Response> {
    let target = address
        .to_socket_addrs()
        .with_context(|| format!("invalid address \"{address}\": expected host:port"))?
        .next()
        .with_context(|| format!("\"{address}\" resolves to no address"))?;
    let mut stream = TcpStream::connect_timeout(&target, timeout)
        .with_context(|| format!("cannot connect to {address}"))?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    stream.write_all(request(address, path).as_bytes())?;
    let mut response = String::new();
    stream
        .take(BODY_BYTES_MAX)
        .read_to_string(&mut response)
        .with_context(|| format!("reading from {address}"))?;
    parse(&response, address)
}

/// Like [`get`], but asynchronous and without a timeout: the caller sets one.
pub(crate) async fn get_async(address: &str, path: &str) -> anyhow::Result<String> {
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
    body(parse(&response, address)?, address, path)
}

/// Formats an HTTP/1.0 request: the server closes the connection after the body, so there are no chunks to
/// parse.
fn request(address: &str, path: &str) -> String {
    format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n")
}

fn parse(response: &str, address: &str) -> anyhow::Result<Response> {
    let parts = response.split_once("\r\n\r\n").and_then(|(head, body)| {
        let code = head.split_whitespace().nth(1)?.parse().ok()?;
        Some(Response { code, body: body.to_owned() })
    });
    parts.with_context(|| format!("invalid HTTP response from {address}"))
}

fn body(Response { code, body }: Response, address: &str, path: &str) -> anyhow::Result<String> {
    ensure!(code == 200, "{address}{path}: HTTP status {code}");
    Ok(body)
}
