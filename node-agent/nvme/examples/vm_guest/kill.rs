//! A process that is killed while it writes: all records that it has reported as durable are on the device, and the next
//! process can open the controller.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

use reprise_buffers::Span;
use reprise_io::{FileAccess, IoEngine, Op, Submission, Token, Wait};
use reprise_nvme::vfio::PciFunction;

use crate::engine;
use crate::lab::{self, LONG, pattern};
use crate::{Outcome, ensure, test};

const ROUNDS: u64 = 4;
const RECORD: u64 = 16 << 10;
/// Number of places, used in turn.
const PLACES: u64 = 256;

/// Writes records and syncs each; prints the number of each that is durable. Ends when it is killed.
pub(crate) fn write_records(function: &PciFunction, seed: u64) -> Outcome<bool> {
    let arena = lab::arena()?;
    let mut engine = engine::open(function, 1, FileAccess::ReadWrite, &arena)?;
    let (memory, mut out) = (arena.span(0, 0, RECORD)?, std::io::stdout());
    for number in 0_u64.. {
        memory.copy_in(&pattern(seed + number, RECORD))?;
        let offset = number % PLACES * RECORD;
        for op in [Op::Write { offset, from: vec![memory.clone()] }, Op::Sync] {
            ensure(engine.submit(Submission { token: Token(number), op }).is_ok(), "there is room")?;
            let mut done = Vec::new();
            while done.is_empty() {
                engine.reap(Wait::Until(LONG), &mut done)?;
            }
            done.remove(0).result?;
        }
        writeln!(out, "{number}")?;
        out.flush()?;
    }
    Ok(true)
}

pub(crate) fn run(function: &PciFunction) -> bool {
    test("killed-while-writing", || (1..=ROUNDS).try_for_each(|round| kill(function, round)))
}

fn kill(function: &PciFunction, round: u64) -> Outcome {
    let seed = round * 1_000_000;
    let mut child = Command::new(std::env::current_exe()?)
        .args(["records", &function.address().to_string(), &seed.to_string()])
        .stdout(Stdio::piped())
        .spawn()?;
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut durable = None;
    let start = Instant::now();
    for line in lines {
        durable = line?.parse::<u64>().ok().or(durable);
        // At different points of the loop.
        if durable.is_some_and(|number| number >= 20 * round) && !start.elapsed().is_zero() {
            child.kill()?;
        }
    }
    child.wait()?;
    let durable = durable.ok_or("the process has written nothing")?;
    verify(function, seed, durable)
}

/// Compares the records up to the last durable one with their contents.
///
/// The writer may have written further records whose numbers did not reach the reader before the kill. They are found
/// first, since each of them has taken the place of an old one.
pub(crate) fn verify(function: &PciFunction, seed: u64, durable: u64) -> Outcome {
    let mut records = Records::open(function, seed)?;
    let mut written = durable;
    while records.is_present(written + 1)? {
        written += 1;
    }
    // The record that was being written when the process was killed may have taken the place of the oldest one.
    for number in (written + 2).saturating_sub(PLACES)..=written {
        ensure(
            records.is_present(number)?,
            format!("record {number} of {durable} ({written} written) is lost"),
        )?;
    }
    Ok(())
}

/// The records on a device, for reading.
struct Records {
    engine: Box<dyn IoEngine>,
    memory: Span,
    seed: u64,
}

impl Records {
    fn open(function: &PciFunction, seed: u64) -> Outcome<Records> {
        let arena = lab::arena()?;
        let engine = engine::open(function, 1, FileAccess::ReadOnly, &arena)?;
        Ok(Records { engine, memory: arena.span(0, 0, RECORD)?, seed })
    }

    /// Whether the place of a record has its contents.
    fn is_present(&mut self, number: u64) -> Outcome<bool> {
        let op = Op::Read { offset: number % PLACES * RECORD, into: vec![self.memory.clone()] };
        ensure(self.engine.submit(Submission { token: Token(number), op }).is_ok(), "there is room")?;
        let mut done = Vec::new();
        while done.is_empty() {
            self.engine.reap(Wait::Until(LONG), &mut done)?;
        }
        done.remove(0).result?;
        let mut read = vec![0; RECORD as usize];
        self.memory.copy_out(&mut read);
        Ok(read == pattern(self.seed + number, RECORD))
    }
}
