//! The way of one direction through extents: the path in use, and attempts to get a better one.
//!
//! ```text
//! Unknown ─ probe ─▶ Rings ◀── retry ──┐
//!              ├───▶ Files  (rings busy) ┤
//!              └───▶ Closed (rings busy) ┘
//! ```
//!
//! Other sessions may hold all queue pairs, or the agent may still map the window, when a session begins. The way then uses
//! files or the arena, and tries again after a pause that doubles. The window stays registered until its session ends, so
//! each attempt of a session uses the same one.
//!
//! An attempt begins with the devices that the session may use. Loads learn them from pins of blocks that they are about to
//! read, so that they open a path although the agent lends no extent, for example because the write budget of its devices
//! is spent. Saves lease one extent for a moment, which the agent refunds.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_client::{Client, ClientError, CommitOptions, ExtentStatus, PinOutcome};
use reprise_cuda::store::{Backend, BackendKind, KvOrder, RingCounters, Unusable, choose};
use reprise_policy::BlockKey;

use crate::blocks::WRITE_TIMEOUT;
use crate::files::FilePath;
use crate::path::{Devices, ExtentDevice, ExtentPath, HEADERS, RingLoad};
use crate::rings::{PendingWindow, RingPath, RingPathSettings, RingWindow};

/// Size of a window, if blocks are not larger: all devices are busy while it is filled.
const WINDOW_BYTES: u64 = 32 << 20;

/// Blocks that are pinned for a moment, to see which devices a session may use.
const PROBED: usize = 16;

/// Pause after the first attempt to get rings that was refused for a while.
const RETRY_MIN: Duration = Duration::from_secs(1);

/// Longest pause between two attempts.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// Time limit of getting rings again, within a transfer that could move its blocks otherwise.
const RETRY_LIMIT: Duration = Duration::from_secs(1);

/// Way of one direction.
#[derive(Debug, Default)]
pub(crate) struct Way {
    state: State,
    /// Window of rings, of the session that has registered it.
    window: Option<(Client, Window)>,
    retry: Option<Retry>,
    /// Some blocks on devices, which the next load reads.
    on_devices: Vec<BlockKey>,
}

#[derive(Debug, Default)]
enum State {
    /// Not tried with the current session.
    #[default]
    Unknown,
    Rings(Box<RingPath>),
    Files(Box<FilePath>),
    /// The agent of this session allows none.
    Closed(Client),
}

#[derive(Debug)]
enum Window {
    Pending(PendingWindow),
    Ready(RingWindow),
}

/// A later attempt to get rings.
#[derive(Clone, Copy, Debug)]
struct Retry {
    at: Instant,
    pause: Duration,
}

impl Retry {
    fn after(before: Option<Retry>) -> Retry {
        let pause = before.map_or(RETRY_MIN, |before| (2 * before.pause).min(RETRY_MAX));
        Retry { at: Instant::now() + pause, pause }
    }
}

/// What a change of the way found: the reasons of unusable backends.
pub(crate) type Found = Vec<Unusable>;

/// Why rings cannot be used.
enum NoRings {
    /// For this session.
    Refused(String),
    /// For a while.
    Busy(String),
}

impl NoRings {
    fn text(self) -> String {
        match self {
            NoRings::Refused(text) | NoRings::Busy(text) => text,
        }
    }
}

impl From<ClientError> for NoRings {
    fn from(error: ClientError) -> NoRings {
        match error {
            ClientError::Busy(_) | ClientError::Timeout { .. } => {
                NoRings::Busy(format!("{error}; trying again later"))
            }
            error => NoRings::Refused(error.to_string()),
        }
    }
}

impl From<anyhow::Error> for NoRings {
    fn from(error: anyhow::Error) -> NoRings {
        match error.downcast::<ClientError>() {
            Ok(error) => error.into(),
            Err(error) => NoRings::Refused(format!("{error:#}")),
        }
    }
}

/// A path with any backend.
pub(crate) trait AnyPath {
    fn set_timeout(&mut self, timeout: Duration);
    fn slots(&self) -> usize;
    fn load(&mut self, blocks: &[(usize, BlockKey)]) -> anyhow::Result<Vec<RingLoad>>;
    fn save(
        &mut self,
        blocks: &[(usize, BlockKey)],
        options: CommitOptions,
        wait: Duration,
    ) -> anyhow::Result<Vec<ExtentStatus>>;
    fn object(&self, slot: usize, object: u32) -> reprise_buffers::Span;
    fn objects(&self) -> u32;
    fn is_usable(&self) -> bool;
}

