//! Reads and writes: both descriptions of data, sizes, places, errors.

use reprise_nvme::emulated::{Emulation, Storage};
use reprise_nvme::spec::{Command, READ, Status, WRITE};
use reprise_nvme::{DataFormat, Piece};

use crate::bench_rig::{BLOCK, Rig, emulation, run};

const PAGE: u64 = 4096;

#[test]
fn written_bytes_are_read_back_in_every_size_and_description() {
    let mut rig = Rig::new(Emulation { transfer_max: None, ..emulation() });
    let mut queue = rig.controller.create_queue_pair(8).expect("granted");
    for format in [DataFormat::Prp, DataFormat::Sgl] {
        for pages in [1, 2, 3, 16, 511, 512] {
            let (bytes, seed) = (pages * PAGE, pages + 1000 * u64::from(format == DataFormat::Sgl));
            rig.fill(0, bytes, seed);
            let write = rig.transfer_as(format, &queue, (WRITE, pages), &[rig.piece(0, bytes)]);
            assert_eq!(run(&mut queue, &write), Status::SUCCESS, "{format}, {pages} pages");
            let into = 2 << 20;
            let read = rig.transfer_as(format, &queue, (READ, pages), &[rig.piece(into, bytes)]);
            assert_eq!(run(&mut queue, &read), Status::SUCCESS, "{format}, {pages} pages");
            assert!(rig.contents(into, bytes) == rig.contents(0, bytes), "{format}, {pages} pages");
        }
    }
}

#[test]
fn the_health_log_counts_written_bytes_and_no_reads() {
    let mut rig = Rig::new(emulation());
    let mut queue = rig.controller.create_queue_pair(8).expect("granted");
    assert_eq!(rig.controller.health().expect("a log page").written_bytes, None);
    for _ in 0..126 {
        assert!(rig.write(&mut queue, 0, 0, PAGE).is_success());
    }
    let read = rig.transfer(&queue, READ, 0, &[rig.piece(1 << 20, 16 * PAGE)]);
    assert!(run(&mut queue, &read).is_success());
    // 516,096 bytes are two units of 512,000.
    assert_eq!(rig.controller.health().expect("a log page").written_bytes, Some(1_024_000));
}

#[test]
fn scattered_pieces_are_read_and_written_in_order() {
    let mut rig = Rig::new(emulation());
    let mut queue = rig.controller.create_queue_pair(8).expect("granted");
    rig.fill(0, 64 * PAGE, 3);
    let from = [rig.piece(8 * PAGE, PAGE), rig.piece(0, 2 * PAGE), rig.piece(40 * PAGE, 5 * PAGE)];
    let expected: Vec<u8> =
        [(8, 1), (0, 2), (40, 5)].into_iter().flat_map(|(at, n)| rig.contents(at * PAGE, n * PAGE)).collect();
    for format in [DataFormat::Prp, DataFormat::Sgl] {
        let write = rig.transfer_as(format, &queue, (WRITE, 0), &from);
        assert!(run(&mut queue, &write).is_success());
        let read = rig.transfer_as(format, &queue, (READ, 0), &[rig.piece(2 << 20, 8 * PAGE)]);
        assert!(run(&mut queue, &read).is_success());
        assert!(rig.contents(2 << 20, 8 * PAGE) == expected, "{format}");
    }
}

#[test]
fn an_sgl_describes_parts_of_pages() {
    let mut rig = Rig::new(emulation());
    let mut queue = rig.controller.create_queue_pair(8).expect("granted");
    rig.fill(0, PAGE, 9);
    assert!(rig.write(&mut queue, 0, 0, PAGE).is_success());
    let into = [rig.piece(1 << 20, 1024), rig.piece((1 << 20) + 5120, 3072)];
    let read = rig.transfer(&queue, READ, 0, &into);
    assert!(run(&mut queue, &read).is_success());
    assert!(rig.contents(1 << 20, 1024) == rig.contents(0, 1024));
    assert!(rig.contents((1 << 20) + 5120, 3072) == rig.contents(1024, 3072));
    assert_eq!(rig.contents((1 << 20) + 1024, 4096), vec![0; 4096], "the gap is untouched");
}

#[test]
fn invalid_commands_end_with_their_status() {
    let mut rig = Rig::new(Emulation { namespaces: vec![Storage::memory(1 << 20)], ..emulation() });
    let mut queue = rig.controller.create_queue_pair(8).expect("granted");
    let last = (1 << 20) / BLOCK;
    assert_eq!(rig.read(&mut queue, last - 8, 0, PAGE), Status::SUCCESS);
    assert_eq!(rig.read(&mut queue, last - 7, 0, PAGE), Status::OUT_OF_RANGE);
    assert_eq!(rig.read(&mut queue, u64::MAX - 3, 0, PAGE), Status::OUT_OF_RANGE);
    let other = Command { namespace: 9, ..rig.transfer(&queue, READ, 0, &[rig.piece(0, PAGE)]) };
    assert_eq!(run(&mut queue, &other), Status::INVALID_NAMESPACE);
    let unknown = Command { opcode: 0x7f, ..other };
    assert_eq!(run(&mut queue, &Command { namespace: 1, ..unknown }), Status::INVALID_OPCODE);
    let unmapped = Piece { address: 0x666 << 32, bytes: PAGE };
    let nowhere = rig.transfer(&queue, READ, 0, &[unmapped]);
    assert_eq!(run(&mut queue, &nowhere), Status::DATA_TRANSFER);
}

#[test]
fn a_transfer_is_not_larger_than_the_controller_accepts() {
    let mut rig = Rig::new(Emulation { transfer_max: Some(128 << 10), ..emulation() });
    assert_eq!(rig.controller.transfer_max(), 128 << 10);
    let mut queue = rig.controller.create_queue_pair(8).expect("granted");
    assert_eq!(rig.write(&mut queue, 0, 0, 128 << 10), Status::SUCCESS);
    assert_eq!(rig.write(&mut queue, 0, 0, (128 << 10) + PAGE), Status::INVALID_FIELD);
}
