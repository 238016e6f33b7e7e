//! Which nodes know most of a prompt: its chain of keys against what is known of each key's replicas.
//!
//! A node is worth the leading run of keys that it holds; it gets the rest from others as far as the whole cluster's run
//! goes. What is known may have gaps:
//! * [`Known::Crowded`]: the directory names a few of many holders. Whoever holds later keys of the chain holds such a
//!   key as well, as far as can be told.
//! * [`Known::Nothing`]: nobody has answered for the key. It ends no node's run, and is not counted at its end: a node
//!   needs no directory for what it has. It ends the run of the cluster, since nobody else would find it.
//!
//! Cost: a *step* for each replica and each node whose run still goes on, for each key, of 2 ns: where 8,192 keys are
//! held by all of 1,000 nodes they are 8 million steps, 17 ms. [`Ranker::pass`] takes as many steps as whoever shares
//! a thread with others allows; only the end, a sort of the nodes (0.1 ms for 1,000), goes in one.

use std::cmp::Reverse;
use std::ops::ControlFlow;

use crate::ids::NodeId;
use crate::key::BlockKey;
use crate::tier::Tier;

use super::{LoadHint, preference};

/// What is known of one key of the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known<'a> {
    /// All its replicas; a node that has it in both tiers is named twice.
    Replicas(&'a [(NodeId, Tier)]),
    /// Some of more replicas than are named.
    Crowded(&'a [(NodeId, Tier)]),
    /// Nobody has answered.
    Nothing,
}

/// A node that holds the first key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankedNode {
    /// Which.
    pub node: NodeId,
    /// Leading keys that it holds.
    pub run: u32,
    /// Leading keys that it holds in DRAM.
    pub dram_run: u32,
    /// Bytes wanted of it.
    pub load: LoadHint,
}

/// The nodes of a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranking {
    /// The longest run first; of equal ones more in DRAM, then less to do, then by the hash of key and node.
    pub nodes: Vec<RankedNode>,
    /// Leading keys that some node holds.
    pub cluster_run: u32,
}

/// A node whose run goes on.
#[derive(Clone, Copy, Debug)]
struct Runner {
    node: NodeId,
    run: u32,
    dram_run: u32,
    /// Whether all of its run is in DRAM so far.
    in_dram: bool,
}

/// What a key says of a node.
#[derive(Clone, Copy, Debug)]
enum Says {
    HasIt(Tier),
    HasItNot,
    MayHaveIt,
}

/// What the key at hand says of nodes, by number.
#[derive(Debug, Default)]
struct Marks {
    /// Number of the key, from 1, that named the node last, and the one that named it in DRAM.
    named: Vec<(u32, u32)>,
}

/// Ranks the nodes for a chain of keys, a part of it at a time.
#[derive(Debug)]
pub struct Ranker {
    running: Vec<Runner>,
    ended: Vec<Runner>,
    marks: Marks,
    /// A node that no key has named: it may come in while no key speaks against it.
    unnamed: Option<Runner>,
    /// Keys so far.
    length: u32,
    /// Once it has ended.
    cluster_run: Option<u32>,
}

impl Default for Ranker {
    fn default() -> Ranker {
        Ranker {
            running: Vec::new(),
            ended: Vec::new(),
            marks: Marks::default(),
            unnamed: Some(Runner { node: NodeId(0), run: 0, dram_run: 0, in_dram: true }),
            length: 0,
            cluster_run: None,
        }
    }
}

