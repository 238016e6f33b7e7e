//! The registration of this node with one member of the control plane.
//!
//! ```text
//!                     granted                        heartbeats answered ⇄ failing       up ⇄ down
//!   Registering ─────────────────► Registered
//!       ▲  ▲                        │   │  ▲
//!       │  └── unknown, fenced ─────┘   │  │ granted
//!       │                               ▼  │
//!       │          domain changed:   Replacing ── unknown, fenced ──► Ending ── granted ──► Registered
//!       └────────────────────────────────────────────── overdue ───────┘
//! ```
//!
//! While heartbeats fail, the registration is kept: a member that returns before it has removed this node
//! needs no new inventory. A registration with an outdated failure domain stays valid until the next one
//! replaces it. If it ends first, the member has usually granted the next one, and its reply is on the way.
//!
//! Pure: the caller registers, sends heartbeats, and draws the pauses.

#[cfg(test)]
mod tests;

use std::time::Duration;

use reprise_policy::{Epoch, NodeId, Tick};

use crate::backoff::{Backoff, Pause};

/// A registration that is lost sooner is renewed with increasing delays. Otherwise two agents with one name
/// would replace each other's registration continuously.
const STABLE_AFTER: Duration = Duration::from_secs(5);
/// Nodes register a changed failure domain within this time. A label of all nodes may change at once, so
/// nodes that have run for a while spread their registrations, each of which makes a member request an
/// inventory.
const REPLACED_WITHIN: Duration = Duration::from_secs(3);

/// The registration with one member; see the module.
#[derive(Debug)]
pub struct Registrar {
    state: State,
    /// Failure domain of the node now.
    domain: String,
    /// Failed attempts of the current registration.
    attempts: Backoff,
    /// Registrations that were lost soon.
    losses: Backoff,
    link: LinkState,
}

/// Whether the member responds and knows this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LinkState {
    Up,
    Down,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Registering,
    Registered {
        granted: Granted,
        since: Tick,
    },
    /// Registered, and the next registration is requested.
    Replacing {
        granted: Granted,
        since: Tick,
    },
    /// The registration has ended, and the next one was requested before.
    Ending {
        granted: Granted,
        since: Tick,
        end: RegistrationEnd,
    },
}

/// A registration that the member has granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Number of this node.
    pub node: NodeId,
    /// Epoch of the registration.
    pub epoch: Epoch,
    /// Heartbeat period that the member requests.
    pub heartbeat_every: Duration,
}

/// Result of a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heartbeat {
    /// The member knows the registration.
    Answered,
    /// The member did not answer in time.
    Failed,
    /// The member does not know the registration.
    Unknown,
}

/// Why a registration is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistrationEnd {
    /// The member does not know the registration.
    Unknown,
    /// A newer registration has replaced it.
    Fenced,
    /// It is valid, but has another failure domain than the node.
    Outdated,
}

/// Input of a registrar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// The member has granted a registration with this failure domain.
    Granted { granted: Granted, domain: String },
    /// The member did not grant the registration.
    Refused,
    /// A heartbeat of the registration of an epoch has ended.
    Heartbeat { epoch: Epoch, result: Heartbeat },
    /// The member has rejected a call under the registration of an epoch.
    Fenced(Epoch),
    /// The node has this failure domain now.
    Domain(String),
    /// The time limit of [`Output::AwaitReplacement`] has passed.
    Overdue,
}

/// Instruction to the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Register after this pause, instead of a call that was requested before. [`Input::Granted`] or
    /// [`Input::Refused`] follows.
    Register(Pause),
    /// The node has this registration; previous ones have ended.
    Registered(Granted),
    /// The next registration is requested; the present one stays valid.
    Replacing(Granted),
    /// The registration has ended, and the node has none.
    Lost(Granted, RegistrationEnd),
    /// Send [`Input::Overdue`] after the time limit of a call.
    AwaitReplacement,
    /// The member has begun to respond and to know this node, or has stopped doing so.
    UpChanged,
}

impl RegistrationEnd {
    /// Returns the reason, for logs.
    pub fn reason(self) -> &'static str {
        match self {
            RegistrationEnd::Unknown => "the member does not know the registration",
            RegistrationEnd::Fenced => "a newer registration has replaced it",
            RegistrationEnd::Outdated => "the node's failure domain has changed",
        }
    }
}

