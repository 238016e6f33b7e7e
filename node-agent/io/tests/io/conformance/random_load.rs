//! A random load against a model: a plain array of pages.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use reprise_buffers::Span;
use reprise_io::{Completion, IO_ALIGN, IoEngine, Op, Wait};

use crate::conformance::fixture::{CAPACITY, FOREVER, Fixture, bytes_of, page, read, submit, sync, write};

/// Number of pages of the device that the load uses.
const PAGES: usize = 64;
/// Maximum number of pages of one operation.
const RUN_MAX: usize = 8;
const OPERATIONS: u64 = 2_000;
/// A constant: the submissions are always the same, only the order of completions depends on the device.
const SEED: u64 = 0x5EED_1234;

struct Model {
    /// Seed of each page's pattern; `None` while an operation that may change the page is in flight.
    pages: Vec<u64>,
    /// Pages of the operations in flight: no two overlap, because their order would be undefined.
    busy: Vec<bool>,
    in_flight: HashMap<u64, (usize, Vec<u64>)>,
    random: u64,
}

impl Model {
    fn draw(&mut self, limit: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % limit as u64) as usize
    }

    /// A run of unused pages.
    fn claim(&mut self) -> Option<(usize, usize)> {
        let (start, len) = (self.draw(PAGES), 1 + self.draw(RUN_MAX));
        let end = (start + len).min(PAGES);
        let free = self.busy[start..end].iter().all(|busy| !busy);
        free.then(|| self.busy[start..end].fill(true))?;
        Some((start, end))
    }

    fn settle(&mut self, done: &Completion) {
        let token = done.token.0;
        let (start, seeds) =
            self.in_flight.remove(&token).unwrap_or_else(|| panic!("{token} completed twice"));
        if let Err(error) = &done.result {
            panic!("{error}");
        }
        self.busy[start..start + seeds.len()].fill(false);
        if let Op::Write { .. } = done.op {
            self.pages[start..start + seeds.len()].copy_from_slice(&seeds);
            return;
        }
        let found: Vec<u8> = done.op.spans().iter().flat_map(bytes_of).collect();
        for (index, (found, seed)) in found.chunks(IO_ALIGN).zip(seeds).enumerate() {
            let expected = if seed == 0 { vec![0; IO_ALIGN] } else { page(seed) };
            assert!(found == expected, "page {} read by {token}", start + index);
        }
    }
}

pub(crate) fn a_random_load_agrees_with_a_model_and_every_token_completes_once(fixture: &Fixture) {
    let mut engine = fixture.open();
    let (pages, busy) = (vec![0; PAGES], vec![false; PAGES]);
    let mut model = Model { pages, busy, in_flight: HashMap::new(), random: SEED };
    let start_time = Instant::now();
    let mut done = Vec::new();
    for token in 1..=OPERATIONS {
        submit_one(engine.as_mut(), &mut model, fixture, token);
        let full = engine.in_flight() >= CAPACITY - 1;
        let wait = if full { Wait::Until(Duration::from_secs(1)) } else { Wait::No };
        engine.reap(wait, &mut done).expect("a working engine");
        done.drain(..).for_each(|done| model.settle(&done));
    }
    while engine.in_flight() > 0 {
        engine.reap(Wait::Until(FOREVER), &mut done).expect("a working engine");
        done.drain(..).for_each(|done| model.settle(&done));
        assert!(start_time.elapsed() < FOREVER);
    }
    assert!(model.in_flight.is_empty(), "{:?} never completed", model.in_flight.keys());
    for (index, seed) in model.pages.iter().enumerate() {
        let expected = if *seed == 0 { vec![0; IO_ALIGN] } else { page(*seed) };
        assert!(fixture.seen((index * IO_ALIGN) as u64, IO_ALIGN) == expected, "page {index} in the end");
    }
}

/// Submits a random operation with a separate slot of memory; does nothing when its pages are in use or the
/// engine is full.
fn submit_one(engine: &mut dyn IoEngine, model: &mut Model, fixture: &Fixture, token: u64) {
    if engine.in_flight() == CAPACITY {
        return;
    }
    let kind = model.draw(10);
    if kind == 0 {
        model.in_flight.insert(token, (0, Vec::new()));
        return submit(engine, sync(token));
    }
    let Some((start, end)) = model.claim() else { return };
    let offset = (start * IO_ALIGN) as u64;
    let spans = spans(fixture, model, start..end);
    if kind < 5 {
        model.in_flight.insert(token, (start, model.pages[start..end].to_vec()));
        return submit(engine, read(token, offset, spans));
    }
    let seeds: Vec<u64> = (start..end).map(|index| token << 8 | index as u64).collect();
    let data: Vec<u8> = seeds.iter().flat_map(|seed| page(*seed)).collect();
    let mut rest = &data[..];
    for span in &spans {
        let (piece, after) = rest.split_at(span.len());
        span.copy_in(piece).expect("writable");
        rest = after;
    }
    model.in_flight.insert(token, (start, seeds));
    submit(engine, write(token, offset, spans));
}

/// Memory for pages, in one span or in two: each page of the device has its own, so operations in flight
/// share none.
fn spans(fixture: &Fixture, model: &mut Model, pages: std::ops::Range<usize>) -> Vec<Span> {
    let (start, len) = (pages.start * IO_ALIGN, pages.len());
    let cut = model.draw(len) * IO_ALIGN;
    let whole = fixture.registered(start, len * IO_ALIGN);
    if cut == 0 {
        return vec![whole];
    }
    let halves = [(0, cut), (cut, whole.len() - cut)];
    halves.map(|(offset, len)| whole.slice(offset, len).expect("inside")).into()
}
