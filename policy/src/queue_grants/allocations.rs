//! Queue pairs that a cluster's operator has granted to the engines of this node.
//!
//! An allocation never changes: one with the same uid and other content is another allocation. Grants refer to the
//! allocation itself, not to its uid, so a grant of the earlier one does not belong to the later one.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::QueueGrantRefusal;

/// Queue pairs of an object `GPUQueueAllocation`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Unique id of the object.
    pub uid: String,
    /// Namespace and name of the object.
    pub name: String,
    /// Maximum entries of a queue.
    pub depth: u32,
    /// Maximum bytes of the memories that commands of its queue pairs access; `None`: unlimited.
    pub memory_bytes: Option<u64>,
    /// Slack profile of the sessions that hold its queue pairs.
    pub slack_profile: Option<String>,
    /// Queue pairs by the serial numbers of controllers.
    pub pairs: BTreeMap<String, u32>,
}

/// The allocations of the node, in the order in which their queue pairs are used.
#[derive(Clone, Debug, Default)]
pub(super) struct Allocations(Vec<Arc<Allocation>>);

impl Allocations {
    /// Replaces all allocations. One that is in both lists stays the same.
    pub(super) fn replace(&mut self, wanted: Vec<Allocation>) {
        let before = std::mem::take(&mut self.0);
        let kept = |wanted: Allocation| {
            let same = before.iter().find(|one| ***one == wanted);
            same.map_or_else(|| Arc::new(wanted), Arc::clone)
        };
        // Two equal ones would count their grants once.
        for wanted in wanted.into_iter().map(kept) {
            if !self.has(Some(&wanted)) {
                self.0.push(wanted);
            }
        }
    }

    pub(super) fn has(&self, allocation: Option<&Arc<Allocation>>) -> bool {
        allocation.is_some_and(|allocation| self.0.iter().any(|one| Arc::ptr_eq(one, allocation)))
    }

    /// Refuses all requests while there is no allocation.
    pub(super) fn check_any(&self) -> Result<(), QueueGrantRefusal> {
        if !self.0.is_empty() {
            return Ok(());
        }
        QueueGrantRefusal::invalid(
            "no queue pairs of this node are granted: create a GPUQueueAllocation for this node and for a pool of engine \
             UserNvme"
                .to_owned(),
        )
    }

