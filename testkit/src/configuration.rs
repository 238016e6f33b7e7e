//! Configuration files of agents and members, for processes on hosts of one machine.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::net::Ipv4Addr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use reprise_policy::{ByteSize, TenantName, TenantSalt, prefix_hash};
use serde_json::{Value, json};
use toml::Table;

/// Settings of an agent that every test or command chooses.
#[derive(Clone, Debug)]
pub struct AgentConfig<'a> {
    /// Node name.
    pub node: &'a str,
    /// Socket of engine sessions.
    pub socket: &'a Path,
    /// Address on which it listens, with free ports.
    pub address: Ipv4Addr,
    /// Size of the arena.
    pub arena: ByteSize,
    /// Size of one region of the arena.
    pub region: ByteSize,
    /// File of the pool and its size; `None`: blocks are in memory only.
    pub pool: Option<(&'a Path, ByteSize)>,
    /// Members of the control plane, `host:port`; empty: stand-alone.
    pub control_plane: Vec<String>,
    /// Folder with its certificates; `None`: plain connections, which need a loopback address.
    pub tls: Option<&'a Path>,
}

/// Settings of a member of the control plane.
#[derive(Clone, Copy, Debug)]
pub struct MemberConfig<'a> {
    /// Address of its gRPC services; port 0 selects a free port.
    pub listen: &'a str,
    /// Address of its admin port; port 0 selects a free port.
    pub admin: &'a str,
    /// Store of the durable state.
    pub store: &'a StoreChoice,
    /// Name of the member, if it is not the default.
    pub name: Option<&'a str>,
    /// Folder with its certificates; `None`: plain connections, which need loopback addresses.
    pub tls: Option<&'a Path>,
}

/// Store of the members' durable state.
#[derive(Clone, Debug)]
pub enum StoreChoice {
    /// Memory, which is lost with the process.
    Memory,
    /// A file.
    Embedded(PathBuf),
    /// An etcd at this URL.
    Etcd(String),
}

impl AgentConfig<'_> {
    /// Returns the text of the file with further settings in TOML, which replace those of the same names. One
    /// session may use the whole arena, because a node has few engines, and traces may be recorded.
    ///
    /// # Panics
    /// If `more` is not valid TOML.
    pub fn text(&self, more: &str) -> String {
        let devices: Vec<Value> = self
            .pool
            .iter()
            .map(|(path, bytes)| json!({ "path": path, "bytes": bytes.to_string() }))
            .collect();
        let listen = format!("{}:0", self.address);
        let settings = json!({
            "node": { "name": self.node },
            "session": { "socket": self.socket, "salts": salts_folder(self.socket) },
            "arena": { "bytes": self.arena.to_string(), "region_bytes": self.region.to_string() },
            "pool": { "devices": devices },
            "cache": { "arena_session_permille": 1000 },
            "peers": { "listen": listen },
            "controlplane": { "address": self.control_plane },
            "admin": { "listen": listen, "trace": true },
            "tls": connections(self.tls),
        });
        render(&settings, more)
    }
}

impl MemberConfig<'_> {
    /// Returns the text of the file with further settings in TOML, which replace those of the same names.
    ///
    /// # Panics
    /// If `more` is not valid TOML.
    pub fn text(&self, more: &str) -> String {
        let store = match self.store {
            StoreChoice::Memory => json!({ "kind": "memory" }),
            StoreChoice::Embedded(path) => json!({ "kind": "embedded", "path": path }),
            StoreChoice::Etcd(endpoint) => json!({ "kind": "etcd", "endpoints": [endpoint] }),
        };
        let tls = connections(self.tls);
        let mut settings = json!({ "listen": self.listen, "admin": self.admin, "store": store, "tls": tls });
        if let Some(name) = self.name {
            settings["member"] = json!({ "name": name });
        }
        render(&settings, more)
    }
}

/// Returns the folder with the isolation salts of an agent's tenants.
pub fn salts_folder(socket: &Path) -> PathBuf {
    socket.with_file_name("salts")
}

/// Number of files that [`provide_salt`] has begun, for their names.
static SALT_FILES: AtomicU64 = AtomicU64::new(0);

