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
    pub(crate) settings: &'a Settings,
    /// Effects of the event so far.
    pub(crate) effects: &'a mut Vec<Effect>,
}

/// Request of a session, and the size class of its blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    /// Session that sent the request.
    pub(crate) session: SessionId,
    /// Number of the request.
    pub(crate) request: RequestId,
    pub(crate) size_class: SizeClassId,
}

impl Context<'_> {
    /// Appends an effect to those of the event.
    pub(crate) fn emit(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    /// Sends the reply to a request.
    pub(crate) fn reply(&mut self, caller: Caller, reply: Reply) {
        let Caller { session, request, .. } = caller;
        self.emit(Effect::Reply { session, request, reply });
    }
}
