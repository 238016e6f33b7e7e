//! Forward pass of a model whose layers read and write KV. Independent of the machine that computes it.
//!
//! The CPU is one layer ahead: when layer n begins, it launches I/O and enqueues layer n + 1, which waits for its
//! reads. Layer 0 has no reads: they belong to the time before the pass.

use std::collections::BTreeMap;

use reprise_policy::slack::scheduler::{Launch, Moment, Scheduler, Ticket};
use reprise_policy::slack::{Computation, Direction};

/// Machine that computes layers and launches I/O kernels.
pub trait PassMachine {
    /// Why a pass failed.
    type Error;

    /// Starts a pass.
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

    /// Launches an I/O kernel now. Launches are numbered from 0 in each pass. `limited`: on few SMs, one kernel at a
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
}

/// Size of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// Computation of each layer.
    pub computation: Computation,
    /// Number of layers, at least 1.
    pub layers: u32,
    /// Read IOCBs of each layer but the first.
    pub reads: u32,
    /// Write IOCBs of each layer.
    pub writes: u32,
}

/// I/O of a pass.
#[derive(Debug)]
pub enum Mode<'a> {
    /// No I/O.
    Alone,
    /// Reads of the next layer and writes of the last one start together before each layer.
    Concurrent,
    /// The scheduler decides before each layer.
    Scheduled(&'a mut Scheduler),
}

/// Result of a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PassResult {
    /// Microseconds of the layers, with the time that they wait for reads.
    pub micros: f64,
    /// Write IOCBs that were launched after the last layer had begun.
    pub carried_over: u32,
}

/// Runs a pass; all I/O has ended when it returns.
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
            for layer in 0..pass.layers {
                machine.wait_begin(layer)?;
                if layer + 1 < pass.layers {
                    machine.enqueue(pass.computation, None)?;
                }
            }
            Ok(PassResult { micros: machine.finish()?, carried_over: 0 })
        }
        Mode::Concurrent => concurrent(machine, pass),
        Mode::Scheduled(scheduler) => Scheduled::new(machine, pass, scheduler).run(),
    }
}

fn concurrent<M: PassMachine>(machine: &mut M, pass: &Pass) -> Result<PassResult, M::Error> {
    let mut launches = 0;
    for layer in 0..pass.layers {
        machine.wait_begin(layer)?;
        let mut behind = None;
        if layer + 1 < pass.layers && pass.reads > 0 {
            machine.launch(Direction::Read, pass.reads, false)?;
            behind = Some(launches);
            launches += 1;
        }
        if layer > 0 && pass.writes > 0 {
            machine.launch(Direction::Write, pass.writes, false)?;
            launches += 1;
        }
        if layer + 1 < pass.layers {
            machine.enqueue(pass.computation, behind)?;
        }
    }
    let micros = machine.finish()?;
    if pass.writes > 0 {
        machine.launch(Direction::Write, pass.writes, false)?;
        launches += 1;
    }
    while machine.ended()? < launches {
        std::thread::yield_now();
    }
    Ok(PassResult { micros, carried_over: pass.writes })
}

/// State of a scheduled pass.
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
}

impl<'a, M: PassMachine> Scheduled<'a, M> {
    fn new(machine: &'a mut M, pass: &'a Pass, scheduler: &'a mut Scheduler) -> Scheduled<'a, M> {
        let mut layers = BTreeMap::new();
        for layer in 1..pass.layers {
            for _ in 0..pass.reads {
                layers.extend(scheduler.push_read(layer).map(|ticket| (ticket, layer)));
            }
        }
        let (last_read, launches) = (BTreeMap::new(), Vec::new());
        Scheduled { machine, pass, scheduler, layers, last_read, launches, ended: 0 }
    }

    fn run(mut self) -> Result<PassResult, M::Error> {
        for layer in 0..self.pass.layers {
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
            if layer + 1 < self.pass.layers {
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
        Ok(PassResult { micros, carried_over })
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
