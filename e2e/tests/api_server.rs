//! Tests on a real API server of Kubernetes: the custom resources, and agents as they run in a cluster.
//!
//! The tests of one module share one server, since its start takes seconds. The first test starts it, and it ends with
//! the last one. The modules run one after the other, so that their servers do not run at the same time.

use std::process::ExitCode;

use libtest_mimic::Arguments;
use reprise_e2e::{ApiServer, TestEnv};

/// A server that tests share, and its environment. The fields are dropped in this order.
struct Shared {
    server: ApiServer,
    env: TestEnv,
}

impl Shared {
    /// Starts a server and prepares it for the tests.
    fn start(prepare: fn(&ApiServer)) -> Shared {
        let env = TestEnv::new();
        let server = env.api_server();
        prepare(&server);
        Shared { server, env }
    }
}

/// Creates trials of a module's tests that use the shared server, by their names.
macro_rules! on_the_server {
    ($module:literal, $shared:expr, $prepare:expr, $($test:path),+ $(,)?) => {
        vec![$({
            let shared = std::sync::Arc::clone(&$shared);
            let name = concat!($module, "::", stringify!($test));
            libtest_mimic::Trial::test(name, move || {
                let shared = shared.get_or_init(|| crate::Shared::start($prepare));
                let run = std::panic::AssertUnwindSafe(|| $test(&shared.server));
                if let Err(panic) = std::panic::catch_unwind(run) {
                    shared.env.show_failure(name);
                    std::panic::resume_unwind(panic);
                }
                Ok(())
            })
        }),+]
    };
}

/// Creates trials of a module's tests with their own server.
macro_rules! with_own_server {
    ($module:literal, $($test:path),+ $(,)?) => {
        [$(libtest_mimic::Trial::test(concat!($module, "::", stringify!($test)), || {
            $test();
            Ok(())
        })),+]
    };
}

mod in_cluster;
mod resources;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let resources = resources::run(&arguments);
    let in_cluster = in_cluster::run(&arguments);
    if resources.has_failed() { resources.exit_code() } else { in_cluster.exit_code() }
}
