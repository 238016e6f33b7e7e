//! `reprise events proxy`: plain ZeroMQ sockets on loopback, for routers of this machine.
//!
//! A member with certificates speaks ZeroMQ's protocol inside TLS, which ZeroMQ itself has not. The proxy copies bytes
//! between a router and the member; the member sees the certificate of the proxy (`--tls`). All local processes can
//! connect to the proxy, so it belongs next to the router, for example into its pod.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use reprise_daemon::connections::{ConnectionLimit, Permit};
use reprise_daemon::rejected_connections::{Listener, RejectedConnections};
use reprise_identity::{Expected, Role, Security};
use reprise_testkit::output::Audience;
use serde::Serialize;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use crate::config::Config;

/// Connections of all routers to one address.
const CONNECTIONS_MAX: usize = 256;

/// Time limit for a connection to a member.
const CONNECTED_WITHIN: Duration = Duration::from_secs(5);

/// Arguments of `reprise events proxy`.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct ProxyArgs {
    /// Listen on this loopback address, and connect to this member: LISTEN=MEMBER.
    ///
    /// For example 127.0.0.1:5557=member-0:5557. Repeat for each member, and for its replay socket.
    #[arg(long = "forward", required = true, value_name = "LISTEN=MEMBER", value_parser = forward)]
    forwards: Vec<Forward>,
}

/// A listener and the member behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Forward {
    listen: SocketAddr,
    member: String,
}

/// Printed once the proxy listens.
#[derive(Serialize)]
struct Ready {
    ready: bool,
    /// Addresses in the order of the arguments.
    listening: Vec<SocketAddr>,
}

fn forward(text: &str) -> Result<Forward, String> {
    let invalid = || format!("invalid \"{text}\": expected LISTEN=MEMBER, like 127.0.0.1:5557=member-0:5557");
    let (listen, member) = text.split_once('=').ok_or_else(invalid)?;
    let listen: SocketAddr = listen.parse().map_err(|_| invalid())?;
    let is_address = member
        .rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0));
    if !is_address {
        return Err(invalid());
    }
    if !listen.ip().to_canonical().is_loopback() {
        return Err(format!(
            "{listen} is not a loopback address: the proxy admits all clients, so listen on 127.0.0.1"
        ));
    }
    Ok(Forward { listen, member: member.to_owned() })
}

pub(super) fn command(args: &ProxyArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let security = config.tls.security_or(Security::Plain)?;
    ensure!(
        matches!(security, Security::Tls(_)),
        "the proxy needs a certificate of a console: name its folder with --tls (`reprise certs issue` writes it)"
    );
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(run(args, &security, audience))
}

async fn run(args: &ProxyArgs, security: &Security, audience: Audience) -> anyhow::Result<()> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut listeners = JoinSet::new();
    let mut listening = Vec::with_capacity(args.forwards.len());
    for Forward { listen, member } in args.forwards.clone() {
        let listener =
            TcpListener::bind(listen).await.with_context(|| format!("cannot listen on {listen}"))?;
        listening.push(listener.local_addr()?);
        listeners.spawn(serve(listener, security.clone(), member));
    }
    audience.print_line(format!("Forwarding {listening:?}; Ctrl-C ends it …"));
    audience.emit(&Ready { ready: true, listening });
    tokio::select! {
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        _ = listeners.join_next() => bail!("a listener ended"),
    }
}

async fn serve(listener: TcpListener, security: Security, member: String) {
    let limit = ConnectionLimit::new(Listener::Events, CONNECTIONS_MAX, RejectedConnections::default());
    let mut connections = JoinSet::new();
    loop {
        let (stream, permit) = limit.accept(&listener).await;
        while connections.try_join_next().is_some() {}
        let (security, member) = (security.clone(), member.clone());
        connections.spawn(async move {
            if let Err(error) = copy(stream, &permit, &security, &member).await {
                tracing::warn!(member, error = format!("{error:#}"), "cannot forward to a member");
            }
        });
    }
}

/// Copies between a router and its member until one of them closes the connection.
async fn copy(
    mut router: TcpStream,
    permit: &Permit,
    security: &Security,
    member: &str,
) -> anyhow::Result<()> {
    router.set_nodelay(true)?;
    let dialled = tokio::time::timeout(CONNECTED_WITHIN, security.dial(member, Expected::Role(Role::Member)));
    let mut stream =
        dialled.await.with_context(|| format!("no connection within {CONNECTED_WITHIN:?}"))??;
    permit.set_busy();
    // Routers close connections at any time.
    let _ = copy_bidirectional(&mut router, &mut stream).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_a_loopback_listener_and_a_member() {
        let read = forward("127.0.0.1:5557=member-0.cache:5557").expect("valid");
        let listen = SocketAddr::from(([127, 0, 0, 1], 5557));
        assert_eq!(read, Forward { listen, member: "member-0.cache:5557".to_owned() });
        assert!(forward("[::1]:0=a:1").is_ok());
        for wrong in
            ["", "127.0.0.1:1", "127.0.0.1=a:1", "127.0.0.1:1=a", "127.0.0.1:1=:1", "127.0.0.1:1=a:0"]
        {
            assert!(forward(wrong).expect_err(wrong).contains("LISTEN=MEMBER"), "{wrong}");
        }
        assert!(forward("0.0.0.0:5557=a:1").expect_err("all addresses").contains("127.0.0.1"));
    }
}
