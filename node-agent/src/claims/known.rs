//! Which pools the devices of claims are of: by the unique id of the claim and the device's path, with what the device said when it was
//! opened.
//!
//! It is kept in the agent's state directory, because a device that is late or cannot be opened says nothing: after a restart fresh
//! devices still join the pool, and a wipe still destroys the claim's pool and no other. A file that a claim had is not made anew when it
//! is not there: its file system may not be mounted, and blocks would go to the disk below.
//!
//! ```text
//!   opened ──► Expected ── wiped, or its claim does not mean it any more ──► LetGo ── opened ──► Expected
//! ```
//!
//! Invariant: all devices of one claim are of one pool; what is known of another pool ends when a claim founds a new one.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::device::{Membership, PoolIdentity};

/// The file in the state directory.
const FILE: &str = "pools.json";

/// Devices that are remembered: eight claims of 32 each. Those of claims that are gone end only when there are more.
const DEVICES_MAX: usize = 256;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Known {
    members: BTreeMap<(String, String), Member>,
}

/// A device that is known.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Member {
    membership: Membership,
    standing: Standing,
}

/// Whether it should be there when its claim means it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It was one of the pool when it was last looked at.
    Expected,
    /// It was wiped, or its claim has not meant it since: a blank one may take its place.
    LetGo,
}

/// Where it is kept.
#[derive(Clone, Debug)]
pub(crate) struct KnownFile {
    folder: PathBuf,
    node: String,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    /// The node. A disk may have moved.
    node: String,
    devices: Vec<KeptDevice>,
}

#[derive(Serialize, Deserialize)]
struct KeptDevice {
    uid: String,
    path: String,
    /// In hexadecimal digits.
    pool: String,
    index: u8,
    /// Files of before this have no such field.
    #[serde(default)]
    let_go: bool,
}

impl Known {
    /// A device of a claim was opened.
    pub(super) fn note(&mut self, uid: &str, path: &str, membership: Membership) {
        self.members.retain(|(of, _), other| of != uid || other.membership.uuid == membership.uuid);
        let member = Member { membership, standing: Standing::Expected };
        self.members.insert((uid.to_owned(), path.to_owned()), member);
    }

    /// A device of a claim was wiped.
    pub(super) fn wiped(&mut self, uid: &str, path: &str) {
        self.let_go(|of, other| (of, other) != (uid, path));
    }

    /// Devices that no claim means, by its unique id and their paths, need not be there when one means them again.
    pub(super) fn let_go(&mut self, is_meant: impl Fn(&str, &str) -> bool) {
        for ((uid, path), member) in &mut self.members {
            if !is_meant(uid, path) {
                member.standing = Standing::LetGo;
            }
        }
    }

    /// Whether a device was one of the claim and should still be there.
    pub(super) fn expects(&self, uid: &str, path: &str) -> bool {
        let member = self.members.get(&(uid.to_owned(), path.to_owned()));
        member.is_some_and(|member| member.standing == Standing::Expected)
    }

    /// Whether a device was one of the claim.
    pub(super) fn has(&self, uid: &str, path: &str) -> bool {
        self.members.contains_key(&(uid.to_owned(), path.to_owned()))
    }

    /// The pool that a claim has.
    pub(super) fn pool(&self, uid: &str) -> Option<[u8; 16]> {
        self.of(uid).next().map(|(_, membership)| membership.uuid)
    }

    /// What the devices of a claim agree on, as far as they are among these.
    pub(super) fn identity(&self, uid: &str, among: impl Fn(&str) -> bool) -> PoolIdentity {
        let mut identity = PoolIdentity::default();
        for (path, membership) in self.of(uid).filter(|(path, _)| among(path)) {
            // One that has another name now is known twice: the first counts.
            let _ = identity.enter(path.as_ref(), *membership);
        }
        identity
    }

    /// Ends what is known of claims that are not wanted, when it is too much.
    pub(super) fn forget_beyond_bound(&mut self, is_wanted: impl Fn(&str) -> bool) {
        if self.members.len() > DEVICES_MAX {
            self.members.retain(|(uid, _), _| is_wanted(uid));
        }
    }

    fn of(&self, uid: &str) -> impl Iterator<Item = (&str, &Membership)> {
        self.members
            .iter()
            .filter(move |((of, _), _)| of == uid)
            .map(|((_, path), known)| (path.as_str(), &known.membership))
    }
}

impl KnownFile {
    /// In a directory of an agent's own.
    pub(crate) fn new(folder: &Path, node: &str) -> KnownFile {
        KnownFile { folder: folder.to_owned(), node: node.to_owned() }
    }

