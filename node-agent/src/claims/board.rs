//! What is wanted of devices, what there is, and what is to be done about the difference: decided here, done elsewhere.
//!
//! ```text
//!  Vacant ──open──▶ Opening ──▶ Open ──it fails──▶ Faulted
//!    │ ▲                └──▶ Refused   │ not wanted, wanted otherwise, gone │
//!    │ └──────released── Closing ◀─────┴───────────────────────────────────┘
//!    └──wipe──▶ Wiping ──▶ Wiped, Refused
//! ```
//!
//! A place is a device or file by its stable path. Nothing is done with one while a thread or the core is busy with it; whatever is
//! wanted then is looked at again afterwards. Devices of one pool are opened together, so that they agree on one identity.
//!
//! Invariants: a number is given to one device at a time; a place that nobody wants ends; what failed is tried again when its claim
//! changes, what was refused also from time to time.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use reprise_agent_core::effect::DeviceId;
use reprise_agent_kubernetes::{
    ClaimFact, Data, DeviceFact, DeviceState, Engine, FallbackEngine, ForeignSignatures, Reason, Trouble,
};

use crate::device::{Membership, PoolIdentity};

/// Devices that may be open at once.
pub(super) const NUMBERS: u8 = 32;

/// What a claim wants, resolved on this node.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct WantedPool {
    pub(super) pool: String,
    pub(super) uid: String,
    pub(super) generation: i64,
    pub(super) data: Data,
    pub(super) places: Vec<WantedPlace>,
    /// What keeps it from having (all its) devices.
    pub(super) trouble: Option<Trouble>,
}

/// A device or file that is wanted.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct WantedPlace {
    /// Its stable path on the node.
    pub(super) path: String,
    /// Where this process finds it.
    pub(super) at: PathBuf,
    pub(super) presence: Presence,
    pub(super) recipe: Recipe,
}

/// Whether a wanted place can be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    Here,
    /// It was, and is no more.
    Gone,
}

/// How a place is to be opened; one that is open with another recipe is opened again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Recipe {
    pub(super) pool: String,
    pub(super) uid: String,
    pub(super) kind: Kind,
    pub(super) bytes: Option<u64>,
    pub(super) engine: Engine,
    pub(super) fallback: FallbackEngine,
    pub(super) foreign: ForeignSignatures,
}

/// What a place is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Device,
}

/// What there is to know of an open device.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Opened {
    pub(super) membership: Membership,
    pub(super) engine: Engine,
    /// Why it is not the wanted engine.
    pub(super) fallback: Option<Trouble>,
    pub(super) direct: bool,
}

/// Something to do.
#[derive(Debug)]
pub(super) enum Action {
    /// Open these, which are of one pool.
    Open { identity: PoolIdentity, places: Vec<ToOpen> },
    /// Destroy what is there.
    Wipe { path: String, at: PathBuf, kind: Kind },
    /// Close a device.
    Detach(DeviceId),
}

/// A place to open.
#[derive(Clone, Debug)]
pub(super) struct ToOpen {
    pub(super) id: DeviceId,
    pub(super) path: String,
    pub(super) at: PathBuf,
    pub(super) recipe: Recipe,
}

/// Whether what was refused is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Retry {
    Refused,
    Nothing,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Board {
    pools: Vec<WantedPool>,
    places: BTreeMap<String, Place>,
    used: BTreeSet<u8>,
    /// Which pool the devices of a pool were, by its unique id and their path: fresh ones join them, also while some are away.
    known: BTreeMap<(String, String), Membership>,
}

#[derive(Debug)]
struct Place {
    at: PathBuf,
    recipe: Recipe,
    generation: i64,
    data: Data,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
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
enum Next {
    Stay,
    Forget,
    Become(State),
    Close { id: DeviceId, trouble: Option<Trouble> },
}

impl Board {
    /// What is wanted from now on.
    pub(super) fn want(&mut self, pools: Vec<WantedPool>) {
        self.known.retain(|(uid, _), _| pools.iter().any(|pool| pool.uid == *uid));
        self.pools = pools;
    }

    /// What a pool wanted so far.
    pub(super) fn wanted(&self) -> &[WantedPool] {
        &self.pools
    }

    /// Paths that are in use, or were until they failed.
    pub(super) fn held(&self) -> BTreeSet<String> {
        let is_held = |place: &Place| {
            matches!(place.state, State::Open { .. } | State::Closing { .. } | State::Faulted { .. })
        };
        self.places.iter().filter(|(_, place)| is_held(place)).map(|(path, _)| path.clone()).collect()
    }

