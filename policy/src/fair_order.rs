//! Weighted fair shares: which of several flows (tenants) a shared channel serves next.
//!
//! Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996). Each flow has a start tag, and the flow with the
//! smallest one is served. A service of `bytes` advances the tag by `bytes / weight`. A flow that becomes active starts
//! at the virtual time, the largest tag that was served, or where it has ended, if that is later. So:
//!
//! * Flows that wait all the time get bytes in the ratio of their weights, up to one request of each.
//! * A flow that was idle neither catches up nor falls back.
//! * The channel never waits while a flow has requests. One flow alone gets all.
//! * A flow with a request waits for at most one request of each other flow, in the ratio of weights.
//!
//! Costs O(log flows) for each service, and memory for each flow that was ever active.

use std::collections::{BTreeMap, BTreeSet};

/// Largest weight; the smallest is 1.
pub const WEIGHT_MAX: u32 = 1000;

/// Factor of tags: a byte of the largest weight still advances its tag.
const SCALE: u128 = 1 << 20;

/// Weights of flows. Flows without one have the weight 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights<K: Ord>(BTreeMap<K, u32>);

impl<K: Ord> Weights<K> {
    /// Sets the weight of a flow, within 1 and [`WEIGHT_MAX`].
    pub fn set(&mut self, flow: K, weight: u32) {
        self.0.insert(flow, weight.clamp(1, WEIGHT_MAX));
    }

    /// Returns the weight of a flow.
    pub fn of(&self, flow: &K) -> u32 {
        self.0.get(flow).copied().unwrap_or(1)
    }
}

impl<K: Ord> Default for Weights<K> {
    fn default() -> Self {
        Weights(BTreeMap::new())
    }
}

impl<K: Ord> FromIterator<(K, u32)> for Weights<K> {
    fn from_iter<I: IntoIterator<Item = (K, u32)>>(weights: I) -> Self {
        let mut all = Weights::default();
        weights.into_iter().for_each(|(flow, weight)| all.set(flow, weight));
        all
    }
}

/// Order of active flows; see the module.
#[derive(Clone, Debug)]
pub struct FairOrder<K: Ord> {
    weights: Weights<K>,
    /// Active flows by start tag.
    active: BTreeSet<(u128, K)>,
    /// Start tag of each flow that was ever active, and whether it is active.
    tags: BTreeMap<K, (u128, Activity)>,
    virtual_time: u128,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Activity {
    Active,
    Idle,
}

impl<K: Ord + Clone> FairOrder<K> {
    /// Creates an order without active flows.
    pub fn new(weights: Weights<K>) -> FairOrder<K> {
        FairOrder { weights, active: BTreeSet::new(), tags: BTreeMap::new(), virtual_time: 0 }
    }

    /// Marks a flow as having requests.
    pub fn activate(&mut self, flow: &K) {
        let (tag, activity) = self.tags.get(flow).copied().unwrap_or((0, Activity::Idle));
        if activity == Activity::Idle {
            let start = tag.max(self.virtual_time);
            self.tags.insert(flow.clone(), (start, Activity::Active));
            self.active.insert((start, flow.clone()));
        }
    }

    /// Marks a flow as having no requests.
    pub fn deactivate(&mut self, flow: &K) {
        if let Some((tag, activity)) = self.tags.get_mut(flow)
            && std::mem::replace(activity, Activity::Idle) == Activity::Active
        {
            self.active.remove(&(*tag, flow.clone()));
        }
    }

    /// Returns the active flow that is served next.
    pub fn first(&self) -> Option<&K> {
        self.active.first().map(|(_, flow)| flow)
    }

    /// Iterates the active flows in the order of their service.
    pub fn iter(&self) -> impl Iterator<Item = &K> {
        self.active.iter().map(|(_, flow)| flow)
    }

    /// Start tag of a flow: smaller ones are served first.
    pub fn tag(&self, flow: &K) -> u128 {
        self.tags.get(flow).map_or(0, |(tag, _)| *tag)
    }