    /// Returns the first allocation with enough unused queue pairs of a controller, and memory that it may still register.
    pub(super) fn choose(
        &self,
        serial: &str,
        wanted: Wanted,
        held: impl Fn(&Arc<Allocation>) -> Held,
    ) -> Result<Arc<Allocation>, QueueGrantRefusal> {
        let Wanted { pairs, depth, memory_bytes } = wanted;
        let has = |one: &Arc<Allocation>| Some((Arc::clone(one), *one.pairs.get(serial)?));
        let of_controller: Vec<(Arc<Allocation>, u32)> = self.0.iter().filter_map(has).collect();
        if of_controller.is_empty() {
            return QueueGrantRefusal::invalid(format!(
                "no queue pairs of controller {serial} are granted: create a GPUQueueAllocation for this node and the pool of \
                 the controller"
            ));
        }
        let fitting: Vec<&(Arc<Allocation>, u32)> =
            of_controller.iter().filter(|(one, share)| pairs <= *share && depth <= one.depth).collect();
        if fitting.is_empty() {
            let offers = of_controller.iter().map(|(one, share)| {
                format!("GPUQueueAllocation {} has {share} of at most {} entries", one.name, one.depth)
            });
            return QueueGrantRefusal::invalid(format!(
                "{pairs} queue pairs of {depth} entries of controller {serial} are requested, and {}: request fewer or \
                 smaller ones, or create a larger GPUQueueAllocation",
                offers.collect::<Vec<_>>().join(", ")
            ));
        }
        let admits = |one: &Allocation, bytes: u64| one.memory_bytes.is_none_or(|limit| bytes <= limit);
        if !fitting.iter().any(|(one, _)| admits(one, memory_bytes)) {
            let offers = fitting
                .iter()
                .map(|(one, _)| format!("{} allows {}", one.name, one.memory_bytes.unwrap_or(u64::MAX)));
            return QueueGrantRefusal::invalid(format!(
                "a memory of {memory_bytes} bytes exceeds spec.registeredMemory of each GPUQueueAllocation: {}. Register less \
                 memory, or create a GPUQueueAllocation that allows more",
                offers.collect::<Vec<_>>().join(", ")
            ));
        }
        let with_held: Vec<(&Arc<Allocation>, u32, Held)> =
            fitting.iter().map(|(one, share)| (one, *share, held(one))).collect();
        let is_free =
            |(_, share, held): &&(&Arc<Allocation>, u32, Held)| share.saturating_sub(held.pairs) >= pairs;
        let admitted = |(one, _, held): &&(&Arc<Allocation>, u32, Held)| admits(one, held.memory_bytes_then);
        if let Some((found, ..)) = with_held.iter().find(|of| is_free(of) && admitted(of)) {
            return Ok(Arc::clone(found));
        }
        if let Some((one, _, held)) = with_held.iter().find(is_free) {
            return Err(QueueGrantRefusal::Exhausted(format!(
                "GPUQueueAllocation {} allows {} bytes of registered memory (spec.registeredMemory), and {} would be in use \
                 with this one of {memory_bytes} bytes: return queue pairs first, or create another GPUQueueAllocation",
                one.name,
                one.memory_bytes.unwrap_or(u64::MAX),
                held.memory_bytes_then
            )));
        }
        let most = with_held.iter().map(|(_, share, held)| share.saturating_sub(held.pairs)).max();
        let most = most.unwrap_or_default();
        Err(QueueGrantRefusal::Exhausted(format!(
            "{pairs} queue pairs of controller {serial} are requested, and a GPUQueueAllocation of this node has at most \
             {most} left: return some first, or create another GPUQueueAllocation"
        )))
    }
}

/// What a request needs of an allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) pairs: u32,
    pub(super) depth: u32,
    /// Size of the memory that commands access.
    pub(super) memory_bytes: u64,
}

/// What the grants of an allocation use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// Queue pairs of the controller.
    pub(super) pairs: u32,
    /// Bytes of registered memories, each counted once, with the memory of the request.
    pub(super) memory_bytes_then: u64,
}

#[cfg(test)]
mod tests {
    use crate::SessionId;
    use crate::queue_grants::{
        GrantGeneration, MemoryNumber, QueueGrantLimits, QueueGrantRefusal, QueueGrants, QueueRequest,
    };

    use crate::TenantId;

    use super::*;

    const LIMITS: QueueGrantLimits =
        QueueGrantLimits { pairs_per_device: 0, pairs_per_session: 16, depth: 64 };
    const ONE: SessionId = SessionId(1);
    const TWO: SessionId = SessionId(2);

    fn allocation(name: &str, pairs: &[(&str, u32)]) -> Allocation {
        let pairs = pairs.iter().map(|(serial, pairs)| ((*serial).to_owned(), *pairs)).collect();
        Allocation {
            uid: format!("uid-{name}"),
            name: format!("n/{name}"),
            depth: 128,
            memory_bytes: None,
            slack_profile: None,
            pairs,
        }
    }

    fn table(allocations: Vec<Allocation>) -> QueueGrants {
        let mut table = QueueGrants::of_allocations(LIMITS);
        assert!(table.set_allocations(allocations).is_empty());
        for session in [ONE, TWO] {
            table.register(session, 4096).expect("an allocation exists");
        }
        table
    }

    fn of(session: SessionId, pairs: u32) -> QueueRequest {
        QueueRequest {
            tenant: TenantId::DEFAULT,
            session,
            device: 3,
            pairs,
            depth: 128,
            memory: MemoryNumber(1),
        }
    }

    fn granted(table: &mut QueueGrants, request: QueueRequest) -> GrantGeneration {
        let generation = table.request(request, "S1").expect("allocated");
        table.created(generation);
        generation
    }

