//! Fuzz target of the messages of an agent (`make fuzz`), as the client's reader thread handles them.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use prost::Message as _;
use reprise_proto::local::{self, Response, response::Body};

use super::{Connection, Descriptors};
use crate::extents::statuses;
use crate::wire::FrameReader;

#[test]
fn client_messages() {
    reprise_fuzz::check("client_messages", &seeds(), run);
}

fn seeds() -> Vec<Vec<u8>> {
    let failure = local::Failure { kind: local::FailureKind::Busy as i32, message: "full".to_owned() };
    let durable = local::Durable { ticket: 4, durable: 1, ..Default::default() };
    let committed = local::Committed { statuses: vec![1, 2], ..Default::default() };
    let revoked = local::QueuesRevoked { generation: 3, reason: "drained".to_owned() };
    let bodies = [
        (0, Body::Failure(failure)),
        (0, Body::Durable(durable)),
        (0, Body::QueuesRevoked(revoked)),
        (1, Body::Committed(committed)),
        (1, Body::Reserved(local::Reserved::default())),
        (1, Body::Loaded(local::Loaded { load: 7, ..Default::default() })),
        (1, Body::Welcome(local::Welcome::default())),
        (1, Body::Pinned(local::Pinned::default())),
        (1, Body::QueuesGranted(local::QueuesGranted::default())),
    ];
    let framed = |(id, body)| {
        let message = Response { id, body: Some(body) }.encode_to_vec();
        [&(message.len() as u32).to_le_bytes()[..], &message].concat()
    };
    let frames: Vec<Vec<u8>> = bodies.into_iter().map(framed).collect();
    [frames.clone(), vec![frames.concat()]].concat()
}

/// Reads a stream of messages. The law: it ends the session or is delivered, and never panics.
fn run(input: &[u8]) {
    let (near, _far) = UnixStream::pair().expect("a socket pair");
    let connection = Arc::new(Connection::new(near).expect("a socket"));
    let (mut frames, mut descriptors) = (FrameReader::new(), Descriptors::default());
    let mut rest = input;
    while !rest.is_empty() {
        let space = frames.space();
        // In two receives, so that a message may arrive in parts.
        let count = space.len().min(rest.len().div_ceil(2));
        space[..count].copy_from_slice(&rest[..count]);
        frames.received(count);
        rest = &rest[count..];
        loop {
            match frames.next_frame() {
                Ok(Some(frame)) => {
                    if let Ok(Response { body: Some(Body::Committed(committed)), .. }) =
                        Response::decode(&frame[..])
                    {
                        let count = committed.statuses.len();
                        assert!(
                            statuses(&committed, count).is_ok_and(|known| known.len() == count) || count > 0
                        );
                    }
                    if let Err(error) = connection.deliver(frame, &mut descriptors) {
                        assert!(!error.to_string().is_empty());
                        return;
                    }
                }
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}
