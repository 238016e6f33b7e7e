//! A started controller that several users share: the engine has its own queue pair, and others use the admin
//! queue next to it, for the health log and for further queue pairs.
//!
//! The engine never waits for another user while it moves data. When the engine ends, the controller is shut down for
//! all users: later calls return [`NvmeError::Closed`].

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use reprise_io::HealthLog;

use crate::backing::Backing;
use crate::controller::{Controller, RawQueuePair, check_alive};
use crate::data::DataFormat;
use crate::error::NvmeError;
use crate::lender::QueueLender;
use crate::relay::{Relay, RelayedQueue};
use crate::spec::{ControllerIdentity, ControllerStatus, Version, offset};

/// A controller that an engine uses, without the type of its backing.
pub trait OpenController: QueueLender + fmt::Debug {
    /// Returns the identity of the controller.
    fn identity(&self) -> &ControllerIdentity;

    /// Returns the number of I/O queue pairs that the controller has granted, the engine's pair included.
    fn granted(&self) -> u16;

    /// Returns how data is described.
    fn data_format(&self) -> DataFormat;

    /// Reads the health log. Waits for other users of the admin queue.
    ///
    /// # Errors
    /// `Closed` after the engine has ended; others as for [`Controller::health`].
    fn health(&self) -> Result<HealthLog, NvmeError>;
}

/// A started controller with several users; see the module.
pub struct SharedController<B: Backing> {
    backing: Arc<B>,
    identity: ControllerIdentity,
    version: Version,
    granted: u16,
    data_format: DataFormat,
    transfer_max: u64,
    admin: Mutex<Admin<B>>,
    /// Queue pairs that other processes drive, by number.
    lent: Mutex<BTreeMap<u16, RawQueuePair>>,
    /// Forwards doorbells of other processes; started with the first queue pair that needs it.
    relay: Mutex<Option<Relay>>,
}

/// The part that one user at a time has.
struct Admin<B: Backing> {
    controller: Controller<B>,
    is_closed: bool,
    /// Memory that the controller may access until it is disabled.
    kept: Vec<Box<dyn Any + Send>>,
}

impl<B: Backing> fmt::Debug for SharedController<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedController")
            .field("model", &self.identity.model)
            .field("serial", &self.identity.serial)
            .field("granted", &self.granted)
            .finish_non_exhaustive()
    }
}

impl<B: Backing> SharedController<B> {
    /// Shares a started controller.
    pub fn new(controller: Controller<B>) -> SharedController<B> {
        SharedController {
            backing: Arc::clone(controller.backing()),
            identity: controller.identity().clone(),
            version: controller.version(),
            granted: controller.granted(),
            data_format: controller.data_format(),
            transfer_max: controller.transfer_max(),
            admin: Mutex::new(Admin { controller, is_closed: false, kept: Vec::new() }),
            lent: Mutex::default(),
            relay: Mutex::default(),
        }
    }

    /// Returns the version of the specification that the controller implements.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns the maximum size of the data of one command in bytes.
    pub fn transfer_max(&self) -> u64 {
        self.transfer_max
    }

    /// Returns the registers and the memory of the controller.
    pub fn backing(&self) -> &Arc<B> {
        &self.backing
    }

    /// Runs a function with the controller. Waits for other users of the admin queue: an admin command takes at most
    /// its deadline.
    ///
    /// # Errors
    /// `Closed` after the engine has ended, or the error of the function.
    pub fn with<T>(
        &self,
        use_it: impl FnOnce(&mut Controller<B>) -> Result<T, NvmeError>,
    ) -> Result<T, NvmeError> {
        let mut admin = self.lock();
        if admin.is_closed {
            return Err(NvmeError::Closed);
        }
        use_it(&mut admin.controller)
    }

    /// Runs a function with the controller unless another user has it now; `None` in that case.
    ///
    /// # Errors
    /// The error of the function.
    pub(crate) fn try_with<T>(
        &self,
        use_it: impl FnOnce(&mut Controller<B>) -> Result<T, NvmeError>,
    ) -> Result<Option<T>, NvmeError> {
        let mut admin = match self.admin.try_lock() {
            Ok(admin) => admin,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        use_it(&mut admin.controller).map(Some)
    }

    /// Checks that the controller works, without waiting for other users.
    ///
    /// # Errors
    /// `Gone` or `Fatal`.
    pub fn check_alive(&self) -> Result<(), NvmeError> {
        check_alive(ControllerStatus(self.backing.read(offset::CSTS)))
    }

    /// Shuts the controller down for all users: it writes its caches, and is disabled.
    pub(crate) fn shut_down(&self) -> Result<(), NvmeError> {
        self.stop_relay();
        let mut admin = self.lock();
        admin.is_closed = true;
        let result = admin.controller.shut_down();
        // Other users may keep the controller for longer than the engine keeps its memory.
        let _ = admin.controller.disable();
        admin.kept.clear();
        result
    }

    /// Disables the controller for all users.
    ///
    /// # Errors
    /// As for [`Controller::disable`].
    pub(crate) fn disable(&self) -> Result<(), NvmeError> {
        self.stop_relay();
        let mut admin = self.lock();
        admin.is_closed = true;
        let result = admin.controller.disable();
        // Without a confirmation too: the drop of a mapping ends the access, as for memory of queues (`DmaMemory`).
        admin.kept.clear();
        result
    }

    /// Keeps something until the controller is disabled, or drops it if it was.
    pub(crate) fn keep_until_disabled(&self, memory: Box<dyn Any + Send>) {
        let mut admin = self.lock();
        if !admin.is_closed {
            admin.kept.push(memory);
        }
    }

    /// Forwards doorbells of a queue pair.
    pub(crate) fn relay(&self, queue: RelayedQueue) -> Result<(), NvmeError> {
        let mut relay = self.relay.lock().unwrap_or_else(PoisonError::into_inner);
        let started = match relay.take() {
            Some(started) => started,
            None => Relay::start(&self.backing)?,
        };
        relay.insert(started).add(queue);
        Ok(())
    }

    /// Ends the forwarding of a queue pair before it returns.
    pub(crate) fn end_relay(&self, queue: u16) {
        if let Some(relay) = &*self.relay.lock().unwrap_or_else(PoisonError::into_inner) {
            relay.remove(queue);
        }
    }

    /// Ends the forwarding of all queue pairs.
    fn stop_relay(&self) {
        drop(self.relay.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Returns the queue pairs that other processes drive.
    pub(crate) fn lent(&self) -> MutexGuard<'_, BTreeMap<u16, RawQueuePair>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how data is described.
    pub(crate) fn format(&self) -> DataFormat {
        self.data_format
    }

    fn lock(&self) -> MutexGuard<'_, Admin<B>> {
        self.admin.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Backing> OpenController for SharedController<B> {
    fn identity(&self) -> &ControllerIdentity {
        &self.identity
    }

    fn granted(&self) -> u16 {
        self.granted
    }

    fn data_format(&self) -> DataFormat {
        self.data_format
    }

    fn health(&self) -> Result<HealthLog, NvmeError> {
        self.with(Controller::health)
    }
}
