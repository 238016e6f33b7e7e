//! Random claims over disks that appear, disappear and fail. The reconciler must converge to the claims,
//! destroy only the claim's data, and never create a blank file in place of one that the claim had.

use std::path::PathBuf;

use super::*;

/// Disks that claim `u` selects, of which it takes `most`. The last one holds another pool.
const DISKS: [&str; 4] = ["/d1", "/d2", "/d3", "/d4"];
const STRANGER: [u8; 16] = [200; 16];

/// File of claim `v`, absent while its file system is not mounted.
const FILE: &str = "/f";

proptest::proptest! {
    #[test]
    fn reconciler_converges_to_the_claims_after_random_events(
        steps in proptest::collection::vec((0u8..12, 0u8..8), 0..80)
    ) {
        let mut simulation = Simulation::new();
        let mut reconciler = DeviceReconciler::default();
        for (what, number) in steps {
            simulation.step(&mut reconciler, what, number);
        }
        simulation.claims = Claims { generation: 99, most: DISKS.len(), data: Some(DataPolicy::Keep), has_file: true };
        simulation.disks.values_mut().for_each(|disk| disk.is_here = true);
        for _ in 0..60 {
            reconciler.set_desired(simulation.wanted(&reconciler));
            simulation.begin(reconciler.next_actions(Retry::Refused));
            simulation.end_one(&mut reconciler, 0);
        }
        proptest::prop_assert!(reconciler.is_attempted());
        reconciler.set_desired(simulation.wanted(&reconciler));
        proptest::prop_assert!(reconciler.next_actions(Retry::None).is_empty(), "no actions remain");
        for (id, fact) in reconciler.device_facts() {
            proptest::prop_assert!(fact.path == FILE || DISKS.contains(&fact.path.as_str()));
            if fact.state == DeviceState::Open {
                proptest::prop_assert_eq!(id.and_then(|id| simulation.open.get(&id.0)), Some(&fact.path));
            } else {
                proptest::prop_assert_eq!(fact.state, DeviceState::Refused);
                proptest::prop_assert!(simulation.cannot_join(&fact.path), "{} could be open", fact.path);
            }
        }
    }
}

struct Claims {
    generation: i64,
    most: usize,
    /// Data policy of claim `u`; `None` if the claim does not exist.
    data: Option<DataPolicy>,
    has_file: bool,
}

struct Disk {
    is_here: bool,
    on_it: Option<Membership>,
}

/// Simulates the tasks and the core.
struct Simulation {
    claims: Claims,
    disks: BTreeMap<&'static str, Disk>,
    opening: Vec<(PoolIdentity, Vec<OpenRequest>)>,
    closing: Vec<DeviceId>,
    wiping: Vec<WipeRequest>,
    open: BTreeMap<u8, String>,
    /// Pools that claim `u` had so far.
    had: BTreeSet<[u8; 16]>,
    /// Whether claim `v` has had its file since it was created.
    had_file: bool,
    pools: u8,
}

