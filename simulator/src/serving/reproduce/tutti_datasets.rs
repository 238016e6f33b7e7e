//! Datasets of the Tutti reproduction: documents with questions, their order, and the chunks that a cache of them hits.

use reprise_policy::eviction::{Block, EntryIndex, EvictionKind, EvictionOrder, EvictionPolicy, Group};

use super::super::random::Random;

/// Tokens of a cached chunk (LMCache's default, §4).
pub(super) const CHUNK: u32 = 256;

/// Seed of lengths and orders.
const SEED: u64 = 42;

/// Documents, questions and mean tokens of a document of a sub-task.
type SubTask = (u32, u32, f64);

/// Documents with questions, in sub-tasks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dataset {
    pub(super) name: &'static str,
    sub_tasks: &'static [SubTask],
    /// Standard deviation of the logarithm of lengths within a sub-task.
    sigma: f64,
    /// Published hit rates with HBM, DRAM and SSD, in percent.
    pub(super) published: [f64; 3],
}

/// LEval: "Avg len", "#Instr" and "#Doc" of the table in its repository (OpenLMLab/LEval, figs/data.png).
const LEVAL: [SubTask; 20] = [
    (15, 269, 3_907.0),
    (100, 100, 5_557.0),
    (15, 202, 7_169.0),
    (15, 172, 9_075.0),
    (50, 150, 12_506.0),
    (7, 64, 16_381.0),
    (90, 90, 31_575.0),
    (20, 136, 3_905.0),
    (20, 160, 5_019.0),
    (6, 52, 6_032.0),
    (20, 104, 23_698.0),
    (20, 130, 30_966.0),
    (20, 182, 62_335.0),
    (11, 11, 7_320.0),
    (13, 13, 7_495.0),
    (13, 13, 7_718.0),
    (13, 13, 10_688.0),
    (20, 60, 11_170.0),
    (20, 156, 16_692.0),
    (20, 120, 19_978.0),
];

/// LooGLE: 776 documents, 6,448 questions, 24k tokens on average (bigai-nlco/LooGLE, README), in equal sub-tasks.
const LOOGLE: [SubTask; 4] = [(194, 1_612, 24_000.0); 4];

/// Datasets of the paper, in its order.
pub(super) const DATASETS: [Dataset; 2] = [
    Dataset { name: "LEval", sub_tasks: &LEVAL, sigma: 0.0, published: [8.0, 53.0, 84.0] },
    Dataset { name: "LooGLE", sub_tasks: &LOOGLE, sigma: 0.5, published: [4.0, 24.0, 86.0] },
];

/// Order of the questions of a sub-task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// All questions of a document, then those of the next one.
    InSequence,
    /// At random.
    Shuffled,
}

/// First chunk of a request's document, and the number of its chunks.
pub(super) type Chunks = (u32, u32);

impl Order {
    /// Name of the order in reports.
    pub(super) fn name(self) -> &'static str {
        match self {
            Order::InSequence => "in sequence",
            Order::Shuffled => "shuffled",
        }
    }
}

impl Dataset {
    /// Requests round-robin over the sub-tasks.
    pub(super) fn requests(&self, order: Order) -> Vec<Chunks> {
        let mut random = Random::new(SEED);
        let mut queues: Vec<Vec<Chunks>> = Vec::new();
        let mut first = 0;
        for (documents, questions, mean) in self.sub_tasks.iter().copied() {
            let median = mean / (self.sigma * self.sigma / 2.0).exp();
            let mut queue = Vec::new();
            for document in 0..documents {
                let tokens = random.log_normal(median, self.sigma);
                let chunks = (tokens as u32 / CHUNK).max(1);
                // Questions are spread evenly, with the remainder on the first documents.
                let count = questions / documents + u32::from(document < questions % documents);
                queue.extend((0..count).map(|_| (first, chunks)));
                first += chunks;
            }
            if order == Order::Shuffled {
                for at in (1..queue.len()).rev() {
                    queue.swap(at, random.below(at as u64 + 1) as usize);
                }
            }
            queues.push(queue);
        }
        let longest = queues.iter().map(Vec::len).max().unwrap_or(0);
        (0..longest).flat_map(|at| queues.iter().filter_map(move |queue| queue.get(at).copied())).collect()
    }
}

/// Replays requests on one cache with the production order of eviction; returns the leading chunks that each hits.
pub(super) fn replay(requests: &[Chunks], capacity: u64) -> Vec<u32> {
    let mut order = EvictionOrder::new(EvictionPolicy::from(EvictionKind::default()));
    let chunks = requests.iter().map(|(first, count)| first + count).max().unwrap_or(0);
    let mut is_present = vec![false; chunks as usize];
    let mut used = 0_u64;
    let mut serve = |(first, count): Chunks| {
        let leading = (first..first + count).take_while(|chunk| is_present[*chunk as usize]).count() as u32;
        for chunk in first..first + count {
            let entry = EntryIndex(chunk);
            if is_present[chunk as usize] {
                order.touch(entry);
                continue;
            }
            while used >= capacity {
                let Some(victim) = order.victim(Group::default()) else { break };
                order.detach(victim);
                is_present[victim.0 as usize] = false;
                used -= 1;
            }
            if chunk > first {
                order.link(entry, EntryIndex(chunk - 1));
            }
            order.attach(entry, Group::default());
            let facts = Block {
                key_hash: u64::from(chunk),
                bytes: 1,
                position: Some(chunk - first),
                ..Block::default()
            };
            order.insert(entry, &facts);
            is_present[chunk as usize] = true;
            used += 1;
        }
        leading
    };
    requests.iter().map(|request| serve(*request)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datasets_have_the_documents_and_questions_of_their_statistics() {
        for (dataset, documents, questions) in [(DATASETS[0], 508, 2_197), (DATASETS[1], 776, 6_448)] {
            for order in [Order::InSequence, Order::Shuffled] {
                let requests = dataset.requests(order);
                let mut firsts: Vec<u32> = requests.iter().map(|(first, _)| *first).collect();
                firsts.sort_unstable();
                firsts.dedup();
                assert_eq!((firsts.len(), requests.len()), (documents, questions), "{}", dataset.name);
            }
        }
    }

    #[test]
    fn unlimited_cache_misses_each_document_once() {
        let requests = DATASETS[0].requests(Order::Shuffled);
        let misses = replay(&requests, u64::MAX).iter().filter(|hits| **hits == 0).count();
        assert_eq!(misses, 508);
    }
}
