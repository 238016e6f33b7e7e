//! Compares both implementations with each other and with the definition, at every relevant alignment.

use proptest::prelude::*;

use super::*;

type CopyChecked = unsafe fn(State, *const u8, *mut u8, usize) -> State;
type Checksum = unsafe fn(State, *const u8, usize) -> State;

/// CRC-32/ISCSI bit by bit: reflected polynomial 0x82F63B78.
fn by_definition(state: State, bytes: &[u8]) -> State {
    let step = |crc: u32, _| if crc & 1 == 1 { (crc >> 1) ^ 0x82F6_3B78 } else { crc >> 1 };
    bytes.iter().fold(state, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

/// The implementations that this CPU supports.
fn implementations() -> Vec<(&'static str, CopyChecked, Checksum)> {
    let mut all: Vec<(&'static str, CopyChecked, Checksum)> =
        vec![("portable", portable::copy_checked, portable::checksum), ("chosen", copy_checked, checksum)];
    #[cfg(target_arch = "x86_64")]
    if has_one_pass() {
        all.push(("one pass", one_pass_copy_checked, one_pass_checksum));
    }
    all
}

#[cfg(target_arch = "x86_64")]
unsafe fn one_pass_copy_checked(state: State, src: *const u8, dst: *mut u8, bytes: usize) -> State {
    // SAFETY: as for `copy_checked`; in the list of implementations only when the CPU has the features.
    unsafe { x86_64::copy_checked(state, src, dst, bytes) }
}

#[cfg(target_arch = "x86_64")]
unsafe fn one_pass_checksum(state: State, src: *const u8, bytes: usize) -> State {
    // SAFETY: as for `checksum`; in the list of implementations only when the CPU has the features.
    unsafe { x86_64::checksum(state, src, bytes) }
}

fn check(state: State, source: &[u8], destination: &mut [u8], align: usize) -> Result<(), TestCaseError> {
    let expected = by_definition(state, source);
    let room = destination.len();
    for (name, copy_checked, checksum) in implementations() {
        destination.fill(0xAA);
        // SAFETY: the destination has room for `align` bytes before and 64 behind a copy of the source.
        let copied =
            unsafe { copy_checked(state, source.as_ptr(), destination[align..].as_mut_ptr(), source.len()) };
        prop_assert_eq!(copied, expected, "{}: checksum of the copy", name);
        prop_assert!(destination[align..align + source.len()] == *source, "{name}: copied bytes");
        let around = destination[..align].iter().chain(&destination[align + source.len()..room]);
        prop_assert!(around.into_iter().all(|byte| *byte == 0xAA), "{name}: bytes around the copy");
        // SAFETY: a slice is valid for reading its length.
        let read = unsafe { checksum(state, source.as_ptr(), source.len()) };
        prop_assert_eq!(read, expected, "{}: checksum alone", name);
    }
    destination.fill(0xAA);
    // SAFETY: as above.
    unsafe { copy(source.as_ptr(), destination[align..].as_mut_ptr(), source.len()) };
    prop_assert!(destination[align..align + source.len()] == *source, "copied bytes");
    let around = destination[..align].iter().chain(&destination[align + source.len()..room]);
    prop_assert!(around.into_iter().all(|byte| *byte == 0xAA), "bytes around the copy");
    prop_assert_eq!(checksum_slice(state, source), expected, "checksum of a slice");
    Ok(())
}

fn pattern(bytes: usize, seed: u32) -> Vec<u8> {
    (0..bytes as u32).map(|index| ((index ^ seed).wrapping_mul(2_654_435_761) >> 21) as u8).collect()
}

#[test]
fn every_length_up_to_some_steps_is_copied_and_checksummed() {
    let source = pattern(700, 1);
    let mut destination = vec![0; 900];
    for length in 0..700 {
        check(EMPTY, &source[..length], &mut destination, length % 64).expect("equal");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_length_state_and_alignment_is_copied_and_checksummed(
        length in prop_oneof![0usize..1000, STREAM_BYTES_MIN - 200..STREAM_BYTES_MIN + 400, 0usize..80_000],
        from in 0usize..64,
        to in 0usize..64,
        state: u32,
        seed: u32,
    ) {
        let source = pattern(from + length, seed);
        let mut destination = vec![0; to + length + 64];
        check(state, &source[from..], &mut destination, to)?;
    }

    #[test]
    fn a_checksum_in_two_parts_equals_the_checksum_of_the_whole(length in 0usize..5000, at: prop::sample::Index, seed: u32) {
        let bytes = pattern(length, seed);
        let (first, second) = bytes.split_at(at.index(length + 1));
        let state = checksum_slice(checksum_slice(EMPTY, first), second);
        prop_assert_eq!(state, by_definition(EMPTY, &bytes));
    }
}
