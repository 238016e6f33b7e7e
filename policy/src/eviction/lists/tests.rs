//! Lists in chunks, compared with plain sequences.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use super::*;

const BLOCKS: u32 = 300;
const QUEUES: u8 = 2;
const GROUP: Group = Group(0);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    Push {
        block: u32,
        queue: u8,
        is_newest: bool,
    },
    /// Adds a chain: each of these blocks before the one that was added last.
    Chain {
        first: u32,
        count: u32,
        queue: u8,
    },
    PushBefore {
        block: u32,
        successor: u32,
    },
    Unlink(u32),
    /// Removes every n-th block of a queue.
    Thin {
        queue: u8,
        share: usize,
    },
}

/// Lists, and the same blocks in sequences.
struct Compared {
    lists: Lists,
    queues: [Vec<u32>; QUEUES as usize],
}

impl Compared {
    fn new() -> Compared {
        let mut lists = Lists::new(usize::from(QUEUES));
        lists.grow_to(EntryIndex(BLOCKS - 1));
        (0..BLOCKS).for_each(|block| lists.set_group(EntryIndex(block), GROUP));
        Compared { lists, queues: Default::default() }
    }

    fn apply(&mut self, call: Call) {
        match call {
            Call::Push { block, queue, is_newest } => self.push(block, queue, is_newest),
            Call::Chain { first, count, queue } => {
                self.push(first, queue, true);
                for block in first + 1..(first + count).min(BLOCKS) {
                    self.push_before(block, block - 1);
                }
            }
            Call::PushBefore { block, successor } => self.push_before(block, successor),
            Call::Unlink(block) => self.unlink(block),
            Call::Thin { queue, share } => {
                let blocks: Vec<u32> =
                    self.queues[usize::from(queue)].iter().copied().step_by(share).collect();
                blocks.into_iter().for_each(|block| self.unlink(block));
            }
        }
    }

    fn push(&mut self, block: u32, queue: u8, is_newest: bool) {
        self.unlink(block);
        self.lists.record_mut(EntryIndex(block)).queue = queue;
        self.lists.push(
            EntryIndex(block),
            ListKind::Queue,
            if is_newest { End::Newest } else { End::Oldest },
        );
        let blocks = &mut self.queues[usize::from(queue)];
        blocks.insert(if is_newest { blocks.len() } else { 0 }, block);
    }

    fn push_before(&mut self, block: u32, successor: u32) {
        self.unlink(block);
        let found = |queue: &mut Vec<u32>| {
            let place = queue.iter().position(|other| *other == successor)?;
            queue.insert(place, block);
            Some(())
        };
        if self.queues.iter_mut().find_map(found).is_some() {
            self.lists.push_before(EntryIndex(block), EntryIndex(successor));
        }
    }

    fn unlink(&mut self, block: u32) {
        self.queues.iter_mut().for_each(|queue| queue.retain(|other| *other != block));
        self.lists.unlink(EntryIndex(block));
    }

    fn check(&self) -> Result<(), String> {
        let all: Vec<u32> = self.queues.concat();
        let listed = |behind| self.lists.iter_from(GROUP, behind).map(|entry| entry.0).collect::<Vec<u32>>();
        if listed(None) != all {
            return Err(format!("{:?} instead of {all:?}", listed(None)));
        }
        let middle = all.len() / 2;
        if all.get(middle).is_some_and(|block| listed(Some(EntryIndex(*block))) != all[middle + 1..]) {
            return Err(format!("another sequence behind place {middle} of {all:?}"));
        }
        for (number, queue) in (0..).zip(&self.queues) {
            let oldest = self.lists.oldest(GROUP, ListKind::Queue, number).map(|entry| entry.0);
            let len = self.lists.queue_len(GROUP, number) as usize;
            let is_occupied = self.lists.occupied(GROUP) >> number & 1 == 1;
            if oldest != queue.first().copied() || len != queue.len() || is_occupied == queue.is_empty() {
                return Err(format!("queue {number}: {oldest:?}, {len} blocks, occupied: {is_occupied}"));
            }
            for pair in queue.windows(2) {
                let newer = self.lists.newer(EntryIndex(pair[0])).map(|entry| entry.0);
                if newer != Some(pair[1]) {
                    return Err(format!("{newer:?} is behind {}, not {}", pair[0], pair[1]));
                }
            }
        }
        Ok(())
    }
}

fn call() -> impl Strategy<Value = Call> {
    let (block, queue) = (|| 0..BLOCKS, || 0..QUEUES);
    prop_oneof![
        3 => (block(), queue(), any::<bool>())
            .prop_map(|(block, queue, is_newest)| Call::Push { block, queue, is_newest }),
        3 => (block(), 1..60u32, queue()).prop_map(|(first, count, queue)| Call::Chain { first, count, queue }),
        3 => (block(), block()).prop_map(|(block, successor)| Call::PushBefore { block, successor }),
        3 => block().prop_map(Call::Unlink),
        1 => (queue(), 2..5usize).prop_map(|(queue, share)| Call::Thin { queue, share }),
    ]
}

#[test]
fn lists_in_chunks_have_the_order_of_sequences() {
    let config = Config { cases: 100, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let calls = prop::collection::vec(call(), 0..200);
    let outcome = TestRunner::new_with_rng(config, rng).run(&calls, |calls| {
        let mut compared = Compared::new();
        for call in calls {
            compared.apply(call);
            compared.check().map_err(TestCaseError::fail)?;
        }
        Ok(())
    });
    assert_eq!(outcome, Ok(()));
}

#[test]
fn chains_fill_chunks_and_a_thinned_list_needs_fewer_of_them() {
    let mut compared = Compared::new();
    for first in (0..BLOCKS).step_by(50) {
        compared.apply(Call::Chain { first, count: 50, queue: 0 });
    }
    let chunks = compared.lists.chunks.bytes() / size_of::<Chunk>();
    assert!(chunks <= 30, "{chunks} chunks for 300 blocks, of at least 22");
    for _ in 0..4 {
        compared.apply(Call::Thin { queue: 0, share: 2 });
    }
    let mut chunk = compared.lists.lists[0].ends.oldest;
    let mut used = 0;
    while chunk != NIL {
        used += 1;
        chunk = compared.lists.chunks.get(chunk).newer;
    }
    assert!(used <= 4, "{used} chunks for {} blocks", compared.queues[0].len());
}

#[test]
fn second_chunk_is_returned_once_before_it_is_due() {
    let mut compared = Compared::new();
    (0..40).for_each(|block| compared.push(block, 0, true));
    let mut ahead = Vec::new();
    for block in 0..40 {
        if let Some(chunk) = compared.lists.ahead(GROUP, 0) {
            assert!(chunk.blocks().iter().all(|other| *other > block), "{chunk:?} at block {block}");
            ahead.extend_from_slice(chunk.blocks());
        }
        compared.unlink(block);
    }
    assert_eq!(ahead, (CHUNK_BLOCKS as u32..40).collect::<Vec<u32>>());
}
