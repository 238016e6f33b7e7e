//! Agents as they run in a cluster, against Kubernetes' real API server. The test simulates the operator by
//! writing specs of `CacheNode`s, and the kubelet by giving each agent the token of a pod on its node.
//!
//! Tests share one server unless they inject faults into it; each has its own nodes.

use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Conclusion};

mod api_server_faults;
mod devices;
mod failure_domains;
mod identities;
mod io_engines;
mod modes;
mod node;
mod pools;
mod profiles;
mod queue_claims;
mod queues;
mod scrapers;

/// Runs the tests of this module.
pub(crate) fn run(arguments: &Arguments) -> Conclusion {
    let shared = Arc::new(OnceLock::new());
    let mut tests = on_the_server![
        "in_cluster",
        shared,
        node::install,
        api_server_faults::an_agent_with_another_nodes_token_is_rejected_by_the_api_server_and_serves,
        api_server_faults::a_stopping_agent_reports_that_it_is_gone,
        api_server_faults::the_agent_restores_its_status_fields_and_names_the_other_writer,
        devices::uses_a_blank_device_and_rejects_one_with_foreign_data,
        devices::a_removed_device_is_faulted_and_returns_with_its_blocks,
        devices::a_failed_device_is_faulted_and_engines_continue,
        devices::a_pool_with_max_devices_keeps_its_device_and_wipes_no_other,
        devices::a_device_that_two_pools_claim_belongs_to_the_first,
        failure_domains::the_second_replica_of_a_hot_block_goes_to_another_zone,
        io_engines::an_unavailable_io_engine_keeps_a_pool_closed_without_a_fallback,
        identities::only_the_pods_of_a_bound_tenant_may_use_it,
        scrapers::only_accounts_that_may_get_metrics_read_those_of_an_agent_with_certificates,
        modes::a_node_applies_the_mode_of_its_spec,
        modes::a_node_is_drained_by_its_spec,
        modes::the_free_share_of_a_pool_changes_without_a_restart,
        pools::a_pool_is_opened_and_closed_while_engines_continue,
        pools::the_reported_capacity_is_that_of_the_open_pools,
        pools::a_killed_agent_finds_its_blocks_again,
        pools::a_missing_file_is_recreated_only_after_its_claim_was_removed,
        pools::a_wiped_pool_is_destroyed_and_reported,
        pools::a_pool_that_changes_its_io_engine_is_reopened_with_its_blocks,
        profiles::a_profile_takes_effect_with_its_content_and_wrong_content_is_rejected,
        queue_claims::engines_with_queue_pairs_have_the_memory_limit_and_profile_of_their_allocation,
        queues::queue_pairs_are_reserved_as_specified_and_conflicts_are_rejected,
    ];
    tests.extend(with_own_server![
        "in_cluster",
        api_server_faults::an_agent_continues_and_restarts_without_the_api_server,
        identities::without_the_api_server_only_known_pods_may_use_a_bound_tenant,
    ]);
    let conclusion = libtest_mimic::run(arguments, tests);
    drop(shared);
    conclusion
}
