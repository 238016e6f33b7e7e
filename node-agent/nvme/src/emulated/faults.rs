//! Faults of an emulated controller, configured by data.

use std::time::Duration;

use crate::spec::Status;

/// Commands that a rule selects. Every condition that is set must hold.
#[derive(Clone, Copy, Debug, Default)]
pub struct Selection {
    /// Number of the submission queue; 0 is the admin queue.
    pub queue: Option<u16>,
    /// Operation code.
    pub opcode: Option<u8>,
    /// First and last logical block of a range; the command reads or writes one of them.
    pub blocks: Option<(u64, u64)>,
    /// Number of selected commands that pass unharmed before.
    pub skip: u64,
    /// Number of commands that are harmed then; `None` for all.
    pub times: Option<u64>,
}

/// An error of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The command ends after this time.
    Late(Duration),
    /// The command ends after the next one of its queue, or when the queue has no other.
    Reorder,
    /// The command ends with this status, and moves no data.
    Status(Status),
    /// The command runs, but never ends.
    Lost,
    /// The command runs, and ends twice.
    Twice,
    /// The command runs, and ends again after this time.
    TwiceLate(Duration),
    /// The controller reads a wrong address from the list of pages, or from the segment of descriptors.
    CorruptList,
    /// The write of a tail doorbell is lost; its commands run with the next write.
    DropDoorbell,
    /// The controller fails: it no longer runs commands, and sets `CSTS.CFS`.
    Fail,
    /// The function vanishes from the bus: all registers read as ones.
    Vanish,
}

/// A fault and the commands that it harms.
#[derive(Clone, Copy, Debug)]
pub struct FaultRule {
    /// Harmed commands.
    pub on: Selection,
    /// What happens to them.
    pub fault: Fault,
}

/// State of a rule.
#[derive(Debug)]
pub(super) struct ActiveRule {
    rule: FaultRule,
    seen: u64,
    pub(super) made: u64,
}

/// A command as rules see it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject {
    pub(super) queue: u16,
    /// `None` for a doorbell.
    pub(super) opcode: Option<u8>,
    /// First logical block and number of blocks.
    pub(super) blocks: Option<(u64, u32)>,
}

impl ActiveRule {
    pub(super) fn new(rule: FaultRule) -> ActiveRule {
        ActiveRule { rule, seen: 0, made: 0 }
    }

    fn selects(&self, subject: Subject) -> bool {
        let on = &self.rule.on;
        let is_doorbell = self.rule.fault == Fault::DropDoorbell;
        let touches = |(first, last): (u64, u64)| {
            subject.blocks.is_some_and(|(start, count)| start <= last && first < start + u64::from(count))
        };
        is_doorbell == subject.opcode.is_none()
            && on.queue.is_none_or(|queue| queue == subject.queue)
            && on.opcode.is_none_or(|opcode| subject.opcode == Some(opcode))
            && on.blocks.is_none_or(touches)
    }

    /// Returns the fault if this rule harms a command.
    pub(super) fn harm(&mut self, subject: Subject) -> Option<Fault> {
        if !self.selects(subject) {
            return None;
        }
        self.seen += 1;
        let now = self.seen > self.rule.on.skip && self.rule.on.times.is_none_or(|times| self.made < times);
        now.then(|| {
            self.made += 1;
            self.rule.fault
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::READ;

    #[test]
    fn a_rule_harms_the_commands_that_it_selects_after_those_that_it_skips() {
        let on =
            Selection { queue: Some(1), opcode: Some(READ), blocks: Some((10, 10)), skip: 1, times: Some(2) };
        let mut rule = ActiveRule::new(FaultRule { on, fault: Fault::Lost });
        let read = Subject { queue: 1, opcode: Some(READ), blocks: Some((8, 3)) };
        for other in [
            Subject { queue: 2, ..read },
            Subject { opcode: Some(1), ..read },
            Subject { blocks: Some((8, 2)), ..read },
            Subject { blocks: None, ..read },
            Subject { opcode: None, ..read },
        ] {
            assert_eq!(rule.harm(other), None, "{other:?}");
        }
        let harmed: Vec<_> = (0..5).map(|_| rule.harm(read).is_some()).collect();
        assert_eq!(harmed, [false, true, true, false, false]);
        assert_eq!(rule.made, 2);
    }
}
