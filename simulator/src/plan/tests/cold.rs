//! Cold stores: traffic and price of the replays.

use super::*;

#[test]
fn the_price_of_a_cold_store_is_storage_bundles_and_reads() {
    let world = world("h100", &trace(10, 3, 1_000));
    let block = (512 * world.machine.model.kv_bytes_per_token()) as f64;
    let traffic = ColdTraffic {
        stored_bytes: 1e12,
        written_bytes_per_day: block * 24.0 * 256.0 * 1e6,
        read_bytes_per_day: block * 24.0 * 1e6,
    };
    // A million bundles and a million blocks an hour: 5 and 0.4 USD; 1 TB: 0.0315 USD.
    let usd = traffic.usd_per_hour(&world.machine, &world.load);
    assert!((usd - 5.4315).abs() < 1e-9, "{usd}");
}

#[test]
fn a_cold_store_has_the_bytes_that_the_replay_evicts_and_reads() {
    // 200 users have 8,000 blocks of 64 MiB: 537 GB, of which a node keeps 32 GB in DRAM.
    let world = world("h100", &trace(200, 5, 500));
    let estimator = world.estimator(3.0);
    let one = Configuration { dram_gb: 32, ..Configuration::without_cache(2) };
    let cold = Configuration { cold: true, ..one };
    let (without, with) = (Timed::new(&estimator, &one, 0), Timed::new(&estimator, &cold, 0));
    assert_eq!((without.cold, without.cold_ratio), (None, 0.0));
    let traffic = with.cold.expect("a cold store");
    // All repeated blocks hit: 80 of 120.
    assert!((with.hit_ratio - 80.0 / 120.0).abs() < 0.02 && without.hit_ratio < 0.5, "{with:?}");
    let distinct = world.load.distinct as f64 * estimator.block_bytes;
    assert!(
        traffic.stored_bytes <= distinct && traffic.stored_bytes > 0.8 * distinct,
        "{traffic:?} {distinct}"
    );
    let read = with.cold_ratio * world.load.references_per_second * estimator.block_bytes * 86_400.0;
    assert!((traffic.read_bytes_per_day / read - 1.0).abs() < 1e-9 && read > 0.0, "{traffic:?} {read}");
    // The price is that of the nodes and of this traffic.
    let usd = with.usd_per_hour(&estimator, &cold) - without.usd_per_hour(&estimator, &one);
    assert!((usd - traffic.usd_per_hour(&world.machine, &world.load)).abs() < 1e-9 && usd > 0.0, "{usd}");
}

#[test]
fn plans_have_a_cold_store_only_if_it_is_allowed_and_state_its_replayed_price() {
    // A cold store makes everything fast.
    let ttft = |one: &Configuration, _: usize| if one.cold { 1.0 } else { 100.0 / f64::from(one.nodes) };
    let compared = chosen_by("60000", FASTEST, ttft);
    assert!(!compared.plan.chosen.configuration.cold);
    let names: Vec<&str> = compared.plan.alternatives.iter().map(|(name, _)| *name).collect();
    assert!(names.contains(&"with a cold store"), "{names:?}");
    let allowed = chosen_by("60000", Goal { cold: ColdStore::Allowed, ..FASTEST }, ttft);
    let Evaluated { configuration, estimate } = &allowed.plan.chosen;
    assert!(configuration.cold, "{configuration:?}");
    // These replays have no traffic, so the store costs nothing.
    let machine = Machine::new("h100", "llama-3-8b").expect("valid");
    assert_eq!(estimate.usd_per_hour, configuration.usd_per_hour(&machine));
}
