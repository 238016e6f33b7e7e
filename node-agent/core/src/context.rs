//! Context of an event: its time, the settings, and the effects so far.

use reprise_policy::{SessionId, Tick};

use crate::cache::SizeClassId;
use crate::effect::{Effect, Reply};
use crate::event::RequestId;
use crate::settings::Settings;

/// Context of the event that is being applied; owners with effects receive it as an argument.
#[derive(Debug)]
pub(crate) struct Context<'a> {
    /// Time of the event.
    pub(crate) now: Tick,
    /// Settings of the core.
    pub(crate) settings: &'a Settings,
    /// Effects of the event so far.
    pub(crate) effects: &'a mut Vec<Effect>,
}

/// Request of a session, which is answered once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    pub(crate) session: SessionId,
    pub(crate) request: RequestId,
    /// Size class of the session's blocks.
    pub(crate) size_class: SizeClassId,
}

impl Context<'_> {
    /// Answers the request of a session.
    pub(crate) fn reply(&mut self, Caller { session, request, .. }: Caller, reply: Reply) {
        self.emit(Effect::Reply { session, request, reply });
    }

    /// Appends an effect to those of the event.
    pub(crate) fn emit(&mut self, effect: Effect) {
        self.effects.push(effect);
    }
}
