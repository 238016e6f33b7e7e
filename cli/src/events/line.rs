//! Lines of `reprise events`, as text and as JSON.

use std::fmt;
use std::str::FromStr;

use reprise_proto::controlplane::Position;
use serde::{Serialize, Serializer};

use reprise_testkit::output::Audience;

/// Position in a member's change log, written as `a@00000000000000ff:17`: member, log (hexadecimal) and
/// number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemberPosition {
    pub(super) member: String,
    pub(super) position: Position,
}

/// One line of output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Line {
    pub(super) member: String,
    #[serde(flatten)]
    pub(super) event: Event,
    /// Position to resume from after this line; `null` within a snapshot and for a gone member.
    pub(super) position: Option<MemberPosition>,
}

/// Event of a line.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Event {
    /// A snapshot begins: earlier events of the member are void, and all its replicas follow.
    Snapshot { reason: &'static str },
    /// A replica was added.
    Added(Replica),
    /// A replica was removed.
    Withdrawn(Replica),
    /// All replicas of the node in the slots are void. No node means all nodes; no slots means all slots.
    Cleared { node: Option<u32>, slots: Vec<u32> },
    /// The events so far are the member's current state.
    Current,
    /// The member is no longer listed: its events are void.
    Gone,
}

/// One copy of a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Replica {
    pub(super) node: u16,
    pub(super) tier: &'static str,
    pub(super) key: String,
}

impl Line {
    /// Returns the line for a member that is no longer listed.
    pub(super) fn gone(member: String) -> Line {
        Line { member, event: Event::Gone, position: None }
    }

    /// Returns the line without a newline.
    pub(super) fn text(&self, audience: Audience) -> String {
        match audience {
            Audience::Program => serde_json::to_string(self).expect("our own types encode as JSON"),
            Audience::Person => {
                let position = self.position.as_ref().map(|at| format!("  {at}")).unwrap_or_default();
                format!("{}  {}{position}", self.member, self.event)
            }
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Snapshot { reason } => write!(f, "snapshot begins: {reason}"),
            Event::Added(replica) => write!(f, "+ {replica}"),
            Event::Withdrawn(replica) => write!(f, "- {replica}"),
            Event::Cleared { node, slots } => {
                match node {
                    Some(node) => write!(f, "cleared node {node}")?,
                    None => write!(f, "cleared every node")?,
                }
                match slots.as_slice() {
                    [] => Ok(()),
                    slots => write!(f, " in slots {slots:?}"),
                }
            }
            Event::Current => write!(f, "current"),
            Event::Gone => write!(f, "gone: its events are void"),
        }
    }
}

impl fmt::Display for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}  {}  {}", self.node, self.tier, self.key)
    }
}

impl fmt::Display for MemberPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Position { log, next } = self.position;
        write!(f, "{}@{log:016x}:{next}", self.member)
    }
}

impl Serialize for MemberPosition {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for MemberPosition {
    type Err = String;

    fn from_str(text: &str) -> Result<MemberPosition, String> {
        let parse = || {
            // Names may be addresses with colons, so split at the last separators.
            let (member, position) = text.rsplit_once('@')?;
            let (log, next) = position.rsplit_once(':')?;
            let position = Position { log: u64::from_str_radix(log, 16).ok()?, next: next.parse().ok()? };
            (!member.is_empty()).then(|| MemberPosition { member: member.to_owned(), position })
        };
        parse().ok_or_else(|| {
            "expected MEMBER@LOG:NUMBER, from the end of a line of `reprise events`".to_owned()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position() -> MemberPosition {
        let position = Position { log: 255, next: 17 };
        MemberPosition { member: "[::1]:7400".to_owned(), position }
    }

    #[test]
    fn parses_the_printed_form_of_a_position() {
        assert_eq!(position().to_string(), "[::1]:7400@00000000000000ff:17");
        assert_eq!(position().to_string().parse(), Ok(position()));
        for wrong in ["", "a", "a@1", "a@x:1", "a@1:x", "@1:1"] {
            let refused = wrong.parse::<MemberPosition>().expect_err(wrong);
            assert!(refused.contains("MEMBER@LOG:NUMBER"), "{refused}");
        }
    }

    #[test]
    fn text_and_json_have_the_same_content() {
        let replica = Replica { node: 7, tier: "dram", key: "11".repeat(16) };
        let event = Event::Added(replica);
        let line = Line { member: "a".to_owned(), event, position: Some(position()) };
        let key = "11".repeat(16);
        assert_eq!(
            line.text(Audience::Person),
            format!("a  + node 7  dram  {key}  [::1]:7400@00000000000000ff:17")
        );
        let object: serde_json::Value =
            serde_json::from_str(&line.text(Audience::Program)).expect("an object");
        assert_eq!(
            (&object["event"], &object["key"], &object["node"]),
            (&"added".into(), &key.into(), &7.into())
        );
        let gone = Line::gone("a".to_owned());
        assert_eq!(gone.text(Audience::Person), "a  gone: its events are void");
        assert_eq!(gone.text(Audience::Program), r#"{"member":"a","event":"gone","position":null}"#);
        let cleared = Event::Cleared { node: None, slots: vec![1, 2] };
        assert_eq!(cleared.to_string(), "cleared every node in slots [1, 2]");
    }
}
