//! Cluster-wide lookup of a chain of keys: queries each key's owner in parallel, and this member for its own
//! keys.
//!
//! A gateway waits for the result before it forwards a prompt, so the wait is bounded ([`ANSWERED_WITHIN`]).
//! Keys without a reply by then are unknown, and counted. With 8,192 keys and 16 members, a call to a member
//! carries 512 keys: 8 KiB of request and about 4 KiB of reply.
//!
//! A slow member delays only calls to itself; at most [`CALLS_PER_MEMBER_MAX`] of them run at once.
//!
//! Calls are not retried after a change of the shard map, because a retry would cost more time than it saves.
//! The affected keys are unknown in one reply.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use reprise_controlplane_core::MemberView;
use reprise_controlplane_core::directory::REPLICAS_PER_KEY_MAX;
use reprise_identity::Security;
use reprise_policy::routing::KeyReplicas;
use reprise_policy::{BlockKey, NodeId, Tier};
use reprise_proto::connection::{Connection, LOOKUP};
use reprise_proto::controlplane::{LookupReply, LookupRequest};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use crate::directory::{DirectoryService, REPLICA_BYTES};
use crate::shards::Shards;

/// Time limit for the replies of all members.
pub(crate) const ANSWERED_WITHIN: Duration = Duration::from_millis(200);
/// Concurrent calls to one member. Their replies take at most 16 × 512 KiB.
const CALLS_PER_MEMBER_MAX: usize = 16;

/// Queries the owners of a chain's keys.
#[derive(Debug)]
pub struct PrefixMatcher {
    directory: Arc<DirectoryService>,
    shards: Arc<Shards>,
    security: Security,
    /// Clients of the other members, by address.
    clients: Mutex<BTreeMap<String, MemberClient>>,
}

/// A client of one other member.
#[derive(Clone, Debug)]
struct MemberClient {
    connection: Connection,
    permits: Arc<Semaphore>,
}

/// Replicas of the keys of a chain.
#[derive(Debug, Default)]
pub struct PrefixMatch {
    /// Result for each key, in chain order.
    keys: Vec<KeyResult>,
    replicas: Vec<(NodeId, Tier)>,
    /// Number of keys whose owner did not reply.
    pub unanswered: u32,
    /// Number of keys in slots for which the inventory of some node is incomplete.
    pub partial: u32,
}

#[derive(Clone, Debug, Default)]
enum KeyResult {
    #[default]
    Unknown,
    /// Range of this key in `replicas`.
    Replicas(Range<usize>),
}

impl PrefixMatcher {
    /// Creates a matcher that queries owners by the map in `shards`, and `directory` for this member's keys.
    pub fn new(directory: Arc<DirectoryService>, shards: Arc<Shards>, security: Security) -> PrefixMatcher {
        PrefixMatcher { directory, shards, security, clients: Mutex::default() }
    }

    /// Looks up all keys of a chain; returns after 200 ms at the latest.
    pub async fn query(&self, keys: &[BlockKey]) -> PrefixMatch {
        let deadline = Instant::now() + ANSWERED_WITHIN;
        let mut chain = PrefixMatch { keys: vec![KeyResult::Unknown; keys.len()], ..PrefixMatch::default() };
        let Some(view) = self.shards.view() else { return chain.count_unanswered() };
        let own = view.map.position(self.shards.name()).map(|own| usize::from(own.0));
        let mut by_owner: Vec<Vec<u32>> = vec![Vec::new(); view.members.len()];
        for (place, key) in (0u32..).zip(keys) {
            if let Some(owner) = view.map.owner_of(key) {
                by_owner[usize::from(owner.0)].push(place);
            }
        }
        let own_places = own.map(|own| std::mem::take(&mut by_owner[own])).unwrap_or_default();
        let mut others = self.query_others(&view, by_owner, keys, deadline);
        if !own_places.is_empty() {
            let own_keys = keys_at(keys, &own_places);
            let answer = timeout_at(deadline, self.directory.look_up(&own_keys, None)).await;
            chain.add_reply(&own_places, answer.unwrap_or_else(late));
        }
        while let Some(answered) = others.join_next().await {
            // The panic hook has logged a panicked task; its keys stay unknown.
            if let Ok((places, answer)) = answered {
                chain.add_reply(&places, answer);
            }
        }
        chain.count_unanswered()
    }

    fn query_others(
        &self,
        view: &MemberView,
        by_owner: Vec<Vec<u32>>,
        keys: &[BlockKey],
        deadline: Instant,
    ) -> JoinSet<(Vec<u32>, Result<LookupReply, Status>)> {
        let mut others = JoinSet::new();
        for (member, places) in view.members.iter().zip(by_owner).filter(|(_, places)| !places.is_empty()) {
            let Some(MemberClient { connection, permits }) = self.client(view, &member.address) else {
                continue;
            };
            let request =
                LookupRequest { keys: BlockKey::pack(&keys_at(keys, &places)).into(), asking_node: 0 };
            let name = member.name.clone();
            others.spawn(async move {
                let call = async {
                    let _permit = permits.acquire().await.expect("the semaphore is never closed");
                    connection.call(LOOKUP, &request).await
                };
                let answer = timeout_at(deadline, call).await.unwrap_or_else(late);
                if let Err(status) = &answer {
                    tracing::debug!(member = %name, %status, "a member did not answer a prefix lookup");
                }
                (places, answer)
            });
        }
        others
    }

