//! The harness's own Kubernetes cluster, with a control plane and two nodes with real pods: the faults that
//! tests can inject into it, and Reprise on it, installed by its chart.
//!
//! The tests share one cluster and run sequentially in this order. Each leaves the cluster as it found it,
//! and the last one ends it. They run in namespaces that this program enters at its start.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use libtest_mimic::{Arguments, Trial};
use reprise_e2e::kubernetes::{Cluster, cluster, programs};
use reprise_e2e::seed::print_line;

#[path = "cluster/chart.rs"]
mod chart;
#[path = "cluster/chart_certificates.rs"]
mod chart_certificates;
#[path = "cluster/chart_crash.rs"]
mod chart_crash;
#[path = "cluster/chart_devices.rs"]
mod chart_devices;
#[path = "cluster/chart_drain.rs"]
mod chart_drain;
#[path = "cluster/chart_etcd.rs"]
mod chart_etcd;
#[path = "cluster/chart_events.rs"]
mod chart_events;
#[path = "cluster/chart_faults.rs"]
mod chart_faults;
#[path = "cluster/chart_identities.rs"]
mod chart_identities;
#[path = "cluster/chart_live_changes.rs"]
mod chart_live_changes;
#[path = "cluster/chart_rings.rs"]
mod chart_rings;
#[path = "cluster/chart_rollback.rs"]
mod chart_rollback;
#[path = "cluster/chart_uninstall.rs"]
mod chart_uninstall;
#[path = "cluster/chart_upgrade.rs"]
mod chart_upgrade;
#[path = "cluster/faults.rs"]
mod faults;
#[path = "cluster/pods.rs"]
mod pods;
#[path = "cluster/teardown.rs"]
mod teardown;

/// Number of nodes of the shared cluster.
const NODES: u8 = 2;

/// The running cluster; `None` before the first test and after the last one.
type Shared = Arc<Mutex<Option<Cluster>>>;