impl Registrar {
    /// Creates a registrar whose first call is due now.
    pub fn new(domain: String) -> Registrar {
        Registrar {
            state: State::Registering,
            domain,
            attempts: Backoff::default(),
            losses: Backoff::default(),
            link: LinkState::Down,
        }
    }

    /// Returns the registration under which calls are sent.
    pub fn granted(&self) -> Option<Granted> {
        match self.state {
            State::Registering => None,
            State::Registered { granted, .. }
            | State::Replacing { granted, .. }
            | State::Ending { granted, .. } => Some(granted),
        }
    }

    /// Returns whether the member responds and knows this node.
    pub fn is_up(&self) -> bool {
        self.link == LinkState::Up
    }

    /// Processes an input; returns the instructions.
    pub fn on(&mut self, now: Tick, input: Input) -> Vec<Output> {
        let mut outputs = Vec::new();
        match input {
            Input::Granted { granted, domain } => self.begin(now, (granted, domain), &mut outputs),
            Input::Refused => outputs.push(Output::Register(self.attempts.next_pause())),
            Input::Heartbeat { epoch, result } if self.holds(epoch) => match result {
                Heartbeat::Answered => self.set_link(LinkState::Up, &mut outputs),
                Heartbeat::Failed => self.set_link(LinkState::Down, &mut outputs),
                Heartbeat::Unknown => self.end(now, RegistrationEnd::Unknown, &mut outputs),
            },
            Input::Fenced(epoch) if self.holds(epoch) => {
                self.end(now, RegistrationEnd::Fenced, &mut outputs);
            }
            Input::Heartbeat { .. } | Input::Fenced(_) => {}
            Input::Domain(domain) => {
                let is_changed = self.domain != domain;
                self.domain = domain;
                if is_changed {
                    self.replace(now, &mut outputs);
                }
            }
            Input::Overdue => {
                if let State::Ending { granted, since, end } = self.state {
                    self.lose(now, (granted, since, end), &mut outputs);
                }
            }
        }
        outputs
    }

    /// Whether calls under this registration are still of interest.
    fn holds(&self, epoch: Epoch) -> bool {
        match self.state {
            State::Registered { granted, .. } | State::Replacing { granted, .. } => granted.epoch == epoch,
            State::Registering | State::Ending { .. } => false,
        }
    }

    fn begin(&mut self, now: Tick, (granted, domain): (Granted, String), outputs: &mut Vec<Output>) {
        self.attempts.reset();
        self.state = State::Registered { granted, since: now };
        outputs.push(Output::Registered(granted));
        self.set_link(LinkState::Up, outputs);
        if domain != self.domain {
            self.replace(now, outputs);
        }
    }

    /// Requests a registration with the present failure domain, unless one is requested already.
    fn replace(&mut self, now: Tick, outputs: &mut Vec<Output>) {
        let State::Registered { granted, since } = self.state else { return };
        self.state = State::Replacing { granted, since };
        self.attempts.reset();
        outputs.push(Output::Replacing(granted));
        let is_stable = now.since(since) >= STABLE_AFTER;
        outputs.push(Output::Register(if is_stable { Pause::within(REPLACED_WITHIN) } else { Pause::NONE }));
    }

    fn end(&mut self, now: Tick, end: RegistrationEnd, outputs: &mut Vec<Output>) {
        match self.state {
            State::Registered { granted, since } => self.lose(now, (granted, since, end), outputs),
            State::Replacing { granted, since } => {
                self.state = State::Ending { granted, since, end };
                outputs.push(Output::AwaitReplacement);
            }
            State::Registering | State::Ending { .. } => {}
        }
    }

    fn lose(
        &mut self,
        now: Tick,
        (granted, since, end): (Granted, Tick, RegistrationEnd),
        outputs: &mut Vec<Output>,
    ) {
        self.state = State::Registering;
        self.attempts.reset();
        outputs.push(Output::Lost(granted, end));
        self.set_link(LinkState::Down, outputs);
        let pause = if now.since(since) >= STABLE_AFTER {
            self.losses.reset();
            Pause::NONE
        } else {
            self.losses.next_pause()
        };
        outputs.push(Output::Register(pause));
    }

    fn set_link(&mut self, link: LinkState, outputs: &mut Vec<Output>) {
        if std::mem::replace(&mut self.link, link) != link {
            outputs.push(Output::UpChanged);
        }
    }
}