    /// The client of a member; its first call connects.
    fn client(&self, view: &MemberView, address: &str) -> Option<MemberClient> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(address) {
            return Some(client.clone());
        }
        clients.retain(|known, _| view.members.iter().any(|member| member.address == *known));
        let connection = Connection::new(address, &self.security)
            .inspect_err(|error| tracing::warn!(address, %error, "ignoring member with an invalid address"))
            .ok()?;
        let client = MemberClient { connection, permits: Arc::new(Semaphore::new(CALLS_PER_MEMBER_MAX)) };
        clients.insert(address.to_owned(), client.clone());
        Some(client)
    }
}

impl PrefixMatch {
    /// Result for each key, in chain order.
    pub fn keys(&self) -> impl Iterator<Item = KeyReplicas<'_>> {
        self.keys.iter().map(|of_key| match of_key {
            KeyResult::Unknown => KeyReplicas::Unknown,
            KeyResult::Replicas(range) if range.len() >= REPLICAS_PER_KEY_MAX => {
                KeyReplicas::Partial(&self.replicas[range.clone()])
            }
            KeyResult::Replicas(range) => KeyReplicas::Complete(&self.replicas[range.clone()]),
        })
    }

    /// Adds an owner's reply for the keys at `places`; ignores a malformed one.
    fn add_reply(&mut self, places: &[u32], answer: Result<LookupReply, Status>) {
        let Ok(reply) = answer else { return };
        let (packed, rest) = reply.replicas.as_chunks::<REPLICA_BYTES>();
        let whole = rest.is_empty()
            && reply.offsets.len() == places.len() + 1
            && reply.offsets.is_sorted()
            && reply.offsets.last().is_some_and(|last| *last as usize <= packed.len());
        if !whole {
            return;
        }
        for (place, bounds) in places.iter().zip(reply.offsets.windows(2)) {
            let first = self.replicas.len();
            let of_key = &packed[bounds[0] as usize..bounds[1] as usize];
            // Skip unknown tiers, which a newer member may report.
            self.replicas.extend(of_key.iter().filter_map(|[low, high, tier, _]| {
                Some((NodeId(u16::from_le_bytes([*low, *high])), Tier::from_wire(*tier)?))
            }));
            self.keys[*place as usize] = KeyResult::Replicas(first..self.replicas.len());
        }
        for index in reply.elsewhere {
            if let Some(place) = places.get(index as usize) {
                self.keys[*place as usize] = KeyResult::Unknown;
            }
        }
        self.partial += reply.partial;
    }

    fn count_unanswered(mut self) -> PrefixMatch {
        let unanswered = self.keys.iter().filter(|of_key| matches!(of_key, KeyResult::Unknown)).count();
        self.unanswered = u32::try_from(unanswered).expect("the number of keys of a call fits");
        self
    }
}

fn late(_: Elapsed) -> Result<LookupReply, Status> {
    Err(Status::deadline_exceeded("no answer in time"))
}

fn keys_at(keys: &[BlockKey], places: &[u32]) -> Vec<BlockKey> {
    places.iter().map(|place| keys[*place as usize]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(keys: usize) -> PrefixMatch {
        PrefixMatch { keys: vec![KeyResult::Unknown; keys], ..PrefixMatch::default() }
    }

    #[test]
    fn merges_replies_in_chain_order_and_counts_unanswered_keys() {
        let mut chain = chain(5);
        let reply = LookupReply {
            offsets: vec![0, 1, 1, 2],
            replicas: vec![7, 0, 1, 3, 8, 0, 2, 0].into(),
            elsewhere: vec![1],
            partial: 2,
            ..LookupReply::default()
        };
        chain.add_reply(&[4, 1, 0], Ok(reply));
        chain.add_reply(&[2], Err(Status::unavailable("gone")));
        let chain = chain.count_unanswered();
        let known: Vec<KeyReplicas<'_>> = chain.keys().collect();
        assert_eq!(known[0], KeyReplicas::Complete(&[(NodeId(8), Tier::Nvme)]));
        assert_eq!(known[4], KeyReplicas::Complete(&[(NodeId(7), Tier::Dram)]));
        assert_eq!(known[1..4], [KeyReplicas::Unknown; 3]);
        assert_eq!((chain.unanswered, chain.partial), (3, 2));
    }

    #[test]
    fn marks_a_full_replica_list_as_partial_and_ignores_malformed_replies() {
        let mut chain = chain(2);
        let many: Vec<u8> = (0..16).flat_map(|node| [node, 0, 1, 0]).collect();
        let reply = LookupReply { offsets: vec![0, 16], replicas: many.into(), ..LookupReply::default() };
        chain.add_reply(&[0], Ok(reply.clone()));
        chain.add_reply(&[1], Ok(LookupReply { offsets: vec![0, 17], ..reply.clone() }));
        chain.add_reply(&[1], Ok(LookupReply { offsets: vec![0], ..reply.clone() }));
        chain.add_reply(&[1], Ok(LookupReply { offsets: vec![2, 1], ..reply }));
        let known: Vec<KeyReplicas<'_>> = chain.keys().collect();
        assert!(matches!(known[0], KeyReplicas::Partial(replicas) if replicas.len() == 16));
        assert_eq!(known[1], KeyReplicas::Unknown);
    }
}
