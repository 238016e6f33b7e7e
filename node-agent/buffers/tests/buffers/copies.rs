//! Copies and checksums compared with the simplest implementation, and page buffers.

use proptest::prelude::*;
use reprise_buffers::{
    Arena, ArenaConfig, BufferError, HugePolicy, PAGE_BYTES, PIECE_BYTES, PageBuffer, PageBufferPool, Span,
    checksum_method, copy_checked, crc32c,
};

/// CRC-32/ISCSI bit by bit, from its definition: reflected polynomial 0x82F63B78, all ones before and after.
fn naive_crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { (crc >> 1) ^ 0x82F6_3B78 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

fn region(bytes: usize) -> Span {
    let config = ArenaConfig { bytes: bytes as u64, region_bytes: bytes as u64, huge: HugePolicy::Never };
    Arena::new(&config).expect("a small arena").span(0, 0, bytes as u64).expect("all of it")
}

#[test]
fn checksums_agree_with_rfc_3720() {
    let ascending: Vec<u8> = (0..32).collect();
    for (bytes, crc) in [
        (&b"123456789"[..], 0xE306_9283),
        (&[0; 32], 0x8A91_36AA),
        (&[0xFF; 32], 0x62A8_AB43),
        (&ascending, 0x46DD_794E),
        (&[], 0),
    ] {
        assert_eq!(crc32c(bytes), crc);
        assert_eq!(naive_crc32c(bytes), crc);
    }
}

#[test]
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn checksums_use_the_cpu() {
    assert!(!checksum_method().contains("software"), "{}", checksum_method());
}

#[test]
fn rejects_a_copy_of_another_length() {
    let span = region(PAGE_BYTES).slice(0, 10).expect("inside");
    let refused = span.copy_in(&[0; 9]).expect_err("one byte short");
    assert!(matches!(refused, BufferError::LengthMismatch { source_bytes: 9, destination_bytes: 10 }));
    assert!(span.copy_in_checked(&[0; 11]).is_err());
}

#[test]
#[should_panic(expected = "as long as the span")]
fn a_copy_out_to_another_length_panics() {
    region(PAGE_BYTES).copy_out_checked(&mut [0; 9]);
}

#[test]
fn a_page_buffer_is_zeroed_aligned_and_of_whole_pages() {
    for pages in [1, 3, 512, 513] {
        let buffer = PageBuffer::new(pages * PAGE_BYTES).expect("whole pages");
        assert_eq!(buffer.len(), pages * PAGE_BYTES);
        assert_eq!(buffer.as_ptr().addr() % PAGE_BYTES, 0);
        assert!(buffer.iter().all(|byte| *byte == 0));
    }
    for bytes in [0, 1, PAGE_BYTES + 1, usize::MAX, usize::MAX & !(PAGE_BYTES - 1)] {
        assert!(PageBuffer::new(bytes).is_err(), "{bytes}");
    }
}

#[test]
fn bytes_written_through_a_span_are_in_the_buffer_once_the_span_is_gone() {
    let mut buffer = PageBuffer::new(PAGE_BYTES).expect("a page");
    buffer[4095] = 9;
    let span = buffer.span();
    assert!(buffer.is_lent());
    assert_eq!((span.region_id(), span.is_writable()), (None, true));
    span.slice(0, 3).expect("inside").copy_in(b"abc").expect("writable");
    drop(span);
    assert_eq!((&buffer[..4], buffer[4095]), (&b"abc\0"[..], 9));
}

#[test]
#[should_panic(expected = "drop the span first")]
fn accessing_a_buffer_with_a_span_panics() {
    let mut buffer = PageBuffer::new(PAGE_BYTES).expect("a page");
    let _span = buffer.span();
    let _ = buffer[0];
}

#[test]
fn a_pool_returns_zeroed_pages_without_spans() {
    let pool = PageBufferPool::new(1);
    let mut first = pool.take();
    first.fill(7);
    let address = first.as_ptr().addr();
    pool.put(first);
    let mut again = pool.take();
    assert_eq!(again.as_ptr().addr(), address, "an idle page is used again");
    assert!(again.iter().all(|byte| *byte == 0));

    let span = again.span();
    pool.put(again);
    let other = pool.take();
    assert_ne!(other.as_ptr().addr(), span.as_ptr().addr());
    span.copy_in(&[1; PAGE_BYTES]).expect("the lent page lives as long as its span");
    assert!(other.iter().all(|byte| *byte == 0));
}

/// Lengths around the boundaries of pieces, and arbitrary lengths.
fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![
        0usize..300,
        (1usize..4, 0usize..3).prop_map(|(pieces, more)| pieces * PIECE_BYTES - 1 + more),
        0usize..70_000
    ]
}

fn bytes_of(length: usize, seed: u64) -> Vec<u8> {
    // Weyl sequence with a mixing step: enough to distinguish every byte from its neighbours.
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        (state ^ (state >> 31)).wrapping_mul(0xBF58_476D_1CE4_E5B9).to_le_bytes()[7]
    };
    (0..length).map(|_| next()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_checksum_is_that_of_the_definition(length in lengths(), seed: u64, offset in 0usize..64) {
        let bytes = bytes_of(offset + length, seed);
        prop_assert_eq!(crc32c(&bytes[offset..]), naive_crc32c(&bytes[offset..]));
    }

    #[test]
    fn copies_in_and_out_move_every_byte_and_nothing_else(length in lengths(), seed: u64, offset in 0usize..8192) {
        let whole = region(80 << 10);
        let source = bytes_of(length, seed);
        let span = whole.slice(offset, length).expect("inside");
        let expected = naive_crc32c(&source);
        prop_assert_eq!(span.copy_in_checked(&source).expect("writable"), expected);
        prop_assert_eq!(span.crc32c(), expected);

        let mut copied = vec![0xAA; length];
        prop_assert_eq!(span.copy_out_checked(&mut copied), expected);
        prop_assert_eq!(&copied, &source);
        copied.fill(0xAA);
        span.copy_out(&mut copied);
        prop_assert_eq!(&copied, &source);
        copied.fill(0xAA);
        prop_assert_eq!(copy_checked(&source, &mut copied), expected);
        prop_assert_eq!(&copied, &source);

        let mut all = vec![1; 80 << 10];
        whole.copy_out(&mut all);
        prop_assert!(all[..offset].iter().chain(&all[offset + length..]).all(|byte| *byte == 0));
    }

    #[test]
    fn one_flipped_bit_changes_the_checksum(length in 1usize..40_000, seed: u64, at: prop::sample::Index, bit in 0u8..8) {
        let span = region(64 << 10).slice(0, length).expect("inside");
        let mut bytes = bytes_of(length, seed);
        let before = span.copy_in_checked(&bytes).expect("writable");
        let index = at.index(length);
        bytes[index] ^= 1 << bit;
        span.slice(index, 1).expect("inside").copy_in(&bytes[index..=index]).expect("writable");
        prop_assert_ne!(span.crc32c(), before);
        prop_assert_ne!(span.copy_out_checked(&mut vec![0; length]), before);
    }
}
