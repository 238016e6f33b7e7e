//! Tests of the bare loops.

use std::num::NonZeroU32;
use std::path::Path;

use reprise_buffers::{Arena, ArenaConfig, HugePolicy, Span};
use reprise_io::bare::{self, BareLoop};
use reprise_io::{DeviceFile, FileAccess, IfMissing, IoErrorKind, Reserve};

const BLOCK: u32 = 64 << 10;
const BLOCKS: u64 = 32;

fn file(path: &Path, access: FileAccess) -> DeviceFile {
    DeviceFile::open(
        path,
        access,
        if access == FileAccess::ReadWrite { IfMissing::Create } else { IfMissing::Fail },
    )
    .expect("the file of the test")
}

fn buffers(count: usize) -> Vec<Span> {
    let arena = Arena::new(&ArenaConfig { bytes: 2 << 20, region_bytes: 2 << 20, huge: HugePolicy::Never });
    let whole = arena.expect("2 MiB").span(0, 0, 2 << 20).expect("inside");
    bare::cut(&whole, BLOCK, count).expect("they fit")
}

#[test]
fn the_read_loop_reads_the_bytes_of_the_write_loop() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let path = directory.path().join("file");
    let buffers = buffers(4);
    let offsets: Vec<u64> = (0..BLOCKS).map(|index| index * 11 % BLOCKS * u64::from(BLOCK)).collect();
    let mut target = file(&path, FileAccess::ReadWrite);
    target.preallocate(BLOCKS * u64::from(BLOCK), Reserve::Bytes(0)).expect("space");
    for buffer in &buffers {
        buffer.copy_in(&vec![0xAB; BLOCK as usize]).expect("writable");
    }
    let parameters = BareLoop {
        file: &target,
        block_bytes: BLOCK,
        offsets: &offsets,
        // Fewer than buffers: all of them are used, in turn.
        depth: 2,
        buffers: &buffers,
        sync_every: NonZeroU32::new(5),
    };
    let run = bare::write_loop(&parameters).expect("written");
    assert_eq!(run.bytes, BLOCKS * u64::from(BLOCK));
    assert!(run.bytes_per_second() > 0.0 && run.bytes_per_second().is_finite());
    assert!(std::fs::read(&path).expect("readable").iter().all(|byte| *byte == 0xAB));

    for buffer in &buffers {
        buffer.copy_in(&vec![0; BLOCK as usize]).expect("writable");
    }
    let run = bare::read_loop(&BareLoop { sync_every: None, ..parameters }).expect("read");
    assert_eq!(run.bytes, BLOCKS * u64::from(BLOCK));
    for buffer in &buffers {
        let mut found = vec![0; BLOCK as usize];
        buffer.copy_out(&mut found);
        assert!(found.iter().all(|byte| *byte == 0xAB));
    }
}

#[test]
fn rejects_a_loop_beyond_the_file_or_writing_a_read_only_one() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let path = directory.path().join("file");
    file(&path, FileAccess::ReadWrite).preallocate(u64::from(BLOCK), Reserve::Bytes(0)).expect("space");
    let buffers = buffers(2);
    let target = file(&path, FileAccess::ReadOnly);
    let parameters = BareLoop {
        file: &target,
        block_bytes: BLOCK,
        offsets: &[4096],
        depth: 2,
        buffers: &buffers,
        sync_every: None,
    };
    assert_eq!(bare::read_loop(&parameters).expect_err("beyond the end").kind(), IoErrorKind::Invalid);
    let inside = BareLoop { offsets: &[0], ..parameters };
    assert_eq!(bare::write_loop(&inside).expect_err("read-only").kind(), IoErrorKind::Invalid);
    bare::read_loop(&inside).expect("inside");
    for depth in [0, buffers.len() + 1] {
        let rejected = bare::read_loop(&BareLoop { depth, ..inside.clone() });
        assert_eq!(rejected.expect_err("depth without buffers").kind(), IoErrorKind::Invalid);
    }
}

#[test]
fn a_device_error_ends_the_loop_after_all_operations_in_flight() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let path = directory.path().join("file");
    let mut target = file(&path, FileAccess::ReadWrite);
    target.preallocate(BLOCKS * u64::from(BLOCK), Reserve::Bytes(0)).expect("space");
    std::fs::File::options().write(true).open(&path).expect("the file").set_len(4096).expect("cut");
    let buffers = buffers(4);
    let offsets: Vec<u64> = (0..BLOCKS).map(|index| index * u64::from(BLOCK)).collect();
    let parameters = BareLoop {
        file: &target,
        block_bytes: BLOCK,
        offsets: &offsets,
        depth: 4,
        buffers: &buffers,
        sync_every: None,
    };
    let error = bare::read_loop(&parameters).expect_err("the file is cut");
    assert!(error.to_string().contains("of 65536 bytes"), "{error}");
}
