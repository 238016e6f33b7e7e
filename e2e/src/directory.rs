//! What the members of the control plane say they hold, key by key, beside what the nodes have.
//!
//! A snapshot is read as `reprise events` reads it: from every member, so that no replica may be told twice. A node has no page
//! with its keys, but its agent answers for each whether it is there ([`Engine::matches`], from this node alone). When all replicas that
//! are told of a node are there, and as many are told in each tier as the node counts there, then the two are the same. What that does
//! not tell apart is two blocks of one node, of which one is told on NVMe and the other one is there: both must be in DRAM.

use std::collections::{BTreeMap, BTreeSet};

use reprise_client::{Scope, Source};
use serde_json::Value;

use crate::cli::reprise;
use crate::wait::{PATIENCE, wait_until};
use crate::{Agent, ControlPlane, Engine, content};

/// Replicas by the number of their node and their tier (`dram` or `nvme`), as keys in hexadecimal.
#[derive(Debug, Default)]
pub struct Told(BTreeMap<(u64, String), BTreeSet<String>>);

/// The numbers of blocks, by their keys in hexadecimal.
#[derive(Debug)]
pub struct Numbers(BTreeMap<String, u64>);

/// What all members hold, as the one that is asked lists them.
///
/// # Panics
/// When a member does not answer, or a replica is told twice.
pub fn snapshot(asked: &ControlPlane) -> Told {
    let mut told = Told::default();
    reprise(asked, &["events"]).iter().for_each(|line| told.take(line));
    told
}

impl Told {
    fn take(&mut self, line: &Value) {
        let event = line["event"].as_str().expect("a line says what it is");
        match event {
            "snapshot" | "current" => {}
            "added" => {
                let text = |field: &str| line[field].as_str().expect("text").to_owned();
                let node = line["node"].as_u64().expect("a number");
                let fresh = self.0.entry((node, text("tier"))).or_default().insert(text("key"));
                assert!(fresh, "a replica is told twice: {line}");
            }
            other => panic!("'{other}' in the snapshot of a directory at rest: {line}"),
        }
    }

    /// What is told of a node in a tier.
    fn of(&self, node: u64, tier: &str) -> BTreeSet<String> {
        self.0.get(&(node, tier.to_owned())).cloned().unwrap_or_default()
    }

    /// Compares what is told of a node with what its agent counts, and has.
    ///
    /// # Panics
    /// When they differ.
    pub fn assert_is_had(&self, agent: &Agent, engine: &Engine, numbers: &Numbers, asked: &ControlPlane) {
        let status = agent.admin().json("/status");
        let name = &status["node"]["name"];
        // Numbers are the store's: an agent may not have heard of its new one from every member yet. One that has no blocks is
        // not waited for before.
        let node = wait_until("a member knows the node", PATIENCE, || {
            let nodes = asked.admin().json("/nodes");
            let node = nodes.as_array().into_iter().flatten().find(|node| node["name"] == *name);
            node.and_then(|node| node["node"].as_u64())
        });
        let [dram, nvme] = ["dram", "nvme"].map(|tier| self.of(node, tier));
        for (tier, told) in [("dram_blocks", &dram), ("nvme_blocks", &nvme)] {
            assert_eq!(Some(told.len() as u64), status["counters"][tier].as_u64(), "{tier} of {name}");
        }
        let only_nvme: BTreeSet<String> = nvme.difference(&dram).cloned().collect();
        for (keys, source) in [(dram, Source::OwnDram), (only_nvme, Source::OwnNvme)] {
            let told: Vec<u64> = keys.iter().map(|key| numbers.of(key)).collect();
            let had = engine.matches(&told, Scope::Local);
            assert_eq!(had, vec![source; told.len()], "{name} has not all that is told of it");
        }
    }
}

impl Numbers {
    /// Of these blocks.
    pub fn of_all(numbers: &[u64]) -> Numbers {
        Numbers(numbers.iter().map(|number| (content::key(*number).to_string(), *number)).collect())
    }

    fn of(&self, key: &str) -> u64 {
        *self.0.get(key).unwrap_or_else(|| panic!("nobody has saved {key}, which is told"))
    }
}
