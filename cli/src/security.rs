//! Certificate of the command line (`--tls FOLDER`), which all of its connections to agents and members use.

use std::path::Path;
use std::sync::OnceLock;

use anyhow::Context;
use reprise_identity::{Credentials, Expected, Role, Security, Tls};
use reprise_testkit::http::Client;

/// Set once, before the command runs.
static SECURITY: OnceLock<Security> = OnceLock::new();

/// Reads the certificate of a folder; without one, connections are plain.
///
/// # Errors
/// The files are absent or invalid.
pub(crate) fn open(folder: Option<&Path>) -> anyhow::Result<()> {
    let security = match folder {
        None => Security::Plain,
        Some(folder) => {
            let credentials = Credentials::read(folder).context("--tls")?;
            Security::Tls(Tls::new(credentials))
        }
    };
    // A process runs one command.
    let _ = SECURITY.set(security);
    Ok(())
}

/// Returns the certificate of the command, or plain connections.
pub(crate) fn current() -> Security {
    SECURITY.get().cloned().unwrap_or(Security::Plain)
}

/// Returns a client of the admin port of a node's agent.
pub(crate) fn agent_client(node: &str) -> Client {
    Client::new(current(), Expected::Role(Role::Agent(node.to_owned())))
}

/// Returns a client of the admin ports of agents whose nodes are not known.
pub(crate) fn any_agent_client() -> Client {
    Client::new(current(), Expected::AnyAgent)
}
