//! Resolves claims to devices and files of this node.
//!
//! Stable names are links in `/dev/disk/by-id`, below a root directory: in a container the node's devices
//! may be mounted elsewhere. Rules:
//!
//! - If a device has several names, the first in alphabetical order counts.
//! - Names of partitions count only if the pattern contains `-part`.
//! - Devices in use come first, so a new disk does not displace one.
//! - If more devices match than the claim may have, devices that hold a pool come before blank ones: after
//!   a restart no device is in use yet.
//! - Missing devices come last.
//!
//! A name in use counts as missing when it failed to resolve twice in a row, since udev re-creates links
//! whenever it processes a disk. The same applies to a removed file: data written to it would be lost with
//! the process.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use reprise_agent_kubernetes::{Claim, DeviceFault, Reason, Source};

use super::reconciler::{DesiredDevice, DesiredPool, DeviceSpec, Kind, Presence};
use super::signatures;

/// Part of every partition's name.
const PARTITION: &str = "-part";

/// Inputs of a resolution.
pub(super) struct ResolveContext<'a> {
    /// Mount point of the node's root file system.
    pub(super) root: &'a Path,
    /// Paths that stay selected.
    pub(super) retained_paths: BTreeSet<String>,
    /// Paths that did not resolve at the last resolution; updated.
    pub(super) missed: &'a mut BTreeSet<String>,
}

/// Resolves claims in order; a device that two claims select goes to the first.
pub(super) fn resolve(claims: &[Claim], names: ResolveContext<'_>) -> Vec<DesiredPool> {
    let ResolveContext { root, retained_paths, missed } = names;
    let mut resolver = Resolver {
        root,
        retained_paths,
        missed: std::mem::take(missed),
        missing: missed,
        claimed: BTreeSet::new(),
    };
    claims.iter().map(|claim| resolve_claim(claim, &mut resolver)).collect()
}

/// State of one resolution of all claims.
struct Resolver<'a> {
    root: &'a Path,
    retained_paths: BTreeSet<String>,
    /// Paths that did not resolve last time, and those that do not now.
    missed: BTreeSet<String>,
    missing: &'a mut BTreeSet<String>,
    /// Real paths of the devices and files of earlier claims.
    claimed: BTreeSet<PathBuf>,
}

fn resolve_claim(claim: &Claim, resolver: &mut Resolver<'_>) -> DesiredPool {
    let root = resolver.root;
    let mut fault = None;
    let mut devices = Vec::new();
    let device = |path: String, kind: Kind, presence: Presence| DesiredDevice {
        description: below(root, Path::new(&path)).into(),
        path,
        presence,
        spec: DeviceSpec {
            pool: claim.pool.clone(),
            uid: claim.uid.clone(),
            kind,
            bytes: claim.bytes,
            reserve_bytes: claim.reserve_bytes,
            engine: claim.engine,
            fallback: claim.fallback,
            foreign: claim.foreign,
        },
    };
    let conflict = |path: &str| DeviceFault {
        reason: Reason::Conflict,
        message: format!("{path} is also claimed by another pool: select it in one pool only"),
    };
    match &claim.source {
        Source::File(file) => {
            let path = file.display().to_string();
            // A file that is not in use counts as present, as it may have to be created.
            let presence = if resolver.retained_paths.contains(&path) {
                resolver.at(&path).1
            } else {
                Presence::Present
            };
            match resolver.claimed.insert(below(root, file)) {
                true => devices.push(device(path, Kind::File, presence)),
                false => fault = Some(conflict(&path)),
            }
        }
        Source::Devices { globs, most } => {
            for (path, real, presence) in matching(globs, *most, resolver) {
                if devices.len() == *most {
                    break;
                }
                match resolver.claimed.insert(real) {
                    true => devices.push(device(path, Kind::Device, presence)),
                    false => fault = Some(conflict(&path)),
                }
            }
            if devices.is_empty() && fault.is_none() {
                let message = format!(
                    "no device of this node matches {}: check the names in /dev/disk/by-id on the node",
                    globs.join(" or ")
                );
                fault = Some(DeviceFault { reason: Reason::NoDevices, message });
            }
        }
    }
    let (pool, uid) = (claim.pool.clone(), claim.uid.clone());
    DesiredPool { pool, uid, generation: claim.generation, data: claim.data, devices, fault }
}