impl Ranker {
    /// Goes on with the chain for so many steps, or one key more than they allow; `Break` when nothing further of it matters.
    pub fn pass<'a>(&mut self, chain: &mut impl Iterator<Item = Known<'a>>, steps: usize) -> ControlFlow<()> {
        let mut left = steps;
        while left > 0 {
            let Some(known) = chain.next() else { return ControlFlow::Break(()) };
            left = left.saturating_sub(self.next(known));
            if self.running.is_empty() && self.unnamed.is_none() && self.cluster_run.is_some() {
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }

    /// Takes the next key; how many steps that took.
    fn next(&mut self, known: Known<'_>) -> usize {
        let (names, of_others) = match known {
            Known::Replicas(replicas) => (replicas, Says::HasItNot),
            Known::Crowded(replicas) => (replicas, Says::of_unnamed(replicas)),
            Known::Nothing => (&[][..], Says::MayHaveIt),
        };
        if names.is_empty() && self.cluster_run.is_none() {
            self.cluster_run = Some(self.length);
        }
        self.length += 1;
        let (length, marks, ended, unnamed) = (self.length, &mut self.marks, &mut self.ended, self.unnamed);
        for (node, tier) in names {
            let first = marks.mark(length, *node, *tier);
            self.running.extend(unnamed.filter(|_| first).map(|unnamed| Runner { node: *node, ..unnamed }));
        }
        let steps = 1 + names.len() + self.running.len();
        self.running.retain_mut(|runner: &mut Runner| {
            let goes_on = runner.pass(length, marks.of(runner.node, length).unwrap_or(of_others));
            if !goes_on {
                ended.push(*runner);
            }
            goes_on
        });
        self.unnamed = unnamed.and_then(|mut unnamed| unnamed.pass(length, of_others).then_some(unnamed));
        steps
    }

    /// The ranking for the keys so far, of which this was the first.
    pub fn finish(mut self, first: &BlockKey, load: impl Fn(NodeId) -> LoadHint) -> Ranking {
        let cluster_run = self.cluster_run.unwrap_or(self.length);
        self.ended.append(&mut self.running);
        let ranked = |runner: Runner| RankedNode {
            node: runner.node,
            run: runner.run,
            dram_run: runner.dram_run,
            load: load(runner.node),
        };
        let mut nodes: Vec<RankedNode> = self.ended.into_iter().map(ranked).collect();
        nodes.sort_by_cached_key(|node| {
            let hash = preference(first, node.node);
            (Reverse((node.run, node.dram_run)), node.load.class(), hash, node.node)
        });
        Ranking { nodes, cluster_run }
    }
}

impl Marks {
    /// The key of this number names the node; whether none has before.
    fn mark(&mut self, number: u32, node: NodeId, tier: Tier) -> bool {
        let at = usize::from(node.0);
        if self.named.len() <= at {
            self.named.resize(at + 1, (0, 0));
        }
        let first = self.named[at].0 == 0;
        self.named[at].0 = number;
        if tier == Tier::Dram {
            self.named[at].1 = number;
        }
        first
    }

    /// What the key of this number says of a node by name.
    fn of(&self, node: NodeId, number: u32) -> Option<Says> {
        let (named, in_dram) = self.named.get(usize::from(node.0))?;
        let tier = if *in_dram == number { Tier::Dram } else { Tier::Nvme };
        (*named == number).then_some(Says::HasIt(tier))
    }
}

impl Says {
    /// What a key that many hold says of those that it does not name: in DRAM when all that are named do, since those are named first.
    fn of_unnamed(named: &[(NodeId, Tier)]) -> Says {
        let all_in_dram = named.iter().all(|(_, tier)| *tier == Tier::Dram);
        Says::HasIt(if all_in_dram { Tier::Dram } else { Tier::Nvme })
    }
}

impl Runner {
    /// The next key, which makes its run so long, says this of it; whether its run goes on.
    fn pass(&mut self, length: u32, says: Says) -> bool {
        match says {
            Says::HasItNot => return false,
            Says::MayHaveIt => return true,
            Says::HasIt(tier) => self.in_dram &= tier == Tier::Dram,
        }
        self.run = length;
        if self.in_dram {
            self.dram_run = length;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const KEY: BlockKey = BlockKey([9; 16]);

    /// A key's replicas as the test keeps them.
    #[derive(Clone, Debug)]
    enum Given {
        Replicas(Vec<(NodeId, Tier)>),
        Crowded(Vec<(NodeId, Tier)>),
        Nothing,
    }

    impl Given {
        fn known(&self) -> Known<'_> {
            match self {
                Given::Replicas(replicas) => Known::Replicas(replicas),
                Given::Crowded(replicas) => Known::Crowded(replicas),
                Given::Nothing => Known::Nothing,
            }
        }

        fn names(&self) -> &[(NodeId, Tier)] {
            match self {
                Given::Replicas(replicas) | Given::Crowded(replicas) => replicas,
                Given::Nothing => &[],
            }
        }

        /// What the key says of a node: that it has it (in DRAM), has it not, or nothing.
        fn says(&self, node: NodeId, tiers: &[Tier]) -> Option<bool> {
            let named = self.names().iter().any(|(of, tier)| *of == node && tiers.contains(tier));
            let elsewhere = self.names().iter().any(|(of, _)| *of == node);
            match self {
                Given::Nothing => None,
                Given::Replicas(_) => Some(named),
                Given::Crowded(_) if named || elsewhere => Some(named),
                Given::Crowded(names) => Some(names.iter().all(|(_, tier)| tiers.contains(tier))),
            }
        }
    }

    /// The definition: keys from the first on of which none says otherwise, up to the last that says so.
    fn run(chain: &[Given], node: NodeId, tiers: &[Tier]) -> u32 {
        let says = chain.iter().map(|key| key.says(node, tiers));
        let leading: Vec<Option<bool>> = says.take_while(|says| *says != Some(false)).collect();
        leading.iter().rposition(|says| *says == Some(true)).map_or(0, |last| last as u32 + 1)
    }

    fn replicas() -> impl Strategy<Value = Vec<(NodeId, Tier)>> {
        let tier = prop::sample::select(vec![Tier::Dram, Tier::Nvme]);
        prop::collection::btree_set((0u16..5, tier), 0..7)
            .prop_map(|set| set.into_iter().map(|(node, tier)| (NodeId(node), tier)).collect())
    }

    fn given() -> impl Strategy<Value = Given> {
        prop_oneof![
            6 => replicas().prop_map(Given::Replicas),
            2 => replicas().prop_filter("crowded keys name somebody", |names| !names.is_empty())
                .prop_map(Given::Crowded),
            1 => Just(Given::Nothing),
        ]
    }

    fn ranked(chain: &[Given]) -> Ranking {
        ranked_by(chain, usize::MAX)
    }

    /// In parts of so many steps.
    fn ranked_by(chain: &[Given], steps: usize) -> Ranking {
        let mut ranker = Ranker::default();
        let mut keys = chain.iter().map(Given::known);
        while ranker.pass(&mut keys, steps).is_continue() {}
        ranker.finish(&KEY, |node| LoadHint(u64::from(node.0 % 2) << 30))
    }

    fn on(nodes: &[u16], tier: Tier) -> Given {
        Given::Replicas(nodes.iter().map(|node| (NodeId(*node), tier)).collect())
    }

    #[test]
    fn the_longest_run_comes_first_and_of_equal_ones_the_one_in_dram_then_the_idle_one() {
        let both = |node: u16| [(NodeId(node), Tier::Dram), (NodeId(node), Tier::Nvme)].to_vec();
        let first = Given::Replicas([both(1), both(2), both(4), vec![(NodeId(6), Tier::Nvme)]].concat());
        let chain = [first, on(&[1, 2, 4, 6], Tier::Nvme), on(&[6], Tier::Nvme)];
        let ranking = ranked(&chain);
        let told: Vec<_> = ranking.nodes.iter().map(|node| (node.node.0, node.run, node.dram_run)).collect();
        assert_eq!(told[0], (6, 3, 0));
        assert_eq!(told[3], (1, 2, 1), "the busy one");
        assert_eq!(ranking.cluster_run, 3);
    }

    #[test]
    fn the_cluster_has_what_no_single_node_has_and_ends_where_nobody_has_a_key() {
        let chain = [on(&[1], Tier::Dram), on(&[2], Tier::Nvme), on(&[3], Tier::Nvme), on(&[], Tier::Nvme)];
        let ranking = ranked(&[&chain[..], &chain[..1]].concat());
        assert_eq!((ranking.nodes.len(), ranking.nodes[0].run, ranking.cluster_run), (1, 1, 3));
        assert_eq!(ranked(&[]), Ranking::default());
        assert_eq!(ranked(&chain[3..]), Ranking::default());
    }

    #[test]
    fn who_holds_the_rest_of_a_prompt_is_found_behind_keys_that_very_many_hold() {
        let crowded = Given::Crowded(vec![(NodeId(1), Tier::Dram), (NodeId(2), Tier::Dram)]);
        let chain = [crowded.clone(), crowded, on(&[4], Tier::Dram), on(&[4], Tier::Nvme)];
        let best = ranked(&chain).nodes[0];
        assert_eq!((best.node.0, best.run, best.dram_run), (4, 4, 3));
    }

    #[test]
    fn a_part_ends_with_the_key_that_uses_up_its_steps_however_many_nodes_hold_the_keys() {
        let nodes: Vec<u16> = (0..1000).collect();
        let chain = vec![on(&nodes, Tier::Dram); 50];
        let mut ranker = Ranker::default();
        let mut keys = chain.iter().map(Given::known);
        // 2,001 steps a key.
        assert_eq!(ranker.pass(&mut keys, 20_000), ControlFlow::Continue(()));
        assert_eq!(keys.len(), 40);
        assert_eq!(ranker.pass(&mut keys, usize::MAX), ControlFlow::Break(()));
    }

    proptest! {
        #[test]
        fn parts_make_no_difference(chain in prop::collection::vec(given(), 0..9), steps in 1usize..20) {
            prop_assert_eq!(ranked_by(&chain, steps), ranked(&chain));
        }

        #[test]
        fn runs_are_those_of_the_definition(chain in prop::collection::vec(given(), 0..9)) {
            let ranking = ranked(&chain);
            let named: BTreeSet<NodeId> =
                chain.iter().flat_map(Given::names).map(|(node, _)| *node).collect();
            let expected: BTreeSet<(NodeId, u32, u32)> = named
                .into_iter()
                .map(|node| {
                    let dram = run(&chain, node, &[Tier::Dram]);
                    (node, run(&chain, node, &[Tier::Dram, Tier::Nvme]), dram)
                })
                .filter(|(node, run, _)| {
                    *run > 0 && chain[..*run as usize].iter().any(|key| key.names().iter().any(|(of, _)| of == node))
                })
                .collect();
            let told = ranking.nodes.iter().map(|node| (node.node, node.run, node.dram_run)).collect();
            prop_assert_eq!(expected, told);
            let order: Vec<_> =
                ranking.nodes.iter().map(|node| (Reverse((node.run, node.dram_run)), node.load)).collect();
            prop_assert!(order.is_sorted(), "{order:?}");
            let held = chain.iter().take_while(|key| !key.names().is_empty()).count();
            prop_assert_eq!(ranking.cluster_run as usize, held);
        }
    }
}
