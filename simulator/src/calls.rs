//! Calls of an agent to members: those without an answer, and their timeouts.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_agent_core::effect::{LookupId, PlaceId};
use reprise_agent_core::owner_query::Part;
use reprise_policy::Epoch;

use crate::environment::Environment;
use crate::link::{LinkCall, LinkId};
use crate::messages::{CallId, Message, Request};
use crate::network::LineId;
use crate::setup::Variant;
use crate::simulation::{AgentStep, take_where};

/// Calls without an answer; see the module.
#[derive(Debug)]
pub(crate) struct Calls {
    node: usize,
    open: BTreeMap<CallId, Call>,
    begun: u64,
}

/// A call without an answer.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) of: Purpose,
    pub(crate) line: LineId,
}

/// Purpose of a call.
#[derive(Clone, Debug)]
pub(crate) enum Purpose {
    Link(LinkId, LinkCall),
    /// A part of a lookup.
    Lookup {
        lookup: LookupId,
        link: LinkId,
        part: Part,
    },
    /// Requests the list of a member whose map is newer.
    Learn {
        lookup: LookupId,
    },
    /// A part of a placement request, under a registration.
    Place {
        place: PlaceId,
        link: LinkId,
        epoch: Epoch,
        part: Part,
    },
    /// As `Learn`, for a placement request.
    LearnOfPlaces {
        place: PlaceId,
    },
    Follow,
}

impl Calls {
    pub(crate) fn new(node: usize) -> Calls {
        Calls { node, open: BTreeMap::new(), begun: 0 }
    }

    /// Sends a call over a connection, with a timeout by the agent's clock.
    pub(crate) fn send(
        &mut self,
        env: &mut Environment,
        (line, of): (LineId, Purpose),
        request: Request,
        time: Duration,
    ) {
        let call = CallId(self.begun);
        self.begun += 1;
        self.open.insert(call, Call { of, line });
        env.send(line, 1, Message::Call { call, request });
        env.later(self.node, time, AgentStep::CallTimeout(call));
    }

    /// Ends a call that was answered.
    pub(crate) fn answered(&mut self, call: CallId) -> Option<Call> {
        self.open.remove(&call)
    }

    /// Ends a call at its timeout.
    pub(crate) fn timed_out(&mut self, env: &Environment, call: CallId) -> Option<Call> {
        let endless = env.setup.variant == Variant::LookupsWithoutDeadline;
        if endless && self.open.get(&call).is_some_and(|call| matches!(call.of, Purpose::Lookup { .. })) {
            return None;
        }
        self.open.remove(&call)
    }

    /// Ends the calls over a connection.
    pub(crate) fn lost(&mut self, line: LineId) -> Vec<Purpose> {
        let lost = take_where(&mut self.open, |call| call.line == line);
        lost.into_iter().map(|(_, call)| call.of).collect()
    }

    /// Number of calls without an answer, except those that never end.
    pub(crate) fn waiting(&self) -> usize {
        let ends = |call: &&Call| {
            !matches!(
                call.of,
                Purpose::Follow
                    | Purpose::Link(
                        _,
                        LinkCall::Beat { .. } | LinkCall::Register { .. } | LinkCall::Report { .. }
                    )
            )
        };
        self.open.values().filter(ends).count()
    }
}