/// Returns the matching stable names with their real paths, each device once. Order: devices in use, other
/// devices by name, missing devices in use. If there are more than `most`, devices that hold a pool come
/// before other unused ones.
fn matching(globs: &[String], most: usize, resolver: &mut Resolver<'_>) -> Vec<(String, PathBuf, Presence)> {
    let fits = |path: &str| {
        let partitions = |glob: &str| glob.contains(PARTITION) || !path.contains(PARTITION);
        globs.iter().any(|glob| partitions(glob) && is_match(glob, path))
    };
    let mut names: BTreeSet<String> =
        resolver.retained_paths.iter().filter(|path| fits(path)).cloned().collect();
    let folders: BTreeSet<&Path> = globs.iter().filter_map(|glob| Path::new(glob).parent()).collect();
    for folder in folders {
        let Ok(entries) = fs::read_dir(below(resolver.root, folder)) else { continue };
        let paths = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        names.extend(paths.map(|name| format!("{}/{name}", folder.display())).filter(|path| fits(path)));
    }
    let (used, fresh): (Vec<String>, Vec<String>) =
        names.into_iter().partition(|name| resolver.retained_paths.contains(name));
    let mut devices = BTreeSet::new();
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for name in used {
        match resolver.at(&name) {
            (real, Presence::Present) => {
                if devices.insert(real.clone()) {
                    found.push((name, real, Presence::Present));
                }
            }
            (real, Presence::Missing) => missing.push((name, real, Presence::Missing)),
        }
    }
    // A dangling link does not count as a device.
    let real =
        |name: String| fs::canonicalize(below(resolver.root, Path::new(&name))).ok().map(|real| (name, real));
    let mut fresh: Vec<(String, PathBuf)> =
        fresh.into_iter().filter_map(real).filter(|(_, real)| devices.insert(real.clone())).collect();
    if found.len() + fresh.len() > most {
        fresh.sort_by_cached_key(|(_, real)| !signatures::is_pool(&real.as_path().into()));
    }
    found.extend(fresh.into_iter().map(|(name, real)| (name, real, Presence::Present)));
    found.extend(missing);
    found
}

impl Resolver<'_> {
    /// Returns the real path of a name in use. If the lookup fails otherwise, the device counts as present.
    fn at(&mut self, name: &str) -> (PathBuf, Presence) {
        let path = below(self.root, Path::new(name));
        match fs::canonicalize(&path) {
            Ok(real) => (real, Presence::Present),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.missing.insert(name.to_owned());
                let presence = if self.missed.contains(name) { Presence::Missing } else { Presence::Present };
                (path, presence)
            }
            Err(_) => (path, Presence::Present),
        }
    }
}

