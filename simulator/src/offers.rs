//! Offers of blocks between agents: sending, answers, losses, deadlines.
//!
//! The contract is that of the offers of `node-agent/transport`, with the names that `node-agent/src/executor.rs`
//! resolves. Offers use the connections of fetches; an offer without an answer fails at its deadline, or with its
//! connection. An offer names a tenant. An agent that does not know the name, or does not know the offering node,
//! refuses the offer. When and what to offer is decided by the core.
//!
//! Not reproduced: cancelling. The other core answers at once, and a late answer is dropped.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_agent_core::effect::{Offer, OfferId, PeerOfferId};
use reprise_agent_core::event::{Event, PeerEvent, PeerOffer};
use reprise_agent_core::limits::OFFER_RETRY_MAX;
use reprise_policy::{NodeId, TenantId, Tick};

use crate::environment::Environment;
use crate::messages::{Message, PeerMessage};
use crate::network::{Host, LineId};
use crate::outcomes::{Follow, Outcomes};
use crate::peers::PeerLines;
use crate::placement_audit::PlacementAudit;
use crate::setup::{CLOCK_GRAIN, Variant};
use crate::simulation::{AgentStep, take_where};

/// Maximum number of concurrent offers of a node: one to each other node for each batch.
const OFFERS_PER_NODE_MAX: usize = 42;

/// Offers of one agent; see the module.
#[derive(Debug)]
pub(crate) struct Offers {
    node: usize,
    pub(crate) open: BTreeMap<OfferId, OpenOffer>,
    pub(crate) received: BTreeMap<PeerOfferId, ReceivedOffer>,
    received_count: u64,
}

/// An offer that the peer has not answered.
#[derive(Clone, Debug)]
pub(crate) struct OpenOffer {
    line: LineId,
    keys: usize,
    bytes: u64,
    /// By the agent's clock.
    deadline: Tick,
}

/// A peer's offer without an answer.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedOffer {
    line: LineId,
    offer: OfferId,
    keys: usize,
}

impl Offers {
    pub(crate) fn new(node: usize) -> Offers {
        Offers { node, open: BTreeMap::new(), received: BTreeMap::new(), received_count: 0 }
    }

    // ---- offering side ------------------------------------------------------------------------------------

    /// Sends an offer over a connection; `None`: the peer or the name of the tenant is unknown.
    pub(crate) fn offer(&mut self, env: &mut Environment, line: Option<LineId>, offer: Offer) {
        let Offer { offer: id, layout, deadline, .. } = offer;
        let keys = offer.keys.len();
        let Some(line) = line else {
            let failed = AgentStep::Event(Event::Peer(PeerEvent::OfferFailed { offer: id }));
            return env.later(self.node, Duration::ZERO, failed);
        };
        let until = env.time(Host::Node(self.node)).after(deadline);
        let bytes = layout.slot_bytes() * keys as u64;
        self.open.insert(id, OpenOffer { line, keys, bytes, deadline: until });
        env.count("offers");
        env.send(line, 1, Message::Peer(PeerMessage::Offer(Box::new(offer))));
        env.later(self.node, deadline, AgentStep::OfferDeadline(id));
    }

    /// Fails an offer without an answer at its deadline.
    pub(crate) fn deadline(
        &mut self,
        env: &mut Environment,
        lines: &mut PeerLines,
        id: OfferId,
        out: &mut Outcomes,
    ) {
        if env.setup.variant == Variant::OffersWithoutDeadline {
            return;
        }
        let Some(offer) = self.open.remove(&id) else { return };
        lines.forget_if_dead(env, offer.line);
        env.count("offers unanswered");
        out.event(Event::Peer(PeerEvent::OfferFailed { offer: id }));
    }

    /// Handles the end of a connection.
    pub(crate) fn line_lost(&mut self, line: LineId, out: &mut Outcomes) {
        self.received.retain(|_, received| received.line != line);
        let lost = take_where(&mut self.open, |offer| offer.line == line);
        lost.into_iter().for_each(|(offer, _)| out.event(Event::Peer(PeerEvent::OfferFailed { offer })));
    }

    pub(crate) fn answered(
        &mut self,
        env: &Environment,
        placed: &mut PlacementAudit,
        (id, taken, retry_after): (OfferId, Vec<u32>, Duration),
        out: &mut Outcomes,
    ) {
        let Some(offer) = self.open.remove(&id) else { return };
        assert!(taken.iter().all(|at| (*at as usize) < offer.keys), "only offered blocks are accepted");
        if taken.len() < offer.keys {
            out.next.push(Follow::Refused("refused in calm: not taken"));
        }
        placed.note_given(env, self.node, offer.bytes / offer.keys as u64 * taken.len() as u64);
        out.event(Event::Peer(PeerEvent::OfferAnswered { offer: id, taken, retry_after }));
    }

    // ---- receiving side -----------------------------------------------------------------------------------

    /// Handles an offer of a node; `None`: the node is unknown. Returns the tenant of the blocks, and the event
    /// for the core.
    pub(crate) fn receive(
        &mut self,
        env: &mut Environment,
        (line, from): (LineId, Option<NodeId>),
        offer: Offer,
    ) -> Option<(TenantId, Event)> {
        let Offer { offer, tenant, layout, keys, .. } = offer;
        let Some(from) = from else {
            let answer = PeerMessage::OfferAnswer { offer, taken: Vec::new(), retry_after: OFFER_RETRY_MAX };
            env.send(line, 0, Message::Peer(answer));
            return None;
        };
        self.received_count += 1;
        let id = PeerOfferId(self.received_count);
        self.received.insert(id, ReceivedOffer { line, offer, keys: keys.len() });
        Some((tenant, Event::PeerOffer(PeerOffer { offer: id, from, tenant, layout, keys })))
    }

    pub(crate) fn answer(
        &mut self,
        env: &mut Environment,
        placed: &PlacementAudit,
        (id, taken, retry_after): (PeerOfferId, Vec<u32>, Duration),
    ) {
        let Some(received) = self.received.remove(&id) else { return };
        let ReceivedOffer { line, offer, keys } = received;
        let node = self.node;
        assert!(taken.is_sorted_by(|one, other| one < other), "node {node}: {taken:?} are not in order");
        assert!(
            taken.last().is_none_or(|at| (*at as usize) < keys),
            "node {node} accepts keys that were not offered"
        );
        env.count(if taken.is_empty() { "offers refused" } else { "offers taken" });
        placed.assert_may_take(node, &taken);
        env.send(line, 0, Message::Peer(PeerMessage::OfferAnswer { offer, taken, retry_after }));
    }

    // ---- checks -------------------------------------------------------------------------------------------

    /// Checks that the core has answered an offer at once.
    pub(crate) fn assert_answered(&self, offer: PeerOfferId) {
        let answered = !self.received.contains_key(&offer);
        assert!(answered, "node {}: an offer is not answered at once", self.node);
    }

    /// Checks the number of offers without an answer.
    pub(crate) fn assert_bounded(&self, env: &Environment) {
        let open = self.open.len();
        assert!(open <= OFFERS_PER_NODE_MAX * env.setup.nodes, "node {} has {open} offers open", self.node);
    }

    /// Checks that no offer is late.
    pub(crate) fn assert_in_time(&self, now: Tick) {
        let offer = self.open.values().find(|offer| offer.deadline.after(CLOCK_GRAIN) < now);
        assert!(offer.is_none(), "node {}: an offer exceeds its deadline: {offer:?}", self.node);
    }
}
