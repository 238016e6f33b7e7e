//! What every implementation of `Transport` must do, run against TCP over loopback and against the in-memory hub.

mod blocks;
mod failures;
mod flow;
#[path = "../harness/mod.rs"]
mod harness;
mod offers;
mod random;
mod world;

/// One test per case and implementation.
macro_rules! conformance {
    ($($module:ident :: $case:ident,)*) => {
        mod tcp {
            $(#[test] fn $case() { crate::$module::$case(&crate::world::TcpWorld); })*
        }
        mod memory {
            $(#[test] fn $case() { crate::$module::$case(&crate::world::MemoryWorld::new()); })*
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
    failures::memory_of_an_aborted_serve_is_let_go,
    failures::what_comes_after_the_deadline_is_thrown_away,
    failures::a_server_that_goes_away_fails_all_unfinished_blocks,
    failures::a_requester_that_goes_away_aborts_its_serves,
    failures::an_address_where_nobody_listens_is_a_lost_peer,
    failures::a_call_that_makes_no_sense_is_refused,
    failures::after_shutdown_calls_are_refused_and_ignored,
    failures::a_server_that_misuses_serve_calls_reports_the_block_absent,
    failures::serve_calls_for_unknown_requests_are_ignored,
    flow::credit_bounds_what_is_in_flight,
    flow::more_requests_than_the_limit_are_refused_as_busy,
    flow::a_silent_core_does_not_delay_other_requests_on_the_connection,
    offers::an_offer_arrives_as_it_was_made_and_its_answer_comes_back,
    offers::an_offer_is_answered_once_whatever_is_said_afterwards,
    offers::an_offer_without_an_answer_fails_at_its_deadline,
    offers::an_answer_after_the_deadline_is_thrown_away,
    offers::a_peer_that_goes_away_fails_its_offers,
    offers::an_offer_to_nobody_fails,
    offers::offers_and_fetches_share_a_connection,
    offers::an_offer_that_makes_no_sense_is_refused,
    offers::more_offers_than_the_limit_are_refused_as_busy,
    random::random_fetches_between_three_nodes_are_byte_exact,
}
