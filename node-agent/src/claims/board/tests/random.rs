//! Random claims over disks that come, go and fail: the board ends where the claims say, destroys nothing that was not the claim's, and makes
//! no blank file in place of one that a claim has had since it came.

use super::*;

/// Disks that claim `u` means, of which it takes some. The last one has another pool on it.
const DISKS: [&str; 4] = ["/d1", "/d2", "/d3", "/d4"];
const STRANGER: [u8; 16] = [200; 16];

/// What claim `v` has. It is not here while its file system is not mounted.
const FILE: &str = "/f";

proptest::proptest! {
    #[test]
    fn whatever_happens_the_board_ends_where_the_claims_say(
        steps in proptest::collection::vec((0u8..12, 0u8..8), 0..80)
    ) {
        let mut world = World::new();
        let mut board = Board::default();
        for (what, number) in steps {
            world.step(&mut board, what, number);
        }
        world.claims = Claims { generation: 99, most: DISKS.len(), data: Some(Data::Kept), has_file: true };
        world.disks.values_mut().for_each(|disk| disk.is_here = true);
        for _ in 0..60 {
            board.want(world.wanted(&board));
            world.begin(board.decide(Retry::Refused));
            world.end_one(&mut board, 0);
        }
        proptest::prop_assert!(board.is_settled());
        board.want(world.wanted(&board));
        proptest::prop_assert!(board.decide(Retry::Nothing).is_empty(), "nothing is left to do");
        for (id, fact) in board.devices() {
            proptest::prop_assert!(fact.path == FILE || DISKS.contains(&fact.path.as_str()));
            if fact.state == DeviceState::Open {
                proptest::prop_assert_eq!(id.and_then(|id| world.open.get(&id.0)), Some(&fact.path));
            } else {
                proptest::prop_assert_eq!(fact.state, DeviceState::Refused);
                proptest::prop_assert!(world.cannot_join(&fact.path), "{} could be open", fact.path);
            }
        }
    }
}

struct Claims {
    generation: i64,
    most: usize,
    /// What claim `u` wants, if it is there.
    data: Option<Data>,
    has_file: bool,
}

struct Disk {
    is_here: bool,
    on_it: Option<Membership>,
}

/// What threads and the core do, as far as the board learns of it.
struct World {
    claims: Claims,
    disks: BTreeMap<&'static str, Disk>,
    opening: Vec<(PoolIdentity, Vec<ToOpen>)>,
    closing: Vec<DeviceId>,
    wiping: Vec<ToWipe>,
    open: BTreeMap<u8, String>,
    /// Pools that claim `u` had.
    had: BTreeSet<[u8; 16]>,
    /// Whether claim `v` has had its file since it came.
    had_file: bool,
    pools: u8,
}

impl World {
    fn new() -> World {
        let blank = |path| (path, Disk { is_here: true, on_it: None });
        let mut disks: BTreeMap<&str, Disk> = DISKS.into_iter().chain([FILE]).map(blank).collect();
        disks.insert(DISKS[3], Disk { is_here: true, on_it: Some(Membership { uuid: STRANGER, index: 0 }) });
        let claims = Claims { generation: 1, most: 1, data: None, has_file: false };
        let (opening, closing, wiping) = (Vec::new(), Vec::new(), Vec::new());
        World {
            claims,
            disks,
            opening,
            closing,
            wiping,
            open: BTreeMap::new(),
            had: BTreeSet::new(),
            had_file: false,
            pools: 0,
        }
    }