impl<D: Devices> AnyPath for ExtentPath<D> {
    fn set_timeout(&mut self, timeout: Duration) {
        ExtentPath::set_timeout(self, timeout);
    }

    fn slots(&self) -> usize {
        ExtentPath::slots(self)
    }

    fn load(&mut self, blocks: &[(usize, BlockKey)]) -> anyhow::Result<Vec<RingLoad>> {
        ExtentPath::load(self, blocks)
    }

    fn save(
        &mut self,
        blocks: &[(usize, BlockKey)],
        options: CommitOptions,
        wait: Duration,
    ) -> anyhow::Result<Vec<ExtentStatus>> {
        ExtentPath::save(self, blocks, options, wait)
    }

    fn object(&self, slot: usize, object: u32) -> reprise_buffers::Span {
        ExtentPath::object(self, slot, object as usize)
    }

    fn objects(&self) -> u32 {
        self.layout().objects()
    }

    fn is_usable(&self) -> bool {
        self.devices.is_usable()
    }
}

impl Way {
    /// Opens the way with the client's session, unless it is open; tries again to get rings that were busy. Getting rings
    /// takes half of the time until the deadline at most, and a second when they are tried again, so that the arena can
    /// move the blocks otherwise. The question for the devices of loaded blocks counts as a part of that.
    ///
    /// # Errors
    /// The session has ended, or the agent does not answer.
    pub(crate) fn follow(
        &mut self,
        client: &Client,
        pairs: u32,
        deadline: Instant,
    ) -> Result<Option<Found>, ClientError> {
        let is_current = self.is_current();
        if is_current && !self.is_retry_due() {
            return Ok(None);
        }
        if !is_current {
            let (window, on_devices) = (self.window.take(), std::mem::take(&mut self.on_devices));
            *self = Way { window, on_devices, ..Way::default() };
        }
        let half = deadline.saturating_duration_since(Instant::now()) / 2;
        let limit = if is_current { half.min(RETRY_LIMIT) } else { half };
        let until = Instant::now() + limit;
        let devices = match probe(client, &self.on_devices, limit) {
            Ok(Some(devices)) => Ok(devices),
            // No extent is free at the moment.
            Ok(None) | Err(ClientError::Busy(_)) => {
                self.put_off();
                return Ok(None);
            }
            // The limit was shorter than that of a call: the agent is not suspected.
            Err(ClientError::Timeout { after, .. }) if after >= limit => {
                self.put_off();
                return Ok(None);
            }
            Err(error @ ClientError::BadRequest(_)) => Err(error.to_string()),
            Err(error) => return Err(error),
        };
        if is_current {
            let Ok(devices) = devices else {
                self.put_off();
                return Ok(None);
            };
            return Ok(self.retry_rings(client, &devices, (pairs, until)));
        }
        let choice = choose(|kind| match kind {
            BackendKind::GpuQueue => {
                let devices = devices.as_ref().map_err(Clone::clone)?;
                let rings = self.open_rings(client, devices, (pairs, until));
                rings.map(State::Rings).map_err(NoRings::text)
            }
            kind => open(kind, client, devices.as_ref()),
        });
        match choice {
            Ok(choice) => {
                self.state = choice.backend;
                Ok(Some(choice.unusable))
            }
            Err(unusable) => {
                self.state = State::Closed(client.clone());
                Ok(Some(unusable))
            }
        }
    }

    /// Notes blocks on devices that are about to be loaded.
    pub(crate) fn will_load(&mut self, keys: impl Iterator<Item = BlockKey>) {
        self.on_devices = keys.take(PROBED).collect();
    }

    /// Waits before the next attempt to get rings, if there is one: each costs calls of the agent.
    fn put_off(&mut self) {
        self.retry = self.retry.map(|retry| Retry::after(Some(retry)));
    }

    /// Replaces files or the arena by rings.
    fn retry_rings(
        &mut self,
        client: &Client,
        devices: &[ExtentDevice],
        limits: (u32, Instant),
    ) -> Option<Found> {
        match self.open_rings(client, devices, limits) {
            Ok(path) => {
                tracing::info!("queue pairs are free: extents move by rings from now on");
                self.state = State::Rings(path);
                Some(Vec::new())
            }
            Err(_) => None,
        }
    }

