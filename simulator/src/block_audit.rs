//! Checks of blocks, with knowledge of the whole simulation: engines and agents get only content that was committed
//! under the key, and a moved block is dropped only if it is durable elsewhere.

use std::collections::BTreeSet;

use reprise_policy::BlockKey;

use crate::memory::Tag;
use crate::simulation::Simulation;

/// Records content that an engine commits.
pub(crate) fn committed(simulation: &mut Simulation, key: BlockKey, content: Tag) {
    simulation.truth.entry(key).or_default().insert(content);
}

/// Checks content that an engine has read.
pub(crate) fn read(simulation: &Simulation, key: &BlockKey, content: Tag) {
    let is_committed = simulation.truth.get(key).is_some_and(|known| known.contains(&content));
    assert!(is_committed, "{key}: content {content} was never committed");
}

/// Checks layers that an agent has accepted from a peer.
pub(crate) fn received(simulation: &Simulation, key: &BlockKey, layers: &[Tag]) {
    let known = simulation.truth.get(key).is_some_and(|known| known.contains(&layers[0]));
    let is_committed = known && layers.iter().all(|layer| *layer == layers[0]);
    assert!(is_committed, "{key}: a peer sent {layers:?}, which was never committed");
}

/// Checks that the blocks that a node drops after a move are durable on one of the hosts of its target.
pub(crate) fn moved(simulation: &Simulation, node: usize, hosts: &BTreeSet<usize>, keys: &[BlockKey]) {
    let is_kept = |key: &BlockKey| hosts.iter().any(|host| simulation.was_durable(*host, key));
    let lost = keys.iter().find(|key| !is_kept(key));
    assert!(lost.is_none(), "node {node} drops {lost:?} without a replica on {hosts:?}");
}
