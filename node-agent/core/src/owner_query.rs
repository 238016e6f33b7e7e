//! A query about many keys, which the owners of their hash slots answer in parts: lookups and placement
//! requests.
//!
//! ```text
//!   ask ──► one part per owner ──► answers and failures ──► finished
//!    ▲                                    │
//!    └───── fetch the newer map ◄─────────┘ keys have another owner, by a member's newer map
//! ```
//!
//! A member that does not own a key reports that, with the epoch of its map. If its map is newer than ours,
//! that map is fetched, and these keys are sent once more. Otherwise they stay unanswered, like the keys of a
//! member that does not respond.
//!
//! Every input returns the next action. A part whose member cannot be asked fails at once.
//!
//! Pure: the caller carries out the actions, and lets calls fail at the deadline of the query.

#[cfg(test)]
mod tests;

use reprise_policy::shards::MemberIndex;
use reprise_policy::{BlockKey, Epoch, NodeId};

use crate::event::{Placement, Replica};
use crate::members::Routes;

/// Maximum number of members asked for a key: the owner in our map, and the owner in a newer map.
const ATTEMPTS_MAX: u32 = 2;

/// A query in progress. `M` identifies a member, `A` is the answer for one key.
#[derive(Clone, Debug)]
pub struct OwnerQuery<M, A> {
    keys: Vec<BlockKey>,
    answers: Vec<A>,
    /// Answer for keys without one.
    missing: A,
    /// Indices of the keys to ask for in the next attempt.
    open: Vec<u32>,
    attempts: u32,
    /// Number of parts of this attempt without an answer.
    parts_open: usize,
    /// Epoch of the map that routed this attempt, and a member with a newer one.
    routed: Epoch,
    newer: Option<M>,
    /// Whether a member has answered.
    answered: bool,
    counts: QueryCounts,
}

/// The keys of a query that one member owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Owner of the keys, by its position in the map.
    pub owner: MemberIndex,
    /// Indices of the keys within the query.
    pub indices: Vec<u32>,
}

/// A member's answer to a part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartAnswer<A> {
    /// Answers in the order of the part's keys.
    pub answers: Vec<A>,
    /// Indices within the part of keys that the member does not own.
    pub elsewhere: Vec<u32>,
    /// Epoch of the member's map.
    pub map_epoch: Epoch,
}

/// Next action for a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next<M> {
    /// Send each part to its member, in any order. Each must be followed by [`OwnerQuery::answer`] or
    /// [`OwnerQuery::fail`].
    Send(Vec<(M, Part)>),
    /// Wait for the other parts.
    Wait,
    /// Fetch the map of this member, then [ask](OwnerQuery::ask) again; finish if that fails.
    FetchMap(M),
    /// Nothing is left to ask: [finish](OwnerQuery::finish).
    Finish,
}

/// Answer that names nodes, of which this node may not reach some.
pub trait NodeAnswer {
    /// Removes the nodes that cannot be reached. After a restart of the control plane, replicas may be known before
    /// their node.
    fn remove_unreachable(&mut self, is_reachable: impl Fn(NodeId) -> bool);
}

impl NodeAnswer for Vec<Replica> {
    /// A block counts as found only if it can be fetched.
    fn remove_unreachable(&mut self, is_reachable: impl Fn(NodeId) -> bool) {
        self.retain(|replica| is_reachable(replica.node));
    }
}

impl NodeAnswer for Placement {
    /// Blocks cannot be offered to a node without a known address.
    fn remove_unreachable(&mut self, is_reachable: impl Fn(NodeId) -> bool) {
        if matches!(self, Placement::To(node) if !is_reachable(*node)) {
            *self = Placement::Unanswered;
        }
    }
}

/// Numbers of keys by result, over all attempts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueryCounts {
    /// Keys without an owner, or whose owner did not answer.
    pub unanswered: usize,
    /// Keys that the asked member does not own.
    pub redirected: usize,
}

