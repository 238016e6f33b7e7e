//! Which nodes give blocks to which, because some pools are fuller than others.
//!
//! The fullest gives to the emptiest, the second fullest to the second emptiest, and so on while the two are
//! [`DEAD_BAND_PERMILLE`] apart: each node gives or takes once a round. What moves is half the difference, so neither
//! comes out on the other's side, and at most what a node's bandwidth moves in ten seconds. What a round says holds until the
//! next: whoever has given half of it is told the rest then.
//!
//! Only active nodes take part: a cordoned one is chosen for nothing, a draining one gives to whom it can anyway.
//!
//! Pure. Who decides (one member) and when is the caller's.

use reprise_policy::{NodeId, NodeMode};

/// Nodes whose pools are less apart than this part of a thousand are left alone.
pub const DEAD_BAND_PERMILLE: u64 = 100;
/// Bytes of one move: ten seconds of an agent's bandwidth as it comes (256 MiB/s). An agent with less takes longer.
pub const MOVE_BYTES_MAX: u64 = 10 * (256 << 20);

/// How full a living node's pool is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Which.
    pub node: NodeId,
    /// What it is for.
    pub mode: NodeMode,
    /// Of its pool, in bytes.
    pub capacity: u64,
    /// Of that in use, and on its way there.
    pub used: u64,
}

/// So many bytes of blocks are to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Who gives.
    pub from: NodeId,
    /// Who takes.
    pub to: NodeId,
    /// How much.
    pub bytes: u64,
}

impl Fill {
    fn permille(&self) -> u64 {
        let part = u128::from(self.used.min(self.capacity)) * 1000;
        u64::try_from(part / u128::from(self.capacity.max(1))).expect("at most a thousand")
    }
}

/// The moves of a round, by how far apart the two are.
pub fn moves(fills: &[Fill]) -> Vec<Move> {
    let takes_part = |fill: &&Fill| fill.mode == NodeMode::Active && fill.capacity > 0;
    let mut fills: Vec<&Fill> = fills.iter().filter(takes_part).collect();
    fills.sort_unstable_by_key(|fill| (fill.permille(), fill.node));
    let pairs = fills.iter().rev().zip(&fills).take(fills.len() / 2);
    pairs
        .take_while(|(full, empty)| full.permille() - empty.permille() >= DEAD_BAND_PERMILLE)
        .map(|(full, empty)| Move { from: full.node, to: empty.node, bytes: half(full, empty) })
        .collect()
}

/// What makes both equally full: x with (u₁ − x) / c₁ = (u₂ + x) / c₂, half the difference for equal capacities.
fn half(full: &Fill, empty: &Fill) -> u64 {
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

    fn fill(node: u16, used: u64) -> Fill {
        Fill { node: NodeId(node), mode: NodeMode::Active, capacity: 100 * GIB, used: used * GIB }
    }

    #[test]
    fn the_fullest_gives_half_the_difference_to_the_emptiest_and_those_in_between_to_each_other() {
        let told = moves(&[fill(1, 50), fill(2, 11), fill(3, 16), fill(4, 14)]);
        assert_eq!(told, [Move { from: NodeId(1), to: NodeId(2), bytes: MOVE_BYTES_MAX }]);
        let told = moves(&[fill(1, 50), fill(2, 12), fill(3, 40), fill(4, 14)]);
        let pairs: Vec<_> = told.iter().map(|told| (told.from.0, told.to.0)).collect();
        assert_eq!(pairs, [(1, 2), (3, 4)]);
        let small = |node, used| Fill { capacity: 1000, used, ..fill(node, 0) };
        assert_eq!(moves(&[small(1, 500), small(2, 100)])[0].bytes, 200);
        let half_as_large = Fill { capacity: 500, ..small(2, 0) };
        assert_eq!(moves(&[small(1, 300), half_as_large])[0].bytes, 100, "200 of 1,000 and 100 of 500 then");
    }

    #[test]
    fn nodes_that_are_not_far_apart_are_left_alone() {
        assert_eq!(moves(&[fill(1, 59), fill(2, 50)]), []);
        assert_eq!(moves(&[fill(1, 59)]), []);
        assert_eq!(moves(&[]), []);
        let none = Fill { capacity: 0, ..fill(2, 0) };
        assert_eq!(moves(&[fill(1, 59), none]), [], "a node without a pool takes nothing");
    }

    #[test]
    fn cordoned_and_draining_nodes_neither_take_nor_give() {
        for mode in [NodeMode::Cordoned, NodeMode::Draining] {
            assert_eq!(moves(&[fill(1, 90), Fill { mode, ..fill(2, 0) }]), []);
            assert_eq!(moves(&[Fill { mode, ..fill(1, 90) }, fill(2, 0)]), []);
        }
    }

    proptest! {
        /// Every round done in whole: nobody overtakes whom it gives to, nobody gives what it has just got, and it ends.
        #[test]
        fn moves_converge_and_never_go_back(
            nodes in prop::collection::vec((1u64..4, 0u64..1000), 2..12),
        ) {
            let mut fills: Vec<Fill> = (1..).zip(&nodes).map(|(node, (capacity, used))| Fill {
                capacity: capacity * GIB,
                used: capacity * GIB / 1000 * used,
                ..fill(node, 0)
            }).collect();
            let total: u64 = fills.iter().map(|fill| fill.used).sum();
            let mut rounds = 0;
            loop {
                let told = moves(&fills);
                if told.is_empty() {
                    break;
                }
                let mut busy: Vec<NodeId> = told.iter().flat_map(|told| [told.from, told.to]).collect();
                busy.sort_unstable();
                prop_assert!(busy.windows(2).all(|pair| pair[0] != pair[1]), "once a round: {told:?}");
                for told in &told {
                    let place = |node: NodeId| usize::from(node.0) - 1;
                    fills[place(told.from)].used -= told.bytes;
                    fills[place(told.to)].used += told.bytes;
                    let (full, empty) = (fills[place(told.from)], fills[place(told.to)]);
                    prop_assert!(told.bytes > 0 && full.permille() + 1 >= empty.permille(), "{told:?}");
                }
                rounds += 1;
                prop_assert!(rounds < 200, "{fills:?}");
            }
            prop_assert_eq!(fills.iter().map(|fill| fill.used).sum::<u64>(), total);
            let apart = |of: fn(std::slice::Iter<'_, Fill>) -> Option<&Fill>| of(fills.iter()).map(Fill::permille);
            let highest = apart(|fills| fills.max_by_key(|fill| fill.permille()));
            let lowest = apart(|fills| fills.min_by_key(|fill| fill.permille()));
            prop_assert!(highest < lowest.map(|lowest| lowest + DEAD_BAND_PERMILLE));
        }
    }
}
