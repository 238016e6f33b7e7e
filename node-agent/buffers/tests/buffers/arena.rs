//! Arena and regions as used by the agent and engines: bounds, seals, page sizes, memory limits.

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use proptest::prelude::*;

use reprise_buffers::{
    Access, Arena, ArenaConfig, BufferError, HUGE_PAGE_BYTES, HugePolicy, MappedRegion, PageKind,
    REGION_BYTES_MAX,
};

const MIB: u64 = 1 << 20;

fn arena(bytes: u64, region_bytes: u64, huge: HugePolicy) -> Arena {
    Arena::new(&ArenaConfig { bytes, region_bytes, huge }).expect("an arena of a few MiB")
}

fn map(fd: BorrowedFd<'_>, bytes: u64, access: Access) -> Result<MappedRegion, BufferError> {
    MappedRegion::map(fd.try_clone_to_owned().expect("a descriptor"), bytes, access)
}

#[test]
fn an_arena_is_cut_into_regions_and_the_last_takes_the_rest() {
    let arena = arena(5 * MIB, 2 * MIB, HugePolicy::Never);
    let sizes: Vec<u64> = arena.regions().iter().map(|region| region.bytes()).collect();
    assert_eq!(sizes, [2 * MIB, 2 * MIB, MIB]);
    let ids: Vec<u16> = arena.regions().iter().map(|region| region.id()).collect();
    assert_eq!(ids, [0, 1, 2]);
}

#[test]
fn regions_start_at_huge_page_boundaries_here_and_in_the_client() {
    let arena = arena(4 * MIB, 2 * MIB, HugePolicy::Never);
    for region in arena.regions() {
        assert_eq!(region.as_ptr().addr() % HUGE_PAGE_BYTES, 0);
        let mapped = map(region.readonly_fd(), region.bytes(), Access::ReadOnly).expect("a mapping");
        let start = mapped.span(0, 1).expect("the first byte").as_ptr();
        assert_eq!(start.addr() % HUGE_PAGE_BYTES, 0);
    }
}

#[test]
fn agent_and_other_engines_see_the_bytes_that_an_engine_writes() {
    let arena = arena(2 * MIB, 2 * MIB, HugePolicy::Prefer);
    let region = &arena.regions()[0];
    let engine = map(region.writable_fd(), region.bytes(), Access::ReadWrite).expect("a writable mapping");
    let other = map(region.readonly_fd(), region.bytes(), Access::ReadOnly).expect("a readable mapping");
    engine.span(MIB, 5).expect("inside").copy_in(b"bytes").expect("writable");
    for span in [arena.span(0, MIB, 5), other.span(MIB, 5)] {
        let mut seen = [0; 5];
        span.expect("inside").copy_out(&mut seen);
        assert_eq!(&seen, b"bytes");
    }
}

#[test]
fn renewed_region_is_zero_and_out_of_reach_of_old_mappings_and_descriptors() {
    let arena = arena(4 * MIB, 2 * MIB, HugePolicy::Never);
    let old = arena.region(0).expect("the first region");
    let engine = map(old.writable_fd(), old.bytes(), Access::ReadWrite).expect("a writable mapping");
    let seen = |span: reprise_buffers::Span| {
        let mut bytes = vec![1; span.len()];
        span.copy_out(&mut bytes);
        bytes
    };
    engine.span(0, 5).and_then(|span| span.copy_in(b"old of")).expect_err("too long");
    engine.span(0, 3).and_then(|span| span.copy_in(b"old")).expect("writable");
    let renewed = arena.renew(0).expect("2 MiB");
    assert_eq!((old.generation(), renewed.generation(), renewed.id()), (0, 1, 0));
    assert!(seen(engine.span(0, 2 * MIB).expect("mapped")).iter().all(|byte| *byte == 0), "pages are freed");
    assert!(seen(arena.span(0, 0, 2 * MIB).expect("all of it")).iter().all(|byte| *byte == 0));
    arena.span(0, 0, 3).and_then(|span| span.copy_in(b"new")).expect("writable");
    let late = map(old.readonly_fd(), old.bytes(), Access::ReadOnly).expect("a descriptor of the old memory");
    for mapping in [&engine, &late] {
        assert_eq!(seen(mapping.span(0, 3).expect("mapped")), [0; 3]);
    }
    engine.span(0, 3).and_then(|span| span.copy_in(b"bad")).expect("writable");
    assert_eq!(seen(arena.span(0, 0, 3).expect("inside")), b"new");
    assert!(Arc::ptr_eq(&renewed, &arena.region(0).expect("the first region")));
    assert!(arena.renew(2).is_err() && arena.region(2).is_none());
}