impl Simulation {
    fn new() -> Simulation {
        let blank = |path| (path, Disk { is_here: true, on_it: None });
        let mut disks: BTreeMap<&str, Disk> = DISKS.into_iter().chain([FILE]).map(blank).collect();
        disks.insert(DISKS[3], Disk { is_here: true, on_it: Some(Membership { uuid: STRANGER, index: 0 }) });
        let claims = Claims { generation: 1, most: 1, data: None, has_file: false };
        let (opening, closing, wiping) = (Vec::new(), Vec::new(), Vec::new());
        Simulation {
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

    fn step(&mut self, reconciler: &mut DeviceReconciler, what: u8, number: u8) {
        match what {
            0 => {
                (self.claims.data, self.claims.generation) =
                    (Some(DataPolicy::Keep), self.claims.generation + 1);
            }
            1 => {
                (self.claims.data, self.claims.generation) =
                    (Some(DataPolicy::Wipe), self.claims.generation + 1);
            }
            2 => self.claims.data = None,
            3 => (self.claims.has_file, self.had_file) = (!self.claims.has_file, false),
            4 => self.claims.most = 1 + usize::from(number % 3),
            5 | 6 => {
                let disk = DISKS[usize::from(number) % DISKS.len()];
                let disk = self.disks.get_mut(disk).expect("all are there");
                disk.is_here = !disk.is_here;
            }
            7 | 8 => self.end_one(reconciler, number),
            9 => self.lose_one(reconciler, number),
            10 => {
                let file = self.disks.get_mut(FILE).expect("all are there");
                file.is_here = !file.is_here;
            }
            _ => {}
        }
        reconciler.release_unclaimed(&self.claims());
        reconciler.set_desired(self.wanted(reconciler));
        self.begin(reconciler.next_actions(if number % 4 == 3 { Retry::Refused } else { Retry::None }));
    }

    /// Returns the claims, of which the reconciler sees only the sources.
    fn claims(&self) -> Vec<Claim> {
        let of_disks = self.claims.data.map(|_| claim("u", self.claims.generation));
        let source = Source::File(PathBuf::from(FILE));
        let of_file = self.claims.has_file.then(|| Claim { source, ..claim("v", self.claims.generation) });
        of_disks.into_iter().chain(of_file).collect()
    }

    /// Returns the desired pools as the resolver would: devices in use first, missing ones last.
    fn wanted(&self, reconciler: &DeviceReconciler) -> Vec<DesiredPool> {
        let Claims { generation, most, data, has_file } = self.claims;
        let retained_paths = reconciler.retained_paths(&[claim("u", generation), claim("v", generation)]);
        let mut pools = Vec::new();
        if let Some(data) = data {
            let is_here = |path: &&str| self.disks[*path].is_here;
            let (present, missing): (Vec<&str>, Vec<&str>) = DISKS
                .into_iter()
                .filter(|path| is_here(path) || retained_paths.contains(*path))
                .partition(is_here);
            let (used, fresh): (Vec<&str>, Vec<&str>) =
                present.iter().partition(|path| retained_paths.contains(**path));
            let chosen: Vec<&str> = used.into_iter().chain(fresh).chain(missing).take(most).collect();
            let mut wanted = DesiredPool { generation, data, ..pool("u", &chosen) };
            for device in &mut wanted.devices {
                device.presence =
                    if is_here(&device.path.as_str()) { Presence::Present } else { Presence::Missing };
            }
            pools.push(wanted);
        }
        if has_file {
            let mut wanted = DesiredPool { generation, ..file("v", FILE) };
            if retained_paths.contains(FILE) && !self.disks[FILE].is_here {
                wanted.devices[0].presence = Presence::Missing;
            }
            pools.push(wanted);
        }
        pools
    }

    /// Returns whether a disk belongs to another pool than the open ones, or is a copy of an open one.
    fn cannot_join(&self, path: &str) -> bool {
        let on = |path: &str| self.disks[path].on_it;
        let differs = |open: &Membership| on(path).is_some_and(|own| own.uuid != open.uuid || own == *open);
        self.open.values().filter(|open| *open != FILE).filter_map(|open| on(open)).any(|open| differs(&open))
    }

    fn begin(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Open { identity, devices } => {
                    for device in &devices {
                        let mut under_way = self.opening.iter().flat_map(|(_, devices)| devices);
                        assert!(!self.open.contains_key(&device.id.0), "{} is in use", device.id.0);
                        assert!(under_way.all(|other| other.id != device.id && other.path != device.path));
                        assert!(!self.closing.contains(&device.id));
                        assert!(self.wiping.iter().all(|other| other.path != device.path));
                    }
                    self.opening.push((identity, devices));
                }
                Action::Detach(id) => {
                    assert!(self.open.remove(&id.0).is_some(), "{} is open", id.0);
                    self.closing.push(id);
                }
                Action::Wipe(device) => {
                    assert!(self.open.values().all(|path| *path != device.path), "{} is open", device.path);
                    assert!(self.wiping.iter().all(|other| other.path != device.path));
                    self.wiping.push(device);
                }
            }
        }
    }