    /// What was kept of this node.
    ///
    /// # Errors
    /// It is there and cannot be used, in words.
    pub(super) fn load(&self) -> Result<Known, String> {
        let path = self.folder.join(FILE);
        let failed = |why: String| format!("{}: {why}", path.display());
        let text = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Known::default()),
            text => text.map_err(|error| failed(error.to_string()))?,
        };
        let kept: Kept = serde_json::from_slice(&text).map_err(|error| failed(error.to_string()))?;
        if kept.node != self.node {
            return Err(failed(format!("it is of node '{}', and this is '{}'", kept.node, self.node)));
        }
        let mut known = Known::default();
        for KeptDevice { uid, path, pool, index, let_go } in kept.devices {
            let uuid = u128::from_str_radix(&pool, 16).map_err(|error| failed(format!("{pool}: {error}")))?;
            known.note(&uid, &path, Membership { uuid: uuid.to_be_bytes(), index });
            if let_go {
                known.wiped(&uid, &path);
            }
        }
        Ok(known)
    }

    /// Keeps it: one file, replaced whole.
    ///
    /// # Errors
    /// The disk's.
    pub(super) fn save(&self, known: &Known) -> io::Result<()> {
        let device = |((uid, path), member): (&(String, String), &Member)| KeptDevice {
            uid: uid.clone(),
            path: path.clone(),
            pool: format!("{:032x}", u128::from_be_bytes(member.membership.uuid)),
            index: member.membership.index,
            let_go: member.standing == Standing::LetGo,
        };
        let kept = Kept { node: self.node.clone(), devices: known.members.iter().map(device).collect() };
        let text = serde_json::to_vec(&kept)?;
        fs::create_dir_all(&self.folder)?;
        let beside = self.folder.join(format!("{FILE}.new"));
        let mut file = File::create(&beside)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&beside, self.folder.join(FILE))?;
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
    fn what_is_known_comes_back_after_a_restart_on_the_same_node_only() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = KnownFile::new(&folder.path().join("state"), "n");
        assert_eq!(file.load(), Ok(Known::default()));
        let mut known = Known::default();
        known.note("u", "/a", member(7, 0));
        known.note("u", "/b", member(7, 1));
        known.note("v", "/c", member(255, 3));
        known.wiped("u", "/b");
        file.save(&known).expect("a disk with room");
        let loaded = file.load().expect("readable");
        assert!(loaded.expects("u", "/a") && !loaded.expects("u", "/b"));
        assert_eq!(loaded, known);
        let error = KnownFile::new(&folder.path().join("state"), "m").load().expect_err("another node's");
        assert!(error.contains("'n'") && error.contains(FILE), "{error}");
        fs::write(folder.path().join("state").join(FILE), "{\"node\":").expect("written");
        assert!(file.load().is_err_and(|error| error.contains("EOF")));
    }

    #[test]
    fn a_claim_that_founds_a_new_pool_has_no_other() {
        let mut known = Known::default();
        known.note("u", "/a", member(7, 0));
        known.note("u", "/b", member(7, 1));
        known.note("v", "/c", member(7, 2));
        known.note("u", "/a", member(8, 0));
        assert_eq!((known.pool("u"), known.pool("v"), known.pool("w")), (Some([8; 16]), Some([7; 16]), None));
        assert!(known.has("u", "/a") && !known.has("u", "/b"));
    }

    #[test]
    fn what_an_agent_of_before_has_kept_is_expected() {
        let folder = tempfile::tempdir().expect("a folder");
        let kept = r#"{"node":"n","devices":[{"uid":"u","path":"/a","pool":"07","index":0}]}"#;
        fs::write(folder.path().join(FILE), kept).expect("written");
        let known = KnownFile::new(folder.path(), "n").load().expect("readable");
        assert!(known.expects("u", "/a"));
    }

    #[test]
    fn a_device_is_expected_from_when_it_was_opened_until_it_is_wiped_or_not_meant_any_more() {
        let mut known = Known::default();
        assert!(!known.expects("u", "/a"), "nobody has seen it");
        for path in ["/a", "/b", "/c"] {
            known.note("u", path, member(7, 0));
        }
        assert!(known.expects("u", "/a") && !known.expects("v", "/a"), "another pool has not had it");
        known.wiped("u", "/a");
        known.let_go(|uid, path| (uid, path) != ("u", "/b"));
        assert_eq!(["/a", "/b", "/c"].map(|path| known.expects("u", path)), [false, false, true]);
        assert!(known.has("u", "/a") && known.pool("u") == Some([7; 16]), "which pool it was is still known");
        known.note("u", "/a", member(7, 0));
        assert!(known.expects("u", "/a"));
    }

    #[test]
    fn claims_that_are_gone_are_known_until_there_is_too_much() {
        let mut known = Known::default();
        known.note("wanted", "/a", member(7, 0));
        for number in 0..DEVICES_MAX {
            known.forget_beyond_bound(|uid| uid == "wanted");
            assert!(number == 0 || known.has(&format!("gone-{}", number - 1), "/a"));
            known.note(&format!("gone-{number}"), "/a", member(1, 0));
        }
        known.forget_beyond_bound(|uid| uid == "wanted");
        assert_eq!((known.members.len(), known.has("wanted", "/a")), (1, true));
    }
}
