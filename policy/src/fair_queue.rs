//! Requests of several flows (tenants), served in weighted fair shares and in order within a flow.

use std::collections::{BTreeMap, VecDeque};

use crate::fair_order::{FairOrder, Weights};

/// Queue of requests; [`FairOrder`] selects the flow.
#[derive(Clone, Debug)]
pub struct FairQueue<K: Ord, T> {
    order: FairOrder<K>,
    flows: BTreeMap<K, VecDeque<T>>,
    len: usize,
}

impl<K: Ord + Clone, T> FairQueue<K, T> {
    /// Creates an empty queue.
    pub fn new(weights: Weights<K>) -> FairQueue<K, T> {
        FairQueue { order: FairOrder::new(weights), flows: BTreeMap::new(), len: 0 }
    }

    /// Appends a request of a flow.
    pub fn push(&mut self, flow: &K, request: T) {
        self.flows.entry(flow.clone()).or_default().push_back(request);
        self.order.activate(flow);
        self.len += 1;
    }

    /// Returns the request that is served next.
    pub fn front(&self) -> Option<&T> {
        self.flows.get(self.order.first()?)?.front()
    }

    /// Returns the request that is served next.
    pub fn front_mut(&mut self) -> Option<&mut T> {
        self.flows.get_mut(self.order.first()?)?.front_mut()
    }

    /// Charges the flow of the next request for a part of it that was served. Another flow may be next then.
    pub fn charge(&mut self, bytes: u64) {
        if let Some(flow) = self.order.first().cloned() {
            self.order.charge(&flow, bytes);
        }
    }

    /// Iterates the first request of each flow, in the order of service.
    pub fn fronts(&self) -> impl Iterator<Item = (&K, &T)> {
        self.order.iter().filter_map(|flow| Some((flow, self.flows.get(flow)?.front()?)))
    }

    /// Removes the next request, whose service has this size.
    pub fn pop(&mut self, bytes: impl FnOnce(&T) -> u64) -> Option<T> {
        let flow = self.order.first()?.clone();
        let bytes = bytes(self.flows.get(&flow)?.front()?);
        self.pop_of(&flow, bytes)
    }

    /// Removes the first request of a flow, whose service has this size.
    pub fn pop_of(&mut self, flow: &K, bytes: u64) -> Option<T> {
        let requests = self.flows.get_mut(flow)?;
        let request = requests.pop_front()?;
        let is_last = requests.is_empty();
        self.order.charge(flow, bytes);
        if is_last {
            self.flows.remove(flow);
            self.order.deactivate(flow);
        }
        self.len -= 1;
        Some(request)
    }

    /// Records that the flows before this one are passed over, because their first requests, which have these sizes,
    /// cannot start now. The removal of its request must follow.
    pub fn pass_over_until(&mut self, served: &K, bytes: impl Fn(&T) -> u64) {
        let before = self.fronts().take_while(|(flow, _)| *flow != served);
        let before: Vec<(K, u64)> = before.map(|(flow, request)| (flow.clone(), bytes(request))).collect();
        for (flow, bytes) in before {
            self.order.pass_over(&flow, bytes, served);
        }
    }

    /// Removes the requests for which `keep` is false.
    pub fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        for (flow, requests) in &mut self.flows {
            requests.retain(&mut keep);
            if requests.is_empty() {
                self.order.deactivate(flow);
            }
        }
        self.flows.retain(|_, requests| !requests.is_empty());
        self.len = self.flows.values().map(VecDeque::len).sum();
    }

    /// Number of requests of all flows.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no request.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serves_flows_by_weight_and_requests_in_order() {
        let mut queue = FairQueue::new([("a", 3), ("b", 1)].into_iter().collect());
        (0..6).for_each(|number| queue.push(&"a", ("a", number)));
        (0..6).for_each(|number| queue.push(&"b", ("b", number)));
        let served: Vec<_> = std::iter::from_fn(|| queue.pop(|_| 10)).collect();
        let first = &served[..8];
        assert_eq!(first.iter().filter(|(flow, _)| *flow == "a").count(), 6);
        for flow in ["a", "b"] {
            let numbers: Vec<_> =
                served.iter().filter(|(of, _)| *of == flow).map(|(_, number)| *number).collect();
            assert_eq!(numbers, [0, 1, 2, 3, 4, 5]);
        }
        assert!(queue.is_empty() && queue.front().is_none());
    }

    #[test]
    fn flow_that_is_served_out_of_turn_pays_for_it() {
        let mut queue = FairQueue::new(Weights::default());
        for request in [("a", 1), ("a", 2), ("b", 3), ("b", 4)] {
            queue.push(&request.0, request);
        }
        assert_eq!(queue.fronts().collect::<Vec<_>>(), [(&"a", &("a", 1)), (&"b", &("b", 3))]);
        assert_eq!(queue.pop_of(&"b", 10), Some(("b", 3)));
        let rest: Vec<_> = std::iter::from_fn(|| queue.pop(|_| 8)).map(|(_, number)| number).collect();
        assert_eq!(rest, [1, 2, 4]);
    }

    #[test]
    fn flow_that_was_passed_over_does_not_catch_up() {
        let mut queue = FairQueue::new(Weights::default());
        (0..100).for_each(|number| queue.push(&"a", ("a", number)));
        (0..100).for_each(|number| queue.push(&"b", ("b", number)));
        for _ in 0..50 {
            queue.pass_over_until(&"b", |_| 10);
            assert!(queue.pop_of(&"b", 10).is_some());
        }
        let next: Vec<_> = std::iter::from_fn(|| queue.pop(|_| 10)).take(10).collect();
        let of_a = next.iter().filter(|(flow, _)| *flow == "a").count();
        assert!((5..=6).contains(&of_a), "{next:?}");
    }

    #[test]
    fn request_that_is_served_in_parts_keeps_its_place_in_the_flow() {
        let mut queue = FairQueue::new(Weights::default());
        for request in [("a", 1), ("a", 2), ("b", 3)] {
            queue.push(&request.0, request);
        }
        assert_eq!(queue.front(), Some(&("a", 1)));
        queue.charge(100);
        assert_eq!(queue.pop(|_| 150), Some(("b", 3)));
        assert_eq!(queue.pop(|_| 1), Some(("a", 1)));
        queue.retain(|(_, number)| *number != 2);
        assert_eq!((queue.len(), queue.pop(|_| 1)), (0, None));
    }
}