    #[test]
    fn nothing_is_granted_without_an_allocation_of_the_controller() {
        let mut table = QueueGrants::of_allocations(QueueGrantLimits { pairs_per_device: 8, ..LIMITS });
        assert!(table.may_grant());
        let refusal = table.register(ONE, 4096).expect_err("there is no allocation").to_string();
        assert!(refusal.contains("create a GPUQueueAllocation"), "{refusal}");
        table.set_allocations(vec![allocation("a", &[("S2", 4)])]);
        table.register(ONE, 4096).expect("an allocation exists");
        let refusal = table.request(of(ONE, 1), "S1").expect_err("of another controller").to_string();
        assert!(refusal.contains("controller S1") && refusal.contains("create"), "{refusal}");
        table.request(of(ONE, 1), "S2").expect("allocated");
        assert!(!QueueGrants::new(LIMITS).may_grant());
    }

    #[test]
    fn requests_use_the_first_allocation_with_enough_queue_pairs() {
        let mut table = table(vec![allocation("a", &[("S1", 2)]), allocation("b", &[("S1", 4), ("S2", 1)])]);
        let name = |table: &QueueGrants, generation| {
            table.allocation(generation).expect("part of an allocation").name.clone()
        };
        for (request, words) in [
            (of(ONE, 5), "n/a has 2 of at most 128 entries, GPUQueueAllocation n/b has 4"),
            (QueueRequest { depth: 256, ..of(ONE, 1) }, "256 entries"),
            (of(ONE, 17), "expected 1 to 16"),
        ] {
            let refusal = table.request(request, "S1").expect_err("above the limits");
            assert!(
                matches!(&refusal, QueueGrantRefusal::Invalid(text) if text.contains(words)),
                "{refusal}"
            );
        }
        let first = granted(&mut table, of(ONE, 3));
        assert_eq!(name(&table, first), "n/b");
        let second = granted(&mut table, of(TWO, 2));
        assert_eq!((name(&table, second).as_str(), table.pairs_of("uid-a")), ("n/a", 2));
        let refusal = table.request(of(TWO, 2), "S1").expect_err("one pair is left");
        assert!(
            matches!(&refusal, QueueGrantRefusal::Exhausted(text) if text.contains("at most 1 left")),
            "{refusal}"
        );
        // Queue pairs of another controller are counted apart.
        let other = QueueRequest { device: 4, ..of(TWO, 1) };
        assert_eq!(
            table.request(other, "S2").map(|generation| name(&table, generation)),
            Ok("n/b".to_owned())
        );
        assert!(table.begin_end(ONE, first));
        table.request(of(TWO, 2), "S1").expect_err("the queue pairs are not deleted yet");
        table.ended(first);
        assert_eq!(table.pairs_of("uid-b"), 1);
        granted(&mut table, of(TWO, 4));
    }

    #[test]
    fn the_grants_of_an_allocation_end_with_it_and_are_not_part_of_its_successor() {
        let (a, b) = (allocation("a", &[("S1", 2)]), allocation("b", &[("S1", 2)]));
        let mut table = table(vec![a.clone(), b.clone()]);
        let first = granted(&mut table, of(ONE, 2));
        let second = granted(&mut table, of(TWO, 2));
        assert_eq!(table.set_allocations(vec![b.clone(), a.clone()]), [], "their order does not matter");
        // Smaller than before, with the same uid.
        let shrunk = allocation("a", &[("S1", 1)]);
        assert_eq!(table.set_allocations(vec![shrunk.clone(), b.clone()]), [(first, ONE)]);
        assert!(table.is_fenced(ONE) && !table.is_allocated(first) && table.is_allocated(second));
        assert_eq!(table.pairs_of("uid-a"), 2, "until they are deleted");
        table.not_confirmed(first);
        assert_eq!(table.pairs_of("uid-a"), 2, "the controller may still run their commands");
        table.device_reset(3);
        assert_eq!(table.pairs_of("uid-a"), 0);
        assert_eq!(
            table.set_allocations(vec![shrunk]),
            [(second, TWO)],
            "its queue pairs end with the allocation"
        );
    }

