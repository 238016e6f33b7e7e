//! The client against a control plane played by the test: what it sends, what it tells the agent, how it recovers.
//!
//! The fake member is a real gRPC server on loopback whose answers the test chooses; the real one is tested with the
//! same wire types in its own crate, and both together in `e2e`.

use super::*;

#[test]
fn an_endpoint_that_is_no_address_is_refused_with_words() {
    let settings = DirectorySettings {
        endpoint: "not an address".to_owned(),
        registration: Registration::default(),
        connect_timeout: Duration::from_secs(1),
        call_timeout: Duration::from_secs(1),
        changes_queued_max: CHANGES_QUEUED_MAX,
        lookups_max: LOOKUPS_MAX,
    };
    let refused = DirectoryClient::start(settings, Arc::new(|_| {})).err().expect("refused");
    assert!(refused.to_string().contains("http://host:port"), "{refused}");
}
