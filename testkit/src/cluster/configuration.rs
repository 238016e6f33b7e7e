//! Configuration files of a cluster's processes.

use std::path::{Path, PathBuf};

use reprise_policy::ByteSize;

use super::AgentSizes;

/// Lifetime of members that share a store: etcd's minimum with its default election timeout.
const TIME_TO_LIVE: &str = "2s";

/// Maximum size of a region of an agent's arena.
const REGION_BYTES_MAX: u64 = 64 << 20;

/// Store of the members' durable state.
#[derive(Clone, Debug)]
pub(super) enum StoreChoice {
    /// A file.
    Embedded(PathBuf),
    /// An etcd at this URL.
    Etcd(String),
}

/// Settings that differ between members.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemberConfig<'a> {
    pub(super) name: &'a str,
    /// Address of its gRPC services; port 0 selects a free port.
    pub(super) listen: &'a str,
    pub(super) store: &'a StoreChoice,
}

/// Settings that differ between agents.
#[derive(Clone, Debug)]
pub(super) struct AgentConfig<'a> {
    pub(super) node: &'a str,
    /// Its folder.
    pub(super) home: &'a Path,
    pub(super) pool: &'a Path,
    pub(super) sizes: AgentSizes,
    /// Addresses of the control plane's members.
    pub(super) members: Vec<String>,
}

impl MemberConfig<'_> {
    pub(super) fn text(&self) -> String {
        let store = match self.store {
            StoreChoice::Embedded(path) => format!("kind = \"embedded\"\npath = {}", quoted(path)),
            StoreChoice::Etcd(endpoint) => format!("kind = \"etcd\"\nendpoints = [\"{endpoint}\"]"),
        };
        format!(
            "listen = \"{}\"\nadmin = \"127.0.0.1:0\"\n\n[store]\n{store}\n\n[member]\nname = \"{}\"\ntime_to_live = \
             \"{TIME_TO_LIVE}\"\n",
            self.listen, self.name
        )
    }
}

impl AgentConfig<'_> {
    pub(super) fn text(&self) -> String {
        let moves = self.sizes.moves.map(|bytes| format!("\n[placement]\nbandwidth = \"{bytes}\"\n"));
        // Only one engine per node, which may use the whole memory for sessions.
        format!(
            "[node]\nname = \"{node}\"\n\n[session]\nsocket = {socket}\n\n[arena]\nbytes = \"{arena}\"\nregion_bytes = \
             \"{region}\"\n\n[pool]\nreserve_bytes = \"64MiB\"\ndevices = [{{ path = {pool}, bytes = \"{bytes}\" }}]\n\n[cache]\n\
             arena_session_permille = 1000\n\n[peers]\nlisten = \"127.0.0.1:0\"\n\n[controlplane]\naddress = \
             {address}\n\n[admin]\nlisten = \"127.0.0.1:0\"\n{moves}",
            moves = moves.unwrap_or_default(),
            node = self.node,
            socket = quoted(&self.home.join("agent.sock")),
            arena = self.sizes.arena,
            region = ByteSize(self.sizes.arena.0.min(REGION_BYTES_MAX)),
            pool = quoted(self.pool),
            bytes = self.sizes.pool,
            address = self.address(),
        )
    }

    /// Returns one member as a string, several as a list.
    fn address(&self) -> String {
        match self.members.as_slice() {
            [one] => format!("\"{one}\""),
            several => format!("{several:?}"),
        }
    }
}

/// Returns a path as a TOML string.
fn quoted(path: &Path) -> String {
    toml::Value::String(path.to_string_lossy().into_owned()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> toml::Table {
        text.parse().unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    #[test]
    fn member_configuration_has_name_and_store() {
        let store = StoreChoice::Etcd("http://127.0.0.1:2379".to_owned());
        let config = parse(&MemberConfig { name: "a", listen: "127.0.0.1:7", store: &store }.text());
        assert_eq!(config["listen"].as_str(), Some("127.0.0.1:7"));
        assert_eq!(config["member"]["name"].as_str(), Some("a"));
        assert_eq!(config["store"]["endpoints"][0].as_str(), Some("http://127.0.0.1:2379"));
        let store = StoreChoice::Embedded("a \"b\"".into());
        let config = parse(&MemberConfig { name: "a", listen: "127.0.0.1:0", store: &store }.text());
        assert_eq!(config["store"]["path"].as_str(), Some("a \"b\""));
    }

    #[test]
    fn agent_configuration_has_one_member_as_string_and_several_as_list() {
        let sizes =
            AgentSizes { arena: ByteSize(192 << 20), pool: ByteSize(3 << 30), moves: Some(ByteSize(0)) };
        let address = |members: &[&str]| {
            let members = members.iter().map(|&member| member.to_owned()).collect();
            let (home, pool) = (Path::new("/home"), Path::new("/pool"));
            let text = AgentConfig { node: "n", home, pool, sizes, members }.text();
            let config = parse(&text);
            assert_eq!(config["placement"]["bandwidth"].as_str(), Some("0"));
            config["controlplane"]["address"].clone()
        };
        assert_eq!(address(&["a:1"]), toml::Value::from("a:1"));
        assert_eq!(address(&["a:1", "b:2"]), toml::Value::from(vec!["a:1", "b:2"]));
    }
}
