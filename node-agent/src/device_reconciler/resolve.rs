//! Resolves claims to devices and files of this node.
//!
//! Stable names are links in `/dev/disk/by-id`, below a root directory: in a container the node's devices
//! may be mounted elsewhere. Names of NVMe controllers that the agent drives are links in
//! `/sys/bus/pci/devices`. Rules:
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

use reprise_agent_kubernetes::{Claim, DeviceFault, Engine, Reason, Source};
use reprise_io::{ControllerDescription, DeviceDescription, PciAddress};
use reprise_nvme::host::Host;

use super::reconciler::{DesiredDevice, DesiredPool, DeviceSpec, Kind, Presence};
use super::signatures;

/// Prefix of names of NVMe controllers, which end with the PCI address.
const CONTROLLERS: &str = "/sys/bus/pci/devices/";

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
        description: description(claim, root, &path, kind),
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
                let kind = if is_controller(&path) { Kind::Controller } else { Kind::Device };
                match resolver.claimed.insert(real) {
                    true => devices.push(device(path, kind, presence)),
                    false => fault = Some(conflict(&path)),
                }
            }
            if devices.is_empty() && fault.is_none() {
                let remedy = match globs.iter().any(|glob| is_controller(glob)) {
                    true => {
                        "bind NVMe controllers to vfio-pci, or correct the addresses; reprise doctor lists those of the node"
                    }
                    false => "check the names in /dev/disk/by-id on the node",
                };
                let message = format!("no device of this node matches {}: {remedy}", globs.join(" or "));
                fault = Some(DeviceFault { reason: Reason::NoDevices, message });
            }
        }
    }
    let (pool, uid) = (claim.pool.clone(), claim.uid.clone());
    DesiredPool { pool, uid, generation: claim.generation, data: claim.data, devices, fault }
}

/// Returns the description of a device of a claim.
fn description(claim: &Claim, root: &Path, path: &str, kind: Kind) -> DeviceDescription {
    let at = below(root, Path::new(path));
    match kind {
        Kind::File if claim.engine == Engine::UserNvme => DeviceDescription::Emulated(at),
        Kind::File | Kind::Device => at.into(),
        Kind::Controller => {
            let address = controller_address(path).expect("only names with an address match");
            let (serials, namespace) = (claim.serials.clone(), claim.namespace);
            DeviceDescription::Controller(ControllerDescription { address, serials, namespace })
        }
    }
}

/// Returns whether a name or pattern is one of functions on the PCI bus.
fn is_controller(path: &str) -> bool {
    path.starts_with(CONTROLLERS)
}

fn controller_address(path: &str) -> Option<PciAddress> {
    path.strip_prefix(CONTROLLERS)?.parse().ok()
}

/// Returns whether a pattern selects a function of the bus. An address without wildcards selects any function, so that
/// its state is reported. A pattern selects only NVMe controllers that are bound to vfio-pci: others belong to the
/// node.
fn selects_function(resolver: &Resolver<'_>, globs: &[String], path: &str) -> bool {
    let Some(address) = controller_address(path) else { return false };
    let function = Host::at(resolver.root).nvme_function(address);
    globs.iter().any(|glob| glob == path) || function.is_ok_and(|function| function.is_bound_to_vfio())
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
        let paths = paths.map(|name| format!("{}/{name}", folder.display())).filter(|path| fits(path));
        names.extend(paths.filter(|path| !is_controller(path) || selects_function(resolver, globs, path)));
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
        // Reading a controller would reset it: they keep the order of their addresses.
        let is_pool = |(name, real): &(String, PathBuf)| {
            !is_controller(name) && signatures::is_pool(&real.as_path().into())
        };
        fresh.sort_by_cached_key(|one| !is_pool(one));
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
mod tests;