impl<M: Clone, A: Clone + NodeAnswer> OwnerQuery<M, A> {
    /// Creates a query; `missing` is the answer for keys without one.
    pub fn new(keys: Vec<BlockKey>, missing: A) -> OwnerQuery<M, A> {
        OwnerQuery {
            answers: vec![missing.clone(); keys.len()],
            open: (0..).take(keys.len()).collect(),
            keys,
            missing,
            attempts: 0,
            parts_open: 0,
            routed: Epoch(0),
            newer: None,
            answered: false,
            counts: QueryCounts::default(),
        }
    }

    /// Returns the keys in the query's order.
    pub fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    /// Returns the keys of a part.
    pub fn keys_of(&self, part: &Part) -> Vec<BlockKey> {
        part.indices.iter().map(|index| self.keys[*index as usize]).collect()
    }

    /// Returns the counts of keys so far.
    pub fn counts(&self) -> QueryCounts {
        self.counts
    }

    /// Starts an attempt with the current map: sends parts in the order of the map, to the members that can be asked.
    /// Sends nothing after the last attempt.
    pub fn ask(&mut self, routes: Option<&Routes<M>>, can_ask: impl Fn(&M) -> bool) -> Next<M> {
        let open = std::mem::take(&mut self.open);
        (self.newer, self.parts_open) = (None, 0);
        let Some(routes) = routes.filter(|_| self.attempts < ATTEMPTS_MAX) else { return Next::Finish };
        let map = routes.map();
        (self.attempts, self.routed) = (self.attempts + 1, map.epoch());
        let mut by_owner: Vec<Vec<u32>> = vec![Vec::new(); map.members().len()];
        for index in open {
            match map.owner_of(&self.keys[index as usize]) {
                Some(owner) => by_owner[usize::from(owner.0)].push(index),
                None => self.counts.unanswered += 1,
            }
        }
        let owners = (0..).map(MemberIndex).zip(by_owner).filter(|(_, indices)| !indices.is_empty());
        let parts = owners.map(|(owner, indices)| (routes.link(owner).clone(), Part { owner, indices }));
        let (parts, silent): (Vec<_>, Vec<_>) = parts.partition(|(member, _)| can_ask(member));
        self.counts.unanswered += silent.iter().map(|(_, part)| part.indices.len()).sum::<usize>();
        self.parts_open = parts.len();
        if parts.is_empty() { Next::Finish } else { Next::Send(parts) }
    }

    /// Handles the answer of a member to a part. Indices beyond the part are ignored.
    pub fn answer(&mut self, from: M, part: &Part, answer: PartAnswer<A>) -> Next<M> {
        self.close_part();
        self.answered = true;
        for (index, answer) in part.indices.iter().zip(answer.answers) {
            self.answers[*index as usize] = answer;
        }
        let before = self.open.len();
        for index in answer.elsewhere.iter().filter_map(|at| part.indices.get(*at as usize)) {
            // A member's answer for a key that it does not own is void.
            self.answers[*index as usize] = self.missing.clone();
            self.open.push(*index);
        }
        let redirected = self.open.len() - before;
        self.counts.redirected += redirected;
        if redirected > 0 && answer.map_epoch > self.routed {
            self.newer = Some(from);
        }
        self.next()
    }

    /// Handles that the owner of a part did not answer.
    pub fn fail(&mut self, part: &Part) -> Next<M> {
        self.close_part();
        self.counts.unanswered += part.indices.len();
        self.next()
    }

    fn next(&self) -> Next<M> {
        match &self.newer {
            _ if self.parts_open > 0 => Next::Wait,
            Some(member) => Next::FetchMap(member.clone()),
            None => Next::Finish,
        }
    }

    /// Ends the query: returns the answers in the order of the keys, with reachable nodes; `None` if no member has
    /// answered.
    pub fn finish(mut self, is_reachable: impl Fn(NodeId) -> bool) -> Option<Vec<A>> {
        self.answers.iter_mut().for_each(|answer| answer.remove_unreachable(&is_reachable));
        self.answered.then_some(self.answers)
    }

    fn close_part(&mut self) {
        self.parts_open = self.parts_open.checked_sub(1).expect("each part ends once");
    }
}
