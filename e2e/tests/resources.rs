//! The custom resources on a real API server: definitions, rules, defaults, columns and rights.
//!
//! The tests share one server, since its start takes seconds. The first test starts it, and it ends with the
//! last one. Each test uses its own names, and none changes what others rely on.

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Trial};
use reprise_e2e::{ApiServer, TestEnv};

#[path = "resources/admission.rs"]
mod admission;
#[path = "resources/api_server_restart.rs"]
mod api_server_restart;
#[path = "resources/objects.rs"]
mod objects;
#[path = "resources/rights.rs"]
mod rights;
#[path = "resources/rules.rs"]
mod rules;
#[path = "resources/schemas.rs"]
mod schemas;
#[path = "resources/writers.rs"]
mod writers;

/// The shared server and its environment. The fields are dropped in this order.
struct Shared {
    server: ApiServer,
    env: TestEnv,
}

impl Shared {
    fn start() -> Shared {
        let env = TestEnv::new();
        let server = env.api_server();
        objects::install_definitions(&server);
        Shared { server, env }
    }
}

/// Creates trials of tests that use the shared server, by their names.
macro_rules! on_the_server {
    ($shared:expr, $($test:path),+ $(,)?) => {
        vec![$({
            let shared: Arc<OnceLock<Shared>> = Arc::clone(&$shared);
            Trial::test(stringify!($test), move || {
                let shared = shared.get_or_init(Shared::start);
                let run = std::panic::AssertUnwindSafe(|| $test(&shared.server));
                if let Err(panic) = std::panic::catch_unwind(run) {
                    shared.env.show_failure(stringify!($test));
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
        rules::the_server_accepts_and_rejects_the_objects_of_the_tables_as_expected,
        schemas::stored_objects_contain_the_defaults,
        schemas::every_definition_is_served,
        schemas::every_kind_shows_its_columns,
        schemas::queue_allocations_are_found_by_their_node,
        writers::spec_and_status_are_written_separately,
    ];
    tests.push(Trial::test(stringify!(api_server_restart::a_killed_server_returns_with_its_data), || {
        api_server_restart::a_killed_server_returns_with_its_data();
        Ok(())
    }));
    let conclusion = libtest_mimic::run(&arguments, tests);
    drop(shared);
    conclusion.exit_code()
}
