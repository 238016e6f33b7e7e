//! Records which pool each claimed device belongs to, by the claim's unique id and the device's path.
//!
//! The records are kept in the agent's state directory, because a missing or failed device cannot report
//! its pool. With them, after a restart, blank devices still join the claim's pool, and a wipe destroys
//! that pool only; without a record, a wipe destroys nothing. A missing file is not re-created: its file system may not be mounted, and blocks would
//! go to the disk below.
//!
//! ```text
//!   opened ──► Expected ── wiped or no longer claimed ──► Released ── opened ──► Expected
//! ```
//!
//! Invariant: all devices of a claim belong to one pool. When a claim creates a new pool, records of its
//! previous pool are dropped.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::device::{Membership, PoolIdentity};

/// File name in the state directory.
const FILE: &str = "pools.json";

/// Maximum number of records: eight claims of 32 devices. Records of removed claims are dropped only above
/// it.
const DEVICES_MAX: usize = 256;

/// The mapping of claimed devices to pools.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct DeviceRecords {
    records: BTreeMap<(String, String), DeviceRecord>,
}

/// The record of one device.
#[derive(Clone, Copy, Debug, PartialEq)]
struct DeviceRecord {
    membership: Membership,
    expectation: Expectation,
}

/// Whether the device must exist when its claim selects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expectation {
    /// It was a member of the pool when it was last opened.
    Expected,
    /// It was wiped, or has not been claimed since: a blank device may take its place.
    Released,
}

/// The file that stores the records.
#[derive(Clone, Debug)]
pub(crate) struct DeviceRecordsFile {
    folder: PathBuf,
    node: String,
}

#[derive(Serialize, Deserialize)]
struct PersistedState {
    /// Name of the node: the disk may have moved from another one.
    node: String,
    devices: Vec<PersistedDevice>,
}

#[derive(Serialize, Deserialize)]
struct PersistedDevice {
    uid: String,
    path: String,
    /// Pool id, as 32 hexadecimal digits.
    pool: String,
    index: u8,
    /// Absent in files of older agents. The name in the file is part of the format.
    #[serde(default, rename = "let_go")]
    released: bool,
}

impl DeviceRecords {
    /// Records that a device of a claim was opened.
    pub(super) fn note(&mut self, uid: &str, path: &str, membership: Membership) {
        self.records.retain(|(of, _), other| of != uid || other.membership.uuid == membership.uuid);
        let member = DeviceRecord { membership, expectation: Expectation::Expected };
        self.records.insert((uid.to_owned(), path.to_owned()), member);
    }

    /// Records that a device of a claim was wiped.
    pub(super) fn wiped(&mut self, uid: &str, path: &str) {
        self.release(|of, other| (of, other) != (uid, path));
    }

    /// Marks records of devices that no claim selects as released. `is_claimed` takes the claim's unique id
    /// and the path.
    pub(super) fn release(&mut self, is_claimed: impl Fn(&str, &str) -> bool) {
        for ((uid, path), member) in &mut self.records {
            if !is_claimed(uid, path) {
                member.expectation = Expectation::Released;
            }
        }
    }

    /// Returns whether the device is a member of the claim's pool and must exist.
    pub(super) fn expects(&self, uid: &str, path: &str) -> bool {
        let member = self.records.get(&(uid.to_owned(), path.to_owned()));
        member.is_some_and(|member| member.expectation == Expectation::Expected)
    }

    /// Returns whether the device was a member of the claim's pool.
    pub(super) fn has(&self, uid: &str, path: &str) -> bool {
        self.records.contains_key(&(uid.to_owned(), path.to_owned()))
    }

    /// Returns the id of the claim's pool.
    pub(super) fn pool(&self, uid: &str) -> Option<[u8; 16]> {
        self.of(uid).next().map(|(_, membership)| membership.uuid)
    }

    /// Returns the pool identity that the claim's recorded devices agree on, limited to the paths in
    /// `among`.
    pub(super) fn identity(&self, uid: &str, among: impl Fn(&str) -> bool) -> PoolIdentity {
        let mut identity = PoolIdentity::default();
        for (path, membership) in self.of(uid).filter(|(path, _)| among(path)) {
            // A device that was renamed has two records; the first one counts.
            let _ = identity.enter(&path.into(), *membership);
        }
        identity
    }

    /// Drops records of claims that are not desired, if there are more than [`DEVICES_MAX`].
    pub(super) fn forget_beyond_bound(&mut self, is_wanted: impl Fn(&str) -> bool) {
        if self.records.len() > DEVICES_MAX {
            self.records.retain(|(uid, _), _| is_wanted(uid));
        }
    }

    fn of(&self, uid: &str) -> impl Iterator<Item = (&str, &Membership)> {
        self.records
            .iter()
            .filter(move |((of, _), _)| of == uid)
            .map(|((_, path), records)| (path.as_str(), &records.membership))
    }
}

impl DeviceRecordsFile {
    /// Uses a file in the agent's state directory.
    pub(crate) fn new(folder: &Path, node: &str) -> DeviceRecordsFile {
        DeviceRecordsFile { folder: folder.to_owned(), node: node.to_owned() }
    }