#[test]
fn an_engine_cannot_change_the_size_of_a_region_nor_seal_it() {
    let arena = arena(2 * MIB, 2 * MIB, HugePolicy::Never);
    let file = File::from(arena.regions()[0].writable_fd().try_clone_to_owned().expect("a descriptor"));
    for length in [0, MIB, 4 * MIB] {
        let refused = file.set_len(length).expect_err("the size is sealed");
        assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
    }
    // SAFETY: F_ADD_SEALS takes an int; the descriptor is open.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_FUTURE_WRITE) };
    assert_eq!((rc, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EPERM)));
}

#[test]
fn a_readonly_descriptor_cannot_be_mapped_for_writing() {
    let arena = arena(2 * MIB, 2 * MIB, HugePolicy::Never);
    let region = &arena.regions()[0];
    let refused = map(region.readonly_fd(), region.bytes(), Access::ReadWrite).expect_err("read-only");
    assert_eq!(refused.io_kind(), Some(std::io::ErrorKind::PermissionDenied), "{refused}");
}

#[test]
fn a_readonly_mapping_cannot_be_made_writable() {
    let arena = arena(2 * MIB, 2 * MIB, HugePolicy::Never);
    let region = &arena.regions()[0];
    let mapped = map(region.readonly_fd(), region.bytes(), Access::ReadOnly).expect("a readable mapping");
    let span = mapped.span(0, 4096).expect("inside");
    assert!(!span.is_writable() && span.as_mut_ptr().is_none());
    assert!(matches!(span.copy_in(&[1; 4096]), Err(BufferError::ReadOnly)));
    // SAFETY: mprotect changes no content; the range is mapped.
    let rc = unsafe {
        libc::mprotect(span.as_ptr().cast_mut().cast(), span.len(), libc::PROT_READ | libc::PROT_WRITE)
    };
    assert_eq!((rc, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EACCES)));
}

#[test]
fn only_the_owner_may_reopen_a_region_for_writing() {
    let arena = arena(2 * MIB, 2 * MIB, HugePolicy::Never);
    let file = File::from(arena.regions()[0].readonly_fd().try_clone_to_owned().expect("a descriptor"));
    let mode = file.metadata().expect("metadata of a memfd").permissions().mode();
    assert_eq!(mode & 0o777, 0o400);
}

#[test]
fn rejects_a_mapping_longer_than_the_file() {
    let arena = arena(2 * MIB, 2 * MIB, HugePolicy::Never);
    for bytes in [0, 2 * MIB + 1, u64::MAX] {
        let refused =
            map(arena.regions()[0].readonly_fd(), bytes, Access::ReadOnly).expect_err("not that long");
        assert!(refused.to_string().contains("disagree"), "{refused}");
    }
}

#[test]
fn a_span_keeps_its_memory_after_the_arena_is_gone() {
    let arena = arena(2 * MIB, 2 * MIB, HugePolicy::Never);
    let span = arena.span(0, 4096, 4).expect("inside");
    let slice = span.slice(1, 2).expect("inside");
    span.copy_in(b"kept").expect("writable");
    drop(arena);
    drop(span);
    let mut bytes = [0; 2];
    slice.copy_out(&mut bytes);
    assert_eq!(&bytes, b"ep");
}

