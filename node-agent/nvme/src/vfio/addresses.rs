//! Addresses for the controller: ranges that mappings in the IOMMU use.
//!
//! A range that was released is used again as late as possible, so that a late access of a controller to memory that
//! was unmapped fails, and does not reach other memory.

use std::collections::BTreeMap;

use super::error::FunctionError;

/// First address. Ranges that IOMMUs reserve for interrupts lie below (0xfee00000).
const FIRST: u64 = 1 << 32;
/// End of the addresses: IOMMUs translate 39 bits at least. Together 508 GiB, as the text of `NoAddresses` states.
const END: u64 = 1 << 39;
/// Alignment of ranges, for large pages in the IOMMU, and the distance of two at least.
const UNIT: u64 = 2 << 20;

const _: () = assert!(END - FIRST == 508 << 30);

/// The ranges in use.
#[derive(Debug)]
pub(super) struct Addresses {
    /// End of each range by its start.
    used: BTreeMap<u64, u64>,
    /// Where the search for the next range starts.
    next: u64,
}

impl Addresses {
    pub(super) fn new() -> Addresses {
        Addresses { used: BTreeMap::new(), next: FIRST }
    }

    /// Takes a range; returns its first address, a multiple of 2 MiB.
    ///
    /// # Errors
    /// `NoAddresses` if no range is large enough.
    pub(super) fn take(&mut self, bytes: u64) -> Result<u64, FunctionError> {
        let none = || FunctionError::NoAddresses(bytes);
        let length = bytes.max(1).checked_next_multiple_of(UNIT).and_then(|length| length.checked_add(UNIT));
        let length = length.filter(|length| *length <= END - FIRST).ok_or_else(none)?;
        let start = self.find(self.next, length).or_else(|| self.find(FIRST, length)).ok_or_else(none)?;
        self.used.insert(start, start + length);
        self.next = start + length;
        Ok(start)
    }

    /// Releases a range that was taken.
    pub(super) fn release(&mut self, start: u64) {
        self.used.remove(&start);
    }

    /// Returns the first free range from an address on.
    fn find(&self, from: u64, length: u64) -> Option<u64> {
        let before = self.used.range(..from).next_back().map_or(from, |(_, end)| *end);
        let mut start = from.max(before);
        for (used, end) in self.used.range(from..) {
            if used - start >= length {
                break;
            }
            start = *end;
        }
        (start <= END - length).then_some(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_aligned_and_apart() {
        let mut addresses = Addresses::new();
        let mut end = FIRST;
        for bytes in [1, 4096, UNIT, UNIT + 1, 1 << 30] {
            let start = addresses.take(bytes).expect("free");
            assert!(start.is_multiple_of(UNIT) && start >= end);
            end = start + bytes + 1;
        }
    }

    #[test]
    fn a_released_range_is_used_again_only_when_all_others_were() {
        let mut addresses = Addresses::new();
        let first = addresses.take(4096).expect("free");
        addresses.release(first);
        let large = (END - FIRST) / 8 - UNIT;
        let mut starts = Vec::new();
        while let Ok(start) = addresses.take(large) {
            assert!(starts.len() < 8);
            starts.push(start);
        }
        assert!(starts.len() == 7 && !starts.contains(&first), "{starts:x?}");
        // Only the start is free now, and the rest at the end.
        assert_eq!(addresses.take(large - 2 * UNIT).expect("the rest"), starts[6] + large + UNIT);
        assert_eq!(addresses.take(4096).expect("free"), first);
        assert!(matches!(addresses.take(4096), Err(FunctionError::NoAddresses(4096))));
    }

    #[test]
    fn mappings_that_come_and_go_never_use_up_the_addresses() {
        let mut addresses = Addresses::new();
        let arena = addresses.take(64 << 30).expect("free");
        let mut held = std::collections::VecDeque::new();
        // 64 TiB in all, of which 256 GiB are mapped at a time.
        for session in 0..2048_u64 {
            let start = addresses.take(32 << 30).unwrap_or_else(|error| panic!("session {session}: {error}"));
            assert!(start != arena && !held.contains(&start));
            held.push_back(start);
            if held.len() == 8 {
                addresses.release(held.pop_front().expect("eight"));
            }
        }
        let error =
            addresses.take(300 << 30).expect_err("the arena and seven sessions have 288 GiB").to_string();
        assert!(error.contains("508 GiB") && error.contains("smaller arena"), "{error}");
        held.into_iter().chain([arena]).for_each(|start| addresses.release(start));
        assert!(addresses.take(500 << 30).is_ok(), "all addresses are free again");
    }

    #[test]
    fn more_than_there_is_is_refused() {
        let mut addresses = Addresses::new();
        for bytes in [END, u64::MAX] {
            assert!(matches!(addresses.take(bytes), Err(FunctionError::NoAddresses(_))));
        }
        assert_eq!(addresses.take(END - FIRST - UNIT).expect("all"), FIRST);
    }
}
