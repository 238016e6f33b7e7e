//! What is to happen when: a queue by time, and among equal times in the order in which it was put in.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use reprise_policy::Tick;

/// See the module.
#[derive(Debug)]
pub(crate) struct Queue<A> {
    /// When, in which order, and the place of the action.
    order: BinaryHeap<Reverse<(Tick, u64, usize)>>,
    /// Actions do not move while they wait.
    actions: Vec<Option<A>>,
    vacant: Vec<usize>,
    next: u64,
}

impl<A> Queue<A> {
    pub(crate) fn new() -> Queue<A> {
        Queue { order: BinaryHeap::new(), actions: Vec::new(), vacant: Vec::new(), next: 0 }
    }

    pub(crate) fn push(&mut self, at: Tick, action: A) {
        let place = self.vacant.pop().unwrap_or_else(|| {
            self.actions.push(None);
            self.actions.len() - 1
        });
        self.actions[place] = Some(action);
        self.order.push(Reverse((at, self.next, place)));
        self.next += 1;
    }

    /// Has actions happen at other times; those of one time keep their order.
    pub(crate) fn advance(&mut self, when: impl Fn(Tick, &A) -> Tick) {
        let order = std::mem::take(&mut self.order);
        let moved = order.into_iter().map(|Reverse((at, number, place))| {
            let action = self.actions[place].as_ref().expect("every place in the order has its action");
            Reverse((when(at, action), number, place))
        });
        self.order = moved.collect();
    }

    /// The next action that is due by `until`.
    pub(crate) fn pop(&mut self, until: Tick) -> Option<(Tick, A)> {
        let Reverse((at, ..)) = *self.order.peek()?;
        if at > until {
            return None;
        }
        let Reverse((at, _, place)) = self.order.pop()?;
        self.vacant.push(place);
        Some((at, self.actions[place].take().expect("every place in the order has its action")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_due_at_one_instant_happens_in_the_order_of_its_arrival() {
        let mut queue = Queue::new();
        for (at, name) in [(5, "c"), (3, "a"), (5, "d"), (3, "b"), (9, "e")] {
            queue.push(Tick(at), name);
        }
        let taken: Vec<_> = std::iter::from_fn(|| queue.pop(Tick(8))).collect();
        assert_eq!(taken, [(Tick(3), "a"), (Tick(3), "b"), (Tick(5), "c"), (Tick(5), "d")]);
        assert_eq!(queue.pop(Tick(9)), Some((Tick(9), "e")));
    }
}
