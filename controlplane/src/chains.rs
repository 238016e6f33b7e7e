//! What the whole cluster knows of a chain of keys: each key's owner is asked, this member for its own, the others at once.
//!
//! A gateway waits for the answer before it sends a prompt anywhere, so the wait is bounded ([`ANSWERED_WITHIN`]); what
//! has not been answered then is unknown, and counted. A chain of 8,192 keys over 16 members is 512 keys a question and
//! 8 KiB there and about 4 KiB back.
//!
//! A member that does not answer keeps questions waiting for as long, but only those to itself ([`ASKED_AT_ONCE`]).
//!
//! Deliberately absent: a second question after a change of the map, which costs less than it saves here: those keys are
//! unknown for one answer.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use reprise_controlplane_core::directory::REPLICAS_PER_KEY_MAX;
use reprise_policy::routing::Known;
use reprise_policy::{BlockKey, NodeId, Tier};
use reprise_proto::connection::{Connection, LOOKUP};
use reprise_proto::controlplane::{LookupReply, LookupRequest};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use crate::directory::{DirectoryService, REPLICA_BYTES};
use crate::shards::{MemberView, Shards};

/// For the answers of all members.
pub(crate) const ANSWERED_WITHIN: Duration = Duration::from_millis(200);
/// Questions to one member at once: its answers are 16 × 512 KiB at the most, of a chain each.
const ASKED_AT_ONCE: usize = 16;

/// Asks owners; see the module.
#[derive(Debug)]
pub struct Chains {
    directory: Arc<DirectoryService>,
    shards: Arc<Shards>,
    /// To other members, by address.
    lines: Mutex<BTreeMap<String, Line>>,
}

/// To one member.
#[derive(Clone, Debug)]
struct Line {
    connection: Connection,
    asking: Arc<Semaphore>,
}

/// What is known of the keys of a chain.
#[derive(Debug, Default)]
pub struct Chain {
    /// Of each key, in order.
    keys: Vec<OfKey>,
    replicas: Vec<(NodeId, Tier)>,
    /// Keys whose owner has not answered.
    pub unanswered: u32,
    /// Keys in slots of which some node has not announced its whole inventory.
    pub partial: u32,
}

#[derive(Clone, Debug, Default)]
enum OfKey {
    #[default]
    Nothing,
    /// A range of the replicas.
    Held(Range<usize>),
}

impl Chains {
    /// Asks by the map of `shards`, and `directory` for this member's own keys.
    pub fn new(directory: Arc<DirectoryService>, shards: Arc<Shards>) -> Chains {
        Chains { directory, shards, lines: Mutex::default() }
    }

    /// What is known of a chain, 200 ms from now at the latest.
    pub async fn known(&self, keys: &[BlockKey]) -> Chain {
        let deadline = Instant::now() + ANSWERED_WITHIN;
        let mut chain = Chain { keys: vec![OfKey::Nothing; keys.len()], ..Chain::default() };
        let Some(view) = self.shards.view() else { return chain.counted() };
        let own = view.map.position(self.shards.name()).map(|own| usize::from(own.0));
        let mut by_owner: Vec<Vec<u32>> = vec![Vec::new(); view.members.len()];
        for (place, key) in (0u32..).zip(keys) {
            if let Some(owner) = view.map.owner_of(key) {
                by_owner[usize::from(owner.0)].push(place);
            }
        }
        let own_places = own.map(|own| std::mem::take(&mut by_owner[own])).unwrap_or_default();
        let mut others = self.ask_others(&view, by_owner, keys, deadline);
        if !own_places.is_empty() {
            let own_keys = at(keys, &own_places);
            let answer = timeout_at(deadline, self.directory.look_up(&own_keys, None)).await;
            chain.take(&own_places, answer.unwrap_or_else(late));
        }
        while let Some(answered) = others.join_next().await {
            // A task that panicked has said so; its keys stay unknown.
            if let Ok((places, answer)) = answered {
                chain.take(&places, answer);
            }
        }
        chain.counted()
    }

    fn ask_others(
        &self,
        view: &MemberView,
        by_owner: Vec<Vec<u32>>,
        keys: &[BlockKey],
        deadline: Instant,
    ) -> JoinSet<(Vec<u32>, Result<LookupReply, Status>)> {
        let mut others = JoinSet::new();
        for (member, places) in view.members.iter().zip(by_owner).filter(|(_, places)| !places.is_empty()) {
            let Some(Line { connection, asking }) = self.line(view, &member.address) else { continue };
            let request = LookupRequest { keys: BlockKey::pack(&at(keys, &places)).into(), asking_node: 0 };
            let name = member.name.clone();
            others.spawn(async move {
                let call = async {
                    let _asking = asking.acquire().await.expect("the semaphore is never closed");
                    connection.call(LOOKUP, &request).await
                };
                let answer = timeout_at(deadline, call).await.unwrap_or_else(late);
                if let Err(status) = &answer {
                    tracing::debug!(member = %name, %status, "a member has not answered for its part of a chain");
                }
                (places, answer)
            });
        }
        others
    }

