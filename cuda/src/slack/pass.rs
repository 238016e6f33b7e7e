//! Forward passes of a model whose layers read and write KV. Independent of the machine that computes it.
//!
//! The CPU is one layer ahead: when layer n begins, it launches I/O and enqueues layer n + 1, which waits for its
//! reads. The first layer of a pass has no reads: they belong to the time before the pass. Passes follow each other
//! without a pause, so that I/O of one that is left may slow the next one.

use std::collections::BTreeMap;

use reprise_policy::slack::scheduler::{Launch, Moment, Scheduler, Ticket};
use reprise_policy::slack::{Computation, Direction};

/// Machine that computes layers and launches I/O kernels.
pub trait PassMachine {
    /// Why a pass failed.
    type Error;

    /// Starts passes.
    ///
    /// # Errors
    /// The machine refused work.
    fn start(&mut self) -> Result<(), Self::Error>;

    /// Enqueues the next layer, behind the launch with this number if there is one.
    ///
    /// # Errors
    /// The machine refused work.
    fn enqueue(&mut self, computation: Computation, behind: Option<usize>) -> Result<(), Self::Error>;

    /// Waits until an enqueued layer begins.
    ///
    /// # Errors
    /// The machine failed.
    fn wait_begin(&mut self, layer: u32) -> Result<(), Self::Error>;

    /// Launches an I/O kernel now. Launches and layers are numbered from 0 since the start. `limited`: on few SMs, one kernel at a
    /// time; otherwise on all SMs, next to kernels of the other direction.
    ///
    /// # Errors
    /// The machine refused work.
    fn launch(&mut self, direction: Direction, iocbs: u32, limited: bool) -> Result<(), Self::Error>;

    /// Number of launches that have ended, in order.
    ///
    /// # Errors
    /// The machine failed.
    fn ended(&mut self) -> Result<usize, Self::Error>;

    /// Waits for all layers; returns the microseconds from the begin of the first to the end of the last one.
    ///
    /// # Errors
    /// The machine failed.
    fn finish(&mut self) -> Result<f64, Self::Error>;

    /// Waits for all launches too; returns the microseconds from the begin of the first layer until all has ended.
    ///
    /// # Errors
    /// The machine failed.
    fn drain(&mut self) -> Result<f64, Self::Error>;
}

/// Size of passes that follow each other without a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Computation of each layer.
    pub computation: Computation,
    /// Number of passes, at least 1.
    pub passes: u32,
    /// Number of layers of each pass, at least 1.
    pub layers: u32,
    /// Read IOCBs of each layer but the first of a pass.
    pub reads: u32,
    /// Write IOCBs of each layer.
    pub writes: u32,
}

impl Pass {
    /// Returns the number of layers of all passes.
    fn all_layers(&self) -> u32 {
        self.passes * self.layers
    }

    /// Returns the read IOCBs of a layer, counted over all passes.
    fn reads_of(&self, layer: u32) -> u32 {
        if layer < self.all_layers() && !layer.is_multiple_of(self.layers) { self.reads } else { 0 }
    }

    /// Returns the read and write IOCBs of all passes.
    pub fn iocbs(&self) -> (u32, u32) {
        (self.passes * (self.layers - 1) * self.reads, self.all_layers() * self.writes)
    }
}

/// I/O kernels next to the layers of passes.
#[derive(Debug)]
pub enum Mode<'a> {
    /// No I/O.
    Alone,
    /// Reads of the next layer and writes of the last one start before each layer. `limited`: on few SMs, one kernel
    /// at a time, as launches of the scheduler; otherwise both together on all SMs.
    Unscheduled {
        /// Whether launches have the limits of those of the scheduler.
        limited: bool,
    },
    /// The scheduler decides before each layer. I/O that it has left waits over all passes, and is launched behind them.
    Scheduled(&'a mut Scheduler),
}

/// Times and I/O of passes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PassResult {
    /// Microseconds of the layers of all passes, with the time that they wait for reads.
    pub micros: f64,
    /// Microseconds until all I/O of the passes has ended too.
    pub total_micros: f64,
    /// Write IOCBs that were launched after the last layer had ended.
    pub carried_over: u32,
    /// Read and write IOCBs that were launched.
    pub iocbs: (u32, u32),
}

/// Runs passes; all I/O has ended when it returns.
///
/// # Errors
/// The machine refused work or failed.
pub fn run_pass<M: PassMachine>(
    machine: &mut M,
    pass: &Pass,
    mode: Mode<'_>,
) -> Result<PassResult, M::Error> {
    machine.start()?;
    machine.enqueue(pass.computation, None)?;
    match mode {
        Mode::Alone => {
            for layer in 0..pass.all_layers() {
                machine.wait_begin(layer)?;
                if layer + 1 < pass.all_layers() {
                    machine.enqueue(pass.computation, None)?;
                }
            }
            let micros = machine.finish()?;
            Ok(PassResult { micros, total_micros: machine.drain()?, ..PassResult::default() })
        }
        Mode::Unscheduled { limited } => unscheduled(machine, pass, limited),
        Mode::Scheduled(scheduler) => Scheduled::new(machine, pass, scheduler).run(),
    }
}

