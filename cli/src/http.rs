//! One GET to an admin port on this machine or in the cluster: enough for status pages, no more.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context, bail};

/// Bound on connecting, sending and receiving, each.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Longest body accepted: a status page of 1,000 nodes.
const BODY_BYTES_MAX: u64 = 16 << 20;

/// Fetches `path` from `address` (`host:port`); returns the body of a 200 response.
pub(crate) fn get(address: &str, path: &str) -> anyhow::Result<String> {
    let target = address
        .to_socket_addrs()
        .with_context(|| format!("'{address}' is not an address"))?
        .next()
        .with_context(|| format!("'{address}' has no address"))?;
    let mut stream = TcpStream::connect_timeout(&target, TIMEOUT)
        .with_context(|| format!("cannot connect to {address}"))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    // HTTP/1.0: the server closes the connection at the end of the body, so no length or chunks to parse.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
    let mut response = String::new();
    stream
        .take(BODY_BYTES_MAX)
        .read_to_string(&mut response)
        .with_context(|| format!("reading from {address}"))?;
    let (head, body) =
        response.split_once("\r\n\r\n").with_context(|| format!("{address} does not speak HTTP"))?;
    if head.split_whitespace().nth(1) != Some("200") {
        bail!("{address}{path}: {}", head.lines().next().unwrap_or("no status line"));
    }
    Ok(body.to_owned())
}
