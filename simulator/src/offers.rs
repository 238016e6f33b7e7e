//! Offers of blocks between agents: sending, answers, losses, deadlines.
//!
//! The contract is that of the offers of `node-agent/transport`, with the names that `node-agent/src/executor.rs`
//! resolves. Offers use the connections of fetches; an offer without an answer fails at its deadline, or with its
//! connection. An offer names a tenant. An agent that does not know the name, or does not know the offering node,
//! refuses the offer. When and what to offer is decided by the core.
//!
//! Not reproduced: cancelling. The other core answers at once, and a late answer is dropped.

use std::time::Duration;

use reprise_agent_core::effect::{Offer, OfferId, PeerOfferId};
use reprise_agent_core::event::{Event, PeerEvent, PeerOffer};
use reprise_agent_core::limits::{OFFER_RETRY_MAX, PLACE_KEYS_MAX};
use reprise_policy::{NodeId, TenantId, Tick};

use crate::messages::{Message, PeerMessage};
use crate::network::{Host, LineId};
use crate::setup::Variant;
use crate::simulation::{AgentStep, Simulation, take_where};

/// An offer that the peer has not answered.
#[derive(Clone, Debug)]
pub(crate) struct OpenOffer {
    line: LineId,
    keys: usize,
    bytes: u64,
    /// By the agent's clock.
    pub(crate) deadline: Tick,
}

/// A peer's offer without an answer.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedOffer {
    line: LineId,
    offer: OfferId,
    keys: usize,
}

impl Simulation {
    // ---- offering side ------------------------------------------------------------------------------------

    pub(crate) fn offer(&mut self, node: usize, to: NodeId, offer: Offer) {
        let Offer { offer: id, tenant, layout, deadline, .. } = offer;
        let keys = offer.keys.len();
        assert!((1..=PLACE_KEYS_MAX).contains(&keys), "an offer has {keys} blocks");
        let process = self.process(node);
        let host = process.client.host_of(to).filter(|_| process.names.contains(&tenant));
        let Some(host) = host else {
            self.note_refusal(node, "refused in calm: no name");
            let event = Event::Peer(PeerEvent::OfferFailed { offer: id });
            return self.env.later(node, Duration::ZERO, AgentStep::Event(event));
        };
        let line = self.peer_line(node, host);
        let until = self.env.time(Host::Node(node)).after(deadline);
        let bytes = layout.slot_bytes() * keys as u64;
        let open = OpenOffer { line, keys, bytes, deadline: until };
        self.process(node).offers.insert(id, open);
        self.env.count("offers");
        self.env.send(line, 1, Message::Peer(PeerMessage::Offer(Box::new(offer))));
        self.env.later(node, deadline, AgentStep::OfferDeadline(id));
    }

    /// Fails an offer without an answer at its deadline.
    pub(crate) fn offer_deadline(&mut self, node: usize, id: OfferId) {
        if self.env.setup.variant == Variant::OffersWithoutDeadline {
            return;
        }
        let Some(offer) = self.process(node).offers.remove(&id) else { return };
        if !self.env.far_lives(offer.line) {
            self.process(node).peer_lines.retain(|_, line| *line != offer.line);
        }
        self.env.count("offers unanswered");
        self.apply(node, Event::Peer(PeerEvent::OfferFailed { offer: id }));
    }

    pub(crate) fn offers_lost(&mut self, node: usize, line: LineId) {
        let process = self.process(node);
        process.received_offers.retain(|_, received| received.line != line);
        for (offer, _) in take_where(&mut process.offers, |offer| offer.line == line) {
            self.apply(node, Event::Peer(PeerEvent::OfferFailed { offer }));
        }
    }

    pub(crate) fn offer_answered(
        &mut self,
        node: usize,
        id: OfferId,
        (taken, retry_after): (Vec<u32>, Duration),
    ) {
        let Some(offer) = self.process(node).offers.remove(&id) else { return };
        assert!(taken.iter().all(|at| (*at as usize) < offer.keys), "only offered blocks are accepted");
        if taken.len() < offer.keys {
            self.note_refusal(node, "refused in calm: not taken");
        }
        self.note_given(node, offer.bytes / offer.keys as u64 * taken.len() as u64);
        self.apply(node, Event::Peer(PeerEvent::OfferAnswered { offer: id, taken, retry_after }));
    }

    // ---- receiving side -----------------------------------------------------------------------------------

    pub(crate) fn offered(&mut self, node: usize, line: LineId, offer: Offer) {
        let Offer { offer, tenant, layout, keys, .. } = offer;
        let from = self.env.network.line(line).map(|line| line.ends[0].host);
        let from = match from {
            Some(Host::Node(host)) => self.client(node).node_at(host),
            _ => None,
        };
        let Some(from) = from else {
            let answer = PeerMessage::OfferAnswer { offer, taken: Vec::new(), retry_after: OFFER_RETRY_MAX };
            return self.env.send(line, 0, Message::Peer(answer));
        };
        let own = match self.env.setup.variant {
            Variant::OffersIgnoreTenant => TenantId::DEFAULT,
            _ => tenant,
        };
        let process = self.process(node);
        process.names.insert(own);
        process.offers_received += 1;
        let id = PeerOfferId(process.offers_received);
        let received = ReceivedOffer { line, offer, keys: keys.len() };
        process.received_offers.insert(id, received);
        self.evict_for_offer(node, tenant, layout.slot_bytes() * keys.len() as u64);
        self.apply(node, Event::PeerOffer(PeerOffer { offer: id, from, tenant: own, layout, keys }));
        let answered = !self.process(node).received_offers.contains_key(&id);
        assert!(answered, "node {node}: an offer is not answered at once");
    }

    pub(crate) fn answer_offer(
        &mut self,
        node: usize,
        id: PeerOfferId,
        (taken, retry_after): (Vec<u32>, Duration),
    ) {
        let Some(received) = self.process(node).received_offers.remove(&id) else { return };
        let ReceivedOffer { line, offer, keys } = received;
        assert!(taken.is_sorted_by(|one, other| one < other), "node {node}: {taken:?} are not in order");
        assert!(
            taken.last().is_none_or(|at| (*at as usize) < keys),
            "node {node} accepts keys that were not offered"
        );
        self.env.count(if taken.is_empty() { "offers refused" } else { "offers taken" });
        self.assert_may_take(node, &taken);
        self.env.send(line, 0, Message::Peer(PeerMessage::OfferAnswer { offer, taken, retry_after }));
    }
}
