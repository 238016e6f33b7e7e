//! Blocks that cannot be moved are reported, each on its own; the others arrive.

use std::time::{Duration, Instant};

use reprise_cuda::store::verify::{Contents, device_bytes, geometries};
use reprise_cuda::store::{
    BlockError, BlockPlace, KvGeometry, LayerMover, LayerOutcome, LayerRequest, RequestOrder,
};
use reprise_nvme::emulated::{Emulation, Fault, FaultRule, Selection};
use reprise_nvme::spec::{READ, Status};

use super::rig::{Kind, Rig};

const LONG: Duration = Duration::from_secs(60);

/// Four blocks, two on each device.
fn places(geometry: &KvGeometry) -> Vec<BlockPlace> {
    let extent = 4096 + (geometry.objects() * geometry.object_bytes) as u64;
    let place =
        |slot: usize| BlockPlace { device: slot % 2, payload: 4096 + (slot / 2) as u64 * extent, slot };
    (0..4).map(place).collect()
}

fn retrieve(rig: &mut Rig, blocks: &[BlockPlace], timeout: Duration) -> LayerOutcome {
    let request = LayerRequest { layer: 2, blocks, timeout, order: RequestOrder::Unordered };
    let ticket = rig.mover().retrieve_layer(&request).expect("accepted");
    rig.mover().wait(ticket).expect("open")
}

fn failed(outcome: &LayerOutcome) -> Vec<usize> {
    outcome.failures.iter().map(|failure| failure.block).collect()
}

fn bytes(contents: &Contents) -> Vec<u8> {
    match contents {
        Contents::Host(span) => {
            let mut bytes = vec![0; span.len()];
            span.copy_out(&mut bytes);
            bytes
        }
        other => panic!("{other:?} is not memory of this process"),
    }
}

#[test]
fn nothing_moves_after_the_deadline() {
    let geometry = geometries(4)[2].1;
    for kind in Kind::ALL {
        let mut rig = Rig::new(kind, geometry);
        let Contents::Host(span) = &rig.memory else { panic!("memory of this process") };
        span.copy_in(&vec![7; span.len()]).expect("writable");
        let outcome = retrieve(&mut rig, &places(&geometry), Duration::ZERO);
        assert_eq!(failed(&outcome), [0, 1, 2, 3], "{kind:?}");
        assert!(outcome.failures.iter().all(|failure| failure.error == BlockError::TimedOut), "{kind:?}");
        let start = Instant::now();
        while rig.mover().given_up() > 0 {
            assert!(start.elapsed() < LONG, "{kind:?}: {} transfers run", rig.mover().given_up());
            std::thread::yield_now();
        }
        assert!(bytes(&rig.memory).iter().all(|byte| *byte == 7), "{kind:?}: KV memory has changed");
        rig.stop();
    }
}

#[test]
fn blocks_beyond_the_end_of_a_file_fail_alone() {
    let geometry = geometries(4)[1].1;
    for kind in [Kind::Rings, Kind::Gds, Kind::Staged] {
        let mut rig = Rig::new(kind, geometry);
        // The second block of device 1 lies behind this end.
        rig.cut(1, device_bytes(&geometry) / 9);
        let outcome = retrieve(&mut rig, &places(&geometry), LONG);
        assert_eq!(failed(&outcome), [3], "{kind:?}: {outcome:?}");
        assert!(matches!(&outcome.failures[0].error, BlockError::Failed(text) if !text.is_empty()));
        assert_eq!(rig.mover().given_up(), 0);
        rig.stop();
    }
}

#[test]
fn lost_completion_times_out_its_block_and_stays_given_up() {
    let geometry = geometries(4)[1].1;
    let lose = |emulation: Emulation| {
        let on = Selection { opcode: Some(READ), times: Some(1), ..Selection::default() };
        Emulation { faults: vec![FaultRule { on, fault: Fault::Lost }], ..emulation }
    };
    let mut rig = Rig::with_emulation(Kind::Rings, geometry, lose);
    // Both devices lose their first read.
    let outcome = retrieve(&mut rig, &places(&geometry), Duration::from_millis(300));
    assert_eq!(outcome.failures.len(), 2, "{outcome:?}");
    assert!(outcome.failures.iter().all(|failure| failure.error == BlockError::TimedOut));
    let start = Instant::now();
    let mover = rig.rings().mover();
    while !(mover.has_unfinished(0) && mover.has_unfinished(1)) {
        assert!(start.elapsed() < LONG, "the queues have commands that were given up");
        std::thread::yield_now();
    }
    assert!(mover.given_up() >= 2);
    rig.stop();
}

#[test]
fn error_of_a_controller_fails_its_block_alone() {
    let geometry = geometries(4)[1].1;
    let fail = |emulation: Emulation| {
        let on = Selection { opcode: Some(READ), times: Some(1), ..Selection::default() };
        Emulation { faults: vec![FaultRule { on, fault: Fault::Status(Status::OUT_OF_RANGE) }], ..emulation }
    };
    let mut rig = Rig::with_emulation(Kind::Rings, geometry, fail);
    let outcome = retrieve(&mut rig, &places(&geometry), LONG);
    assert_eq!(outcome.failures.len(), 2, "one of each device: {outcome:?}");
    assert_eq!(rig.mover().given_up(), 0);
    assert_eq!(retrieve(&mut rig, &places(&geometry), LONG).failures, []);
    rig.stop();
}
