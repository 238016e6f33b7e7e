//! Rebalancing of pools: which nodes move blocks to which.
//!
//! The fullest node moves blocks to the emptiest, the second fullest to the second emptiest, and so on, while
//! the two differ by at least [`DEAD_BAND_PERMILLE`]. So each node takes part once per round. A move is half
//! of the difference, which cannot overshoot, and at most what a node's bandwidth moves in ten seconds. Moves
//! are valid until the next round, which plans the remainder.
//!
//! Only active nodes take part: cordoned nodes receive nothing, and draining nodes move their blocks by
//! themselves.
//!
//! Pure: the caller decides when to plan, and on which member.

use reprise_policy::{NodeId, NodeMode};

/// Smallest difference in fill level, in thousandths, for which blocks are moved.
pub const DEAD_BAND_PERMILLE: u64 = 100;
/// Maximum bytes of a move: ten seconds of an agent's default bandwidth (256 MiB/s). With less bandwidth it
/// takes longer.
pub const MOVE_BYTES_MAX: u64 = 10 * (256 << 20);

/// Fill level of a live node's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolFill {
    /// Node of the pool.
    pub node: NodeId,
    /// Mode of the node.
    pub mode: NodeMode,
    /// Capacity of the pool, in bytes.
    pub capacity: u64,
    /// Bytes in use or on the way to the node.
    pub used: u64,
}

/// A planned move of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Node that sends blocks.
    pub from: NodeId,
    /// Node that receives blocks.
    pub to: NodeId,
    /// Amount to move.
    pub bytes: u64,
}

impl PoolFill {
    fn permille(&self) -> u64 {
        let part = u128::from(self.used.min(self.capacity)) * 1000;
        u64::try_from(part / u128::from(self.capacity.max(1))).expect("at most a thousand")
    }
}

/// Plans the moves of a round, largest difference first.
pub fn moves(fills: &[PoolFill]) -> Vec<Move> {
    let takes_part = |fill: &&PoolFill| fill.mode == NodeMode::Active && fill.capacity > 0;
    let mut fills: Vec<&PoolFill> = fills.iter().filter(takes_part).collect();
    fills.sort_unstable_by_key(|fill| (fill.permille(), fill.node));
    let pairs = fills.iter().rev().zip(&fills).take(fills.len() / 2);
    pairs
        .take_while(|(full, empty)| full.permille() - empty.permille() >= DEAD_BAND_PERMILLE)
        .map(|(full, empty)| Move { from: full.node, to: empty.node, bytes: half(full, empty) })
        .collect()
}

/// Bytes that make both equally full: x with (u₁ − x) / c₁ = (u₂ + x) / c₂, half the difference for equal
/// capacities.
fn half(full: &PoolFill, empty: &PoolFill) -> u64 {
    let (of_full, of_empty) = (u128::from(full.capacity), u128::from(empty.capacity));
    let above = (u128::from(full.used.min(full.capacity)) * of_empty)
        .saturating_sub(u128::from(empty.used.min(empty.capacity)) * of_full);
    u64::try_from(above / (of_full + of_empty)).unwrap_or(u64::MAX).min(MOVE_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn fill(node: u16, used: u64) -> PoolFill {
        PoolFill { node: NodeId(node), mode: NodeMode::Active, capacity: 100 * GIB, used: used * GIB }
    }

    #[test]
    fn pairs_fullest_with_emptiest_and_moves_half_of_the_difference() {
        let planned = moves(&[fill(1, 50), fill(2, 11), fill(3, 16), fill(4, 14)]);
        assert_eq!(planned, [Move { from: NodeId(1), to: NodeId(2), bytes: MOVE_BYTES_MAX }]);
        let planned = moves(&[fill(1, 50), fill(2, 12), fill(3, 40), fill(4, 14)]);
        let pairs: Vec<_> = planned.iter().map(|planned| (planned.from.0, planned.to.0)).collect();
        assert_eq!(pairs, [(1, 2), (3, 4)]);
        let small = |node, used| PoolFill { capacity: 1000, used, ..fill(node, 0) };
        assert_eq!(moves(&[small(1, 500), small(2, 100)])[0].bytes, 200);
        let half_as_large = PoolFill { capacity: 500, ..small(2, 0) };
        assert_eq!(
            moves(&[small(1, 300), half_as_large])[0].bytes,
            100,
            "afterwards 200 of 1,000 and 100 of 500"
        );
    }

    #[test]
    fn makes_no_moves_within_the_dead_band() {
        assert_eq!(moves(&[fill(1, 59), fill(2, 50)]), []);
        assert_eq!(moves(&[fill(1, 59)]), []);
        assert_eq!(moves(&[]), []);
        let none = PoolFill { capacity: 0, ..fill(2, 0) };
        assert_eq!(moves(&[fill(1, 59), none]), [], "a node without a pool receives nothing");
    }

    #[test]
    fn cordoned_and_draining_nodes_do_not_take_part() {
        for mode in [NodeMode::Cordoned, NodeMode::Draining] {
            assert_eq!(moves(&[fill(1, 90), PoolFill { mode, ..fill(2, 0) }]), []);
            assert_eq!(moves(&[PoolFill { mode, ..fill(1, 90) }, fill(2, 0)]), []);
        }
    }

    proptest! {
        /// Executes every round completely: no node overshoots, none sends blocks that it just received, and
        /// rounds end.
        #[test]
        fn moves_converge_and_are_never_reversed(
            nodes in prop::collection::vec((1u64..4, 0u64..1000), 2..12),
        ) {
            let mut fills: Vec<PoolFill> = (1..).zip(&nodes).map(|(node, (capacity, used))| PoolFill {
                capacity: capacity * GIB,
                used: capacity * GIB / 1000 * used,
                ..fill(node, 0)
            }).collect();
            let total: u64 = fills.iter().map(|fill| fill.used).sum();
            let mut rounds = 0;
            loop {
                let planned = moves(&fills);
                if planned.is_empty() {
                    break;
                }
                let mut busy: Vec<NodeId> = planned.iter().flat_map(|planned| [planned.from, planned.to]).collect();
                busy.sort_unstable();
                prop_assert!(busy.windows(2).all(|pair| pair[0] != pair[1]), "once per round: {planned:?}");
                for planned in &planned {
                    let place = |node: NodeId| usize::from(node.0) - 1;
                    fills[place(planned.from)].used -= planned.bytes;
                    fills[place(planned.to)].used += planned.bytes;
                    let (full, empty) = (fills[place(planned.from)], fills[place(planned.to)]);
                    prop_assert!(planned.bytes > 0 && full.permille() + 1 >= empty.permille(), "{planned:?}");
                }
                rounds += 1;
                prop_assert!(rounds < 200, "{fills:?}");
            }
            prop_assert_eq!(fills.iter().map(|fill| fill.used).sum::<u64>(), total);
            let apart = |of: fn(std::slice::Iter<'_, PoolFill>) -> Option<&PoolFill>| of(fills.iter()).map(PoolFill::permille);
            let highest = apart(|fills| fills.max_by_key(|fill| fill.permille()));
            let lowest = apart(|fills| fills.min_by_key(|fill| fill.permille()));
            prop_assert!(highest < lowest.map(|lowest| lowest + DEAD_BAND_PERMILLE));
        }
    }
}
