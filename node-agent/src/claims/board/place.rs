//! One device or file of the board: what it is, and what becomes of it when something else is wanted.
//!
//! Invariant: what was refused is shown so for as long as the same is tried again: who looks sees a change when there is one.

use std::path::PathBuf;

use reprise_agent_core::effect::DeviceId;
use reprise_agent_kubernetes::{Data, DeviceFact, DeviceState, Reason, Trouble};

use super::{Kind, Opened, Presence, Recipe, Retry, WantedPlace, WantedPool, missing_file};

/// See the module.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) at: PathBuf,
    pub(super) recipe: Recipe,
    pub(super) generation: i64,
    pub(super) data: Data,
    pub(super) state: State,
    /// Why it was refused when the same was tried last.
    pub(super) refused: Option<Trouble>,
}

/// What is done with it, or was.
#[derive(Clone, Debug)]
pub(super) enum State {
    /// Nobody is busy with it.
    Vacant,
    Opening,
    Open {
        id: DeviceId,
        opened: Opened,
    },
    /// It is to be Faulted afterwards for `trouble`, if there is any.
    Closing {
        id: DeviceId,
        trouble: Option<Trouble>,
    },
    Faulted {
        id: Option<DeviceId>,
        trouble: Trouble,
    },
    Wiping,
    Wiped,
    Refused(Trouble),
}

/// What becomes of a place.
pub(super) enum Next {
    Stay,
    Forget,
    Become(State),
    Close { id: DeviceId, trouble: Option<Trouble> },
}

impl Place {
    /// One that nobody has touched.
    pub(super) fn new(pool: &WantedPool, wanted: &WantedPlace) -> Place {
        Place {
            at: wanted.at.clone(),
            recipe: wanted.recipe.clone(),
            generation: pool.generation,
            data: pool.data,
            state: State::Vacant,
            refused: None,
        }
    }

    /// This is to be done with it next.
    pub(super) fn aim(&mut self, pool: &WantedPool, wanted: &WantedPlace) {
        let is_same = self.recipe == wanted.recipe && self.data == pool.data;
        if !is_same || self.generation != pool.generation {
            self.refused = None;
        }
        (self.at, self.recipe) = (wanted.at.clone(), wanted.recipe.clone());
        (self.generation, self.data) = (pool.generation, pool.data);
    }

    /// It was left alone.
    pub(super) fn refuse(&mut self, trouble: Trouble) {
        self.refused = Some(trouble.clone());
        self.state = State::Refused(trouble);
    }

    /// Why it is left alone, also while the same is tried once more.
    pub(super) fn refusal(&self) -> Option<&Trouble> {
        match &self.state {
            State::Refused(trouble) => Some(trouble),
            State::Vacant | State::Opening | State::Wiping => self.refused.as_ref(),
            State::Open { .. } | State::Closing { .. } | State::Faulted { .. } | State::Wiped => None,
        }
    }

    /// Whether what a pool wants of it was tried. Erasing takes its time, and nobody waits for it.
    pub(super) fn is_tried(&self, pool: &WantedPool) -> bool {
        let is_ahead = matches!(self.state, State::Vacant | State::Opening | State::Closing { .. });
        self.is_left_alone(pool) || !is_ahead
    }

    /// Whether what a pool wants of it was done, or cannot be.
    pub(super) fn is_followed(&self, pool: &WantedPool) -> bool {
        self.is_left_alone(pool) || (self.is_tried(pool) && !matches!(self.state, State::Wiping))
    }

    fn is_left_alone(&self, pool: &WantedPool) -> bool {
        self.refusal().is_some() && self.generation == pool.generation
    }

    /// Whether an open device is as good for what is wanted now: what happens to foreign data, and which engine would do where the
    /// wanted one cannot be had, matters while a device is opened.
    fn serves(&self, opened: &Opened, pool: &WantedPool, wanted: &Recipe) -> bool {
        let fallback = if opened.engine == wanted.engine { wanted.fallback } else { self.recipe.fallback };
        let as_opened = Recipe { foreign: wanted.foreign, fallback, ..self.recipe.clone() };
        as_opened == *wanted && self.data == pool.data
    }

