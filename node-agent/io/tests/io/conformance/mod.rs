//! The conformance suite of [`reprise_io::IoEngine`]: every law of the trait, over all four engines.

mod fixture;
mod lifecycle;
mod random_load;
mod transfers;

use fixture::{Fixture, Kind};

macro_rules! conformance {
    ($($module:ident: $($law:ident),+ $(,)?);+ $(;)?) => {
        mod io_uring { conformance!(@engine Kind::IoUring; $($module: $($law),+);+); }
        mod plain { conformance!(@engine Kind::Plain; $($module: $($law),+);+); }
        mod user_nvme { conformance!(@engine Kind::UserNvme; $($module: $($law),+);+); }
        mod user_nvme_prp { conformance!(@engine Kind::UserNvmePrp; $($module: $($law),+);+); }
        mod simulated { conformance!(@engine Kind::Simulated; $($module: $($law),+);+); }
    };
    (@engine $kind:expr; $($module:ident: $($law:ident),+);+) => {
        use super::*;
        $($(
            #[test]
            fn $law() {
                $module::$law(&Fixture::new($kind));
            }
        )+)+
    };
}

conformance! {
    transfers:
        written_bytes_are_read_back,
        every_registered_region_can_be_read_and_written,
        new_memory_of_a_region_is_read_and_written_and_the_old_is_untouched,
        memory_outside_the_registered_regions_works_too,
        many_operations_in_flight_each_reach_their_own_place,
        scattered_spans_are_read_and_written_in_order,
        the_largest_number_of_spans_works,
        a_synced_write_is_durable,
        an_invalid_operation_is_an_error_and_not_a_hang,
        a_read_only_device_is_read_and_not_written,
        a_read_past_a_cut_end_is_a_short_transfer,
        the_engine_continues_after_a_full_file_system;
    lifecycle:
        capacity_is_enforced_and_the_submission_returned,
        rejected_operations_count_as_in_flight_until_reaped,
        spans_are_held_until_the_completion_is_dropped,
        dropping_the_engine_ends_operations_that_never_started,
        dropping_the_engine_ends_operations_in_flight,
        closing_the_engine_reports_that_all_operations_ended,
        an_engine_opened_here_works_on_another_thread,
        a_wake_ends_a_waiting_reap,
        an_early_wake_ends_the_next_waiting_reap,
        a_reap_that_does_not_wait_keeps_the_wake,
        wakes_and_completions_do_not_disturb_each_other,
        a_waiting_reap_returns_after_its_timeout;
    random_load:
        a_random_load_agrees_with_a_model_and_every_token_completes_once;
}
