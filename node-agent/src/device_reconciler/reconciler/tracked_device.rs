//! State machine of one tracked device or file.
//!
//! Invariant: while a refused device is retried with the same spec, it is still reported as refused, so the
//! status does not alternate.

use reprise_agent_core::effect::DeviceId;
use reprise_agent_kubernetes::{DataPolicy, DeviceFact, DeviceFault, DeviceState, Reason};
use reprise_io::DeviceDescription;

use super::{DesiredDevice, DesiredPool, DeviceSpec, Kind, OpenDevice, Presence, Retry, missing_file_fault};

/// A device or file of a claim, with its state.
#[derive(Debug)]
pub(super) struct TrackedDevice {
    pub(super) description: DeviceDescription,
    pub(super) spec: DeviceSpec,
    pub(super) generation: i64,
    pub(super) data: DataPolicy,
    pub(super) state: State,
    /// Why the last attempt with the same spec was refused.
    pub(super) refused: Option<DeviceFault>,
}

/// State of a tracked device.
#[derive(Clone, Debug)]
pub(super) enum State {
    /// Idle: no task uses it.
    Vacant,
    Opening,
    Open {
        id: DeviceId,
        opened: OpenDevice,
    },
    /// Open, but it accepts no writes.
    ReadOnly {
        id: DeviceId,
        opened: OpenDevice,
        fault: DeviceFault,
    },
    /// Becomes `Faulted` afterwards if `fault` is set.
    Closing {
        id: DeviceId,
        fault: Option<DeviceFault>,
    },
    Faulted {
        id: Option<DeviceId>,
        fault: DeviceFault,
    },
    Wiping,
    Wiped,
    Refused(DeviceFault),
}

/// The next step of a tracked device.
pub(super) enum Transition {
    Keep,
    Forget,
    Replace(State),
    Close { id: DeviceId, fault: Option<DeviceFault> },
}

impl TrackedDevice {
    /// Returns an idle device with this spec.
    pub(super) fn new(pool: &DesiredPool, wanted: &DesiredDevice) -> TrackedDevice {
        TrackedDevice {
            description: wanted.description.clone(),
            spec: wanted.spec.clone(),
            generation: pool.generation,
            data: pool.data,
            state: State::Vacant,
            refused: None,
        }
    }

    /// Sets the spec to apply next.
    pub(super) fn retarget(&mut self, pool: &DesiredPool, wanted: &DesiredDevice) {
        let is_same = self.spec == wanted.spec && self.data == pool.data;
        if !is_same || self.generation != pool.generation {
            self.refused = None;
        }
        (self.description, self.spec) = (wanted.description.clone(), wanted.spec.clone());
        (self.generation, self.data) = (pool.generation, pool.data);
    }

    /// Marks the device as refused.
    pub(super) fn refuse(&mut self, fault: DeviceFault) {
        self.refused = Some(fault.clone());
        self.state = State::Refused(fault);
    }

    /// Returns why the device is refused, also while it is retried with the same spec.
    pub(super) fn refusal(&self) -> Option<&DeviceFault> {
        match &self.state {
            State::Refused(fault) => Some(fault),
            State::Vacant | State::Opening | State::Wiping => self.refused.as_ref(),
            State::Open { .. }
            | State::ReadOnly { .. }
            | State::Closing { .. }
            | State::Faulted { .. }
            | State::Wiped => None,
        }
    }

    /// Returns whether the pool's spec was attempted. A wipe in progress counts, as readiness must not wait
    /// for it.
    pub(super) fn was_attempted(&self, pool: &DesiredPool) -> bool {
        let is_ahead = matches!(self.state, State::Vacant | State::Opening | State::Closing { .. });
        self.is_left_alone(pool) || !is_ahead
    }

    /// Returns whether the pool's spec was applied or refused.
    pub(super) fn is_applied(&self, pool: &DesiredPool) -> bool {
        self.is_left_alone(pool) || (self.was_attempted(pool) && !matches!(self.state, State::Wiping))
    }

    fn is_left_alone(&self, pool: &DesiredPool) -> bool {
        self.refusal().is_some() && self.generation == pool.generation
    }

    /// Returns whether an open device satisfies the desired spec. The policy for foreign signatures, the
    /// reserve and an unused fallback engine matter only while a device is opened.
    fn satisfies(&self, opened: &OpenDevice, pool: &DesiredPool, wanted: &DeviceSpec) -> bool {
        let fallback = if opened.engine == wanted.engine { wanted.fallback } else { self.spec.fallback };
        let DeviceSpec { foreign, reserve_bytes, .. } = *wanted;
        let as_opened = DeviceSpec { foreign, reserve_bytes, fallback, ..self.spec.clone() };
        as_opened == *wanted && self.data == pool.data
    }

