//! Queue pairs that the client drives itself: descriptors in both directions, revocation, and invalid grants.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use reprise_buffers::{MappedRegion, recv_with_fds};
use reprise_client::queues::DataFormat;
use reprise_client::{Client, ClientError};
use reprise_proto::local::{self, request, response};

use crate::fake_agent::{FakeAgent, LONG, Peer};

const QUEUE_BYTES: u64 = 8192;
const DOORBELLS_BYTES: u64 = 12_288;

fn queue() -> local::GrantedQueue {
    local::GrantedQueue {
        queue: 5,
        entries: 16,
        bytes: QUEUE_BYTES,
        address: 65_536,
        completions_at: 4096,
        lists_at: 8192,
        submission_doorbell: 4136,
        completion_doorbell: 4140,
    }
}

fn grant(queues: Vec<local::GrantedQueue>) -> local::QueuesGranted {
    local::QueuesGranted {
        generation: 7,
        queues,
        namespace: 1,
        block_bytes: 512,
        transfer_max: 1 << 20,
        format: local::DataFormat::Sgl as i32,
        doorbells_bytes: DOORBELLS_BYTES,
        memory_address: 131_072,
        emulated: true,
    }
}

/// Receives the request of a registration and its descriptor, and answers it.
fn register(peer: &mut Peer) -> OwnedFd {
    let mut descriptors = Vec::new();
    let mut byte = [0; 1];
    // The descriptor arrives with the first byte of the frame, so that byte is received here.
    assert_eq!(recv_with_fds(peer.socket.as_fd(), &mut byte, &mut descriptors).expect("a byte"), 1);
    let (id, body) = peer.receive_after(byte[0]).expect("a registration");
    assert!(matches!(body, request::Body::RegisterMemory(local::RegisterMemory { bytes: 8192 })), "{body:?}");
    peer.reply(id, response::Body::MemoryRegistered(local::MemoryRegistered { memory: 3 }));
    descriptors.pop().expect("a descriptor came with the request")
}

/// Answers a request for queue pairs with a grant and its files.
fn answer(peer: &mut Peer, granted: local::QueuesGranted) -> Vec<OwnedFd> {
    let (id, body) = peer.expect("a request for queue pairs");
    let request::Body::RequestQueues(local::RequestQueues { device: 2, pairs: 1, depth: 16, memory: 3 }) =
        body
    else {
        panic!("unexpected {body:?}")
    };
    let bytes = [DOORBELLS_BYTES].into_iter().chain(granted.queues.iter().map(|queue| queue.bytes));
    let files: Vec<OwnedFd> = bytes.map(|bytes| MappedRegion::allocate(bytes).expect("memory").1).collect();
    let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    peer.reply_with(id, response::Body::QueuesGranted(granted), &borrowed);
    files
}

#[test]
fn memory_is_registered_and_granted_queue_pairs_are_mapped_until_they_are_returned() {
    let (sent, files) = channel();
    let agent = FakeAgent::serve(move |peer| {
        sent.send(vec![register(peer)]).expect("the test waits");
        sent.send(answer(peer, grant(vec![queue()]))).expect("the test waits");
        let (id, body) = peer.expect("a return");
        assert!(
            matches!(body, request::Body::ReturnQueues(local::ReturnQueues { generation: 7 })),
            "{body:?}"
        );
        peer.reply(id, response::Body::QueuesReturned(local::QueuesReturned {}));
    });
    let client = agent.connect();
    let (own, descriptor) = MappedRegion::allocate(8192).expect("memory");
    let memory = client.register_memory(descriptor, 8192).expect("registered");
    let theirs = files.recv().expect("the agent has it").pop().expect("one");
    assert_eq!(File::from(theirs).metadata().expect("readable").len(), own.bytes());

    let granted = client.request_queues(2, (1, 16), &memory).expect("granted");
    assert_eq!((granted.generation(), granted.memory_address()), (7, 131_072));
    assert_eq!((granted.device().format, granted.device().device), (DataFormat::Sgl, 2));
    let pair = &granted.queues()[0];
    assert_eq!((pair.id, pair.entries, pair.completion_doorbell), (5, 16, 4140));
    let file = files.recv().expect("the agent has it").pop().expect("the queue pair");
    pair.memory.span(4096, 4).expect("inside").copy_in(b"test").expect("writable");
    let theirs = MappedRegion::map_sealed(file, QUEUE_BYTES).expect("mapped");
    let mut read = [0; 4];
    theirs.span(4096, 4).expect("inside").copy_out(&mut read);
    assert_eq!(&read, b"test", "both processes map the same memory");
    client.return_queues(granted).expect("returned");
    agent.end(client);
}

