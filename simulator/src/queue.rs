//! The queue of scheduled actions: by time, and by insertion order for equal times.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use reprise_policy::Tick;

/// A queue of actions; see the module.
#[derive(Debug)]
pub(crate) struct Queue<A> {
    /// Time, insertion order, and index of the action.
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

    /// Moves actions to other times; those of equal time keep their order.
    pub(crate) fn advance(&mut self, when: impl Fn(Tick, &A) -> Tick) {
        let order = std::mem::take(&mut self.order);
        let moved = order.into_iter().map(|Reverse((at, number, place))| {
            let action = self.actions[place].as_ref().expect("every place in the order has its action");
            Reverse((when(at, action), number, place))
        });
        self.order = moved.collect();
    }

    /// Removes the next action that is due by `until`.
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
    fn actions_of_equal_time_run_in_insertion_order() {
        let mut queue = Queue::new();
        for (at, name) in [(5, "c"), (3, "a"), (5, "d"), (3, "b"), (9, "e")] {
            queue.push(Tick(at), name);
        }
        let taken: Vec<_> = std::iter::from_fn(|| queue.pop(Tick(8))).collect();
        assert_eq!(taken, [(Tick(3), "a"), (Tick(3), "b"), (Tick(5), "c"), (Tick(5), "d")]);
        assert_eq!(queue.pop(Tick(9)), Some((Tick(9), "e")));
    }
}
