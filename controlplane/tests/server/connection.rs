//! Lookups over the raw HTTP/2 connection: replies equal those over tonic's channel, and it reconnects after
//! a loss.

use std::time::Instant;

use reprise_controlplane::server::ControlPlane;
use reprise_identity::Security;
use reprise_proto::connection::{Connection, LOOKUP};
use reprise_proto::controlplane::{LookupReply, LookupRequest};
use tonic::{Code, Status};

use crate::harness::{self, PATIENCE};

fn connection(member: &ControlPlane) -> Connection {
    Connection::new(&member.grpc.to_string(), &Security::Plain).expect("an address")
}

async fn lookup(connection: &Connection, keys: Vec<u8>) -> Result<LookupReply, Status> {
    connection.call(LOOKUP, &LookupRequest { keys: keys.into(), asking_node: 0 }).await
}

#[tokio::test]
async fn answers_concurrent_calls_of_all_sizes() {
    let member = harness::start().await;
    let connection = connection(&member);
    let calls = [1, 16, 1000, 8192].into_iter().cycle().take(64).map(|count| {
        let connection = connection.clone();
        tokio::spawn(async move {
            let reply = lookup(&connection, harness::keys(0..count)).await.expect("answered");
            assert_eq!(reply.offsets.len() as u64, count + 1);
        })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.expect("no panic");
    }
    member.shutdown().await;
}

#[tokio::test]
async fn errors_equal_those_of_a_tonic_channel() {
    let member = harness::start().await;
    let lean = lookup(&connection(&member), vec![1; 15]).await.expect_err("refused");
    let request = LookupRequest { keys: vec![1; 15].into(), asking_node: 0 };
    let usual = harness::directory(&member).await.lookup(request).await.expect_err("refused");
    assert_eq!((lean.code(), lean.message()), (Code::InvalidArgument, usual.message()));
    member.shutdown().await;
}

#[tokio::test]
async fn a_lost_connection_fails_with_unavailable_and_later_calls_reconnect() {
    let member = harness::start().await;
    let connection = connection(&member);
    lookup(&connection, harness::keys(0..1)).await.expect("answered");
    let mut config = harness::config();
    config.listen = member.grpc;
    member.shutdown().await;
    let lost = lookup(&connection, harness::keys(0..1)).await.expect_err("the member is stopped");
    assert_eq!(lost.code(), Code::Unavailable, "{lost}");

    let member = ControlPlane::start(config).await.expect("restarted");
    let give_up = Instant::now() + PATIENCE;
    while let Err(status) = lookup(&connection, harness::keys(0..1)).await {
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        assert!(Instant::now() < give_up, "{status}");
    }
    member.shutdown().await;
}