    fn step(&mut self, board: &mut Board, what: u8, number: u8) {
        match what {
            0 => (self.claims.data, self.claims.generation) = (Some(Data::Kept), self.claims.generation + 1),
            1 => (self.claims.data, self.claims.generation) = (Some(Data::Wiped), self.claims.generation + 1),
            2 => self.claims.data = None,
            3 => (self.claims.has_file, self.had_file) = (!self.claims.has_file, false),
            4 => self.claims.most = 1 + usize::from(number % 3),
            5 | 6 => {
                let disk = DISKS[usize::from(number) % DISKS.len()];
                let disk = self.disks.get_mut(disk).expect("all are there");
                disk.is_here = !disk.is_here;
            }
            7 | 8 => self.end_one(board, number),
            9 => self.lose_one(board, number),
            10 => {
                let file = self.disks.get_mut(FILE).expect("all are there");
                file.is_here = !file.is_here;
            }
            _ => {}
        }
        board.let_go(&self.claims());
        board.want(self.wanted(board));
        self.begin(board.decide(if number % 4 == 3 { Retry::Refused } else { Retry::Nothing }));
    }

    /// The claims themselves, of which the board sees where their devices are.
    fn claims(&self) -> Vec<Claim> {
        let of_disks = self.claims.data.map(|_| claim("u", self.claims.generation));
        let source = Source::File(PathBuf::from(FILE));
        let of_file = self.claims.has_file.then(|| Claim { source, ..claim("v", self.claims.generation) });
        of_disks.into_iter().chain(of_file).collect()
    }

    /// What claims mean, as names are resolved: those in use first, those that are gone last.
    fn wanted(&self, board: &Board) -> Vec<WantedPool> {
        let Claims { generation, most, data, has_file } = self.claims;
        let held = board.held(&[claim("u", generation), claim("v", generation)]);
        let mut pools = Vec::new();
        if let Some(data) = data {
            let is_here = |path: &&str| self.disks[*path].is_here;
            let (here, gone): (Vec<&str>, Vec<&str>) =
                DISKS.into_iter().filter(|path| is_here(path) || held.contains(*path)).partition(is_here);
            let (used, fresh): (Vec<&str>, Vec<&str>) = here.iter().partition(|path| held.contains(**path));
            let chosen: Vec<&str> = used.into_iter().chain(fresh).chain(gone).take(most).collect();
            let mut wanted = WantedPool { generation, data, ..pool("u", &chosen) };
            for place in &mut wanted.places {
                place.presence = if is_here(&place.path.as_str()) { Presence::Here } else { Presence::Gone };
            }
            pools.push(wanted);
        }
        if has_file {
            let mut wanted = WantedPool { generation, ..file("v", FILE) };
            if held.contains(FILE) && !self.disks[FILE].is_here {
                wanted.places[0].presence = Presence::Gone;
            }
            pools.push(wanted);
        }
        pools
    }

    /// Whether a disk is of another pool than one that is open, or a copy of it.
    fn cannot_join(&self, path: &str) -> bool {
        let on = |path: &str| self.disks[path].on_it;
        let differs = |open: &Membership| on(path).is_some_and(|own| own.uuid != open.uuid || own == *open);
        self.open.values().filter(|open| *open != FILE).filter_map(|open| on(open)).any(|open| differs(&open))
    }

