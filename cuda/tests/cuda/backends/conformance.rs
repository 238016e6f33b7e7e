//! The same random stores and retrievals through every backend, in each layout.

use std::time::Duration;

use reprise_cuda::store::verify::{geometries, verify_mover};
use reprise_cuda::store::{BlockPlace, LayerMover, LayerRequest, MoveError, MoverCounters, RequestOrder};

use super::rig::{Kind, Rig};

const BLOCKS: usize = 12;
const ROUNDS: u64 = 8;

#[test]
fn each_backend_moves_the_same_bytes_in_each_layout() {
    for (name, geometry) in geometries(BLOCKS) {
        let mut results: Vec<MoverCounters> = Vec::new();
        for kind in Kind::ALL {
            let mut rig = Rig::new(kind, geometry);
            for seed in [1, 2] {
                let (mover, memory, devices) = rig.parts();
                let verified = verify_mover(mover, &geometry, (memory, devices), (seed, ROUNDS));
                verified.unwrap_or_else(|error| panic!("{name}: {error}"));
            }
            assert_eq!(rig.mover().given_up(), 0);
            results.push(rig.mover().counters());
            rig.stop();
        }
        assert_eq!(results[0].requests, 2 * ROUNDS * geometry.layers as u64, "{name}");
        assert!(results.iter().all(|counters| *counters == results[0]), "{name}: {results:?}");
    }
}

#[test]
fn names_state_what_runs() {
    let geometry = geometries(2)[0].1;
    let expected = ["gpu-queue-emulated", "gds", "staged-host", "host"];
    for (kind, expected) in Kind::ALL.into_iter().zip(expected) {
        let mut rig = Rig::new(kind, geometry);
        assert_eq!(rig.mover().name(), expected);
        rig.stop();
    }
}

#[test]
fn requests_outside_are_refused_and_change_nothing() {
    let geometry = geometries(4)[0].1;
    let place = BlockPlace { device: 0, payload: 4096, slot: 0 };
    let wrong = [
        (3, place),
        (0, BlockPlace { device: 2, ..place }),
        (0, BlockPlace { slot: 4, ..place }),
        (0, BlockPlace { payload: 1 << 40, ..place }),
        (0, BlockPlace { payload: u64::MAX, ..place }),
    ];
    for kind in Kind::ALL {
        let mut rig = Rig::new(kind, geometry);
        for (layer, place) in wrong {
            let request = request(layer, std::slice::from_ref(&place));
            let refused = rig.mover().store_layer(&request).expect_err("outside");
            assert!(matches!(refused, MoveError::Invalid(_)), "{kind:?}: {refused}");
        }
        let ticket = rig.mover().retrieve_layer(&request(0, &[])).expect("an empty request");
        assert_eq!(wait(rig.mover(), ticket).blocks, 0);
        let again = rig.mover().poll(ticket).expect_err("taken");
        assert!(matches!(again, MoveError::UnknownTicket), "{again}");
        rig.stop();
    }
}

#[test]
fn ends_of_requests_can_be_polled() {
    let geometry = geometries(4)[1].1;
    for kind in Kind::ALL {
        let mut rig = Rig::new(kind, geometry);
        let place = |slot| BlockPlace { device: slot % 2, payload: 4096, slot };
        let ticket = rig.mover().store_layer(&request(1, &[place(2), place(3)])).expect("accepted");
        let outcome = loop {
            if let Some(outcome) = rig.mover().poll(ticket).expect("open") {
                break outcome;
            }
            std::thread::sleep(Duration::from_micros(100));
        };
        assert_eq!((outcome.blocks, outcome.is_complete()), (2, true), "{kind:?}");
        rig.stop();
    }
}

fn request(layer: usize, blocks: &[BlockPlace]) -> LayerRequest<'_> {
    LayerRequest { layer, blocks, timeout: Duration::from_secs(60), order: RequestOrder::Unordered }
}

fn wait(
    mover: &mut dyn LayerMover,
    ticket: reprise_cuda::store::LayerTicket,
) -> reprise_cuda::store::LayerOutcome {
    mover.wait(ticket).expect("open")
}