    /// Records that an active flow was served.
    pub fn charge(&mut self, flow: &K, bytes: u64) {
        let cost = u128::from(bytes) * SCALE / u128::from(self.weights.of(flow));
        let Some((tag, Activity::Active)) = self.tags.get_mut(flow) else { return };
        self.active.remove(&(*tag, flow.clone()));
        self.virtual_time = self.virtual_time.max(*tag);
        *tag += cost;
        self.active.insert((*tag, flow.clone()));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A channel with requests of each flow, in order.
    struct Channel {
        order: FairOrder<u32>,
        queues: BTreeMap<u32, Vec<u64>>,
        served: BTreeMap<u32, u64>,
    }

    impl Channel {
        fn new(weights: &[u32]) -> Channel {
            let weights = (0..).zip(weights.iter().copied()).collect();
            Channel { order: FairOrder::new(weights), queues: BTreeMap::new(), served: BTreeMap::new() }
        }

        fn push(&mut self, flow: u32, bytes: u64) {
            self.queues.entry(flow).or_default().insert(0, bytes);
            self.order.activate(&flow);
        }

        fn serve(&mut self) -> Option<(u32, u64)> {
            let flow = *self.order.first()?;
            let queue = self.queues.get_mut(&flow).expect("an active flow has requests");
            let bytes = queue.pop().expect("an active flow has requests");
            *self.served.entry(flow).or_default() += bytes;
            self.order.charge(&flow, bytes);
            if queue.is_empty() {
                self.order.deactivate(&flow);
            }
            Some((flow, bytes))
        }

        fn served(&self, flow: u32) -> u64 {
            self.served.get(&flow).copied().unwrap_or(0)
        }

        fn waiting(&self) -> usize {
            self.queues.values().map(Vec::len).sum()
        }
    }

    #[test]
    fn one_flow_alone_gets_all() {
        let mut channel = Channel::new(&[1, 100]);
        (0..50).for_each(|_| channel.push(0, 4096));
        assert!((0..50).all(|_| channel.serve() == Some((0, 4096))));
        assert_eq!(channel.serve(), None);
    }

    #[test]
    fn flow_that_was_idle_does_not_catch_up() {
        let mut channel = Channel::new(&[1, 1]);
        (0..2000).for_each(|_| channel.push(0, 100));
        (0..1000).for_each(|_| drop(channel.serve()));
        (0..1000).for_each(|_| channel.push(1, 100));
        (0..200).for_each(|_| drop(channel.serve()));
        assert_eq!((channel.served(0), channel.served(1)), (110_000, 10_000));
    }

    #[test]
    fn flow_that_leaves_and_returns_gains_nothing() {
        let mut channel = Channel::new(&[1, 1]);
        (0..1000).for_each(|_| channel.push(0, 100));
        for _ in 0..500 {
            // The flow has one request at a time.
            channel.push(1, 100);
            let _ = (channel.serve(), channel.serve());
        }
        assert!(channel.served(1) <= 50_000, "{}", channel.served(1));
    }

    #[test]
    fn cost_of_a_service_grows_with_the_logarithm_of_the_flows() {
        // Counts comparisons of keys: the work of the order.
        use std::cell::Cell;
        use std::cmp::Ordering;
        thread_local!(static COMPARISONS: Cell<u64> = const { Cell::new(0) });
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        struct Counted(u32);
        impl Ord for Counted {
            fn cmp(&self, other: &Counted) -> Ordering {
                COMPARISONS.set(COMPARISONS.get() + 1);
                self.0.cmp(&other.0)
            }
        }
        impl PartialOrd for Counted {
            fn partial_cmp(&self, other: &Counted) -> Option<Ordering> {
                Some(self.cmp(other))
            }
        }
        let cost = |flows: u32| {
            let mut order = FairOrder::new(Weights::default());
            (0..flows).for_each(|flow| order.activate(&Counted(flow)));
            let before = COMPARISONS.get();
            for _ in 0..1000 {
                let flow = *order.first().expect("active flows");
                order.charge(&flow, 4096);
            }
            (COMPARISONS.get() - before) / 1000
        };
        let (few, many) = (cost(64), cost(4096));
        assert!(many <= 3 * few.max(10), "{few} comparisons with 64 flows, {many} with 4096");
    }

    proptest! {
        #[test]
        fn flows_that_always_wait_get_their_shares(
            weights in prop::collection::vec(1..=16_u32, 2..6),
            sizes in prop::collection::vec(1..=64_u64, 64),
        ) {
            let mut channel = Channel::new(&weights);
            let flows = weights.len() as u32;
            let mut sizes = sizes.into_iter().map(|size| size * 4096).cycle();
            for flow in 0..flows {
                (0..2).for_each(|_| channel.push(flow, sizes.next().expect("endless")));
            }
            for _ in 0..20_000 {
                let (flow, _) = channel.serve().expect("all wait");
                channel.push(flow, sizes.next().expect("endless"));
            }
            let all: u64 = channel.served.values().sum();
            let sum: u32 = weights.iter().sum();
            for (flow, weight) in (0..).zip(&weights) {
                let share = channel.served(flow) as f64 / all as f64;
                let expected = f64::from(*weight) / f64::from(sum);
                prop_assert!((share / expected - 1.0).abs() < 0.03, "{flow}: {share} of {expected}");
            }
        }

        #[test]
        fn random_arrivals_are_all_served_and_no_flow_starves(
            weights in prop::collection::vec(1..=8_u32, 2..6),
            arrivals in prop::collection::vec((0..6_u32, 1..=64_u64, 0..4_usize), 1..400),
        ) {
            const LARGEST: u64 = 64 * 4096;
            let mut channel = Channel::new(&weights);
            let flows = weights.len() as u32;
            // Bytes of others since a flow that waits was served last.
            let mut passed: BTreeMap<(u32, u32), u64> = BTreeMap::new();
            for (flow, size, services) in arrivals {
                channel.push(flow % flows, size * 4096);
                for _ in 0..services {
                    let waiting = channel.waiting();
                    let served = channel.serve();
                    prop_assert_eq!(served.is_some(), waiting > 0, "the channel is busy while requests wait");
                    let Some((flow, bytes)) = served else { continue };
                    passed.retain(|(waits, _), _| *waits != flow);
                    for other in (0..flows).filter(|other| *other != flow) {
                        if channel.queues.get(&other).is_none_or(Vec::is_empty) {
                            continue;
                        }
                        let since = passed.entry((other, flow)).or_default();
                        *since += bytes;
                        // Its own last request delays it by that request's weighted size.
                        let (own, of_flow) = (weights[other as usize], weights[flow as usize]);
                        let bound = LARGEST + LARGEST * u64::from(of_flow) / u64::from(own) + u64::from(of_flow) * LARGEST;
                        prop_assert!(*since <= bound, "{other} waits for {since} bytes of {flow}");
                    }
                }
            }
            while channel.serve().is_some() {}
            prop_assert_eq!(channel.waiting(), 0);
        }
    }
}
