//! Mode of the node, as requested by the control plane and by the node's spec. The stricter one applies.
//!
//! A node is drained through either of the two, and the other one may follow later or never. A node that
//! one of them cordoned gets no replicas, whichever updates last.

use reprise_agent_core::event::Event;
use reprise_policy::NodeMode;

/// Requested modes, and the mode last passed to the core.
#[derive(Debug, Default)]
pub(crate) struct Modes {
    /// Mode requested by the control plane, with its revision.
    from_control_plane: (NodeMode, u64),
    /// Mode requested by the node's spec.
    from_spec: NodeMode,
    /// Mode last passed to the core, and the number of changes passed so far.
    effective: NodeMode,
    revision: u64,
}

impl Modes {
    /// Applies a mode from the control plane unless its revision is old. Returns an event for the core if
    /// the effective mode changes.
    pub(crate) fn set_by_control_plane(&mut self, mode: NodeMode, number: u64) -> Option<Event> {
        if number > self.from_control_plane.1 {
            self.from_control_plane = (mode, number);
        }
        self.update()
    }

    /// Applies the mode of the node's spec. Returns an event for the core if the effective mode changes.
    pub(crate) fn set_by_spec(&mut self, mode: NodeMode) -> Option<Event> {
        self.from_spec = mode;
        self.update()
    }

    fn update(&mut self) -> Option<Event> {
        let mode = if strictness(self.from_spec) > strictness(self.from_control_plane.0) {
            self.from_spec
        } else {
            self.from_control_plane.0
        };
        if mode == self.effective {
            return None;
        }
        self.effective = mode;
        // The core ignores modes with an old revision.
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
            other => panic!("expected a mode, got {other:?}"),
        })
    }

    #[test]
    fn stricter_of_two_modes_applies() {
        let mut modes = Modes::default();
        assert_eq!(mode(modes.set_by_control_plane(NodeMode::Active, 1)), None, "unchanged");
        assert_eq!(mode(modes.set_by_spec(NodeMode::Cordoned)), Some(NodeMode::Cordoned));
        assert_eq!(mode(modes.set_by_control_plane(NodeMode::Draining, 2)), Some(NodeMode::Draining));
        assert_eq!(mode(modes.set_by_spec(NodeMode::Active)), None, "the control plane still drains it");
        assert_eq!(mode(modes.set_by_control_plane(NodeMode::Active, 1)), None, "the revision is old");
        assert_eq!(mode(modes.set_by_control_plane(NodeMode::Active, 3)), Some(NodeMode::Active));
    }

    #[test]
    fn each_mode_has_a_higher_revision_than_the_previous_one() {
        let mut modes = Modes::default();
        let revision = |event: Option<Event>| match event {
            Some(Event::Mode { revision, .. }) => revision,
            other => panic!("{other:?}"),
        };
        let first = revision(modes.set_by_spec(NodeMode::Draining));
        assert!(revision(modes.set_by_spec(NodeMode::Active)) > first);
    }
}