#[test]
fn queue_pairs_may_take_longer_than_other_calls() {
    const CALL: Duration = Duration::from_millis(50);
    let agent = FakeAgent::serve(move |peer| {
        drop(register(peer));
        std::thread::sleep(10 * CALL);
        let files = answer(peer, grant(vec![queue()]));
        let (id, body) = peer.expect("a return");
        assert!(matches!(body, request::Body::ReturnQueues(_)), "{body:?}");
        std::thread::sleep(10 * CALL);
        peer.reply(id, response::Body::QueuesReturned(local::QueuesReturned {}));
        drop(files);
    });
    let client = Client::connect(agent.options().call_timeout(CALL)).expect("a session");
    let memory =
        client.register_memory(MappedRegion::allocate(8192).expect("memory").1, 8192).expect("registered");
    let granted = client.request_queues(2, (1, 16), &memory).expect("granted after ten timeouts");
    client.return_queues(granted).expect("returned after ten timeouts");
    agent.end(client);
}

#[test]
fn return_without_an_answer_ends_the_session_so_that_no_extent_is_freed() {
    let agent = FakeAgent::serve(move |peer| {
        drop(register(peer));
        let files = answer(peer, grant(vec![queue()]));
        let mut returns = 0;
        while let Some((_, body)) = peer.receive() {
            assert!(matches!(body, request::Body::ReturnQueues(_)), "{body:?}");
            returns += 1;
        }
        // Without an answer, and nothing follows.
        assert_eq!(returns, 2, "the call, and the drop of the grant");
        drop(files);
    });
    let client = agent.connect();
    let memory =
        client.register_memory(MappedRegion::allocate(8192).expect("memory").1, 8192).expect("registered");
    let granted = client.request_queues(2, (1, 16), &memory).expect("granted");
    let error = client.return_queues_within(granted, Duration::from_millis(100)).expect_err("no answer");
    assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    assert!(!client.is_alive(), "its leases and pins must stay with the agent");
    agent.end(client);
}

#[test]
fn revoked_grant_names_its_reason() {
    let agent = FakeAgent::serve(move |peer| {
        drop(register(peer));
        let files = answer(peer, grant(vec![queue()]));
        for generation in [99, 7] {
            let reason = format!("device {generation} is closed");
            peer.reply(0, response::Body::QueuesRevoked(local::QueuesRevoked { generation, reason }));
        }
        while peer.receive().is_some() {}
        drop(files);
    });
    let client = agent.connect();
    let memory =
        client.register_memory(MappedRegion::allocate(8192).expect("memory").1, 8192).expect("registered");
    let granted = client.request_queues(2, (1, 16), &memory).expect("granted");
    let start = Instant::now();
    while granted.revoked().is_none() {
        assert!(start.elapsed() < LONG, "the notice does not arrive");
        std::thread::yield_now();
    }
    assert_eq!(
        granted.revoked().as_deref(),
        Some("device 7 is closed"),
        "another generation is not this grant"
    );
    client.close();
    drop(granted);
    agent.end(client);
}

#[test]
fn revocation_that_overtakes_its_grant_is_remembered() {
    let agent = FakeAgent::serve(move |peer| {
        drop(register(peer));
        for generation in (1..=7).rev() {
            let reason = format!("device {generation} is closed");
            peer.reply(0, response::Body::QueuesRevoked(local::QueuesRevoked { generation, reason }));
        }
        let files = answer(peer, grant(vec![queue()]));
        while peer.receive().is_some() {}
        drop(files);
    });
    let client = agent.connect();
    let memory =
        client.register_memory(MappedRegion::allocate(8192).expect("memory").1, 8192).expect("registered");
    let granted = client.request_queues(2, (1, 16), &memory).expect("granted");
    assert_eq!(granted.revoked().as_deref(), Some("device 7 is closed"));
    client.close();
    drop(granted);
    agent.end(client);
}

#[test]
fn grant_outside_of_its_memory_ends_the_session() {
    let wrong = [
        local::GrantedQueue { entries: 1024, ..queue() },
        local::GrantedQueue { lists_at: 4096 + 16 * 15, ..queue() },
        local::GrantedQueue { completion_doorbell: DOORBELLS_BYTES, ..queue() },
        local::GrantedQueue { queue: 1 << 16, ..queue() },
    ];
    for queue in wrong {
        let agent = FakeAgent::serve(move |peer| {
            drop(register(peer));
            drop(answer(peer, grant(vec![queue])));
            while peer.receive().is_some() {}
        });
        let client = agent.connect();
        let memory = client
            .register_memory(MappedRegion::allocate(8192).expect("memory").1, 8192)
            .expect("registered");
        let error = client.request_queues(2, (1, 16), &memory).expect_err("invalid");
        assert!(matches!(error, ClientError::Protocol(_)), "{error}");
        assert!(!client.is_alive());
        agent.end(client);
    }
}
