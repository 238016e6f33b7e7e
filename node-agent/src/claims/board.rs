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
//! changes, what was refused also from time to time; a device that was chosen stays so ([`Board::held`]), above all while it is wiped;
//! a blank file is never made in place of one that a claim had ([`Known::expects`]), and no such file counts as wiped when it is not there.

mod place;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use reprise_agent_core::effect::DeviceId;
use reprise_agent_kubernetes::{
    Claim, ClaimFact, Data, DeviceFact, Engine, FallbackEngine, ForeignSignatures, Reason, Source, Trouble,
};
use reprise_io::Missing;

use super::known::Known;
use crate::device::{Membership, PoolIdentity};
use place::{Next, Place, State, gone};

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
    Wipe(ToWipe),
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
    /// What is done when it is not there.
    pub(super) missing: Missing,
}

/// A place to wipe.
#[derive(Clone, Debug)]
pub(super) struct ToWipe {
    pub(super) path: String,
    pub(super) at: PathBuf,
    pub(super) kind: Kind,
    /// The pool that its claim has, where that is known: no other is destroyed.
    pub(super) pool: Option<[u8; 16]>,
    /// Whether it is known to be of that pool: then erasing it may have begun before.
    pub(super) is_member: bool,
    /// Whether it should be there: a file that is not may be where nobody looks, with its data.
    pub(super) is_expected: bool,
}

/// Whether what was refused is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Retry {
    Refused,
    Nothing,
}

/// How a device was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loss {
    /// A sync of it has failed.
    Sync,
    Other,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Board {
    pools: Vec<WantedPool>,
    places: BTreeMap<String, Place>,
    used: BTreeSet<u8>,
    /// Fresh devices join the pool that their claim has, also while its others are away.
    known: Known,
    /// Places whose page cache may hold what a failed sync has not brought to the medium: reading it would announce it as durable.
    doubtful: BTreeSet<String>,
}

impl Board {
    /// An empty one that knows this of the devices that it will be told of.
    pub(super) fn knowing(known: Known) -> Board {
        Board { known, ..Board::default() }
    }

    /// What is wanted from now on.
    pub(super) fn want(&mut self, pools: Vec<WantedPool>) {
        self.known.forget_beyond_bound(|uid| pools.iter().any(|pool| pool.uid == uid));
        self.pools = pools;
    }

    /// These are all the claims that there are. What they do not mean need not be there when one means it again: so a node that is taken
    /// out of a pool and put back begins anew where its file is gone.
    pub(super) fn let_go(&mut self, claims: &[Claim]) {
        let means = |claim: &Claim, path: &str| match &claim.source {
            Source::File(file) => file == Path::new(path),
            Source::Devices { .. } => true,
        };
        self.known.let_go(|uid, path| claims.iter().any(|claim| claim.uid == uid && means(claim, path)));
    }

    /// Which pools the devices of claims are of.
    pub(super) fn known(&self) -> &Known {
        &self.known
    }

    /// What a pool wanted so far.
    pub(super) fn wanted(&self) -> &[WantedPool] {
        &self.pools
    }

    /// Paths that keep their place among those that claims mean: all that were chosen, but what was only looked at and left alone, and
    /// what is gone once its claim has changed. What is to be wiped keeps it in any case, or another device would take it over.
    pub(super) fn held(&self, claims: &[Claim]) -> BTreeSet<String> {
        let is_as_before = |place: &Place| {
            claims.iter().any(|claim| claim.uid == place.recipe.uid && claim.generation == place.generation)
        };
        let is_held = |(path, place): &(&String, &Place)| match &place.state {
            State::Faulted { id: None, .. } => is_as_before(place),
            State::Vacant | State::Refused(_) if place.refusal().is_some() => {
                place.data == Data::Wiped || self.known.has(&place.recipe.uid, path)
            }
            _ => true,
        };
        self.places.iter().filter(is_held).map(|(path, _)| path.clone()).collect()
    }

    /// Whether everything that is wanted has been tried.
    pub(super) fn is_settled(&self) -> bool {
        self.pools.iter().all(|pool| self.all_places(pool, Place::is_tried))
    }

    fn all_places(&self, pool: &WantedPool, holds: impl Fn(&Place, &WantedPool) -> bool) -> bool {
        pool.places.iter().all(|wanted| self.places.get(&wanted.path).is_some_and(|place| holds(place, pool)))
    }

    /// A place was opened.
    pub(super) fn opened(&mut self, path: &str, id: DeviceId, opened: Opened) {
        if let Some(place) = self.places.get_mut(path) {
            self.known.note(&place.recipe.uid, path, opened.membership);
            place.refused = None;
            place.state = State::Open { id, opened };
        }
    }

    /// A place was not opened or not wiped. `id`: the number that it would have had.
    pub(super) fn refused(&mut self, path: &str, id: Option<DeviceId>, trouble: Trouble) {
        if let Some(id) = id {
            self.used.remove(&id.0);
        }
        if let Some(place) = self.places.get_mut(path) {
            place.refuse(trouble);
        }
    }