    fn begin(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Open { identity, places } => {
                    for place in &places {
                        let mut under_way = self.opening.iter().flat_map(|(_, places)| places);
                        assert!(!self.open.contains_key(&place.id.0), "{} is in use", place.id.0);
                        assert!(under_way.all(|other| other.id != place.id && other.path != place.path));
                        assert!(!self.closing.contains(&place.id));
                        assert!(self.wiping.iter().all(|other| other.path != place.path));
                    }
                    self.opening.push((identity, places));
                }
                Action::Detach(id) => {
                    assert!(self.open.remove(&id.0).is_some(), "{} is open", id.0);
                    self.closing.push(id);
                }
                Action::Wipe(place) => {
                    assert!(self.open.values().all(|path| *path != place.path), "{} is open", place.path);
                    assert!(self.wiping.iter().all(|other| other.path != place.path));
                    self.wiping.push(place);
                }
            }
        }
    }

    fn end_one(&mut self, board: &mut Board, chance: u8) {
        if let Some(id) = self.closing.pop() {
            board.released(id);
        } else if let Some(place) = self.wiping.pop() {
            self.end_wipe(board, &place, chance);
        } else if !self.opening.is_empty() {
            let (identity, places) = self.opening.remove(usize::from(chance) % self.opening.len());
            self.end_opening(board, identity, places, chance);
        }
    }

    /// As `opening::wipe` does it.
    fn end_wipe(&mut self, board: &mut Board, place: &ToWipe, chance: u8) {
        let disk = self.disks.get_mut(place.path.as_str()).expect("all are there");
        let is_own = disk.on_it.is_none_or(|on_it| place.pool.is_none_or(|own| own == on_it.uuid));
        if chance % 3 == 2 || !disk.is_here || !is_own {
            return board.refused(&place.path, None, trouble());
        }
        if let Some(destroyed) = disk.on_it.take() {
            let was_own = self.had.is_empty() || self.had.contains(&destroyed.uuid);
            assert!(was_own, "{}: the claim never had what was on it", place.path);
        }
        board.wiped(&place.path);
    }

    /// As `device::open_some` does it: disks with a pool first, then blank ones.
    fn end_opening(
        &mut self,
        board: &mut Board,
        mut identity: PoolIdentity,
        mut places: Vec<ToOpen>,
        chance: u8,
    ) {
        places.sort_by_key(|place| self.disks[place.path.as_str()].on_it.is_none());
        for ToOpen { id, path, recipe, missing, .. } in places {
            self.find_or_make(&path, missing);
            let disk = &self.disks[path.as_str()];
            let membership = match disk.on_it {
                Some(known) => Some(known),
                None => self.fresh(&identity),
            };
            let entered = membership.filter(|known| identity.enter(path.as_ref(), *known).is_ok());
            match entered.filter(|_| self.disks[path.as_str()].is_here && chance % 3 != 2) {
                Some(membership) => {
                    self.disks.get_mut(path.as_str()).expect("all are there").on_it = Some(membership);
                    if recipe.uid == "u" {
                        self.had.insert(membership.uuid);
                    }
                    // The claim may have gone and come back while it was opened.
                    self.had_file |= path == FILE && self.claims.has_file;
                    board.opened(&path, id, Opened { membership, ..opened(0) });
                    self.open.insert(id.0, path);
                }
                None => board.refused(&path, Some(id), trouble()),
            }
        }
    }

    /// Where the file is not there, and may be made, there is a blank one in its place from now on.
    fn find_or_make(&mut self, path: &str, missing: Missing) {
        let disk = self.disks.get_mut(path).expect("all are there");
        if missing == Missing::Create && !disk.is_here {
            assert!(path == FILE && !self.had_file, "{path}: a blank one hides that the claim's is gone");
            *disk = Disk { is_here: true, on_it: None };
        }
    }

    /// What a blank disk becomes: the next of the pool that is there, or the first of a new one.
    fn fresh(&mut self, identity: &PoolIdentity) -> Option<Membership> {
        let fits = |membership: &Membership| identity.clone().enter("/new".as_ref(), *membership).is_ok();
        let new = Membership { uuid: [100 + self.pools; 16], index: 0 };
        if fits(&new) {
            self.pools += 1;
            return Some(new);
        }
        let pools = (0..self.pools).map(|pool| [100 + pool; 16]).chain([STRANGER]);
        let mut members = pools.flat_map(|uuid| (0..8).map(move |index| Membership { uuid, index }));
        members.find(fits)
    }

    fn lose_one(&mut self, board: &mut Board, chance: u8) {
        let at = usize::from(chance) % (self.open.len() + 1);
        if let Some(id) = self.open.keys().nth(at) {
            let loss = if chance % 5 == 4 { Loss::Sync } else { Loss::Other };
            board.lost(DeviceId(*id), "random", loss);
        }
    }
}
