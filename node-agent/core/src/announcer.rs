//! Announcements to one member of the control plane, one message at a time.
//!
//! ```text
//!            next: QuerySlots, Send             answered
//!   Idle ──────────────────────────► Calling ───────────────► Idle
//!    ▲                                  │ failed, fenced, rejected
//!    └────────── resume ◄── Pausing ◄───┘
//! ```
//!
//! The [`Outbox`] chooses the messages. Only one message is in flight, because the order of the batches
//! matters more than overlapping them. Pauses after failures grow ([`Backoff`]).
//!
//! Pure: the caller sends the messages, and calls [`Announcer::resume`] after each pause.

use std::sync::Arc;

use reprise_policy::{Epoch, NodeId, SlotSet};

use crate::backoff::{Backoff, Pause};
use crate::outbox::{Answer, Batch, Next, Outbox, Outcome};

/// The announcements to one member; see the module.
#[derive(Debug)]
pub struct Announcer {
    outbox: Outbox,
    state: State,
    backoff: Backoff,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Calling,
    Pausing,
}

/// Next action of the sender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Wait for a change of the outbox, an answer, or the end of a pause.
    Wait,
    /// Ask the agent for its inventory of these slots.
    Inventory(Box<SlotSet>),
    /// Ask the member which slots it owns and wants. Exactly one answer or failure must follow.
    QuerySlots(NodeId, Epoch),
    /// Send this batch. Exactly one answer or failure must follow.
    Send(Arc<Batch>),
}

/// A member's slots, in the answer to [`Action::QuerySlots`].
#[derive(Clone, Copy, Debug)]
pub struct MemberSlots<'a> {
    /// Version of the member's slots.
    pub version: u64,
    /// Slots that the member owns.
    pub owned: &'a SlotSet,
    /// Slots whose inventory the member wants.
    pub wanted: &'a SlotSet,
}

/// Effect of an answer or a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Continue with [`Announcer::next_action`].
    Continue,
    /// The directory has applied this many changes; continue.
    Applied(usize),
    /// The directory missed changes, and everything is announced again; continue.
    Gap,
    /// Call [`Announcer::resume`] after this pause.
    Pause(Pause),
    /// The registration is outdated; call [`Announcer::resume`] after this pause.
    Fenced(Pause),
}

impl Announcer {
    /// Creates an announcer with a queue of at most `limit` changes.
    pub fn new(limit: usize) -> Announcer {
        Announcer { outbox: Outbox::new(limit), state: State::Idle, backoff: Backoff::default() }
    }

    /// The queue of announcements.
    pub fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    /// The queue of announcements, for changes. Call [`Announcer::next_action`] afterwards.
    pub fn outbox_mut(&mut self) -> &mut Outbox {
        &mut self.outbox
    }

    /// Returns the next action.
    pub fn next_action(&mut self) -> Action {
        if self.state != State::Idle {
            return Action::Wait;
        }
        let action = match self.outbox.next_step() {
            Next::Wait => return Action::Wait,
            Next::Inventory(slots) => return Action::Inventory(slots),
            Next::QuerySlots(node, epoch) => Action::QuerySlots(node, epoch),
            Next::Send(batch) => Action::Send(batch),
        };
        self.state = State::Calling;
        action
    }

    /// Processes the answer to [`Action::QuerySlots`] under a registration; `None`: the member knows a newer
    /// registration.
    pub fn slots(&mut self, epoch: Epoch, slots: Option<MemberSlots<'_>>) -> Effect {
        let Some(MemberSlots { version, owned, wanted }) = slots else {
            return Effect::Fenced(self.pause());
        };
        self.outbox.set_slots(epoch, version, owned, wanted);
        self.end_call();
        Effect::Continue
    }

    /// Processes the answer to a batch, with the version of the member's slots.
    pub fn answer(&mut self, batch: &Batch, answer: Answer, version: u64) -> Effect {
        self.outbox.note_version(batch.epoch, version);
        let effect = match self.outbox.process_answer(batch.epoch, batch.sequence, answer) {
            Outcome::Fenced => return Effect::Fenced(self.pause()),
            Outcome::Applied(changes) => Effect::Applied(changes),
            Outcome::Gap => Effect::Gap,
            Outcome::Stale => Effect::Continue,
        };
        self.end_call();
        effect
    }

    /// Processes the permanent rejection of a batch: everything is announced again.
    pub fn reject(&mut self) -> Effect {
        self.outbox.process_rejection();
        self.fail()
    }

