//! Which devices and files a claim means, on this node, now.
//!
//! Stable names are links below `/dev/disk/by-id` of a root that can be another than `/`: in a container the node's devices may be
//! mounted elsewhere. Of several names of one device the first in order counts; names of partitions count only where the pattern
//! names them. Devices that are in use already come first, so that a new disk does not displace one; where there are more than a claim
//! may have, devices with a pool on them follow, then blank ones: after a restart nothing is in use yet. What is gone comes last.
//!
//! A name in use is gone when it led nowhere twice in a row: names are made anew whenever udev looks at a disk again. So is a file that somebody
//! has removed: what is written to it still would be lost with the process.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use reprise_agent_kubernetes::{Claim, Reason, Source, Trouble};

use super::board::{Kind, Presence, Recipe, WantedPlace, WantedPool};
use super::signatures;

/// What a name of a partition has in it.
const PARTITION: &str = "-part";

/// What names are looked up with.
pub(super) struct Names<'a> {
    /// Where the node's root is mounted.
    pub(super) root: &'a Path,
    /// Paths that keep their place.
    pub(super) held: BTreeSet<String>,
    /// Those that led nowhere at the last look.
    pub(super) missed: &'a mut BTreeSet<String>,
}

/// Resolves claims in their order; a device that two want goes to the first.
pub(super) fn resolve(claims: &[Claim], names: Names<'_>) -> Vec<WantedPool> {
    let Names { root, held, missed } = names;
    let mut look =
        Look { root, held, missed: std::mem::take(missed), missing: missed, taken: BTreeSet::new() };
    claims.iter().map(|claim| resolve_claim(claim, &mut look)).collect()
}

/// One look at the names of all claims.
struct Look<'a> {
    root: &'a Path,
    held: BTreeSet<String>,
    /// What the last look missed, and what this one does.
    missed: BTreeSet<String>,
    missing: &'a mut BTreeSet<String>,
    /// Where devices and files of earlier claims really are.
    taken: BTreeSet<PathBuf>,
}

fn resolve_claim(claim: &Claim, look: &mut Look<'_>) -> WantedPool {
    let root = look.root;
    let mut trouble = None;
    let mut places = Vec::new();
    let place = |path: String, kind: Kind, presence: Presence| WantedPlace {
        at: below(root, Path::new(&path)),
        path,
        presence,
        recipe: Recipe {
            pool: claim.pool.clone(),
            uid: claim.uid.clone(),
            kind,
            bytes: claim.bytes,
            engine: claim.engine,
            fallback: claim.fallback,
            foreign: claim.foreign,
        },
    };
    let conflict = |path: &str| Trouble {
        reason: Reason::Conflict,
        message: format!("{path} is claimed by another pool as well: select it by one pool only"),
    };
    match &claim.source {
        Source::File(file) => {
            let path = file.display().to_string();
            // One that is not in use yet is tried: it may be one to be made.
            let presence = if look.held.contains(&path) { look.at(&path).1 } else { Presence::Here };
            match look.taken.insert(below(root, file)) {
                true => places.push(place(path, Kind::File, presence)),
                false => trouble = Some(conflict(&path)),
            }
        }
        Source::Devices { globs, most } => {
            for (path, real, presence) in matching(globs, *most, look) {
                if places.len() == *most {
                    break;
                }
                match look.taken.insert(real) {
                    true => places.push(place(path, Kind::Device, presence)),
                    false => trouble = Some(conflict(&path)),
                }
            }
            if places.is_empty() && trouble.is_none() {
                let message = format!(
                    "no device of this node has a name like {}: look at /dev/disk/by-id there",
                    globs.join(" or ")
                );
                trouble = Some(Trouble { reason: Reason::NoDevices, message });
            }
        }
    }
    let (pool, uid) = (claim.pool.clone(), claim.uid.clone());
    WantedPool { pool, uid, generation: claim.generation, data: claim.data, places, trouble }
}