    /// Reads the records of this node.
    ///
    /// # Errors
    /// The file exists but cannot be read or parsed, or belongs to another node.
    pub(super) fn load(&self) -> Result<DeviceRecords, String> {
        let path = self.folder.join(FILE);
        let failed = |why: String| format!("{}: {why}", path.display());
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(DeviceRecords::default()),
            text => text.map_err(|error| failed(error.to_string()))?,
        };
        let state: PersistedState =
            serde_json::from_slice(&text).map_err(|error| failed(error.to_string()))?;
        if state.node != self.node {
            return Err(failed(format!("the file belongs to node '{}', not to '{}'", state.node, self.node)));
        }
        let mut records = DeviceRecords::default();
        for PersistedDevice { uid, path, pool, index, released } in state.devices {
            let uuid = u128::from_str_radix(&pool, 16).map_err(|error| failed(format!("{pool}: {error}")))?;
            records.note(&uid, &path, Membership { uuid: uuid.to_be_bytes(), index });
            if released {
                records.wiped(&uid, &path);
            }
        }
        Ok(records)
    }

    /// Replaces the file atomically and syncs it.
    ///
    /// # Errors
    /// Writing or syncing failed.
    pub(super) fn save(&self, records: &DeviceRecords) -> io::Result<()> {
        let device = |((uid, path), member): (&(String, String), &DeviceRecord)| PersistedDevice {
            uid: uid.clone(),
            path: path.clone(),
            pool: format!("{:032x}", u128::from_be_bytes(member.membership.uuid)),
            index: member.membership.index,
            released: member.expectation == Expectation::Released,
        };
        let state =
            PersistedState { node: self.node.clone(), devices: records.records.iter().map(device).collect() };
        let text = serde_json::to_vec(&state)?;
        fs::create_dir_all(&self.folder)?;
        let temporary = self.folder.join(format!("{FILE}.new"));
        let mut file = File::create(&temporary)?;
        file.write_all(&text)?;
        file.sync_all()?;
        // Synced before the rename, so that a crash leaves either the old or the new file.
        fs::rename(&temporary, self.folder.join(FILE))?;
        // The rename is durable only after a sync of the directory.
        File::open(&self.folder)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(uuid: u8, index: u8) -> Membership {
        Membership { uuid: [uuid; 16], index }
    }

    #[test]
    fn records_survive_a_restart_on_the_same_node_only() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = DeviceRecordsFile::new(&folder.path().join("state"), "n");
        assert_eq!(file.load(), Ok(DeviceRecords::default()));
        let mut records = DeviceRecords::default();
        records.note("u", "/a", member(7, 0));
        records.note("u", "/b", member(7, 1));
        records.note("v", "/c", member(255, 3));
        records.wiped("u", "/b");
        file.save(&records).expect("the records are saved");
        let loaded = file.load().expect("readable");
        assert!(loaded.expects("u", "/a") && !loaded.expects("u", "/b"));
        assert_eq!(loaded, records);
        let error = DeviceRecordsFile::new(&folder.path().join("state"), "m")
            .load()
            .expect_err("the file belongs to another node");
        assert!(error.contains("'n'") && error.contains(FILE), "{error}");
        fs::write(folder.path().join("state").join(FILE), "{\"node\":").expect("written");
        assert!(file.load().is_err_and(|error| error.contains("EOF")));
    }

    #[test]
    fn claim_that_creates_a_new_pool_drops_its_previous_pool() {
        let mut records = DeviceRecords::default();
        records.note("u", "/a", member(7, 0));
        records.note("u", "/b", member(7, 1));
        records.note("v", "/c", member(7, 2));
        records.note("u", "/a", member(8, 0));
        assert_eq!(
            (records.pool("u"), records.pool("v"), records.pool("w")),
            (Some([8; 16]), Some([7; 16]), None)
        );
        assert!(records.has("u", "/a") && !records.has("u", "/b"));
    }

    #[test]
    fn devices_recorded_by_older_agents_are_expected() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = r#"{"node":"n","devices":[{"uid":"u","path":"/a","pool":"07","index":0}]}"#;
        fs::write(folder.path().join(FILE), state).expect("written");
        let records = DeviceRecordsFile::new(folder.path(), "n").load().expect("readable");
        assert!(records.expects("u", "/a"));
    }

    #[test]
    fn device_is_expected_from_opening_until_it_is_wiped_or_unclaimed() {
        let mut records = DeviceRecords::default();
        assert!(!records.expects("u", "/a"), "it was never opened");
        for path in ["/a", "/b", "/c"] {
            records.note("u", path, member(7, 0));
        }
        assert!(records.expects("u", "/a") && !records.expects("v", "/a"), "another claim does not have it");
        records.wiped("u", "/a");
        records.release(|uid, path| (uid, path) != ("u", "/b"));
        assert_eq!(["/a", "/b", "/c"].map(|path| records.expects("u", path)), [false, false, true]);
        assert!(records.has("u", "/a") && records.pool("u") == Some([7; 16]), "its pool is still recorded");
        records.note("u", "/a", member(7, 0));
        assert!(records.expects("u", "/a"));
    }

    #[test]
    fn records_of_removed_claims_are_dropped_only_above_the_limit() {
        let mut records = DeviceRecords::default();
        records.note("wanted", "/a", member(7, 0));
        for number in 0..DEVICES_MAX {
            records.forget_beyond_bound(|uid| uid == "wanted");
            assert!(number == 0 || records.has(&format!("gone-{}", number - 1), "/a"));
            records.note(&format!("gone-{number}"), "/a", member(1, 0));
        }
        records.forget_beyond_bound(|uid| uid == "wanted");
        assert_eq!((records.records.len(), records.has("wanted", "/a")), (1, true));
    }
}