    #[test]
    fn queue_pairs_that_are_being_created_are_recognized_as_revoked() {
        let a = allocation("a", &[("S1", 2)]);
        let mut table = table(vec![a.clone()]);
        let creating = table.request(of(ONE, 2), "S1").expect("allocated");
        assert_eq!(table.set_allocations(Vec::new()), [], "it cannot end yet");
        assert_eq!(table.set_allocations(vec![a]), []);
        table.created(creating);
        assert!(!table.is_allocated(creating), "it was a part of the earlier allocation");
        assert_eq!(table.pairs_of("uid-a"), 2);
    }

    #[test]
    fn memories_of_an_allocation_are_limited_and_counted_once() {
        let limited = Allocation { memory_bytes: Some(8192), ..allocation("a", &[("S1", 8), ("S2", 8)]) };
        let mut table = table(vec![limited]);
        let big = table.register(ONE, 8193).expect("the limit is one of grants");
        let refusal =
            table.request(QueueRequest { memory: big, ..of(ONE, 1) }, "S1").expect_err("above the limit");
        let words = ["8193 bytes", "n/a allows 8192", "spec.registeredMemory"];
        assert!(
            matches!(&refusal, QueueGrantRefusal::Invalid(text) if words.iter().all(|word| text.contains(word))),
            "{refusal}"
        );
        // 4,096 bytes, for two grants and two controllers.
        let first = granted(&mut table, of(ONE, 1));
        granted(&mut table, of(ONE, 1));
        let other = table.request(QueueRequest { device: 4, ..of(ONE, 1) }, "S2").expect("the same memory");
        table.created(other);
        let second = granted(&mut table, of(TWO, 1));
        let more = table.register(TWO, 1).expect("registered");
        let request = QueueRequest { memory: more, ..of(TWO, 1) };
        let refusal = table.request(request, "S1").expect_err("8,193 bytes in all");
        assert!(
            matches!(&refusal, QueueGrantRefusal::Exhausted(text) if text.contains("8193 would be in use")),
            "{refusal}"
        );
        assert!(table.begin_end(ONE, first));
        table.ended(first);
        table.request(request, "S1").expect_err("other grants access the first memory");
        // The memory of an ended session counts until its queue pairs are deleted.
        assert_eq!(table.begin_session_end(TWO), [second]);
        let third = SessionId(3);
        table.register(third, 1).expect("registered");
        table.request(of(third, 1), "S1").expect_err("the controller may still access it");
        table.ended(second);
        table.request(of(third, 1), "S1").expect("4,097 bytes in all");
    }

    #[test]
    fn memory_beyond_one_allocation_uses_another_one() {
        let limited = Allocation { memory_bytes: Some(4096), ..allocation("a", &[("S1", 8)]) };
        let mut table = table(vec![limited, allocation("b", &[("S1", 8)])]);
        for (session, name) in [(ONE, "n/a"), (TWO, "n/b")] {
            let generation = granted(&mut table, of(session, 1));
            assert_eq!(table.allocation(generation).map(|of| of.name.as_str()), Some(name));
        }
    }

    #[test]
    fn session_has_the_slack_profile_of_its_oldest_grant() {
        let with = |name: &str, profile: Option<&str>| Allocation {
            slack_profile: profile.map(str::to_owned),
            ..allocation(name, &[("S1", 2)])
        };
        let mut table = table(vec![with("a", None), with("b", Some("llama")), with("c", Some("other"))]);
        assert_eq!(table.slack_profile(ONE), None);
        granted(&mut table, of(ONE, 2));
        assert_eq!(table.slack_profile(ONE), None, "its allocation names none");
        let second = granted(&mut table, of(ONE, 2));
        assert_eq!(table.slack_profile(ONE), Some("llama"));
        granted(&mut table, of(ONE, 2));
        assert_eq!((table.slack_profile(ONE), table.slack_profile(TWO)), (Some("llama"), None));
        assert!(table.begin_end(ONE, second));
        assert_eq!(table.slack_profile(ONE), Some("other"));
    }
}
