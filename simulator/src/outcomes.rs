//! Outcomes of a part of an agent's process: its node carries them out after the part's step.

use std::collections::BTreeSet;

use reprise_agent_core::effect::{LookupId, PlaceId, ServeId};
use reprise_agent_core::event::{Event, Grant};
use reprise_agent_core::registrar::Output;
use reprise_policy::{BlockKey, Epoch, NodeId, TenantId};

use crate::calls::Purpose;
use crate::link::LinkId;
use crate::messages::Direction;
use crate::network::LineId;

/// What follows a step. Its own consequences come before the next one.
#[derive(Debug)]
pub(crate) enum Follow {
    /// The core gets an event.
    Event(Event),
    Client(ClientFollow),
    /// Removes a serve if all of its blocks have ended.
    EndServe(ServeId),
    /// An offer or move was refused, in these words: its blocks may stay.
    Refused(&'static str),
    /// A member has sent instructions to a registration.
    Directed(Epoch, Direction),
    /// The answer to a placement request of a move: the moved blocks may be dropped.
    MoveAnswered {
        to: NodeId,
        enough: BTreeSet<BlockKey>,
        answer: Event,
    },
    /// The core has the answer; these blocks were durable before.
    MoveApplied {
        to: NodeId,
        before: BTreeSet<BlockKey>,
    },
    /// The core has a grant of a member; the tenant had another one before.
    Granted {
        epoch: Epoch,
        tenant: TenantId,
        before: Option<Grant>,
    },
}

/// What follows in the client of the control plane.
#[derive(Debug)]
pub(crate) enum ClientFollow {
    /// The next action of a link's announcer.
    Pump(LinkId),
    /// The member may have other slots: requests them.
    Refresh(LinkId),
    ReportIfDue(LinkId),
    ReportOver(LinkId),
    /// Further outputs of a registrar, with the random number that selects the length of a pause.
    CarryOut(LinkId, Vec<Output>, u32),
    CallFailed(Purpose),
    /// A connection was lost, and the calls on it have failed.
    LineLost(LineId),
    Learned(LookupId),
    LearnedOfPlaces(PlaceId),
}

/// Outcomes of a step, in order; see the module.
#[derive(Debug, Default)]
pub(crate) struct Outcomes {
    pub(crate) next: Vec<Follow>,
}

impl Outcomes {
    pub(crate) fn event(&mut self, event: Event) {
        self.next.push(Follow::Event(event));
    }

    pub(crate) fn client(&mut self, follow: ClientFollow) {
        self.next.push(Follow::Client(follow));
    }
}
