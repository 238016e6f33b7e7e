//! A lookup of a member, part by part; and the map by which a member answers for its slots.
//!
//! The lease of a member may expire, or the map may change, while it works on an answer. So the answer counts only if
//! the member was certain of its place by the same map at the beginning and at the end. Otherwise all keys are left to
//! other members.
//!
//! Pure: the caller locks the directory for each part, and encodes replicas.

use std::sync::Arc;

use reprise_policy::Epoch;

use crate::directory::LookupResult;
use crate::member_list::MemberView;

/// The map by which an answer is given; see the module.
#[derive(Clone, Debug)]
pub struct AnswerMap(Arc<MemberView>);

impl AnswerMap {
    /// Begins an answer. `answerable` is the map of the members if this member may answer by it now.
    pub fn begin(answerable: Option<Arc<MemberView>>) -> Option<AnswerMap> {
        answerable.map(AnswerMap)
    }

    /// Ends an answer. Returns the epoch of the map if the member may still answer by it.
    pub fn end(self, answerable: Option<Arc<MemberView>>) -> Option<Epoch> {
        answerable.filter(|map| Arc::ptr_eq(map, &self.0)).map(|map| map.map.epoch())
    }
}

/// A lookup in progress; see the module.
#[derive(Debug)]
pub struct LookupCall {
    map: Option<AnswerMap>,
    keys: u32,
    answer: LookupAnswer,
}

/// The answer to a lookup, without the replicas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LookupAnswer {
    /// Start of each key's replicas among all replicas, and the end: one more than there are keys.
    pub offsets: Vec<u32>,
    /// Indices of the keys that belong to other members.
    pub elsewhere: Vec<u32>,
    /// Number of keys in slots with an incomplete inventory of some node.
    pub partial: u32,
    /// Epoch of the map that the member knows.
    pub map_epoch: Epoch,
    /// The found replicas count.
    pub is_certain: bool,
}

impl LookupCall {
    /// Begins a lookup of this many keys. `answerable` is the map if this member may answer by it now.
    pub fn begin(keys: u32, answerable: Option<Arc<MemberView>>) -> LookupCall {
        let mut offsets = Vec::with_capacity(keys as usize + 1);
        offsets.push(0);
        LookupCall {
            map: AnswerMap::begin(answerable),
            keys,
            answer: LookupAnswer { offsets, ..LookupAnswer::default() },
        }
    }

    /// Whether the caller looks up the keys. Otherwise the lookup ends at once.
    pub fn is_certain(&self) -> bool {
        self.map.is_some()
    }

    /// Adds the result of the next part of the keys. Its replicas follow those of the parts before.
    pub fn add(&mut self, found: &LookupResult) {
        let LookupAnswer { offsets, elsewhere, partial, .. } = &mut self.answer;
        let first = u32::try_from(offsets.len() - 1).expect("the number of keys of a call fits");
        let before = *offsets.last().expect("it begins with 0");
        offsets.extend(found.offsets()[1..].iter().map(|offset| before + offset));
        elsewhere.extend(found.elsewhere().iter().map(|index| first + index));
        *partial += found.partial();
    }

    /// Ends a lookup. `known` is the epoch of the map that the member knows now.
    pub fn end(self, answerable: Option<Arc<MemberView>>, known: Epoch) -> LookupAnswer {
        let LookupCall { map, keys, answer } = self;
        match map.and_then(|map| map.end(answerable)) {
            Some(map_epoch) => LookupAnswer { map_epoch, is_certain: true, ..answer },
            None => LookupAnswer {
                offsets: vec![0; keys as usize + 1],
                elsewhere: (0..keys).collect(),
                partial: 0,
                map_epoch: known,
                is_certain: false,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use reprise_policy::shards::ShardMap;
    use reprise_policy::{BlockKey, NodeId, SlotSet};

    use super::*;
    use crate::directory::Directory;
    use crate::live_nodes::LiveNodes;
    use crate::member_list::MemberList;

    fn view() -> Arc<MemberView> {
        MemberList::default().view().clone()
    }

    /// The result of a part with these keys, of which the directory owns the slot of the first.
    fn part(keys: &[BlockKey]) -> LookupResult {
        let mut directory = Directory::new();
        let own: Vec<u16> = keys.iter().take(1).map(BlockKey::hash_slot).collect();
        directory.set_owned_slots(&own.into_iter().collect::<SlotSet>());
        directory.expect_node(NodeId(1));
        let mut found = LookupResult::default();
        directory.lookup(keys, &LiveNodes::default(), None, &mut found);
        found
    }

    #[test]
    fn parts_follow_each_other_in_the_answer() {
        let map = view();
        let mut call = LookupCall::begin(4, Some(map.clone()));
        assert!(call.is_certain());
        let keys = [BlockKey([1; 16]), BlockKey([2; 16])];
        call.add(&part(&keys));
        call.add(&part(&keys));
        let answer = call.end(Some(map.clone()), Epoch(9));
        assert_eq!((answer.offsets.len(), answer.elsewhere, answer.partial), (5, vec![1, 3], 2));
        assert_eq!((answer.map_epoch, answer.is_certain), (map.map.epoch(), true));
    }

    #[test]
    fn answer_counts_only_by_the_same_map_throughout() {
        for (begin, end) in [(None, Some(view())), (Some(view()), None), (Some(view()), Some(other_view()))] {
            let mut call = LookupCall::begin(2, begin);
            call.add(&part(&[BlockKey([1; 16]), BlockKey([2; 16])]));
            let answer = call.end(end, Epoch(9));
            let elsewhere = vec![0, 1];
            let offsets = vec![0; 3];
            let map_epoch = Epoch(9);
            assert_eq!(answer, LookupAnswer { offsets, elsewhere, partial: 0, map_epoch, is_certain: false });
        }
    }

    fn other_view() -> Arc<MemberView> {
        let map = Arc::new(ShardMap::new(Epoch(1), []).expect("a valid map"));
        Arc::new(MemberView { map, members: Vec::new() })
    }
}
