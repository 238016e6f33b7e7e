//! Data that a wipe destroys, and data that it must not touch.

use std::fs;
use std::path::{Path, PathBuf};

use reprise_agent_core::pool::{DevicePool, PoolParams};
use reprise_agent_kubernetes::{Engine, FallbackEngine};
use reprise_io::ControllerDescription;
use tempfile::TempDir;

use super::*;

const BYTES: usize = 8 << 20;
const OWN: [u8; 16] = [7; 16];
const OTHER: [u8; 16] = [9; 16];

/// Creates a device with this content.
fn device(content: &[u8]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("device");
    fs::write(&path, content).expect("written");
    (folder, path)
}

fn pool(uuid: [u8; 16]) -> Vec<u8> {
    let params = PoolParams {
        device_bytes: BYTES as u64,
        segment_bytes: 2 << 20,
        pool_uuid: uuid,
        device_index: 0,
        created_unix_us: 1,
    };
    let mut content = vec![0; BYTES];
    for (offset, bytes) in DevicePool::format(&params).expect("sound parameters") {
        let at = offset as usize;
        content[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    // Blocks at the end.
    content[BYTES - 100..].fill(1);
    content
}

fn wipe_request(path: &Path, kind: Kind, pool: Option<[u8; 16]>) -> WipeRequest {
    let is_member = pool.is_some();
    WipeRequest {
        path: "/dev/disk/by-id/x".to_owned(),
        description: path.into(),
        kind,
        pool,
        is_member,
        is_expected: is_member,
    }
}

/// Wipes a device and returns whether it is completely erased.
fn wiped(content: &[u8], pool: Option<[u8; 16]>) -> Result<bool, DeviceFault> {
    let (_folder, path) = device(content);
    let result = wipe(&wipe_request(&path, Kind::Device, pool));
    let after = fs::read(&path).expect("the device exists");
    match result {
        Ok(pending) => Ok(pending == WipeOutcome::Wiped
            && after.len() == content.len()
            && after.iter().all(|byte| *byte == 0)),
        Err(fault) => {
            assert!(after == content, "a refused device is not written");
            assert_eq!(fault.reason, Reason::ForeignSignature);
            Err(fault)
        }
    }
}

fn open_request(path: &Path, kind: Kind, missing: IfMissing) -> OpenRequest {
    let spec = DeviceSpec {
        pool: "p".to_owned(),
        uid: "u".to_owned(),
        kind,
        bytes: Some(BYTES as u64),
        reserve_bytes: None,
        engine: Engine::Plain,
        fallback: FallbackEngine::None,
        foreign: ForeignSignatures::Refuse,
    };
    OpenRequest { id: DeviceId(0), path: "/x".to_owned(), description: path.into(), spec, missing }
}

#[test]
fn missing_required_file_is_reported_with_a_remedy() {
    let (_folder, path) = device(&pool(OWN));
    let aside = path.with_extension("aside");
    let prepared = |missing| prepare(&open_request(&path, Kind::File, missing));
    assert_eq!(prepared(IfMissing::Fail), Ok(()));
    fs::rename(&path, &aside).expect("moved");
    let fault = prepared(IfMissing::Fail).expect_err("the file is missing");
    assert_eq!(fault.reason, Reason::DeviceFailed);
    for words in ["mount its file system", "To start with a blank file", "nodeSelector", "new SSDPool"] {
        assert!(fault.message.contains(words), "{}", fault.message);
    }
    assert_eq!(prepared(IfMissing::Create), Ok(()), "it may be created");
    assert!(!path.exists(), "the check creates nothing");
    fs::rename(&aside, &path).expect("moved");
    assert_eq!(prepared(IfMissing::Fail), Ok(()), "it is restored");
}

#[test]
fn wipe_destroys_the_pool_of_its_claim_and_no_other() {
    assert_eq!(wiped(&pool(OWN), Some(OWN)), Ok(true));
    let fault = wiped(&pool(OWN), None).expect_err("the agent never opened it for this claim");
    assert!(fault.message.contains("has not opened"), "{}", fault.message);
    let fault = wiped(&pool(OTHER), Some(OWN)).expect_err("another pool's");
    assert!(fault.message.contains("another pool"), "{}", fault.message);
}

#[test]
fn wipe_does_not_touch_data_of_other_origin() {
    let mut unmarked = vec![0; BYTES];
    unmarked[..5].copy_from_slice(b"notes");
    let mut behind = vec![0; BYTES];
    behind[1 << 19] = 1;
    let mut newer = pool(OWN);
    newer[8] = 99;
    newer[(1 << 20) + 8] = 99;
    for content in [unmarked, behind, newer, b"short".to_vec()] {
        let fault = wiped(&content, Some(OWN)).expect_err("foreign data");
        assert!(fault.message.contains("remove the device from the pool"), "{}", fault.message);
    }
}

#[test]
fn blank_device_is_wiped_completely_only_if_it_was_a_member() {
    // An earlier erase was interrupted.
    let mut content = vec![0; BYTES];
    content[BYTES - 1] = 1;
    assert_eq!(wiped(&content, Some(OWN)), Ok(true));
    assert_eq!(wiped(&content, None), Ok(false), "it was never used");
}

#[test]
fn pool_without_its_first_superblock_is_identified_by_its_second() {
    let mut content = pool(OTHER);
    content[..4096].fill(0);
    assert!(wiped(&content, Some(OWN)).is_err());
    assert_eq!(wiped(&content, Some(OTHER)), Ok(true));
}

#[test]
fn wiped_file_is_removed_and_missing_device_does_not_count_as_wiped() {
    let (_folder, path) = device(&pool(OWN));
    let expected = wipe_request(&path, Kind::File, Some(OWN));
    assert_eq!(wipe(&expected), Ok(WipeOutcome::FileRemains));
    assert!(fs::read(&path).expect("the file still exists").iter().all(|byte| *byte == 0));
    assert_eq!(wipe(&expected), Ok(WipeOutcome::FileRemains), "an interrupted wipe is repeated");
    assert_eq!(remove(&path.as_path().into()), Ok(()));
    assert_eq!(wipe(&expected), Err(not_destroyed_fault()), "it may be on a disk that is not mounted");
    let erased = WipeRequest { is_expected: false, ..expected };
    assert_eq!(wipe(&erased), Ok(WipeOutcome::Wiped), "it was removed before");
    let fault = wipe(&wipe_request(&path, Kind::Device, Some(OWN))).expect_err("its content is unknown");
    assert_eq!(fault.reason, Reason::DeviceFailed);
}

#[test]
fn engine_that_this_release_lacks_needs_a_fallback() {
    let attempt = |engine: Engine, fallback: FallbackEngine| {
        let request = open_request(Path::new("/x"), Kind::Device, IfMissing::Fail);
        first_attempt(&DeviceSpec { engine, fallback, ..request.spec })
    };
    assert_eq!(
        attempt(Engine::IoUring, FallbackEngine::Plain),
        Ok(Attempt::Preferred(IoEngineChoice::IoUring))
    );
    assert_eq!(
        attempt(Engine::GpuQueue, FallbackEngine::Plain),
        Ok(Attempt::Fallback(IoEngineChoice::Plain))
    );
    let fault =
        attempt(Engine::UserNvme, FallbackEngine::None).expect_err("a block device has no controller");
    assert!(fault.message.contains("need each other"), "{}", fault.message);
    let fault = attempt(Engine::Gds, FallbackEngine::None).expect_err("no engine is left");
    assert!(fault.message.contains("does not support engine Gds"), "{}", fault.message);
}

#[test]
fn engine_of_controllers_is_for_controllers_and_files() {
    let attempt = |kind: Kind, engine: Engine| {
        let request = open_request(Path::new("/x"), kind, IfMissing::Fail);
        first_attempt(&DeviceSpec { engine, ..request.spec })
    };
    let chosen = Ok(Attempt::Preferred(IoEngineChoice::Auto));
    assert_eq!(attempt(Kind::Controller, Engine::UserNvme), chosen);
    assert_eq!(attempt(Kind::File, Engine::UserNvme), chosen, "the agent emulates a controller on it");
    let fault = attempt(Kind::Controller, Engine::IoUring).expect_err("the kernel does not have it");
    assert!(fault.message.contains("need each other"), "{}", fault.message);
}

#[test]
fn wipe_of_an_emulated_controller_destroys_only_its_pool() {
    let emulated = |path: &Path, pool| {
        let mut request = wipe_request(path, Kind::File, pool);
        request.description = DeviceDescription::Emulated(path.into());
        request
    };
    let (_folder, path) = device(&pool(OWN));
    let fault = wipe(&emulated(&path, Some(OTHER))).expect_err("another pool");
    assert_eq!(fault.reason, Reason::ForeignSignature);
    assert_eq!(wipe(&emulated(&path, Some(OWN))), Ok(WipeOutcome::FileRemains));
    assert!(fs::read(&path).expect("it exists").iter().all(|byte| *byte == 0));
    let (_folder, path) = device(&[b"XFSB".as_slice(), &[0; 8192]].concat());
    let fault = wipe(&emulated(&path, None)).expect_err("a file system");
    assert!(fault.message.contains("an XFS file system"), "{}", fault.message);
}

#[test]
fn controller_that_the_node_lacks_is_refused_with_the_remedy() {
    let mut request = open_request(Path::new("/x"), Kind::Controller, IfMissing::Fail);
    let address = "ffff:ff:1f.7".parse().expect("an address");
    request.description = DeviceDescription::Controller(ControllerDescription::at(address));
    let fault = prepare(&request).expect_err("no function is there");
    assert_eq!(fault.reason, Reason::DeviceFailed);
    assert!(fault.message.contains("no function is at the PCI address ffff:ff:1f.7"), "{}", fault.message);
    assert!(fault.message.contains("reprise doctor"), "{}", fault.message);
}
