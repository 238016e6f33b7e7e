//! Claims and the devices of a prepared node.

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
        serials: Vec::new(),
        namespace: None,
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
    resolve(claims, ResolveContext { root, retained_paths: BTreeSet::new(), missed: &mut BTreeSet::new() })
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

/// Adds an NVMe controller that a driver has.
fn add_function(root: &TempDir, address: &str, driver: &str) {
    let function = root.path().join("sys/bus/pci/devices").join(address);
    let drivers = root.path().join("sys/bus/pci/drivers").join(driver);
    fs::create_dir_all(&function).expect("a folder");
    fs::create_dir_all(&drivers).expect("a folder");
    fs::write(function.join("class"), "0x010802\n").expect("written");
    symlink(drivers, function.join("driver")).expect("a link");
}

#[test]
fn patterns_select_controllers_of_vfio_and_addresses_select_any() {
    const PCI: &str = "/sys/bus/pci/devices/";
    let root = root(&[]);
    for (address, driver) in [
        ("0000:01:00.0", "nvme"),
        ("0000:02:00.0", "vfio-pci"),
        ("0000:03:00.0", "vfio-pci"),
        ("0000:04:00.0", "nvme"),
    ] {
        add_function(&root, address, driver);
    }
    let claimed = |globs: &[&str], most: usize| {
        let globs = globs.iter().map(|glob| format!("{PCI}{glob}")).collect();
        let source = Source::Devices { globs, most };
        let serials = vec!["S1".to_owned()];
        let claim =
            Claim { source, serials, namespace: Some(2), engine: Engine::UserNvme, ..claim(&[], most) };
        resolve_first(root.path(), &[claim]).remove(0)
    };
    let pool = claimed(&["0000:0?:00.0"], 8);
    let described: Vec<String> = pool.devices.iter().map(|device| device.description.to_string()).collect();
    assert_eq!(described, ["pci:0000:02:00.0/2", "pci:0000:03:00.0/2"]);
    let first = &pool.devices[0];
    assert_eq!(
        (first.spec.kind, first.path.as_str()),
        (Kind::Controller, "/sys/bus/pci/devices/0000:02:00.0")
    );
    let DeviceDescription::Controller(controller) = &first.description else { panic!("a controller") };
    assert_eq!(controller.serials, ["S1"]);
    assert_eq!(claimed(&["0000:0?:00.0"], 1).devices.len(), 1, "without reading any");
    // The kernel has it, and the fault of opening it states that.
    assert_eq!(claimed(&["0000:01:00.0"], 8).devices.len(), 1);
    let fault = claimed(&["0000:05:*"], 8).fault.expect("nothing matches");
    assert!(
        fault.message.contains("vfio-pci") && fault.message.contains("reprise doctor"),
        "{}",
        fault.message
    );
}

#[test]
fn a_file_of_engine_user_nvme_is_an_emulated_controller() {
    let claim = Claim { engine: Engine::UserNvme, ..file("a") };
    let found = resolve_first(Path::new("/"), &[claim]);
    assert_eq!(found[0].devices[0].description, DeviceDescription::Emulated("/pool/file".into()));
    assert_eq!(found[0].devices[0].spec.kind, Kind::File);
}