    /// The data of a file is destroyed, and the file goes next: it need not be there any more.
    pub(super) fn erased(&mut self, path: &str) {
        if let Some(place) = self.places.get(path) {
            self.known.wiped(&place.recipe.uid, path);
        }
    }

    /// A place was wiped.
    pub(super) fn wiped(&mut self, path: &str) {
        if let Some(place) = self.places.get_mut(path) {
            self.doubtful.remove(path);
            self.known.wiped(&place.recipe.uid, path);
            place.refused = None;
            place.state = State::Wiped;
        }
    }

    /// A device has failed.
    pub(super) fn lost(&mut self, lost: DeviceId, reason: &str, loss: Loss) {
        for (path, place) in &mut self.places {
            if let State::Open { id, opened } = &place.state
                && *id == lost
            {
                let id = *id;
                if loss == Loss::Sync && !opened.direct {
                    self.doubtful.insert(path.clone());
                }
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
            let place = self.places.entry(wanted.path.clone()).or_insert_with(|| Place::new(pool, wanted));
            if !matches!(place.state, State::Vacant) {
                continue;
            }
            place.aim(pool, wanted);
            // A file that nobody has open is tried, also where there is none: it is made, unless the claim had one.
            let is_file = wanted.recipe.kind == Kind::File;
            let may_make = is_file && !self.known.expects(&pool.uid, &wanted.path);
            let missing = if may_make { Missing::Create } else { Missing::Fail };
            let presence = if is_file { Presence::Here } else { wanted.presence };
            match (presence, pool.data) {
                (Presence::Gone, _) => {
                    place.state = State::Faulted { id: None, trouble: gone(wanted.recipe.kind) };
                }
                (Presence::Here, Data::Wiped) => {
                    place.state = State::Wiping;
                    let (path, at) = (wanted.path.clone(), wanted.at.clone());
                    actions.push(Action::Wipe(ToWipe {
                        kind: wanted.recipe.kind,
                        pool: self.known.pool(&pool.uid),
                        is_member: self.known.has(&pool.uid, &path),
                        is_expected: self.known.expects(&pool.uid, &path),
                        path,
                        at,
                    }));
                }
                (Presence::Here, Data::Kept) if self.doubtful.contains(&wanted.path) => {
                    place.refuse(doubtful());
                }
                (Presence::Here, Data::Kept) if may_open => {
                    let Some(id) = (0..NUMBERS).find(|id| !self.used.contains(id)) else {
                        let message = format!("{NUMBERS} devices of this node are open already");
                        place.refuse(Trouble { reason: Reason::OverCapacity, message });
                        continue;
                    };
                    self.used.insert(id);
                    place.state = State::Opening;
                    let WantedPlace { path, at, recipe, .. } = wanted.clone();
                    to_open.push(ToOpen { id: DeviceId(id), path, at, recipe, missing });
                }
                (Presence::Here, Data::Kept) => {}
            }
        }
        if !to_open.is_empty() {
            // Those that are about to be opened say themselves what they are.
            let is_other = |path: &str| to_open.iter().all(|place| place.path != path);
            let identity = self.known.identity(&pool.uid, is_other);
            actions.push(Action::Open { identity, places: to_open });
        }
    }

    /// Claims that are followed.
    pub(super) fn claims(&self) -> Vec<ClaimFact> {
        let is_followed = |pool: &&WantedPool| self.all_places(pool, Place::is_followed);
        let fact = |pool: &WantedPool| ClaimFact {
            pool: pool.pool.clone(),
            uid: pool.uid.clone(),
            generation: pool.generation,
            trouble: pool.trouble.clone(),
        };
        self.pools.iter().filter(is_followed).map(fact).collect()
    }

    /// Devices and files; what is used of them is for the caller to add, by their numbers.
    pub(super) fn devices(&self) -> Vec<(Option<DeviceId>, DeviceFact)> {
        self.places.iter().map(|(path, place)| place.fact(path)).collect()
    }
}

/// Why no blank file is made where a claim had one.
pub(super) fn missing_file() -> Trouble {
    let message = "the file that this node had is not there, and a blank one would hide that: bring it back (mount its file system, then \
        restart the agent's pod). To begin anew with a blank one, take the node out of the pool's nodeSelector until its CacheNode lists the \
        file no more and put it back, or make a new SSDPool";
    Trouble { reason: Reason::DeviceFailed, message: message.to_owned() }
}

/// Why a file that is not there does not count as destroyed.
pub(super) fn not_destroyed() -> Trouble {
    let message = "the file that this node had is not there, so nobody can destroy its data: bring it back (mount its file system, then restart \
        the agent's pod). If it is gone for good, take the node out of the pool's nodeSelector";
    Trouble { reason: Reason::DeviceFailed, message: message.to_owned() }
}

/// Why a device is not opened again after a failed sync.
fn doubtful() -> Trouble {
    let message = "a sync of it has failed, and its file system may show what the disk does not have: restart the node, or wipe the pool";
    Trouble { reason: Reason::DeviceFailed, message: message.to_owned() }
}

#[cfg(test)]
mod tests;