#[test]
fn a_span_has_its_region_and_the_requested_address() {
    let arena = arena(4 * MIB, 2 * MIB, HugePolicy::Never);
    let span = arena.span(1, 8192, 4096).expect("inside").slice(1024, 16).expect("inside");
    assert_eq!(span.region_id(), Some(1));
    assert_eq!(span.as_ptr().addr(), arena.regions()[1].as_ptr().addr() + 9216);
}

/// Not for hugetlb pages: without a spare page in the pool the access would end this process, see the crate's
/// doc.
#[test]
fn a_punched_hole_reads_as_zeros_and_fails_its_checksum() {
    for huge in [HugePolicy::Never, HugePolicy::Prefer] {
        let arena = arena(4 * MIB, 4 * MIB, huge);
        let region = &arena.regions()[0];
        if region.page_kind() == PageKind::HugeTlb {
            continue;
        }
        let span = arena.span(0, MIB, 2 * MIB).expect("inside");
        let payload = vec![0x5A; 2 << 20];
        let committed = span.copy_in_checked(&payload).expect("writable");
        let engine = region.writable_fd().try_clone_to_owned().expect("a descriptor");
        let (mode, start, bytes) =
            (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, MIB as i64, 2 * MIB as i64);
        // SAFETY: fallocate(2) takes integers.
        let punched = unsafe { libc::fallocate(engine.as_raw_fd(), mode, start, bytes) };
        assert_eq!(punched, 0, "{}", std::io::Error::last_os_error());
        let mut found = vec![1; 2 << 20];
        assert_ne!(span.copy_out_checked(&mut found), committed, "{huge:?}: the damage shows");
        assert!(found.iter().all(|byte| *byte == 0));
        assert_eq!(
            span.copy_in_checked(&payload).expect("writable"),
            committed,
            "{huge:?}: and it can be used again"
        );
    }
}

#[test]
fn rejects_an_arena_larger_than_memory_before_touching_it() {
    let config = ArenaConfig {
        bytes: 8192 * REGION_BYTES_MAX,
        region_bytes: REGION_BYTES_MAX,
        huge: HugePolicy::Prefer,
    };
    let refused = Arena::new(&config).expect_err("no machine has 8 TiB to spare");
    assert!(matches!(refused, BufferError::NotEnoughMemory { .. }));
    let text = refused.to_string();
    assert!(text.contains("8TiB") && text.contains("lower the arena"), "{text}");
}

#[test]
fn rejects_invalid_sizes_with_a_message() {
    let cases = [
        (0, MIB, "whole 4 KiB pages"),
        (MIB, 0, "whole 4 KiB pages"),
        (MIB + 1, MIB, "whole 4 KiB pages"),
        (MIB, 1000, "whole 4 KiB pages"),
        (4 * REGION_BYTES_MAX, 2 * REGION_BYTES_MAX, "at most 1GiB"),
        (1 << 40, MIB, "use larger ones"),
        (!4095, 4096, "use larger ones"),
    ];
    for (bytes, region_bytes, expected) in cases {
        let refused =
            Arena::new(&ArenaConfig { bytes, region_bytes, huge: HugePolicy::Never }).expect_err(expected);
        assert!(refused.to_string().contains(expected), "{refused}");
    }
}

/// Whether this kernel can make huge pages of a memfd (`transparent_hugepage/enabled` other than never).
fn can_collapse() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled")
        .is_ok_and(|text| !text.contains("[never]"))
}

