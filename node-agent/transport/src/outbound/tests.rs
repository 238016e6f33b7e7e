//! Shares of tenants in a connection.

use reprise_buffers::{Arena, ArenaConfig, HugePolicy};
use reprise_policy::{BlockKey, LayoutSpec};

use super::*;

/// One block of 8 KiB for each request.
fn layout() -> Layout {
    let spec =
        LayoutSpec { layers: 1, kv_heads: 1, head_dim: 128, tokens_per_block: 16, ..LayoutSpec::LLAMA_3_8B };
    spec.validate().expect("a valid layout")
}

/// Opens a request of one block and queues its header and objects.
fn serve(outbound: &mut Outbound, number: u64, tenant: &str, memory: &Arena) {
    let body = BlocksBody {
        layout: layout(),
        deadline: Duration::MAX,
        tenant: tenant.parse().expect("a name"),
        keys: vec![BlockKey([1; 16])],
    };
    outbound.open((number, number), &body, Duration::MAX).expect("a free stream");
    outbound.header((number, 0), Tier::Dram, &[7; 2]).expect("a waiting block");
    let span = memory.span(0, 0, layout().block_bytes()).expect("inside");
    outbound.objects((number, 0), Some(span), (0, true)).expect("the block");
}

#[test]
fn tenants_get_shares_of_a_connection_by_weight_and_frames_stay_in_order() {
    let memory = ArenaConfig { bytes: 2 << 20, region_bytes: 2 << 20, huge: HugePolicy::Never };
    let memory = Arena::new(&memory).expect("2 MiB");
    let weights = [("team-b".parse().expect("a name"), 3)].into_iter().collect();
    let mut outbound = Outbound::new(64 << 20, weights);
    (0..100).for_each(|number| serve(&mut outbound, number, "team-a", &memory));
    (100..200).for_each(|number| serve(&mut outbound, number, "team-b", &memory));
    let next = || match outbound.next()? {
        Step::Frame(frame) => Some((frame.serve, frame.header.kind)),
        Step::Aborted { .. } => None,
    };
    let frames: Vec<(u64, Kind)> = std::iter::from_fn(next).collect();
    assert_eq!(frames.len(), 400);
    let first = frames[..200].iter().filter(|(serve, _)| *serve >= 100).count();
    assert!((147..=153).contains(&first), "{first} of 200 frames have a weight of 3 in 4");
    for tenant in [0..100, 100..200] {
        let of: Vec<_> = frames.iter().filter(|(serve, _)| tenant.contains(serve)).copied().collect();
        let expected = tenant.flat_map(|serve| [(serve, Kind::BlockHeader), (serve, Kind::Data)]);
        assert!(of.into_iter().eq(expected), "requests of a tenant are served in order");
    }
}
