//! The custom resources on a real API server: what the definitions promise, Kubernetes itself does.
//!
//! The tests of this file share one server, which takes seconds to start. So the list of tests is this program's own: the first
//! test starts the server, and it ends with the last one. Each test has names of its own in it, and none changes what others rely on.

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Trial};
use reprise_e2e::{ApiServer, World};

#[path = "resources/admission.rs"]
mod admission;
#[path = "resources/objects.rs"]
mod objects;
#[path = "resources/restarts.rs"]
mod restarts;
#[path = "resources/rights.rs"]
mod rights;
#[path = "resources/rules.rs"]
mod rules;
#[path = "resources/schemas.rs"]
mod schemas;
#[path = "resources/writers.rs"]
mod writers;

/// What the tests share. In the order in which it ends: the server, then its folder.
struct Shared {
    server: ApiServer,
    world: World,
}

impl Shared {
    fn start() -> Shared {
        let world = World::new();
        let server = world.api_server();
        objects::install_definitions(&server);
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

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let shared = Arc::new(OnceLock::new());
    let mut tests = on_the_server![
        shared,
        admission::an_agent_writes_the_cache_node_of_its_own_node_only,
        rules::the_server_decides_on_every_object_of_the_tables_as_they_say,
        schemas::defaults_are_in_what_is_stored,
        schemas::every_definition_is_served,
        schemas::every_kind_shows_its_columns,
        schemas::queue_allocations_are_found_by_their_node,
        writers::spec_and_status_are_written_apart,
    ];
    tests.push(Trial::test(stringify!(restarts::a_killed_server_comes_back_with_what_it_stored), || {
        restarts::a_killed_server_comes_back_with_what_it_stored();
        Ok(())
    }));
    let conclusion = libtest_mimic::run(&arguments, tests);
    drop(shared);
    conclusion.exit_code()
}