/// A test on the shared cluster.
type Test = fn(&mut Cluster);

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    if !arguments.list
        && let Err(words) = programs::images().and_then(|_| cluster::enter())
    {
        panic!("cannot run a cluster here: {words}");
    }
    let shared = Shared::default();
    let mut tests: Vec<(&str, Test)> = vec![
        ("two_nodes_are_ready_and_report_their_versions", pods::nodes_report_their_versions),
        ("a_pod_of_a_test_image_runs_on_each_node", pods::run_on_each_node),
        ("pods_reach_each_other_by_address_service_and_name", pods::reach_each_other),
        ("a_node_with_a_silent_kubelet_is_not_ready", faults::a_paused_kubelet),
        ("an_isolated_node_is_not_ready_and_reaches_no_other", faults::a_cut_link),
        ("a_release_of_the_chart_moves_blocks_between_two_nodes", chart::first_hit),
        ("a_clean_install_causes_no_warning_events", chart_events::have_no_warning),
        ("all_components_of_a_release_are_ready", chart::all_components_are_ready),
        ("failure_domains_of_nodes_follow_their_zone_labels", chart::failure_domains_follow_labels),
        (
            "every_port_of_agents_and_members_answers_only_to_certificates",
            chart_certificates::every_port_answers_only_to_certificates,
        ),
        ("etcd_answers_only_to_members", chart_certificates::etcd_answers_only_to_members),
        (
            "pods_follow_another_authority_without_a_restart",
            chart_certificates::pods_follow_another_authority_without_a_restart,
        ),
        ("agents_have_no_privileges_and_write_their_own_node_only", chart::permissions_of_agents),
        ("engines_in_pods_hit_on_their_own_node_and_on_the_other", chart::engines_hit_everywhere),
        ("raw_devices_are_opened_as_the_cluster_allows", chart_devices::are_opened_as_the_cluster_allows),
        (
            "granted_queues_of_a_pod_are_printed_by_kubectl_and_vanish_with_the_pod",
            chart_rings::queues_appear_and_vanish_with_the_pod,
        ),
        (
            "the_charts_seccomp_profile_allows_io_uring_and_the_pool_reports_it",
            chart_rollback::allows_io_uring,
        ),
        (
            "a_drain_respects_disruption_budgets_and_copies_the_blocks_to_the_other_node",
            chart_drain::by_kubectl,
        ),
        (
            "a_running_release_applies_changes_of_devices_quotas_profiles_and_tenants",
            chart_live_changes::are_applied,
        ),
        ("a_rollback_of_a_release_keeps_its_blocks", chart_rollback::rolled_back),
        ("a_deleted_agent_is_recreated_and_serves_its_blocks_again", chart_faults::an_agent_is_deleted),
        ("an_agent_killed_under_load_fails_no_request", chart_crash::under_load),
        ("killed_operators_cost_no_local_hit_and_resume_their_work", chart_faults::operators_are_killed),
        ("a_killed_etcd_costs_no_local_hit_and_keeps_its_data", chart_faults::etcd_is_killed),
        (
            "an_etcd_of_three_survives_the_loss_of_one_member_and_can_be_recreated",
            chart_etcd::of_three_members,
        ),
        ("a_killed_member_costs_no_local_hit_and_is_replaced", chart_faults::a_member_is_killed),
        ("pods_and_engines_continue_without_the_api_server", chart_faults::the_api_server_is_down),
        (
            "a_killed_node_costs_the_other_no_local_hit_and_returns_with_its_blocks",
            chart_faults::a_node_is_killed,
        ),
        ("an_upgrade_replaces_one_node_at_a_time_and_fails_no_request_under_load", chart_upgrade::under_load),
        ("an_unsupported_version_skew_is_rejected_and_no_pod_is_replaced", chart_uninstall::version_skew),
        ("an_uninstall_leaves_the_definitions_and_nothing_else", chart_uninstall::removed),
        ("leftovers_are_detected", teardown::leftovers_are_detected),
    ];
    // These images are built for this test alone.
    if std::env::var_os(chart_upgrade::OLDER).is_some() {
        tests = vec![(
            "an_older_version_and_this_one_serve_in_one_cluster",
            chart_upgrade::from_an_older_version,
        )];
    }
    let first = Arc::clone(&shared);
    let mut trials = vec![Trial::test("the_next_start_removes_the_leftovers_of_a_killed_lab", move || {
        let mut cluster = lock(&first);
        drop(cluster.take());
        *cluster = Some(teardown::a_killed_lab(NODES));
        Ok(())
    })];
    trials.extend(tests.into_iter().map(|(name, test)| on_the_cluster(name, &shared, test)));
    let last = Arc::clone(&shared);
    trials.push(Trial::test("the_cluster_ends_and_leaves_nothing_behind", move || {
        let cluster = lock(&last).take();
        teardown::leaves_nothing_behind(cluster.unwrap_or_else(|| Cluster::start(NODES)));
        Ok(())
    }));
    let conclusion = libtest_mimic::run(&arguments, trials);
    // The cluster ends before this program, even if only some tests ran.
    drop(lock(&shared).take());
    conclusion.exit_code()
}

/// Creates a test on the shared cluster. If it fails, the logs of all programs are printed, and then its
/// error.
fn on_the_cluster(name: &str, shared: &Shared, test: Test) -> Trial {
    let (shared, name) = (Arc::clone(shared), name.to_owned());
    Trial::test(name.clone(), move || {
        let mut cluster = lock(&shared);
        let cluster = cluster.get_or_insert_with(|| Cluster::start(NODES));
        let started = Instant::now();
        let run = std::panic::AssertUnwindSafe(|| {
            test(cluster);
            print_line(&format!("took {:.1?}", started.elapsed()));
        });
        if let Err(panic) = std::panic::catch_unwind(run) {
            cluster.show_failure(&name);
            std::panic::resume_unwind(panic);
        }
        Ok(())
    })
}

fn lock(shared: &Shared) -> std::sync::MutexGuard<'_, Option<Cluster>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
