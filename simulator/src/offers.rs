//! Offers of blocks between agents: how they are made, answered, lost, and when they are over.
//!
//! As `node-agent/src/executor.rs` (`offer`, `offered`) and the offers of `node-agent/transport`: they go over the connections of
//! fetches; one without an answer has failed at its deadline, and with its connection. An offer names a tenant, and who
//! does not know the name, or is offered something by somebody whom nobody has named, goes no further.
//!
//! Deliberately absent: cancelling. The core of the other side answers at once, and an answer that nobody waits for is dropped.

use std::time::Duration;

use reprise_agent_core::agent::limits::{OFFER_RETRY_MAX, PLACE_KEYS_MAX};
use reprise_agent_core::effect::{Offer, OfferId, PeerOfferId};
use reprise_agent_core::event::{Event, PeerOffer};
use reprise_policy::{TenantId, Tick};

use crate::messages::{Message, OfferedBlocks, PeerMessage};
use crate::network::{Host, LineId};
use crate::setup::Variant;
use crate::world::{Local, World, take_where};

/// Blocks offered to a peer, which has not answered.
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
pub(crate) struct HeardOffer {
    line: LineId,
    offer: OfferId,
    keys: usize,
}

impl World {
    // ---- the side that offers ----------------------------------------------------------------------------------

    pub(crate) fn offer(&mut self, node: usize, offer: Offer) {
        let Offer { offer: id, node: to, tenant, layout, keys, deadline } = offer;
        assert!(!keys.is_empty() && keys.len() <= PLACE_KEYS_MAX, "an offer is of {} blocks", keys.len());
        let process = self.process(node);
        let host = process.client.host_of(to).filter(|_| process.names.contains(&tenant));
        let Some(host) = host else {
            self.note_refusal(node, "refused in calm: no name");
            return self.later(node, Duration::ZERO, Local::Event(Event::OfferFailed { offer: id }));
        };
        let line = self.peer_line(node, host);
        let until = self.time(Host::Node(node)).after(deadline);
        let bytes = layout.slot_bytes() * keys.len() as u64;
        let open = OpenOffer { line, keys: keys.len(), bytes, deadline: until };
        self.process(node).offers.insert(id, open);
        self.count("offers");
        let blocks = OfferedBlocks { tenant, layout, keys };
        self.send(line, 1, Message::Peer(PeerMessage::Offer { offer: id, blocks: Box::new(blocks) }));
        self.later(node, deadline, Local::OfferDeadline(id));
    }

    /// What has not been answered by now is not answered.
    pub(crate) fn offer_deadline(&mut self, node: usize, id: OfferId) {
        if self.setup.variant == Variant::OffersWithoutEnd {
            return;
        }
        let Some(offer) = self.process(node).offers.remove(&id) else { return };
        if !self.far_lives(offer.line) {
            self.process(node).peer_lines.retain(|_, line| *line != offer.line);
        }
        self.count("offers unanswered");
        self.apply(node, Event::OfferFailed { offer: id });
    }

    pub(crate) fn offers_lost(&mut self, node: usize, line: LineId) {
        let process = self.process(node);
        process.heard_offers.retain(|_, heard| heard.line != line);
        for (offer, _) in take_where(&mut process.offers, |offer| offer.line == line) {
            self.apply(node, Event::OfferFailed { offer });
        }
    }

    pub(crate) fn offer_answered(
        &mut self,
        node: usize,
        id: OfferId,
        (taken, retry_after): (Vec<u32>, Duration),
    ) {
        let Some(offer) = self.process(node).offers.remove(&id) else { return };
        assert!(taken.iter().all(|at| (*at as usize) < offer.keys), "only what was offered is taken");
        if taken.len() < offer.keys {
            self.note_refusal(node, "refused in calm: not taken");
        }
        self.note_given(node, offer.bytes / offer.keys as u64 * taken.len() as u64);
        self.apply(node, Event::OfferAnswered { offer: id, taken, retry_after });
    }

    // ---- the side that is offered something --------------------------------------------------------------------

    pub(crate) fn offered(&mut self, node: usize, line: LineId, offer: OfferId, blocks: OfferedBlocks) {
        let OfferedBlocks { tenant, layout, keys } = blocks;
        let from = self.network.line(line).map(|line| line.ends[0].host);
        let from = match from {
            Some(Host::Node(host)) => self.client(node).node_at(host),
            _ => None,
        };
        let Some(from) = from else {
            let answer = PeerMessage::OfferAnswer { offer, taken: Vec::new(), retry_after: OFFER_RETRY_MAX };
            return self.send(line, 0, Message::Peer(answer));
        };
        let own = match self.setup.variant {
            Variant::OffersOfOneTenant => TenantId::DEFAULT,
            _ => tenant,
        };
        let process = self.process(node);
        process.names.insert(own);
        process.offers_heard += 1;
        let id = PeerOfferId(process.offers_heard);
        let heard = HeardOffer { line, offer, keys: keys.len() };
        process.heard_offers.insert(id, heard);
        self.push_out(node, tenant, layout.slot_bytes() * keys.len() as u64);
        self.apply(node, Event::PeerOffer(PeerOffer { offer: id, from, tenant: own, layout, keys }));
        let answered = !self.process(node).heard_offers.contains_key(&id);
        assert!(answered, "node {node}: an offer is not answered at once");
    }

    pub(crate) fn answer_offer(
        &mut self,
        node: usize,
        id: PeerOfferId,
        (taken, retry_after): (Vec<u32>, Duration),
    ) {
        let Some(heard) = self.process(node).heard_offers.remove(&id) else { return };
        let HeardOffer { line, offer, keys } = heard;
        assert!(taken.is_sorted_by(|one, other| one < other), "node {node}: {taken:?} are not in order");
        assert!(
            taken.last().is_none_or(|at| (*at as usize) < keys),
            "node {node} takes what was not offered"
        );
        self.count(if taken.is_empty() { "offers refused" } else { "offers taken" });
        self.assert_may_take(node, &taken);
        self.send(line, 0, Message::Peer(PeerMessage::OfferAnswer { offer, taken, retry_after }));
    }
}
