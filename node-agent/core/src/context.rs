//! Context of an event: its time, the settings, and the effects so far.

use reprise_policy::Tick;

use crate::effect::Effect;
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

impl Context<'_> {
    /// Appends an effect to those of the event.
    pub(crate) fn emit(&mut self, effect: Effect) {
        self.effects.push(effect);
    }
}
