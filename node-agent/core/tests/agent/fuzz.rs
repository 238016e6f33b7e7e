//! Fuzz targets (`make fuzz`) of the core's sessions and of the recovery of a pool, in the environments of these tests.

mod recovery;
mod session;

#[test]
fn session_requests() {
    reprise_fuzz::check("session_requests", &session::seeds(), session::run);
}

#[test]
fn pool_recovery() {
    reprise_fuzz::check("pool_recovery", &recovery::seeds(), recovery::run());
}
