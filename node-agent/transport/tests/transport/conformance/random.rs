//! Property: fetches between any nodes, in pieces of any size, deliver exactly the bytes of the blocks.
//!
//! proptest prints the failing case and keeps its seed in `proptest-regressions`; run the test again to
//! replay it.

use std::collections::HashMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use reprise_policy::peer::{FillError, PeerEvent};

use crate::conformance::fixture::{Fixture, node};
use crate::harness::{
    Block, FillOutcome, LATER, Serve, Tracker, bytes_of, layout, renew_arena, serving, wanted,
};

/// Blocks exist up to this number; higher ones are absent.
const BLOCKS: u32 = 12;

const NODES: usize = 3;

#[derive(Clone, Debug)]
struct Fetch {
    requester: usize,
    server: usize,
    blocks: Vec<u32>,
}

#[derive(Clone, Debug)]
struct Scene {
    layers: u16,
    head_dim: u16,
    tokens: u16,
    objects_per_range: u32,
    fetches: Vec<Fetch>,
}

fn scene() -> impl Strategy<Value = Scene> {
    let fetch = (0..NODES, 1..NODES, prop::collection::vec(0..BLOCKS + 2, 1..20))
        .prop_map(|(requester, hop, blocks)| Fetch { requester, server: (requester + hop) % NODES, blocks });
    let fetches = prop::collection::vec(fetch, 1..24);
    (1u16..12, 1u16..300, 1u16..40, 1u32..24, fetches).prop_map(
        |(layers, head_dim, tokens, objects_per_range, fetches)| Scene {
            layers,
            head_dim,
            tokens,
            objects_per_range,
            fetches,
        },
    )
}

pub(crate) fn random_fetches_between_three_nodes_are_byte_exact(fixture: &dyn Fixture) {
    let config = Config { cases: 24, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&scene(), |scene| {
            play(fixture, &scene);
            Ok(())
        })
        .expect("every scene is byte-exact");
}

fn play(fixture: &dyn Fixture, scene: &Scene) {
    let layout = layout(scene.layers, scene.head_dim, scene.tokens);
    let fetched: usize = scene.fetches.iter().map(|fetch| fetch.blocks.len()).sum();
    renew_arena(fetched.max(BLOCKS as usize) as u64 * layout.slot_bytes());
    let blocks: Vec<Block> = (0..BLOCKS).map(|number| Block::new(number, layout)).collect();
    let serve: Serve = serving(&blocks, scene.objects_per_range);
    let nodes: Vec<_> = ["a", "b", "c"].map(|name| node(fixture, name, serve.clone())).into_iter().collect();
    let mut trackers: Vec<Tracker> = (0..NODES).map(|_| Tracker::default()).collect();
    let mut places = HashMap::new();
    let mut fill = 0;
    for fetch in &scene.fetches {
        let keys: Vec<_> = fetch.blocks.iter().map(|number| crate::harness::key(*number)).collect();
        let wanted = wanted(layout, &keys, fill, LATER);
        trackers[fetch.requester].expect(&wanted.request);
        let into = nodes[fetch.requester].fetch(&nodes[fetch.server], wanted);
        for (number, span) in fetch.blocks.iter().zip(into) {
            places.insert(fill, (fetch.requester, *number, span));
            fill += 1;
        }
    }
    for (node, tracker) in nodes.iter().zip(&mut trackers) {
        while !tracker.is_over() {
            let event = fixture.next(&node.events);
            if !is_served(&event) {
                tracker.take(&event);
            }
        }
    }
    for (fill, (requester, number, span)) in places {
        let outcome = &trackers[requester].outcomes[&fill];
        match blocks.get(number as usize) {
            Some(block) => {
                assert!(
                    matches!(outcome, FillOutcome::Arrived { checksums, .. } if *checksums == block.checksums)
                );
                assert!(bytes_of(&span)[..block.bytes.len()] == block.bytes[..], "fill {fill} differs");
            }
            None => assert_eq!(*outcome, FillOutcome::Failed(FillError::Absent)),
        }
    }
}

fn is_served(event: &reprise_transport::TransportEvent) -> bool {
    use reprise_transport::TransportEvent::{Peer, Request};
    matches!(event, Request { .. } | Peer(PeerEvent::ServeDone { .. } | PeerEvent::ServeAborted { .. }))
}