    /// The line to a member; connected by its first call.
    fn line(&self, view: &MemberView, address: &str) -> Option<Line> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = lines.get(address) {
            return Some(line.clone());
        }
        lines.retain(|known, _| view.members.iter().any(|member| member.address == *known));
        let connection = Connection::to(address)
            .inspect_err(|error| tracing::warn!(address, %error, "a member's address is none"))
            .ok()?;
        let line = Line { connection, asking: Arc::new(Semaphore::new(ASKED_AT_ONCE)) };
        lines.insert(address.to_owned(), line.clone());
        Some(line)
    }
}

impl Chain {
    /// Of each key, in order.
    pub fn keys(&self) -> impl Iterator<Item = Known<'_>> {
        self.keys.iter().map(|of_key| match of_key {
            OfKey::Nothing => Known::Nothing,
            OfKey::Held(range) if range.len() >= REPLICAS_PER_KEY_MAX => {
                Known::Crowded(&self.replicas[range.clone()])
            }
            OfKey::Held(range) => Known::Replicas(&self.replicas[range.clone()]),
        })
    }

    /// An owner's answer for the keys at these places. What does not fit them is no answer.
    fn take(&mut self, places: &[u32], answer: Result<LookupReply, Status>) {
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
            // Tiers that this member does not know are left out: a newer one may have more.
            self.replicas.extend(of_key.iter().filter_map(|[low, high, tier, _]| {
                Some((NodeId(u16::from_le_bytes([*low, *high])), Tier::from_wire(*tier)?))
            }));
            self.keys[*place as usize] = OfKey::Held(first..self.replicas.len());
        }
        for index in reply.elsewhere {
            if let Some(place) = places.get(index as usize) {
                self.keys[*place as usize] = OfKey::Nothing;
            }
        }
        self.partial += reply.partial;
    }

    fn counted(mut self) -> Chain {
        let unanswered = self.keys.iter().filter(|of_key| matches!(of_key, OfKey::Nothing)).count();
        self.unanswered = u32::try_from(unanswered).expect("as many as keys of one call");
        self
    }
}

fn late(_: Elapsed) -> Result<LookupReply, Status> {
    Err(Status::deadline_exceeded("no answer in time"))
}

fn at(keys: &[BlockKey], places: &[u32]) -> Vec<BlockKey> {
    places.iter().map(|place| keys[*place as usize]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(keys: usize) -> Chain {
        Chain { keys: vec![OfKey::Nothing; keys], ..Chain::default() }
    }

    #[test]
    fn answers_come_together_in_the_order_of_the_chain_and_gaps_are_counted() {
        let mut chain = chain(5);
        let reply = LookupReply {
            offsets: vec![0, 1, 1, 2],
            replicas: vec![7, 0, 1, 3, 8, 0, 2, 0].into(),
            elsewhere: vec![1],
            partial: 2,
            ..LookupReply::default()
        };
        chain.take(&[4, 1, 0], Ok(reply));
        chain.take(&[2], Err(Status::unavailable("gone")));
        let chain = chain.counted();
        let known: Vec<Known<'_>> = chain.keys().collect();
        assert_eq!(known[0], Known::Replicas(&[(NodeId(8), Tier::Nvme)]));
        assert_eq!(known[4], Known::Replicas(&[(NodeId(7), Tier::Dram)]));
        assert_eq!(known[1..4], [Known::Nothing; 3]);
        assert_eq!((chain.unanswered, chain.partial), (3, 2));
    }

    #[test]
    fn an_answer_with_as_many_replicas_as_it_may_have_is_one_of_many_and_one_that_does_not_fit_is_none() {
        let mut chain = chain(2);
        let many: Vec<u8> = (0..16).flat_map(|node| [node, 0, 1, 0]).collect();
        let reply = LookupReply { offsets: vec![0, 16], replicas: many.into(), ..LookupReply::default() };
        chain.take(&[0], Ok(reply.clone()));
        chain.take(&[1], Ok(LookupReply { offsets: vec![0, 17], ..reply.clone() }));
        chain.take(&[1], Ok(LookupReply { offsets: vec![0], ..reply.clone() }));
        chain.take(&[1], Ok(LookupReply { offsets: vec![2, 1], ..reply }));
        let known: Vec<Known<'_>> = chain.keys().collect();
        assert!(matches!(known[0], Known::Crowded(replicas) if replicas.len() == 16));
        assert_eq!(known[1], Known::Nothing);
    }
}
