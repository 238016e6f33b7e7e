//! Fuzz target of registrations of nodes.

use prost::Message as _;
use reprise_policy::peer::PEER_ENDPOINTS_MAX;
use reprise_proto::controlplane::{PeerEndpoint, RegisterRequest};

use super::{NAME_BYTES_MAX, check};

pub(crate) fn seed() -> Vec<Vec<u8>> {
    let endpoint =
        |protocol: &str| PeerEndpoint { protocol: protocol.to_owned(), address: "node-1:7410".to_owned() };
    let request = RegisterRequest {
        name: "node-1".to_owned(),
        peer_endpoints: vec![endpoint("tcp"), endpoint("rdma")],
        admin_address: "node-1:7411".to_owned(),
        failure_domain: "rack-1".to_owned(),
        version: "0.1.0".to_owned(),
    };
    vec![[&[1][..], &request.encode_to_vec()].concat()]
}

/// Checks a registration. Laws: no panic, and an accepted name is within the limits and can be a part of a key.
pub(crate) fn register(message: &[u8]) {
    let Ok(request) = RegisterRequest::decode(message) else { return };
    if check(&request).is_ok() {
        assert!((1..=NAME_BYTES_MAX).contains(&request.name.len()) && !request.name.contains('/'));
        assert!(request.peer_endpoints.len() <= PEER_ENDPOINTS_MAX);
    }
}