    /// Records that a call has failed; its message is repeated.
    pub fn fail(&mut self) -> Effect {
        Effect::Pause(self.pause())
    }

    /// Ends a pause after a failure.
    pub fn resume(&mut self) {
        if self.state == State::Pausing {
            self.state = State::Idle;
        }
    }

    fn end_call(&mut self) {
        self.state = State::Idle;
        self.backoff.reset();
    }

    fn pause(&mut self) -> Pause {
        self.state = State::Pausing;
        self.backoff.next_pause()
    }
}

#[cfg(test)]
mod tests {
    use reprise_policy::{BlockKey, Tier};

    use super::*;
    use crate::effect::{Change, ReplicaChange};

    const EPOCH: Epoch = Epoch(7);

    /// An announcer whose member owns all slots and has the inventory of none.
    fn registered() -> Announcer {
        let mut announcer = Announcer::new(100);
        announcer.outbox_mut().register(NodeId(1), EPOCH);
        assert_eq!(announcer.next_action(), Action::QuerySlots(NodeId(1), EPOCH));
        announcer
    }

    fn all_slots() -> Option<MemberSlots<'static>> {
        Some(MemberSlots { version: 1, owned: &SlotSet::ALL, wanted: &SlotSet::ALL })
    }

    /// Brings the announcer to the point at which its inventory is in flight.
    fn with_batch() -> (Announcer, Arc<Batch>) {
        let mut announcer = registered();
        assert_eq!(announcer.slots(EPOCH, all_slots()), Effect::Continue);
        let Action::Inventory(slots) = announcer.next_action() else {
            panic!("the member wants an inventory")
        };
        announcer.outbox_mut().inventory(&slots, &[(BlockKey([1; 16]), Tier::Nvme)]);
        let Action::Send(batch) = announcer.next_action() else { panic!("the inventory is sent") };
        (announcer, batch)
    }

    #[test]
    fn only_one_message_is_in_flight() {
        let (mut announcer, batch) = with_batch();
        let change = ReplicaChange { key: BlockKey([2; 16]), tier: Tier::Dram, change: Change::Added };
        announcer.outbox_mut().announce(&[change]);
        assert_eq!(announcer.next_action(), Action::Wait);
        let expected = batch.sequence + batch.numbers();
        assert_eq!(announcer.answer(&batch, Answer::Expecting(expected), 1), Effect::Applied(1));
        assert!(matches!(announcer.next_action(), Action::Send(next) if next.sequence == expected));
    }

    #[test]
    fn failed_message_is_repeated_after_growing_pauses() {
        let (mut announcer, batch) = with_batch();
        let mut pauses = Vec::new();
        for _ in 0..3 {
            let Effect::Pause(pause) = announcer.fail() else { panic!("a pause follows") };
            pauses.push(pause.draw(0));
            assert_eq!(announcer.next_action(), Action::Wait, "no message during a pause");
            announcer.resume();
            assert_eq!(announcer.next_action(), Action::Send(batch.clone()));
        }
        assert!(pauses.is_sorted() && pauses[0] < pauses[2], "{pauses:?}");
        announcer.answer(&batch, Answer::Expecting(batch.sequence + batch.numbers()), 2);
        assert_eq!(
            announcer.next_action(),
            Action::QuerySlots(NodeId(1), EPOCH),
            "the slots have a new version"
        );
        let Effect::Pause(pause) = announcer.fail() else { panic!("a pause follows") };
        assert_eq!(pause.draw(0), pauses[0], "an answer resets the pauses");
    }

    #[test]
    fn gaps_rejections_and_fences_announce_everything_again() {
        let (mut announcer, batch) = with_batch();
        assert_eq!(announcer.answer(&batch, Answer::Expecting(90), 1), Effect::Gap);
        assert_eq!(announcer.next_action(), Action::QuerySlots(NodeId(1), EPOCH));
        assert!(matches!(announcer.reject(), Effect::Pause(_)));
        announcer.resume();
        assert_eq!(announcer.next_action(), Action::QuerySlots(NodeId(1), EPOCH));
        assert!(matches!(announcer.slots(EPOCH, None), Effect::Fenced(_)));
        announcer.outbox_mut().unregister();
        announcer.resume();
        assert_eq!(announcer.next_action(), Action::Wait, "no message without a registration");
        let (mut announcer, batch) = with_batch();
        assert!(matches!(announcer.answer(&batch, Answer::Fenced, 1), Effect::Fenced(_)));
    }
}
