//! Parts of starting an etcd that clusters of commands and of tests share: its ports, and its health.

use std::net::{Ipv4Addr, TcpListener};

use crate::http;

/// Ports of an etcd on one host.
#[derive(Clone, Copy, Debug)]
pub struct Ports {
    /// Port for clients.
    pub client: u16,
    /// Port for other etcds.
    pub peer: u16,
    /// Port of health and metrics.
    pub metrics: u16,
}

impl Ports {
    /// Returns ports that are free at the moment; another process may take one before etcd binds it.
    ///
    /// # Errors
    /// No port is free.
    pub fn free() -> std::io::Result<Ports> {
        let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let all = [bind()?, bind()?, bind()?];
        let port = |at: usize| -> std::io::Result<u16> { Ok(all[at].local_addr()?.port()) };
        Ok(Ports { client: port(0)?, peer: port(1)?, metrics: port(2)? })
    }
}

/// Returns whether the etcd with health and metrics at this address, `host:port`, is healthy.
pub fn is_healthy(address: &str) -> bool {
    http::get(address, "/health").is_ok_and(|body| body.contains("\"health\":\"true\""))
}
