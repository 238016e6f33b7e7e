//! The harness's own Kubernetes: a control plane and two nodes with real pods, and what a test may do to it; and Reprise on it, installed
//! by its chart.
//!
//! The tests of this file share one cluster and run one after the other, in this order: each leaves the cluster as it found it, and
//! the last one ends it. They run in namespaces that this program enters at its start.

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use libtest_mimic::{Arguments, Trial};
use reprise_e2e::kubernetes::{Cluster, cluster, programs};
use reprise_e2e::seed::say;

#[path = "cluster/chart.rs"]
mod chart;
#[path = "cluster/chart_changed.rs"]
mod chart_changed;
#[path = "cluster/chart_crash.rs"]
mod chart_crash;
#[path = "cluster/chart_devices.rs"]
mod chart_devices;
#[path = "cluster/chart_drain.rs"]
mod chart_drain;
#[path = "cluster/chart_events.rs"]
mod chart_events;
#[path = "cluster/chart_faults.rs"]
mod chart_faults;
#[path = "cluster/chart_identities.rs"]
mod chart_identities;
#[path = "cluster/chart_life.rs"]
mod chart_life;
#[path = "cluster/chart_parts.rs"]
mod chart_parts;
#[path = "cluster/chart_store.rs"]
mod chart_store;
#[path = "cluster/chart_upgrade.rs"]
mod chart_upgrade;
#[path = "cluster/ends.rs"]
mod ends;
#[path = "cluster/faults.rs"]
mod faults;
#[path = "cluster/pods.rs"]
mod pods;

/// Nodes of the shared cluster.
const NODES: u8 = 2;

/// The cluster as it runs; none before the first test and after the last.
type Shared = Arc<Mutex<Option<Cluster>>>;

/// A test on the shared cluster.
type Test = fn(&mut Cluster);

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    if !arguments.list
        && let Err(words) = programs::images().and_then(|_| cluster::enter())
    {
        panic!("no cluster can run here: {words}");
    }
    let shared = Shared::default();
    let mut tests: Vec<(&str, Test)> = vec![
        ("two_nodes_are_ready_and_say_what_they_are", pods::nodes_say_what_they_are),
        ("a_pod_of_an_image_made_here_runs_on_each_node", pods::run_on_each_node),
        ("pods_reach_each_other_by_address_service_and_name", pods::reach_each_other),
        ("a_node_whose_kubelet_is_silent_is_not_ready", faults::a_paused_kubelet),
        ("a_node_that_is_cut_off_is_not_ready_and_reaches_nobody", faults::a_cut_link),
        ("a_release_of_the_chart_passes_blocks_between_two_nodes", chart::first_hit),
        ("a_clean_install_has_no_warning_among_its_events", chart_events::have_no_warning),
        ("all_parts_of_a_release_are_ready_and_say_so", chart::all_is_there),
        ("agents_have_no_privileges_and_write_of_their_own_node_only", chart::what_agents_may),
        ("engines_in_pods_hit_on_their_node_and_on_the_other", chart::engines_hit_everywhere),
        ("raw_devices_are_opened_as_the_cluster_says", chart_devices::are_opened_as_the_cluster_says),
        ("the_charts_seccomp_profile_allows_io_uring_and_the_pool_says_so", chart_changed::allows_io_uring),
        ("a_node_is_drained_within_its_budgets_and_its_blocks_are_on_the_other", chart_drain::by_kubectl),
        (
            "a_removed_device_a_changed_quota_a_new_profile_and_a_tenants_pods_are_followed",
            chart_parts::are_followed,
        ),
        ("a_changed_release_is_taken_back_with_its_blocks", chart_changed::taken_back),
        ("an_agent_that_is_deleted_serves_its_blocks_again", chart_faults::an_agent_comes_back),
        ("an_agent_that_is_killed_under_load_fails_no_request", chart_crash::under_load),
        ("killed_operators_cost_no_local_hit_and_go_on_where_they_were", chart_faults::operators_are_killed),
        ("a_killed_etcd_costs_no_local_hit_and_keeps_its_data", chart_faults::etcd_is_killed),
        ("an_etcd_of_three_goes_on_without_one_and_begins_anew_by_the_recipe", chart_store::of_three),
        ("a_killed_member_costs_no_local_hit_and_is_replaced", chart_faults::a_member_is_killed),
        ("pods_and_engines_go_on_while_the_api_server_is_away", chart_faults::the_api_server_is_away),
        (
            "a_killed_node_costs_the_other_no_local_hit_and_comes_back_with_its_blocks",
            chart_faults::a_node_is_killed,
        ),
        (
            "another_version_comes_one_node_after_the_other_and_fails_no_request_of_busy_engines",
            chart_upgrade::under_load,
        ),
        ("a_version_too_far_is_refused_and_no_pod_is_touched", chart_life::too_far),
        ("an_uninstalled_release_leaves_its_definitions_and_nothing_else", chart_life::removed),
        ("what_is_not_cleaned_up_is_seen", ends::leftovers_are_seen),
    ];
    // Which needs what is built for it alone.
    if std::env::var_os(chart_upgrade::OLDER).is_some() {
        tests =
            vec![("an_older_version_and_this_one_serve_beside_each_other", chart_upgrade::from_an_older_one)];
    }
    let first = Arc::clone(&shared);
    let mut trials = vec![Trial::test("a_killed_laboratory_leaves_what_the_next_start_removes", move || {
        let mut cluster = taken(&first);
        drop(cluster.take());
        *cluster = Some(ends::a_killed_laboratory(NODES));
        Ok(())
    })];
    trials.extend(tests.into_iter().map(|(name, test)| on_the_cluster(name, &shared, test)));
    let last = Arc::clone(&shared);
    trials.push(Trial::test("the_cluster_ends_and_leaves_nothing", move || {
        let cluster = taken(&last).take();
        ends::leaves_nothing(cluster.unwrap_or_else(|| Cluster::start(NODES)));
        Ok(())
    }));
    let conclusion = libtest_mimic::run(&arguments, trials);
    // Whatever was run, it ends before this program does.
    drop(taken(&shared).take());
    conclusion.exit_code()
}

/// A test that fails prints what all programs have logged, and then its own error.
fn on_the_cluster(name: &str, shared: &Shared, test: Test) -> Trial {
    let (shared, name) = (Arc::clone(shared), name.to_owned());
    Trial::test(name.clone(), move || {
        let mut cluster = taken(&shared);
        let cluster = cluster.get_or_insert_with(|| Cluster::start(NODES));
        let started = Instant::now();
        let run = std::panic::AssertUnwindSafe(|| {
            test(cluster);
            say(&format!("took {:.1?}", started.elapsed()));
        });
        if let Err(panic) = std::panic::catch_unwind(run) {
            cluster.show_failure(&name);
            std::panic::resume_unwind(panic);
        }
        Ok(())
    })
}

fn taken(shared: &Shared) -> std::sync::MutexGuard<'_, Option<Cluster>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