/// Provides the isolation salt of a tenant for the agent at `socket`. It derives from the name, so all nodes of a test
/// or demonstration have the same one. Real clusters use random salts.
///
/// # Errors
/// The file cannot be written.
pub fn provide_salt(socket: &Path, tenant: &TenantName) -> io::Result<()> {
    let folder = salts_folder(socket);
    let path = folder.join(tenant.as_str());
    if *tenant == TenantName::default_tenant() || path.exists() {
        return Ok(());
    }
    fs::create_dir_all(&folder)?;
    // Unique: threads of a test provide the same salt at once.
    let number = SALT_FILES.fetch_add(1, Ordering::Relaxed);
    let fresh = folder.join(format!(".{tenant}.{}.{number}", std::process::id()));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
    file.write_all(test_salt(tenant).to_hex().as_bytes())?;
    fs::rename(fresh, path)
}

/// Returns the salt of [`provide_salt`].
pub fn test_salt(tenant: &TenantName) -> TenantSalt {
    TenantSalt::new(prefix_hash::none_hash(tenant.as_str()))
}

/// Returns the section `[tls]`: the folder of the certificates, or plain connections.
fn connections(tls: Option<&Path>) -> Value {
    match tls {
        Some(folder) => json!({ "folder": folder }),
        None => json!({ "plain": true }),
    }
}

fn render(settings: &Value, more: &str) -> String {
    let mut table = Table::try_from(settings).expect("objects are tables");
    merge(&mut table, more.parse().unwrap_or_else(|error| panic!("{error}: {more}")));
    table.to_string()
}

/// Sets the values of `more`; tables are merged.
fn merge(table: &mut Table, more: Table) {
    for (key, value) in more {
        match (table.get_mut(&key), value) {
            (Some(toml::Value::Table(inner)), toml::Value::Table(more)) => merge(inner, more),
            (_, value) => drop(table.insert(key, value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Table {
        text.parse().unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    #[test]
    fn member_configuration_has_name_and_store() {
        let of = |listen, store, name| {
            parse(&MemberConfig { listen, admin: "127.0.0.1:0", store: &store, name, tls: None }.text(""))
        };
        let config = of("127.0.0.1:7", StoreChoice::Etcd("http://127.0.0.1:2379".to_owned()), Some("a"));
        assert_eq!(config["listen"].as_str(), Some("127.0.0.1:7"));
        assert_eq!(config["tls"]["plain"].as_bool(), Some(true));
        assert_eq!(config["member"]["name"].as_str(), Some("a"));
        assert_eq!(config["store"]["endpoints"][0].as_str(), Some("http://127.0.0.1:2379"));
        let config = of("127.0.0.1:0", StoreChoice::Embedded("a \"b\"".into()), None);
        assert_eq!(config["store"]["path"].as_str(), Some("a \"b\""));
    }

    #[test]
    fn agent_configuration_has_all_members_and_further_settings() {
        let config = AgentConfig {
            node: "n",
            socket: Path::new("/run/agent.sock"),
            address: Ipv4Addr::LOCALHOST,
            arena: ByteSize(192 << 20),
            region: ByteSize(64 << 20),
            pool: Some((Path::new("/pool"), ByteSize(3 << 30))),
            control_plane: vec!["a:1".to_owned(), "b:2".to_owned()],
            tls: Some(Path::new("/certificates")),
        };
        let config = parse(&config.text("[placement]\nbandwidth = \"0\"\n[peers]\nstall_timeout = \"1s\""));
        assert_eq!(config["controlplane"]["address"], toml::Value::from(vec!["a:1", "b:2"]));
        assert_eq!(config["pool"]["devices"][0]["path"].as_str(), Some("/pool"));
        assert_eq!(config["placement"]["bandwidth"].as_str(), Some("0"));
        assert_eq!(config["peers"]["listen"].as_str(), Some("127.0.0.1:0"));
        assert_eq!(config["peers"]["stall_timeout"].as_str(), Some("1s"));
        assert_eq!(config["tls"]["folder"].as_str(), Some("/certificates"));
        assert!(config["tls"].get("plain").is_none(), "{config}");
    }
}