fn unscheduled<M: PassMachine>(machine: &mut M, pass: &Pass, limited: bool) -> Result<PassResult, M::Error> {
    let (mut launches, mut reads, mut writes) = (0, 0, 0);
    for layer in 0..pass.all_layers() {
        machine.wait_begin(layer)?;
        let mut behind = None;
        let due = pass.reads_of(layer + 1);
        if due > 0 {
            machine.launch(Direction::Read, due, limited)?;
            behind = Some(launches);
            launches += 1;
            reads += due;
        }
        if layer > 0 && pass.writes > 0 {
            machine.launch(Direction::Write, pass.writes, limited)?;
            launches += 1;
            writes += pass.writes;
        }
        if layer + 1 < pass.all_layers() {
            machine.enqueue(pass.computation, behind)?;
        }
    }
    let micros = machine.finish()?;
    if pass.writes > 0 {
        machine.launch(Direction::Write, pass.writes, limited)?;
        writes += pass.writes;
    }
    let total_micros = machine.drain()?;
    Ok(PassResult { micros, total_micros, carried_over: pass.writes, iocbs: (reads, writes) })
}

/// State of scheduled passes. Layers are counted over all passes.
struct Scheduled<'a, M> {
    machine: &'a mut M,
    pass: &'a Pass,
    scheduler: &'a mut Scheduler,
    /// Layer of each pending read.
    layers: BTreeMap<Ticket, u32>,
    /// Last launch with a read of each layer.
    last_read: BTreeMap<u32, usize>,
    /// Launched IOCBs by launch, emptied when it ends.
    launches: Vec<Vec<Ticket>>,
    ended: usize,
    /// Launched read and write IOCBs.
    iocbs: (u32, u32),
}

impl<'a, M: PassMachine> Scheduled<'a, M> {
    fn new(machine: &'a mut M, pass: &'a Pass, scheduler: &'a mut Scheduler) -> Scheduled<'a, M> {
        let (layers, last_read, launches) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        Scheduled { machine, pass, scheduler, layers, last_read, launches, ended: 0, iocbs: (0, 0) }
    }

    fn run(mut self) -> Result<PassResult, M::Error> {
        for layer in 0..self.pass.all_layers() {
            if layer.is_multiple_of(self.pass.layers) {
                self.push_reads(layer);
            }
            self.machine.wait_begin(layer)?;
            self.complete()?;
            if layer > 0 {
                self.push_writes();
            }
            // A decision of overdue writes leaves the reads that are due to the one behind it.
            loop {
                self.decide(Moment::Layer { computation: self.pass.computation, layer })?;
                let due = |needed: &u32| *needed <= layer + 1;
                if !self.layers.values().any(due) {
                    break;
                }
            }
            if layer + 1 < self.pass.all_layers() {
                let behind = self.last_read.get(&(layer + 1)).copied();
                self.machine.enqueue(self.pass.computation, behind)?;
            }
        }
        let micros = self.machine.finish()?;
        self.push_writes();
        let carried_over = u32::try_from(self.scheduler.pending().1).unwrap_or(u32::MAX);
        while self.scheduler.pending() != (0, 0) || self.scheduler.in_flight() > 0 {
            self.decide(Moment::Idle)?;
            self.complete()?;
            std::thread::yield_now();
        }
        Ok(PassResult { micros, total_micros: self.machine.drain()?, carried_over, iocbs: self.iocbs })
    }

    /// Adds the reads of a pass that begins with a layer.
    fn push_reads(&mut self, first: u32) {
        for layer in first..first + self.pass.layers {
            for _ in 0..self.pass.reads_of(layer) {
                self.layers.extend(self.scheduler.push_read(layer).map(|ticket| (ticket, layer)));
            }
        }
    }

    /// Adds the writes of a layer. A rejected one is not written, as a cache may do.
    fn push_writes(&mut self) {
        for _ in 0..self.pass.writes {
            if self.scheduler.push_write().is_err() {
                break;
            }
        }
    }

    fn decide(&mut self, moment: Moment) -> Result<(), M::Error> {
        let Some(Launch { direction, tickets, .. }) = self.scheduler.decide(moment) else { return Ok(()) };
        let number = self.launches.len();
        for ticket in &tickets {
            if let Some(layer) = self.layers.remove(ticket) {
                self.last_read.insert(layer, number);
            }
        }
        let iocbs = u32::try_from(tickets.len()).unwrap_or(u32::MAX);
        self.launches.push(tickets);
        match direction {
            Direction::Read => self.iocbs.0 += iocbs,
            Direction::Write => self.iocbs.1 += iocbs,
        }
        self.machine.launch(direction, iocbs, true)
    }

    fn complete(&mut self) -> Result<(), M::Error> {
        let ended = self.machine.ended()?.max(self.ended);
        for tickets in &mut self.launches[self.ended..ended] {
            for ticket in std::mem::take(tickets) {
                self.scheduler.complete(ticket);
            }
        }
        self.ended = ended;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