    /// Whether everything that is wanted has been tried.
    pub(super) fn is_settled(&self) -> bool {
        let is_settled = |place: &WantedPlace| self.settled(&place.path);
        self.pools.iter().all(|pool| pool.places.iter().all(is_settled))
    }

    fn settled(&self, path: &str) -> bool {
        self.places.get(path).is_some_and(|place| {
            !matches!(place.state, State::Vacant | State::Opening | State::Closing { .. } | State::Wiping)
        })
    }

    /// A place was opened.
    pub(super) fn opened(&mut self, path: &str, id: DeviceId, opened: Opened) {
        if let Some(place) = self.places.get_mut(path) {
            self.known.insert((place.recipe.uid.clone(), path.to_owned()), opened.membership);
            place.state = State::Open { id, opened };
        }
    }

    /// A place was not opened or not wiped. `id`: the number that it would have had.
    pub(super) fn refused(&mut self, path: &str, id: Option<DeviceId>, trouble: Trouble) {
        if let Some(id) = id {
            self.used.remove(&id.0);
        }
        if let Some(place) = self.places.get_mut(path) {
            place.state = State::Refused(trouble);
        }
    }

    /// A place was wiped.
    pub(super) fn wiped(&mut self, path: &str) {
        if let Some(place) = self.places.get_mut(path) {
            self.known.remove(&(place.recipe.uid.clone(), path.to_owned()));
            place.state = State::Wiped;
        }
    }

    /// A device has failed.
    pub(super) fn lost(&mut self, lost: DeviceId, reason: &str) {
        for place in self.places.values_mut() {
            if let State::Open { id, .. } = place.state
                && id == lost
            {
                let message = format!(
                    "the device has failed: {reason}. Its blocks are misses; replace it, then change the pool or restart the agent"
                );
                let trouble = Trouble { reason: Reason::DeviceFailed, message };
                place.state = State::Faulted { id: Some(id), trouble };
            }
        }
    }

    /// The core has let go of a device, and its thread has ended.
    pub(super) fn released(&mut self, released: DeviceId) {
        self.used.remove(&released.0);
        for place in self.places.values_mut() {
            if let State::Closing { id, trouble } = &place.state
                && *id == released
            {
                place.state = match trouble.clone() {
                    Some(trouble) => State::Faulted { id: None, trouble },
                    None => State::Vacant,
                };
            }
        }
    }

    /// What is to be done now. What it says is under way from then on.
    pub(super) fn decide(&mut self, retry: Retry) -> Vec<Action> {
        let mut actions = Vec::new();
        for path in self.places.keys().cloned().collect::<Vec<_>>() {
            let wanted = self.wanted_place(&path).map(|(pool, place)| (pool.clone(), place.clone()));
            let place = self.places.get_mut(&path).expect("its path is in the map");
            match place.next(wanted.as_ref().map(|(pool, place)| (pool, place)), retry) {
                Next::Stay => {
                    if let (State::Open { .. }, Some((pool, wanted))) = (&place.state, wanted) {
                        // What it was opened with is as good for what is wanted now.
                        (place.recipe, place.generation) = (wanted.recipe, pool.generation);
                    }
                }
                Next::Forget => drop(self.places.remove(&path)),
                Next::Become(state) => place.state = state,
                Next::Close { id, trouble } => {
                    place.state = State::Closing { id, trouble };
                    actions.push(Action::Detach(id));
                }
            }
        }
        for pool in self.pools.clone() {
            self.begin(&pool, &mut actions);
        }
        actions
    }

    fn wanted_place(&self, path: &str) -> Option<(&WantedPool, &WantedPlace)> {
        self.pools
            .iter()
            .find_map(|pool| pool.places.iter().find(|place| place.path == path).map(|place| (pool, place)))
    }

