//! Events of the transport on their way to the core.

use std::sync::Arc;

use reprise_agent_core::event::Event;
use reprise_transport::{EventSink, TransportEvent};

use crate::core_loop::{Inbox, Input};

/// Returns a sink that passes the transport's events to the core. A full inbox stalls only the sending
/// connection.
pub(crate) fn sink(inbox: Inbox) -> EventSink {
    Arc::new(move |event| {
        let input = match event {
            TransportEvent::Peer(event) => Input::Event(Event::Peer(event)),
            // Names of nodes and tenants are resolved where effects are executed.
            TransportEvent::Request { from, request } => Input::PeerRequest { from, request },
            TransportEvent::Offer(offer) => Input::PeerOffer(Box::new(offer)),
        };
        // Fails only if the core has stopped.
        let _ = inbox.send(input);
    })
}
