//! The custom resources on a real API server: definitions, rules, defaults, columns and rights.
//!
//! The tests share one server, since its start takes seconds. The first test starts it, and it ends with the
//! last one. Each test uses its own names, and none changes what others rely on.

use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Conclusion};

mod admission;
mod api_server_restart;
pub(crate) mod objects;
pub(crate) mod rights;
mod rules;
mod schemas;
mod writers;

/// Runs the tests of this module.
pub(crate) fn run(arguments: &Arguments) -> Conclusion {
    let shared = Arc::new(OnceLock::new());
    let mut tests = on_the_server![
        "resources",
        shared,
        objects::install_definitions,
        admission::an_agent_writes_the_cache_node_of_its_own_node_only,
        rules::the_server_accepts_and_rejects_the_objects_of_the_tables_as_expected,
        schemas::stored_objects_contain_the_defaults,
        schemas::every_definition_is_served,
        schemas::every_kind_shows_its_columns,
        schemas::queue_allocations_are_found_by_their_node,
        writers::spec_and_status_are_written_separately,
    ];
    tests.extend(with_own_server!["resources", api_server_restart::a_killed_server_returns_with_its_data]);
    let conclusion = libtest_mimic::run(arguments, tests);
    drop(shared);
    conclusion
}