    fn open_rings(
        &mut self,
        client: &Client,
        devices: &[ExtentDevice],
        limits: (u32, Instant),
    ) -> Result<Box<RingPath>, NoRings> {
        let opened = self.try_rings(client, devices, limits);
        self.retry = match &opened {
            Err(NoRings::Busy(_)) => Some(Retry::after(self.retry)),
            Ok(_) | Err(NoRings::Refused(_)) => None,
        };
        opened
    }

    fn try_rings(
        &mut self,
        client: &Client,
        devices: &[ExtentDevice],
        (pairs, until): (u32, Instant),
    ) -> Result<Box<RingPath>, NoRings> {
        let driven: Vec<ExtentDevice> = devices.iter().filter(|(_, file)| file.is_none()).cloned().collect();
        if driven.is_empty() {
            let text = "no device lends queue pairs; set session.queue_pairs of an agent that drives NVMe controllers";
            return Err(NoRings::Refused(text.to_owned()));
        }
        let order = KvOrder::BlockLayerPart;
        let window = self.registered(client, order, until)?;
        let settings = RingPathSettings { pairs, order, ..RingPathSettings::default() };
        let mut path = RingPath::with_window(client, &window, settings);
        path.devices.ensure(&driven, until)?;
        self.window = None;
        Ok(Box::new(path))
    }

    /// Returns the window of the client's session, after its registration, which it starts once.
    fn registered(&mut self, client: &Client, order: KvOrder, until: Instant) -> Result<RingWindow, NoRings> {
        let kept = self.window.take().filter(|(of, _)| of.is_alive() && of.is_same_session(client));
        let window = match kept {
            Some((_, window)) => window,
            None => Window::Pending(RingWindow::start(client, slots(client), order)?),
        };
        let window = match window {
            Window::Ready(window) => window,
            Window::Pending(mut pending) => {
                let patience = until.saturating_duration_since(Instant::now());
                match pending.poll(patience)? {
                    Some(window) => window,
                    None => {
                        self.window = Some((client.clone(), Window::Pending(pending)));
                        return Err(NoRings::Busy(
                            "the agent still maps the window for its controllers; trying again later"
                                .to_owned(),
                        ));
                    }
                }
            }
        };
        self.window = Some((client.clone(), Window::Ready(window.clone())));
        Ok(window)
    }

    fn is_current(&self) -> bool {
        match &self.state {
            State::Unknown => false,
            State::Rings(path) => !path.has_ended(),
            State::Files(path) => !path.has_ended(),
            State::Closed(client) => client.is_alive(),
        }
    }

    fn is_retry_due(&self) -> bool {
        self.retry.is_some_and(|retry| Instant::now() >= retry.at)
    }

    /// Reports whether the agent of the current session allows no backend for now.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(&self.state, State::Closed(client) if client.is_alive()) && !self.is_retry_due()
    }

    pub(crate) fn path(&mut self) -> Option<&mut dyn AnyPath> {
        match &mut self.state {
            State::Unknown | State::Closed(_) => None,
            State::Rings(path) => Some(&mut **path),
            State::Files(path) => Some(&mut **path),
        }
    }

    /// Logs an error; a path that cannot be used again is opened again with the next blocks.
    pub(crate) fn fail<R>(&mut self, error: &anyhow::Error) -> Option<R> {
        tracing::warn!(error = format!("{error:#}"), "extents could not be used");
        self.leave_unusable();
        None
    }

    /// Closes a path that cannot be used again, such as one whose queue pairs others have taken; keeps its window.
    pub(crate) fn leave_unusable(&mut self) {
        if !self.path().is_some_and(|path| path.is_usable())
            && let State::Rings(path) = std::mem::take(&mut self.state)
        {
            // The caller may have the client of a later session.
            let client = path.devices.client.clone();
            self.window = path.into_window().map(|window| (client, Window::Ready(window)));
        }
    }

    pub(crate) fn name(&self) -> Option<String> {
        match &self.state {
            State::Unknown | State::Closed(_) => None,
            State::Rings(path) => Some(path.name().to_owned()),
            State::Files(path) => Some(path.name().to_owned()),
        }
    }

    pub(crate) fn ring_counters(&self) -> RingCounters {
        match &self.state {
            State::Rings(path) => path.ring_counters(),
            State::Unknown | State::Closed(_) | State::Files(_) => RingCounters::default(),
        }
    }
}

