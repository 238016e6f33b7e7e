//! What a wipe destroys, and what it leaves alone.

use std::fs;
use std::path::{Path, PathBuf};

use reprise_agent_core::pool::{DevicePool, PoolParams};
use tempfile::TempDir;

use super::*;

const BYTES: usize = 8 << 20;
const OWN: [u8; 16] = [7; 16];
const OTHER: [u8; 16] = [9; 16];

/// A device with this on it.
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
    // Blocks, further behind.
    content[BYTES - 100..].fill(1);
    content
}

fn to_wipe(at: &Path, kind: Kind, pool: Option<[u8; 16]>) -> ToWipe {
    let is_member = pool.is_some();
    ToWipe {
        path: "/dev/disk/by-id/x".to_owned(),
        at: at.to_owned(),
        kind,
        pool,
        is_member,
        is_expected: is_member,
    }
}

/// Wipes and says whether everything is gone.
fn wiped(content: &[u8], pool: Option<[u8; 16]>) -> Result<bool, Trouble> {
    let (_folder, path) = device(content);
    let result = wipe(&to_wipe(&path, Kind::Device, pool));
    let after = fs::read(&path).expect("a device stays");
    match result {
        Ok(left) => {
            Ok(left == Left::Nothing && after.len() == content.len() && after.iter().all(|byte| *byte == 0))
        }
        Err(trouble) => {
            assert!(after == content, "what is refused is left alone");
            assert_eq!(trouble.reason, Reason::ForeignSignature);
            Err(trouble)
        }
    }
}

fn to_open(at: &Path, kind: Kind, missing: Missing) -> ToOpen {
    let recipe = Recipe {
        pool: "p".to_owned(),
        uid: "u".to_owned(),
        kind,
        bytes: Some(BYTES as u64),
        engine: Engine::Plain,
        fallback: FallbackEngine::None,
        foreign: ForeignSignatures::Refuse,
    };
    ToOpen { id: DeviceId(0), path: "/x".to_owned(), at: at.to_owned(), recipe, missing }
}

#[test]
fn a_file_that_has_to_be_there_is_asked_for_with_what_to_do() {
    let (_folder, path) = device(&pool(OWN));
    let aside = path.with_extension("aside");
    let tried = |missing| prepare(&to_open(&path, Kind::File, missing));
    assert_eq!(tried(Missing::Fail), Ok(()));
    fs::rename(&path, &aside).expect("moved");
    let trouble = tried(Missing::Fail).expect_err("it is not there");
    assert_eq!(trouble.reason, Reason::DeviceFailed);
    for words in ["mount its file system", "To begin anew", "nodeSelector", "new SSDPool"] {
        assert!(trouble.message.contains(words), "{}", trouble.message);
    }
    assert_eq!(tried(Missing::Create), Ok(()), "it is to be made");
    assert!(!path.exists(), "looking makes nothing");
    fs::rename(&aside, &path).expect("moved");
    assert_eq!(tried(Missing::Fail), Ok(()), "it is back");
}

#[test]
fn a_wipe_destroys_the_pool_of_its_claim_and_no_other() {
    assert_eq!(wiped(&pool(OWN), Some(OWN)), Ok(true));
    assert_eq!(wiped(&pool(OWN), None), Ok(true), "nobody knows of another");
    let trouble = wiped(&pool(OTHER), Some(OWN)).expect_err("another pool's");
    assert!(trouble.message.contains("another pool"), "{}", trouble.message);
}

#[test]
fn a_wipe_leaves_data_alone_that_no_pool_wrote() {
    let mut unmarked = vec![0; BYTES];
    unmarked[..5].copy_from_slice(b"notes");
    let mut behind = vec![0; BYTES];
    behind[1 << 19] = 1;
    let mut newer = pool(OWN);
    newer[8] = 99;
    newer[(1 << 20) + 8] = 99;
    for content in [unmarked, behind, newer, b"short".to_vec()] {
        let trouble = wiped(&content, Some(OWN)).expect_err("not ours");
        assert!(trouble.message.contains("take it out of the pool"), "{}", trouble.message);
    }
}

#[test]
fn a_blank_device_is_wiped_to_its_end_only_if_it_was_of_the_pool() {
    // Erasing it was interrupted.
    let mut content = vec![0; BYTES];
    content[BYTES - 1] = 1;
    assert_eq!(wiped(&content, Some(OWN)), Ok(true));
    assert_eq!(wiped(&content, None), Ok(false), "it was never used");
}

#[test]
fn a_pool_whose_first_superblock_is_erased_already_is_known_by_its_second() {
    let mut content = pool(OTHER);
    content[..4096].fill(0);
    assert!(wiped(&content, Some(OWN)).is_err());
    assert_eq!(wiped(&content, Some(OTHER)), Ok(true));
}

#[test]
fn a_file_goes_with_its_data_and_a_device_that_is_missing_was_not_wiped() {
    let (_folder, path) = device(&pool(OWN));
    let expected = to_wipe(&path, Kind::File, Some(OWN));
    assert_eq!(wipe(&expected), Ok(Left::File));
    assert!(fs::read(&path).expect("it is there still").iter().all(|byte| *byte == 0));
    assert_eq!(wipe(&expected), Ok(Left::File), "whoever was interrupted does it again");
    assert_eq!(remove(&path), Ok(()));
    assert_eq!(wipe(&expected), Err(not_destroyed()), "it may be on a disk that is not mounted");
    let erased = ToWipe { is_expected: false, ..expected };
    assert_eq!(wipe(&erased), Ok(Left::Nothing), "it is gone already");
    let trouble = wipe(&to_wipe(&path, Kind::Device, Some(OWN))).expect_err("nobody knows what is on it");
    assert_eq!(trouble.reason, Reason::DeviceFailed);
}
