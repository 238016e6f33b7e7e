//! Measures how fast this machine copies blocks out of an arena, with and without checksums.
//!
//! `cargo run --release -p reprise-buffers --example copy_speed`
//!
//! Copies 2 MiB blocks from a region in huge pages to 32 KiB destinations that are scattered over another
//! memory, like an engine that loads blocks into its paged KV cache. Repetitions of all variants are
//! interleaved. Prints medians as GB/s and relative to a plain memcpy of the same sizes. Compare the ratios:
//! absolute figures change with the neighbours of a virtual machine.
#![expect(clippy::print_stdout, reason = "a program for people")]

use std::hint::black_box;
use std::time::Instant;

use reprise_buffers::{
    Arena, ArenaConfig, BufferError, HugePolicy, PageBuffer, Span, checksum_method, copy_checked, crc32c,
};

/// Far larger than any cache.
const BYTES: usize = 256 << 20;
const OBJECT_BYTES: usize = 32 << 10;
const REPETITIONS: usize = 15;

type Variant<'a> = (String, Box<dyn FnMut(&mut [&mut [u8]]) -> u32 + 'a>);

fn main() -> Result<(), BufferError> {
    let config = ArenaConfig { bytes: BYTES as u64, region_bytes: BYTES as u64, huge: HugePolicy::Prefer };
    let arena = Arena::new(&config)?;
    let whole = arena.span(0, 0, BYTES as u64)?;
    let mut private = PageBuffer::new(BYTES)?;
    private
        .iter_mut()
        .zip(0u32..)
        .for_each(|(byte, index)| *byte = (index.wrapping_mul(2_654_435_761) >> 24) as u8);
    whole.copy_in(&private)?;
    println!("arena pages: {}; checksums: {}", arena.coverage(), checksum_method());

    let mut engine = PageBuffer::new(BYTES)?;
    let mut destinations: Vec<&mut [u8]> = engine.chunks_mut(OBJECT_BYTES).collect();
    scatter(&mut destinations);

    let sources: Vec<Span> = (0..BYTES / OBJECT_BYTES)
        .map(|index| whole.slice(index * OBJECT_BYTES, OBJECT_BYTES))
        .collect::<Result<_, _>>()?;
    let mut variants = variants(&private, &sources);
    let mut seconds: Vec<Vec<f64>> = vec![Vec::new(); variants.len()];
    for _ in 0..REPETITIONS {
        for ((_, run), times) in variants.iter_mut().zip(&mut seconds) {
            let start = Instant::now();
            black_box(run(&mut destinations));
            times.push(start.elapsed().as_secs_f64());
        }
    }
    let medians: Vec<f64> = seconds.into_iter().map(median).collect();
    for ((name, _), time) in variants.iter().zip(&medians) {
        println!("{name:<46} {:6.2} GB/s  {:5.2}", BYTES as f64 / time / 1e9, medians[0] / time);
    }
    Ok(())
}

fn variants<'a>(private: &'a [u8], sources: &'a [Span]) -> Vec<Variant<'a>> {
    let mut variants: Vec<Variant<'a>> = vec![
        named("memcpy of objects (reference)", move |to| {
            private.chunks(OBJECT_BYTES).zip(to).for_each(|(from, to)| to.copy_from_slice(from));
            0
        }),
        named("copy_out", |to| {
            sources.iter().zip(to).for_each(|(from, to)| from.copy_out(to));
            0
        }),
        named("copy_out_checked", |to| {
            sources.iter().zip(to).fold(0, |sum, (from, to)| sum ^ from.copy_out_checked(to))
        }),
        named("copy_checked of private memory", move |to| {
            private.chunks(OBJECT_BYTES).zip(to).fold(0, |sum, (from, to)| sum ^ copy_checked(from, to))
        }),
        // Copy the block back: the arena keeps its content.
        named("copy_in_checked, from scattered objects", |to| {
            sources
                .iter()
                .zip(to)
                .fold(0, |sum, (from, to)| sum ^ from.copy_in_checked(to).unwrap_or_default())
        }),
        named("Span::crc32c, no copy", |_| sources.iter().fold(0, |sum, from| sum ^ from.crc32c())),
        named("crc32c of private memory, no copy", move |_| {
            private.chunks(OBJECT_BYTES).fold(0, |sum, from| sum ^ crc32c(from))
        }),
        named("crc32c in cache", move |_| {
            let object = &private[..OBJECT_BYTES / 2];
            (0..2 * BYTES / OBJECT_BYTES).fold(0, |sum, _| sum ^ crc32c(black_box(object)))
        }),
        named("crc32c in cache, crate crc-fast", move |_| {
            let object = &private[..OBJECT_BYTES / 2];
            (0..2 * BYTES / OBJECT_BYTES).fold(0, |sum, _| sum ^ crc_fast::crc32_iscsi(black_box(object)))
        }),
    ];
    for piece in [1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10] {
        variants.push(named(
            &format!("memcpy, then crc-fast, in pieces of {} KiB", piece >> 10),
            move |to| {
                private
                    .chunks(OBJECT_BYTES)
                    .zip(to)
                    .fold(0, |sum, (from, to)| sum ^ in_pieces(from, to, piece))
            },
        ));
    }
    variants
}

/// Checksummed copy in pieces of any size, for CPUs that cannot do it in one pass.
fn in_pieces(from: &[u8], to: &mut [u8], piece: usize) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    for (from, to) in from.chunks(piece).zip(to.chunks_mut(piece)) {
        to.copy_from_slice(from);
        digest.update(to);
    }
    digest.finalize() as u32
}

fn named<'a>(name: &str, run: impl FnMut(&mut [&mut [u8]]) -> u32 + 'a) -> Variant<'a> {
    (name.to_owned(), Box::new(run))
}

/// A fixed permutation that separates neighbours, like the blocks of a paged cache.
fn scatter(destinations: &mut [&mut [u8]]) {
    let mut state = 1u64;
    for index in (1..destinations.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        destinations.swap(index, (state >> 33) as usize % (index + 1));
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
