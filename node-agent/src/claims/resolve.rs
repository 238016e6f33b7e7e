//! Which devices and files a claim means, on this node, now.
//!
//! Stable names are links below `/dev/disk/by-id` of a root that can be another than `/`: in a container the node's devices may be
//! mounted elsewhere. Of several names of one device the first in order counts; names of partitions count only where the pattern
//! names them. Devices that are in use already come first, so that a new disk does not displace one.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use reprise_agent_kubernetes::{Claim, Reason, Source, Trouble};

use super::board::{Kind, Presence, Recipe, WantedPlace, WantedPool};

/// What a name of a partition has in it.
const PARTITION: &str = "-part";

/// Resolves claims in their order; a device that two want goes to the first. `held` are paths that are in use.
pub(super) fn resolve(root: &Path, claims: &[Claim], held: &BTreeSet<String>) -> Vec<WantedPool> {
    let mut taken = BTreeSet::new();
    claims.iter().map(|claim| resolve_claim(root, claim, held, &mut taken)).collect()
}

/// `taken`: where devices and files of earlier claims really are.
fn resolve_claim(
    root: &Path,
    claim: &Claim,
    held: &BTreeSet<String>,
    taken: &mut BTreeSet<PathBuf>,
) -> WantedPool {
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
            match taken.insert(below(root, file)) {
                true => places.push(place(path, Kind::File, Presence::Here)),
                false => trouble = Some(conflict(&path)),
            }
        }
        Source::Devices { globs, most } => {
            for (path, found) in matching(root, globs, held) {
                if places.len() == *most {
                    break;
                }
                let (real, presence) = match found {
                    Some(real) => (real, Presence::Here),
                    None => (below(root, Path::new(&path)), Presence::Gone),
                };
                match taken.insert(real) {
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

/// Stable names that match, with where they lead: those in use first, then in order, each device once. A name in use that leads nowhere
/// any more is among them.
fn matching(root: &Path, globs: &[String], held: &BTreeSet<String>) -> Vec<(String, Option<PathBuf>)> {
    let fits = |path: &str| {
        let partitions = |glob: &str| glob.contains(PARTITION) || !path.contains(PARTITION);
        globs.iter().any(|glob| partitions(glob) && is_match(glob, path))
    };
    let mut names: BTreeSet<String> = held.iter().filter(|path| fits(path)).cloned().collect();
    let folders: BTreeSet<&Path> = globs.iter().filter_map(|glob| Path::new(glob).parent()).collect();
    for folder in folders {
        let Ok(entries) = fs::read_dir(below(root, folder)) else { continue };
        let paths = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        names.extend(paths.map(|name| format!("{}/{name}", folder.display())).filter(|path| fits(path)));
    }
    let (used, fresh): (Vec<String>, Vec<String>) = names.into_iter().partition(|name| held.contains(name));
    let mut devices = BTreeSet::new();
    let mut found = Vec::new();
    for name in used.into_iter().chain(fresh) {
        match fs::canonicalize(below(root, Path::new(&name))) {
            Ok(real) => {
                if devices.insert(real.clone()) {
                    found.push((name, Some(real)));
                }
            }
            Err(_) if held.contains(&name) => found.push((name, None)),
            // A link that leads nowhere yet.
            Err(_) => {}
        }
    }
    found
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
            data: Data::Kept,
        }
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
        let found = resolve(root.path(), &[claim(&["nvme-*"], 32)], &BTreeSet::new());
        assert_eq!(names(&found[0]), ["nvme-A_1", "nvme-A_2"]);
        assert!(found[0].places.iter().all(|place| place.at.starts_with(root.path())));
        let found = resolve(root.path(), &[claim(&["nvme-A_1-part*"], 32)], &BTreeSet::new());
        assert_eq!(names(&found[0]), ["nvme-A_1-part1"]);
    }

    #[test]
    fn devices_in_use_come_before_new_ones_and_are_missed_when_they_are_gone() {
        let root = root(&[("nvme-1", "a"), ("nvme-2", "b"), ("nvme-3", "c")]);
        let held =
            BTreeSet::from([format!("{BY_ID}nvme-2"), format!("{BY_ID}nvme-9"), "/elsewhere".to_owned()]);
        let found = resolve(root.path(), &[claim(&["nvme-*"], 3)], &held);
        assert_eq!(names(&found[0]), ["nvme-2", "nvme-9", "nvme-1"]);
        let presence: Vec<Presence> = found[0].places.iter().map(|place| place.presence).collect();
        assert_eq!(presence, [Presence::Here, Presence::Gone, Presence::Here]);
    }

    #[test]
    fn a_device_of_two_claims_is_the_firsts_and_no_device_is_said_so() {
        let root = root(&[("nvme-1", "a"), ("nvme-2", "b")]);
        let claims = [claim(&["nvme-1"], 1), claim(&["nvme-*"], 8), claim(&["scsi-*"], 8)];
        let found = resolve(root.path(), &claims, &BTreeSet::new());
        assert_eq!((names(&found[0]), names(&found[1])), (vec!["nvme-1"], vec!["nvme-2"]));
        let reasons: Vec<Option<Reason>> =
            found.iter().map(|pool| pool.trouble.as_ref().map(|trouble| trouble.reason)).collect();
        assert_eq!(reasons, [None, Some(Reason::Conflict), Some(Reason::NoDevices)]);
        assert!(found[2].trouble.as_ref().expect("none").message.contains("scsi-*"));
    }

    #[test]
    fn one_file_is_not_given_to_two_pools() {
        let file = |pool: &str| Claim {
            pool: pool.to_owned(),
            source: Source::File(PathBuf::from("/pool/file")),
            bytes: Some(1 << 30),
            ..claim(&[], 0)
        };
        let found = resolve(Path::new("/"), &[file("a"), file("b")], &BTreeSet::new());
        assert_eq!((found[0].places.len(), found[1].places.len()), (1, 0));
        assert_eq!(found[0].places[0].at, Path::new("/pool/file"));
        assert!(found[1].trouble.as_ref().is_some_and(|trouble| trouble.reason == Reason::Conflict));
    }
}
