//! Example of a hint.

use reprise_proto::local;

use super::run;

/// Hint with requests that wait, and some that have begun.
pub(super) fn message() -> local::ReportLookahead {
    local::ReportLookahead {
        version: 2,
        iteration_us: 20_000,
        requests: vec![local::WaitingRequest {
            request: 7,
            iterations: 3,
            confidence_permille: 900,
            keys: run(0x11, 16),
        }],
        cancelled: vec![5],
        all_ranks: true,
        begun: Some(local::BegunRequests {
            requests: vec![
                local::BegunRequest { request: 4, preempted: false, first: 2, keys: run(0x11, 16) },
                local::BegunRequest { request: 3, preempted: true, first: 0, keys: run(0, 0) },
            ],
        }),
    }
}