    /// What becomes of it, by what is wanted of it, if anything is.
    pub(super) fn next(&self, wanted: Option<(&WantedPool, &WantedPlace)>, retry: Retry) -> Next {
        let Some((pool, place)) = wanted else {
            return match &self.state {
                State::Opening | State::Wiping => Next::Stay,
                State::Closing { id, trouble: Some(_) } => {
                    Next::Become(State::Closing { id: *id, trouble: None })
                }
                State::Closing { .. } => Next::Stay,
                State::Open { id, .. } | State::Faulted { id: Some(id), .. } => {
                    Next::Close { id: *id, trouble: None }
                }
                State::Vacant | State::Wiped | State::Refused(_) | State::Faulted { id: None, .. } => {
                    Next::Forget
                }
            };
        };
        let is_same = self.recipe == place.recipe && self.data == pool.data;
        let is_renewed = !is_same || self.generation != pool.generation;
        let is_gone = place.presence == Presence::Gone;
        match &self.state {
            State::Opening | State::Wiping | State::Closing { .. } | State::Vacant => Next::Stay,
            State::Open { id, .. } if is_gone => {
                Next::Close { id: *id, trouble: Some(gone(self.recipe.kind)) }
            }
            State::Open { id, opened } if !self.serves(opened, pool, &place.recipe) => {
                Next::Close { id: *id, trouble: None }
            }
            State::Open { .. } => Next::Stay,
            State::Faulted { id: Some(id), .. } if is_gone => {
                Next::Close { id: *id, trouble: Some(gone(self.recipe.kind)) }
            }
            State::Faulted { id: Some(id), .. } if is_renewed => Next::Close { id: *id, trouble: None },
            State::Faulted { id: Some(_), .. } => Next::Stay,
            State::Faulted { id: None, .. } if is_gone => Next::Stay,
            // It is back.
            State::Faulted { id: None, .. } => Next::Become(State::Vacant),
            State::Refused(_) if is_renewed || retry == Retry::Refused => Next::Become(State::Vacant),
            State::Wiped if !is_same => Next::Become(State::Vacant),
            State::Refused(_) | State::Wiped => Next::Stay,
        }
    }

    /// How it is told; what is used of it, how quick and how worn it is, and which drive, is for the caller to add.
    pub(super) fn fact(&self, path: &str) -> (Option<DeviceId>, DeviceFact) {
        let waiting = |message: &str| Trouble { reason: Reason::Progressing, message: message.to_owned() };
        let (id, state, trouble) = match &self.state {
            State::Vacant | State::Opening | State::Wiping if self.refused.is_some() => {
                (None, DeviceState::Refused, self.refused.clone())
            }
            State::Vacant => (None, DeviceState::Found, Some(waiting("not opened yet"))),
            State::Opening => (None, DeviceState::Opening, Some(waiting("its journal is read"))),
            State::Open { id, opened } => (Some(*id), DeviceState::Open, opened.fallback.clone()),
            State::Closing { trouble: Some(trouble), .. } => {
                (None, DeviceState::Faulted, Some(trouble.clone()))
            }
            State::Closing { .. } => (None, DeviceState::Found, Some(waiting("it is being closed"))),
            State::Faulted { trouble, .. } => (None, DeviceState::Faulted, Some(trouble.clone())),
            State::Wiping => (None, DeviceState::Found, Some(waiting("its data is being destroyed"))),
            State::Wiped => (None, DeviceState::Wiped, None),
            State::Refused(trouble) => (None, DeviceState::Refused, Some(trouble.clone())),
        };
        let (engine, direct) = match &self.state {
            State::Open { opened, .. } => (Some(opened.engine), opened.direct),
            _ => (None, false),
        };
        let fact = DeviceFact {
            path: path.to_owned(),
            pool: self.recipe.pool.clone(),
            state,
            trouble,
            size: 0,
            used: 0,
            wanted: self.recipe.engine,
            engine,
            direct,
            read_p99_micros: None,
            slow: None,
            media_errors: None,
            spare_percent: None,
            worn: None,
            serial: None,
            model: None,
        };
        (id, fact)
    }
}

/// Why what is gone is not used.
pub(super) fn gone(kind: Kind) -> Trouble {
    match kind {
        Kind::File => missing_file(),
        Kind::Device => {
            let message = "the device is gone: its name leads nowhere. It is opened again when it is back, and forgotten when its pool changes";
            Trouble { reason: Reason::DeviceFailed, message: message.to_owned() }
        }
    }
}