/// Stable names that match, with where they lead, each device once: those in use first, then others in order, then those in use that
/// lead nowhere any more. Of more than `most`, others with a pool on them come before the rest.
fn matching(globs: &[String], most: usize, look: &mut Look<'_>) -> Vec<(String, PathBuf, Presence)> {
    let fits = |path: &str| {
        let partitions = |glob: &str| glob.contains(PARTITION) || !path.contains(PARTITION);
        globs.iter().any(|glob| partitions(glob) && is_match(glob, path))
    };
    let mut names: BTreeSet<String> = look.held.iter().filter(|path| fits(path)).cloned().collect();
    let folders: BTreeSet<&Path> = globs.iter().filter_map(|glob| Path::new(glob).parent()).collect();
    for folder in folders {
        let Ok(entries) = fs::read_dir(below(look.root, folder)) else { continue };
        let paths = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        names.extend(paths.map(|name| format!("{}/{name}", folder.display())).filter(|path| fits(path)));
    }
    let (used, fresh): (Vec<String>, Vec<String>) =
        names.into_iter().partition(|name| look.held.contains(name));
    let mut devices = BTreeSet::new();
    let (mut found, mut gone) = (Vec::new(), Vec::new());
    for name in used {
        match look.at(&name) {
            (real, Presence::Here) => {
                if devices.insert(real.clone()) {
                    found.push((name, real, Presence::Here));
                }
            }
            (real, Presence::Gone) => gone.push((name, real, Presence::Gone)),
        }
    }
    // A link that leads nowhere yet is no device.
    let real =
        |name: String| fs::canonicalize(below(look.root, Path::new(&name))).ok().map(|real| (name, real));
    let mut fresh: Vec<(String, PathBuf)> =
        fresh.into_iter().filter_map(real).filter(|(_, real)| devices.insert(real.clone())).collect();
    if found.len() + fresh.len() > most {
        fresh.sort_by_cached_key(|(_, real)| !signatures::is_ours(real));
    }
    found.extend(fresh.into_iter().map(|(name, real)| (name, real, Presence::Here)));
    found.extend(gone);
    found
}

impl Look<'_> {
    /// Where a name in use leads. What cannot be looked at is as it was.
    fn at(&mut self, name: &str) -> (PathBuf, Presence) {
        let path = below(self.root, Path::new(name));
        match fs::canonicalize(&path) {
            Ok(real) => (real, Presence::Here),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.missing.insert(name.to_owned());
                let presence = if self.missed.contains(name) { Presence::Gone } else { Presence::Here };
                (path, presence)
            }
            Err(_) => (path, Presence::Here),
        }
    }
}