    /// Returns the next step, given the desired spec, if any.
    pub(super) fn next(&self, wanted: Option<(&DesiredPool, &DesiredDevice)>, retry: Retry) -> Transition {
        let Some((pool, device)) = wanted else {
            return match &self.state {
                State::Opening | State::Wiping => Transition::Keep,
                State::Closing { id, fault: Some(_) } => {
                    Transition::Replace(State::Closing { id: *id, fault: None })
                }
                State::Closing { .. } => Transition::Keep,
                State::Open { id, .. } | State::ReadOnly { id, .. } | State::Faulted { id: Some(id), .. } => {
                    Transition::Close { id: *id, fault: None }
                }
                State::Vacant | State::Wiped | State::Refused(_) | State::Faulted { id: None, .. } => {
                    Transition::Forget
                }
            };
        };
        let is_same = self.spec == device.spec && self.data == pool.data;
        let is_renewed = !is_same || self.generation != pool.generation;
        let is_gone = device.presence == Presence::Missing;
        match &self.state {
            State::Opening | State::Wiping | State::Closing { .. } | State::Vacant => Transition::Keep,
            State::Open { id, .. } if is_gone => {
                Transition::Close { id: *id, fault: Some(missing_fault(self.spec.kind)) }
            }
            State::Open { id, opened } if !self.satisfies(opened, pool, &device.spec) => {
                Transition::Close { id: *id, fault: None }
            }
            State::Open { .. } => Transition::Keep,
            State::ReadOnly { id, .. } | State::Faulted { id: Some(id), .. } if is_gone => {
                Transition::Close { id: *id, fault: Some(missing_fault(self.spec.kind)) }
            }
            State::ReadOnly { id, .. } | State::Faulted { id: Some(id), .. } if is_renewed => {
                Transition::Close { id: *id, fault: None }
            }
            State::ReadOnly { .. } | State::Faulted { id: Some(_), .. } => Transition::Keep,
            State::Faulted { id: None, .. } if is_gone => Transition::Keep,
            // The device is present again.
            State::Faulted { id: None, .. } => Transition::Replace(State::Vacant),
            State::Refused(_) if is_renewed || retry == Retry::Refused => Transition::Replace(State::Vacant),
            State::Wiped if !is_same => Transition::Replace(State::Vacant),
            State::Refused(_) | State::Wiped => Transition::Keep,
        }
    }

    /// Returns the device's facts. The caller adds usage, health and drive.
    pub(super) fn fact(&self, path: &str) -> (Option<DeviceId>, DeviceFact) {
        let waiting =
            |message: &str| DeviceFault { reason: Reason::Progressing, message: message.to_owned() };
        let (id, state, fault) = match &self.state {
            State::Vacant | State::Opening | State::Wiping if self.refused.is_some() => {
                (None, DeviceState::Refused, self.refused.clone())
            }
            State::Vacant => (None, DeviceState::Found, Some(waiting("waiting to be opened"))),
            State::Opening => (None, DeviceState::Opening, Some(waiting("reading the journal"))),
            State::Open { id, .. } => (Some(*id), DeviceState::Open, None),
            State::ReadOnly { id, fault, .. } => (Some(*id), DeviceState::Faulted, Some(fault.clone())),
            State::Closing { fault: Some(fault), .. } => (None, DeviceState::Faulted, Some(fault.clone())),
            State::Closing { .. } => (None, DeviceState::Found, Some(waiting("closing"))),
            State::Faulted { fault, .. } => (None, DeviceState::Faulted, Some(fault.clone())),
            State::Wiping => (None, DeviceState::Found, Some(waiting("destroying the data"))),
            State::Wiped => (None, DeviceState::Wiped, None),
            State::Refused(fault) => (None, DeviceState::Refused, Some(fault.clone())),
        };
        let opened = match &self.state {
            State::Open { opened, .. } | State::ReadOnly { opened, .. } => Some(opened),
            _ => None,
        };
        let fact = DeviceFact {
            path: path.to_owned(),
            pool: self.spec.pool.clone(),
            state,
            fault,
            fallback: opened.and_then(|opened| opened.fallback.clone()),
            size: 0,
            used: 0,
            engine: opened.map(|opened| opened.engine),
            direct: opened.is_some_and(|opened| opened.direct),
            read_p99_micros: None,
            slow: None,
            media_errors: None,
            spare_percent: None,
            worn: None,
            serial: None,
            model: None,
            namespace: None,
            emulated: false,
        };
        (id, fact)
    }
}

/// Returns the fault of a missing device or file.
pub(super) fn missing_fault(kind: Kind) -> DeviceFault {
    match kind {
        Kind::File => missing_file_fault(),
        Kind::Device => {
            let message = "the device is missing: its path does not resolve. The agent opens it again when it reappears, and drops it when its pool changes";
            DeviceFault { reason: Reason::DeviceFailed, message: message.to_owned() }
        }
        Kind::Controller => {
            let message = "the NVMe controller is missing: no function is at its PCI address. The agent opens it again when it reappears, and drops it when its pool changes";
            DeviceFault { reason: Reason::DeviceFailed, message: message.to_owned() }
        }
    }
}
