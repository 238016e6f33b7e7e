//! Compares the directory, as the members list it, with the blocks that the nodes have, key by key.
//!
//! A snapshot is read as `reprise events` reads it, from every member, and must not list a replica twice. A
//! node has no page with its keys, but its agent answers for each key whether it has the block
//! ([`Engine::matches`] with local scope). The directory matches a node if every listed replica is there and
//! the counts in each tier are equal. One difference is not detected: with two blocks of one node in DRAM,
//! one listed on NVMe and the other one actually on NVMe.

use std::collections::{BTreeMap, BTreeSet};

use reprise_client::{Scope, Source};
use serde_json::Value;

use crate::cli::reprise;
use crate::wait::{PATIENCE, wait_until};
use crate::{Agent, ControlPlane, Engine, content};

/// Replicas by node number and tier (`dram` or `nvme`), as keys in hexadecimal.
#[derive(Debug, Default)]
pub struct DirectorySnapshot(BTreeMap<(u64, String), BTreeSet<String>>);

/// Block numbers by their keys in hexadecimal.
#[derive(Debug)]
pub struct BlockNumbers(BTreeMap<String, u64>);

/// Returns the replicas in the directory of all members, as `member` lists them.
///
/// # Panics
/// If a member does not respond, or a replica is listed twice.
pub fn snapshot(member: &ControlPlane) -> DirectorySnapshot {
    let mut snapshot = DirectorySnapshot::default();
    reprise(member, &["events"]).iter().for_each(|line| snapshot.take(line));
    snapshot
}

impl DirectorySnapshot {
    fn take(&mut self, line: &Value) {
        let event = line["event"].as_str().expect("a line has its event");
        match event {
            "snapshot" | "current" => {}
            "added" => {
                let text = |field: &str| line[field].as_str().expect("text").to_owned();
                let node = line["node"].as_u64().expect("a number");
                let fresh = self.0.entry((node, text("tier"))).or_default().insert(text("key"));
                assert!(fresh, "a replica is listed twice: {line}");
            }
            other => panic!("'{other}' in the snapshot of an idle directory: {line}"),
        }
    }

    /// Returns the listed keys of a node in a tier.
    fn of(&self, node: u64, tier: &str) -> BTreeSet<String> {
        self.0.get(&(node, tier.to_owned())).cloned().unwrap_or_default()
    }

    /// Compares the listed replicas of a node with the counters and the blocks of its agent.
    ///
    /// # Panics
    /// If they differ.
    pub fn assert_matches_agent(
        &self,
        agent: &Agent,
        engine: &Engine,
        numbers: &BlockNumbers,
        member: &ControlPlane,
    ) {
        let status = agent.admin().json("/status");
        let name = &status["node"]["name"];
        // The node number is the store's: an agent may not have received its new number from every member
        // yet. An agent without blocks was not waited for before.
        let node = wait_until("a member knows the node", PATIENCE, || {
            let nodes = member.admin().json("/nodes");
            let node = nodes.as_array().into_iter().flatten().find(|node| node["name"] == *name);
            node.and_then(|node| node["node"].as_u64())
        });
        let [dram, nvme] = ["dram", "nvme"].map(|tier| self.of(node, tier));
        for (tier, listed) in [("dram_blocks", &dram), ("nvme_blocks", &nvme)] {
            assert_eq!(Some(listed.len() as u64), status["counters"][tier].as_u64(), "{tier} of {name}");
        }
        let only_nvme: BTreeSet<String> = nvme.difference(&dram).cloned().collect();
        for (keys, source) in [(dram, Source::OwnDram), (only_nvme, Source::OwnNvme)] {
            let listed: Vec<u64> = keys.iter().map(|key| numbers.of(key)).collect();
            let matched = engine.matches(&listed, Scope::Local);
            assert_eq!(matched, vec![source; listed.len()], "{name} lacks blocks that are listed for it");
        }
    }
}

impl BlockNumbers {
    /// Returns the numbers of these blocks by key.
    pub fn of_all(numbers: &[u64]) -> BlockNumbers {
        BlockNumbers(numbers.iter().map(|number| (content::key(*number).to_string(), *number)).collect())
    }

    fn of(&self, key: &str) -> u64 {
        *self.0.get(key).unwrap_or_else(|| panic!("the directory lists {key}, which no test has saved"))
    }
}
