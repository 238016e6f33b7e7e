//! Entries of submission queues: the native source against the driver's encoding.

use proptest::prelude::*;
use reprise_nvme::spec::{Command, DataPointer, PAGE_BYTES, READ, SglDescriptor};

unsafe extern "C" {
    fn reprise_ring_build(
        entry: *mut u64,
        list: *mut u64,
        list_controller: u64,
        sgl: u32,
        operation: u32,
        address: u64,
        block: u64,
        bytes: u32,
        id: u32,
    );
}

const LIST: u64 = 0x7_0000_0000;
const PAGE: u64 = PAGE_BYTES as u64;

/// Builds a read with the native source; returns the entry and the list.
fn build(sgl: bool, address: u64, block: u64, bytes: u32, id: u16) -> ([u64; 8], Vec<u64>) {
    let (mut entry, mut list) = ([0; 8], vec![0; PAGE_BYTES / 8]);
    // SAFETY: the function writes 8 words of the entry and at most 512 of the list.
    unsafe {
        reprise_ring_build(
            entry.as_mut_ptr(),
            list.as_mut_ptr(),
            LIST,
            sgl.into(),
            READ.into(),
            address,
            block,
            bytes,
            id.into(),
        );
    }
    (entry, list)
}

proptest! {
    #[test]
    fn entries_agree_with_the_driver_and_lists_name_each_page_once(
        pages in 1_u64..=512,
        odd in 0_u64..1024,
        base in 1_u64..1 << 36,
        block in any::<u64>(),
        id in any::<u16>(),
    ) {
        let address = base * PAGE + 4 * odd;
        let bytes = pages * PAGE;
        let plain = Command::transfer(READ, 1, block, (bytes / 512) as u32);
        let (entry, _) = build(true, address, block, bytes as u32, id);
        let sgl = DataPointer::Sgl(SglDescriptor::data(address, bytes as u32));
        prop_assert_eq!(entry, plain.with_data(sgl).encode(id));

        let (entry, list) = build(false, address, block, bytes as u32, id);
        // The pages of the range, without the first one.
        let further: Vec<u64> = (address / PAGE + 1..(address + bytes).div_ceil(PAGE)).map(|page| page * PAGE).collect();
        let second = match further[..] {
            [] => 0,
            [only] => only,
            _ => LIST,
        };
        prop_assert_eq!(entry, plain.with_data(DataPointer::prp(address, second)).encode(id));
        if further.len() > 1 {
            prop_assert!(further.len() <= PAGE_BYTES / 8, "one page lists them");
            prop_assert_eq!(&list[..further.len()], &further[..]);
        }
    }
}
