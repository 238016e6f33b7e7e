//! The index of the host build against a map, with replaced keys, collisions and a full table.

use std::collections::HashMap;

use proptest::prelude::*;
use reprise_cuda::index::{HostIndex, IndexKey, NO_PLACE, compare_on_host, keys_of_seed};

proptest! {
    #[test]
    fn the_index_answers_as_a_map(
        inserted in prop::collection::vec((0_u64..40, 0_u64..4), 0..60),
        asked in prop::collection::vec((0_u64..50, 0_u64..5), 0..60),
    ) {
        // Few different hashes: most keys collide.
        let key = |(high, low): &(u64, u64)| IndexKey { high: *high, low: *low };
        let keys: Vec<IndexKey> = inserted.iter().map(key).collect();
        let places: Vec<u64> = (100..100 + keys.len() as u64).collect();
        let mut index = HostIndex::with_room_for(keys.len());
        prop_assert_eq!(index.insert(&keys, &places), keys.len());
        let model: HashMap<IndexKey, u64> = keys.iter().copied().zip(places.iter().copied()).collect();
        let asked: Vec<IndexKey> = asked.iter().map(key).collect();
        let expected: Vec<u64> = asked.iter().map(|key| model.get(key).copied().unwrap_or(NO_PLACE)).collect();
        prop_assert_eq!(index.find(&asked), expected);
    }
}

#[test]
fn a_full_table_refuses_further_keys_and_keeps_the_others() {
    let mut index = HostIndex::with_room_for(2);
    let keys = keys_of_seed(7, 6);
    let places = [1, 2, 3, 4, 5, 6];
    assert_eq!(index.insert(&keys, &places), 4, "the table has four entries");
    assert_eq!(index.find(&keys), [1, 2, 3, 4, NO_PLACE, NO_PLACE]);
}

#[test]
fn a_comparison_reports_the_request_that_it_measured() {
    let times = compare_on_host(64, 1_000, 3);
    assert_eq!(times.keys, 64);
    assert!(!times.cpu_find.is_zero() && !times.gpu_find.is_zero(), "{times:?}");
}