#[test]
fn reported_page_sizes_are_huge_where_the_kernel_supports_them() {
    let small = arena(4 * MIB, 2 * MIB, HugePolicy::Never);
    assert_eq!(small.page_kind(), PageKind::Small, "huge pages are disabled");
    let huge = arena(8 * MIB, 4 * MIB, HugePolicy::Prefer);
    assert!(!can_collapse() || huge.page_kind() != PageKind::Small, "{}", huge.coverage());
    let region = &huge.regions()[0];
    for (fd, access) in [(region.readonly_fd(), Access::ReadOnly), (region.writable_fd(), Access::ReadWrite)]
    {
        let mapped = map(fd, region.bytes(), access).expect("a mapping");
        assert_eq!(mapped.coverage().kind(), region.page_kind(), "{access:?}: {}", mapped.coverage());
    }
}

#[test]
fn the_part_beyond_whole_huge_pages_is_reported_as_small() {
    let arena = arena(3 * MIB, 3 * MIB, HugePolicy::Prefer);
    assert_eq!(arena.page_kind(), PageKind::Small);
    let (text, whole) = (arena.coverage().to_string(), "transparent 2 MiB: 2MiB, 4 KiB: 1MiB");
    assert_eq!(text, if can_collapse() { whole } else { "4 KiB" });
}

#[test]
#[ignore = "needs vm.nr_hugepages = 2 and no other user of them: run alone"]
fn uses_the_hugetlb_pool_until_it_is_empty() {
    let arena = arena(8 * MIB, 4 * MIB, HugePolicy::Prefer);
    let kinds: Vec<PageKind> = arena.regions().iter().map(|region| region.page_kind()).collect();
    assert!(kinds.contains(&PageKind::HugeTlb) && kinds.contains(&PageKind::TransparentHuge), "{kinds:?}");
    assert_eq!(arena.coverage().to_string(), "hugetlb 2 MiB: 4MiB, transparent 2 MiB: 4MiB");
    for region in arena.regions() {
        let mapped = map(region.readonly_fd(), region.bytes(), Access::ReadOnly).expect("a mapping");
        assert_eq!(mapped.coverage().kind(), region.page_kind());
        let file = File::from(region.writable_fd().try_clone_to_owned().expect("a descriptor"));
        assert!(file.set_len(0).is_err(), "the size is sealed");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_span_exists_exactly_when_it_lies_inside(
        region in 0u16..4,
        offset in prop_oneof![0u64..70_000, any::<u64>()],
        bytes in prop_oneof![0u64..70_000, any::<u64>()],
    ) {
        thread_local! {
            static ARENA: Arena = arena(128 << 10, 64 << 10, HugePolicy::Never);
        }
        let span = ARENA.with(|arena| arena.span(region, offset, bytes));
        let inside = region < 2 && u128::from(offset) + u128::from(bytes) <= 64 << 10;
        prop_assert_eq!(span.is_ok(), inside);
        if let Ok(span) = span {
            prop_assert_eq!(span.len() as u64, bytes);
            let start = ARENA.with(|arena| arena.regions()[usize::from(region)].as_ptr().addr());
            prop_assert_eq!((span.as_ptr().addr() - start) as u64, offset);
        }
    }

    #[test]
    fn a_slice_of_a_span_exists_exactly_when_it_lies_inside(
        start in 0usize..60_000,
        offset in prop_oneof![0usize..70_000, any::<usize>()],
        bytes in prop_oneof![0usize..70_000, any::<usize>()],
    ) {
        thread_local! {
            static ARENA: Arena = arena(64 << 10, 64 << 10, HugePolicy::Never);
        }
        let length = (64 << 10) - start;
        let span = ARENA.with(|arena| arena.span(0, start as u64, length as u64)).expect("inside");
        let slice = span.slice(offset, bytes);
        let inside = offset as u128 + bytes as u128 <= length as u128;
        prop_assert_eq!(slice.is_ok(), inside);
        if let Ok(slice) = slice {
            prop_assert_eq!(slice.len(), bytes);
            prop_assert_eq!(slice.as_ptr().addr(), span.as_ptr().addr() + offset);
        }
    }
}