    /// Begins what a pool wants and nobody is busy with.
    fn begin(&mut self, pool: &WantedPool, actions: &mut Vec<Action>) {
        let mut to_open = Vec::new();
        // Who opens one device of a pool must know what the others are.
        let is_busy = |place: &Place| {
            place.recipe.uid == pool.uid && matches!(place.state, State::Opening | State::Closing { .. })
        };
        let may_open = !self.places.values().any(is_busy);
        for wanted in &pool.places {
            let place = self.places.entry(wanted.path.clone()).or_insert_with(|| Place {
                at: wanted.at.clone(),
                recipe: wanted.recipe.clone(),
                generation: pool.generation,
                data: pool.data,
                state: State::Vacant,
            });
            if !matches!(place.state, State::Vacant) {
                continue;
            }
            (place.at, place.recipe) = (wanted.at.clone(), wanted.recipe.clone());
            (place.generation, place.data) = (pool.generation, pool.data);
            match (wanted.presence, pool.data) {
                (Presence::Gone, _) => place.state = State::Faulted { id: None, trouble: gone() },
                (Presence::Here, Data::Wiped) => {
                    place.state = State::Wiping;
                    let (path, at) = (wanted.path.clone(), wanted.at.clone());
                    actions.push(Action::Wipe { path, at, kind: wanted.recipe.kind });
                }
                (Presence::Here, Data::Kept) if may_open => {
                    let Some(id) = (0..NUMBERS).find(|id| !self.used.contains(id)) else {
                        let message = format!("{NUMBERS} devices of this node are open already");
                        place.state = State::Refused(Trouble { reason: Reason::OverCapacity, message });
                        continue;
                    };
                    self.used.insert(id);
                    place.state = State::Opening;
                    let WantedPlace { path, at, recipe, .. } = wanted.clone();
                    to_open.push(ToOpen { id: DeviceId(id), path, at, recipe });
                }
                (Presence::Here, Data::Kept) => {}
            }
        }
        if !to_open.is_empty() {
            let identity = self.identity(&pool.uid, &to_open);
            actions.push(Action::Open { identity, places: to_open });
        }
    }

    /// What the devices of a pool agree on, without those that are about to be opened: they say themselves what they are.
    fn identity(&self, uid: &str, opening: &[ToOpen]) -> PoolIdentity {
        let mut identity = PoolIdentity::default();
        for ((of, path), membership) in &self.known {
            if of == uid && opening.iter().all(|place| place.path != *path) {
                // One that was replaced under its name is known twice, if at all: the first counts.
                let _ = identity.enter(path.as_ref(), *membership);
            }
        }
        identity
    }

    /// Claims that are followed.
    pub(super) fn claims(&self) -> Vec<ClaimFact> {
        let is_settled = |pool: &&WantedPool| pool.places.iter().all(|place| self.settled(&place.path));
        let fact = |pool: &WantedPool| ClaimFact {
            pool: pool.pool.clone(),
            uid: pool.uid.clone(),
            generation: pool.generation,
            trouble: pool.trouble.clone(),
        };
        self.pools.iter().filter(is_settled).map(fact).collect()
    }

    /// Devices and files; what is used of them is for the caller to add, by their numbers.
    pub(super) fn devices(&self) -> Vec<(Option<DeviceId>, DeviceFact)> {
        self.places.iter().map(|(path, place)| place.fact(path)).collect()
    }
}

impl Place {
    /// Whether an open device is as good for what is wanted now: what happens to foreign data, and which engine would do where the
    /// wanted one cannot be had, matters while a device is opened.
    fn serves(&self, opened: &Opened, pool: &WantedPool, wanted: &Recipe) -> bool {
        let fallback = if opened.engine == wanted.engine { wanted.fallback } else { self.recipe.fallback };
        let as_opened = Recipe { foreign: wanted.foreign, fallback, ..self.recipe.clone() };
        as_opened == *wanted && self.data == pool.data
    }

    fn next(&self, wanted: Option<(&WantedPool, &WantedPlace)>, retry: Retry) -> Next {
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
            State::Open { id, .. } if is_gone => Next::Close { id: *id, trouble: Some(gone()) },
            State::Open { id, opened } if !self.serves(opened, pool, &place.recipe) => {
                Next::Close { id: *id, trouble: None }
            }
            State::Open { .. } => Next::Stay,
            State::Faulted { id: Some(id), .. } if is_gone => Next::Close { id: *id, trouble: Some(gone()) },
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

    fn fact(&self, path: &str) -> (Option<DeviceId>, DeviceFact) {
        let waiting = |message: &str| Trouble { reason: Reason::Progressing, message: message.to_owned() };
        let (id, state, trouble) = match &self.state {
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
        };
        (id, fact)
    }
}

fn gone() -> Trouble {
    let message = "the device is gone: its name leads nowhere. It is opened again when it is back".to_owned();
    Trouble { reason: Reason::DeviceFailed, message }
}

#[cfg(test)]
mod tests;
