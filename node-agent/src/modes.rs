//! What the node is used for: as the control plane says, and as the node's own spec says. The stricter holds.
//!
//! Whoever drains a node does so by one of the two, and the other follows later or not at all: a node that one of them has
//! cordoned gets no blocks of others, whoever is late.

use reprise_agent_core::event::Event;
use reprise_policy::NodeMode;

/// Both words, and what was made of them.
#[derive(Debug, Default)]
pub(crate) struct Modes {
    /// Of the control plane, with its number.
    said: (NodeMode, u64),
    /// Of the node's spec.
    wanted: NodeMode,
    /// What the core was told last, and how often it was told.
    told: NodeMode,
    revision: u64,
}

impl Modes {
    /// The control plane says this, each time with a higher number; the event for the core, if that changes anything.
    pub(crate) fn said(&mut self, mode: NodeMode, number: u64) -> Option<Event> {
        if number > self.said.1 {
            self.said = (mode, number);
        }
        self.news()
    }

    /// The node's spec says this.
    pub(crate) fn wanted(&mut self, mode: NodeMode) -> Option<Event> {
        self.wanted = mode;
        self.news()
    }

    fn news(&mut self) -> Option<Event> {
        let mode = if strictness(self.wanted) > strictness(self.said.0) { self.wanted } else { self.said.0 };
        if mode == self.told {
            return None;
        }
        self.told = mode;
        self.revision += 1;
        Some(Event::Mode { mode, revision: self.revision })
    }
}

fn strictness(mode: NodeMode) -> u8 {
    match mode {
        NodeMode::Active => 0,
        NodeMode::Cordoned => 1,
        NodeMode::Draining => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(event: Option<Event>) -> Option<NodeMode> {
        event.map(|event| match event {
            Event::Mode { mode, .. } => mode,
            other => panic!("{other:?} is no mode"),
        })
    }

    #[test]
    fn the_stricter_of_two_modes_holds() {
        let mut modes = Modes::default();
        assert_eq!(mode(modes.said(NodeMode::Active, 1)), None, "as it was");
        assert_eq!(mode(modes.wanted(NodeMode::Cordoned)), Some(NodeMode::Cordoned));
        assert_eq!(mode(modes.said(NodeMode::Draining, 2)), Some(NodeMode::Draining));
        assert_eq!(mode(modes.wanted(NodeMode::Active)), None, "the control plane drains it");
        assert_eq!(mode(modes.said(NodeMode::Active, 1)), None, "that is old");
        assert_eq!(mode(modes.said(NodeMode::Active, 3)), Some(NodeMode::Active));
    }

    #[test]
    fn each_mode_has_a_higher_revision_than_the_one_before() {
        let mut modes = Modes::default();
        let revision = |event: Option<Event>| match event {
            Some(Event::Mode { revision, .. }) => revision,
            other => panic!("{other:?}"),
        };
        let first = revision(modes.wanted(NodeMode::Draining));
        assert!(revision(modes.wanted(NodeMode::Active)) > first);
    }
}