/// Returns devices of extents that the session may use: those of these blocks or, without any, that of an extent that is
/// leased for a moment. `None` if no extent is free.
fn probe(
    client: &Client,
    on_devices: &[BlockKey],
    left: Duration,
) -> Result<Option<Vec<ExtentDevice>>, ClientError> {
    let mut devices: Vec<ExtentDevice> = Vec::new();
    if !on_devices.is_empty() {
        let pins = client.pin_extents_within(on_devices, left)?;
        let pinned = pins.iter().filter_map(|pin| match pin {
            PinOutcome::Pinned(extent) => Some((extent.device(), extent.file().cloned())),
            PinOutcome::Miss | PinOutcome::NotDurable | PinOutcome::Limit => None,
        });
        devices.extend(pinned);
        // A lease may be refused although blocks can be read, so it is only asked why no block can be.
        let may_be_pinned_later = |pin: &PinOutcome| matches!(pin, PinOutcome::Miss | PinOutcome::Limit);
        if devices.is_empty() && pins.iter().any(may_be_pinned_later) {
            return Ok(None);
        }
    }
    if devices.is_empty() {
        let leased = client.lease_extents(1, Duration::ZERO)?;
        devices.extend(leased.iter().map(|extent| (extent.device(), extent.file().cloned())));
    }
    Ok((!devices.is_empty()).then_some(devices))
}

/// Returns the blocks of a window.
fn slots(client: &Client) -> usize {
    let blocks = WINDOW_BYTES / client.layout().block_bytes().max(1);
    blocks.clamp(1, HEADERS as u64) as usize
}

/// Opens a backend without rings over a window.
fn open(
    kind: BackendKind,
    client: &Client,
    devices: Result<&Vec<ExtentDevice>, &String>,
) -> Result<State, String> {
    match kind {
        BackendKind::GpuQueue => Err("rings are opened with a window".to_owned()),
        BackendKind::Gds => Err("KV memory is not of a GPU; use an engine that runs on a GPU".to_owned()),
        BackendKind::Staged => {
            let mut files: Vec<(u32, Arc<File>)> = Vec::new();
            for (device, file) in devices.map_err(Clone::clone)? {
                if let Some(file) = file
                    && !files.iter().any(|(known, _)| known == device)
                {
                    files.push((*device, Arc::clone(file)));
                }
            }
            if files.is_empty() {
                return Err("no device has a file; set session.extents of the agent".to_owned());
            }
            let path = FilePath::open(client, slots(client), files, WRITE_TIMEOUT);
            Ok(State::Files(Box::new(path.map_err(|error| format!("{error:#}"))?)))
        }
        BackendKind::Host => Err("blocks that no other backend moves take the agent's arena".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_between_attempts_double_up_to_a_limit() {
        let mut pauses = Vec::new();
        let mut retry = None;
        for _ in 0..8 {
            retry = Some(Retry::after(retry));
            pauses.extend(retry.map(|retry| retry.pause.as_secs()));
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
    }

    #[test]
    fn attempt_without_a_free_extent_is_put_off() {
        let due = Retry { at: Instant::now(), pause: RETRY_MIN };
        let mut way = Way { retry: Some(due), ..Way::default() };
        assert!(way.is_retry_due());
        way.put_off();
        assert!(!way.is_retry_due(), "the next transfer does not ask again");
        assert_eq!(way.retry.map(|retry| retry.pause), Some(2 * RETRY_MIN));
        let mut way = Way::default();
        way.put_off();
        assert!(way.retry.is_none(), "a way without an attempt stays as it is");
    }

    #[test]
    fn only_busy_queue_pairs_and_timeouts_are_tried_again() {
        let busy = ClientError::Busy("others hold them".to_owned());
        assert!(
            matches!(NoRings::from(anyhow::Error::from(busy)), NoRings::Busy(text) if text.contains("later"))
        );
        let late = ClientError::Timeout { call: "request queues", after: Duration::ZERO };
        assert!(matches!(NoRings::from(late), NoRings::Busy(_)));
        let refused = ClientError::BadRequest("too deep".to_owned());
        assert!(matches!(NoRings::from(refused), NoRings::Refused(_)));
        assert!(matches!(NoRings::from(anyhow::anyhow!("no memory")), NoRings::Refused(_)));
    }
}
