//! Agents as they run in a cluster, against Kubernetes' real API server: the test plays the operator, by writing specs of
//! `CacheNode`s, and the kubelet, by giving each agent the token of a pod on its node.
//!
//! The tests share one server where they leave it alone; each has nodes of its own in it.

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Trial};
use reprise_e2e::{ApiServer, World};

#[path = "in_cluster/absence.rs"]
mod absence;
#[path = "in_cluster/devices.rs"]
mod devices;
#[path = "in_cluster/engines.rs"]
mod engines;
#[path = "in_cluster/identities.rs"]
mod identities;
#[path = "in_cluster/modes.rs"]
mod modes;
#[path = "in_cluster/node.rs"]
mod node;
#[path = "resources/objects.rs"]
#[allow(dead_code, reason = "the tests of the resources use all of it")]
mod objects;
#[path = "in_cluster/pools.rs"]
mod pools;
#[path = "in_cluster/profiles.rs"]
mod profiles;
#[path = "in_cluster/queues.rs"]
mod queues;
#[path = "resources/rights.rs"]
mod rights;

/// What the tests share. In the order in which it ends: the server, then its folder.
struct Shared {
    server: ApiServer,
    world: World,
}

impl Shared {
    fn start() -> Shared {
        let world = World::new();
        let server = world.api_server();
        node::install(&server);
        Shared { server, world }
    }
}

/// The tests that are given the shared server, by their names.
macro_rules! on_the_server {
    ($shared:expr, $($test:path),+ $(,)?) => {
        vec![$({
            let shared: Arc<OnceLock<Shared>> = Arc::clone(&$shared);
            Trial::test(stringify!($test), move || {
                let shared = shared.get_or_init(Shared::start);
                let run = std::panic::AssertUnwindSafe(|| $test(&shared.server));
                if let Err(panic) = std::panic::catch_unwind(run) {
                    shared.world.show_failure(stringify!($test));
                    std::panic::resume_unwind(panic);
                }
                Ok(())
            })
        }),+]
    };
}

/// The tests that have a server of their own, to be mistreated.
macro_rules! alone {
    ($($test:path),+ $(,)?) => {
        [$(Trial::test(stringify!($test), || {
            $test();
            Ok(())
        })),+]
    };
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let shared = Arc::new(OnceLock::new());
    let mut tests = on_the_server![
        shared,
        absence::an_agent_with_the_token_of_another_node_is_refused_in_words_and_serves,
        absence::an_agent_that_is_told_to_stop_says_that_it_leaves,
        absence::what_somebody_forces_into_a_status_is_put_back_and_he_is_named,
        devices::a_device_with_somebody_elses_data_is_left_alone_and_one_that_is_blank_is_used,
        devices::a_device_that_goes_away_is_faulted_and_comes_back_with_its_blocks,
        devices::a_device_that_fails_is_faulted_and_engines_go_on,
        devices::a_pool_of_fewer_devices_than_match_keeps_its_own_and_its_wipe_destroys_no_other,
        devices::devices_that_two_pools_want_go_to_the_first,
        engines::an_engine_that_cannot_be_had_keeps_a_pool_closed_unless_another_may_do,
        identities::a_tenant_that_names_its_pods_is_theirs_alone,
        modes::a_node_follows_the_mode_of_its_spec,
        modes::a_node_is_drained_by_its_spec,
        modes::a_share_to_keep_free_changes_without_a_restart,
        pools::a_pool_comes_and_goes_while_engines_go_on,
        pools::the_capacity_that_is_reported_is_that_of_the_pools_that_are_open_now,
        pools::a_killed_agent_finds_its_blocks_again,
        pools::a_file_that_is_not_there_at_the_start_is_waited_for_and_made_anew_only_by_a_pool_that_begins_anew,
        pools::a_wiped_pool_is_destroyed_and_said_so,
        pools::a_pool_that_changes_its_engine_is_opened_again_with_its_blocks,
        profiles::a_profile_is_in_effect_once_its_content_has_come_and_a_wrong_one_is_refused_in_words,
        queues::queue_pairs_are_kept_while_the_spec_says_so_and_not_for_two_that_cannot_both_be,
    ];
    tests.extend(alone![
        absence::an_agent_goes_on_and_starts_again_without_the_api_server,
        identities::while_the_server_is_away_only_pods_that_it_has_known_are_a_kept_tenant,
    ]);
    let conclusion = libtest_mimic::run(&arguments, tests);
    drop(shared);
    conclusion.exit_code()
}
