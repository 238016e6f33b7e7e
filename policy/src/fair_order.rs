//! Weighted fair shares: which of several flows (tenants) a shared channel serves next.
//!
//! Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996). Each flow has a start tag, and the flow with the
//! smallest one is served. A service of `bytes` advances the tag by `bytes / weight`. A flow that becomes active starts
//! at the virtual time, the largest tag that was served, or where it has ended, if that is later. Invariants, with
//! requests of at most `l` bytes and the weights `w`:
//!
//! * Flows that wait all the time get bytes in the ratio of their weights: of all bytes except `l` of each other flow,
//!   a flow gets at least its share.
//! * While a request of flow `f` waits, another flow `g` gets at most `l + l * w(g) / w(f)` bytes.
//! * A flow that was idle has saved up nothing, and owes at most one request, and the bytes that were served out of turn.
//! * The channel never waits while a flow has requests. One flow alone gets everything.
//!
//! A flow that is passed over, because its request cannot start now, keeps a lead of at most one request
//! ([`FairOrder::pass_over`]).
//!
//! Each operation costs O(log flows), amortised. Idle flows that owe nothing are forgotten, and all idle flows if they
//! are more than twice the tenants of a node: names of flows may come from other nodes.

use std::collections::{BTreeMap, BTreeSet};

use crate::tenant::TENANTS_MAX;

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
    /// Start tag of each flow, and whether it is active. A flow that is not here starts at the virtual time.
    tags: BTreeMap<K, (u128, Activity)>,
    virtual_time: u128,
    /// Number of flows at which those that are idle and owe nothing are forgotten.
    flows_max: usize,
}

/// Smallest number of flows at which some are forgotten.
const FLOWS_MIN: usize = 16;

/// Number of idle flows above which also those that owe something are forgotten.
const IDLE_MAX: usize = 2 * TENANTS_MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Activity {
    Active,
    Idle,
}

impl<K: Ord + Clone> FairOrder<K> {
    /// Creates an order without active flows.
    pub fn new(weights: Weights<K>) -> FairOrder<K> {
        FairOrder {
            weights,
            active: BTreeSet::new(),
            tags: BTreeMap::new(),
            virtual_time: 0,
            flows_max: FLOWS_MIN,
        }
    }

    /// Marks a flow as having requests.
    pub fn activate(&mut self, flow: &K) {
        let (tag, activity) = self.tags.get(flow).copied().unwrap_or((0, Activity::Idle));
        if activity == Activity::Idle {
            self.limit_flows();
            let start = tag.max(self.virtual_time);
            self.tags.insert(flow.clone(), (start, Activity::Active));
            self.active.insert((start, flow.clone()));
        }
    }

    /// Marks a flow as having no requests. Without active flows, all start again as equals.
    pub fn deactivate(&mut self, flow: &K) {
        if let Some((tag, activity)) = self.tags.get_mut(flow)
            && std::mem::replace(activity, Activity::Idle) == Activity::Active
        {
            self.active.remove(&(*tag, flow.clone()));
            if self.active.is_empty() {
                self.tags.clear();
                self.virtual_time = 0;
            }
        }
    }

    /// Forgets idle flows before a flow is inserted, if there are many.
    fn limit_flows(&mut self) {
        if self.tags.len() >= self.flows_max {
            self.forget_idle();
        }
    }