    fn end_one(&mut self, reconciler: &mut DeviceReconciler, chance: u8) {
        if let Some(id) = self.closing.pop() {
            reconciler.released(id);
        } else if let Some(device) = self.wiping.pop() {
            self.end_wipe(reconciler, &device, chance);
        } else if !self.opening.is_empty() {
            let (identity, devices) = self.opening.remove(usize::from(chance) % self.opening.len());
            self.end_opening(reconciler, identity, devices, chance);
        }
    }

    /// Simulates the end of a `device_tasks::wipe`.
    fn end_wipe(&mut self, reconciler: &mut DeviceReconciler, device: &WipeRequest, chance: u8) {
        let disk = self.disks.get_mut(device.path.as_str()).expect("all are there");
        let is_own = disk.on_it.is_none_or(|on_it| device.pool.is_none_or(|own| own == on_it.uuid));
        if chance % 3 == 2 || !disk.is_here || !is_own {
            return reconciler.refused(&device.path, None, fault());
        }
        if let Some(destroyed) = disk.on_it.take() {
            let was_own = self.had.is_empty() || self.had.contains(&destroyed.uuid);
            assert!(was_own, "{}: the data never belonged to the claim", device.path);
        }
        reconciler.wiped(&device.path);
    }

    /// Simulates `device::open_some`: disks with a pool first, then blank ones.
    fn end_opening(
        &mut self,
        reconciler: &mut DeviceReconciler,
        mut identity: PoolIdentity,
        mut devices: Vec<OpenRequest>,
        chance: u8,
    ) {
        devices.sort_by_key(|device| self.disks[device.path.as_str()].on_it.is_none());
        for OpenRequest { id, path, spec, missing, .. } in devices {
            self.find_or_make(&path, missing);
            let disk = &self.disks[path.as_str()];
            let membership = match disk.on_it {
                Some(records) => Some(records),
                None => self.fresh(&identity),
            };
            let entered =
                membership.filter(|records| identity.enter(&path.as_str().into(), *records).is_ok());
            match entered.filter(|_| self.disks[path.as_str()].is_here && chance % 3 != 2) {
                Some(membership) => {
                    self.disks.get_mut(path.as_str()).expect("all are there").on_it = Some(membership);
                    if spec.uid == "u" {
                        self.had.insert(membership.uuid);
                    }
                    // The claim may have been removed and re-created while it was opening.
                    self.had_file |= path == FILE && self.claims.has_file;
                    reconciler.opened(&path, id, OpenDevice { membership, ..opened(0) });
                    self.open.insert(id.0, path);
                }
                None => reconciler.refused(&path, Some(id), fault()),
            }
        }
    }

    /// Creates a blank file if it is missing and may be created.
    fn find_or_make(&mut self, path: &str, missing: IfMissing) {
        let disk = self.disks.get_mut(path).expect("all are there");
        if missing == IfMissing::Create && !disk.is_here {
            assert!(
                path == FILE && !self.had_file,
                "{path}: a blank file hides the loss of the claim's file"
            );
            *disk = Disk { is_here: true, on_it: None };
        }
    }

    /// Returns the membership of a blank disk: the next index of the present pool, or the first of a new
    /// one.
    fn fresh(&mut self, identity: &PoolIdentity) -> Option<Membership> {
        let fits = |membership: &Membership| identity.clone().enter(&"/new".into(), *membership).is_ok();
        let new = Membership { uuid: [100 + self.pools; 16], index: 0 };
        if fits(&new) {
            self.pools += 1;
            return Some(new);
        }
        let pools = (0..self.pools).map(|pool| [100 + pool; 16]).chain([STRANGER]);
        let mut members = pools.flat_map(|uuid| (0..8).map(move |index| Membership { uuid, index }));
        members.find(fits)
    }

    fn lose_one(&mut self, reconciler: &mut DeviceReconciler, chance: u8) {
        let at = usize::from(chance) % (self.open.len() + 1);
        if let Some(id) = self.open.keys().nth(at) {
            let loss = if chance % 5 == 4 { LossCause::Sync } else { LossCause::Other };
            reconciler.lost(DeviceId(*id), "random", loss);
        }
    }
}