/// Maps an absolute path of the node to this process's mount of the node's root.
fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Matches a path against a pattern in which `*` and `?` match characters other than `/`.
fn is_match(pattern: &str, path: &str) -> bool {
    let (pattern, path): (Vec<char>, Vec<char>) = (pattern.chars().collect(), path.chars().collect());
    let (mut at, mut in_path) = (0, 0);
    // Position of the last `*`, and the end of its match in the path.
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
                Some((device, upto)) if path[upto] != '/' => {
                    star = Some((device, upto + 1));
                    (at, in_path) = (device + 1, upto + 1);
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

    use reprise_agent_kubernetes::{DataPolicy, Engine, FallbackEngine, ForeignSignatures};
    use tempfile::TempDir;

    use super::*;

    const BY_ID: &str = "/dev/disk/by-id/";

    /// Returns a root with devices and links to them: (name, device).
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
            reserve_bytes: None,
            engine: Engine::IoUring,
            fallback: FallbackEngine::None,
            foreign: ForeignSignatures::Refuse,
            max_read_latency: None,
            max_media_errors: None,
            min_spare_percent: None,
            data: DataPolicy::Keep,
        }
    }

    /// Resolves claims as a newly started agent.
    fn resolve_first(root: &Path, claims: &[Claim]) -> Vec<DesiredPool> {
        resolve(
            claims,
            ResolveContext { root, retained_paths: BTreeSet::new(), missed: &mut BTreeSet::new() },
        )
    }

    fn retained_paths(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| format!("{BY_ID}{name}")).collect()
    }

    fn names(pool: &DesiredPool) -> Vec<&str> {
        pool.devices.iter().map(|device| device.path.strip_prefix(BY_ID).expect("a stable name")).collect()
    }

    #[test]
    fn wildcards_match_within_one_path_segment() {
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
    fn device_counts_once_and_partitions_count_only_if_named() {
        let root = root(&[
            ("nvme-A_1", "nvme0n1"),
            ("nvme-eui.1", "nvme0n1"),
            ("nvme-A_1-part1", "nvme0n1p1"),
            ("nvme-A_2", "nvme1n1"),
        ]);
        let found = resolve_first(root.path(), &[claim(&["nvme-*"], 32)]);
        assert_eq!(names(&found[0]), ["nvme-A_1", "nvme-A_2"]);
        assert!(
            found[0]
                .devices
                .iter()
                .all(|device| device.description.path().is_some_and(|path| path.starts_with(root.path())))
        );
        let found = resolve_first(root.path(), &[claim(&["nvme-A_1-part*"], 32)]);
        assert_eq!(names(&found[0]), ["nvme-A_1-part1"]);
    }

    #[test]
    fn devices_in_use_come_first_and_missing_devices_last() {
        let root = root(&[("nvme-1", "a"), ("nvme-2", "b"), ("nvme-3", "c")]);
        let mut missed = BTreeSet::new();
        let mut resolve_again = |most: usize| {
            let mut retained_paths = retained_paths(&["nvme-2", "nvme-9"]);
            retained_paths.insert("/elsewhere".to_owned());
            let names = ResolveContext { root: root.path(), retained_paths, missed: &mut missed };
            resolve(&[claim(&["nvme-*"], most)], names).remove(0)
        };
        let first = resolve_again(3);
        assert_eq!(names(&first), ["nvme-2", "nvme-9", "nvme-1"], "its name may reappear");
        assert!(first.devices.iter().all(|device| device.presence == Presence::Present));
        assert_eq!(
            names(&resolve_again(3)),
            ["nvme-2", "nvme-1", "nvme-3"],
            "a present device comes before a missing one"
        );
        let all = resolve_again(32);
        assert_eq!(names(&all), ["nvme-2", "nvme-1", "nvme-3", "nvme-9"]);
        assert_eq!(all.devices[3].presence, Presence::Missing);
        std::fs::write(root.path().join("dev/d"), b"").expect("a device");
        symlink("../../d", root.path().join("dev/disk/by-id/nvme-9")).expect("a link");
        assert_eq!(names(&resolve_again(3)), ["nvme-2", "nvme-9", "nvme-1"], "it reappeared");
        std::fs::remove_file(root.path().join("dev/disk/by-id/nvme-9")).expect("a link");
        assert_eq!(names(&resolve_again(3)), ["nvme-2", "nvme-9", "nvme-1"], "missing once only");
    }

    #[test]
    fn device_that_cannot_be_read_is_not_missing() {
        let root = root(&[]);
        symlink("nvme-1", root.path().join("dev/disk/by-id/nvme-1")).expect("a link to itself");
        let mut missed = BTreeSet::new();
        for _ in 0..3 {
            let names = ResolveContext {
                root: root.path(),
                retained_paths: retained_paths(&["nvme-1"]),
                missed: &mut missed,
            };
            let found = resolve(&[claim(&["nvme-*"], 1)], names);
            assert_eq!(found[0].devices[0].presence, Presence::Present);
        }
    }

    #[test]
    fn after_a_restart_devices_with_a_pool_come_before_blank_ones() {
        let root = root(&[("nvme-1", "a"), ("nvme-2", "b"), ("nvme-3", "c")]);
        fs::write(root.path().join("dev/b"), b"REPRISE\0and so on").expect("a pool");
        for (most, expected) in
            [(1, &["nvme-2"][..]), (2, &["nvme-2", "nvme-1"]), (3, &["nvme-1", "nvme-2", "nvme-3"])]
        {
            assert_eq!(names(&resolve_first(root.path(), &[claim(&["nvme-*"], most)])[0]), expected);
        }
    }

    #[test]
    fn device_of_two_claims_goes_to_the_first_and_missing_devices_are_reported() {
        let root = root(&[("nvme-1", "a"), ("nvme-2", "b")]);
        let claims = [claim(&["nvme-1"], 1), claim(&["nvme-*"], 8), claim(&["scsi-*"], 8)];
        let found = resolve_first(root.path(), &claims);
        assert_eq!((names(&found[0]), names(&found[1])), (vec!["nvme-1"], vec!["nvme-2"]));
        let reasons: Vec<Option<Reason>> =
            found.iter().map(|pool| pool.fault.as_ref().map(|fault| fault.reason)).collect();
        assert_eq!(reasons, [None, Some(Reason::Conflict), Some(Reason::NoDevices)]);
        assert!(found[2].fault.as_ref().expect("none").message.contains("scsi-*"));
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
    fn removed_file_in_use_is_missing_and_uncreated_file_is_not() {
        let root = root(&[]);
        let mut missed = BTreeSet::new();
        let mut resolve_again = |retained_paths: &[&str]| {
            let retained_paths = retained_paths.iter().map(|path| (*path).to_owned()).collect();
            let names = ResolveContext { root: root.path(), retained_paths, missed: &mut missed };
            resolve(&[file("a")], names)[0].devices[0].presence
        };
        assert_eq!([resolve_again(&[]), resolve_again(&[])], [Presence::Present; 2], "it will be created");
        assert_eq!(resolve_again(&["/pool/file"]), Presence::Present, "missing once only");
        assert_eq!(resolve_again(&["/pool/file"]), Presence::Missing);
        fs::create_dir(root.path().join("pool")).expect("a folder");
        fs::write(root.path().join("pool/file"), b"").expect("a file");
        assert_eq!(resolve_again(&["/pool/file"]), Presence::Present, "it reappeared");
    }

    #[test]
    fn one_file_is_not_assigned_to_two_pools() {
        let found = resolve_first(Path::new("/"), &[file("a"), file("b")]);
        assert_eq!((found[0].devices.len(), found[1].devices.len()), (1, 0));
        assert_eq!(found[0].devices[0].description.path(), Some(Path::new("/pool/file")));
        assert!(found[1].fault.as_ref().is_some_and(|fault| fault.reason == Reason::Conflict));
    }
}