    /// Forgets idle flows that owe nothing, and all idle flows above [`IDLE_MAX`]. The next time is after as many new
    /// flows as have remained.
    fn forget_idle(&mut self) {
        let virtual_time = self.virtual_time;
        self.tags.retain(|_, (tag, activity)| *activity == Activity::Active || *tag > virtual_time);
        if self.tags.len() - self.active.len() > IDLE_MAX {
            self.tags.retain(|_, (_, activity)| *activity == Activity::Active);
        }
        self.flows_max = FLOWS_MIN.max(2 * self.tags.len());
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

    /// Whether a service of this flow by other means may precede the active flows: it is the next one, or would be if it
    /// became active now.
    pub fn may_precede(&self, flow: &K) -> bool {
        let start = self.tag(flow).max(self.virtual_time);
        self.active.first().is_none_or(|(tag, first)| first == flow || start <= *tag)
    }

    /// Records that a flow was served. An idle flow, which was served by other means, owes this to the active ones.
    pub fn charge(&mut self, flow: &K, bytes: u64) {
        if self.active.is_empty() {
            return;
        }
        let cost = self.cost(flow, bytes);
        let (tag, activity) = self.tags.get(flow).copied().unwrap_or((0, Activity::Idle));
        match activity {
            Activity::Active => {
                // A service out of turn does not move the start of flows that become active: they would begin behind
                // the first one by all that this flow got.
                if self.first() == Some(flow) {
                    self.virtual_time = self.virtual_time.max(tag);
                }
                self.set_active_tag(flow, (tag, tag + cost));
            }
            Activity::Idle => {
                self.limit_flows();
                self.tags.insert(flow.clone(), (tag.max(self.virtual_time) + cost, activity));
            }
        }
    }

    /// Records that an active flow, whose next request has this size, was passed over for another one, which is charged
    /// afterwards. The flow keeps a lead of at most this request: otherwise it would get everything later, until it has
    /// caught up.
    pub fn pass_over(&mut self, flow: &K, bytes: u64, instead: &K) {
        let Some((tag, Activity::Active)) = self.tags.get(flow).copied() else { return };
        let raised = self.tag(instead).saturating_sub(self.cost(flow, bytes));
        if raised > tag {
            self.set_active_tag(flow, (tag, raised));
            if let Some((first, _)) = self.active.first() {
                self.virtual_time = self.virtual_time.max(*first);
            }
        }
    }

    /// Advance of a flow's tag for a service.
    fn cost(&self, flow: &K, bytes: u64) -> u128 {
        u128::from(bytes) * SCALE / u128::from(self.weights.of(flow))
    }

    /// Changes the tag of an active flow.
    fn set_active_tag(&mut self, flow: &K, (from, to): (u128, u128)) {
        self.active.remove(&(from, flow.clone()));
        self.active.insert((to, flow.clone()));
        self.tags.insert(flow.clone(), (to, Activity::Active));
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

        fn serve_some(&mut self, count: usize) {
            for _ in 0..count {
                self.serve();
            }
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
        channel.serve_some(1000);
        (0..1000).for_each(|_| channel.push(1, 100));
        channel.serve_some(200);
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
    fn flow_that_is_served_by_other_means_pays_with_its_next_requests() {
        let mut channel = Channel::new(&[1, 1]);
        (0..100).for_each(|_| channel.push(0, 100));
        assert!(channel.order.may_precede(&1), "it has had nothing");
        channel.order.charge(&1, 1000);
        assert!(!channel.order.may_precede(&1) && channel.order.may_precede(&0));
        channel.serve_some(9);
        assert!(!channel.order.may_precede(&1));
        channel.push(1, 100);
        channel.serve_some(2);
        assert_eq!((channel.served(0), channel.served(1)), (1100, 0));
        channel.serve();
        assert_eq!(channel.served(1), 100);
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

    #[test]
    fn idle_flows_are_forgotten() {
        let mut order = FairOrder::new(Weights::default());
        order.activate(&0);
        for flow in 1..10_000_u32 {
            order.activate(&flow);
            for _ in 0..2 {
                let next = *order.first().expect("two are active");
                order.charge(&next, 4096);
            }
            order.deactivate(&flow);
            assert!(order.tags.len() <= 2 * FLOWS_MIN, "{} flows", order.tags.len());
        }
        order.deactivate(&0);
        assert!(order.tags.is_empty());
    }

    #[test]
    fn idle_flows_that_owe_something_are_forgotten_if_they_are_many() {
        let mut order = FairOrder::new(Weights::default());
        // The first flow is never served, so each other one owes its request.
        order.activate(&0);
        for flow in 1..8 * IDLE_MAX as u32 {
            order.activate(&flow);
            order.charge(&flow, 4096);
            order.deactivate(&flow);
            assert!(order.tags.len() <= 2 * (IDLE_MAX + 1), "{} flows", order.tags.len());
        }
        for flow in 1..8 * IDLE_MAX as u32 {
            order.charge(&flow, 4096);
            assert!(order.tags.len() <= 2 * (IDLE_MAX + 1), "{} flows", order.tags.len());
        }
        assert_eq!(order.first(), Some(&0), "active flows remain");
    }

    #[test]
    fn flow_that_was_passed_over_keeps_a_lead_of_one_request() {
        let mut order = FairOrder::new([(1, 2)].into_iter().collect());
        [0, 1, 2].iter().for_each(|flow| order.activate(flow));
        for _ in 0..1000 {
            // The first flow cannot start its request, and the others alternate.
            let next = *order.iter().find(|flow| **flow != 0).expect("two others");
            order.pass_over(&0, 100, &next);
            order.charge(&next, 100);
        }
        let mut services = 0;
        while order.first() == Some(&0) {
            order.charge(&0, 100);
            services += 1;
        }
        assert!((1..=2).contains(&services), "{services} services in a row");
        order.activate(&3);
        let lead = order.tag(&2).abs_diff(order.tag(&3));
        assert!(lead <= 2 * 100 * SCALE, "a new flow starts with the others: {lead}");
    }

    #[test]
    fn flow_that_is_served_out_of_turn_does_not_delay_new_flows() {
        let mut order = FairOrder::new(Weights::default());
        [0, 1].iter().for_each(|flow| order.activate(flow));
        (0..1024).for_each(|_| order.charge(&1, 1 << 20));
        order.activate(&2);
        order.charge(&0, 4096);
        assert_eq!(order.first(), Some(&2), "it does not wait for 1 GiB of the first flow");
    }

    /// Largest request of the random tests.
    const LARGEST: u64 = 64 * 4096;

    proptest! {
        #[test]
        fn flows_that_always_wait_get_their_shares_up_to_a_request_of_each_other(
            weights in prop::collection::vec(1..=16_u32, 2..6),
            sizes in prop::collection::vec(1..=64_u64, 64),
        ) {
            let mut channel = Channel::new(&weights);
            let flows = weights.len() as u32;
            let sum = u64::from(weights.iter().sum::<u32>());
            let mut sizes = sizes.into_iter().map(|size| size * 4096).cycle();
            for flow in 0..flows {
                (0..2).for_each(|_| channel.push(flow, sizes.next().expect("endless")));
            }
            for _ in 0..5_000 {
                let (flow, _) = channel.serve().expect("all wait");
                channel.push(flow, sizes.next().expect("endless"));
                let all: u64 = channel.served.values().sum();
                let shared = all.saturating_sub(LARGEST * u64::from(flows - 1));
                for (flow, weight) in (0..).zip(&weights) {
                    // Divisions by weights round down.
                    let served = channel.served(flow) + 1;
                    prop_assert!(served * sum >= shared * u64::from(*weight), "{flow}: {served} of {all}");
                }
            }
        }

        #[test]
        fn random_arrivals_are_all_served_and_no_flow_starves(
            weights in prop::collection::vec(1..=8_u32, 2..6),
            arrivals in prop::collection::vec((0..6_u32, 1..=64_u64, 0..4_usize), 1..400),
        ) {
            let mut channel = Channel::new(&weights);
            let flows = weights.len() as u32;
            // Bytes of the second flow since the first one was served or began to wait.
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
                        let [own, of_flow] = [other, flow].map(|flow| u64::from(weights[flow as usize]));
                        let bound = LARGEST + LARGEST * of_flow / own + 1;
                        prop_assert!(*since <= bound, "{other} waits for {since} bytes of {flow}");
                    }
                }
            }
            while channel.serve().is_some() {}
            prop_assert_eq!(channel.waiting(), 0);
        }
    }
}