/// A path of the node below the root that it is mounted at.
fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Whether a path matches a pattern of `*` and `?`, which stand for characters of one segment.
fn is_match(pattern: &str, path: &str) -> bool {
    let (pattern, path): (Vec<char>, Vec<char>) = (pattern.chars().collect(), path.chars().collect());
    let (mut at, mut in_path) = (0, 0);
    // Where the last `*` stands, and how much it stands for.
    let mut star: Option<(usize, usize)> = None;
    while in_path < path.len() {
        let here = path[in_path];
        match pattern.get(at) {
            Some('*') => {
                star = Some((at, in_path));
                at += 1;
            }
            Some('?') if here != '/' => (at, in_path) = (at + 1, in_path + 1),
            Some(wanted) if *wanted != '?' && *wanted == here => (at, in_path) = (at + 1, in_path + 1),
            _ => match star {
                Some((place, upto)) if path[upto] != '/' => {
                    star = Some((place, upto + 1));
                    (at, in_path) = (place + 1, upto + 1);
                }
                _ => return false,
            },
        }
    }
    pattern[at..].iter().all(|rest| *rest == '*')
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use reprise_agent_kubernetes::{Data, Engine, FallbackEngine, ForeignSignatures};
    use tempfile::TempDir;

    use super::*;

    const BY_ID: &str = "/dev/disk/by-id/";

    /// A root with devices and links to them: name, device.
    fn root(links: &[(&str, &str)]) -> TempDir {
        let root = tempfile::tempdir().expect("a folder");
        let by_id = root.path().join("dev/disk/by-id");
        fs::create_dir_all(&by_id).expect("a folder");
        for (name, device) in links {
            fs::write(root.path().join("dev").join(device), b"").expect("a device");
            symlink(format!("../../{device}"), by_id.join(name)).expect("a link");
        }
        root
    }

    fn claim(globs: &[&str], most: usize) -> Claim {
        let globs = globs.iter().map(|glob| format!("{BY_ID}{glob}")).collect();
        Claim {
            pool: "p".to_owned(),
            uid: "u".to_owned(),
            generation: 1,
            source: Source::Devices { globs, most },
            bytes: None,
            engine: Engine::IoUring,
            fallback: FallbackEngine::None,
            foreign: ForeignSignatures::Refuse,
            max_read_latency: None,
            max_media_errors: None,
            min_spare_percent: None,
            data: Data::Kept,
        }
    }

    /// The first look of an agent at its claims.
    fn look(root: &Path, claims: &[Claim]) -> Vec<WantedPool> {
        resolve(claims, Names { root, held: BTreeSet::new(), missed: &mut BTreeSet::new() })
    }

    fn held(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| format!("{BY_ID}{name}")).collect()
    }

    fn names(pool: &WantedPool) -> Vec<&str> {
        pool.places.iter().map(|place| place.path.strip_prefix(BY_ID).expect("a stable name")).collect()
    }

    #[test]
    fn patterns_stand_for_characters_of_one_segment() {
        for (pattern, path, fits) in [
            ("/a/nvme-*", "/a/nvme-X_1", true),
            ("/a/nvme-*", "/a/nvme-", true),
            ("/a/nvme-*", "/a/scsi-1", false),
            ("/a/*_1", "/a/nvme_1_1", true),
            ("/a/*_1", "/a/nvme_12", false),
            ("/a/n?me", "/a/nvme", true),
            ("/a/n?me", "/a/nme", false),
            ("/a/*", "/a/b/c", false),
            ("/a?b", "/a/b", false),
            ("/a/*x*y", "/a/1x2x3y", true),
            ("/a/b", "/a/b", true),
            ("/a/b", "/a/bc", false),
        ] {
            assert_eq!(is_match(pattern, path), fits, "{pattern} and {path}");
        }
    }

    #[test]
    fn a_device_counts_once_and_its_partitions_only_when_they_are_named() {
        let root = root(&[
            ("nvme-A_1", "nvme0n1"),
            ("nvme-eui.1", "nvme0n1"),
            ("nvme-A_1-part1", "nvme0n1p1"),
            ("nvme-A_2", "nvme1n1"),
        ]);
        let found = look(root.path(), &[claim(&["nvme-*"], 32)]);
        assert_eq!(names(&found[0]), ["nvme-A_1", "nvme-A_2"]);
        assert!(found[0].places.iter().all(|place| place.at.starts_with(root.path())));
        let found = look(root.path(), &[claim(&["nvme-A_1-part*"], 32)]);
        assert_eq!(names(&found[0]), ["nvme-A_1-part1"]);
    }

    #[test]
    fn devices_in_use_come_before_new_ones_and_what_is_gone_comes_last() {
        let root = root(&[("nvme-1", "a"), ("nvme-2", "b"), ("nvme-3", "c")]);
        let mut missed = BTreeSet::new();
        let mut look = |most: usize| {
            let mut held = held(&["nvme-2", "nvme-9"]);
            held.insert("/elsewhere".to_owned());
            let names = Names { root: root.path(), held, missed: &mut missed };
            resolve(&[claim(&["nvme-*"], most)], names).remove(0)
        };
        let first = look(3);
        assert_eq!(names(&first), ["nvme-2", "nvme-9", "nvme-1"], "its name may be on its way back");
        assert!(first.places.iter().all(|place| place.presence == Presence::Here));
        assert_eq!(
            names(&look(3)),
            ["nvme-2", "nvme-1", "nvme-3"],
            "one that is there comes before one that is gone"
        );
        let all = look(32);
        assert_eq!(names(&all), ["nvme-2", "nvme-1", "nvme-3", "nvme-9"]);
        assert_eq!(all.places[3].presence, Presence::Gone);
        std::fs::write(root.path().join("dev/d"), b"").expect("a device");
        symlink("../../d", root.path().join("dev/disk/by-id/nvme-9")).expect("a link");
        assert_eq!(names(&look(3)), ["nvme-2", "nvme-9", "nvme-1"], "it is back");
        std::fs::remove_file(root.path().join("dev/disk/by-id/nvme-9")).expect("a link");
        assert_eq!(names(&look(3)), ["nvme-2", "nvme-9", "nvme-1"], "once is not twice in a row");
    }

    #[test]
    fn a_device_that_cannot_be_looked_at_is_not_gone() {
        let root = root(&[]);
        symlink("nvme-1", root.path().join("dev/disk/by-id/nvme-1")).expect("a link to itself");
        let mut missed = BTreeSet::new();
        for _ in 0..3 {
            let names = Names { root: root.path(), held: held(&["nvme-1"]), missed: &mut missed };
            let found = resolve(&[claim(&["nvme-*"], 1)], names);
            assert_eq!(found[0].places[0].presence, Presence::Here);
        }
    }

    #[test]
    fn after_a_restart_a_device_with_a_pool_comes_before_a_blank_one_with_an_earlier_name() {
        let root = root(&[("nvme-1", "a"), ("nvme-2", "b"), ("nvme-3", "c")]);
        fs::write(root.path().join("dev/b"), b"REPRISE\0and so on").expect("a pool");
        for (most, expected) in
            [(1, &["nvme-2"][..]), (2, &["nvme-2", "nvme-1"]), (3, &["nvme-1", "nvme-2", "nvme-3"])]
        {
            assert_eq!(names(&look(root.path(), &[claim(&["nvme-*"], most)])[0]), expected);
        }
    }

    #[test]
    fn a_device_of_two_claims_is_the_firsts_and_no_device_is_said_so() {
        let root = root(&[("nvme-1", "a"), ("nvme-2", "b")]);
        let claims = [claim(&["nvme-1"], 1), claim(&["nvme-*"], 8), claim(&["scsi-*"], 8)];
        let found = look(root.path(), &claims);
        assert_eq!((names(&found[0]), names(&found[1])), (vec!["nvme-1"], vec!["nvme-2"]));
        let reasons: Vec<Option<Reason>> =
            found.iter().map(|pool| pool.trouble.as_ref().map(|trouble| trouble.reason)).collect();
        assert_eq!(reasons, [None, Some(Reason::Conflict), Some(Reason::NoDevices)]);
        assert!(found[2].trouble.as_ref().expect("none").message.contains("scsi-*"));
    }

    fn file(pool: &str) -> Claim {
        Claim {
            pool: pool.to_owned(),
            source: Source::File(PathBuf::from("/pool/file")),
            bytes: Some(1 << 30),
            ..claim(&[], 0)
        }
    }

    #[test]
    fn a_file_in_use_that_was_removed_is_gone_and_one_that_is_not_made_yet_is_not() {
        let root = root(&[]);
        let mut missed = BTreeSet::new();
        let mut look = |held: &[&str]| {
            let held = held.iter().map(|path| (*path).to_owned()).collect();
            let names = Names { root: root.path(), held, missed: &mut missed };
            resolve(&[file("a")], names)[0].places[0].presence
        };
        assert_eq!([look(&[]), look(&[])], [Presence::Here; 2], "it is to be made");
        assert_eq!(look(&["/pool/file"]), Presence::Here, "once is not twice in a row");
        assert_eq!(look(&["/pool/file"]), Presence::Gone);
        fs::create_dir(root.path().join("pool")).expect("a folder");
        fs::write(root.path().join("pool/file"), b"").expect("a file");
        assert_eq!(look(&["/pool/file"]), Presence::Here, "it is back");
    }

    #[test]
    fn one_file_is_not_given_to_two_pools() {
        let found = look(Path::new("/"), &[file("a"), file("b")]);
        assert_eq!((found[0].places.len(), found[1].places.len()), (1, 0));
        assert_eq!(found[0].places[0].at, Path::new("/pool/file"));
        assert!(found[1].trouble.as_ref().is_some_and(|trouble| trouble.reason == Reason::Conflict));
    }
}
