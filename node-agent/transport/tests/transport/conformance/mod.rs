//! Conformance tests of `Transport`, run with TCP over loopback without and with TLS, with the in-memory hub, and with composites of
//! both that use the one or the other.

mod blocks;
mod failures;
mod fixture;
mod flow;
mod offers;
mod random;

/// One test per case and implementation.
macro_rules! conformance {
    ($($module:ident :: $case:ident,)*) => {
        mod tcp {
            $(#[test] fn $case() { crate::conformance::$module::$case(&crate::conformance::fixture::TcpFixture::plain()); })*
        }
        mod tls {
            $(#[test] fn $case() { crate::conformance::$module::$case(&crate::conformance::fixture::TcpFixture::tls()); })*
        }
        mod memory {
            $(#[test] fn $case() { crate::conformance::$module::$case(&crate::conformance::fixture::MemoryFixture::new()); })*
        }
        mod composite_tcp {
            $(#[test] fn $case() { crate::conformance::$module::$case(&crate::conformance::fixture::composite_tcp()); })*
        }
        mod composite_memory {
            $(#[test] fn $case() { crate::conformance::$module::$case(&crate::conformance::fixture::composite_memory()); })*
        }
    };
}

conformance! {
    blocks::whole_blocks_arrive_byte_exact,
    blocks::ranges_of_any_size_arrive_byte_exact,
    blocks::ranges_may_come_in_any_order_of_offsets,
    blocks::layers_are_reported_as_a_leading_run,
    blocks::the_padding_of_a_slot_is_zeroed,
    blocks::a_block_of_one_large_object_is_larger_than_the_credit,
    blocks::every_block_of_a_request_is_reported_as_served_once,
    blocks::many_fetches_share_a_connection,
    failures::an_absent_block_fails_alone,
    failures::a_block_may_become_absent_after_its_first_objects,
    failures::a_wrong_checksum_fails_that_block_alone,
    failures::a_passed_deadline_fails_the_block_and_aborts_the_serve,
    failures::memory_of_an_aborted_serve_is_released,
    failures::data_after_the_deadline_is_discarded,
    failures::a_server_that_disappears_fails_all_unfinished_blocks,
    failures::a_requester_that_disappears_aborts_its_serves,
    failures::an_address_without_a_listener_is_a_lost_peer,
    failures::rejects_an_invalid_call,
    failures::after_shutdown_calls_are_rejected_or_ignored,
    failures::invalid_serve_calls_report_the_block_absent,
    failures::serve_calls_for_unknown_requests_are_ignored,
    flow::credit_limits_the_bytes_in_flight,
    flow::rejects_requests_beyond_the_limit_as_busy,
    flow::a_silent_core_does_not_delay_other_requests_on_the_connection,
    offers::an_offer_and_its_answer_arrive_unchanged,
    offers::an_offer_is_answered_only_once,
    offers::an_offer_without_an_answer_fails_at_its_deadline,
    offers::an_answer_after_the_deadline_is_discarded,
    offers::a_peer_that_disappears_fails_its_offers,
    offers::an_offer_to_an_absent_peer_fails,
    offers::offers_and_fetches_share_a_connection,
    offers::rejects_an_invalid_offer,
    offers::rejects_offers_beyond_the_limit_as_busy,
    random::random_fetches_between_three_nodes_are_byte_exact,
}
